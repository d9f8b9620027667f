//! Analyses on demand: views for the web page, embeddings and labels.
//!
//! The engine thread owns the language model. Between decode steps, it computes a few tokens at a time for an
//! analysis, which does everything else on its own thread. Analyses run one at a time to bound memory. Labels
//! need almost no memory, so classification requests overlap, and only their batches run one at a time.

use std::ops::ControlFlow;
use std::sync::Arc;

use candle_gpt2_api::{ApiError, Endpoint, Reply, ServedModel, Work};
use candle_gpt2_engine::LoadedModel;

use crate::backend::Backend;
use crate::busy::{looks_full, queue_full};
use crate::concurrency::{ConcurrencyLimit, QueueSlots};
use crate::fault::blocking;
use crate::http::receive::Received;
use crate::metrics::Metrics;
use crate::threads::RequestThreads;

/// Maximum body size for a view, in bytes; large enough for the longest accepted text.
const MAX_BODY: usize = 64 << 10;
/// Number of tokens computed in one step, during which completions wait.
const TOKENS_AT_ONCE: usize = 32;

/// Resources for running analyses.
pub(crate) struct Analyses<'a> {
    pub(crate) backend: &'a Backend,
    pub(crate) served: &'a Arc<ServedModel>,
    pub(crate) limit: &'a ConcurrencyLimit,
    pub(crate) threads: &'a RequestThreads,
    pub(crate) metrics: &'a Metrics,
}

impl Analyses<'_> {
    /// Waits for a permit, then runs the analysis for the request `id`.
    ///
    /// Calls `count` with the number of prompt tokens. Dropping the future, for example when the client
    /// disconnects, cancels the analysis.
    pub(crate) async fn answer(
        &self,
        endpoint: Endpoint,
        received: Received,
        id: &Arc<str>,
        count: impl FnOnce(usize),
    ) -> Result<Reply, ApiError> {
        self.served.check_endpoint(endpoint)?;
        let is_look = !matches!(endpoint, Endpoint::Embeddings | Endpoint::Classify);
        if is_look && received.as_ref().len() > MAX_BODY {
            let message =
                format!("an analysis request body may have at most {MAX_BODY} bytes; shorten the text");
            return Err(ApiError::new(413, message).with_code("body_too_large"));
        }
        let alone = match self.backend {
            Backend::Texts(engine) => {
                let slots = self.reserve(self.limit, 1, "looks_full", looks_full)?;
                // Each computation also holds the permit, because it runs to completion even if its client
                // disconnects.
                let permit = Arc::new(self.limit.acquire().await?);
                Some((slots, permit, engine.begin_analysis()?))
            }
            Backend::Labels(_) => None,
        };
        let permit = alone.as_ref().map(|(_, permit, _)| Arc::clone(permit));
        let read = self.threads.read(id, endpoint, received, None, Ok);
        let mut analysis = match read.await? {
            Work::Analysis(analysis) => analysis,
            Work::Reply(reply) => return Ok(reply),
            Work::Texts(_) => return Err(ApiError::failed("an analysis endpoint returned completions")),
        };
        let _slots = match self.backend {
            Backend::Labels(labels) => {
                Some(self.reserve(&labels.limit, analysis.texts(), "queue_full", || queue_full(None))?)
            }
            Backend::Texts(_) => None,
        };
        count(analysis.prompt_tokens());
        loop {
            analysis = match self.backend {
                Backend::Labels(labels) => labels.compute(id, analysis).await?,
                Backend::Texts(engine) => {
                    let held = permit.clone();
                    let compute = move |model: &LoadedModel| {
                        let _held = held;
                        analysis.compute(model, TOKENS_AT_ONCE)
                    };
                    engine.ask(id, compute).await?
                }
            };
            let (held, served) = (permit.clone(), Arc::clone(self.served));
            let conclude = move || {
                let _held = held;
                analysis.conclude(&served)
            };
            match blocking(id, conclude).await? {
                ControlFlow::Continue(rest) => analysis = rest,
                ControlFlow::Break(reply) => return Ok(reply),
            }
        }
    }

    fn reserve<'t>(
        &self,
        limit: &'t ConcurrencyLimit,
        count: usize,
        reason: &'static str,
        refusal: fn() -> ApiError,
    ) -> Result<QueueSlots<'t>, ApiError> {
        limit.reserve(count).ok_or_else(|| {
            self.metrics.reject(reason);
            refusal()
        })
    }
}
