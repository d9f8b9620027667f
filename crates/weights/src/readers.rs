//! How the model takes its parameters from a checkpoint: one at a time, straight from the mapped files.

use std::ops::Range;

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use gpt2_kernels::{Matrix, MatrixBytes, PackedMatrix, StoredFloat, StoredOrder, WeightFormat};

use crate::Checkpoint;
use crate::naming::ParameterSource;
use crate::stored::{StoredDType, StoredTensor};

/// Hands the parameters to the model, one at a time, straight from the mapped file.
pub(crate) struct ReadParameters<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    /// Is told how many bytes of the files were read since the last call.
    pub(crate) progress: &'a (dyn Fn(u64) + Sync),
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
            candle_core::bail!("parameter `{name}`: expected {shape:?}, found {:?}", tensor.shape());
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let Checkpoint { source, naming, .. } = self.checkpoint;
        let Some((from, shape)) = naming.parameters.get(name) else {
            candle_core::bail!("the checkpoint has no parameter `{name}`");
        };
        let read = |index: usize| {
            let stored = &source.tensors[index];
            let tensor = stored.read(&source.files, device)?.to_dtype(dtype)?;
            (self.progress)(stored.bytes.len() as u64);
            Ok::<_, candle_core::Error>(tensor)
        };
        let tensor = match from {
            ParameterSource::Whole(index) => read(*index)?,
            ParameterSource::Thirds([query, key, value]) => {
                Tensor::cat(&[read(*query)?, read(*key)?, read(*value)?], 0)?
            }
            ParameterSource::Zeros => Tensor::zeros(shape.as_slice(), dtype, device)?,
        };
        let rows = shape.first().copied().unwrap_or_default();
        if naming.is_transposed(name) && tensor.rank() == 2 {
            tensor.t()
        } else if name == "wte.weight" && tensor.dims().first().is_some_and(|stored| *stored > rows) {
            // Padding behind the vocabulary; `copy` would keep it in memory.
            tensor.narrow(0, 0, rows)?.force_contiguous()
        } else {
            Ok(tensor)
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let Checkpoint { source, naming, .. } = self.checkpoint;
        let holds_weights = |index: &usize| source.tensors[*index].dtype.holds_weights();
        match naming.parameters.get(name) {
            Some((ParameterSource::Whole(index), _)) => holds_weights(index),
            Some((ParameterSource::Thirds(thirds), _)) => thirds.iter().all(holds_weights),
            Some((ParameterSource::Zeros, _)) => true,
            None => false,
        }
    }
}

/// Embedding and head, where an error of four bits costs more than in all blocks together.
const TABLES: [&str; 2] = ["wte.weight", "lm_head.weight"];

/// Hands the parameters to the model with the matrices packed, straight from the mapped file where it holds them as
/// plain values.
pub(crate) struct PackParameters<'a> {
    reader: &'a ReadParameters<'a>,
    /// The format of all matrices; that of each one's stored type where there is none.
    format: Option<WeightFormat>,
    path: String,
}

impl<'a> PackParameters<'a> {
    pub(crate) fn new(reader: &'a ReadParameters<'a>, format: Option<WeightFormat>) -> Self {
        Self { reader, format, path: String::new() }
    }

    fn name(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// The tensor of a matrix that is stored in one piece.
    fn stored(&self, name: &str) -> Option<&'a StoredTensor> {
        self.reader.checkpoint.stored_matrix(name)
    }

    /// The bytes of a matrix that the packing can read as they are.
    fn mapped(&self, name: &str, (out_features, in_features): (usize, usize)) -> Option<MatrixBytes<'_>> {
        let stored = self.stored(name).filter(|stored| stored.strides.is_none())?;
        let dtype = match stored.dtype {
            StoredDType::F32 => StoredFloat::F32,
            StoredDType::F16 => StoredFloat::F16,
            StoredDType::BF16 => StoredFloat::BF16,
            _ => return None,
        };
        let Checkpoint { naming, source, .. } = self.reader.checkpoint;
        let order = match (naming.is_transposed(name), stored.shape.as_slice()) {
            (true, [rows, columns]) if (*rows, *columns) == (in_features, out_features) => {
                StoredOrder::InputMajor
            }
            // More rows than outputs are padding behind the vocabulary.
            (false, [rows, columns]) if *rows >= out_features && *columns == in_features => {
                StoredOrder::OutputMajor
            }
            _ => return None,
        };
        let bytes = source.files.get(stored.file)?.get(stored.bytes.clone())?;
        Some(MatrixBytes { bytes, dtype, order, out_features, in_features })
    }
}

impl gpt2_kernels::ParameterSource for PackParameters<'_> {
    fn below(&self, name: impl ToString) -> Self {
        Self { reader: self.reader, format: self.format, path: self.name(&name.to_string()) }
    }

    fn parameter(&self, shape: impl Into<Shape>, name: &str) -> candle_core::Result<Tensor> {
        let name = self.name(name);
        self.reader.get(shape.into(), &name, candle_nn::Init::Const(0.), DType::F32, &Device::Cpu)
    }

    fn matrix(&self, out_features: usize, in_features: usize, name: &str) -> candle_core::Result<Matrix> {
        let path = self.name(name);
        let stored = self.stored(&path);
        let format = match self.format {
            Some(WeightFormat::Q4) if TABLES.contains(&path.as_str()) => WeightFormat::Q6,
            Some(format) => format,
            None => stored.map_or(WeightFormat::F32, |stored| stored.dtype.weight_format()),
        };
        let packed = match (self.mapped(&path, (out_features, in_features)), stored) {
            (Some(matrix), Some(stored)) => {
                let read = |bytes: Range<usize>| {
                    (self.reader.progress)(bytes.len() as u64);
                    let start = stored.bytes.start;
                    stored
                        .forget(&self.reader.checkpoint.source.files, start + bytes.start..start + bytes.end);
                };
                PackedMatrix::from_bytes(matrix, format, &read)?
            }
            _ => PackedMatrix::from_tensor(&self.parameter((out_features, in_features), name)?, format)?,
        };
        Ok(Matrix::Packed(packed.into()))
    }
}
