//! Step-by-step training, with each step shared among several processes.

use std::path::PathBuf;
use std::sync::Arc;

use candle_gpt2_engine::Reporter;
use candle_gpt2_jobs::{Entry, Run, TrainJob, TrainOptions};
use candle_gpt2_kernels::using;
use candle_gpt2_training::Share;
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use serde_json::{Map, Value};

use crate::errors::{Failure, Result, value_error};
use crate::keywords::read;
use crate::model::hub;
use crate::process::{interruptible, start};
use crate::raised::{Exclusive, Raised};
use crate::reporting::Listener;
use crate::train::{data_paths, parse_start};
use crate::values::{Values, float_array, number, report_to_dict, type_name};

/// Step-by-step training for data-parallel loops over several processes.
///
/// Each process computes its part of every batch. The caller sums gradients and losses over all processes,
/// and each process applies the sums.
///
///     trainer = candle_gpt2.Trainer(data, "out", init="gpt2", rank=rank, world_size=world_size, steps=100)
///     while not trainer.done:
///         loss, gradients = trainer.loss_and_gradients()
///         trainer.apply(all_reduce_sum(gradients), all_reduce_sum(loss))
///
/// data, out, init, config, tokenizer, resume, offline and the options are those of train; batch_size is the
/// total of all processes. The process with rank 0 logs, evaluates and saves into `out` as train does. The
/// others write nothing. With resume=True they also read the state in `out`; a process that cannot read it
/// needs set_state with the state of rank 0. Without dropout the losses equal those of a single process up to
/// rounding. With dropout each process samples its own masks.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct Trainer {
    run: Exclusive<Run>,
    listener: Arc<Listener>,
    share: Share,
}

impl Trainer {
    /// Runs `work` on the training run.
    ///
    /// Ctrl-C soon ends the work.
    fn computing<T: Send, E: Into<Failure>>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Run) -> std::result::Result<T, E> + Send,
    ) -> Result<T> {
        start()?;
        let raised = Raised::default();
        let done = interruptible(py, || {
            self.run.run_for(&raised, |run| {
                let device = run.trainer().device().clone();
                using(&device, || work(run)).map_err(Into::into)
            })?
        });
        self.listener.warn(py)?;
        done
    }
}

#[pymethods]
impl Trainer {
    #[new]
    #[pyo3(signature = (
        data, out, *, init = None, config = None, tokenizer = None, resume = false, rank = 0, world_size = 1, offline = false,
        **options
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python keyword arguments")]
    fn new(
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        out: PathBuf,
        init: Option<PathBuf>,
        config: Option<&Bound<'_, PyAny>>,
        tokenizer: Option<PathBuf>,
        resume: bool,
        #[pyo3(from_py_with = number)] rank: usize,
        #[pyo3(from_py_with = number)] world_size: usize,
        offline: bool,
        options: Option<&Bound<'_, PyDict>>,
    ) -> Result<Self> {
        start()?;
        let others = ["init", "config", "tokenizer", "rank", "world_size", "offline"];
        let options = TrainOptions { resume, ..read(Map::new(), options, &others)? };
        if options.sample.is_some() {
            return Err(value_error("sample: not supported by Trainer; use train"));
        }
        let start = parse_start(init, config)?;
        let hub = hub(offline);
        let job = TrainJob { data: data_paths(data)?, start, tokenizer, out, options, hub };
        let listener = Arc::new(Listener::new(py));
        let reporter: Arc<dyn Reporter> = listener.clone();
        let share = Share { index: rank, count: world_size };
        let run = interruptible(py, || job.open_share(&reporter, share));
        listener.warn(py)?;
        Ok(Self { run: Exclusive::new("the trainer", run?), listener, share })
    }

    fn __repr__(&self, py: Python<'_>) -> Result<String> {
        let (done, steps) = (self.step(py)?, self.steps(py)?);
        Ok(format!("Trainer(step {done} of {steps}, rank {} of {})", self.share.index, self.share.count))
    }

    /// Number of completed steps.
    #[getter]
    fn step(&self, py: Python<'_>) -> Result<u64> {
        self.run.with(py, |run| run.trainer().steps_done())
    }

    /// Total number of steps.
    #[getter]
    fn steps(&self, py: Python<'_>) -> Result<u64> {
        self.run.with(py, |run| run.trainer().numbers().steps)
    }

    /// Whether training has ended: after all steps, or early because of patience.
    #[getter]
    fn done(&self, py: Python<'_>) -> Result<bool> {
        self.run.with(py, |run| run.is_done())
    }

    /// Computes this process's contribution to the loss and the gradients of the next step.
    ///
    /// The gradients are a float32 array of all parameters, concatenated in the order of parameters(). The
    /// sums over all processes are the loss and the gradients of the step. Repeated calls return the same
    /// values.
    fn loss_and_gradients<'py>(&self, py: Python<'py>) -> Result<(f64, Bound<'py, PyArray1<f32>>)> {
        let (loss, gradients) = self.computing(py, |run| run.share_of_step(&mut |_, _| {}))?;
        Ok((loss, PyArray1::from_vec(py, gradients)))
    }

    /// Takes a step with the sums over all processes.
    ///
    /// Returns a dict: step, loss, learning_rate, gradient_norm, tokens_per_s, elapsed_s, and after a step
    /// with an evaluation also held_out_loss and held_out_loss_per_character. Every process evaluates. The
    /// process with rank 0 logs and saves when due.
    fn apply<'py>(
        &self,
        py: Python<'py>,
        gradients: &Bound<'py, PyAny>,
        loss: f64,
    ) -> Result<Bound<'py, PyAny>> {
        let array = float_array(gradients)?;
        let gradients = array.as_slice().map_err(|error| value_error(error.to_string()))?;
        let mut fields = Map::new();
        self.computing(py, |run| {
            let mut report = |entry: &Entry, _: &_| {
                if let Ok(Value::Object(entry)) = serde_json::to_value(entry) {
                    fields.extend(entry);
                }
            };
            run.apply(gradients, loss, &mut report)
        })?;
        report_to_dict(py, &fields)
    }

    /// Returns copies of the trained parameters by name.
    ///
    /// Weights of linear layers have the shape (out, in).
    fn parameters<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let parameters = self.run.with(py, |run| {
            let parameters = run.trainer().parameters().iter();
            let values = parameters.map(|(name, value)| Ok((name.to_owned(), Values::from_tensor(value)?)));
            using(run.trainer().device(), || values.collect::<candle_core::Result<Vec<_>>>())
        })??;
        let dict = PyDict::new(py);
        for (name, values) in parameters {
            dict.set_item(name, values.into_array(py)?)?;
        }
        Ok(dict)
    }

    /// Saves the state into `out`, as is done every save_every steps.
    ///
    /// Not needed after the last step. Only rank 0 saves; other ranks do nothing.
    fn save(&self, py: Python<'_>) -> Result<()> {
        self.computing(py, Run::save)
    }

    /// Returns the training state as bytes, for set_state in the other processes.
    ///
    /// The format is that of the state file in `out`.
    fn state<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>> {
        let state = self.computing(py, |run| run.state())?;
        Ok(PyBytes::new(py, &state))
    }

    /// Restores a state that another process in the same training run has returned.
    fn set_state(&self, py: Python<'_>, state: &[u8]) -> Result<()> {
        self.computing(py, |run| run.set_state(state))
    }

    fn __reduce__(slf: &Bound<'_, Self>) -> Result<()> {
        let name = type_name(slf);
        Err(crate::errors::type_error(format!("a {name} cannot be pickled; create one in each process")))
    }
}
