//! Signals that stop the server.
//!
//! A dedicated thread handles signals, starting before the server listens. Signals therefore work while the
//! model loads and while requests run.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::exit;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;

use tokio::runtime::Builder;
use tokio::sync::watch;

/// Number of stop requests; the first drains the server, the second stops it immediately.
pub(crate) type Stops = watch::Sender<usize>;

/// A server's signal handlers.
#[derive(Debug, Clone)]
pub(crate) struct Signals(Arc<Mutex<State>>);

#[derive(Debug)]
enum State {
    /// Startup. A signal removes the socket, if any, and ends the process.
    Loading {
        socket: Option<PathBuf>,
    },
    Serving,
}

/// Signal that stops the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// SIGTERM, SIGINT, Ctrl-C.
    Stop,
    /// SIGHUP, which a closing terminal may send more than once.
    #[cfg_attr(not(unix), expect(dead_code, reason = "other systems have no SIGHUP"))]
    Hangup,
}

impl Signals {
    /// Installs the handlers.
    pub(crate) fn install(stops: &Arc<Stops>) -> io::Result<Self> {
        let signals = Self(Arc::new(Mutex::new(State::Loading { socket: None })));
        let (of_thread, stops) = (signals.clone(), Arc::downgrade(stops));
        let (installed, result) = channel();
        let run = move || {
            let runtime = Builder::new_current_thread().enable_io().build();
            let receive = receive(&installed, |kind| of_thread.handle_signal(kind, &stops));
            if let Err(error) = runtime.and_then(|runtime| runtime.block_on(receive)) {
                // Fails after the installation, when no one waits for the result any longer.
                _ = installed.send(Err(error));
            }
        };
        thread::Builder::new().name("signals".into()).spawn(run)?;
        result.recv().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))?;
        Ok(signals)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Poisoning is harmless, because the state is a single value.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `bind`, which may create `socket`, and delays signals until it returns.
    pub(crate) fn while_binding<T, E>(
        &self,
        socket: Option<PathBuf>,
        bind: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut state = self.state();
        let bound = bind()?;
        *state = State::Loading { socket };
        Ok(bound)
    }

    /// Makes later signals drain the server instead of ending the process.
    pub(crate) fn serve(&self) {
        *self.state() = State::Serving;
    }

    fn handle_signal(&self, kind: Kind, stops: &Weak<Stops>) {
        match (&*self.state(), stops.upgrade()) {
            (State::Serving, Some(stops)) => {
                let counts = |stops: &usize| kind == Kind::Stop || *stops == 0;
                stops.send_if_modified(|stops| {
                    let is_counted = counts(stops);
                    *stops += usize::from(is_counted);
                    is_counted
                });
            }
            // The server has ended, and the process will exit soon.
            (State::Serving, None) => {}
            (State::Loading { socket }, stops) => {
                if let Some(path) = socket {
                    // If this fails, the next server to start removes the socket.
                    _ = fs::remove_file(path);
                }
                // If startup has failed, the exit code must report an error.
                exit(i32::from(stops.is_none()));
            }
        }
    }
}

/// Receives signals forever.
#[cfg(unix)]
async fn receive(installed: &Sender<io::Result<()>>, handle_signal: impl Fn(Kind)) -> io::Result<()> {
    use candle_gpt2_engine::process::ignores_hangup;
    use tokio::signal::unix::{SignalKind, signal};

    let [mut terminate, mut interrupt] = [signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?];
    // Under `nohup`, the server outlives its terminal.
    let mut hangup = (!ignores_hangup()).then(|| signal(SignalKind::hangup())).transpose()?;
    // The receiver waits for this message.
    _ = installed.send(Ok(()));
    loop {
        let hung_up = async {
            match &mut hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        handle_signal(tokio::select! {
            _ = terminate.recv() => Kind::Stop,
            _ = interrupt.recv() => Kind::Stop,
            _ = hung_up => Kind::Hangup,
        });
    }
}

/// Receives Ctrl-C forever.
#[cfg(not(unix))]
async fn receive(installed: &Sender<io::Result<()>>, handle_signal: impl Fn(Kind)) -> io::Result<()> {
    // The receiver waits for this message.
    _ = installed.send(Ok(()));
    loop {
        tokio::signal::ctrl_c().await?;
        handle_signal(Kind::Stop);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hangup_drains_and_never_interrupts_a_drain() {
        let stops = Arc::new(watch::Sender::new(0));
        let signals = Signals(Arc::new(Mutex::new(State::Serving)));
        let handle_signal = |kind| {
            signals.handle_signal(kind, &Arc::downgrade(&stops));
            *stops.borrow()
        };
        assert_eq!([Kind::Hangup, Kind::Hangup].map(handle_signal), [1, 1]);
        assert_eq!([Kind::Stop, Kind::Hangup, Kind::Stop].map(handle_signal), [2, 2, 3]);
    }
}
