//! Parameter readers that supply the model from a checkpoint, one tensor at a time.

use std::ops::Range;

use candle_core::{DType, Device, Shape, Tensor};
use candle_gpt2::{Parameter, expected_parameters};
use candle_gpt2_arithmetic::{MatrixBytes, NumberType, PackedMatrix, StoredOrder};
use candle_gpt2_kernels::{Matrix, ParameterSource, contiguous};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;

use crate::adapter::changed;
use crate::naming::{Origin, is_of_head};
use crate::progress::{check_interrupted, of_candle};
use crate::stored::{StoredDType, StoredTensor};
use crate::{Checkpoint, ReadProgress, WeightsError, crc32c};

/// Reader that loads parameters one at a time, straight from the files.
pub(crate) struct ReadParameters<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    /// Receives the number of bytes read, and can interrupt the job.
    pub(crate) progress: &'a dyn ReadProgress,
}

impl ReadParameters<'_> {
    /// Calls `visit` with a parameter in f32, in chunks of whole rows.
    ///
    /// Matrices are `(out, in)`, and each chunk has about `piece` elements. If the file stores consecutive
    /// rows, only one chunk is in memory at a time.
    pub(crate) fn for_each_piece(
        &self,
        name: &str,
        piece: usize,
        visit: &mut dyn FnMut(&Tensor) -> Result<(), WeightsError>,
    ) -> Result<(), WeightsError> {
        let Checkpoint { source, naming, .. } = self.checkpoint;
        let Some((_, Parameter { shape, .. })) = naming.parameters.get(name) else {
            return Err(missing(name).into());
        };
        let step = (piece / shape[1..].iter().product::<usize>().max(1)).max(1);
        let ranges = (0..shape[0]).step_by(step).map(|start| start..shape[0].min(start + step));
        let is_changed = self.checkpoint.changes.contains_key(name);
        let in_rows =
            self.checkpoint.stored_matrix(name).filter(|_| !is_changed && !naming.is_transposed(name));
        let stored: Option<Vec<StoredTensor>> = ranges.clone().map(|rows| in_rows?.rows(rows)).collect();
        if let Some(stored) = stored {
            in_rows.map_or(Ok(()), |whole| whole.check_bytes(&source.files))?;
            return stored.into_iter().try_for_each(|stored| {
                check_interrupted(self.progress)?;
                self.progress.advance(stored.stored_bytes());
                visit(&stored.read(&source.files, &Device::Cpu)?)
            });
        }
        let whole = self.get_unchecked(name, DType::F32, &Device::Cpu);
        let whole = whole.map_err(|error| of_candle(self.progress, error))?;
        for rows in ranges {
            check_interrupted(self.progress)?;
            // Copied, because candle would quantize the whole tensor behind a view.
            visit(&contiguous(&whole.narrow(0, rows.start, rows.len())?)?.force_contiguous()?)?;
        }
        Ok(())
    }

    /// Reads a parameter as stored in the files, before adapters apply.
    fn stored(&self, name: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let Checkpoint { source, naming, .. } = self.checkpoint;
        let Some((from, Parameter { shape, .. })) = naming.parameters.get(name) else {
            return Err(missing(name));
        };
        let read = |index: usize| {
            check_interrupted(self.progress).map_err(candle_core::Error::wrap)?;
            let stored = &source.tensors[index];
            let tensor =
                stored.read(&source.files, device).map_err(candle_core::Error::wrap)?.to_dtype(dtype)?;
            self.progress.advance(stored.stored_bytes());
            Ok::<_, candle_core::Error>(tensor)
        };
        let tensor = match from {
            Origin::Whole(index) => read(*index)?,
            Origin::Thirds([query, key, value]) => {
                Tensor::cat(&[read(*query)?, read(*key)?, read(*value)?], 0)?
            }
            Origin::Zeros => Tensor::zeros(shape.as_slice(), dtype, device)?,
        };
        let rows = shape.first().copied().unwrap_or_default();
        if naming.is_transposed(name) && tensor.rank() == 2 {
            tensor.t()
        } else if TABLES.contains(&name) && tensor.dims().first().is_some_and(|stored| *stored > rows) {
            // Drops the padding after the vocabulary; `copy` would keep the padding in memory.
            tensor.narrow(0, 0, rows)?.force_contiguous()
        } else {
            Ok(tensor)
        }
    }
}

impl Checkpoint {
    /// Reads a parameter in f32, with matrices as `(out, in)`.
    ///
    /// Returns `None` if the checkpoint lacks the parameter, or if its dtype cannot hold weights. `progress`
    /// receives the number of bytes read, and can interrupt the read.
    ///
    /// # Errors
    /// If the tensor cannot be read; [`WeightsError::Interrupted`] if `progress` requests it.
    pub fn parameter(
        &self,
        name: &str,
        device: &Device,
        progress: &dyn ReadProgress,
    ) -> Result<Option<Tensor>, WeightsError> {
        let backend = ReadParameters { checkpoint: self, progress };
        if !backend.contains_tensor(name) {
            return Ok(None);
        }
        let tensor = backend.get_unchecked(name, DType::F32, device);
        tensor.map(Some).map_err(|error| of_candle(progress, error))
    }
}

fn missing(name: &str) -> candle_core::Error {
    candle_core::Error::Msg(format!("the checkpoint has no parameter `{name}`"))
}

impl SimpleBackend for ReadParameters<'_> {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        if tensor.shape() != &shape {
            candle_core::bail!("parameter `{name}`: expected shape {shape:?}, found {:?}", tensor.shape());
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let Checkpoint { changes, .. } = self.checkpoint;
        if !changes.contains_key(name) {
            return self.stored(name, dtype, device);
        }
        let base = self.stored(name, DType::F32, &Device::Cpu)?;
        changed(changes, name, base)?.to_dtype(dtype)?.to_device(device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let Checkpoint { source, naming, .. } = self.checkpoint;
        let holds_weights = |index: &usize| source.tensors[*index].dtype.holds_weights();
        match naming.parameters.get(name) {
            Some((Origin::Whole(index), _)) => holds_weights(index),
            Some((Origin::Thirds(thirds), _)) => thirds.iter().all(holds_weights),
            Some((Origin::Zeros, _)) => true,
            None => false,
        }
    }
}

/// Embedding and head; see [`NumberType::of_tables`].
const TABLES: [&str; 2] = ["wte.weight", "lm_head.weight"];

/// Reader that packs the matrices among the parameters.
///
/// It packs directly from the file's bytes if they are plain values.
#[derive(Clone)]
pub(crate) struct PackParameters<'a> {
    reader: &'a ReadParameters<'a>,
    /// Packed type of all matrices; `None` derives it from each matrix's stored dtype.
    dtype: Option<NumberType>,
    path: String,
}

impl<'a> PackParameters<'a> {
    pub(crate) fn new(reader: &'a ReadParameters<'a>, dtype: Option<NumberType>) -> Self {
        Self { reader, dtype, path: String::new() }
    }

    fn name(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// Returns the tensor of a matrix that is stored as a single tensor.
    fn stored(&self, name: &str) -> Option<&'a StoredTensor> {
        self.reader.checkpoint.stored_matrix(name)
    }

    /// Returns the type in which a matrix is packed.
    fn dtype(&self, name: &str) -> NumberType {
        let checkpoint = self.reader.checkpoint;
        let stored = self.stored(name).filter(|_| !checkpoint.changes.contains_key(name));
        let is_table = TABLES.contains(&name);
        match self.dtype {
            // A classification head has few rows, and an error in one of them affects every prediction.
            Some(_) if is_of_head(name) && !is_table => NumberType::F32,
            Some(dtype) => match stored {
                Some(stored) if stored.dtype.is_computed_in(dtype) => stored.dtype.packed_dtype(),
                _ if is_table => dtype.of_tables(),
                _ => dtype,
            },
            None => match stored.map(|stored| stored.dtype) {
                // No coarser dtype represents a merged weight exactly.
                None => NumberType::F32,
                // Packs the largest matrix, the embedding or head, as integers if the other matrices are.
                Some(dtype)
                    if is_table
                        && dtype.is_blocks()
                        && dtype.quantized_dtype().is_none()
                        && checkpoint.quantized_dtype().is_some() =>
                {
                    NumberType::Q8
                }
                Some(dtype) => dtype.packed_dtype(),
            },
        }
    }

    /// Returns a matrix's tensor, dtype and order, if its stored bytes can be packed directly.
    fn packable(
        &self,
        name: &str,
        (out_features, in_features): (usize, usize),
    ) -> Option<(&'a StoredTensor, NumberType, StoredOrder)> {
        let is_changed = self.reader.checkpoint.changes.contains_key(name);
        let stored = self.stored(name).filter(|stored| stored.strides.is_none() && !is_changed)?;
        let StoredDType::Weights(dtype @ (NumberType::F32 | NumberType::F16 | NumberType::BF16)) =
            stored.dtype
        else {
            return None;
        };
        let order = match (self.reader.checkpoint.naming.is_transposed(name), stored.shape.as_slice()) {
            (true, [rows, columns]) if (*rows, *columns) == (in_features, out_features) => {
                StoredOrder::InputMajor
            }
            // Extra rows are padding after the vocabulary.
            (false, [rows, columns]) if *rows >= out_features && *columns == in_features => {
                StoredOrder::OutputMajor
            }
            _ => return None,
        };
        Some((stored, dtype, order))
    }
}

/// Memory required to load and hold a model.
///
/// Returned by [`Checkpoint::load_memory`](crate::Checkpoint::load_memory).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadMemory {
    /// Bytes of the loaded parameters: packed matrices, and f32 for everything else.
    pub resident: u64,
    /// Peak number of additional bytes while reading a parameter.
    pub reading: u64,
}

impl PackParameters<'_> {
    /// Computes the memory that the checkpoint's model requires on the CPU.
    pub(crate) fn memory(&self) -> LoadMemory {
        let Checkpoint { config, .. } = self.reader.checkpoint;
        let mut memory = LoadMemory { resident: 0, reading: 0 };
        for Parameter { name, shape, kind, .. } in expected_parameters(config) {
            let in_f32 = bytes_in_f32(&shape);
            let (resident, reading) = match *shape.as_slice() {
                [out_features, in_features] if kind.is_multiplied() => {
                    let packed = self.dtype(&name).packed_bytes(out_features, in_features);
                    (packed, self.bytes_of_packing(&name, (out_features, in_features)))
                }
                _ => (in_f32, self.bytes_of_reading(&name).saturating_sub(in_f32)),
            };
            memory.resident = memory.resident.saturating_add(resident);
            memory.reading = memory.reading.max(reading);
        }
        memory
    }

    /// Returns the additional bytes needed to pack a matrix, excluding the packed result.
    fn bytes_of_packing(&self, name: &str, shape: (usize, usize)) -> u64 {
        match self.packable(name, shape) {
            Some((stored, ..)) => stored.copied_bytes(&self.reader.checkpoint.source.files),
            None => self.bytes_of_reading(name),
        }
    }

    /// Returns the bytes needed to read a parameter as an f32 tensor, including the tensor.
    fn bytes_of_reading(&self, name: &str) -> u64 {
        let Checkpoint { source, naming, .. } = self.reader.checkpoint;
        let reading = |index: &usize| source.tensors[*index].bytes_of_values(&source.files);
        let Some((from, Parameter { shape, .. })) = naming.parameters.get(name) else { return 0 };
        let in_f32 = bytes_in_f32(shape);
        let stored = match from {
            Origin::Whole(index) if source.tensors[*index].shape.first() > shape.first() => {
                // The rows before the padding are copied to a new tensor.
                reading(index).max(bytes_in_f32(&source.tensors[*index].shape).saturating_add(in_f32))
            }
            Origin::Whole(index) => reading(index),
            // Counts the three tensors and their concatenation.
            Origin::Thirds(thirds) => {
                let one = thirds.iter().map(reading).max().unwrap_or_default();
                in_f32.saturating_add(in_f32.max(one))
            }
            Origin::Zeros => in_f32,
        };
        // Counts the weight, the product to add, and their sum.
        let merging = in_f32.saturating_mul(3);
        if self.reader.checkpoint.changes.contains_key(name) { stored.max(merging) } else { stored }
    }
}

fn bytes_in_f32(shape: &[usize]) -> u64 {
    shape.iter().fold(size_of::<f32>() as u64, |bytes, size| bytes.saturating_mul(*size as u64))
}

impl ParameterSource for PackParameters<'_> {
    fn below(&self, name: impl ToString) -> Self {
        Self { reader: self.reader, dtype: self.dtype, path: self.name(&name.to_string()) }
    }

    fn parameter(&self, shape: impl Into<Shape>, name: &str, init: Init) -> candle_core::Result<Tensor> {
        self.reader.get(shape.into(), &self.name(name), init, DType::F32, &Device::Cpu)
    }

    fn matrix(
        &self,
        out_features: usize,
        in_features: usize,
        name: &str,
        init: Init,
    ) -> candle_core::Result<Matrix> {
        let path = self.name(name);
        let to = self.dtype(&path);
        let Some((stored, dtype, order)) = self.packable(&path, (out_features, in_features)) else {
            return Matrix::pack(&self.parameter((out_features, in_features), name, init)?, to);
        };
        let ReadParameters { progress, checkpoint } = self.reader;
        let files = &checkpoint.source.files;
        check_interrupted(*progress).map_err(candle_core::Error::wrap)?;
        let bytes = stored.stored(files).map_err(candle_core::Error::wrap)?;
        if stored.checksum.is_some() {
            let checksum = crc32c::extended(0, &bytes);
            stored.check_sum(checksum, files).map_err(candle_core::Error::wrap)?;
        }
        let read = |bytes: Range<usize>| {
            progress.advance(bytes.len() as u64);
            stored.forget(files, stored.part(bytes.start as u64..bytes.end as u64).bytes);
        };
        let matrix = MatrixBytes { bytes: &bytes, dtype, order, out_features, in_features };
        let packed = PackedMatrix::from_bytes(matrix, to, &read).map_err(candle_core::Error::wrap)?;
        Ok(Matrix::Packed(packed.into()))
    }
}

#[cfg(test)]
mod tests {
    use candle_gpt2_testing::fixture_path;

    use super::*;

    /// Reads parameters in chunks from every storage layout.
    ///
    /// The files contain transposed matrices, consecutive rows, separate query, key and value, padding,
    /// quantized blocks and views.
    #[test]
    fn parameter_chunks_equal_the_whole_parameter() {
        for name in ["tensorflow", "nanogpt", "book", "llmc/gpt2.bin", "gguf/q4_0.gguf", "pytorch-views"] {
            let checkpoint = Checkpoint::open(fixture_path("formats").join(name)).unwrap();
            let reader = ReadParameters { checkpoint: &checkpoint, progress: &|_| () };
            for parameter in expected_parameters(checkpoint.config()) {
                let whole = checkpoint.parameter(&parameter.name, &Device::Cpu, &|_| ()).unwrap().unwrap();
                let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                for piece in [1, 100, 1 << 20] {
                    let (mut found, mut largest) = (Vec::new(), 0);
                    let mut keep = |tensor: &Tensor| {
                        found.extend(values(tensor));
                        largest = largest.max(tensor.elem_count());
                        Ok(())
                    };
                    reader.for_each_piece(&parameter.name, piece, &mut keep).unwrap();
                    assert_eq!(found, values(&whole), "{name}: {} in pieces of {piece}", parameter.name);
                    let row = parameter.shape[1..].iter().product::<usize>();
                    assert!(largest <= piece.max(row), "{name}: {} had {largest} in memory", parameter.name);
                }
            }
        }
        let checkpoint = Checkpoint::open(fixture_path("tiny-checkpoint")).unwrap();
        let reader = ReadParameters { checkpoint: &checkpoint, progress: &|_| () };
        let error = reader.for_each_piece("nothing", 1, &mut |_| Ok(())).unwrap_err().to_string();
        assert!(error.starts_with("the checkpoint has no parameter `nothing`"), "{error}");
    }
}
