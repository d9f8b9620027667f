//! Signals that end the server. A thread of their own handles them from before the server listens, so that each is obeyed while the
//! model loads as well as while requests run.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::exit;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;

use tokio::runtime::Builder;
use tokio::sync::watch;

/// Number of requests to end a server; the first one drains it.
pub(crate) type Stops = watch::Sender<usize>;

/// The signal handlers of a server.
#[derive(Debug, Clone)]
pub(crate) struct Signals(Arc<Mutex<State>>);

#[derive(Debug)]
enum State {
    /// The server is not ready. A signal removes the socket, if there is one, and ends the process.
    Loading {
        socket: Option<PathBuf>,
    },
    Serving,
}

/// A signal that ends the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// SIGTERM, SIGINT, Ctrl-C.
    Stop,
    /// SIGHUP. A terminal that closes may send it more than once.
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
            let receive = receive(&installed, |kind| of_thread.obey(kind, &stops));
            if let Err(error) = runtime.and_then(|runtime| runtime.block_on(receive)) {
                // The receiver waits for the installation only.
                _ = installed.send(Err(error));
            }
        };
        thread::Builder::new().name("signals".into()).spawn(run)?;
        result.recv().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))?;
        Ok(signals)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The state is one value.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `bind`, which may create `socket`. No signal is obeyed in between.
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

    /// From now on a signal drains the server.
    pub(crate) fn serve(&self) {
        *self.state() = State::Serving;
    }

    fn obey(&self, kind: Kind, stops: &Weak<Stops>) {
        match (&*self.state(), stops.upgrade()) {
            (State::Serving, Some(stops)) => {
                let counts = |stops: &usize| kind == Kind::Stop || *stops == 0;
                stops.send_if_modified(|stops| {
                    let is_counted = counts(stops);
                    *stops += usize::from(is_counted);
                    is_counted
                });
            }
            // The server has ended, and the process is about to.
            (State::Serving, None) => {}
            (State::Loading { socket }, stops) => {
                if let Some(path) = socket {
                    // The next server removes it otherwise.
                    _ = fs::remove_file(path);
                }
                // A server whose start failed has an error to report.
                exit(i32::from(stops.is_none()));
            }
        }
    }
}

/// Receives signals forever.
#[cfg(unix)]
async fn receive(installed: &Sender<io::Result<()>>, obey: impl Fn(Kind)) -> io::Result<()> {
    use candle_gpt2_engine::process::ignores_hangup;
    use tokio::signal::unix::{SignalKind, signal};

    let [mut terminate, mut interrupt] = [signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?];
    // Under `nohup` the server outlives its terminal.
    let mut hangup = (!ignores_hangup()).then(|| signal(SignalKind::hangup())).transpose()?;
    // The receiver waits for this.
    _ = installed.send(Ok(()));
    loop {
        let hung_up = async {
            match &mut hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        obey(tokio::select! {
            _ = terminate.recv() => Kind::Stop,
            _ = interrupt.recv() => Kind::Stop,
            _ = hung_up => Kind::Hangup,
        });
    }
}

/// Receives Ctrl-C forever.
#[cfg(not(unix))]
async fn receive(installed: &Sender<io::Result<()>>, obey: impl Fn(Kind)) -> io::Result<()> {
    // The receiver waits for this.
    _ = installed.send(Ok(()));
    loop {
        tokio::signal::ctrl_c().await?;
        obey(Kind::Stop);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hangup_drains_and_never_cuts_a_drain_short() {
        let stops = Arc::new(watch::Sender::new(0));
        let signals = Signals(Arc::new(Mutex::new(State::Serving)));
        let obey = |kind| {
            signals.obey(kind, &Arc::downgrade(&stops));
            *stops.borrow()
        };
        assert_eq!([Kind::Hangup, Kind::Hangup].map(obey), [1, 1]);
        assert_eq!([Kind::Stop, Kind::Hangup, Kind::Stop].map(obey), [2, 2, 3]);
    }
}
