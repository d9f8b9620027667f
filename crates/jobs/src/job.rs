//! A whole training from files to a folder, as every front end runs it: data, tokenizer, start, adapters, steps, evaluations,
//! samples and the report.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Device;
use candle_gpt2::{Gpt2Config, ParameterCounts};
use candle_gpt2_engine::{BUILT_IN, HubOptions, LoadedModel, ModelOptions, Reporter, Watched, free_memory};
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

/// Largest configuration that is read.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Tokens of a sample: enough to see what the model has learnt, at little cost.
const SAMPLE_TOKENS: usize = 60;

/// A training: its data, its folder and its options.
///
/// The folder becomes a Hugging Face checkpoint with the weights of the best held-out loss (the last ones if nothing is held
/// out), next to `log.jsonl`, `loss.svg` and the state to resume from. The same job gives the same weights, interrupted or
/// not.
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
    /// Texts: plain UTF-8 files, or JSONL files with a `text`, or `ids` of tokens, in each line; or one folder of token files, see
    /// [`TokenFolder`](crate::TokenFolder), whose held-out part is `val`. For [`Task::Classify`](crate::Task::Classify) JSONL files with
    /// `text` and `label`, for [`Task::Answer`](crate::Task::Answer) with `prompt` and `completion`, or TSV files of both.
    pub data: Vec<PathBuf>,
    /// What is trained.
    pub start: Start,
    /// A `tokenizer.json`, or a folder with one or with a vocabulary and merges; by default the checkpoint's, and for a new
    /// model one that is trained from the data.
    pub tokenizer: Option<PathBuf>,
    /// The folder that is written; it must be new or empty, but to resume.
    pub out: PathBuf,
    /// The other options.
    pub options: TrainOptions,
    /// Where the Hub's checkpoints come from.
    pub hub: HubOptions,
}

/// What happens in a training. [`TrainJob::run`] tells them.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum TrainEvent<'a> {
    /// The steps begin, or are resumed.
    Start {
        /// Steps of the whole training.
        steps: u64,
        /// Those of them that are done.
        steps_done: u64,
    },
    /// A step was taken, or the held-out loss measured: a line of the log.
    Entry(&'a Entry),
    /// A text was continued, after an evaluation.
    Sample {
        /// Steps so far.
        step: u64,
        /// The loss that was measured, in nats for each token.
        held_out_loss: f64,
        /// The text with what the model made of it, or why it made nothing.
        text: &'a str,
    },
}

/// How a training ended, and on what. [`TrainJob::run`] returns it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainReport {
    /// The folder.
    pub out: PathBuf,
    /// Parameters of the model.
    pub parameters: usize,
    /// Tokens that were trained on.
    pub training_tokens: usize,
    /// Tokens that were held out.
    pub held_out_tokens: usize,
    /// Rows that were trained on, if the data has rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub training_rows: Option<usize>,
    /// Rows that were held out, if the data has rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_out_rows: Option<usize>,
    /// Steps taken in all.
    pub steps: u64,
    /// Whether it ended before all steps were taken, for want of improvement.
    pub stopped_early: bool,
    /// Loss of the last step, in nats for each token.
    pub loss: Option<f64>,
    /// The evaluation with the lowest loss, whose weights the folder holds.
    pub best_step: Option<u64>,
    /// Its loss, in nats for each token.
    pub held_out_loss: Option<f64>,
    /// The same for each character.
    pub held_out_loss_per_character: Option<f64>,
    /// What the best one says of held-out rows with labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub classification: Option<ClassificationReport>,
    /// How good the best dictionary is on the held-out texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dictionary: Option<DictionaryMetrics>,
    /// Seconds of this run.
    pub elapsed_s: f64,
}

/// What there is before the first step.
struct Prepared {
    config: Gpt2Config,
    tokenizer: Arc<Tokenizer>,
    /// Tokenizer and settings to write with the model.
    companions: Companions,
    checkpoint: Option<Checkpoint>,
}

impl TrainJob {
    /// Trains. `reporter` receives the progress of loading and encoding, and may interrupt the job, which then ends within an
    /// operation, the state of the last step saved; `on_event` is called with every step.
    ///
    /// # Errors
    /// When options are out of range or do not go together, the folder is taken, data or start cannot be read or do not fit
    /// each other, the memory does not suffice, a loss is not a number, or a file cannot be written;
    /// [`TrainingError::Interrupted`] when the reporter interrupts it.
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
        let mut run = self.open(reporter)?;
        let (steps, steps_done) = (run.trainer().numbers().steps, run.trainer().steps_done());
        on_event(TrainEvent::Start { steps, steps_done });
        let tokenizer = Arc::clone(run.tokenizer());
        let mut report = |entry: &Entry, trainer: &Trainer| {
            on_event(TrainEvent::Entry(entry));
            if let (Some(held_out_loss), Some(prompt)) = (entry.held_out_loss, &self.options.sample) {
                // A sample that fails is shown as such; the training continues.
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

    /// Draws the table of confusion into the folder.
    fn draw(&self, report: &ClassificationReport, reporter: &dyn Reporter) -> Result<(), JobError> {
        let path = self.out.join("confusion.svg");
        match candle_gpt2_pictures::svg(&confusion_picture(report), candle_gpt2_pictures::Width::OneColumn) {
            Ok(picture) => Ok(replace_file(&path, |partial| Ok(fs::write(partial, picture)?))?),
            // Of very many labels there is no picture; the numbers are there all the same.
            Err(error) => {
                reporter.note(&format!("no {}: {error}", path.display()));
                Ok(())
            }
        }
    }

    /// Everything up to the first step, or to the step that the training resumes from.
    ///
    /// # Errors
    /// As [`TrainJob::run`], but for what a step may fail with.
    pub fn open(&self, reporter: &Arc<dyn Reporter>) -> Result<Run, JobError> {
        self.open_share(reporter, Share::WHOLE)
    }

    /// The same for one of several processes, each of which computes a share of every batch, see [`Run::share_of_step`]. The
    /// first one writes the folder, and the others nothing that stays; all of them see the state in it, if they resume and it
    /// can be read, and else are to be given it, see [`Run::set_state`].
    ///
    /// # Errors
    /// As [`TrainJob::open`], and when there is no such share.
    pub fn open_share(&self, reporter: &Arc<dyn Reporter>, share: Share) -> Result<Run, JobError> {
        share.check()?;
        let options = &self.options;
        options.check(&self.start)?;
        let apart = match share.index {
            0 => None,
            _ => Some(apart()?),
        };
        let workplace = apart.as_ref().map_or(self.out.as_path(), TempDir::path);
        if apart.is_none() {
            JobFolder::expect_unused(&self.out)?;
            self.check_folder()?;
        }
        let source = Source::open(&self.data, options)?;
        let prepared = self.prepare(&source, &**reporter)?;
        let mut numbers = options.numbers(&self.start, &prepared.config);
        options.put_dictionary(&prepared.config, &mut numbers)?;
        numbers.check(&prepared.config)?;
        let assignment = source.assignment(&prepared.config)?;
        let assignment = assignment.as_ref();
        numbers.class_weights = class_weights(options.class_weights.as_ref(), assignment, &prepared.config)?;
        if let Some(lora) = options.lora() {
            lora.check(&prepared.config)?;
        }
        if let Some(note) = prepared.config.end_token_note() {
            reporter.note(&note);
        }
        let device = options.device.open(&**reporter)?;
        if device.is_cpu() && numbers.compute_dtype != ComputeDType::F32 {
            reporter.note("on the CPU bf16 is computed in f32 and is slower than plain f32");
        }
        let (batch_size, context) = numbers.largest_batch();
        let (batch_size, context) = (share.of(batch_size).len(), source.longest(context));
        let largest = Hyperparameters { batch_size, context, ..numbers.clone() };
        if !options.ignore_memory {
            self.check_memory(&prepared.config, &largest, &device)?;
        }
        if let Some(dictionary) = &numbers.dictionary
            && dictionary.kind == DictionaryKind::CrossLayerTranscoder
        {
            // Its decoders grow with the square of the number of layers.
            reporter.note(&format!(
                "a cross-layer transcoder of {} parameters; training it takes about {} MiB",
                grouped(dictionary.parameter_count(&prepared.config)?),
                estimated_bytes(&prepared.config, &largest, false, &device) >> 20
            ));
        }
        let explained = self.explained(&source, (share, &device), &**reporter)?;
        let job_folder = match apart {
            None => Some(JobFolder::take(&self.out, &results(&self.out))?),
            Some(_) => None,
        };
        if apart.is_none() {
            // Another process may have used it since it was looked at.
            self.check_folder()?;
        }
        let encoder = (&*prepared.tokenizer, &prepared.config);
        let data = source.encode(assignment, encoder, &numbers, workplace, &**reporter)?;
        let trainer = match explained {
            Some((model, has_bos)) => self.dictionary_trainer(&model, has_bos, numbers, reporter)?,
            None => self.trainer(&prepared, numbers, &device, reporter)?,
        };
        let run_options = RunOptions {
            base_model: self.base_model(),
            folder: self.out.clone(),
            eval_every: options.eval_every,
            save_every: options.save_every,
            keep_steps: options.keep_steps.clone().unwrap_or_default(),
            patience: options.patience,
            dtype: options.dtype,
            share,
            apart,
        };
        let run =
            Run::open(job_folder, trainer, data, (prepared.tokenizer, prepared.companions), run_options)?;
        if let Some(note) = run.log_note() {
            reporter.note(&note);
        }
        Ok(run)
    }

    /// A folder that holds something is only used to resume.
    fn check_folder(&self) -> Result<(), TrainingError> {
        // The log of a training that failed before it saved a state is begun anew.
        let begun = is_log(&self.out.join(LOG)).then_some(LOG);
        let resume = Resume { goes_on: self.options.resume, can_go_on: has_state(&self.out) };
        JobFolder::check(&self.out, &results(&self.out), begun, resume)
    }

    /// The checkpoint that the training starts from: the absolute path of one on this machine, or its name.
    fn base_model(&self) -> Option<String> {
        let Start::Checkpoint(model) = &self.start else { return None };
        let is_local = model != Path::new(BUILT_IN) && model.exists();
        let absolute = std::path::absolute(model).ok().filter(|_| is_local);
        absolute.as_ref().unwrap_or(model).to_str().map(str::to_owned)
    }

    /// The configuration, the tokenizer and, if there is one, the checkpoint.
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
        // The ids of the end of a text are the tokenizer's, whatever the configuration says.
        if let Some(end) = tokenizer.token_to_id(END_OF_TEXT) {
            config.bos_token_id = Some(end);
            config.eos_token_id = vec![end];
        }
        let config = source.with_head(config)?;
        let companions = tokenizer.clone().into();
        Ok(Prepared { config, tokenizer: tokenizer.into(), companions, checkpoint: None })
    }

    /// The model whose values a dictionary learns, and whether the texts of the data begin with its BOS token; `None` of the other tasks.
    fn explained(
        &self,
        source: &Source,
        (share, device): (Share, &Device),
        reporter: &dyn Reporter,
    ) -> Result<Option<(LoadedModel, bool)>, JobError> {
        let (Task::Dictionary, Start::Checkpoint(model)) = (self.options.task, &self.start) else {
            return Ok(None);
        };
        if share.count > 1 {
            let what = "`task` dictionary is trained by one process: which latents are kept depends on the whole batch";
            return Err(TrainingError::Call { what: what.into() }.into());
        }
        if !device.is_cpu() {
            let what = "`device`: dictionaries are trained on the CPU; give cpu";
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
        numbers: Hyperparameters,
        reporter: &Arc<dyn Reporter>,
    ) -> Result<Trainer, JobError> {
        let name = match &self.start {
            Start::Checkpoint(name) => name.display().to_string(),
            _ => String::new(),
        };
        let trainer = Trainer::with_dictionary((model.model().clone(), name), has_bos, numbers)?;
        let interrupt = Arc::clone(reporter);
        Ok(trainer.interrupted_by(Arc::new(move || interrupt.is_interrupted())))
    }

    fn trainer(
        &self,
        prepared: &Prepared,
        numbers: Hyperparameters,
        device: &Device,
        reporter: &Arc<dyn Reporter>,
    ) -> Result<Trainer, JobError> {
        let (config, seed) = (&prepared.config, numbers.seed);
        let parameters = match &prepared.checkpoint {
            Some(checkpoint) => {
                let progress = Watched::new(&**reporter, "loading", checkpoint.parameter_bytes());
                let parameters = Parameters::from_checkpoint(checkpoint, device, &progress)?;
                parameters.with_fresh_head(config, seed)?
            }
            None => Parameters::initialize_as(self.options.initialization, config, seed, device)?,
        };
        let trainer = match self.options.lora() {
            Some(lora) => {
                let (lora, adapters) = Lora::new(config, lora, &parameters, seed)?;
                Trainer::with_adapters(config, lora, adapters, numbers)?
            }
            None => {
                let (parameters, fixed) = parameters.split(config, numbers.train_blocks);
                Trainer::with_fixed(config, parameters, fixed, numbers)?
            }
        };
        let interrupt = Arc::clone(reporter);
        Ok(trainer
            .recomputing(self.options.recompute)
            .interrupted_by(Arc::new(move || interrupt.is_interrupted())))
    }

    /// Refuses a training that the machine's memory cannot hold.
    fn check_memory(
        &self,
        config: &Gpt2Config,
        numbers: &Hyperparameters,
        device: &Device,
    ) -> Result<(), TrainingError> {
        let recomputes = self.options.recompute;
        let mut needed = estimated_bytes(config, numbers, recomputes, device);
        if numbers.dictionary.is_some() {
            // The model that it explains is loaded later, in f32.
            needed += 4 * ParameterCounts::new(config).unique as u64;
        }
        let free = free_memory(device).map(|free| free as u64);
        let Some(free) = free.filter(|free| needed > *free) else { return Ok(()) };
        let more = match (&numbers.dictionary, recomputes) {
            (Some(_), _) => ", or `latents`",
            (None, false) => ", or add `recompute`",
            (None, true) => "",
        };
        let advice = format!(
            "lower `batch_size` (and raise `accumulate`) or `context`{more}; `ignore_memory` trains all the same"
        );
        Err(TrainingError::NoRoom {
            parameters: match &numbers.dictionary {
                Some(dictionary) => dictionary.parameter_count(config)?,
                None => ParameterCounts::new(config).unique,
            },
            windows: numbers.batch_size,
            tokens: numbers.context,
            needed,
            free,
            advice,
        })
    }
}

/// A folder that goes with the run that uses it.
fn apart() -> Result<TempDir, TrainingError> {
    TempDir::new().map_err(|error| TrainingError::File { path: std::env::temp_dir(), error })
}

fn read_config(path: &Path) -> Result<Gpt2Config, TrainingError> {
    let text = read_bounded_text(path, MAX_CONFIG_BYTES)
        .map_err(|error| TrainingError::File { path: path.to_owned(), error })?;
    Gpt2Config::from_json(&text).map_err(|error| TrainingError::ConfigFile { path: path.to_owned(), error })
}

/// What the model makes of a prompt.
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
