//! Packing of weights from a checkpoint's bytes in a mapped file, or from f32 in memory.

#![expect(unsafe_code, reason = "all threads write packed weights once, into uninitialized memory")]

use std::marker::PhantomData;
use std::ops::Range;

use half::{bf16, f16};

use super::block::{Block, DEPTH, Expanded};
use super::f16::F16Block;
use super::f32::F32Block;
use super::integers::{Bytes, Quantized};
use super::matrix::{PackedMatrix, Panels};
use super::q4::Nibbles;
use super::q5::Fives;
use super::q6::Sixes;
use crate::NumberType;
use crate::large_pages::LargeBox;
use crate::simd::{InstructionSet, Job, LANES, Line, Simd};
use crate::threads::{Parts, for_each_part};

/// Number of panels that are packed together.
///
/// Wider strips read whole cache lines and pages of an input-major matrix.
const STRIP_PANELS: usize = 4;
/// Bytes of an output-major matrix between two progress reports.
///
/// This is small compared with any model, but enough to keep all threads busy.
const STEP_BYTES: usize = 2 << 20;

/// Axis order of a stored matrix.
///
/// It is passed to [`PackedMatrix::from_bytes`] with the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredOrder {
    /// `(out, in)`, the order of PyTorch's `nn.Linear` and of embeddings.
    OutputMajor,
    /// `(in, out)`, the order of GPT-2's `Conv1D`.
    InputMajor,
}

/// Row-major matrix in memory or in a mapped file, at any alignment.
///
/// Pass it to [`PackedMatrix::from_bytes`].
#[derive(Debug, Clone, Copy)]
pub struct MatrixBytes<'a> {
    /// Values; any rows beyond the matrix are ignored.
    pub bytes: &'a [u8],
    /// Type of the little-endian values: f32, f16 or bf16.
    pub dtype: NumberType,
    /// Order of the values.
    pub order: StoredOrder,
    /// Output width.
    pub out_features: usize,
    /// Input width.
    pub in_features: usize,
}

/// Matrix of f32 values in memory, with any strides.
///
/// Pass it to [`PackedMatrix::from_values`].
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a> {
    /// Values, starting with the first one of the matrix.
    pub values: &'a [f32],
    /// Strides of outputs and inputs, in values.
    pub strides: (usize, usize),
    /// Number of outputs and number of inputs.
    pub shape: (usize, usize),
}

/// Error from [`PackedMatrix::from_bytes`] and [`PackedMatrix::from_values`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// The matrix extends beyond its memory.
    #[error("a {out_features} by {in_features} weight matrix needs more than the {found} bytes available")]
    TooFewBytes {
        /// Output width.
        out_features: usize,
        /// Input width.
        in_features: usize,
        /// Number of available bytes.
        found: usize,
    },
    /// The type cannot be packed.
    #[error("weights of type {dtype} cannot be packed")]
    Unsupported {
        /// Unsupported type of the stored or packed values.
        dtype: NumberType,
    },
}

impl PackedMatrix {
    /// Packs a matrix from its bytes, using all threads.
    ///
    /// Calls `read` with each range of bytes that is no longer needed, so that a mapped file need not stay in
    /// memory next to the packed weights.
    ///
    /// ```
    /// use candle_gpt2_arithmetic::{MatrixBytes, NumberType, PackedMatrix, StoredOrder};
    ///
    /// let stored: Vec<u8> = [1f32, 2., 3., 4., 5., 6.].iter().flat_map(|value| value.to_le_bytes()).collect();
    /// let (dtype, order) = (NumberType::F32, StoredOrder::InputMajor); // as GPT-2's checkpoints have them
    /// let matrix = MatrixBytes { bytes: &stored, dtype, order, out_features: 3, in_features: 2 };
    /// let packed = PackedMatrix::from_bytes(matrix, NumberType::F32, &|_| ())?;
    /// assert_eq!(packed.rows(&[0]), [1., 4.]);
    /// # Ok::<(), candle_gpt2_arithmetic::PackError>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if there are fewer bytes than the matrix needs, or a type is unsupported.
    pub fn from_bytes(
        matrix: MatrixBytes<'_>,
        to: NumberType,
        read: &dyn Fn(Range<usize>),
    ) -> Result<Self, PackError> {
        let MatrixBytes { bytes, dtype, order, out_features, in_features } = matrix;
        let size = match dtype {
            NumberType::F32 => 4,
            NumberType::F16 | NumberType::BF16 => 2,
            _ => return Err(PackError::Unsupported { dtype }),
        };
        let expected = out_features.checked_mul(in_features).and_then(|count| count.checked_mul(size));
        if expected.is_none_or(|expected| bytes.len() < expected) {
            return Err(PackError::TooFewBytes { out_features, in_features, found: bytes.len() });
        }
        let strides = match order {
            StoredOrder::OutputMajor => (in_features, 1),
            StoredOrder::InputMajor => (1, out_features),
        };
        let shape = (out_features, in_features);
        let row_bytes = in_features * size;
        let read = |outputs: Range<usize>| read(outputs.start * row_bytes..outputs.end * row_bytes);
        match dtype {
            NumberType::F16 => {
                let convert = |bytes| f16::from_le_bytes(bytes).to_f32();
                pack(&Values { elements: bytes.as_chunks().0, strides, convert }, shape, to, &read)
            }
            NumberType::BF16 => {
                let convert = |bytes| bf16::from_le_bytes(bytes).to_f32();
                pack(&Values { elements: bytes.as_chunks().0, strides, convert }, shape, to, &read)
            }
            _ => {
                let values = Values { elements: bytes.as_chunks().0, strides, convert: f32::from_le_bytes };
                pack(&values, shape, to, &read)
            }
        }
    }

    /// Packs a matrix of f32 values, using all threads.
    ///
    /// # Errors
    /// Returns an error if the matrix extends beyond its values, or the type is unsupported.
    pub fn from_values(matrix: Strided<'_>, to: NumberType) -> Result<Self, PackError> {
        let Strided { values: elements, strides, shape } = matrix;
        let last =
            |count: usize, stride: usize| count.checked_sub(1).and_then(|last| last.checked_mul(stride));
        let end = last(shape.0, strides.0).zip(last(shape.1, strides.1)).map(|(a, b)| a.saturating_add(b));
        if shape.0 > 0 && shape.1 > 0 && end.is_none_or(|end| end >= elements.len()) {
            let (out_features, in_features) = shape;
            return Err(PackError::TooFewBytes { out_features, in_features, found: size_of_val(elements) });
        }
        pack(&Values { elements, strides, convert: |value| value }, shape, to, &|_| ())
    }
}

/// View that converts a matrix of any stored type to f32.
struct Values<'a, T, F> {
    elements: &'a [T],
    /// Strides of outputs and inputs, in values.
    strides: (usize, usize),
    convert: F,
}

/// Matrix of any stored type that can be read in blocks.
trait ReadBlocks: Sync {
    /// Reads a range of outputs and inputs, each given as a first index and a count.
    fn read(&self, outputs: (usize, usize), inputs: (usize, usize), to: &mut Expanded);
    /// Returns the size of one output in bytes if its inputs are contiguous.
    fn bytes_of_output(&self) -> Option<usize>;
}

fn pack(
    values: &dyn ReadBlocks,
    shape: (usize, usize),
    dtype: NumberType,
    read: &dyn Fn(Range<usize>),
) -> Result<PackedMatrix, PackError> {
    let packing = Packing { values, shape, read };
    let panels: Box<dyn Panels> = match dtype {
        NumberType::F32 => Box::new(packing.blocks::<F32Block>()),
        NumberType::F16 => Box::new(packing.blocks::<F16Block>()),
        NumberType::Q8 => Box::new(packing.blocks::<Quantized<Bytes<128>>>()),
        NumberType::Q6 => Box::new(packing.blocks::<Quantized<Sixes>>()),
        NumberType::Q5 => Box::new(packing.blocks::<Quantized<Fives>>()),
        NumberType::Q4 => Box::new(packing.blocks::<Quantized<Nibbles>>()),
        _ => return Err(PackError::Unsupported { dtype }),
    };
    Ok(PackedMatrix { out_features: shape.0, in_features: shape.1, dtype, panels })
}

/// Matrix to pack.
struct Packing<'a> {
    values: &'a dyn ReadBlocks,
    shape: (usize, usize),
    /// Callback that receives each range of packed outputs.
    ///
    /// If outputs are not contiguous, a single call reports all of them.
    read: &'a dyn Fn(Range<usize>),
}

impl Packing<'_> {
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
        // SAFETY: the steps and their parts cover every element, and each
        // part's rows were written completely.
        unsafe { blocks.assume_init() }
    }
}

/// Job that encodes one block.
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
