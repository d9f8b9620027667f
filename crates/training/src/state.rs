//! Everything a training needs to be resumed: weights, both running means and the numbers, in one safetensors file.
//!
//! One file, replaced as a whole, so that there is always a state, and always a consistent one. Random numbers need no
//! state: they follow from the seed and the number of the step.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use candle_gpt2_weights::{MappedFile, WeightsError, replace_file, write_tensors};
use safetensors::SafeTensors;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{Evaluation, Hyperparameters, Lora, StateDifference, Trainer, TrainingError};

/// Name of the file in the folder of the run.
pub const FILE_NAME: &str = "training-state.safetensors";
/// Key of the numbers in the file's metadata.
const KEY: &str = "gpt2-training";

/// The progress in a saved state, besides its tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// See [`model_of`].
    pub model: Value,
    pub numbers: Hyperparameters,
    /// Identifies the data and its tokenizer.
    pub data_fingerprint: u64,
    pub steps_done: u64,
    pub best: Option<Best>,
    /// Evaluations since the best one.
    pub evaluations_since: u64,
    /// Whether the evaluation that is due after the last step is still to be made, since it was interrupted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_evaluation_due: bool,
}

/// The best evaluation so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Best {
    pub step: u64,
    #[serde(flatten)]
    pub evaluation: Evaluation,
}

/// Where the state of the run in `folder` is.
pub fn path(folder: &Path) -> PathBuf {
    folder.join(FILE_NAME)
}

/// Saves the state of a training.
pub fn save(folder: &Path, trainer: &Trainer, progress: &Progress) -> Result<(), TrainingError> {
    let (tensors, metadata) = content(trainer, progress)?;
    let path = path(folder);
    let has_one = path.is_file();
    match replace_file(&path, |partial| Ok(write_tensors(partial, &tensors, metadata)?)) {
        Err(WeightsError::Unwritable { path, what }) if has_one => {
            let what = format!("{what}; the state before it is still there");
            Err(WeightsError::Unwritable { path, what }.into())
        }
        written => Ok(written?),
    }
}

/// The state of a training as the file holds it.
pub fn to_bytes(trainer: &Trainer, progress: &Progress) -> Result<Vec<u8>, TrainingError> {
    let (tensors, metadata) = content(trainer, progress)?;
    let on_cpu =
        |(name, tensor): (String, Tensor)| candle_core::Result::Ok((name, tensor.to_device(&Device::Cpu)?));
    let tensors = tensors.into_iter().map(on_cpu).collect::<candle_core::Result<Vec<_>>>()?;
    Ok(safetensors::serialize(tensors, Some(metadata)).map_err(candle_core::Error::wrap)?)
}

/// Tensors by name, and the metadata with what is said besides.
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
    Ok((tensors, [(KEY.to_owned(), text)].into()))
}

/// Brings a fresh training to the state of the run in `folder`, and says how far it was; `None` if there is none. It must be a
/// state of the same training, on the data with this fingerprint.
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

/// Brings a training to a state as the file at `path` holds it, and says how far that is.
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
    let text = text.ok_or_else(|| damaged(&"it has no numbers"))?;
    let progress: Progress = serde_json::from_str(text).map_err(|error| damaged(&error))?;
    if let Some(difference) = difference(&progress, trainer, data_fingerprint) {
        return Err(TrainingError::OtherState { path: path.to_owned(), difference });
    }
    let device = trainer.parameters().device();
    let tensors = candle_core::safetensors::load_buffer(bytes, &device).map_err(|error| damaged(&error))?;
    let mut saved = Vec::new();
    for (name, parameter) in trainer.parameters().iter() {
        let tensor = |kind: &str| {
            let tensor = tensors.get(&format!("{kind}.{name}"));
            let fitting = tensor.filter(|tensor| tensor.dims() == parameter.dims());
            fitting.cloned().ok_or_else(|| damaged(&format!("the {kind} of `{name}` is missing")))
        };
        saved.push((tensor("parameter")?, tensor("mean")?, tensor("square")?));
    }
    trainer.restore(&saved, progress.steps_done)?;
    if let Some(learner) = trainer.learner_mut() {
        learner.restore(&tensors).map_err(|what| damaged(&what))?;
    }
    Ok(progress)
}

/// How the training that was saved differs from this one.
fn difference(saved: &Progress, trainer: &Trainer, data_fingerprint: u64) -> Option<StateDifference> {
    let differing = saved.numbers.differing(trainer.numbers());
    if saved.model != model_of(trainer) {
        Some(StateDifference::Model)
    } else if !differing.is_empty() {
        Some(StateDifference::Numbers(differing))
    } else {
        (saved.data_fingerprint != data_fingerprint).then_some(StateDifference::Data)
    }
}

/// What tells a model from others: its configuration, and that of its adapters; of a dictionary also what the explained model gives.
pub fn model_of(trainer: &Trainer) -> Value {
    let mut model = json!({ "config": trainer.config().to_json(), "lora": trainer.lora().map(Lora::config) });
    if let Some(learner) = trainer.learner() {
        model["explained"] = json!(learner.sample_logits);
    }
    model
}
