//! The server's life: it accepts connections until it is told to end, lets what runs come to its end, and closes.

use std::sync::Arc;
use std::time::Duration;

use candle_gpt2_engine::process::return_freed_memory;
use tokio::task::{spawn_blocking, yield_now};
use tokio::time::{sleep, timeout};

use super::seats::Seats;
use super::{Listener, Phase, Shared, connection};
use crate::ServerError;
use crate::fault::caught;
use crate::log::log_failure;
use crate::signals::Stops;

/// How long is waited for the last bytes of connections.
const LAST_BYTES: Duration = Duration::from_secs(2);
/// How long is waited when the system gives no connection, for want of file descriptors say.
const NO_CONNECTION: Duration = Duration::from_millis(50);

/// Time without requests after which freed memory goes back to the system.
const IDLE: Duration = Duration::from_secs(1);
/// Bodies that were smaller leave too little behind to return it.
const LARGE_BODIES: usize = 256 << 10;

/// Serves until `stops` is above 0 and running requests have finished, or until it is above 1.
pub(crate) async fn run(
    shared: Arc<Shared>,
    listener: Listener,
    stops: Arc<Stops>,
) -> Result<(), ServerError> {
    let seats = Arc::new(Seats::new(shared.options.connections()));
    tokio::spawn(return_memory(Arc::clone(&shared)));
    let mut ended = tokio::select! {
        () = accept(&shared, &listener, &seats) => Ok(()),
        () = told(&stops, 1) => Ok(()),
        died = died(&shared) => died,
    };
    // Another server may take the address from here on.
    drop(listener);
    shared.phase.send_replace(Phase::Draining);
    if ended.is_ok() {
        ended = drain(&shared, &stops).await;
    }
    shared.backend.stop();
    shared.phase.send_replace(Phase::Ending);
    // Those that are left are closed as they are.
    _ = timeout(LAST_BYTES, seats.empty()).await;
    ended
}

/// Returns freed memory to the system when the server is idle after large requests. The allocator would keep it.
async fn return_memory(shared: Arc<Shared>) {
    let mut calls = shared.calls.subscribe();
    loop {
        let is_open = calls.wait_for(|calls| *calls > 0).await.is_ok()
            && calls.wait_for(|calls| *calls == 0).await.is_ok();
        if !is_open {
            return;
        }
        sleep(IDLE).await;
        if *calls.borrow() == 0 && shared.rooms.take_peak() >= LARGE_BODIES {
            // The end of the server does not wait for it.
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
        () = told(stops, 2) => Err(ServerError::Interrupted { calls: calls() }),
        () = sleep(after) => Err(ServerError::CutOff { calls: calls(), after }),
    }
}

async fn died(shared: &Shared) -> Result<(), ServerError> {
    Err(ServerError::EngineDied { what: shared.backend.died().await })
}

async fn accept(shared: &Arc<Shared>, listener: &Listener, seats: &Arc<Seats>) {
    let mut is_failing = false;
    loop {
        seats.free().await;
        match listener.accept().await {
            Ok(peer) => {
                is_failing = false;
                let (shared, seat) = (Arc::clone(shared), seats.take());
                let serve = async {
                    connection::serve(shared, peer, seat).await;
                    Ok(())
                };
                // Requests are caught under their ids; this is for what is between them.
                tokio::spawn(async { caught("a connection", serve).await });
                // What has been accepted is looked at before more is: it may have to give up its place.
                yield_now().await;
            }
            Err(error) => {
                // Once, however long it lasts: the machine has no descriptors left, say.
                if !is_failing {
                    log_failure("accepting connections", &error);
                }
                is_failing = true;
                seats.evict();
                sleep(NO_CONNECTION).await;
            }
        }
    }
}

/// Returns when the engine has nothing left to do and all that it has made is handed over.
async fn drained(shared: &Shared) {
    shared.backend.drained().await;
    // The sender is here, so this does not fail.
    _ = shared.calls.subscribe().wait_for(|calls| *calls == 0).await;
}

/// Returns when `stops` has reached this number.
async fn told(stops: &Stops, times: usize) {
    _ = stops.subscribe().wait_for(|stops| *stops >= times).await;
}
