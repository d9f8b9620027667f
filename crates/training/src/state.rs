//! Saved training state in one safetensors file: weights, both running means and progress.
//!
//! The file is replaced atomically, so a consistent state always exists. Random numbers need no state,
//! because they depend only on the seed and the step number. A CRC-32 covers the entire file. States of older
//! versions have no checksum and load unverified.

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use candle_gpt2_weights::{MappedFile, WeightsError, replace_file, write_tensors};
use safetensors::SafeTensors;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{Evaluation, Hyperparameters, Lora, StateDifference, Trainer, TrainingError};

/// Name of the file in the run's folder.
pub const FILE_NAME: &str = "training-state.safetensors";
/// Metadata key for the progress; the value starts with the file's CRC-32 in hexadecimal.
///
/// The CRC-32 is computed with zeros in place of the digits.
const KEY: &str = "gpt2-training";
/// Placeholder for the digits of the checksum.
const NO_CHECKSUM: &str = "00000000";
/// Size of the header length at the start of a safetensors file, in bytes.
const HEADER_START: usize = 8;

/// Progress stored in a saved state, alongside its tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Identity of the model, see [`model_of`].
    pub model: Value,
    pub numbers: Hyperparameters,
    /// Fingerprint of the data and the tokenizer.
    pub data_fingerprint: u64,
    pub steps_done: u64,
    pub best: Option<Best>,
    /// Number of evaluations since the best one.
    pub evaluations_since: u64,
    /// Whether the evaluation after the last step is still pending because it was interrupted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_evaluation_due: bool,
    /// Checksum of the log at the time of saving; missing in old states.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<LogChecksum>,
}

/// Number and CRC-32 of the log's entries, without times, which differ between equal runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogChecksum {
    pub entries: u64,
    pub crc32: u32,
}

/// Best evaluation so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Best {
    pub step: u64,
    #[serde(flatten)]
    pub evaluation: Evaluation,
}

/// Returns the path of the state in the run's folder.
pub fn path(folder: &Path) -> PathBuf {
    folder.join(FILE_NAME)
}

/// Saves the state of a training run.
pub fn save(folder: &Path, trainer: &Trainer, progress: &Progress) -> Result<(), TrainingError> {
    let (tensors, metadata) = content(trainer, progress)?;
    let path = path(folder);
    let has_one = path.is_file();
    let write = |partial: &Path| {
        write_tensors(partial, &tensors, metadata)?;
        write_checksum(partial)
    };
    match replace_file(&path, write) {
        Err(WeightsError::Unwritable { path, what }) if has_one => {
            let what = format!("{what}; the previous state is intact");
            Err(WeightsError::Unwritable { path, what }.into())
        }
        written => Ok(written?),
    }
}

/// Serializes the state of a training run as file content.
pub fn to_bytes(trainer: &Trainer, progress: &Progress) -> Result<Vec<u8>, TrainingError> {
    let (tensors, metadata) = content(trainer, progress)?;
    let on_cpu =
        |(name, tensor): (String, Tensor)| candle_core::Result::Ok((name, tensor.to_device(&Device::Cpu)?));
    let tensors = tensors.into_iter().map(on_cpu).collect::<candle_core::Result<Vec<_>>>()?;
    let mut bytes = safetensors::serialize(tensors, Some(metadata)).map_err(candle_core::Error::wrap)?;
    if let Some(digits) = checksum_digits(&bytes) {
        let checksum = checksum(&bytes, &digits);
        bytes[digits].copy_from_slice(checksum.as_bytes());
    }
    Ok(bytes)
}

/// Writes the checksum into a file that has zeros in its place.
fn write_checksum(path: &Path) -> Result<(), Box<dyn Error + Send + Sync>> {
    let (digits, checksum) = {
        let file = MappedFile::open(path)?;
        let digits = checksum_digits(&file).ok_or("the header has no space for the checksum")?;
        let checksum = checksum(&file, &digits);
        (digits, checksum)
    };
    let mut file = OpenOptions::new().write(true).open(path)?;
    file.seek(SeekFrom::Start(digits.start as u64))?;
    Ok(file.write_all(checksum.as_bytes())?)
}

/// Position of the checksum's digits in a safetensors file.
fn checksum_digits(bytes: &[u8]) -> Option<Range<usize>> {
    let (header_bytes, _) = SafeTensors::read_metadata(bytes).ok()?;
    let key = format!("\"{KEY}\":\"");
    // Quotes inside other strings are escaped, so only the key itself matches.
    let header = bytes.get(..HEADER_START + header_bytes)?;
    let start = header.windows(key.len()).position(|window| window == key.as_bytes())? + key.len();
    let digits = start..start + NO_CHECKSUM.len();
    (digits.end <= header.len()).then_some(digits)
}

/// Computes the checksum of a file, regardless of its current digits.
fn checksum(bytes: &[u8], digits: &Range<usize>) -> String {
    let mut hasher = crc32fast::Hasher::new();
    for part in [&bytes[..digits.start], NO_CHECKSUM.as_bytes(), &bytes[digits.end..]] {
        hasher.update(part);
    }
    format!("{:08x}", hasher.finalize())
}

/// Tensors by name, and the metadata with the progress.
type Content = (BTreeMap<String, Tensor>, HashMap<String, String>);

fn content(trainer: &Trainer, progress: &Progress) -> Result<Content, TrainingError> {
    let text = serde_json::to_string(progress).map_err(candle_core::Error::wrap)?;
    let mut tensors = BTreeMap::new();
    for ((name, parameter), (mean, square)) in trainer.parameters().iter().zip(trainer.optimizer().means()) {
        for (kind, variable) in [("parameter", parameter), ("mean", mean), ("square", square)] {
            tensors.insert(format!("{kind}.{name}"), variable.detach());
        }
    }
    if let Some(learner) = trainer.learner() {
        tensors.extend(learner.state()?);
    }
    Ok((tensors, [(KEY.to_owned(), NO_CHECKSUM.to_owned() + &text)].into()))
}

/// Restores the state of the run in `folder` into a fresh trainer and returns the progress.
///
/// Returns `None` if there is no state. The state must come from the same training run, on data with this
/// fingerprint.
pub fn load(
    folder: &Path,
    trainer: &mut Trainer,
    data_fingerprint: u64,
) -> Result<Option<Progress>, TrainingError> {
    let path = path(folder);
    if !path.exists() {
        return Ok(None);
    }
    let file = MappedFile::open(&path)?;
    from_bytes(&file, &path, trainer, data_fingerprint).map(Some)
}

/// Restores a state from the content of the file at `path` and returns the progress.
pub fn from_bytes(
    bytes: &[u8],
    path: &Path,
    trainer: &mut Trainer,
    data_fingerprint: u64,
) -> Result<Progress, TrainingError> {
    let damaged = |error: &dyn std::fmt::Display| TrainingError::DamagedState {
        path: path.to_owned(),
        what: error.to_string(),
    };
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(|error| damaged(&error))?;
    let text = header.metadata().as_ref().and_then(|metadata| metadata.get(KEY));
    let text = text.ok_or_else(|| damaged(&format!("metadata key `{KEY}` is missing")))?;
    let json = match text.starts_with('{') {
        // An old state without a checksum.
        true => Some(text.as_str()),
        false => {
            let digits = checksum_digits(bytes);
            let is_intact =
                digits.is_some_and(|digits| bytes[digits.clone()] == *checksum(bytes, &digits).as_bytes());
            text.get(NO_CHECKSUM.len()..).filter(|_| is_intact)
        }
    };
    let json = json.ok_or_else(|| damaged(&"the checksum does not match"))?;
    let progress: Progress = serde_json::from_str(json).map_err(|error| damaged(&error))?;
    if let Some(difference) = difference(&progress, trainer, data_fingerprint) {
        return Err(TrainingError::OtherState { path: path.to_owned(), difference });
    }
    check_steps(&progress).map_err(|what| damaged(&what))?;
    let device = trainer.parameters().device();
    let tensors = candle_core::safetensors::load_buffer(bytes, &device).map_err(|error| damaged(&error))?;
    let mut saved = Vec::new();
    for ((name, parameter), (mean, square)) in trainer.parameters().iter().zip(trainer.optimizer().means()) {
        let tensor = |kind: &str, expected: &Tensor| {
            let name = format!("{kind}.{name}");
            let tensor = tensors.get(&name).ok_or_else(|| damaged(&format!("tensor `{name}` is missing")))?;
            let [expected, found] = [expected, tensor].map(|tensor| (tensor.dtype(), tensor.dims()));
            match expected == found {
                true => Ok(tensor.clone()),
                false => {
                    let what = format!(
                        "tensor `{name}`: expected {:?} of shape {:?}, found {:?} of shape {:?}",
                        expected.0, expected.1, found.0, found.1
                    );
                    Err(damaged(&what))
                }
            }
        };
        saved.push((tensor("parameter", parameter)?, tensor("mean", mean)?, tensor("square", square)?));
    }
    trainer.restore(&saved, progress.steps_done)?;
    if let Some(learner) = trainer.learner_mut() {
        learner.restore(&tensors).map_err(|what| damaged(&what))?;
    }
    Ok(progress)
}

/// Rejects step numbers that a training run with these options cannot reach.
fn check_steps(progress: &Progress) -> Result<(), String> {
    let Progress { steps_done, numbers, best, .. } = progress;
    let below = |name: &str, found: u64, most: u64| match found <= most {
        true => Ok(()),
        false => Err(format!("`{name}`: expected at most {most}, found {found}")),
    };
    below("steps_done", *steps_done, numbers.steps)?;
    below("best.step", best.as_ref().map_or(0, |best| best.step), *steps_done)?;
    below("evaluations_since", progress.evaluations_since, *steps_done)
}

/// Returns the difference between the saved training run and this one.
fn difference(saved: &Progress, trainer: &Trainer, data_fingerprint: u64) -> Option<StateDifference> {
    let differing = saved.numbers.differing(trainer.numbers());
    if saved.model != model_of(trainer) {
        Some(StateDifference::Model)
    } else if !differing.is_empty() {
        Some(StateDifference::Hyperparameters(differing))
    } else {
        (saved.data_fingerprint != data_fingerprint).then_some(StateDifference::Data)
    }
}

/// Returns the identity of a model: its configuration and the configuration of its adapters.
///
/// For a dictionary, it also includes sample logits of the explained model.
pub fn model_of(trainer: &Trainer) -> Value {
    let mut model = json!({ "config": trainer.config().to_json(), "lora": trainer.lora().map(Lora::config) });
    if let Some(learner) = trainer.learner() {
        model["explained"] = json!(learner.sample_logits);
    }
    model
}
