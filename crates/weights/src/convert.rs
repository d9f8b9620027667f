//! Writing a checkpoint as a Hugging Face folder, and what all writers of checkpoints share.

use std::fs;
use std::path::Path;

use candle_core::{Device, Tensor};
use candle_gpt2::{Gpt2Config, expected_parameters};
use candle_gpt2_kernels::contiguous;
use safetensors::tensor::Dtype;

use crate::naming::{MODEL_PREFIX, Orientation, checkpoint_shape, is_linear_weight, is_of_head};
use crate::progress::{PIECE, check_interrupted};
use crate::replace::create_folder;
use crate::rounding::{append, check_range, safetensors_dtype};
use crate::write_tensors::{LazyTensor, serialize};
use crate::{Checkpoint, ReadProgress, Tokenizer, WeightsError, WrittenDType, replace_file};

/// Writes a Hugging Face folder: `model.safetensors`, `config.json` and, if there is a tokenizer, `tokenizer.json`.
/// transformers loads it. `progress` receives the bytes of the checkpoint read since the last call, and may end it.
///
/// ```
/// use candle_gpt2_weights::{Checkpoint, GivenFiles, OpenOptions, WrittenDType, write_hugging_face};
///
/// let files = GivenFiles::new("stories")
///     .with_bytes("config.json", candle_gpt2_stories::CONFIG)
///     .with_bytes("model.safetensors", candle_gpt2_stories::WEIGHTS);
/// let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
///
/// let folder = tempfile::tempdir()?;
/// let wide = folder.path().join("wide");
/// write_hugging_face(&checkpoint, None, &wide, WrittenDType::F32, &|_| ())?;
/// assert_eq!(Checkpoint::open(&wide)?.parameter_bytes(), 2 * checkpoint.parameter_bytes());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When the checkpoint is not sound in its structure, the type is not one of safetensors, `folder` exists, or it cannot
/// be written; [`WeightsError::Interrupted`] if `progress` says so. Nothing is then left of it.
pub fn write_hugging_face(
    checkpoint: &Checkpoint,
    tokenizer: Option<&Tokenizer>,
    folder: &Path,
    dtype: WrittenDType,
    progress: &dyn ReadProgress,
) -> Result<(), WeightsError> {
    checkpoint.check()?;
    let safetensors_dtype = safetensors_dtype(dtype, folder)?;
    let read = |name: &str| parameter(checkpoint, name, progress);
    create_folder(folder, |folder| {
        write_safetensors(
            &folder.join("model.safetensors"),
            checkpoint.config(),
            &read,
            safetensors_dtype,
            progress,
        )?;
        fs::write(folder.join("config.json"), config_text(checkpoint.config(), safetensors_dtype)?)?;
        if let Some(tokenizer) = tokenizer {
            tokenizer.save(folder.join("tokenizer.json"), true)?;
        }
        Ok(())
    })
}

/// Writes the files of a Hugging Face folder that exists, each in place of the one that is there: first the tokenizer and
/// the configuration, then the weights. `read` gives a parameter by its name, matrices `(out, in)`.
/// [`write_hugging_face`] makes such a folder.
///
/// # Errors
/// Those of `read`, when the type is not one of safetensors, or a file cannot be written.
pub fn replace_hugging_face(
    folder: &Path,
    config: &Gpt2Config,
    read: &dyn Fn(&str) -> Result<Tensor, WeightsError>,
    tokenizer: &Tokenizer,
    dtype: WrittenDType,
) -> Result<(), WeightsError> {
    let dtype = safetensors_dtype(dtype, folder)?;
    replace_file(&folder.join("tokenizer.json"), |path| tokenizer.save(path, true))?;
    replace_file(&folder.join("config.json"), |path| Ok(fs::write(path, config_text(config, dtype)?)?))?;
    replace_file(&folder.join("model.safetensors"), |path| {
        Ok(write_safetensors(path, config, read, dtype, &|_| ())?)
    })
}

fn write_safetensors(
    path: &Path,
    config: &Gpt2Config,
    read: &dyn Fn(&str) -> Result<Tensor, WeightsError>,
    dtype: Dtype,
    progress: &dyn ReadProgress,
) -> Result<(), WeightsError> {
    let tensors = expected_parameters(config).into_iter().map(|parameter| {
        let prefix = if is_of_head(&parameter.name) { "" } else { MODEL_PREFIX };
        let shape = checkpoint_shape(&parameter, Orientation::Conv1D);
        let name = format!("{prefix}{}", parameter.name);
        let read = move || bytes(&parameter.name, read, (path, dtype), progress);
        (name, LazyTensor { dtype, shape, read })
    });
    serialize(path, tensors, [("format".to_owned(), "pt".to_owned())].into())
}

fn config_text(config: &Gpt2Config, dtype: Dtype) -> Result<String, serde_json::Error> {
    let mut config = config.to_json();
    config["dtype"] = match dtype {
        Dtype::F16 => "float16".into(),
        Dtype::BF16 => "bfloat16".into(),
        _ => "float32".into(),
    };
    Ok(serde_json::to_string_pretty(&config)? + "\n")
}

/// A parameter as the file `path` holds it.
fn bytes(
    name: &str,
    read: &dyn Fn(&str) -> Result<Tensor, WeightsError>,
    (path, dtype): (&Path, Dtype),
    progress: &dyn ReadProgress,
) -> Result<Vec<u8>, WeightsError> {
    let mut tensor = read(name)?;
    // The shape would not tell: `attn.c_proj` is square.
    if is_linear_weight(name) {
        tensor = tensor.t()?;
    }
    let values = contiguous(&tensor)?.flatten_all()?.to_vec1::<f32>()?;
    if dtype == Dtype::F16 {
        let refuse = |what| WeightsError::Unwritable { path: path.to_owned(), what };
        check_range(name, &values).map_err(refuse)?;
    }
    let mut bytes = Vec::with_capacity(values.len() * dtype.bitsize() / 8);
    for piece in values.chunks(PIECE) {
        check_interrupted(progress)?;
        append(&mut bytes, piece, dtype);
    }
    Ok(bytes)
}

/// A parameter in f32, matrices `(out, in)`.
fn parameter(
    checkpoint: &Checkpoint,
    name: &str,
    progress: &dyn ReadProgress,
) -> Result<Tensor, WeightsError> {
    let tensor = checkpoint.parameter(name, &Device::Cpu, progress)?;
    let missing =
        || WeightsError::Candle(candle_core::Error::Msg(format!("the checkpoint has no parameter `{name}`")));
    tensor.ok_or_else(missing)
}
