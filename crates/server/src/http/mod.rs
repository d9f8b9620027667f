//! HTTP: connections, their limits, who may ask, what answers, and the end.

mod body;
mod complete;
mod connection;
mod gate;
mod guarded;
mod keys;
mod listener;
mod peer;
pub(crate) mod receive;
mod record;
mod reply;
mod rooms;
mod routes;
mod run;
mod seats;

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_gpt2_api::{ApiError, ServedModel, Warnings};
use tokio::sync::watch;

use gate::Gate;
pub(crate) use listener::Listener;
use peer::Peer;
use record::Numbers;
use rooms::Rooms;
pub(crate) use run::run;
use seats::Activity;

use crate::ServerOptions;
use crate::classify::Classifying;
use crate::engine::Engine;
use crate::metrics::Metrics;
use crate::turns::Turns;

/// Analyses that wait or are made.
const MOST_LOOKS: usize = 9;

/// What all connections share.
pub(crate) struct Shared {
    options: ServerOptions,
    work: Work,
    served: Arc<ServedModel>,
    metrics: Arc<Metrics>,
    gate: Gate,
    phase: watch::Sender<Phase>,
    /// Calls that the engine has accepted and that are not answered.
    calls: watch::Sender<usize>,
    rooms: Arc<Rooms>,
    /// Analyses, of which one is made at a time, so that memory stays bounded.
    looks: Turns,
    ids: AtomicU64,
}

/// What answers to requests for texts or for labels.
pub(crate) enum Work {
    Texts(Engine),
    Labels(Classifying),
}

impl Work {
    /// Refuses what comes and what waits; what has begun goes on.
    fn drain(&self) {
        match self {
            Self::Texts(engine) => engine.drain(),
            // A request has begun when it is there, and no further one is let in.
            Self::Labels(_) => {}
        }
    }

    /// Ends everything.
    fn stop(&self) {
        match self {
            Self::Texts(engine) => engine.stop(),
            Self::Labels(classifying) => classifying.stop(),
        }
    }

    /// Returns when nothing is left to do after [`Work::drain`], but for calls that are being answered.
    async fn drained(&self) {
        if let Self::Texts(engine) = self {
            engine.drained().await;
        }
    }

    /// Returns when no work is done any more, and says why.
    async fn died(&self) -> String {
        match self {
            Self::Texts(engine) => engine.died().await,
            Self::Labels(_) => std::future::pending().await,
        }
    }
}

/// Where a server stands between its start and its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Serving,
    /// What runs is served to its end.
    Draining,
    /// Connections close.
    Ending,
}

/// What the requests of a connection share.
struct Connection {
    peer: Arc<Peer>,
    activity: Arc<Activity>,
    /// Whether all places of connections were taken when it came, so that it hears of the server's health and little else.
    is_surplus: bool,
}

/// Who asks, as far as a route needs to know.
struct Caller {
    /// That of the request.
    id: Arc<str>,
    shared: Arc<Shared>,
    peer: Arc<Peer>,
    numbers: Arc<Numbers>,
    /// The number of its key. Callers with the same one share what was computed of equal beginnings.
    key: u64,
}

impl Caller {
    /// Writes what is wrong with a request that is answered all the same: names of fields, never a text.
    fn log_warnings(&self, warnings: &Warnings) {
        if !warnings.is_empty() {
            tracing::warn!(request_id = %self.id, %warnings);
        }
    }
}

impl Shared {
    pub(crate) fn new(
        options: ServerOptions,
        listener: &Listener,
        work: Work,
        served: ServedModel,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            gate: Gate::new(&options, listener.loopback()),
            rooms: Arc::new(Rooms::new(options.max_body)),
            looks: Turns::new(MOST_LOOKS, options.timeouts.queue),
            options,
            work,
            served: Arc::new(served),
            metrics,
            phase: watch::Sender::new(Phase::Serving),
            calls: watch::Sender::new(0),
            ids: AtomicU64::new(0),
        }
    }

    /// What makes texts.
    fn engine(&self) -> Result<&Engine, ApiError> {
        match &self.work {
            Work::Texts(engine) => Ok(engine),
            Work::Labels(_) => Err(self.served.makes_no_texts()),
        }
    }

    /// What labels texts.
    fn classifying(&self) -> Result<&Classifying, ApiError> {
        match &self.work {
            Work::Texts(_) => Err(self.served.has_no_labels()),
            Work::Labels(classifying) => Ok(classifying),
        }
    }

    fn is_draining(&self) -> bool {
        *self.phase.borrow() != Phase::Serving
    }

    fn is_ending(&self) -> bool {
        *self.phase.borrow() == Phase::Ending
    }

    /// Returns when connections close.
    async fn ending(&self) {
        // The sender is here, so this does not fail.
        _ = self.phase.subscribe().wait_for(|phase| *phase == Phase::Ending).await;
    }

    /// A number for a request that has none: not to be guessed, and another one for each.
    fn fresh_id(&self) -> Arc<str> {
        let mut hasher = RandomState::new().build_hasher();
        hasher.write_u64(self.ids.fetch_add(1, Ordering::Relaxed));
        format!("req-{:016x}", hasher.finish()).into()
    }
}
