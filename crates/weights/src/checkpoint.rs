//! A checkpoint: a folder with `config.json` and weights, or a weights file with `config.json` beside it.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use gpt2::{Gpt2Config, Gpt2LMHead, expected_parameters};

use crate::mapped_file::MappedFile;
use crate::naming::{Naming, Orientation};
use crate::stored::StoredTensor;
use crate::{Mismatch, WeightsError, safetensors_file};

/// The name of the configuration in a checkpoint folder.
const CONFIG_FILE: &str = "config.json";
/// The name of the weights in a checkpoint folder.
const WEIGHTS_FILE: &str = "model.safetensors";
/// Largest configuration that is read: real ones have a few kilobytes.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// A format of checkpoint files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// Hugging Face's safetensors.
    Safetensors,
}

impl Format {
    /// The format's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Safetensors => "safetensors",
        }
    }
}

/// What [`Checkpoint::verify`] found wrong.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Problem {
    /// The tensors are not those of the model.
    Mismatch(Mismatch),
    /// A parameter holds values that are not numbers.
    NotFinite {
        /// The tensor's name in the file.
        name: String,
        /// How many values are NaN.
        nan: usize,
        /// How many values are infinite.
        infinite: usize,
        /// How many values the tensor has.
        elements: usize,
    },
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Mismatch(mismatch) => mismatch.fmt(f),
            Self::NotFinite {
                name,
                nan,
                infinite,
                elements,
            } => {
                write!(
                    f,
                    "tensor `{name}`: of {elements} values {nan} are NaN and {infinite} infinite"
                )
            }
        }
    }
}

/// An opened checkpoint: its configuration is read, its tensors are listed and compared; no value is read yet.
#[derive(Debug)]
pub struct Checkpoint {
    config: Gpt2Config,
    file: MappedFile,
    tensors: Vec<StoredTensor>,
    naming: Naming,
}

impl Checkpoint {
    /// Opens a checkpoint folder, or a weights file with `config.json` beside it. Tensors that do not fit the
    /// configuration are no error yet: see [`Checkpoint::check`] and [`Checkpoint::verify`].
    ///
    /// # Errors
    /// When a file is missing, cannot be read, or is not what its place says.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        let Ok(metadata) = std::fs::metadata(path) else {
            return Err(WeightsError::NotFound {
                path: path.to_owned(),
            });
        };
        let folder = if metadata.is_dir() {
            path
        } else {
            parent_folder(path)
        };
        let config = read_config(folder)?;
        let weights = if metadata.is_dir() {
            find_weights(folder)?
        } else {
            path.to_owned()
        };
        let file = MappedFile::open(&weights)?;
        let tensors = safetensors_file::tensors(&file)?;
        let naming = Naming::new(&config, &tensors);
        Ok(Self {
            config,
            file,
            tensors,
            naming,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// The weights file.
    pub fn weights_path(&self) -> &Path {
        self.file.path()
    }

    /// The folder that holds the configuration, the weights and, where there is one, the tokenizer.
    pub fn folder(&self) -> &Path {
        parent_folder(self.file.path())
    }

    /// The format of the weights file.
    pub fn format(&self) -> Format {
        Format::Safetensors
    }

    /// Every tensor of the file, parameter or not, in the order of the file.
    pub fn tensors(&self) -> &[StoredTensor] {
        &self.tensors
    }

    /// What stands in front of the names in the file, such as `transformer.`.
    pub fn prefix(&self) -> &str {
        &self.naming.prefix
    }

    /// How the file stores the weights of linear layers.
    pub fn orientation(&self) -> Orientation {
        self.naming.orientation
    }

    /// Tensors of the file that are no parameters: causal masks of old checkpoints.
    pub fn buffers(&self) -> impl Iterator<Item = &StoredTensor> {
        self.naming.buffers.iter().map(|index| &self.tensors[*index])
    }

    /// A copy of the token embedding under the head's name, in a file whose configuration ties the two.
    pub fn tied_head(&self) -> Option<&StoredTensor> {
        self.naming.tied_head.map(|index| &self.tensors[index])
    }

    /// Whether the tensors are exactly those of the configured model.
    ///
    /// # Errors
    /// When not, with every difference.
    pub fn check(&self) -> Result<(), WeightsError> {
        if self.naming.mismatches.is_empty() {
            return Ok(());
        }
        let (path, mismatches) = (self.file.path().to_owned(), self.naming.mismatches.clone());
        Err(WeightsError::Mismatches { path, mismatches })
    }

    /// Builds the model, in f32. `progress` is told how many bytes of the file were read since the last call.
    ///
    /// # Errors
    /// When the tensors are not those of the model, or the device has no room.
    pub fn load(&self, device: &Device, progress: &(dyn Fn(u64) + Sync)) -> Result<Gpt2LMHead, WeightsError> {
        self.check()?;
        let backend = ReadParameters {
            checkpoint: self,
            progress,
        };
        let vb = VarBuilder::from_backend(Box::new(backend), DType::F32, device.clone());
        Ok(Gpt2LMHead::load(&self.config, &vb)?)
    }

    /// Everything that is wrong with the checkpoint: tensors that do not fit, and values that are not finite.
    /// `progress` is told how many bytes of the file were read since the last call.
    ///
    /// # Errors
    /// When a tensor cannot be read.
    pub fn verify(&self, progress: &(dyn Fn(u64) + Sync)) -> Result<Vec<Problem>, WeightsError> {
        let mut problems: Vec<_> = self
            .naming
            .mismatches
            .iter()
            .cloned()
            .map(Problem::Mismatch)
            .collect();
        for parameter in expected_parameters(&self.config) {
            let Some(index) = self.naming.parameters.get(&parameter.name) else {
                continue;
            };
            let stored = &self.tensors[*index];
            if stored.dtype.candle().is_none() {
                continue;
            }
            let values = stored
                .read(&self.file, &Device::Cpu)?
                .flatten_all()?
                .to_vec1::<f32>()?;
            let nan = values.iter().filter(|value| value.is_nan()).count();
            let infinite = values.iter().filter(|value| value.is_infinite()).count();
            if nan + infinite > 0 {
                let (name, elements) = (stored.name.clone(), values.len());
                problems.push(Problem::NotFinite {
                    name,
                    nan,
                    infinite,
                    elements,
                });
            }
            progress(stored.bytes.len() as u64);
        }
        Ok(problems)
    }

    /// Bytes of the parameters in the file.
    pub fn parameter_bytes(&self) -> u64 {
        self.naming
            .parameters
            .values()
            .map(|index| self.tensors[*index].bytes.len() as u64)
            .sum()
    }
}

/// Hands the parameters to the model, one at a time, straight from the mapped file.
struct ReadParameters<'a> {
    checkpoint: &'a Checkpoint,
    progress: &'a (dyn Fn(u64) + Sync),
}

impl SimpleBackend for ReadParameters<'_> {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        if tensor.shape() != &shape {
            candle_core::bail!(
                "parameter `{name}`: expected {shape:?}, found {:?}",
                tensor.shape()
            );
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let Checkpoint {
            file,
            tensors,
            naming,
            ..
        } = self.checkpoint;
        let Some(index) = naming.parameters.get(name) else {
            candle_core::bail!("the checkpoint has no parameter `{name}`");
        };
        let stored = &tensors[*index];
        let tensor = stored.read(file, device)?.to_dtype(dtype)?;
        (self.progress)(stored.bytes.len() as u64);
        if naming.is_transposed(name) {
            tensor.t()
        } else {
            Ok(tensor)
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.checkpoint.naming.parameters.contains_key(name)
    }
}

fn parent_folder(file: &Path) -> &Path {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn read_config(folder: &Path) -> Result<Gpt2Config, WeightsError> {
    let path = folder.join(CONFIG_FILE);
    let Ok(metadata) = std::fs::metadata(&path) else {
        return Err(WeightsError::NoConfig {
            folder: folder.to_owned(),
        });
    };
    if metadata.len() > MAX_CONFIG_BYTES {
        let what = format!(
            "expected a configuration of a few kilobytes, found {} bytes",
            metadata.len()
        );
        return Err(WeightsError::NotWeights { path, what });
    }
    let text = std::fs::read(&path).map_err(|error| WeightsError::Read {
        path: path.clone(),
        error,
    })?;
    let config = Gpt2Config::from_json(&String::from_utf8_lossy(&text));
    config.map_err(|error| WeightsError::Config { path, error })
}

/// `model.safetensors`, or the only safetensors file of the folder.
fn find_weights(folder: &Path) -> Result<PathBuf, WeightsError> {
    let usual = folder.join(WEIGHTS_FILE);
    if usual.exists() {
        return Ok(usual);
    }
    let failed = |error| WeightsError::Read {
        path: folder.to_owned(),
        error,
    };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        names.push(entry.map_err(failed)?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    let safetensors: Vec<_> = names
        .iter()
        .filter(|name| name.ends_with(".safetensors"))
        .collect();
    match safetensors.as_slice() {
        [only] => Ok(folder.join(only)),
        [] => {
            let others = names.iter().filter(|name| {
                [
                    ".bin",
                    ".pt",
                    ".pth",
                    ".gguf",
                    ".ckpt",
                    ".h5",
                    ".msgpack",
                    ".index.json",
                ]
                .iter()
                .any(|ending| name.ends_with(ending))
            });
            let others: Vec<_> = others.map(String::as_str).collect();
            let found = if others.is_empty() {
                "; a checkpoint folder holds it beside config.json".to_owned()
            } else {
                format!(
                    " (found {}); convert it with `save_pretrained` of transformers",
                    others.join(", ")
                )
            };
            Err(WeightsError::NoWeights {
                folder: folder.to_owned(),
                found,
            })
        }
        several => {
            let names: Vec<_> = several.iter().map(|name| name.as_str()).collect();
            let found = format!(
                ", but several others ({}); name the file itself",
                names.join(", ")
            );
            Err(WeightsError::NoWeights {
                folder: folder.to_owned(),
                found,
            })
        }
    }
}
