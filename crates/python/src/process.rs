//! What belongs to the whole process: how many threads compute, and that a fork has none of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::thread::available_parallelism;

use candle_core::Device;
use candle_gpt2_engine::{LoadedModel, process};
use pyo3::prelude::*;

use crate::errors::{Failure, Result, failed, wrong_value};
use crate::signals::{is_raised, watched};
use crate::values::number;

/// Most threads, as the program has it.
const MAX_THREADS: usize = 1024;

/// The process that computed first; 0 before that.
static OWNER: AtomicU32 = AtomicU32::new(0);
/// Threads that were asked for; 0 if none were.
static WISHED: AtomicUsize = AtomicUsize::new(0);

/// To be called before anything computes: starts the threads, and refuses a process that was forked from one that has them.
pub(crate) fn start() -> Result<()> {
    let own = std::process::id();
    match OWNER.compare_exchange(0, own, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            // Without it reading a prompt takes a sixth longer.
            process::keep_freed_memory();
            #[expect(unsafe_code, reason = "recorded steps depend on the rest of the program")]
            // SAFETY: this module does all its work on a GPU inside `using`, and hands out arrays on the host.
            unsafe {
                process::allow_recorded_steps();
            }
            let wished = Some(WISHED.load(Ordering::Acquire)).filter(|wished| *wished > 0);
            wished.map(process::set_thread_count);
            Python::attach(|py| start_candles_pools(py, wished)).map_err(Into::into)
        }
        Err(owner) if owner == own => Ok(()),
        Err(owner) => Err(failed(format!(
            "this process was forked from process {owner} after that had opened a model, and the threads that compute did not come \
             along; start processes with multiprocessing's `spawn` or `forkserver`, or open models in the children alone"
        ))),
    }
}

/// Starts candle's pools with their settings, which they take from the environment alone: they are there for this moment only, in
/// which the interpreter's lock keeps its other threads away, and `os.environ` never has them.
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

/// Computes without the interpreter's lock. Ctrl-C ends it soon, in the middle of a pass too; the exception then comes in place of
/// what was computed.
pub(crate) fn computing<T: Send, E: Into<Failure> + Send>(
    py: Python<'_>,
    model: &LoadedModel,
    work: impl FnOnce() -> std::result::Result<T, E> + Send,
) -> Result<T> {
    computing_on(py, model.device(), work)
}

/// The same on a device.
pub(crate) fn computing_on<T: Send, E: Into<Failure> + Send>(
    py: Python<'_>,
    device: &Device,
    work: impl FnOnce() -> std::result::Result<T, E> + Send,
) -> Result<T> {
    let (computed, raised) = computing_partly(py, device, work)?;
    raised.map_or(computed.map_err(Into::into), |raised| Err(raised.into()))
}

/// The same, which also gives what was computed until then.
pub(crate) fn computing_partly<T: Send>(
    py: Python<'_>,
    device: &Device,
    work: impl FnOnce() -> T + Send,
) -> PyResult<(T, Option<PyErr>)> {
    watched(py, || {
        candle_gpt2_kernels::using(device, || candle_gpt2_kernels::interruptible(Arc::new(is_raised), work))
    })
}

/// As [`computing`], without a model: `work` asks [`is_raised`](crate::signals::is_raised).
pub(crate) fn interruptible<T: Send, E: Into<Failure> + Send>(
    py: Python<'_>,
    work: impl FnOnce() -> std::result::Result<T, E> + Send,
) -> Result<T> {
    let (done, raised) = watched(py, work)?;
    raised.map_or(done.map_err(Into::into), |raised| Err(raised.into()))
}

/// The number of threads that compute, or will.
#[pyfunction]
pub(crate) fn thread_count() -> usize {
    match (OWNER.load(Ordering::Acquire), WISHED.load(Ordering::Acquire)) {
        (0, 0) => available_parallelism().map_or(1, usize::from),
        (0, wished) => wished,
        _ => process::thread_count(),
    }
}

/// Sets the number of threads that compute, for all models of this process.
///
/// To be called before the first model is opened; later it raises Gpt2Error, since the threads run by then.
#[pyfunction]
pub(crate) fn set_threads(#[pyo3(from_py_with = number)] threads: usize) -> Result<()> {
    if !(1..=MAX_THREADS).contains(&threads) {
        return Err(wrong_value(format!("threads: expected from 1 to {MAX_THREADS}, found {threads}")));
    }
    if OWNER.load(Ordering::Acquire) != 0 {
        return Err(failed(format!(
            "{} threads compute already; set their number before the first model is opened",
            process::thread_count()
        )));
    }
    WISHED.store(threads, Ordering::Release);
    Ok(())
}
