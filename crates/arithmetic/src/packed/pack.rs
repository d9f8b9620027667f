//! Packing: from a checkpoint's bytes, as they lie in the mapped file, or from a tensor.

#![expect(unsafe_code, reason = "packed weights are written once, by all threads, into fresh memory")]

use std::marker::PhantomData;
use std::ops::Range;

use candle_core::{CpuStorage, Result, Storage, Tensor};
use half::{bf16, f16};

use super::block::{Block, Expanded};
use super::large_pages::prefer_large_pages;
use super::{DEPTH, PackedMatrix, Panels, WeightFormat};
use crate::KernelError;
use crate::parallel::{Parts, for_each_part};
use crate::simd::{InstructionSet, Job, LANES, Line, Simd};

/// Panels that are packed together: reading an input-major matrix in wider strips reads whole cache lines and pages.
const STRIP_PANELS: usize = 4;
/// Bytes of an output-major matrix that are read before its reader hears of it: little beside any model, and enough to
/// keep all threads at work.
const STEP_BYTES: usize = 2 << 20;

/// The type of little-endian values in a file.
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

/// Which axis of a stored matrix comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredOrder {
    /// `(out, in)`, as PyTorch's `nn.Linear` and embeddings have it.
    OutputMajor,
    /// `(in, out)`, as GPT-2's `Conv1D` has it.
    InputMajor,
}

/// A matrix as it lies in memory or in a mapped file, in row-major order and at any alignment.
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

impl PackedMatrix {
    /// Packs a matrix from its bytes, on all threads. `read` is told which of the bytes are not needed any more, so that
    /// a mapped file need not stay in memory beside the packed weights.
    ///
    /// # Errors
    /// When there are fewer bytes than the matrix has.
    pub fn from_bytes(
        matrix: MatrixBytes<'_>,
        format: WeightFormat,
        read: &dyn Fn(Range<usize>),
    ) -> Result<Self> {
        let MatrixBytes { bytes, dtype, order, out_features, in_features } = matrix;
        let expected =
            out_features.checked_mul(in_features).and_then(|count| count.checked_mul(dtype.size()));
        if expected.is_none_or(|expected| bytes.len() < expected) {
            return Err(KernelError::MatrixBytes { out_features, in_features, found: bytes.len() }.into());
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

    /// Packs an f32 tensor on the CPU, whatever its strides.
    ///
    /// # Shapes
    /// `weight` `(out, in)`.
    ///
    /// # Errors
    /// When the tensor is another.
    pub fn from_tensor(weight: &Tensor, format: WeightFormat) -> Result<Self> {
        let shape = weight.dims2()?;
        let (storage, layout) = weight.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(elements)) = &*storage else {
            return Err(KernelError::NotCpuFloats { found: weight.dtype() }.into());
        };
        let strides = match layout.stride() {
            [output, input] => (*output, *input),
            _ => (0, 0),
        };
        let elements = &elements[layout.start_offset()..];
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

fn pack<T: Copy + Sync, F: Fn(T) -> f32 + Sync>(
    values: &Values<'_, T, F>,
    shape: (usize, usize),
    format: WeightFormat,
    read: &dyn Fn(Range<usize>),
) -> PackedMatrix {
    let panels = match format {
        WeightFormat::F32 => Panels::F32(blocks(values, shape, read)),
        WeightFormat::F16 => Panels::F16(blocks(values, shape, read)),
        WeightFormat::Q8 => Panels::Q8(blocks(values, shape, read)),
        WeightFormat::Q6 => Panels::Q6(blocks(values, shape, read)),
        WeightFormat::Q4 => Panels::Q4(blocks(values, shape, read)),
    };
    PackedMatrix { out_features: shape.0, in_features: shape.1, panels }
}

/// `read` is told the outputs that were packed, and gets all of them where they lie side by side in the matrix.
fn blocks<B: Block, T: Copy + Sync, F: Fn(T) -> f32 + Sync>(
    values: &Values<'_, T, F>,
    (out_features, in_features): (usize, usize),
    read: &dyn Fn(Range<usize>),
) -> Box<[B]> {
    let panel_blocks = in_features.div_ceil(DEPTH);
    if panel_blocks == 0 {
        return Box::default();
    }
    let instructions = InstructionSet::detected();
    let panels = out_features.div_ceil(LANES);
    let mut blocks = Box::new_uninit_slice(panels * panel_blocks);
    prefer_large_pages(&mut blocks);
    let parts = Parts { row_len: panel_blocks, rows: STRIP_PANELS, columns: panel_blocks };
    let is_output_major = values.strides.1 == 1;
    let step = STEP_BYTES / (LANES * in_features * size_of::<T>());
    let step = if is_output_major { step.max(STRIP_PANELS).min(panels) } else { panels };
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

/// Encodes one block.
struct Encode<'a, B>(&'a Expanded, PhantomData<B>);

impl<B: Block> Job for Encode<'_, B> {
    type Output = B;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> B {
        B::encode(simd, self.0)
    }
}

impl<T: Copy, F: Fn(T) -> f32> Values<'_, T, F> {
    /// Reads the given outputs of the given inputs, each as first and count.
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
            for (element, line) in
                elements.iter().step_by(input_stride.max(1)).zip(to.iter_mut()).take(inputs.1)
            {
                line.0[output] = (self.convert)(*element);
            }
        }
    }
}
