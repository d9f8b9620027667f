//! The formats of the table, and matrices in any of them.

use std::fmt;

use super::block::{Block, DEPTH};
use super::integers::Quantized;
use crate::large_pages::LargeBox;
use crate::simd::LANES;
use crate::threads::{Parts, computed_in_parts};

macro_rules! formats {
    ($($(#[$doc:meta])* $format:ident $name:literal $block:ty, tables $tables:ident;)+) => {
        /// The precision in which the weights of linear layers are held.
        ///
        /// With f32 and f16 weights products are computed in f32. With integer weights they are computed in integers: each row of
        /// activations is rounded to 8 bits once a product, in groups of 32 inputs as `x ≈ a p` with `a = max|x| / 127` in f32 and
        /// `p = round(x / a)`, so that `|x - a p| ≤ max|x| (1/254 + 2^-22)`. Groups below 1e-36 count as zero, and one that holds
        /// what is not finite makes the row's outputs NaN. A product of a group is `s a Σ q p`, its integer sum exact, so that of
        /// the result's error nothing but these two roundings and the f32 sum over the groups remains.
        ///
        /// ```
        /// use candle_gpt2_arithmetic::WeightFormat;
        ///
        /// assert_eq!(WeightFormat::from_name("q8"), Some(WeightFormat::Q8));
        /// let [f32s, q8s] = [WeightFormat::F32, WeightFormat::Q8].map(|format| format.packed_bytes(3072, 768));
        /// assert!(3 * q8s < f32s);
        /// ```
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum WeightFormat {
            $($(#[$doc])* $format,)+
        }

        impl WeightFormat {
            /// Every format to choose, with its name.
            pub const NAMES: &'static [(&'static str, Self)] = &[$(($name, Self::$format)),+];

            /// Its name.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$format => $name,)+
                }
            }

            /// The format of the embedding and the head of a model whose other matrices are in this one.
            pub fn of_tables(self) -> Self {
                match self {
                    $(Self::$format => Self::$tables,)+
                }
            }

            fn block_bytes(self) -> usize {
                match self {
                    $(Self::$format => size_of::<$block>(),)+
                }
            }
        }

        /// The blocks of all panels, panel after panel.
        pub(super) enum Panels {
            $($format(LargeBox<$block>),)+
        }

        impl Panels {
            fn format(&self) -> WeightFormat {
                match self {
                    $(Self::$format(_) => WeightFormat::$format,)+
                }
            }

            /// What `work` makes of the blocks.
            pub(super) fn with<W: OnBlocks>(&self, work: W) -> W::Output {
                match self {
                    $(Self::$format(blocks) => work.run(blocks),)+
                }
            }

            /// The blocks that `make` gives.
            pub(super) fn made(format: WeightFormat, make: impl MakeBlocks) -> Self {
                match format {
                    $(WeightFormat::$format => Self::$format(make.blocks()),)+
                }
            }
        }
    };
}

crate::weight_formats!(formats);

/// Work on blocks of any format.
pub(super) trait OnBlocks {
    /// What it returns.
    type Output;

    fn run<B: Block>(self, blocks: &[B]) -> Self::Output;
}

/// Something that blocks of any format are made of.
pub(super) trait MakeBlocks {
    fn blocks<B: Block>(self) -> LargeBox<B>;
}

impl WeightFormat {
    /// The format called `name` in [`WeightFormat::NAMES`].
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, format)| *format)
    }

    /// Bytes that a matrix of these widths takes, packed: those of [`PackedMatrix::bytes`], of one that need not be there.
    pub fn packed_bytes(self, out_features: usize, in_features: usize) -> u64 {
        let blocks = (out_features.div_ceil(LANES) as u64).saturating_mul(in_features.div_ceil(DEPTH) as u64);
        blocks.saturating_mul(self.block_bytes() as u64)
    }
}

/// A weight matrix `(out, in)`, packed.
///
/// ```
/// use candle_gpt2_arithmetic::{Epilogue, Finish, PackedMatrix, PanelBias, Strided, WeightFormat};
///
/// let values = [1., 2., 3., 4., 5., 6.]; // (out 2, in 3)
/// let weight = Strided { values: &values, strides: (3, 1), shape: (2, 3) };
/// let matrix = PackedMatrix::from_values(weight, WeightFormat::F32)?;
/// let bias = PanelBias::new(&[10., 20.]);
/// let after = Epilogue { bias: Some(&bias), finish: Finish::Nothing };
/// assert_eq!(matrix.product(&[1., 1., 1.], 1, after), [16., 35.]);
/// # Ok::<(), candle_gpt2_arithmetic::PackError>(())
/// ```
pub struct PackedMatrix {
    pub(super) out_features: usize,
    pub(super) in_features: usize,
    pub(super) panels: Panels,
}

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
        self.panels.format()
    }

    /// Bytes that the weights take.
    pub fn bytes(&self) -> usize {
        struct Bytes;
        impl OnBlocks for Bytes {
            type Output = usize;

            fn run<B: Block>(self, blocks: &[B]) -> usize {
                size_of_val(blocks)
            }
        }
        self.panels.with(Bytes)
    }

    /// The weights of the given outputs, `(rows, in)` one after the other: an embedding lookup if the matrix is a tied
    /// head.
    ///
    /// # Panics
    /// When an output is not below [`PackedMatrix::out_features`].
    pub fn rows(&self, outputs: &[usize]) -> Vec<f32> {
        struct Rows<'a>(&'a [usize], usize);
        impl OnBlocks for Rows<'_> {
            type Output = Vec<f32>;

            fn run<B: Block>(self, blocks: &[B]) -> Vec<f32> {
                let Self(outputs, in_features) = self;
                let parts = Parts { row_len: in_features, rows: 16, columns: in_features };
                computed_in_parts(outputs.len() * in_features, parts, |mut part| {
                    for row in 0..part.rows() {
                        let output = outputs[part.first_row + row];
                        let panel = panel_of(blocks, output / LANES, in_features);
                        for (chunk, block) in part.row(row).chunks_mut(DEPTH).zip(panel) {
                            for (input, value) in chunk.iter_mut().enumerate() {
                                *value = block.value(input, output % LANES);
                            }
                        }
                    }
                })
            }
        }
        assert!(outputs.iter().all(|output| *output < self.out_features), "an output that there is not");
        if self.in_features == 0 {
            return Vec::new();
        }
        self.panels.with(Rows(outputs, self.in_features))
    }
}

impl fmt::Debug for PackedMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PackedMatrix({} ({}, {}))", self.format().name(), self.out_features, self.in_features)
    }
}

/// The blocks of panel `index`.
#[inline(always)]
pub(super) fn panel_of<B>(blocks: &[B], index: usize, in_features: usize) -> &[B] {
    let length = in_features.div_ceil(DEPTH);
    &blocks[index * length..(index + 1) * length]
}
