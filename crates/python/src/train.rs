//! Training runs, new or resumed.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_gpt2::Gpt2Config;
use candle_gpt2_engine::{Progress, Reporter, Unit};
use candle_gpt2_jobs::{Start, TrainEvent, TrainJob, TrainOptions};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::{Map, Value, json};

use crate::errors::{Result, type_error, value_error, warn};
use crate::keywords::read;
use crate::model::{Model, hub};
use crate::process::{interruptible, start};
use crate::raised::Raised;
use crate::reporting::Listener;
use crate::values::{paths, report_to_dict, to_json, to_python};

/// Trains a model, as `gpt2 train` does.
///
/// Pass either init, to continue training a checkpoint (a folder, a weights file, a model on the Hub, or
/// "built-in"), or config, to train a new model (a config.json, or a dict with its keys). The folder `out`
/// becomes a checkpoint with the weights that have the lowest held-out loss. It also contains log.jsonl,
/// loss.svg, and the state from which resume=True continues. The same call produces the same weights, even
/// after an interruption.
///
/// Returns a dict: out, parameters, training_tokens, held_out_tokens, steps, stopped_early, loss, best_step,
/// held_out_loss, held_out_loss_per_character, elapsed_s. For rows it also has training_rows and
/// held_out_rows. For labels it also has classification: accuracy, macro_f1, labels (dicts with label, rows,
/// precision, recall and f1) and confusion (rows of each label by predicted label), which is also drawn in
/// confusion.svg.
///
/// task: "text" continues texts. "classify" predicts the label of a text, with a head for the labels of the
/// data (a classifier keeps its own head). "answer" generates the completion of a prompt and the end token
/// after it. "dictionary" trains a sparse autoencoder or a transcoder on the activations of the model init at
/// the hook point site. It writes SAELens' files (circuit-tracer's for a cross-layer transcoder). Its result
/// has dictionary: l0, explained_variance, dead_latents, cross_entropy, delta_cross_entropy,
/// recovered_from_zero, recovered_from_mean, definitions, and for a cross-layer transcoder
/// explained_variance_per_layer.
///
/// data: a file or a list of files: UTF-8 text, or .jsonl with a `text` in each line; or one folder of token
/// files (`gpt2 tokenize`, nanoGPT, llm.c). classify needs .jsonl with `text` and `label`, or .tsv with
/// label, tab and text (or a first line with column names). answer needs .jsonl or .tsv with `prompt` and
/// `completion`. tokenizer: a tokenizer.json, spiece.model or vocab.txt, or a folder that contains one; by
/// default the checkpoint's, or with config one trained on the data. on_step: a function that is called with
/// a dict for every step (step, loss, learning_rate, gradient_norm, tokens_per_s, elapsed_s), every
/// evaluation (step, held_out_loss, held_out_loss_per_character or accuracy and macro_f1, elapsed_s) and
/// every sample (step, sample). If it raises an exception, training stops as after Ctrl-C, and the state of
/// the last step is saved. offline: use only the Hub's cache.
///
/// Options, None for the default: task ("text"), steps (1000), batch_size (8), accumulate (1), context (the
/// model's), context_ramp and batch_ramp ("0:64,4000:128": values from the given steps), random_positions,
/// document_starts (0), initialization ("gpt2", or "mimetic"), recompute, train_blocks (train only the last N
/// blocks, the final norm and the head), class_weights ("balanced", or a dict by label).
///
/// Dictionary options: site, output_site (the MLP's output), kind ("top-k"; "batch-top-k", "matryoshka",
/// "standard", "jump-relu", "gated", "transcoder", "skip-transcoder", "cross-layer-transcoder"), latents (8
/// times the width), k (32; 16 per layer of a cross-layer transcoder), sparsity (1 for jump-relu, 0.1 for
/// gated), dead_after (1/20 of all tokens).
///
/// Other options: lora_rank, lora_alpha (twice the rank), lora_targets (["c_attn"]), ignore_memory, optimizer
/// ("adamw", or "muon"), lr (0.001 with config, 0.00005 with init, 0.0003 for adapters, 0.0002 / sqrt(latents
/// / 16384) for dictionaries).
///
/// Schedule, evaluation and device: schedule ("cosine", "linear" or "constant"), final_share (0.1),
/// warmup_steps (1/20 of the steps, at most 500), weight_decay (0.1), beta_2_half_life, grad_clip (1; 0
/// disables clipping), dropout (the configuration's), held_out (0.1), eval_every (100), save_every (100),
/// keep_steps ([0, 1, 2, 4]), sample, patience, seed (0), dtype ("f32", "f16" or "bf16"), device ("auto"),
/// compute_dtype ("f32" or "bf16"), n_head.
#[pyfunction]
#[pyo3(signature = (
    data, out, *, init = None, config = None, tokenizer = None, resume = false, on_step = None, offline = false, **options
))]
#[expect(clippy::too_many_arguments, reason = "Python keyword arguments")]
pub(crate) fn train<'py>(
    py: Python<'py>,
    data: &Bound<'py, PyAny>,
    out: PathBuf,
    init: Option<PathBuf>,
    config: Option<&Bound<'py, PyAny>>,
    tokenizer: Option<PathBuf>,
    resume: bool,
    on_step: Option<Py<PyAny>>,
    offline: bool,
    options: Option<&Bound<'py, PyDict>>,
) -> Result<Bound<'py, PyAny>> {
    let start = parse_start(init, config)?;
    let options = TrainOptions {
        resume,
        ..read(Map::new(), options, &["init", "config", "tokenizer", "on_step", "offline"])?
    };
    let hub = hub(offline);
    run(py, TrainJob { data: data_paths(data)?, start, tokenizer, out, options, hub }, on_step)
}

#[pymethods]
impl Model {
    /// Continues training the checkpoint that this model was opened from.
    ///
    /// Trains in f32 from the stored weights and writes the folder `out`. This model does not change; open
    /// `out` to use the new one. For the options and the result see candle_gpt2.train.
    #[pyo3(signature = (data, out, *, tokenizer = None, resume = false, on_step = None, **options))]
    #[expect(clippy::too_many_arguments, reason = "Python keyword arguments")]
    fn train<'py>(
        &self,
        py: Python<'py>,
        data: &Bound<'py, PyAny>,
        out: PathBuf,
        tokenizer: Option<PathBuf>,
        resume: bool,
        on_step: Option<Py<PyAny>>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> Result<Bound<'py, PyAny>> {
        let opened = self.opened.options()?;
        let options = TrainOptions { resume, ..read(Map::new(), options, &["tokenizer", "on_step"])? };
        let job = TrainJob {
            data: data_paths(data)?,
            start: Start::Checkpoint(opened.model),
            tokenizer: tokenizer.or(opened.tokenizer),
            out,
            options: TrainOptions { n_head: options.n_head.or(opened.n_head), ..options },
            hub: opened.hub,
        };
        run(py, job, on_step)
    }
}

/// Reads the starting point of a training run: a checkpoint or a new model's configuration.
pub(crate) fn parse_start(init: Option<PathBuf>, config: Option<&Bound<'_, PyAny>>) -> Result<Start> {
    match (init, config) {
        (Some(checkpoint), None) => Ok(Start::Checkpoint(checkpoint)),
        (None, Some(config)) => parse_config(config),
        _ => Err(value_error(
            "expected exactly one of init (a checkpoint to continue training) and config (a new model)",
        )),
    }
}

/// Reads the paths of the training data.
pub(crate) fn data_paths(data: &Bound<'_, PyAny>) -> Result<Vec<PathBuf>> {
    let paths = paths("data", data)?;
    match paths.is_empty() {
        true => Err(value_error("data: expected at least one file")),
        false => Ok(paths),
    }
}

/// Reads the configuration of a new model from a file name or a dict.
fn parse_config(config: &Bound<'_, PyAny>) -> Result<Start> {
    if let Ok(path) = config.extract::<PathBuf>() {
        return Ok(Start::ConfigFile(path));
    }
    if !config.is_instance_of::<PyDict>() {
        return Err(type_error("config: expected a path, or a dict with the keys of a config.json"));
    }
    let config = Gpt2Config::from_json(&to_json(config)?.to_string());
    Ok(Start::Config(Box::new(config.map_err(|error| value_error(format!("config: {error}")))?)))
}

/// Reporter for a training run that stops the run at a signal or an exception.
struct TrainReporter {
    listener: Listener,
    raised: Raised,
    has_raised: AtomicBool,
    /// Callback for each entry in the log.
    on_step: Option<Py<PyAny>>,
    /// Progress bar for the steps, if there is no callback.
    steps: Mutex<Option<Box<dyn Progress>>>,
}

impl TrainReporter {
    /// Runs `work` with the GIL held, and stores its exception.
    fn with_gil(&self, work: impl FnOnce(Python<'_>) -> Result<()>) {
        // If the interpreter is shutting down, `try_attach` does not run the work.
        if let Some(Err(error)) = Python::try_attach(work) {
            self.raised.store(error.into());
            self.has_raised.store(true, Ordering::Release);
        }
    }

    fn call_on_step(&self, event: &Value) {
        if let Some(on_step) = &self.on_step {
            self.with_gil(|py| {
                on_step.call1(py, (to_python(py, event)?,))?;
                Ok(())
            });
        }
    }

    fn on_event(&self, event: TrainEvent) {
        match event {
            TrainEvent::Start { steps, steps_done } if self.on_step.is_none() => {
                let bar = self.start("training", steps, Unit::Items("steps"));
                bar.advance(steps_done);
                *self.steps.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar);
            }
            TrainEvent::Entry(entry) => {
                let steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
                if let (Some(bar), Some(_)) = (steps.as_ref(), entry.loss) {
                    bar.advance(1);
                }
                drop(steps);
                // Non-finite numbers become None.
                self.call_on_step(&serde_json::to_value(entry).unwrap_or_default());
            }
            TrainEvent::Sample { step, text, .. } => {
                self.call_on_step(&json!({"step": step, "sample": text}))
            }
            _ => {}
        }
    }
}

impl Reporter for TrainReporter {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        self.listener.start(what, total, unit)
    }

    fn note(&self, note: &str) {
        self.with_gil(|py| warn(py, note));
    }

    fn is_interrupted(&self) -> bool {
        self.has_raised.load(Ordering::Acquire) || self.listener.is_interrupted()
    }
}

fn run(py: Python<'_>, job: TrainJob, on_step: Option<Py<PyAny>>) -> Result<Bound<'_, PyAny>> {
    start()?;
    if on_step.as_ref().is_some_and(|on_step| !on_step.bind(py).is_callable()) {
        return Err(type_error("on_step: expected a function that takes a dict"));
    }
    let raised = Raised::default();
    let train_reporter = Arc::new(TrainReporter {
        listener: Listener::new(py),
        raised: raised.clone(),
        has_raised: AtomicBool::new(false),
        on_step,
        steps: Mutex::default(),
    });
    let reporter: Arc<dyn Reporter> = train_reporter.clone();
    let report = interruptible(py, || job.run(&reporter, &mut |event| train_reporter.on_event(event)));
    report_to_dict(py, &raised.or(report)?)
}
