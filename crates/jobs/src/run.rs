//! Training loop with evaluations, checkpoints, the log and the loss curve, in one folder.
//!
//! The folder is a Hugging Face checkpoint with the best weights so far by held-out loss, or with the
//! latest weights if nothing is held out. Adapters are merged into it, and also saved separately in
//! `adapter`. The folder also has the state for resuming, `log.jsonl` and, at the end, `loss.svg`.
//!
//! Every file is replaced as a whole. Models of kept steps are in `step-N`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use candle_core::Device;
use candle_gpt2_training::share;
use candle_gpt2_training::state::{self, Best, Progress};
use candle_gpt2_training::{CONFIG_FILE, LAYERS_CONFIG_FILE, WEIGHTS_FILE, layer_files};
use candle_gpt2_weights::{Companions, Tokenizer, WrittenDType, replace_hugging_face};
use tempfile::TempDir;

use crate::job_folder::JobFolder;
use crate::text_data::TOKENS;
use crate::{
    Confusion, Entry, Evaluation, JobError, Journal, Share, StepReport, Trainer, TrainingData, TrainingError,
    loss_curve,
};

/// Log of every step.
pub(crate) const LOG: &str = "log.jsonl";
/// Files of a checkpoint and its adapters.
const CHECKPOINT: [&str; 5] = [
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
];
/// Dictionary files, except for each layer's files.
const DICTIONARY: [&str; 3] = [WEIGHTS_FILE, CONFIG_FILE, LAYERS_CONFIG_FILE];
/// Files that any training run may write.
const RECORDS: [&str; 5] = [state::FILE_NAME, LOG, "loss.svg", "confusion.svg", TOKENS];

/// Returns the files and folders that a run in this folder replaces as a whole.
///
/// They include the existing files of each layer and each kept step, complete or not.
pub(crate) fn results(folder: &Path) -> Vec<String> {
    let names = file_names(folder);
    let mut results: Vec<String> = RECORDS.map(str::to_owned).to_vec();
    results.extend(model_files(&names));
    for step in names.iter().filter(|name| is_step(name)) {
        let within = folder.join(step);
        // A symbolic link may point outside the folder.
        if within.is_symlink() || !within.is_dir() {
            continue;
        }
        results.extend(model_files(&file_names(&within)).map(|file| format!("{step}/{file}")));
    }
    results
}

/// Names of model and dictionary files, for a folder that contains files with these names.
fn model_files(names: &[String]) -> impl Iterator<Item = String> {
    let of_layers = (0..)
        .map(layer_files)
        .take_while(|files| names.iter().any(|name| files.iter().any(|file| name.starts_with(file))));
    CHECKPOINT
        .into_iter()
        .chain(Companions::FILES)
        .chain(DICTIONARY)
        .map(str::to_owned)
        .chain(of_layers.flatten())
}

fn file_names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
}

/// Folder name of a kept step.
fn step_folder(step: u64) -> String {
    format!("step-{step}")
}

/// Whether a name is the folder name of a kept step.
fn is_step(name: &str) -> bool {
    let step = name.strip_prefix("step-").and_then(|step| step.parse().ok());
    step.is_some_and(|step| name == step_folder(step))
}

/// Options for evaluating, saving and stopping.
#[derive(Debug)]
pub(crate) struct RunOptions {
    /// Folder of the run.
    pub(crate) folder: PathBuf,
    /// Steps between evaluations on the held-out data.
    pub(crate) eval_every: u64,
    /// Steps between saved states.
    pub(crate) save_every: u64,
    /// Steps after which a copy of the model is kept.
    pub(crate) keep_steps: Vec<u64>,
    /// Evaluations without improvement after which training stops; `None` never stops early.
    pub(crate) patience: Option<u64>,
    /// Dtype of the written weights.
    pub(crate) dtype: WrittenDType,
    /// Base model of the adapters.
    pub(crate) base_model: Option<String>,
    /// Share of every batch that this run computes; the run with the first share writes the folder.
    pub(crate) share: Share,
    /// Temporary folder for the log, if another run writes the run's folder.
    pub(crate) temp_folder: Option<TempDir>,
}

/// Callback that receives every log entry and the model at that point.
type EntryCallback<'a> = &'a mut dyn FnMut(&Entry, &Trainer);

impl RunOptions {
    /// Whether this run writes the folder.
    fn writes(&self) -> bool {
        self.temp_folder.is_none()
    }
}

/// Outcome of [`Run::train`].
///
/// [`TrainJob::run`](crate::TrainJob::run) performs the whole job.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Total number of steps taken.
    pub steps: u64,
    /// Step and evaluation with the lowest loss; the folder contains the weights of this step.
    pub best: Option<(u64, Evaluation)>,
    /// Loss of the last step.
    pub last_loss: Option<f64>,
    /// Whether training stopped early because the held-out loss no longer improved.
    pub is_stopped_early: bool,
}

/// A training run and its folder, returned by [`TrainJob::open`](crate::TrainJob::open).
pub struct Run {
    trainer: Trainer,
    data: TrainingData,
    tokenizer: Arc<Tokenizer>,
    companions: Companions,
    options: RunOptions,
    journal: Journal,
    best: Option<Best>,
    evaluations_since: u64,
    /// Whether the evaluation after the last step is still pending.
    is_evaluation_due: bool,
    /// Whether there is nothing to save: the state is saved, or no step was taken.
    is_saved: bool,
    /// Whether the log was truncated or edited after saving the state that this run resumes from.
    is_log_changed: bool,
    /// Instant at which this process started training.
    clock: Instant,
    /// Start of the current step.
    step_start_s: f64,
    /// Lock on the folder; absent if another run writes it.
    _folder: Option<JobFolder>,
}

impl Run {
    /// Opens a run with a new `trainer`, or resumes it from the state in the folder.
    ///
    /// The folder is already locked, unless another run writes it.
    ///
    /// # Errors
    /// Fails if the folder holds the state of another run, or cannot be written.
    pub(crate) fn open(
        job_folder: Option<JobFolder>,
        mut trainer: Trainer,
        data: TrainingData,
        (tokenizer, companions): (Arc<Tokenizer>, Companions),
        options: RunOptions,
    ) -> Result<Self, TrainingError> {
        let folder = &options.folder;
        let (mut best, mut evaluations_since, mut is_evaluation_due, mut log) = (None, 0, false, None);
        if let Some(progress) = state::load(folder, &mut trainer, data.fingerprint)? {
            (best, evaluations_since) = (progress.best, progress.evaluations_since);
            (is_evaluation_due, log) = (progress.is_evaluation_due, progress.log);
        }
        // The folder belongs to this run, so its leftovers can be removed.
        if let Some(folder) = &job_folder {
            folder.remove_leftovers();
        }
        // Drop the entries of steps and evaluations that will be repeated.
        let steps_done = trainer.steps_done();
        let is_known = |entry: &Entry| {
            let is_due = is_evaluation_due && entry.step == steps_done && entry.held_out_loss.is_some();
            entry.step <= steps_done && !is_due
        };
        let log_folder = options.temp_folder.as_ref().map_or(folder.as_path(), TempDir::path);
        let mut journal = Journal::open(&log_folder.join(LOG), &is_known)?;
        let is_log_changed = options.writes() && journal.was_changed_since(log);
        if let Some(log) = log.filter(|_| !options.writes()) {
            journal.continue_checksum(log);
        }
        let run = Self {
            trainer,
            data,
            tokenizer,
            companions,
            options,
            journal,
            best,
            evaluations_since,
            is_evaluation_due,
            is_saved: true,
            is_log_changed,
            clock: Instant::now(),
            step_start_s: 0.0,
            _folder: job_folder,
        };
        if steps_done == 0 {
            run.keep()?;
        }
        Ok(run)
    }

    /// Warning about a log that was changed after saving the state that this run resumes from.
    pub(crate) fn log_note(&self) -> Option<String> {
        let path = self.options.folder.join(LOG);
        self.is_log_changed.then(|| {
            format!(
                "{}: modified after the state was saved; losses of earlier steps may be missing or wrong",
                path.display()
            )
        })
    }

    /// Returns the seconds since this process began to train.
    pub fn elapsed_s(&self) -> f64 {
        self.clock.elapsed().as_secs_f64()
    }

    /// Trains to the end.
    ///
    /// `report` is called with every log entry and the model at that point. The trainer checks for
    /// [interruptions](Trainer::interrupted_by).
    ///
    /// # Errors
    /// Fails if a loss is not finite or a file cannot be written; the last saved state, if any, remains.
    /// Returns [`TrainingError::Interrupted`] after saving the state of the last step.
    pub fn train(&mut self, report: EntryCallback<'_>) -> Result<Outcome, JobError> {
        match self.advance(report) {
            Err(TrainingError::Interrupted { .. }) => {
                if !self.is_saved {
                    self.save()?;
                }
                return Err(interrupted(&self.options.folder).into());
            }
            done => done?,
        }
        self.finish()?;
        let steps_done = self.trainer.steps_done();
        Ok(Outcome {
            steps: steps_done,
            best: self.best.clone().map(|best| (best.step, best.evaluation)),
            last_loss: self.journal.entries().iter().rev().find_map(|entry| entry.loss),
            is_stopped_early: steps_done < self.trainer.numbers().steps,
        })
    }

    /// Takes the remaining steps.
    fn advance(&mut self, report: EntryCallback<'_>) -> Result<(), TrainingError> {
        if self.is_evaluation_due {
            self.finish_step(report)?;
        }
        while !self.is_done() {
            self.step_start_s = self.elapsed_s();
            if self.trainer.is_interrupted() {
                return Err(TrainingError::Interrupted { state: None });
            }
            let tokens = self.trainer.tokens_of_step(&*self.data.examples) as f64;
            let done =
                self.trainer.step(&*self.data.examples).map_err(|error| self.with_last_checkpoint(error))?;
            self.after_step(done, tokens, report)?;
        }
        Ok(())
    }

    /// Logs a step over `tokens` tokens and performs the work due after it.
    fn after_step(
        &mut self,
        done: StepReport,
        tokens: f64,
        report: EntryCallback<'_>,
    ) -> Result<(), TrainingError> {
        self.is_saved = false;
        let now_s = self.elapsed_s();
        let entry = Entry {
            step: done.step,
            loss: Some(done.loss),
            learning_rate: Some(done.learning_rate),
            gradient_norm: Some(done.gradient_norm),
            tokens_per_s: Some(tokens / (now_s - self.step_start_s).max(f64::MIN_POSITIVE)),
            elapsed_s: now_s,
            ..Entry::default()
        };
        report(&entry, &self.trainer);
        self.journal.add(entry)?;
        self.is_evaluation_due = self.is_due(self.options.eval_every);
        self.finish_step(report)
    }

    /// Computes this run's contribution to the next step: its loss and all gradients.
    ///
    /// The gradients are concatenated in the order of the parameters. The step's loss and gradients are
    /// the sums over all shares. If the evaluation after the last step is pending, it is performed first.
    ///
    /// # Errors
    /// Fails if all steps have been taken, the device is out of memory, or the run is interrupted.
    pub fn share_of_step(&mut self, report: EntryCallback<'_>) -> Result<(f64, Vec<f32>), TrainingError> {
        if self.is_evaluation_due {
            self.finish_step(report)?;
        }
        self.expect_steps()?;
        self.step_start_s = self.elapsed_s();
        let (loss, gradients) = self.trainer.share_of_step(&*self.data.examples, self.options.share)?;
        let values = share::flatten(&gradients)?;
        self.trainer.use_memory_of(gradients);
        Ok((loss, values))
    }

    /// Takes the next step with the sums over all shares, then logs, evaluates and saves as due.
    ///
    /// # Errors
    /// Fails if all steps have been taken, if the number of gradients is wrong, if a loss or the gradient
    /// norm is not finite, or if a file cannot be written.
    pub fn apply(&mut self, gradients: &[f32], loss: f64, report: EntryCallback<'_>) -> Result<(), JobError> {
        self.expect_steps()?;
        let gradients = share::split(gradients, self.trainer.parameters())?;
        let tokens = self.trainer.tokens_of_step(&*self.data.examples) as f64;
        let done = self.trainer.apply(&gradients, loss).map_err(|error| self.with_last_checkpoint(error))?;
        self.after_step(done, tokens, report)?;
        match self.is_done() {
            true => self.finish(),
            false => Ok(()),
        }
    }

    fn expect_steps(&self) -> Result<(), TrainingError> {
        match self.is_done() {
            true => Err(TrainingError::Call { what: "training is complete; no steps are left".into() }),
            false => Ok(()),
        }
    }

    /// Whether no steps are left, because all were taken or training stopped early.
    pub fn is_done(&self) -> bool {
        self.trainer.steps_done() >= self.trainer.numbers().steps || self.is_stale()
    }

    /// Draws the loss curve once no steps are left.
    fn finish(&self) -> Result<(), JobError> {
        let (entries, unit) = (self.journal.entries(), self.trainer.numbers().task.loss_unit());
        // A user may have emptied the log.
        match self.options.writes() && entries.iter().any(|entry| entry.loss.is_some()) {
            true => loss_curve(entries, unit, &self.options.folder.join("loss.svg")),
            false => Ok(()),
        }
    }

    /// Returns the whole state in the format of the state file, for the other data-parallel runs.
    ///
    /// # Errors
    /// Fails if memory is insufficient.
    pub fn state(&self) -> Result<Vec<u8>, TrainingError> {
        state::to_bytes(&self.trainer, &self.progress())
    }

    /// Resumes from the [state](Run::state) of another data-parallel run.
    ///
    /// # Errors
    /// Fails if the state is damaged or belongs to another training run.
    pub fn set_state(&mut self, state: &[u8]) -> Result<(), TrainingError> {
        let path = state::path(&self.options.folder);
        let progress = state::from_bytes(state, &path, &mut self.trainer, self.data.fingerprint)?;
        (self.best, self.evaluations_since) = (progress.best, progress.evaluations_since);
        (self.is_evaluation_due, self.is_saved) = (progress.is_evaluation_due, true);
        if let Some(log) = progress.log {
            self.journal.continue_checksum(log);
        }
        Ok(())
    }

    /// Evaluates the model and saves the state, if these are due after a step.
    fn finish_step(&mut self, report: EntryCallback<'_>) -> Result<(), TrainingError> {
        self.rollback_without_state(|run| {
            if run.is_evaluation_due {
                run.evaluate(run.trainer.steps_done(), report)?;
                (run.is_evaluation_due, run.is_saved) = (false, false);
            }
            if run.is_due(run.options.save_every) || run.is_stale() {
                run.save()?;
            }
            run.keep()
        })
    }

    /// Saves a copy of the model if `keep_steps` contains the step just completed.
    fn keep(&self) -> Result<(), TrainingError> {
        let RunOptions { folder, keep_steps, .. } = &self.options;
        let step = self.trainer.steps_done();
        if !keep_steps.contains(&step) || !self.options.writes() {
            return Ok(());
        }
        let folder = folder.join(step_folder(step));
        fs::create_dir_all(&folder).map_err(|error| TrainingError::File { path: folder.clone(), error })?;
        self.write_model(&folder)
    }

    /// Writes files; if this fails before any state is saved, removes the new checkpoint files.
    ///
    /// The same call can then start over without overwriting any weights.
    fn rollback_without_state<T>(
        &mut self,
        write: impl FnOnce(&mut Self) -> Result<T, TrainingError>,
    ) -> Result<T, TrainingError> {
        if !self.options.writes() {
            return write(self);
        }
        let folder = self.options.folder.clone();
        let of_dictionary = self.trainer.dictionary_files();
        let files = CHECKPOINT.into_iter().chain(of_dictionary.iter().map(String::as_str));
        let mut added: Vec<PathBuf> = files.map(|name| folder.join(name)).collect();
        added.retain(|file| !file.exists());
        let written = write(self);
        if written.is_err() && !has_state(&folder) {
            for file in added {
                let _ = fs::remove_file(file);
            }
            if !folder.join(CHECKPOINT[0]).exists() {
                // Forces the next evaluation to write its weights.
                self.best = None;
            }
            // Removes the folder only if it is empty.
            let _ = fs::remove_dir(folder.join("adapter"));
        }
        written
    }

    /// Whether work with an interval of `every` steps is due after the last step.
    fn is_due(&self, every: u64) -> bool {
        let step = self.trainer.steps_done();
        step.is_multiple_of(every) || step == self.trainer.numbers().steps
    }

    /// Returns the trainer, with the model and its progress.
    pub fn trainer(&self) -> &Trainer {
        &self.trainer
    }

    /// Returns the training data.
    pub fn data(&self) -> &TrainingData {
        &self.data
    }

    /// Returns the tokenizer that is written along with the model.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    fn is_stale(&self) -> bool {
        self.options.patience.is_some_and(|patience| self.evaluations_since >= patience)
    }

    fn evaluate(&mut self, step: u64, report: EntryCallback<'_>) -> Result<(), TrainingError> {
        let Some(held_out) = &self.data.held_out else { return Ok(()) };
        let evaluation = held_out.evaluate(&self.trainer)?;
        if !evaluation.loss.is_finite() {
            let error = TrainingError::NotFinite { step, what: "held-out loss", last_checkpoint: None };
            return Err(self.with_last_checkpoint(error));
        }
        let entry = Entry {
            step,
            held_out_loss: Some(evaluation.loss),
            held_out_loss_per_character: evaluation.loss_per_character,
            accuracy: evaluation.confusion.as_ref().map(Confusion::accuracy),
            macro_f1: evaluation.confusion.as_ref().map(Confusion::macro_f1),
            l0: evaluation.dictionary.as_ref().map(|metrics| metrics.l0),
            explained_variance: evaluation.dictionary.as_ref().map(|metrics| metrics.explained_variance),
            delta_cross_entropy: evaluation.dictionary.as_ref().map(|metrics| metrics.delta_cross_entropy),
            dead_latents: evaluation.dictionary.as_ref().map(|metrics| metrics.dead_latents),
            elapsed_s: self.elapsed_s(),
            ..Entry::default()
        };
        report(&entry, &self.trainer);
        self.journal.add(entry)?;
        if self.best.as_ref().is_none_or(|best| evaluation.loss < best.evaluation.loss) {
            self.best = Some(Best { step, evaluation });
            self.evaluations_since = 0;
            self.write_checkpoint()?;
        } else {
            self.evaluations_since += 1;
        }
        Ok(())
    }

    /// Saves the state, unless another data-parallel run writes the folder.
    ///
    /// # Errors
    /// Fails if a file cannot be written; the previous state, if any, remains.
    pub fn save(&mut self) -> Result<(), TrainingError> {
        if !self.options.writes() {
            return Ok(());
        }
        self.rollback_without_state(|run| {
            if run.data.held_out.is_none() {
                run.write_checkpoint()?;
            }
            state::save(&run.options.folder, &run.trainer, &run.progress())
        })?;
        self.is_saved = true;
        Ok(())
    }

    fn progress(&self) -> Progress {
        Progress {
            model: state::model_of(&self.trainer),
            numbers: self.trainer.numbers().clone(),
            data_fingerprint: self.data.fingerprint,
            steps_done: self.trainer.steps_done(),
            best: self.best.clone(),
            evaluations_since: self.evaluations_since,
            is_evaluation_due: self.is_evaluation_due,
            log: Some(self.journal.checksum()),
        }
    }

    fn write_checkpoint(&self) -> Result<(), TrainingError> {
        if !self.options.writes() {
            return Ok(());
        }
        let folder = &self.options.folder;
        self.write_model(folder)?;
        match self.trainer.lora() {
            Some(lora) => {
                let base_model = self.options.base_model.as_deref();
                lora.save(self.trainer.parameters(), &folder.join("adapter"), base_model)
            }
            None => Ok(()),
        }
    }

    fn write_model(&self, folder: &Path) -> Result<(), TrainingError> {
        if self.trainer.save_dictionary(folder, self.options.dtype)? {
            return Ok(());
        }
        let read = |name: &str| Ok(self.trainer.parameter(name)?.detach().to_device(&Device::Cpu)?);
        Ok(replace_hugging_face(folder, self.trainer.config(), &read, &self.companions, self.options.dtype)?)
    }

    /// Adds the path of the last saved state to an error, if there is one.
    fn with_last_checkpoint(&self, error: TrainingError) -> TrainingError {
        let saved = Some(state::path(&self.options.folder)).filter(|path: &PathBuf| path.exists());
        match error {
            TrainingError::NotFinite { step, what, .. } => {
                TrainingError::NotFinite { step, what, last_checkpoint: saved }
            }
            other => other,
        }
    }
}

/// Error for an interrupted training run in this folder.
pub(crate) fn interrupted(folder: &Path) -> TrainingError {
    TrainingError::Interrupted { state: has_state(folder).then(|| state::path(folder)) }
}

/// Whether the folder holds the state of a run.
pub(crate) fn has_state(folder: &Path) -> bool {
    state::path(folder).is_file()
}
