//! A training step by step, for steps that are shared by several processes.

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

use crate::errors::{Failure, Result, wrong_value};
use crate::keywords::read;
use crate::model::hub;
use crate::process::{interruptible, start};
use crate::raised::{Lent, Raised};
use crate::reporting::Listener;
use crate::train::{files, start_of};
use crate::values::{Values, dict_of, float_array, number, type_name};

/// The training of candle_gpt2.train step by step, for your own loop over several processes: each computes its share of every
/// batch, gradients and losses are summed over all of them, and each applies the sums.
///
///     trainer = candle_gpt2.Trainer(data, "out", init="gpt2", rank=rank, world_size=world_size, steps=100)
///     while not trainer.done:
///         loss, gradients = trainer.loss_and_gradients()
///         trainer.apply(all_reduce_sum(gradients), all_reduce_sum(loss))
///
/// data, out, init, config, tokenizer, resume, offline and the options are those of train; batch_size is that of all processes
/// together. The process of rank 0 logs, evaluates and saves into out as train does. The others write nothing; with resume=True
/// they too read the state in out, and if they cannot, set_state gives them that of rank 0. Without dropout the losses are those
/// of one process, except for rounding; with dropout each share samples its own masks.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct Trainer {
    run: Lent<Run>,
    listener: Arc<Listener>,
    share: Share,
}

impl Trainer {
    /// Computes with the run. Ctrl-C ends it soon.
    fn computing<T: Send, E: Into<Failure>>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Run) -> std::result::Result<T, E> + Send,
    ) -> Result<T> {
        start()?;
        let raised = Raised::default();
        let done = interruptible(py, || {
            self.run.lent_to(&raised, |run| {
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
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
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
            return Err(wrong_value("sample: a Trainer writes no samples; train does"));
        }
        let start = start_of(init, config)?;
        let hub = hub(offline);
        let job = TrainJob { data: files(data)?, start, tokenizer, out, options, hub };
        let listener = Arc::new(Listener::new(py));
        let reporter: Arc<dyn Reporter> = listener.clone();
        let share = Share { index: rank, count: world_size };
        let run = interruptible(py, || job.open_share(&reporter, share));
        listener.warn(py)?;
        Ok(Self { run: Lent::new("the trainer", run?), listener, share })
    }

    fn __repr__(&self, py: Python<'_>) -> Result<String> {
        let (done, steps) = (self.step(py)?, self.steps(py)?);
        Ok(format!("Trainer(step {done} of {steps}, rank {} of {})", self.share.index, self.share.count))
    }

    /// Steps taken so far.
    #[getter]
    fn step(&self, py: Python<'_>) -> Result<u64> {
        self.run.with(py, |run| run.trainer().steps_done())
    }

    /// Steps of the whole training.
    #[getter]
    fn steps(&self, py: Python<'_>) -> Result<u64> {
        self.run.with(py, |run| run.trainer().numbers().steps)
    }

    /// Whether no step is left: all are taken, or patience has ended it early.
    #[getter]
    fn done(&self, py: Python<'_>) -> Result<bool> {
        self.run.with(py, |run| run.is_done())
    }

    /// What this process's share of the next step adds to the step's loss and gradients: the gradients are an f32 array of all
    /// parameters one after the other, in the order of parameters(). The sums over all processes are the step's. Calling it again
    /// gives the same.
    fn loss_and_gradients<'py>(&self, py: Python<'py>) -> Result<(f64, Bound<'py, PyArray1<f32>>)> {
        let (loss, gradients) = self.computing(py, |run| run.share_of_step(&mut |_, _| {}))?;
        Ok((loss, PyArray1::from_vec(py, gradients)))
    }

    /// Takes the step with the sums over all processes. Returns a dict: step, loss, learning_rate, gradient_norm, tokens_per_s,
    /// elapsed_s, and held_out_loss and held_out_loss_per_character after a step that is followed by an evaluation, which every
    /// process makes. The process of rank 0 logs and saves when it is due.
    fn apply<'py>(
        &self,
        py: Python<'py>,
        gradients: &Bound<'py, PyAny>,
        loss: f64,
    ) -> Result<Bound<'py, PyAny>> {
        let array = float_array(gradients)?;
        let gradients = array.as_slice().map_err(|error| wrong_value(error.to_string()))?;
        let mut told = Map::new();
        self.computing(py, |run| {
            let mut report = |entry: &Entry, _: &_| {
                if let Ok(Value::Object(entry)) = serde_json::to_value(entry) {
                    told.extend(entry);
                }
            };
            run.apply(gradients, loss, &mut report)
        })?;
        dict_of(py, &told)
    }

    /// The trained parameters by name, as copies; weights of linear layers are (out, in).
    fn parameters<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let parameters = self.run.with(py, |run| {
            let parameters = run.trainer().parameters().iter();
            let values = parameters.map(|(name, value)| Ok((name.to_owned(), Values::of(value)?)));
            values.collect::<candle_core::Result<Vec<_>>>()
        })??;
        let dict = PyDict::new(py);
        for (name, values) in parameters {
            dict.set_item(name, values.into_array(py)?)?;
        }
        Ok(dict)
    }

    /// Saves the state into out, as every save_every steps; not needed after the last one. Does nothing except at rank 0.
    fn save(&self, py: Python<'_>) -> Result<()> {
        self.computing(py, Run::save)
    }

    /// The whole state, bytes as the file in out holds them: for set_state in the other processes.
    fn state<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>> {
        let state = self.computing(py, |run| run.state())?;
        Ok(PyBytes::new(py, &state))
    }

    /// Resumes from the state of another process of the same training.
    fn set_state(&self, py: Python<'_>, state: &[u8]) -> Result<()> {
        self.computing(py, |run| run.set_state(state))
    }

    fn __reduce__(slf: &Bound<'_, Self>) -> Result<()> {
        let name = type_name(slf);
        Err(crate::errors::wrong_type(format!("a {name} cannot be pickled; make one in each process")))
    }
}
