//! A whole training: steps, evaluations, checkpoints, the log and the loss curve, in one folder.
//!
//! The folder is a Hugging Face checkpoint with the best weights so far by held-out loss (with the latest, where nothing is
//! held out; adapters are merged there, and stand by themselves in `adapter`), beside the state to resume from, `log.jsonl` and, at the end, `loss.svg`. Every file is replaced as a whole.

use std::fs;
use std::path::{Path, PathBuf};

use gpt2_weights::{Tokenizer, WrittenDType, replace_hugging_face};

use crate::state::{self, Best, Progress};
use crate::{
    Entry, HeldOut, HeldOutLoss, Hyperparameters, Journal, StateDifference, Trainer, TrainingError, Windows,
    loss_curve,
};

/// When to evaluate, save and stop, and where.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// The folder of the run.
    pub folder: PathBuf,
    /// Steps between evaluations on the held-out text.
    pub eval_every: u64,
    /// Steps between saved states.
    pub save_every: u64,
    /// Evaluations without improvement after which the training ends; `None` takes all steps.
    pub patience: Option<u64>,
    /// Type of the written weights.
    pub dtype: WrittenDType,
    /// Number that tells the data and its tokenizer from others, such as
    /// [`TokenFile::fingerprint`](crate::TokenFile::fingerprint).
    pub data_fingerprint: u64,
}

/// How a training ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// Steps taken in all.
    pub steps: u64,
    /// Step and loss of the best evaluation, whose weights the folder holds.
    pub best: Option<(u64, HeldOutLoss)>,
    /// Loss of the last step.
    pub last_loss: Option<f64>,
    /// Whether it ended before all steps were taken, for want of improvement.
    pub is_stopped_early: bool,
}

/// A training in its folder.
pub struct Run<'a> {
    trainer: Trainer,
    windows: Windows<'a>,
    held_out: Option<HeldOut<'a>>,
    tokenizer: &'a Tokenizer,
    options: RunOptions,
    journal: Journal,
    best: Option<Best>,
    evaluations_since: u64,
    /// Whether the last step is to be followed by an evaluation, which is not made yet.
    is_evaluation_due: bool,
    /// Whether the saved state, or that there is none, tells all of it.
    is_saved: bool,
}

impl<'a> Run<'a> {
    /// A run of `trainer`, which is fresh, or goes on from the state of the same run where the folder holds one.
    ///
    /// # Errors
    /// When a number is out of its range, the folder holds the state of another run, or it cannot be written.
    pub fn open(
        mut trainer: Trainer,
        data: (Windows<'a>, Option<HeldOut<'a>>),
        tokenizer: &'a Tokenizer,
        options: RunOptions,
    ) -> Result<Self, TrainingError> {
        for (option, steps) in [("eval_every", options.eval_every), ("save_every", options.save_every)] {
            if steps == 0 {
                let expected = "at least 1".to_owned();
                return Err(TrainingError::OptionOutOfRange { option, expected, found: "0".into() });
            }
        }
        let folder = &options.folder;
        fs::create_dir_all(folder).map_err(|error| TrainingError::File { path: folder.clone(), error })?;
        remove_leftovers(folder);
        let (mut best, mut evaluations_since, mut is_evaluation_due) = (None, 0, false);
        if let Some(progress) = state::load(folder, &mut trainer)? {
            check_same(&progress, trainer.numbers(), &options)?;
            (best, evaluations_since) = (progress.best, progress.evaluations_since);
            is_evaluation_due = progress.is_evaluation_due;
        }
        // What is told of steps that are taken again, or of an evaluation that is made again, is told again.
        let steps_done = trainer.steps_done();
        let is_known = |entry: &Entry| {
            let is_due = is_evaluation_due && entry.step == steps_done && entry.held_out_loss.is_some();
            entry.step <= steps_done && !is_due
        };
        let journal = Journal::open(&folder.join("log.jsonl"), &is_known)?;
        let (windows, held_out) = data;
        Ok(Self {
            trainer,
            windows,
            held_out,
            tokenizer,
            options,
            journal,
            best,
            evaluations_since,
            is_evaluation_due,
            is_saved: true,
        })
    }

    /// Trains to the end. `elapsed_s` tells the seconds since the process began to train; `report` is told every entry of
    /// the log, and sees the model at that point. The trainer is
    /// [asked](Trainer::interrupted_by) whether to go on.
    ///
    /// # Errors
    /// When a loss is not a number, or a file cannot be written: the last saved state is then still there; and
    /// [`TrainingError::Interrupted`] once the state of the last step is saved.
    pub fn train(
        &mut self,
        elapsed_s: &dyn Fn() -> f64,
        report: &mut dyn FnMut(&Entry, &Trainer),
    ) -> Result<Outcome, TrainingError> {
        match self.advance(elapsed_s, report) {
            Err(TrainingError::Interrupted { .. }) => {
                if !self.is_saved {
                    self.save()?;
                }
                return Err(interrupted(&self.options.folder));
            }
            done => done?,
        }
        loss_curve(self.journal.entries(), &self.options.folder.join("loss.svg"))?;
        let steps_done = self.trainer.steps_done();
        let loss = |best: Best| HeldOutLoss { per_token: best.per_token, per_character: best.per_character };
        Ok(Outcome {
            steps: steps_done,
            best: self.best.map(|best| (best.step, loss(best))),
            last_loss: self.journal.entries().iter().rev().find_map(|entry| entry.loss),
            is_stopped_early: steps_done < self.trainer.numbers().steps,
        })
    }

    /// Takes the steps that are left.
    fn advance(
        &mut self,
        elapsed_s: &dyn Fn() -> f64,
        report: &mut dyn FnMut(&Entry, &Trainer),
    ) -> Result<(), TrainingError> {
        if self.is_evaluation_due {
            self.finish_step(elapsed_s, report)?;
        }
        let steps = self.trainer.numbers().steps;
        let tokens_per_step = self.trainer.numbers().tokens_per_step() as f64;
        while self.trainer.steps_done() < steps && !self.is_stale() {
            let start_s = elapsed_s();
            if self.trainer.is_interrupted() {
                return Err(TrainingError::Interrupted { state: None });
            }
            let done = self.trainer.step(&self.windows).map_err(|error| self.with_checkpoint(error))?;
            self.is_saved = false;
            let now_s = elapsed_s();
            let entry = Entry {
                step: done.step,
                loss: Some(done.loss),
                learning_rate: Some(done.learning_rate),
                gradient_norm: Some(done.gradient_norm),
                tokens_per_s: Some(tokens_per_step / (now_s - start_s).max(f64::MIN_POSITIVE)),
                elapsed_s: now_s,
                ..Entry::default()
            };
            report(&entry, &self.trainer);
            self.journal.add(entry)?;
            self.is_evaluation_due = self.is_due(self.options.eval_every);
            self.finish_step(elapsed_s, report)?;
        }
        Ok(())
    }

    /// What follows a step: the evaluation and the saving that are due.
    fn finish_step(
        &mut self,
        elapsed_s: &dyn Fn() -> f64,
        report: &mut dyn FnMut(&Entry, &Trainer),
    ) -> Result<(), TrainingError> {
        if self.is_evaluation_due {
            self.evaluate(self.trainer.steps_done(), elapsed_s, report)?;
            (self.is_evaluation_due, self.is_saved) = (false, false);
        }
        if self.is_due(self.options.save_every) || self.is_stale() {
            self.save()?;
        }
        Ok(())
    }

    /// Whether what is done at every so many steps is due after the last one.
    fn is_due(&self, every: u64) -> bool {
        let step = self.trainer.steps_done();
        step.is_multiple_of(every) || step == self.trainer.numbers().steps
    }

    /// The model and how far it is.
    pub fn trainer(&self) -> &Trainer {
        &self.trainer
    }

    fn is_stale(&self) -> bool {
        self.options.patience.is_some_and(|patience| self.evaluations_since >= patience)
    }

    fn evaluate(
        &mut self,
        step: u64,
        elapsed_s: &dyn Fn() -> f64,
        report: &mut dyn FnMut(&Entry, &Trainer),
    ) -> Result<(), TrainingError> {
        let Some(held_out) = &self.held_out else { return Ok(()) };
        let loss = held_out.loss(&self.trainer)?;
        if !loss.per_token.is_finite() {
            let error = TrainingError::NotFinite { step, what: "held-out loss", last_checkpoint: None };
            return Err(self.with_checkpoint(error));
        }
        let entry = Entry {
            step,
            held_out_loss: Some(loss.per_token),
            held_out_loss_per_character: Some(loss.per_character),
            elapsed_s: elapsed_s(),
            ..Entry::default()
        };
        report(&entry, &self.trainer);
        self.journal.add(entry)?;
        if self.best.is_none_or(|best| loss.per_token < best.per_token) {
            self.best = Some(Best::new(step, loss));
            self.evaluations_since = 0;
            self.write_checkpoint()?;
        } else {
            self.evaluations_since += 1;
        }
        Ok(())
    }

    fn save(&mut self) -> Result<(), TrainingError> {
        if self.held_out.is_none() {
            self.write_checkpoint()?;
        }
        let progress = Progress {
            model: state::model_of(&self.trainer),
            numbers: self.trainer.numbers().clone(),
            data_fingerprint: self.options.data_fingerprint,
            steps_done: self.trainer.steps_done(),
            best: self.best,
            evaluations_since: self.evaluations_since,
            is_evaluation_due: self.is_evaluation_due,
        };
        state::save(&self.options.folder, &self.trainer, &progress)?;
        self.is_saved = true;
        Ok(())
    }

    fn write_checkpoint(&self) -> Result<(), TrainingError> {
        let read = |name: &str| Ok(self.trainer.parameter(name)?.detach());
        let RunOptions { folder, dtype, .. } = &self.options;
        replace_hugging_face(folder, self.trainer.config(), &read, self.tokenizer, *dtype)?;
        match self.trainer.lora() {
            Some(lora) => lora.save(self.trainer.parameters(), &folder.join("adapter")),
            None => Ok(()),
        }
    }

    /// The same error with the place of the last saved state, where there is one.
    fn with_checkpoint(&self, error: TrainingError) -> TrainingError {
        let saved = Some(state::path(&self.options.folder)).filter(|path: &PathBuf| path.exists());
        match error {
            TrainingError::NotFinite { step, what, .. } => {
                TrainingError::NotFinite { step, what, last_checkpoint: saved }
            }
            other => other,
        }
    }
}

/// Removes what a run that was killed while it wrote may have left: the safetensors library writes to a file `.tmp…` first.
fn remove_leftovers(folder: &Path) {
    // Nothing depends on it: what cannot be listed or removed stays.
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(b".tmp") {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// What a training in this folder ends with that is interrupted.
pub(crate) fn interrupted(folder: &Path) -> TrainingError {
    TrainingError::Interrupted { state: has_state(folder).then(|| state::path(folder)) }
}

/// Whether the folder already holds the state of a run.
pub fn has_state(folder: &Path) -> bool {
    state::path(folder).exists()
}

fn check_same(
    progress: &Progress,
    numbers: &Hyperparameters,
    options: &RunOptions,
) -> Result<(), TrainingError> {
    let refuse =
        |difference| Err(TrainingError::OtherState { path: state::path(&options.folder), difference });
    let differing = progress.numbers.differing(numbers);
    if !differing.is_empty() {
        return refuse(StateDifference::Numbers(differing));
    }
    if progress.data_fingerprint != options.data_fingerprint {
        return refuse(StateDifference::Data);
    }
    Ok(())
}
