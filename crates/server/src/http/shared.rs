//! State shared within a server, a connection or a request.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_gpt2_api::{ApiError, ServedModel, Warnings};
use tokio::sync::watch;

use super::access::AccessControl;
use super::activations::Activations;
use super::body_memory::BodyMemory;
use super::listener::Listener;
use super::peer::Peer;
use super::record::{RequestStats, gone};
use super::slots::Activity;
use crate::ServerOptions;
use crate::backend::Backend;
use crate::busy::draining;
use crate::concurrency::ConcurrencyLimit;
use crate::log::Shortened;
use crate::metrics::Metrics;
use crate::threads::RequestThreads;

/// Maximum number of waiting and running analyses.
const MAX_ANALYSES: usize = 9;

/// State shared by all connections.
pub(crate) struct Shared {
    pub(super) options: ServerOptions,
    pub(super) backend: Backend,
    pub(super) served: Arc<ServedModel>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) access: AccessControl,
    pub(super) phase: watch::Sender<Phase>,
    /// Number of accepted requests whose responses are not complete yet.
    pub(super) calls: watch::Sender<usize>,
    pub(super) body_memory: Arc<BodyMemory>,
    pub(super) activations: Arc<Activations>,
    /// Analysis queue; analyses run one at a time to bound memory.
    pub(super) looks: ConcurrencyLimit,
    pub(super) threads: RequestThreads,
    pub(super) ids: AtomicU64,
}

/// Phase in a server's lifecycle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    Serving,
    /// Only running requests continue.
    Draining,
    /// Connections are being closed.
    Ending,
}

/// State shared by the requests on a connection.
pub(super) struct Connection {
    pub(super) peer: Arc<Peer>,
    pub(super) activity: Arc<Activity>,
    /// Whether the connection exceeds the limit and may query only the server's health and metrics.
    pub(super) is_surplus: bool,
}

/// Client that sent a request.
#[derive(Clone)]
pub(super) struct Caller {
    /// Id of the request.
    pub(super) id: Arc<str>,
    pub(super) shared: Arc<Shared>,
    pub(super) peer: Arc<Peer>,
    pub(super) stats: Arc<RequestStats>,
    /// Number of the client's API key. Clients with the same key share the KV cache for common prefixes.
    pub(super) key: u64,
}

impl Caller {
    /// Awaits `work` until the client disconnects or the server reaches `phase`.
    pub(super) async fn until<T>(
        &self,
        phase: Phase,
        work: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        tokio::select! {
            biased;
            done = work => done,
            () = self.peer.closed() => Err(gone()),
            () = self.shared.reached(phase) => Err(draining()),
        }
    }

    /// Logs the warnings about a request that is served despite them.
    ///
    /// Warnings contain field names but never a text.
    pub(super) fn log_warnings(&self, warnings: &Warnings) {
        if !warnings.is_empty() {
            tracing::warn!(request_id = %self.id, warnings = %Shortened(warnings));
        }
    }
}

impl Shared {
    pub(crate) fn new(
        options: ServerOptions,
        listener: &Listener,
        backend: Backend,
        served: ServedModel,
        metrics: Arc<Metrics>,
    ) -> Self {
        let served = Arc::new(served);
        Self {
            access: AccessControl::new(&options, listener.loopback()),
            body_memory: Arc::new(BodyMemory::new(options.max_body)),
            activations: Arc::new(Activations::new(options.api.limits.max_activation_bytes)),
            looks: ConcurrencyLimit::new(1, MAX_ANALYSES, options.timeouts.queue),
            threads: RequestThreads::new(
                Arc::clone(&served),
                Arc::clone(&metrics),
                options.queue,
                options.timeouts.queue,
            ),
            options,
            backend,
            served,
            metrics,
            phase: watch::Sender::new(Phase::Serving),
            calls: watch::Sender::new(0),
            ids: AtomicU64::new(0),
        }
    }

    pub(super) fn is_draining(&self) -> bool {
        *self.phase.borrow() != Phase::Serving
    }

    pub(super) fn is_ending(&self) -> bool {
        *self.phase.borrow() == Phase::Ending
    }

    /// Waits until the server reaches a phase.
    pub(super) async fn reached(&self, phase: Phase) {
        // Cannot fail because `self` owns the sender.
        _ = self.phase.subscribe().wait_for(|reached| *reached >= phase).await;
    }

    /// Returns a unique, unpredictable request id.
    pub(super) fn fresh_id(&self) -> Arc<str> {
        let mut hasher = RandomState::new().build_hasher();
        hasher.write_u64(self.ids.fetch_add(1, Ordering::Relaxed));
        format!("req-{:016x}", hasher.finish()).into()
    }
}
