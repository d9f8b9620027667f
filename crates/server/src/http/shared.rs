//! What requests share: all of a server, those of a connection, and what a route knows of the client.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_gpt2_api::{ApiError, ServedModel, Warnings};
use tokio::sync::watch;

use super::activations::Activations;
use super::gate::Gate;
use super::listener::Listener;
use super::peer::Peer;
use super::record::{Numbers, gone};
use super::rooms::Rooms;
use super::seats::Activity;
use crate::ServerOptions;
use crate::backend::Backend;
use crate::busy::draining;
use crate::log::Shortened;
use crate::metrics::Metrics;
use crate::threads::RequestThreads;
use crate::turns::Turns;

/// Analyses that wait or are made.
const MOST_LOOKS: usize = 9;

/// What all connections share.
pub(crate) struct Shared {
    pub(super) options: ServerOptions,
    pub(super) backend: Backend,
    pub(super) served: Arc<ServedModel>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) gate: Gate,
    pub(super) phase: watch::Sender<Phase>,
    /// Calls that the engine has accepted and that are not answered.
    pub(super) calls: watch::Sender<usize>,
    pub(super) rooms: Arc<Rooms>,
    pub(super) activations: Arc<Activations>,
    /// Analyses, of which one is made at a time, so that memory stays bounded.
    pub(super) looks: Turns,
    pub(super) threads: RequestThreads,
    pub(super) ids: AtomicU64,
}

/// The state of a server between its start and its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    Serving,
    /// What runs is served to its end.
    Draining,
    /// Connections close.
    Ending,
}

/// What the requests of a connection share.
pub(super) struct Connection {
    pub(super) peer: Arc<Peer>,
    pub(super) activity: Arc<Activity>,
    /// Whether all places of connections were taken when it came, so that it can ask for the server's health and little else.
    pub(super) is_surplus: bool,
}

/// The client, as far as a route needs to know.
#[derive(Clone)]
pub(super) struct Caller {
    /// That of the request.
    pub(super) id: Arc<str>,
    pub(super) shared: Arc<Shared>,
    pub(super) peer: Arc<Peer>,
    pub(super) numbers: Arc<Numbers>,
    /// The number of its key. Callers with the same one share what was computed of equal beginnings.
    pub(super) key: u64,
}

impl Caller {
    /// Awaits `work` until the client leaves, or the server reaches a phase in which the work is no longer wanted.
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

    /// Logs the warnings of a request that is answered anyway. They contain field names, never a text.
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
            gate: Gate::new(&options, listener.loopback()),
            rooms: Arc::new(Rooms::new(options.max_body)),
            activations: Arc::new(Activations::new(options.api.limits.max_activation_bytes)),
            looks: Turns::new(1, MOST_LOOKS, options.timeouts.queue),
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

    /// Returns when the server reaches this phase.
    pub(super) async fn reached(&self, phase: Phase) {
        // The sender is here, so this does not fail.
        _ = self.phase.subscribe().wait_for(|reached| *reached >= phase).await;
    }

    /// A number for a request that has none: not to be guessed, and another one for each.
    pub(super) fn fresh_id(&self) -> Arc<str> {
        let mut hasher = RandomState::new().build_hasher();
        hasher.write_u64(self.ids.fetch_add(1, Ordering::Relaxed));
        format!("req-{:016x}", hasher.finish()).into()
    }
}
