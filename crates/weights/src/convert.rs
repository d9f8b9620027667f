//! Export of a checkpoint as a Hugging Face folder, and helpers shared by all checkpoint writers.

use std::fs;
use std::path::Path;

use candle_core::{Device, Tensor};
use candle_gpt2::{Gpt2Config, Parameter, ParameterKind, expected_parameters};
use candle_gpt2_kernels::contiguous;
use safetensors::tensor::Dtype;

use crate::naming::{MODEL_PREFIX, Orientation, checkpoint_shape, is_of_head};
use crate::progress::{PIECE, check_interrupted};
use crate::replace::{create_file, create_folder};
use crate::rounding::{append, check_range, safetensors_dtype};
use crate::write_tensors::{LazyTensor, serialize};
use crate::{Checkpoint, Companions, ReadProgress, WeightsError, WrittenDType, replace_file};

/// Writes a Hugging Face folder: `model.safetensors`, `config.json` and the [`Companions`].
///
/// transformers can load it. Returns notes on settings that the folder cannot store. `progress` receives
/// the number of checkpoint bytes read since its last call, and can interrupt the export.
///
/// ```
/// use candle_gpt2_weights::{
///     Checkpoint, Companions, GivenFiles, OpenOptions, WrittenDType, write_hugging_face,
/// };
///
/// let files = GivenFiles::of_bytes("stories", candle_gpt2_stories::FILES);
/// let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
///
/// let folder = tempfile::tempdir()?;
/// let wide = folder.path().join("wide");
/// write_hugging_face(&checkpoint, &Companions::default(), &wide, WrittenDType::F32, &|_| ())?;
/// assert!(Checkpoint::open(&wide)?.parameter_bytes() > 3 * checkpoint.parameter_bytes());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the checkpoint is structurally invalid, safetensors does not support the dtype, `folder` exists, or
/// writing fails. [`WeightsError::Interrupted`] if `progress` requests it. A failed export leaves nothing
/// behind.
pub fn write_hugging_face(
    checkpoint: &Checkpoint,
    companions: &Companions,
    folder: &Path,
    dtype: WrittenDType,
    progress: &dyn ReadProgress,
) -> Result<Vec<String>, WeightsError> {
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
        for (name, bytes) in companions.folder_files(checkpoint.config(), torch_name(safetensors_dtype))? {
            fs::write(folder.join(name), bytes)?;
        }
        Ok(())
    })?;
    Ok(companions.notes())
}

/// Writes the weights alone, as one safetensors file with Hugging Face names.
///
/// Readers also need the other files of such a folder next to the weights. `progress` receives the number of
/// checkpoint bytes read since its last call, and can interrupt the export.
///
/// ```
/// use candle_gpt2_weights::{Checkpoint, GivenFiles, OpenOptions, WrittenDType, write_safetensors_file};
///
/// let files = GivenFiles::of_bytes("stories", candle_gpt2_stories::FILES);
/// let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
/// let folder = tempfile::tempdir()?;
/// let file = folder.path().join("stories.safetensors");
/// write_safetensors_file(&checkpoint, &file, WrittenDType::F16, &|_| ())?;
/// std::fs::write(folder.path().join("config.json"), candle_gpt2_stories::CONFIG)?;
/// assert!(Checkpoint::open(&file)?.parameter_bytes() > checkpoint.parameter_bytes());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the checkpoint is structurally invalid, safetensors does not support the dtype, `file` exists, or
/// writing fails. [`WeightsError::Interrupted`] if `progress` requests it. A failed export leaves nothing
/// behind.
pub fn write_safetensors_file(
    checkpoint: &Checkpoint,
    file: &Path,
    dtype: WrittenDType,
    progress: &dyn ReadProgress,
) -> Result<(), WeightsError> {
    checkpoint.check()?;
    let dtype = safetensors_dtype(dtype, file)?;
    let read = |name: &str| parameter(checkpoint, name, progress);
    create_file(file, |partial| Ok(write_safetensors(partial, checkpoint.config(), &read, dtype, progress)?))
}

/// Overwrites the files in an existing Hugging Face folder one by one.
///
/// The companions and the configuration come first, then the weights. `read` returns a parameter by its
/// name, with matrices as `(out, in)`. [`write_hugging_face`] creates such a folder.
///
/// # Errors
/// If `read` fails, safetensors does not support the dtype, or a file cannot be written.
pub fn replace_hugging_face(
    folder: &Path,
    config: &Gpt2Config,
    read: &dyn Fn(&str) -> Result<Tensor, WeightsError>,
    companions: &Companions,
    dtype: WrittenDType,
) -> Result<(), WeightsError> {
    let dtype = safetensors_dtype(dtype, folder)?;
    for (name, bytes) in companions.folder_files(config, torch_name(dtype))? {
        replace_file(&folder.join(name), |path| Ok(fs::write(path, &bytes)?))?;
    }
    replace_file(&folder.join("model.safetensors"), |path| {
        Ok(write_safetensors(path, config, read, dtype, &|_| ())?)
    })
}

/// Returns PyTorch's name for a dtype, as used in `config.json`.
fn torch_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F16 => "float16",
        Dtype::BF16 => "bfloat16",
        _ => "float32",
    }
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
        let read = move || bytes(&parameter, read, (path, dtype), progress);
        (name, LazyTensor { dtype, shape, read })
    });
    serialize(path, tensors, [("format".to_owned(), "pt".to_owned())].into())
}

/// Encodes a parameter for the file at `path`.
fn bytes(
    Parameter { name, kind, .. }: &Parameter,
    read: &dyn Fn(&str) -> Result<Tensor, WeightsError>,
    (path, dtype): (&Path, Dtype),
    progress: &dyn ReadProgress,
) -> Result<Vec<u8>, WeightsError> {
    let mut tensor = read(name)?;
    // The kind determines the layout, because the shape can be ambiguous: `attn.c_proj` is square.
    if *kind == ParameterKind::Linear {
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

/// Reads a parameter in f32, with matrices as `(out, in)`.
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
