//! Analyses on demand: as the page draws them, embeddings, labels.
//!
//! A language model belongs to the engine's thread: an analysis asks it for a few tokens at a time, between the steps of the texts that
//! are being written, and does everything else on a thread of its own. One is made at a time, so that memory stays bounded. Of labels,
//! which keep next to nothing, one batch is.

use std::ops::ControlFlow;
use std::sync::Arc;

use candle_gpt2_api::{ApiError, Endpoint, Reply, ServedModel, Work};
use candle_gpt2_engine::LoadedModel;

use crate::backend::Backend;
use crate::busy::{looks_full, queue_full};
use crate::fault::blocking;
use crate::http::receive::Received;
use crate::metrics::Metrics;
use crate::threads::RequestThreads;
use crate::turns::{Places, Turns};

/// Bytes of a body that asks for a look: more than those of the longest text that one is taken at.
const MAX_BODY: usize = 64 << 10;
/// Tokens that are computed at once, while texts that are written wait.
const TOKENS_AT_ONCE: usize = 32;

/// Who makes analyses, and who waits for them.
pub(crate) struct Analyses<'a> {
    pub(crate) backend: &'a Backend,
    pub(crate) served: &'a Arc<ServedModel>,
    pub(crate) turns: &'a Turns,
    pub(crate) threads: &'a RequestThreads,
    pub(crate) metrics: &'a Metrics,
}

impl Analyses<'_> {
    /// The answer to the request with this id, when its turn has come; `count` is called with the tokens that it counts. Dropping it ends the
    /// analysis, as when its client is gone.
    pub(crate) async fn answer(
        &self,
        endpoint: Endpoint,
        received: Received,
        id: &Arc<str>,
        count: impl FnOnce(usize),
    ) -> Result<Reply, ApiError> {
        self.served.check_asked(endpoint)?;
        let is_look = !matches!(endpoint, Endpoint::Embeddings | Endpoint::Classify);
        if is_look && received.as_ref().len() > MAX_BODY {
            let message = format!("analyses are for short texts: the body may have at most {MAX_BODY} bytes");
            return Err(ApiError::new(413, message).with_code("body_too_large"));
        }
        let alone = match self.backend {
            Backend::Texts(engine) => {
                let places = self.places(self.turns, 1, "looks_full", looks_full)?;
                // The computation holds it too, and runs to its end after its client has gone.
                let turn = Arc::new(self.turns.turn().await?);
                Some((places, turn, engine.begin_analysis()?))
            }
            Backend::Labels(_) => None,
        };
        let turn = alone.as_ref().map(|(_, turn, _)| Arc::clone(turn));
        let read = self.threads.read(id, endpoint, received, None, Ok);
        let mut analysis = match read.await? {
            Work::Analysis(analysis) => analysis,
            Work::Reply(reply) => return Ok(reply),
            Work::Texts(_) => return Err(ApiError::failed("texts, at the path of an analysis")),
        };
        let _places = match self.backend {
            Backend::Labels(labels) => {
                Some(self.places(&labels.turns, analysis.texts(), "queue_full", || queue_full(None))?)
            }
            Backend::Texts(_) => None,
        };
        count(analysis.prompt_tokens());
        loop {
            analysis = match self.backend {
                Backend::Labels(labels) => labels.compute(id, analysis).await?,
                Backend::Texts(engine) => {
                    let held = turn.clone();
                    let computed = move |model: &LoadedModel| {
                        let _held = held;
                        analysis.compute(model, TOKENS_AT_ONCE)
                    };
                    engine.ask(id, computed).await?
                }
            };
            let (held, served) = (turn.clone(), Arc::clone(self.served));
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

    fn places<'t>(
        &self,
        turns: &'t Turns,
        count: usize,
        reason: &'static str,
        refusal: fn() -> ApiError,
    ) -> Result<Places<'t>, ApiError> {
        turns.places(count).ok_or_else(|| {
            self.metrics.reject(reason);
            refusal()
        })
    }
}
