//! Server main loop: accepts connections and, on shutdown, drains and closes them.

use std::sync::Arc;
use std::time::Duration;

use candle_gpt2_engine::process::return_freed_memory;
use tokio::task::{spawn_blocking, yield_now};
use tokio::time::{sleep, timeout};

use super::slots::ConnectionSlots;
use super::{Listener, Phase, Shared, connection};
use crate::ServerError;
use crate::fault::caught;
use crate::log::log_failure;
use crate::signals::Stops;

/// Maximum time to send the last bytes before connections are dropped.
const LAST_BYTES: Duration = Duration::from_secs(2);
/// Back-off after `accept` fails, for example when file descriptors run out.
const ACCEPT_BACK_OFF: Duration = Duration::from_millis(50);

/// Idle time after which freed memory is returned to the system.
const IDLE: Duration = Duration::from_secs(1);
/// Minimum peak memory for request bodies at which freed memory is returned.
const LARGE_BODIES: usize = 256 << 10;

/// Serves until a stop request arrives and running requests finish, or until a second stop request.
pub(crate) async fn run(
    shared: Arc<Shared>,
    listener: Listener,
    stops: Arc<Stops>,
) -> Result<(), ServerError> {
    let slots = Arc::new(ConnectionSlots::new(shared.options.connections()));
    tokio::spawn(return_memory(Arc::clone(&shared)));
    let mut ended = tokio::select! {
        () = accept(&shared, &listener, &slots) => Ok(()),
        () = wait_for_stops(&stops, 1) => Ok(()),
        died = died(&shared) => died,
    };
    // From this point, another server may bind the address.
    drop(listener);
    shared.phase.send_replace(Phase::Draining);
    if ended.is_ok() {
        ended = drain(&shared, &stops).await;
    }
    shared.backend.stop();
    shared.phase.send_replace(Phase::Ending);
    // Remaining connections are dropped after the timeout.
    _ = timeout(LAST_BYTES, slots.wait_until_empty()).await;
    ended
}

/// Returns freed memory to the system when the server is idle after large requests.
///
/// The allocator would otherwise keep the memory.
async fn return_memory(shared: Arc<Shared>) {
    let mut calls = shared.calls.subscribe();
    loop {
        let is_open = calls.wait_for(|calls| *calls > 0).await.is_ok()
            && calls.wait_for(|calls| *calls == 0).await.is_ok();
        if !is_open {
            return;
        }
        sleep(IDLE).await;
        if *calls.borrow() == 0 && shared.body_memory.take_peak() >= LARGE_BODIES {
            // Shutdown does not wait for this task.
            _ = spawn_blocking(return_freed_memory).await;
        }
    }
}

async fn drain(shared: &Shared, stops: &Stops) -> Result<(), ServerError> {
    shared.backend.drain();
    let after = shared.options.timeouts.drain;
    let calls = || *shared.calls.borrow();
    tokio::select! {
        biased;
        () = drained(shared) => Ok(()),
        died = died(shared) => died,
        () = wait_for_stops(stops, 2) => Err(ServerError::Interrupted { calls: calls() }),
        () = sleep(after) => Err(ServerError::CutOff { calls: calls(), after }),
    }
}

async fn died(shared: &Shared) -> Result<(), ServerError> {
    Err(ServerError::EngineDied { what: shared.backend.died().await })
}

async fn accept(shared: &Arc<Shared>, listener: &Listener, slots: &Arc<ConnectionSlots>) {
    let mut is_failing = false;
    loop {
        slots.wait_until_free().await;
        match listener.accept().await {
            Ok(peer) => {
                is_failing = false;
                let (shared, slot) = (Arc::clone(shared), slots.assign());
                let serve = async {
                    connection::serve(shared, peer, slot).await;
                    Ok(())
                };
                // A panic in a request is caught and logged under the request's id; this catches all others.
                tokio::spawn(async { caught("a connection", serve).await });
                // Lets the new connection run before the next is accepted, because eviction depends on its
                // state.
                yield_now().await;
            }
            Err(error) => {
                // Logs one line per outage, for example when file descriptors run out.
                if !is_failing {
                    log_failure("accepting connections", &error);
                }
                is_failing = true;
                slots.evict();
                sleep(ACCEPT_BACK_OFF).await;
            }
        }
    }
}

/// Waits until the engine is idle and all responses have been handed to hyper.
async fn drained(shared: &Shared) {
    shared.backend.drained().await;
    // Cannot fail because `shared` owns the sender.
    _ = shared.calls.subscribe().wait_for(|calls| *calls == 0).await;
}

/// Waits until the number of stop requests reaches `times`.
async fn wait_for_stops(stops: &Stops, times: usize) {
    _ = stops.subscribe().wait_for(|stops| *stops >= times).await;
}
