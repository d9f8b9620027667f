//! Packed matrices with weights of any number type.

use std::fmt;

use super::block::{Block, DEPTH, panel_of};
use super::product::Product;
use crate::NumberType;
use crate::epilogue::Epilogue;
use crate::large_pages::LargeBox;
use crate::simd::{InstructionSet, LANES};
use crate::threads::{Parts, computed_in_parts, with_job_size};

impl NumberType {
    /// Returns the packed size of a matrix in bytes.
    ///
    /// This equals [`PackedMatrix::bytes`], but does not require a packed matrix.
    ///
    /// ```
    /// use candle_gpt2_arithmetic::NumberType;
    ///
    /// let [f32s, q8s] = [NumberType::F32, NumberType::Q8].map(|dtype| dtype.packed_bytes(3072, 768));
    /// assert!(3 * q8s < f32s);
    /// ```
    pub fn packed_bytes(self, out_features: usize, in_features: usize) -> u64 {
        let blocks = (out_features.div_ceil(LANES) as u64).saturating_mul(in_features.div_ceil(DEPTH) as u64);
        self.bytes(blocks.saturating_mul((LANES * DEPTH) as u64)).unwrap_or(u64::MAX)
    }
}

/// Contiguous blocks of all panels, in one format.
pub(super) trait Panels: Send + Sync {
    /// Returns the size in bytes.
    fn bytes(&self) -> usize;
    /// Returns the weights of the given outputs.
    fn rows(&self, outputs: &[usize], in_features: usize) -> Vec<f32>;
    /// Computes a product.
    fn product(&self, product: &Product<'_>) -> Vec<f32>;
}

impl<B: Block> Panels for LargeBox<B> {
    fn bytes(&self) -> usize {
        size_of_val::<[B]>(self)
    }

    fn rows(&self, outputs: &[usize], in_features: usize) -> Vec<f32> {
        let parts = Parts { row_len: in_features, rows: 16, columns: in_features };
        computed_in_parts(outputs.len() * in_features, parts, |mut part| {
            for row in 0..part.rows() {
                let output = outputs[part.first_row + row];
                let panel = panel_of(self, output / LANES, in_features);
                for (chunk, block) in part.row(row).chunks_mut(DEPTH).zip(panel) {
                    for (input, value) in chunk.iter_mut().enumerate() {
                        *value = block.value(input, output % LANES);
                    }
                }
            }
        })
    }

    fn product(&self, product: &Product<'_>) -> Vec<f32> {
        product.with(self)
    }
}

/// Packed weight matrix `(out, in)`.
///
/// With f32 and f16 weights, products are computed in f32. With integer weights, they are computed in
/// integers. Each product first rounds the rows of activations to 8 bits, in groups of 32 inputs: `x ≈ a p`
/// with `a = max|x| / 127` in f32 and `p = round(x / a)`, so that `|x - a p| ≤ max|x| (1/254 + 2^-22)`.
/// Groups with magnitudes below 1e-36 count as zero. A group with a non-finite value makes the row's outputs
/// NaN. The product of a group is `s a Σ q p`, and its integer sum is exact. The error of the result
/// therefore consists only of these two roundings and the rounding of the f32 sum over the groups.
///
/// ```
/// use candle_gpt2_arithmetic::{Epilogue, Finish, NumberType, PackedMatrix, PanelBias, Strided};
///
/// let values = [1., 2., 3., 4., 5., 6.]; // (out 2, in 3)
/// let weight = Strided { values: &values, strides: (3, 1), shape: (2, 3) };
/// let matrix = PackedMatrix::from_values(weight, NumberType::F32)?;
/// let bias = PanelBias::new(&[10., 20.]);
/// let after = Epilogue { bias: Some(&bias), finish: Finish::Nothing };
/// assert_eq!(matrix.product(&[1., 1., 1.], 1, after), [16., 35.]);
/// # Ok::<(), candle_gpt2_arithmetic::PackError>(())
/// ```
pub struct PackedMatrix {
    pub(super) out_features: usize,
    pub(super) in_features: usize,
    pub(super) dtype: NumberType,
    pub(super) panels: Box<dyn Panels>,
}

impl PackedMatrix {
    /// Output width.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Input width.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Returns the number type of the weights.
    pub fn dtype(&self) -> NumberType {
        self.dtype
    }

    /// Returns the size of the weights in bytes.
    pub fn bytes(&self) -> usize {
        self.panels.bytes()
    }

    /// Returns the weights of the given outputs, `(rows, in)`, in order.
    ///
    /// This is an embedding lookup if the matrix is a tied head.
    ///
    /// # Panics
    /// Panics if an output is not less than [`PackedMatrix::out_features`].
    pub fn rows(&self, outputs: &[usize]) -> Vec<f32> {
        assert!(outputs.iter().all(|output| *output < self.out_features), "output index out of range");
        if self.in_features == 0 {
            return Vec::new();
        }
        self.panels.rows(outputs, self.in_features)
    }

    /// Multiplies `rows` rows of activations by the matrix and applies the epilogue.
    ///
    /// # Shapes
    /// `x` is `(rows, in)`. A bias has `out` values, and a residual is `(rows, out)`. Returns `(rows, out)`.
    ///
    /// # Panics
    /// Panics if the slices do not have these sizes.
    pub fn product(&self, x: &[f32], rows: usize, epilogue: Epilogue<'_>) -> Vec<f32> {
        self.product_with(x, rows, epilogue, InstructionSet::detected())
    }

    /// Computes [`PackedMatrix::product`] with a given instruction set.
    pub(super) fn product_with(
        &self,
        x: &[f32],
        rows: usize,
        epilogue: Epilogue<'_>,
        instructions: InstructionSet,
    ) -> Vec<f32> {
        assert!(x.len() == rows * self.in_features, "{} input values for {rows} rows", x.len());
        let (out_features, in_features) = (self.out_features, self.in_features);
        if rows * out_features == 0 {
            return Vec::new();
        }
        let product = Product { out_features, in_features, rows, x, epilogue, instructions };
        with_job_size(self.bytes(), rows * out_features * in_features, || self.panels.product(&product))
    }
}

impl fmt::Debug for PackedMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PackedMatrix({} ({}, {}))", self.dtype, self.out_features, self.in_features)
    }
}
