//! Reads the transcoders of all layers from a folder in any supported format, or the built-in model's.

use std::fmt::Display;
use std::fs;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

use candle_gpt2::Gpt2Config;
use candle_gpt2_engine::{BUILT_IN, check_yaml, is_nearly_built_in};
use candle_gpt2_interpret::{Dictionary, FileError, TranscoderLayer, Transcoders, TranscodersConfig};
use candle_gpt2_weights::TensorFile;

use crate::LookError;
use crate::dictionaries::{built_in_dictionaries, read_dictionary};
use crate::error::{Result, invalid_option};
use crate::files::read_config;

/// Reads the transcoders of every layer of a model.
///
/// The folder is in circuit-tracer's format, or has a SAELens folder for each layer. circuit-tracer's has
/// `config.yaml` or `config.json`, with `layer_0.safetensors`, …, or with `W_enc_0.safetensors`,
/// `W_dec_0.safetensors`, …. [`BUILT_IN`] selects the transcoders of the built-in model.
///
/// ```
/// use candle_gpt2::Gpt2Config;
/// use candle_gpt2_look::read_transcoders;
///
/// let error = read_transcoders("no/such/folder".as_ref(), &Gpt2Config::gpt2()).err().ok_or("expected an error")?;
/// assert!(error.to_string().contains("no/such/folder"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If a file cannot be read, is not a transcoder, or does not fit the model.
pub fn read_transcoders(folder: &Path, model: &Gpt2Config) -> Result<Transcoders> {
    let of = |path: &Path| {
        let path = path.to_owned();
        move |error: FileError| LookError::File { path, error }
    };
    if is_nearly_built_in(folder) {
        return Err(invalid_option(format!(
            "{}: folder not found; did you mean {BUILT_IN}?",
            folder.display()
        )));
    }
    let config =
        ["config.yaml", "config.json"].map(|name| folder.join(name)).into_iter().find(|path| path.is_file());
    let transcoders = match config {
        _ if folder == Path::new(BUILT_IN) => {
            Transcoders::of_dictionaries(built_in_dictionaries()?).map_err(of(folder))?
        }
        Some(path) => {
            let config = TranscodersConfig::from_json(&as_json(&path)?).map_err(of(&path))?;
            of_circuit_tracer(folder, &config, model)?
        }
        None => Transcoders::of_dictionaries(of_saelens(folder, model)?).map_err(of(folder))?,
    };
    transcoders.check_model(model).map_err(of(folder))?;
    Ok(transcoders)
}

/// Reads a YAML file and converts it to JSON; JSON files are valid YAML.
fn as_json(path: &Path) -> Result<String> {
    let text = read_config(path)?;
    let failed = |error: &dyn Display| {
        let error = Error::new(ErrorKind::InvalidData, format!("expected YAML: {error}"));
        LookError::Read { path: path.to_owned(), error }
    };
    check_yaml(&text).map_err(|error| failed(&error))?;
    let value: serde_json::Value = serde_yaml_ng::from_str(&text).map_err(|error| failed(&error))?;
    Ok(value.to_string())
}

fn of_circuit_tracer(folder: &Path, config: &TranscodersConfig, model: &Gpt2Config) -> Result<Transcoders> {
    let files = |layer: usize| match config.is_cross_layer {
        true => vec![format!("W_enc_{layer}.safetensors"), format!("W_dec_{layer}.safetensors")],
        false => vec![format!("layer_{layer}.safetensors")],
    };
    let paths =
        |layer: usize| files(layer).into_iter().map(|name| folder.join(name)).collect::<Vec<PathBuf>>();
    let (expected, most) = (model.n_layer, model.n_layer + 1);
    let found = (0..most).find(|layer| !paths(*layer)[0].exists()).unwrap_or(most);
    // If even the first layer's file is missing, reading it below reports a clearer error.
    if found != expected && found > 0 {
        let error = FileError::OtherDepth { expected, found };
        return Err(LookError::File { path: folder.to_owned(), error });
    }
    let mut layers = Vec::new();
    for layer in 0..expected {
        let paths = paths(layer);
        let mut tensors = std::collections::BTreeMap::new();
        for path in &paths {
            tensors.extend(TensorFile::read(path)?.tensors);
        }
        let read = match config.is_cross_layer {
            true => TranscoderLayer::cross_layer(&tensors, config, layer, expected),
            false => TranscoderLayer::per_layer(&tensors, config),
        };
        layers.push(read.map_err(|error| LookError::File { path: paths[0].clone(), error })?);
    }
    Transcoders::new(config.input, layers).map_err(|error| LookError::File { path: folder.to_owned(), error })
}

/// Reads every subfolder that has a `cfg.json`.
fn of_saelens(folder: &Path, model: &Gpt2Config) -> Result<Vec<Dictionary>> {
    let unreadable = |error: Error| LookError::Read { path: folder.to_owned(), error };
    let mut folders = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.join("cfg.json").is_file() {
            folders.push(path);
        }
    }
    folders.sort();
    if folders.is_empty() {
        return Err(invalid_option(format!(
            "{}: no transcoders found; expected config.yaml with a file for each layer (circuit-tracer), \
             or a folder with cfg.json for each layer (SAELens)",
            folder.display()
        )));
    }
    let (expected, found) = (model.n_layer, folders.len());
    if found != expected {
        let error = FileError::OtherDepth { expected, found };
        return Err(LookError::File { path: folder.to_owned(), error });
    }
    folders.iter().map(|path| read_dictionary(path, None, model)).collect()
}
