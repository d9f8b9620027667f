//! Analyses on demand, as the page draws them, and embeddings.
//!
//! The model belongs to the engine's thread: an analysis asks it for a few tokens at a time, between the steps of the texts that are being
//! written, and does everything else on a thread of its own. One is made at a time, so that memory stays bounded.

use std::ops::ControlFlow;
use std::sync::Arc;

use candle_gpt2_api::{ApiError, Endpoint, Reply, ServedModel, Work};
use candle_gpt2_engine::LoadedModel;

use crate::busy::looks_full;
use crate::engine::Engine;
use crate::fault::blocking;
use crate::http::receive::Received;
use crate::metrics::Metrics;
use crate::turns::Turns;

/// Bytes of a body that asks for a look: more than those of the longest text that one is taken at.
const MAX_BODY: usize = 64 << 10;
/// Tokens that are computed at once, while texts that are written wait.
const TOKENS_AT_ONCE: usize = 32;

/// Who makes analyses, and who waits for them.
pub(crate) struct Analyses<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) served: &'a Arc<ServedModel>,
    pub(crate) turns: &'a Turns,
    pub(crate) metrics: &'a Metrics,
}

impl Analyses<'_> {
    /// The answer to the request with this id, when its turn has come; `count` hears of the tokens that it counts. Dropping it ends the
    /// analysis, as when its client is gone.
    pub(crate) async fn answer(
        &self,
        endpoint: Endpoint,
        received: Received,
        id: &Arc<str>,
        count: impl FnOnce(usize),
    ) -> Result<Reply, ApiError> {
        if endpoint != Endpoint::Embeddings && received.bytes().len() > MAX_BODY {
            let message = format!("a look is taken at a short text: its body has at most {MAX_BODY} bytes");
            return Err(ApiError::new(413, message).with_code("body_too_large"));
        }
        let _place = self.turns.places(1).ok_or_else(|| {
            self.metrics.reject("looks_full");
            looks_full()
        })?;
        // Also held by what is being computed: it goes on when nobody waits for it any more.
        let turn = Arc::new(self.turns.turn().await?);
        let _begun = self.engine.begin_analysis()?;
        let served = Arc::clone(self.served);
        let read = move || served.read(endpoint, received.bytes(), None);
        let mut analysis = match blocking(id, read).await? {
            Work::Analysis(analysis) => analysis,
            Work::Reply(reply) => return Ok(reply),
            _ => return Err(ApiError::failed("texts or labels, at the path of an analysis")),
        };
        count(analysis.prompt_tokens());
        loop {
            let held = Arc::clone(&turn);
            let computed = move |model: &LoadedModel| {
                let _held = held;
                analysis.compute(model, TOKENS_AT_ONCE)
            };
            analysis = self.engine.ask(id, computed).await?;
            let (held, served) = (Arc::clone(&turn), Arc::clone(self.served));
            let concluded = move || {
                let _held = held;
                analysis.conclude(&served)
            };
            match blocking(id, concluded).await? {
                ControlFlow::Continue(rest) => analysis = rest,
                ControlFlow::Break(reply) => return Ok(reply),
            }
        }
    }
}
