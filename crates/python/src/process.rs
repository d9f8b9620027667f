//! Process-wide state: the number of compute threads, and detection of forked processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::thread::available_parallelism;

use candle_core::Device;
use candle_gpt2_engine::{LoadedModel, process};
use pyo3::prelude::*;

use crate::errors::{Failure, Result, gpt2_error, value_error};
use crate::signals::{is_raised, run_with_signals};
use crate::values::number;

/// Maximum number of threads, the same as the program's.
const MAX_THREADS: usize = 1024;

/// ID of the process that started the compute threads, or 0 if none has yet.
static OWNER: AtomicU32 = AtomicU32::new(0);
/// Requested number of threads, or 0 if the caller has not set one.
static REQUESTED_THREADS: AtomicUsize = AtomicUsize::new(0);

/// Starts the compute threads.
///
/// Must be called before any computation. Fails in a process that was forked from one that had already
/// started its threads.
pub(crate) fn start() -> Result<()> {
    let pid = std::process::id();
    match OWNER.compare_exchange(0, pid, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            // Without this, prefill takes a sixth longer.
            process::keep_freed_memory();
            #[expect(unsafe_code, reason = "recorded steps depend on the rest of the program")]
            // SAFETY: this module loads, computes, trains and fills caches inside `using`, and returns only
            // arrays on the host. Known gap: Python drops models, caches, streams and trainers outside it. A
            // free by another thread fails during a recording; docs/dev/gpu.md describes the consequences.
            unsafe {
                process::allow_recorded_steps();
            }
            let requested =
                Some(REQUESTED_THREADS.load(Ordering::Acquire)).filter(|requested| *requested > 0);
            requested.map(process::set_thread_count);
            Python::attach(|py| start_candles_pools(py, requested)).map_err(Into::into)
        }
        Err(owner) if owner == pid => Ok(()),
        Err(owner) => Err(gpt2_error(format!(
            "this process was forked from process {owner} after it opened a model, and compute threads do not survive a \
             fork; start processes with multiprocessing's `spawn` or `forkserver`, or open models only in the children"
        ))),
    }
}

/// Starts candle's thread pools, which read their settings only from the environment.
///
/// The variables are set only during this call, while the GIL keeps the interpreter's other threads from
/// running. `os.environ` never contains them.
fn start_candles_pools(py: Python<'_>, threads: Option<usize>) -> PyResult<()> {
    let os = py.import(pyo3::intern!(py, "os"))?;
    let put = |name: &str, value: &str| os.call_method1(pyo3::intern!(py, "putenv"), (name, value));
    let settings: Vec<_> = process::candles_settings(threads)
        .into_iter()
        .map(|(name, value)| (name, value, std::env::var_os(name)))
        .collect();
    let set = settings.iter().try_for_each(|(name, value, _)| put(name, value).map(drop));
    process::start_candles_pools();
    let restored = settings.iter().try_for_each(|(name, _, before)| match before {
        Some(before) => os.call_method1(pyo3::intern!(py, "putenv"), (*name, before)).map(drop),
        None => os.call_method1(pyo3::intern!(py, "unsetenv"), (*name,)).map(drop),
    });
    set.and(restored)
}

/// Runs a computation with the GIL released.
///
/// Ctrl-C soon ends the computation, even in the middle of a pass. The exception then replaces the result.
pub(crate) fn computing<T: Send, E: Into<Failure> + Send>(
    py: Python<'_>,
    model: &LoadedModel,
    work: impl FnOnce() -> std::result::Result<T, E> + Send,
) -> Result<T> {
    computing_on(py, model.device(), work)
}

/// Runs a computation like [`computing`], on `device`.
pub(crate) fn computing_on<T: Send, E: Into<Failure> + Send>(
    py: Python<'_>,
    device: &Device,
    work: impl FnOnce() -> std::result::Result<T, E> + Send,
) -> Result<T> {
    let (computed, raised) = computing_partly(py, device, work)?;
    raised.map_or(computed.map_err(Into::into), |raised| Err(raised.into()))
}

/// Runs a computation like [`computing_on`], but returns partial results along with an exception.
pub(crate) fn computing_partly<T: Send>(
    py: Python<'_>,
    device: &Device,
    work: impl FnOnce() -> T + Send,
) -> PyResult<(T, Option<PyErr>)> {
    run_with_signals(py, || {
        candle_gpt2_kernels::using(device, || candle_gpt2_kernels::interruptible(Arc::new(is_raised), work))
    })
}

/// Runs a computation like [`computing`], but without a model.
///
/// `work` must poll [`is_raised`](crate::signals::is_raised).
pub(crate) fn interruptible<T: Send, E: Into<Failure> + Send>(
    py: Python<'_>,
    work: impl FnOnce() -> std::result::Result<T, E> + Send,
) -> Result<T> {
    let (done, raised) = run_with_signals(py, work)?;
    raised.map_or(done.map_err(Into::into), |raised| Err(raised.into()))
}

/// Number of compute threads; they start when the first model is opened.
#[pyfunction]
pub(crate) fn thread_count() -> usize {
    match (OWNER.load(Ordering::Acquire), REQUESTED_THREADS.load(Ordering::Acquire)) {
        (0, 0) => available_parallelism().map_or(1, usize::from),
        (0, requested) => requested,
        _ => process::thread_count(),
    }
}

/// Sets the number of compute threads for all models in this process.
///
/// Must be called before the first model is opened. Later it raises Gpt2Error, because the threads are
/// running.
#[pyfunction]
pub(crate) fn set_threads(#[pyo3(from_py_with = number)] threads: usize) -> Result<()> {
    if !(1..=MAX_THREADS).contains(&threads) {
        return Err(value_error(format!("threads: expected 1 to {MAX_THREADS}, found {threads}")));
    }
    if OWNER.load(Ordering::Acquire) != 0 {
        return Err(gpt2_error(format!(
            "{} compute threads are already running; call set_threads before opening the first model",
            process::thread_count()
        )));
    }
    REQUESTED_THREADS.store(threads, Ordering::Release);
    Ok(())
}
