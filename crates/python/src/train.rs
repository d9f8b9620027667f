//! Training, and going on with a training.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_gpt2::Gpt2Config;
use candle_gpt2_engine::{Progress, Reporter, Unit};
use candle_gpt2_jobs::{Start, TrainEvent, TrainJob, TrainOptions};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::{Map, Value, json};

use crate::errors::{Result, warn, wrong_type, wrong_value};
use crate::keywords::read;
use crate::model::{Model, hub};
use crate::process::{interruptible, start};
use crate::raised::Raised;
use crate::reporting::Listener;
use crate::values::{dict_of, json_of, paths, python_of};

/// Trains a model on texts, as `gpt2 train` does: with init it continues a checkpoint (a folder, a weights file, a model on the Hub,
/// or "built-in"), with config (a config.json, or a dict of its keys) it makes a new one. The folder out becomes a checkpoint
/// with the weights of the best held-out loss, next to log.jsonl, loss.svg and the state that resume=True continues from. The same
/// call gives the same weights, interrupted or not. Returns a dict: out, parameters, training_tokens, held_out_tokens, steps,
/// stopped_early, loss, best_step, held_out_loss, held_out_loss_per_character, elapsed_s; of rows also training_rows, held_out_rows
/// and, of labels, classification: accuracy, macro_f1, labels (a dict of label, rows, precision, recall, f1 each) and confusion
/// (rows of each label by predicted label), which is drawn in confusion.svg too.
///
/// task: "text", to continue texts; "classify", to predict the label of a text, with a head for the labels of the data (a
/// classifier keeps its own); "answer", to write the completion of a prompt and the end after it; "dictionary", to write the
/// activations of the model init at the hook point site as a sum of few directions (a sparse autoencoder, or a transcoder): the
/// folder then gets SAELens' files (circuit-tracer's for a cross-layer transcoder), and the dict dictionary (l0, explained_variance,
/// dead_latents, cross_entropy, delta_cross_entropy, recovered_from_zero, recovered_from_mean, definitions; for a cross-layer
/// transcoder also explained_variance_per_layer).
///
/// data: a file or a list of them: UTF-8 text, or .jsonl with a `text` in each line, or one folder of token files (`gpt2 tokenize`,
/// nanoGPT, llm.c); for classify .jsonl with `text` and `label`, or
/// .tsv with label, tab and text (or a first line that names the columns); for answer .jsonl or .tsv with `prompt` and `completion`.
/// tokenizer: a tokenizer.json, spiece.model or vocab.txt, or a folder with one; by default the checkpoint's, and with config one that is trained from the data.
/// on_step: a function that is called with a dict for every step (step, loss, learning_rate, gradient_norm, tokens_per_s, elapsed_s),
/// every evaluation (step, held_out_loss, held_out_loss_per_character or accuracy and macro_f1, elapsed_s) and every sample
/// (step, sample); an exception in it ends the training as Ctrl-C does: the state of the last step is saved. offline: use only the
/// Hub's cache.
///
/// Options, None for the default: task ("text"), steps (1000), batch_size (8), accumulate (1), context (the model's), context_ramp and batch_ramp
/// ("0:64,4000:128": values from steps on), random_positions, document_starts (0), initialization ("gpt2", or "mimetic"), recompute,
/// train_blocks (the last ones, so many, with the final norm and the head), class_weights ("balanced", or a dict of labels),
/// site, output_site (the MLP's output), kind ("top-k"; "batch-top-k", "matryoshka", "standard", "jump-relu", "gated", "transcoder", "skip-transcoder",
/// "cross-layer-transcoder"), latents (8 times the width), k (32; 16 per layer of a cross-layer transcoder), sparsity (1 for jump-relu, 0.1 for gated), dead_after (a twentieth of all tokens),
/// lora_rank, lora_alpha (twice the rank), lora_targets (["c_attn"]), ignore_memory, optimizer ("adamw", or "muon"), lr (0.001 with config, 0.00005 with init,
/// 0.0003 for adapters, 0.0002 / sqrt(latents / 16384) for dictionaries), schedule ("cosine", "linear" or "constant"), final_share (0.1), warmup_steps (a twentieth of the steps, at most 500),
/// weight_decay (0.1), beta_2_half_life, grad_clip (1; 0 does not clip), dropout (the configuration's), held_out (0.1), eval_every (100),
/// save_every (100), keep_steps ([0, 1, 2, 4]), sample, patience, seed (0), dtype ("f32", "f16" or "bf16"), device ("auto"), compute_dtype ("f32" or "bf16"), n_head.
#[pyfunction]
#[pyo3(signature = (
    data, out, *, init = None, config = None, tokenizer = None, resume = false, on_step = None, offline = false, **options
))]
#[expect(clippy::too_many_arguments, reason = "keywords of Python")]
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
    let start = start_of(init, config)?;
    let options = TrainOptions {
        resume,
        ..read(Map::new(), options, &["init", "config", "tokenizer", "on_step", "offline"])?
    };
    let hub = hub(offline);
    run(py, TrainJob { data: files(data)?, start, tokenizer, out, options, hub }, on_step)
}

#[pymethods]
impl Model {
    /// Continues training the checkpoint that this model was opened from, in f32 from the stored weights, into the folder out. This
    /// model stays as it is; open the folder for the new one. Options and result: see candle_gpt2.train.
    #[pyo3(signature = (data, out, *, tokenizer = None, resume = false, on_step = None, **options))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
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
            data: files(data)?,
            start: Start::Checkpoint(opened.model),
            tokenizer: tokenizer.or(opened.tokenizer),
            out,
            options: TrainOptions { n_head: options.n_head.or(opened.n_head), ..options },
            hub: opened.hub,
        };
        run(py, job, on_step)
    }
}

/// What is trained.
pub(crate) fn start_of(init: Option<PathBuf>, config: Option<&Bound<'_, PyAny>>) -> Result<Start> {
    match (init, config) {
        (Some(checkpoint), None) => Ok(Start::Checkpoint(checkpoint)),
        (None, Some(config)) => configuration(config),
        _ => Err(wrong_value(
            "give init, a checkpoint that is trained further, or config, a model that is made anew; one of them",
        )),
    }
}

/// The files that are trained on.
pub(crate) fn files(data: &Bound<'_, PyAny>) -> Result<Vec<PathBuf>> {
    let files = paths("data", data)?;
    match files.is_empty() {
        true => Err(wrong_value("data: expected at least one file")),
        false => Ok(files),
    }
}

/// A new model, by a file or by the keys of one.
fn configuration(config: &Bound<'_, PyAny>) -> Result<Start> {
    if let Ok(path) = config.extract::<PathBuf>() {
        return Ok(Start::ConfigFile(path));
    }
    if !config.is_instance_of::<PyDict>() {
        return Err(wrong_type("config: expected a path, or a dict with the keys of a config.json"));
    }
    let config = Gpt2Config::from_json(&json_of(config)?.to_string());
    Ok(Start::Config(Box::new(config.map_err(|error| wrong_value(format!("config: {error}")))?)))
}

/// Follows a training, and ends it at a signal or at an exception.
struct Follower {
    listener: Listener,
    raised: Raised,
    has_raised: AtomicBool,
    /// What is given each entry of the log.
    on_step: Option<Py<PyAny>>,
    /// The bar of the steps, if nothing else reports them.
    steps: Mutex<Option<Box<dyn Progress>>>,
}

impl Follower {
    /// Does something in Python.
    fn attached(&self, work: impl FnOnce(Python<'_>) -> Result<()>) {
        // An interpreter that ends is not called any more.
        if let Some(Err(error)) = Python::try_attach(work) {
            self.raised.keep(error.into());
            self.has_raised.store(true, Ordering::Release);
        }
    }

    fn tell(&self, event: &Value) {
        if let Some(on_step) = &self.on_step {
            self.attached(|py| {
                on_step.call1(py, (python_of(py, event)?,))?;
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
                // Numbers that are not finite become None.
                self.tell(&serde_json::to_value(entry).unwrap_or_default());
            }
            TrainEvent::Sample { step, text, .. } => self.tell(&json!({"step": step, "sample": text})),
            _ => {}
        }
    }
}

impl Reporter for Follower {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        self.listener.start(what, total, unit)
    }

    fn note(&self, note: &str) {
        self.attached(|py| warn(py, note));
    }

    fn is_interrupted(&self) -> bool {
        self.has_raised.load(Ordering::Acquire) || self.listener.is_interrupted()
    }
}

fn run(py: Python<'_>, job: TrainJob, on_step: Option<Py<PyAny>>) -> Result<Bound<'_, PyAny>> {
    start()?;
    if on_step.as_ref().is_some_and(|on_step| !on_step.bind(py).is_callable()) {
        return Err(wrong_type("on_step: expected a function of a dict"));
    }
    let raised = Raised::default();
    let follower = Arc::new(Follower {
        listener: Listener::new(py),
        raised: raised.clone(),
        has_raised: AtomicBool::new(false),
        on_step,
        steps: Mutex::default(),
    });
    let reporter: Arc<dyn Reporter> = follower.clone();
    let report = interruptible(py, || job.run(&reporter, &mut |event| follower.on_event(event)));
    dict_of(py, &raised.or(report)?)
}
