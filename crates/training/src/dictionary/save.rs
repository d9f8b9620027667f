//! Files of a dictionary in SAELens's format: `sae_weights.safetensors` and `cfg.json`.
//!
//! The scale of the activations is folded into the weights, so readers use the model's unscaled
//! activations. Latents are then in the model's units, and directions keep length 1. With the scale `s`,
//! `z(s x) = s z'(x)` if biases and thresholds are divided by `s`. Kinds that select the largest latents of a
//! batch are saved with a threshold, as in SAELens: `jumprelu`.
//!
//! Source: SAELens 6.54.12, `sae_lens/saes/sae.py`, `transcoder.py`, `gated_sae.py`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use candle_core::{Device, Tensor};
use candle_gpt2::SiteKind;
use candle_gpt2_weights::{WrittenDType, replace_file, write_rounded_tensors};
use serde_json::{Value, json};

use super::{DictionaryKind, Learner, save_layers};
use crate::{Parameters, TrainingError};

/// Name of the file with a dictionary's tensors.
///
/// ```
/// assert_eq!(candle_gpt2_training::WEIGHTS_FILE, "sae_weights.safetensors");
/// ```
pub const WEIGHTS_FILE: &str = "sae_weights.safetensors";
/// Name of the file with a dictionary's configuration.
///
/// ```
/// assert_eq!(candle_gpt2_training::CONFIG_FILE, "cfg.json");
/// ```
pub const CONFIG_FILE: &str = "cfg.json";
/// SAELens version that defines this layout.
const LAYOUT: &str = "6.0.0";

/// Returns the names of the files that [`save`] writes.
pub(crate) fn files(learner: &Learner) -> Vec<String> {
    match learner.objective.kind {
        DictionaryKind::CrossLayerTranscoder => save_layers::files(learner),
        _ => [WEIGHTS_FILE, CONFIG_FILE].map(str::to_owned).into(),
    }
}

/// Writes the files to a folder, replacing existing ones, with tensors of this dtype.
///
/// `context` is the sequence length in training.
pub(crate) fn save(
    learner: &Learner,
    parameters: &Parameters,
    context: usize,
    folder: &Path,
    dtype: WrittenDType,
) -> Result<(), TrainingError> {
    if learner.objective.kind == DictionaryKind::CrossLayerTranscoder {
        return save_layers::save(learner, parameters, folder, dtype);
    }
    let tensors = tensors(learner, parameters)?;
    let config = config(learner, context);
    replace_file(&folder.join(WEIGHTS_FILE), |partial| Ok(write_rounded_tensors(partial, &tensors, dtype)?))?;
    let text = serde_json::to_string_pretty(&config).unwrap_or_default() + "\n";
    Ok(replace_file(&folder.join(CONFIG_FILE), |partial| Ok(fs::write(partial, text)?))?)
}

/// Returns the tensors by their SAELens names, for unscaled activations.
fn tensors(learner: &Learner, parameters: &Parameters) -> candle_core::Result<BTreeMap<String, Tensor>> {
    let kind = learner.objective.kind;
    let [of_input, of_output] = learner.scales(0).map(f64::from);
    let mut tensors = BTreeMap::new();
    for (name, variable) in parameters.iter() {
        let value = variable.as_tensor().detach();
        let (name, value) = match name {
            // SAELens multiplies activations by this matrix from the right.
            "W_enc" => (name, (value.t()? * (of_input / of_output))?.contiguous()?),
            "W_skip" => (name, (value * (of_input / of_output))?),
            "W_dec" | "r_mag" => (name, value),
            "b_enc" if kind == DictionaryKind::Gated => ("b_gate", (value / of_output)?),
            "log_threshold" => ("threshold", (value.exp()? / of_output)?),
            _ => (name, (value / of_output)?),
        };
        tensors.insert(name.to_owned(), value);
    }
    if kind.has_running_threshold() {
        let threshold = f64::from(learner.threshold) / of_output;
        let latents = learner.objective.latents;
        let all = Tensor::full(threshold, latents, &Device::Cpu)?.to_dtype(candle_core::DType::F32)?;
        tensors.insert("threshold".to_owned(), all);
    }
    Ok(tensors)
}

/// Returns SAELens's configuration for the tensors.
fn config(learner: &Learner, context: usize) -> Value {
    let objective = &learner.objective;
    let [input, output] = learner.sites[0];
    let architecture = match objective.kind {
        DictionaryKind::TopK => "topk",
        DictionaryKind::Standard => "standard",
        DictionaryKind::BatchTopK | DictionaryKind::Matryoshka | DictionaryKind::JumpRelu => "jumprelu",
        DictionaryKind::Gated => "gated",
        DictionaryKind::Transcoder | DictionaryKind::CrossLayerTranscoder => "jumprelu_transcoder",
        DictionaryKind::SkipTranscoder => "jumprelu_skip_transcoder",
    };
    let is_transcoder = objective.kind.is_transcoder();
    let has_heads = matches!(input.kind, SiteKind::Z);
    let mut config = json!({
        "architecture": architecture,
        "d_in": objective.inputs,
        "d_sae": objective.latents,
        // Compute dtype for readers, independent of the file's dtype.
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": !is_transcoder,
        "normalize_activations": "none",
        "reshape_activations": if has_heads { "hook_z" } else { "none" },
        "metadata": {
            "sae_lens_version": LAYOUT,
            "sae_lens_training_version": null,
            "trained_with": format!("gpt2 {}", env!("CARGO_PKG_VERSION")),
            "trained_as": objective.kind.to_string(),
            "model_name": learner.model_name,
            "hook_name": input.to_string(),
            "context_size": context,
            "prepend_bos": learner.prepends_bos,
            "model_from_pretrained_kwargs": {},
        },
    });
    if objective.kind == DictionaryKind::TopK {
        config["k"] = objective.k.into();
        config["rescale_acts_by_decoder_norm"] = false.into();
    }
    if is_transcoder {
        config["d_out"] = objective.outputs.into();
        config["metadata"]["hook_name_out"] = output.to_string().into();
    }
    config
}
