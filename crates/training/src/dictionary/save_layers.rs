//! Files of a cross-layer transcoder in circuit-tracer's format.
//!
//! Each layer `l` has `W_enc_{l}.safetensors` with `W_enc_{l}` `(F, C)`, `b_enc_{l}`, `threshold_{l}` `(F)`
//! and `b_dec_{l}` `(C)`. It also has `W_dec_{l}.safetensors` with `W_dec_{l}` `(F, L − l, C)`. The folder
//! has one `config.yaml`.
//!
//! The scales are folded into the weights, so readers use the model's unscaled activations. The input
//! scale of a layer goes into its encoder, and its output scale into every decoder that writes to it. Latents
//! stay in scaled units, because the scales of layers differ.
//!
//! `config.yaml` is removed before the tensors are replaced, and written after them. A folder with this file
//! is therefore complete.
//!
//! Source: decoderesearch/circuit-tracer, `circuit_tracer/transcoder/cross_layer_transcoder.py` at 05774bb.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2_weights::{WrittenDType, replace_file, write_rounded_tensors};

use super::Learner;
use super::objective::Objective;
use crate::{Parameters, TrainingError};

/// Name of the file that describes a folder of transcoders.
///
/// ```
/// assert_eq!(candle_gpt2_training::LAYERS_CONFIG_FILE, "config.yaml");
/// ```
pub const LAYERS_CONFIG_FILE: &str = "config.yaml";

/// Returns the names of the two files with one layer's tensors of a cross-layer transcoder.
///
/// ```
/// assert_eq!(candle_gpt2_training::layer_files(3), ["W_enc_3.safetensors", "W_dec_3.safetensors"]);
/// ```
pub fn layer_files(layer: usize) -> [String; 2] {
    ["W_enc", "W_dec"].map(|name| format!("{name}_{layer}.safetensors"))
}

/// Returns the names of the files that [`save`] writes.
pub(super) fn files(learner: &Learner) -> Vec<String> {
    let of_layers = (0..learner.objective.blocks).flat_map(layer_files);
    of_layers.chain([LAYERS_CONFIG_FILE.to_owned()]).collect()
}

/// Writes the files to a folder, replacing existing ones, with tensors of this dtype.
pub(super) fn save(
    learner: &Learner,
    parameters: &Parameters,
    folder: &Path,
    dtype: WrittenDType,
) -> std::result::Result<(), TrainingError> {
    let config = folder.join(LAYERS_CONFIG_FILE);
    match fs::remove_file(&config) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(TrainingError::File { path: config, error });
        }
        _ => {}
    }
    for layer in 0..learner.objective.blocks {
        for (name, tensors) in layer_files(layer).iter().zip(tensors(learner, parameters, layer)?) {
            replace_file(&folder.join(name), |partial| Ok(write_rounded_tensors(partial, &tensors, dtype)?))?;
        }
    }
    Ok(replace_file(&config, |partial| Ok(fs::write(partial, config_text(learner))?))?)
}

/// Returns the tensors of both files of a layer, for unscaled activations.
fn tensors(
    learner: &Learner,
    parameters: &Parameters,
    layer: usize,
) -> Result<[BTreeMap<String, Tensor>; 2]> {
    let Objective { blocks, latents, outputs, .. } = learner.objective;
    let parameter = |name: &str| match parameters.get(name) {
        Some(variable) => Ok(variable.as_tensor().detach()),
        None => candle_core::bail!("parameter `{name}` of the cross-layer transcoder is missing"),
    };
    let of_layer = |name: &str, count: usize| parameter(name)?.narrow(0, layer * count, count)?.contiguous();
    let [of_input, of_output] = learner.scales(layer).map(f64::from);
    let encoder = [
        ("W_enc", (of_layer("W_enc", latents)? * of_input)?),
        ("b_enc", of_layer("b_enc", latents)?),
        ("b_dec", (of_layer("b_dec", outputs)? / of_output)?),
        ("threshold", Tensor::full(learner.threshold, latents, &Device::Cpu)?),
    ];
    let decoder = parameter("W_dec")?.reshape((learner.objective.matrices(), latents, outputs))?;
    let first = learner.objective.matrix(layer, layer).start / (latents * outputs);
    let scales: Vec<f32> = (layer..blocks).map(|target| learner.scales(target)[1]).collect();
    let scales = Tensor::from_vec(scales, (blocks - layer, 1, 1), &Device::Cpu)?.to_dtype(DType::F32)?;
    let decoder = decoder.narrow(0, first, blocks - layer)?.broadcast_div(&scales)?; // (L − l, F, C)
    let decoder = [("W_dec", decoder.transpose(0, 1)?.contiguous()?)];
    let named = |(name, tensor): (&str, Tensor)| (format!("{name}_{layer}"), tensor);
    Ok([encoder.map(named).into(), decoder.map(named).into()])
}

/// Returns the content of `config.yaml`.
fn config_text(learner: &Learner) -> String {
    let [input, output] = learner.sites[0].map(|site| site.kind.hook());
    // A JSON string is also valid YAML.
    let model = serde_json::Value::from(&learner.model_name[..]);
    format!(
        "model_name: {model}\nmodel_kind: cross_layer_transcoder\nfeature_input_hook: {input}\nfeature_output_hook: {output}\n\
         trained_with: gpt2 {}\n",
        env!("CARGO_PKG_VERSION")
    )
}
