//! Training log: one JSON object per line, for every step and every evaluation.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use candle_gpt2_training::state::LogChecksum;
use candle_gpt2_weights::{read_bounded_text, replace_file};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::TrainingError;

/// Maximum size of a log in bytes, enough for more than ten million steps.
const MAX_BYTES: u64 = 4 << 30;

/// Line of the training log in a [`Journal`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Entry {
    /// Step, counted from 1.
    pub step: u64,
    /// Mean loss over the step's tokens, in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// Learning rate for the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// Gradient norm before clipping.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gradient_norm: Option<f64>,
    /// Tokens per second in the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_s: Option<f64>,
    /// Held-out loss in nats per token, or per row if the rows have labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_out_loss: Option<f64>,
    /// Held-out loss in nats per character.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_out_loss_per_character: Option<f64>,
    /// Fraction of held-out rows whose label is predicted correctly.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// F1 score on the held-out rows, averaged over the labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub macro_f1: Option<f64>,
    /// Mean number of active dictionary latents per held-out token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub l0: Option<f64>,
    /// Fraction of variance that a dictionary explains on the held-out tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explained_variance: Option<f64>,
    /// Increase in the model's loss when the dictionary replaces the activations, in nats per token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta_cross_entropy: Option<f64>,
    /// Number of latents that were never active on the held-out tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dead_latents: Option<usize>,
    /// Seconds since this process began to train.
    pub elapsed_s: f64,
}

/// Log file with its entries.
///
/// ```
/// use candle_gpt2_jobs::{Entry, Journal};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("log.jsonl");
/// Journal::open(&path, &|_| true)?.add(Entry { step: 5, loss: Some(2.5), ..Entry::default() })?;
/// assert_eq!(Journal::open(&path, &|_| true)?.entries()[0].loss, Some(2.5));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    entries: Vec<Entry>,
    /// Checksum of the entries.
    checksum: LogChecksum,
    /// Entries found in the file when it was opened.
    found: Vec<Entry>,
}

impl Journal {
    /// Opens the log at `path` and removes the entries for which `is_known` is false.
    ///
    /// # Errors
    /// Fails if the file cannot be read or written.
    pub fn open(path: &Path, is_known: &dyn Fn(&Entry) -> bool) -> Result<Self, TrainingError> {
        let failed = |error| TrainingError::File { path: path.to_owned(), error };
        let text = match read_bounded_text(path, MAX_BYTES) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            read => read.map_err(failed)?,
        };
        // A killed process may leave an incomplete line.
        let found = text.lines().filter_map(|line| serde_json::from_str::<Entry>(line).ok());
        let found: Vec<Entry> = found.collect();
        let entries: Vec<Entry> = found.iter().filter(|entry| is_known(entry)).cloned().collect();
        let kept: String = entries.iter().map(line).collect();
        replace_file(path, |partial| Ok(fs::write(partial, &kept)?))?;
        let file = OpenOptions::new().append(true).open(path).map_err(failed)?;
        let checksum = entries.iter().fold(LogChecksum::default(), with_entry);
        Ok(Self { path: path.to_owned(), file, entries, checksum, found })
    }

    /// Returns the checksum of the entries, for a saved state.
    pub(crate) fn checksum(&self) -> LogChecksum {
        self.checksum
    }

    /// Continues the checksum of another process's log, so that all processes have equal states.
    pub(crate) fn continue_checksum(&mut self, log: LogChecksum) {
        self.checksum = log;
    }

    /// Whether the log was truncated or edited after a state was saved.
    ///
    /// Frees the entries found in the file when it was opened.
    pub(crate) fn was_changed_since(&mut self, saved: Option<LogChecksum>) -> bool {
        let found = std::mem::take(&mut self.found);
        saved.is_some_and(|saved| {
            let count = usize::try_from(saved.entries).unwrap_or(usize::MAX);
            found.iter().take(count).fold(LogChecksum::default(), with_entry) != saved
        })
    }

    /// Appends an entry.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn add(&mut self, entry: Entry) -> Result<(), TrainingError> {
        let failed = |error| TrainingError::File { path: self.path.clone(), error };
        self.file.write_all(line(&entry).as_bytes()).map_err(failed)?;
        self.checksum = with_entry(self.checksum, &entry);
        self.entries.push(entry);
        Ok(())
    }

    /// Returns all entries so far.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }
}

/// Whether a file is a training log, possibly with an incomplete last line from a killed process.
pub(crate) fn is_log(path: &Path) -> bool {
    let Ok(text) = read_bounded_text(path, MAX_BYTES) else { return false };
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    // Every entry has a step and a time. Deserialization alone would accept lines without them.
    let is_entry = |value: &Value| ["step", "elapsed_s"].iter().all(|key| value[key].is_number());
    whole.lines().all(|line| serde_json::from_str(line).is_ok_and(|value| is_entry(&value)))
}

/// Returns the checksum after one more entry.
fn with_entry(before: LogChecksum, entry: &Entry) -> LogChecksum {
    let written = line(&Entry { tokens_per_s: None, elapsed_s: 0.0, ..entry.clone() });
    // A non-finite number becomes null, and the null is omitted when the entry is rewritten.
    let rewritten = serde_json::from_str(&written).map_or(written, |entry| line(&entry));
    let mut hasher = crc32fast::Hasher::new_with_initial(before.crc32);
    hasher.update(rewritten.as_bytes());
    LogChecksum { entries: before.entries + 1, crc32: hasher.finalize() }
}

fn line(entry: &Entry) -> String {
    // Non-finite numbers become null, so every entry can be written.
    serde_json::to_string(entry).map_or(String::new(), |line| line + "\n")
}
