//! Packing: from a checkpoint's bytes, as they lie in the mapped file, or from f32 in memory.

#![expect(unsafe_code, reason = "packed weights are written once, by all threads, into fresh memory")]

use std::marker::PhantomData;
use std::ops::Range;

use half::{bf16, f16};

use super::block::{Block, DEPTH, Expanded};
use super::matrix::{MakeBlocks, PackedMatrix, Panels, WeightFormat};
use crate::large_pages::LargeBox;
use crate::simd::{InstructionSet, Job, LANES, Line, Simd};
use crate::threads::{Parts, for_each_part};

/// Panels that are packed together: reading an input-major matrix in wider strips reads whole cache lines and pages.
const STRIP_PANELS: usize = 4;
/// Bytes of an output-major matrix that are read between two reports of progress: few compared with any model, and enough to
/// keep all threads at work.
const STEP_BYTES: usize = 2 << 20;

/// The type of little-endian values in a file. [`PackedMatrix::from_bytes`] takes it with the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredFloat {
    /// 32-bit floating point.
    F32,
    /// 16-bit floating point.
    F16,
    /// 16-bit floating point with the exponent of f32.
    BF16,
}

impl StoredFloat {
    fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }
}

/// Which axis of a stored matrix comes first. [`PackedMatrix::from_bytes`] takes it with the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredOrder {
    /// `(out, in)`, as PyTorch's `nn.Linear` and embeddings have it.
    OutputMajor,
    /// `(in, out)`, as GPT-2's `Conv1D` has it.
    InputMajor,
}

/// A matrix as it lies in memory or in a mapped file, in row-major order and at any alignment.
/// [`PackedMatrix::from_bytes`] takes one.
#[derive(Debug, Clone, Copy)]
pub struct MatrixBytes<'a> {
    /// The values; rows after those that are packed are left out.
    pub bytes: &'a [u8],
    /// Their type.
    pub dtype: StoredFloat,
    /// Their order.
    pub order: StoredOrder,
    /// Width of the output.
    pub out_features: usize,
    /// Width of the input.
    pub in_features: usize,
}

/// A matrix of f32 in memory, whatever its strides. [`PackedMatrix::from_values`] takes one.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a> {
    /// The values, from the matrix's first one on.
    pub values: &'a [f32],
    /// Distance of neighbouring outputs and of neighbouring inputs.
    pub strides: (usize, usize),
    /// Outputs and inputs.
    pub shape: (usize, usize),
}

/// A matrix that reaches beyond its memory. [`PackedMatrix::from_bytes`] and [`PackedMatrix::from_values`] return it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a weight of {out_features} by {in_features} values does not fit into {found} bytes")]
pub struct PackError {
    /// Width of the output.
    pub out_features: usize,
    /// Width of the input.
    pub in_features: usize,
    /// Bytes that are there.
    pub found: usize,
}

impl PackedMatrix {
    /// Packs a matrix from its bytes, on all threads. `read` is called with the range of bytes that are no longer needed, so that
    /// a mapped file need not stay in memory next to the packed weights.
    ///
    /// ```
    /// use candle_gpt2_arithmetic::{MatrixBytes, PackedMatrix, StoredFloat, StoredOrder, WeightFormat};
    ///
    /// let stored: Vec<u8> = [1f32, 2., 3., 4., 5., 6.].iter().flat_map(|value| value.to_le_bytes()).collect();
    /// let (dtype, order) = (StoredFloat::F32, StoredOrder::InputMajor); // as GPT-2's checkpoints have them
    /// let matrix = MatrixBytes { bytes: &stored, dtype, order, out_features: 3, in_features: 2 };
    /// let packed = PackedMatrix::from_bytes(matrix, WeightFormat::F32, &|_| ())?;
    /// assert_eq!(packed.rows(&[0]), [1., 4.]);
    /// # Ok::<(), candle_gpt2_arithmetic::PackError>(())
    /// ```
    ///
    /// # Errors
    /// When there are fewer bytes than the matrix has.
    pub fn from_bytes(
        matrix: MatrixBytes<'_>,
        format: WeightFormat,
        read: &dyn Fn(Range<usize>),
    ) -> Result<Self, PackError> {
        let MatrixBytes { bytes, dtype, order, out_features, in_features } = matrix;
        let expected =
            out_features.checked_mul(in_features).and_then(|count| count.checked_mul(dtype.size()));
        if expected.is_none_or(|expected| bytes.len() < expected) {
            return Err(PackError { out_features, in_features, found: bytes.len() });
        }
        let strides = match order {
            StoredOrder::OutputMajor => (in_features, 1),
            StoredOrder::InputMajor => (1, out_features),
        };
        let shape = (out_features, in_features);
        let row_bytes = in_features * dtype.size();
        let read = |outputs: Range<usize>| read(outputs.start * row_bytes..outputs.end * row_bytes);
        Ok(match dtype {
            StoredFloat::F32 => {
                let values = Values { elements: bytes.as_chunks().0, strides, convert: f32::from_le_bytes };
                pack(&values, shape, format, &read)
            }
            StoredFloat::F16 => {
                let convert = |bytes| f16::from_le_bytes(bytes).to_f32();
                pack(&Values { elements: bytes.as_chunks().0, strides, convert }, shape, format, &read)
            }
            StoredFloat::BF16 => {
                let convert = |bytes| bf16::from_le_bytes(bytes).to_f32();
                pack(&Values { elements: bytes.as_chunks().0, strides, convert }, shape, format, &read)
            }
        })
    }

    /// Packs a matrix of f32, on all threads.
    ///
    /// # Errors
    /// When the matrix reaches beyond its values.
    pub fn from_values(matrix: Strided<'_>, format: WeightFormat) -> Result<Self, PackError> {
        let Strided { values: elements, strides, shape } = matrix;
        let last =
            |count: usize, stride: usize| count.checked_sub(1).and_then(|last| last.checked_mul(stride));
        let end = last(shape.0, strides.0).zip(last(shape.1, strides.1)).map(|(a, b)| a.saturating_add(b));
        if shape.0 > 0 && shape.1 > 0 && end.is_none_or(|end| end >= elements.len()) {
            let (out_features, in_features) = shape;
            return Err(PackError { out_features, in_features, found: size_of_val(elements) });
        }
        Ok(pack(&Values { elements, strides, convert: |value| value }, shape, format, &|_| ()))
    }
}

/// A matrix of some stored type, seen as f32.
struct Values<'a, T, F> {
    elements: &'a [T],
    /// Distance of neighbouring outputs and of neighbouring inputs.
    strides: (usize, usize),
    convert: F,
}

/// Blocks of a matrix of any stored type.
trait ReadBlocks: Sync {
    /// Reads the given outputs of the given inputs, each as first and count.
    fn read(&self, outputs: (usize, usize), inputs: (usize, usize), to: &mut Expanded);
    /// Bytes of an output, if its inputs lie side by side.
    fn bytes_of_output(&self) -> Option<usize>;
}

fn pack(
    values: &dyn ReadBlocks,
    shape: (usize, usize),
    format: WeightFormat,
    read: &dyn Fn(Range<usize>),
) -> PackedMatrix {
    let panels = Panels::made(format, Packing { values, shape, read });
    PackedMatrix { out_features: shape.0, in_features: shape.1, panels }
}

/// A matrix that is about to be packed.
struct Packing<'a> {
    values: &'a dyn ReadBlocks,
    shape: (usize, usize),
    /// Told the outputs that were packed, all of them at once if they do not lie one after the other.
    read: &'a dyn Fn(Range<usize>),
}

impl MakeBlocks for Packing<'_> {
    fn blocks<B: Block>(self) -> LargeBox<B> {
        let Self { values, shape: (out_features, in_features), read } = self;
        let panel_blocks = in_features.div_ceil(DEPTH);
        if panel_blocks == 0 {
            return LargeBox::default();
        }
        let instructions = InstructionSet::detected();
        let panels = out_features.div_ceil(LANES);
        let mut blocks = LargeBox::new_uninit(panels * panel_blocks);
        let parts = Parts { row_len: panel_blocks, rows: STRIP_PANELS, columns: panel_blocks };
        let step = values.bytes_of_output().map_or(panels, |bytes| {
            let step = STEP_BYTES / (LANES * bytes);
            step.max(STRIP_PANELS).min(panels)
        });
        for (index, blocks) in blocks.chunks_mut(step.max(1) * panel_blocks).enumerate() {
            let first_panel = index * step;
            for_each_part(blocks, parts, |mut part| {
                let mut weights: Expanded = [Line([0.0; LANES]); DEPTH];
                for block in 0..panel_blocks {
                    for row in 0..part.rows() {
                        let (first_output, first_input) =
                            ((first_panel + part.first_row + row) * LANES, block * DEPTH);
                        let outputs = LANES.min(out_features - first_output);
                        let inputs = DEPTH.min(in_features - first_input);
                        if outputs < LANES || inputs < DEPTH {
                            weights = [Line([0.0; LANES]); DEPTH];
                        }
                        values.read((first_output, outputs), (first_input, inputs), &mut weights);
                        part.row(row)[block].write(instructions.run(Encode(&weights, PhantomData)));
                    }
                }
            });
            read(first_panel * LANES..out_features.min((first_panel + step) * LANES));
        }
        // SAFETY: the steps and their parts hold every element, and each part's rows were written from their first block to their last.
        unsafe { blocks.assume_init() }
    }
}

/// Encodes one block.
struct Encode<'a, B>(&'a Expanded, PhantomData<B>);

impl<B: Block> Job for Encode<'_, B> {
    type Output = B;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> B {
        B::encode(simd, self.0)
    }
}

impl<T: Copy + Sync, F: Fn(T) -> f32 + Sync> ReadBlocks for Values<'_, T, F> {
    fn bytes_of_output(&self) -> Option<usize> {
        (self.strides.1 == 1).then(|| self.strides.0.max(1) * size_of::<T>())
    }

    fn read(&self, outputs: (usize, usize), inputs: (usize, usize), to: &mut Expanded) {
        let (output_stride, input_stride) = self.strides;
        let start = outputs.0 * output_stride + inputs.0 * input_stride;
        if output_stride == 1 {
            for (input, line) in to.iter_mut().take(inputs.1).enumerate() {
                let elements = &self.elements[start + input * input_stride..][..outputs.1];
                if let Some(sixteen) = elements.first_chunk() {
                    line.0 = sixteen.map(&self.convert);
                } else {
                    for (element, value) in elements.iter().zip(&mut line.0) {
                        *value = (self.convert)(*element);
                    }
                }
            }
            return;
        }
        for output in 0..outputs.1 {
            let elements = &self.elements[start + output * output_stride..];
            for (input, line) in to.iter_mut().take(inputs.1).enumerate() {
                line.0[output] = (self.convert)(elements[input * input_stride]);
            }
        }
    }
}
