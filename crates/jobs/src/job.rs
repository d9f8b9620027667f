//! Complete training job, from data files to an output folder, shared by all front ends.
//!
//! It covers the data, tokenizer, initial weights, adapters, steps, evaluations, samples and the report.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Device;
use candle_gpt2::{Gpt2Config, ParameterCounts, using};
use candle_gpt2_engine::{BUILT_IN, HubOptions, LoadedModel, ModelOptions, ReadJob, Reporter, free_memory};
use candle_gpt2_generation::{GenerationConfig, TextGenerator};
use candle_gpt2_weights::{
    Checkpoint, Companions, END_OF_TEXT, Tokenizer, encode, grouped, load_tokenizer, read_bounded_text,
    replace_file,
};
use serde::Serialize;
use tempfile::TempDir;

use crate::job_folder::{JobFolder, Resume};
use crate::journal::is_log;
use crate::run::{LOG, RunOptions, has_state, interrupted, results};
use crate::source::{Source, class_weights};
use crate::{
    ClassificationReport, ComputeDType, DataSize, DictionaryKind, DictionaryMetrics, Entry, Hyperparameters,
    JobError, Lora, Parameters, Run, Share, Start, Task, TrainOptions, Trainer, TrainingError,
    confusion_picture, estimated_bytes,
};

/// Maximum size of a configuration file in bytes.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Length of a sample in tokens, long enough to show what the model has learned at little cost.
const SAMPLE_TOKENS: usize = 60;

/// Training job: its data, its folder and its options.
///
/// The folder becomes a Hugging Face checkpoint with the weights that have the lowest held-out loss, or with
/// the last weights if nothing is held out. It also contains `log.jsonl`, `loss.svg` and the state for
/// resuming. The same job produces the same weights, interrupted or not.
///
/// ```
/// use std::sync::Arc;
///
/// use candle_gpt2::Gpt2Config;
/// use candle_gpt2_engine::{HubOptions, Silent};
/// use candle_gpt2_jobs::{Start, TrainJob, TrainOptions};
///
/// let folder = tempfile::tempdir()?;
/// let text = folder.path().join("text.txt");
/// std::fs::write(&text, "to be, or not to be, that is the question: ".repeat(50))?;
/// let sizes = Gpt2Config { vocab_size: 270, n_positions: 16, n_embd: 12, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// let job = TrainJob {
///     data: vec![text],
///     start: Start::Config(Box::new(sizes)),
///     tokenizer: None, // trained from the text
///     out: folder.path().join("model"),
///     options: TrainOptions { steps: 2, batch_size: 3, eval_every: 2, ..TrainOptions::default() },
///     hub: HubOptions::default(),
/// };
/// let reporter: Arc<dyn candle_gpt2_engine::Reporter> = Arc::new(Silent);
/// let report = job.run(&reporter, &mut |_| ())?;
/// assert_eq!(report.steps, 2);
/// assert!(report.out.join("model.safetensors").is_file());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct TrainJob {
    /// Data files, depending on the task.
    ///
    /// For texts, these are plain UTF-8 files, or JSONL files with a `text` or the `ids` of tokens in
    /// each line. A single folder of token files is also accepted, see
    /// [`TokenFolder`](crate::TokenFolder); its held-out part is `val`.
    /// [`Task::Classify`](crate::Task::Classify) needs JSONL files with `text` and `label`, and
    /// [`Task::Answer`](crate::Task::Answer) needs `prompt` and `completion`. TSV files work for both.
    pub data: Vec<PathBuf>,
    /// Initial model.
    pub start: Start,
    /// Tokenizer: a `tokenizer.json`, or a folder that contains one or a vocabulary with merges.
    ///
    /// Defaults to the tokenizer of the checkpoint. For a new model, the default is a tokenizer trained
    /// on the data.
    pub tokenizer: Option<PathBuf>,
    /// Output folder; it must be new or empty, unless the job resumes.
    pub out: PathBuf,
    /// Other options.
    pub options: TrainOptions,
    /// Options for checkpoints on the Hub.
    pub hub: HubOptions,
}

/// Training event, reported by [`TrainJob::run`].
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum TrainEvent<'a> {
    /// Training begins or resumes.
    Start {
        /// Total number of training steps.
        steps: u64,
        /// Number of steps already taken.
        steps_done: u64,
    },
    /// New log entry: a step was taken, or the held-out loss was measured.
    Entry(&'a Entry),
    /// Sample generated after an evaluation.
    Sample {
        /// Number of steps so far.
        step: u64,
        /// Held-out loss, in nats per token.
        held_out_loss: f64,
        /// Prompt with the generated text, or the error that prevented it.
        text: &'a str,
    },
}

/// Outcome of a training run, returned by [`TrainJob::run`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainReport {
    /// Output folder.
    pub out: PathBuf,
    /// Number of model parameters.
    pub parameters: usize,
    /// Number of training tokens.
    pub training_tokens: usize,
    /// Number of held-out tokens.
    pub held_out_tokens: usize,
    /// Number of training rows, if the data has rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub training_rows: Option<usize>,
    /// Number of held-out rows, if the data has rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_out_rows: Option<usize>,
    /// Total number of steps taken.
    pub steps: u64,
    /// Whether training stopped early because the held-out loss no longer improved.
    pub stopped_early: bool,
    /// Loss of the last step, in nats per token.
    pub loss: Option<f64>,
    /// Step of the evaluation with the lowest loss; the folder contains its weights.
    pub best_step: Option<u64>,
    /// Held-out loss at `best_step`, in nats per token.
    pub held_out_loss: Option<f64>,
    /// Held-out loss at `best_step`, in nats per character.
    pub held_out_loss_per_character: Option<f64>,
    /// Classification report at `best_step`, if the held-out rows have labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub classification: Option<ClassificationReport>,
    /// Metrics of the best dictionary on the held-out texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dictionary: Option<DictionaryMetrics>,
    /// Duration of this run in seconds.
    pub elapsed_s: f64,
}

/// State prepared before the first step.
struct Prepared {
    config: Gpt2Config,
    tokenizer: Arc<Tokenizer>,
    /// Tokenizer and settings to write with the model.
    companions: Companions,
    checkpoint: Option<Checkpoint>,
}

impl TrainJob {
    /// Runs the training job.
    ///
    /// `reporter` receives the progress of loading and encoding. It may interrupt the job, which then
    /// stops within one operation and saves the state of the last step. `on_event` is called with every
    /// event.
    ///
    /// # Errors
    /// Fails if options are out of range or conflict, or if the folder is in use. Fails if the data or
    /// the initial model cannot be read or do not match. Fails if memory is insufficient, a loss is not
    /// finite, or a file cannot be written.
    ///
    /// Returns [`TrainingError::Interrupted`] if the reporter interrupts the job.
    pub fn run(
        &self,
        reporter: &Arc<dyn Reporter>,
        on_event: &mut dyn FnMut(TrainEvent),
    ) -> Result<TrainReport, JobError> {
        match self.train(reporter, on_event) {
            Err(error) if error.is_interrupted() => Err(interrupted(&self.out).into()),
            done => done,
        }
    }

    fn train(
        &self,
        reporter: &Arc<dyn Reporter>,
        on_event: &mut dyn FnMut(TrainEvent),
    ) -> Result<TrainReport, JobError> {
        let run = self.open(reporter)?;
        let device = run.trainer().device().clone();
        using(&device, || self.train_opened(run, reporter, on_event))
    }

    /// Takes the remaining steps of an opened run and frees its memory.
    fn train_opened(
        &self,
        mut run: Run,
        reporter: &Arc<dyn Reporter>,
        on_event: &mut dyn FnMut(TrainEvent),
    ) -> Result<TrainReport, JobError> {
        let (steps, steps_done) = (run.trainer().numbers().steps, run.trainer().steps_done());
        on_event(TrainEvent::Start { steps, steps_done });
        let tokenizer = Arc::clone(run.tokenizer());
        let mut report = |entry: &Entry, trainer: &Trainer| {
            on_event(TrainEvent::Entry(entry));
            if let (Some(held_out_loss), Some(prompt)) = (entry.held_out_loss, &self.options.sample) {
                // If sampling fails, the error is reported instead of a text, and training continues.
                let text = sample(trainer, &tokenizer, prompt);
                let text = text.unwrap_or_else(|error| error.to_string());
                on_event(TrainEvent::Sample { step: entry.step, held_out_loss, text: &text });
            }
        };
        let outcome = run.train(&mut report)?;
        let (best_step, best) = outcome.best.unzip();
        let DataSize { training_tokens, held_out_tokens, rows } = run.data().size;
        let config = run.trainer().config();
        let confusion = best.as_ref().and_then(|evaluation| evaluation.confusion.as_ref());
        let classification = confusion.map(|confusion| confusion.report(&config.id2label));
        if let Some(classification) = &classification {
            self.draw(classification, &**reporter)?;
        }
        Ok(TrainReport {
            out: self.out.clone(),
            parameters: match run.trainer().numbers().dictionary {
                Some(_) => run.trainer().parameters().count(),
                None => ParameterCounts::new(config).unique,
            },
            training_tokens,
            held_out_tokens,
            training_rows: rows.map(|(training, _)| training),
            held_out_rows: rows.map(|(_, held_out)| held_out),
            steps: outcome.steps,
            stopped_early: outcome.is_stopped_early,
            loss: outcome.last_loss,
            best_step,
            held_out_loss: best.as_ref().map(|evaluation| evaluation.loss),
            held_out_loss_per_character: best.as_ref().and_then(|evaluation| evaluation.loss_per_character),
            dictionary: best.and_then(|evaluation| evaluation.dictionary),
            classification,
            elapsed_s: run.elapsed_s(),
        })
    }

    /// Draws the confusion matrix to a file in the folder.
    fn draw(&self, report: &ClassificationReport, reporter: &dyn Reporter) -> Result<(), JobError> {
        let path = self.out.join("confusion.svg");
        match candle_gpt2_pictures::svg(&confusion_picture(report), candle_gpt2_pictures::Width::OneColumn) {
            Ok(picture) => Ok(replace_file(&path, |partial| Ok(fs::write(partial, picture)?))?),
            // A matrix with too many labels cannot be drawn. The numbers are still reported.
            Err(error) => {
                reporter.note(&format!("{} was not drawn: {error}", path.display()));
                Ok(())
            }
        }
    }

    /// Prepares the run up to its first step, or up to the step from which it resumes.
    ///
    /// # Errors
    /// Fails for the same reasons as [`TrainJob::run`], except for errors within a step.
    pub fn open(&self, reporter: &Arc<dyn Reporter>) -> Result<Run, JobError> {
        self.open_share(reporter, Share::WHOLE)
    }

    /// Opens the run for one of several processes that each compute a share of every batch.
    ///
    /// See [`Run::share_of_step`]. The first process writes the folder, and the others keep no files. When
    /// resuming, each process loads the state in the folder if it can read it. Otherwise it must receive the
    /// state through [`Run::set_state`].
    ///
    /// # Errors
    /// Fails for the same reasons as [`TrainJob::open`], and if the share is invalid.
    pub fn open_share(&self, reporter: &Arc<dyn Reporter>, share: Share) -> Result<Run, JobError> {
        share.check()?;
        let options = &self.options;
        options.check(&self.start)?;
        let temp_folder = match share.index {
            0 => None,
            _ => Some(temp_folder()?),
        };
        let workplace = temp_folder.as_ref().map_or(self.out.as_path(), TempDir::path);
        if temp_folder.is_none() {
            JobFolder::expect_unused(&self.out)?;
            self.check_folder()?;
        }
        let source = Source::open(&self.data, options)?;
        let prepared = self.prepare(&source, &**reporter)?;
        let mut hyperparameters = options.hyperparameters(&self.start, &prepared.config);
        options.put_dictionary(&prepared.config, &mut hyperparameters)?;
        hyperparameters.check(&prepared.config)?;
        let assignment = source.assignment(&prepared.config)?;
        let assignment = assignment.as_ref();
        hyperparameters.class_weights =
            class_weights(options.class_weights.as_ref(), assignment, &prepared.config)?;
        if let Some(lora) = options.lora() {
            lora.check(&prepared.config)?;
        }
        if let Some(note) = prepared.config.end_token_note() {
            reporter.note(&note);
        }
        let device = options.device.open(&**reporter)?;
        if device.is_cpu() && hyperparameters.compute_dtype != ComputeDType::F32 {
            reporter.note("on the CPU, bf16 is computed in f32, which is slower than plain f32");
        }
        let (batch_size, context) = hyperparameters.largest_batch();
        let (batch_size, context) = (share.of(batch_size).len(), source.longest(context));
        let largest = Hyperparameters { batch_size, context, ..hyperparameters.clone() };
        if !options.ignore_memory {
            self.check_memory(&prepared.config, &largest, &device)?;
        }
        if let Some(dictionary) = &hyperparameters.dictionary
            && dictionary.kind == DictionaryKind::CrossLayerTranscoder
        {
            // The total size of the decoders grows with the square of the number of layers.
            reporter.note(&format!(
                "a cross-layer transcoder with {} parameters; training it needs about {} MiB",
                grouped(dictionary.parameter_count(&prepared.config)?),
                estimated_bytes(&prepared.config, &largest, false, &device) >> 20
            ));
        }
        let explained = self.explained_model(&source, (share, &device), &**reporter)?;
        let job_folder = match temp_folder {
            None => Some(JobFolder::take(&self.out, &results(&self.out))?),
            Some(_) => None,
        };
        if temp_folder.is_none() {
            // Another process may have used the folder since the first check.
            self.check_folder()?;
        }
        let encoder = (&*prepared.tokenizer, &prepared.config);
        let data = source.encode(assignment, encoder, &hyperparameters, workplace, &**reporter)?;
        let run_options = RunOptions {
            base_model: self.base_model(),
            folder: self.out.clone(),
            eval_every: options.eval_every,
            save_every: options.save_every,
            keep_steps: options.keep_steps.clone().unwrap_or_default(),
            patience: options.patience,
            dtype: options.dtype,
            share,
            temp_folder,
        };
        let run = using(&device, || {
            let trainer = match explained {
                Some((model, has_bos)) => {
                    self.dictionary_trainer(&model, has_bos, hyperparameters, reporter)?
                }
                None => self.trainer(&prepared, hyperparameters, &device, reporter)?,
            };
            let files = (prepared.tokenizer, prepared.companions);
            Ok::<_, JobError>(Run::open(job_folder, trainer, data, files, run_options)?)
        })?;
        if let Some(note) = run.log_note() {
            reporter.note(&note);
        }
        Ok(run)
    }

    /// Checks that a non-empty folder is only used to resume.
    fn check_folder(&self) -> Result<(), TrainingError> {
        // If a run failed before saving a state, its log starts over.
        let begun = is_log(&self.out.join(LOG)).then_some(LOG);
        let resume = Resume { resumes: self.options.resume, can_resume: has_state(&self.out) };
        JobFolder::check(&self.out, &results(&self.out), begun, resume)
    }

    /// Returns the initial checkpoint: its absolute path on this machine, or its name.
    fn base_model(&self) -> Option<String> {
        let Start::Checkpoint(model) = &self.start else { return None };
        let is_local = model != Path::new(BUILT_IN) && model.exists();
        let absolute = std::path::absolute(model).ok().filter(|_| is_local);
        absolute.as_ref().unwrap_or(model).to_str().map(str::to_owned)
    }

    /// Loads the configuration, the tokenizer and the optional checkpoint.
    fn prepare(&self, source: &Source, reporter: &dyn Reporter) -> Result<Prepared, JobError> {
        let (config, name) = match &self.start {
            Start::Checkpoint(model) => {
                let options = ModelOptions {
                    model: model.clone(),
                    n_head: self.options.n_head,
                    hub: self.hub.clone(),
                    ..ModelOptions::default()
                };
                let checkpoint = options.open_checkpoint(reporter)?;
                checkpoint.check()?;
                let companions = checkpoint.companions(self.tokenizer.as_deref())?;
                let tokenizer = match companions.tokenizer() {
                    Some(tokenizer) => tokenizer.clone().into(),
                    None => checkpoint.tokenizer(self.tokenizer.as_deref())?.into(),
                };
                companions.notes().iter().for_each(|note| reporter.note(note));
                let config = source.with_head(checkpoint.config().clone())?;
                let config = self.options.with_dropout(config);
                return Ok(Prepared { config, tokenizer, companions, checkpoint: Some(checkpoint) });
            }
            Start::ConfigFile(path) => (read_config(path)?, path.display().to_string()),
            Start::Config(config) => ((**config).clone(), "`config`".into()),
        };
        let mut config = self.options.with_dropout(config);
        let tokenizer = match &self.tokenizer {
            Some(path) => load_tokenizer(path)?,
            None => source.tokenizer((&config, name), reporter)?,
        };
        // The BOS and EOS ids come from the tokenizer, and override the configuration.
        if let Some(end) = tokenizer.token_to_id(END_OF_TEXT) {
            config.bos_token_id = Some(end);
            config.eos_token_id = vec![end];
        }
        let config = source.with_head(config)?;
        let companions = tokenizer.clone().into();
        Ok(Prepared { config, tokenizer: tokenizer.into(), companions, checkpoint: None })
    }

    /// Loads the model that a dictionary explains; `None` for other tasks.
    ///
    /// The flag is true if the sequences of the data begin with the BOS token.
    fn explained_model(
        &self,
        source: &Source,
        (share, device): (Share, &Device),
        reporter: &dyn Reporter,
    ) -> Result<Option<(LoadedModel, bool)>, JobError> {
        let (Task::Dictionary, Start::Checkpoint(model)) = (self.options.task, &self.start) else {
            return Ok(None);
        };
        if share.count > 1 {
            let what = "`task` dictionary needs a single process, because the selection of latents depends on the whole batch";
            return Err(TrainingError::Call { what: what.into() }.into());
        }
        if !device.is_cpu() {
            let what = "`device`: dictionaries are trained on the CPU; use cpu";
            return Err(TrainingError::Call { what: what.into() }.into());
        }
        let options = ModelOptions {
            model: model.clone(),
            n_head: self.options.n_head,
            hub: self.hub.clone(),
            device: self.options.device,
            ..ModelOptions::default()
        };
        let loaded = options.open(reporter)?.load(reporter)?;
        let has_bos = match source {
            Source::Activations(folder, _) => {
                folder.check_model(&loaded, reporter)?;
                folder.has_bos()
            }
            _ => false,
        };
        Ok(Some((loaded, has_bos)))
    }

    fn dictionary_trainer(
        &self,
        model: &LoadedModel,
        has_bos: bool,
        hyperparameters: Hyperparameters,
        reporter: &Arc<dyn Reporter>,
    ) -> Result<Trainer, JobError> {
        let name = match &self.start {
            Start::Checkpoint(name) => name.display().to_string(),
            _ => String::new(),
        };
        let trainer = Trainer::with_dictionary((model.model().clone(), name), has_bos, hyperparameters)?;
        let interrupt = Arc::clone(reporter);
        Ok(trainer.interrupted_by(Arc::new(move || interrupt.is_interrupted())))
    }

    fn trainer(
        &self,
        prepared: &Prepared,
        hyperparameters: Hyperparameters,
        device: &Device,
        reporter: &Arc<dyn Reporter>,
    ) -> Result<Trainer, JobError> {
        let (config, seed) = (&prepared.config, hyperparameters.seed);
        let parameters = match &prepared.checkpoint {
            Some(checkpoint) => {
                let progress = ReadJob::new(&**reporter, "loading", checkpoint.parameter_bytes());
                let parameters = Parameters::from_checkpoint(checkpoint, device, &progress)?;
                parameters.with_fresh_head(config, seed)?
            }
            None => Parameters::initialize_as(self.options.initialization, config, seed, device)?,
        };
        let trainer = match self.options.lora() {
            Some(lora) => {
                let (lora, adapters) = Lora::new(config, lora, &parameters, seed)?;
                Trainer::with_adapters(config, lora, adapters, hyperparameters)?
            }
            None => {
                let (parameters, fixed) = parameters.split(config, hyperparameters.train_blocks);
                Trainer::with_fixed(config, parameters, fixed, hyperparameters)?
            }
        };
        let interrupt = Arc::clone(reporter);
        Ok(trainer
            .recomputing(self.options.recompute)
            .interrupted_by(Arc::new(move || interrupt.is_interrupted())))
    }

    /// Rejects a training job that exceeds the machine's memory.
    fn check_memory(
        &self,
        config: &Gpt2Config,
        hyperparameters: &Hyperparameters,
        device: &Device,
    ) -> Result<(), TrainingError> {
        let recomputes = self.options.recompute;
        let mut needed = estimated_bytes(config, hyperparameters, recomputes, device);
        if hyperparameters.dictionary.is_some() {
            // The explained model is loaded later, in f32.
            needed += 4 * ParameterCounts::new(config).unique as u64;
        }
        let free = free_memory(device).map(|free| free as u64);
        let Some(free) = free.filter(|free| needed > *free) else { return Ok(()) };
        let more = match (&hyperparameters.dictionary, recomputes) {
            (Some(_), _) => ", or `latents`",
            (None, false) => ", or add `recompute`",
            (None, true) => "",
        };
        let advice = format!(
            "lower `batch_size` (and raise `accumulate`) or `context`{more}; `ignore_memory` skips this check"
        );
        Err(TrainingError::NoRoom {
            parameters: match &hyperparameters.dictionary {
                Some(dictionary) => dictionary.parameter_count(config)?,
                None => ParameterCounts::new(config).unique,
            },
            windows: hyperparameters.batch_size,
            tokens: hyperparameters.context,
            needed,
            free,
            advice,
        })
    }
}

/// Creates a temporary folder that is deleted with its run.
fn temp_folder() -> Result<TempDir, TrainingError> {
    TempDir::new().map_err(|error| TrainingError::File { path: std::env::temp_dir(), error })
}

fn read_config(path: &Path) -> Result<Gpt2Config, TrainingError> {
    let text = read_bounded_text(path, MAX_CONFIG_BYTES)
        .map_err(|error| TrainingError::File { path: path.to_owned(), error })?;
    Gpt2Config::from_json(&text).map_err(|error| TrainingError::ConfigFile { path: path.to_owned(), error })
}

/// Generates a continuation of a prompt.
fn sample(trainer: &Trainer, tokenizer: &Tokenizer, prompt: &str) -> Result<String, JobError> {
    let model = trainer.model()?;
    let ids = encode(tokenizer, prompt)?;
    let config = GenerationConfig {
        max_new_tokens: SAMPLE_TOKENS,
        do_sample: true,
        top_k: 50,
        eos_token_id: trainer.config().end_tokens(),
        ..GenerationConfig::default()
    };
    let mut text = prompt.to_owned();
    let pieces = TextGenerator::new(&model, &ids, &config, tokenizer)?;
    for piece in pieces.take_while(|_| !trainer.is_interrupted()) {
        text.push_str(&piece?);
    }
    Ok(text)
}
