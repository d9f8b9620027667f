//! Weight matrices laid out for this project's own products: packed once at load, used for one row and for many.
//!
//! A matrix `(out, in)` is cut into panels of 16 outputs. A panel holds its weights input by input, the 16 outputs side by
//! side, so that one vector holds the same input's weight of 16 outputs: a product needs no sums across a vector, and
//! reading a panel is reading memory in order. Inputs come in blocks of 64; what is missing to whole panels and blocks is
//! filled with zeros. See [`WeightFormat`] for the precisions.

mod block;
mod large_pages;
mod pack;
mod product;
mod quantized;

use std::fmt;

use block::{Block, F16Block, F32Block};
use quantized::{Bytes, Nibbles, Quantized, Sixes};

use crate::parallel::{Parts, for_each_part};
use crate::simd::LANES;

pub use pack::{MatrixBytes, StoredFloat, StoredOrder};
pub(crate) use product::{Epilogue, Finish, FloatTile, compute_tile, product};
pub(crate) use quantized::{IntegerTile, QuantizedGroup, compute_integer_tile};

/// Inputs of a block.
const DEPTH: usize = 64;
/// Inputs that share a scale.
const GROUP: usize = 32;

/// The precision in which the weights of linear layers are held.
///
/// With f32 and f16 weights products are computed in f32. With integer weights they are computed in integers: each row of
/// activations is rounded to 8 bits once a product, in groups of 32 inputs as `x ≈ a p` with `a = max|x| / 127` in f32 and
/// `p = round(x / a)`, so that `|x - a p| ≤ max|x| (1/254 + 2^-22)`. Groups below 1e-36 count as zero, and one that holds
/// what is not finite makes the row's outputs NaN. A product of a group is `s a Σ q p`, its integer sum exact, so that of
/// the result's error nothing but these two roundings and the f32 sum over the groups remains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// 32-bit floating point: the weights of the checkpoint.
    F32,
    /// 16-bit floating point: each weight to the nearest of 11 significant bits.
    F16,
    /// 8-bit integers with an f16 scale for every 32 inputs of an output, 8.5 bits a weight: `w ≈ s q` with
    /// `s = max|w| / 127` and `q = round(w / s)`, so that `|w - s q| ≤ max|w| (1/254 + 2^-11)` for scales that are
    /// normal f16 numbers.
    Q8,
    /// 6-bit integers with an f16 scale for every 32 inputs of an output, 6.5 bits a weight: `w ≈ 4 s q` with
    /// `s = max|w| / 124` and `q = round(w / 4 s)`, so that `|w - 4 s q| ≤ max|w| (1/62 + 2^-11)` for scales that are normal
    /// f16 numbers.
    Q6,
    /// 4-bit indices into a table of 16 integers, with an f16 scale for every 32 inputs of an output, 4.5 bits a weight:
    /// `w ≈ s t[q]` with the nearest entry, and of a row of candidate scales the one with the smallest squared error. The
    /// entries lie closer together around zero, as weights do. The first candidate takes the weight of the largest magnitude
    /// to the first entry, -127; no two entries are more than 28 apart and the last is 110, so the squared error is at most
    /// that of `|w - s t[q]| ≤ max|w| (17/127 + 2^-10)` for scales that are normal f16 numbers.
    Q4,
}

impl WeightFormat {
    /// Every format to choose, with its name.
    pub const NAMES: [(&'static str, Self); 5] =
        [("f32", Self::F32), ("f16", Self::F16), ("q8", Self::Q8), ("q6", Self::Q6), ("q4", Self::Q4)];

    /// The format called `name` in [`WeightFormat::NAMES`].
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, format)| *format)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Q8 => "q8",
            Self::Q6 => "q6",
            Self::Q4 => "q4",
        }
    }
}

/// The blocks of all panels, panel after panel.
enum Panels {
    F32(Box<[F32Block]>),
    F16(Box<[F16Block]>),
    Q8(Box<[Quantized<Bytes>]>),
    Q6(Box<[Quantized<Sixes>]>),
    Q4(Box<[Quantized<Nibbles>]>),
}

/// A weight matrix `(out, in)`, packed.
pub struct PackedMatrix {
    out_features: usize,
    in_features: usize,
    panels: Panels,
}

/// Calls a function that is generic over the type of the blocks.
macro_rules! with_blocks {
    ($panels:expr, |$blocks:ident| $body:expr) => {
        match $panels {
            Panels::F32($blocks) => $body,
            Panels::F16($blocks) => $body,
            Panels::Q8($blocks) => $body,
            Panels::Q6($blocks) => $body,
            Panels::Q4($blocks) => $body,
        }
    };
}
use with_blocks;

impl PackedMatrix {
    /// Width of the output.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Width of the input.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// The precision of the weights.
    pub fn format(&self) -> WeightFormat {
        match &self.panels {
            Panels::F32(_) => WeightFormat::F32,
            Panels::F16(_) => WeightFormat::F16,
            Panels::Q8(_) => WeightFormat::Q8,
            Panels::Q6(_) => WeightFormat::Q6,
            Panels::Q4(_) => WeightFormat::Q4,
        }
    }

    /// Bytes that the weights take.
    pub fn bytes(&self) -> usize {
        with_blocks!(&self.panels, |blocks| size_of_val::<[_]>(blocks))
    }

    /// The weights of the given outputs, `(rows, in)` one after the other: an embedding lookup where the matrix is a tied
    /// head. Outputs must be below `out_features`.
    pub(crate) fn rows(&self, outputs: &[usize]) -> Vec<f32> {
        let mut values = vec![0.0; outputs.len() * self.in_features];
        if self.in_features > 0 {
            let parts = Parts { row_len: self.in_features, rows: 16, columns: self.in_features };
            for_each_part(&mut values, parts, |mut part| {
                for row in 0..part.rows() {
                    let output = outputs[part.first_row + row];
                    with_blocks!(&self.panels, |blocks| {
                        let panel = panel_of(blocks, output / LANES, self.in_features);
                        for (chunk, block) in part.row(row).chunks_mut(DEPTH).zip(panel) {
                            for (input, value) in chunk.iter_mut().enumerate() {
                                *value = block.value(input, output % LANES);
                            }
                        }
                    });
                }
            });
        }
        values
    }
}

impl fmt::Debug for PackedMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PackedMatrix({} ({}, {}))", self.format().name(), self.out_features, self.in_features)
    }
}

/// The blocks of panel `index`.
fn panel_of<B: Block>(blocks: &[B], index: usize, in_features: usize) -> &[B] {
    let length = in_features.div_ceil(DEPTH);
    &blocks[index * length..(index + 1) * length]
}

#[cfg(test)]
mod tests;
