//! Number types and a table of their uses.
//!
//! The macro `number_type_for` declares the types that users choose by name.

use std::fmt;

use uses::{COMPUTE, CPU_WEIGHTS, GGUF, GPU_WEIGHTS, KV_CACHE, SAFETENSORS, WEIGHTS};

/// Use flags of number types, one bit each.
pub mod uses {
    /// [`NumberType`](super::NumberType) flag: supported for weights on the CPU.
    pub const CPU_WEIGHTS: u8 = 1;
    /// [`NumberType`](super::NumberType) flag: supported for weights on GPUs.
    pub const GPU_WEIGHTS: u8 = 1 << 1;
    /// [`NumberType`](super::NumberType) flag: supported for weights on any device.
    pub const WEIGHTS: u8 = CPU_WEIGHTS | GPU_WEIGHTS;
    /// [`NumberType`](super::NumberType) flag: supported for keys and values in a cache.
    pub const KV_CACHE: u8 = 1 << 2;
    /// [`NumberType`](super::NumberType) flag: supported for activations in training.
    pub const COMPUTE: u8 = 1 << 3;
    /// [`NumberType`](super::NumberType) flag: supported for weights written to GGUF files.
    pub const GGUF: u8 = 1 << 4;
    /// [`NumberType`](super::NumberType) flag: supported for weights written to safetensors files.
    pub const SAFETENSORS: u8 = 1 << 5;
}

/// Number type of weights, KV caches, activations, or tensors in files.
///
/// ```
/// use candle_gpt2_arithmetic::{NumberType, uses};
///
/// assert_eq!(NumberType::parse("q8", uses::KV_CACHE), Ok(NumberType::Q8));
/// assert!(NumberType::parse("q4", uses::KV_CACHE).is_err());
/// assert_eq!(NumberType::names(uses::SAFETENSORS), ["f32", "f16", "bf16"]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NumberType {
    /// 32-bit floating point.
    F32,
    /// 16-bit floating point: 11 significant bits, values up to 65,504.
    F16,
    /// 8-bit integers with f16 scales.
    ///
    /// `w ≈ s q` with `s = max|w| / 127` and `q = round(w / s)`, so that
    /// `|w - s q| ≤ max|w| (1/254 + 2^-11)` for scales that are normal f16 numbers.
    ///
    /// Weights have a scale for every 32 inputs of an output and take 8.5 bits each. Keys have a scale for
    /// every 32 inputs and values for every 16 columns; together they take 8.75 bits per number. Scores are
    /// computed in integers, so queries are rounded too.
    Q8,
    /// 6-bit integers with an f16 scale for every 32 inputs of an output; 6.5 bits per weight.
    ///
    /// `w ≈ 4 s q` with `s = max|w| / 124` and `q = round(w / 4 s)`. This implies
    /// `|w - 4 s q| ≤ max|w| (1/62 + 2^-11)` for scales that are normal f16 numbers.
    Q6,
    /// 5-bit integers with an f16 scale for every 32 inputs of an output; 5.5 bits per weight.
    ///
    /// `w ≈ s q` with the nearest `q` from -16 to 15. Each candidate scale maps the weight of the
    /// largest magnitude to one of these integers, and the scale with the smallest squared error is
    /// used. The first candidate maps that weight to -16 and thus guarantees
    /// `|w - s q| ≤ max|w| (1/16 + 2^-10)` for scales that are normal f16 numbers. The squared error of
    /// the chosen scale is no larger than the first candidate's. A group of
    /// multiples `s q`, such as a block of GGUF's Q5_0, is stored without further rounding. Models
    /// store their embedding and head in q6, unless the checkpoint has them in Q5_0.
    Q5,
    /// 4-bit indices into a table of 16 integers, with an f16 scale per 32 inputs; 4.5 bits per weight.
    ///
    /// `w ≈ s t[q]` with the nearest entry, and the candidate scale with the smallest squared error.
    /// The entries are denser around zero, as are weights. The first candidate maps the weight of the
    /// largest magnitude to the first entry, -32. Neighboring entries are at most 7 apart, and the
    /// last one is 28. The first candidate therefore guarantees
    /// `|w - s t[q]| ≤ max|w| (4/32 + 2^-10)` for scales that are normal f16 numbers. The squared error
    /// of the chosen scale is no larger than the first candidate's. Models store
    /// their embedding and head in q6.
    Q4,
    /// 16-bit floating point with the exponent range of f32.
    BF16,
    /// GGUF's 8-bit integers in blocks of 32, with a scale.
    Q8_0,
    /// GGUF's 4-bit integers in blocks of 32, with a scale.
    Q4_0,
    /// GGUF's 5-bit integers in blocks of 32, with a scale.
    Q5_0,
    /// GGUF's 4-bit integers in blocks of 256, with a scale and an offset for every 32.
    Q4K,
    /// GGUF's 5-bit integers in blocks of 256, with a scale and an offset for every 32.
    Q5K,
    /// GGUF's 6-bit integers in blocks of 256, with a scale for every 16.
    Q6K,
    /// 64-bit floating point.
    F64,
    /// GGUF's 4-bit integers in blocks of 32, with a scale and an offset.
    Q4_1,
    /// GGUF's 5-bit integers in blocks of 32, with a scale and an offset.
    Q5_1,
    /// GGUF's 8-bit integers in blocks of 32, with a scale and an offset.
    Q8_1,
    /// GGUF's 2-bit integers in blocks of 256, with a scale and an offset for every 16.
    Q2K,
    /// GGUF's 3-bit integers in blocks of 256, with a scale for every 16.
    Q3K,
    /// GGUF's 8-bit integers in blocks of 256, with a scale.
    Q8K,
}

/// Type, name, block size (values and bytes) and uses. Messages list the types in this order.
static TABLE: [(NumberType, &str, [u64; 2], u8); 20] = [
    (NumberType::F32, "f32", [1, 4], WEIGHTS | KV_CACHE | COMPUTE | GGUF | SAFETENSORS),
    (NumberType::F16, "f16", [1, 2], WEIGHTS | KV_CACHE | GGUF | SAFETENSORS),
    (NumberType::Q8, "q8", [32, 34], CPU_WEIGHTS | KV_CACHE),
    (NumberType::Q6, "q6", [32, 26], CPU_WEIGHTS),
    (NumberType::Q5, "q5", [32, 22], CPU_WEIGHTS),
    (NumberType::Q4, "q4", [32, 18], CPU_WEIGHTS),
    (NumberType::BF16, "bf16", [1, 2], GPU_WEIGHTS | COMPUTE | GGUF | SAFETENSORS),
    (NumberType::Q8_0, "q8_0", [32, 34], GGUF),
    (NumberType::Q4_0, "q4_0", [32, 18], GGUF),
    (NumberType::Q5_0, "q5_0", [32, 22], GGUF),
    (NumberType::Q4K, "q4_k", [256, 144], GGUF),
    (NumberType::Q5K, "q5_k", [256, 176], GGUF),
    (NumberType::Q6K, "q6_k", [256, 210], GGUF),
    // Supported only for reading checkpoints.
    (NumberType::F64, "f64", [1, 8], 0),
    (NumberType::Q4_1, "q4_1", [32, 20], 0),
    (NumberType::Q5_1, "q5_1", [32, 24], 0),
    (NumberType::Q8_1, "q8_1", [32, 36], 0),
    (NumberType::Q2K, "q2_k", [256, 84], 0),
    (NumberType::Q3K, "q3_k", [256, 110], 0),
    (NumberType::Q8K, "q8_k", [256, 292], 0),
];

// Each type's discriminant is the index of its row.
const _: () = {
    let mut index = 0;
    while index < TABLE.len() {
        assert!(TABLE[index].0 as usize == index);
        index += 1;
    }
    assert!(NumberType::Q8K as usize + 1 == index);
};

impl NumberType {
    /// Returns all types with any of these [uses].
    pub fn all(uses: u8) -> impl Iterator<Item = Self> + Clone {
        TABLE.iter().map(|row| row.0).filter(move |dtype| dtype.is_for(uses))
    }

    /// Returns the names of all types with any of these [uses].
    pub fn names(uses: u8) -> Vec<&'static str> {
        Self::all(uses).map(Self::name).collect()
    }

    /// Returns the type with this name and any of these [uses].
    ///
    /// # Errors
    /// Returns an error that lists the accepted names if `name` is not one of them.
    pub fn parse(name: &str, uses: u8) -> Result<Self, UnknownNumberType> {
        let known = Self::all(uses).find(|known| known.name() == name);
        known.ok_or_else(|| UnknownNumberType { found: name.to_owned(), uses })
    }

    /// Whether the type has any of these [uses].
    pub const fn is_for(self, uses: u8) -> bool {
        TABLE[self as usize].3 & uses != 0
    }

    /// Returns the name.
    pub fn name(self) -> &'static str {
        TABLE[self as usize].1
    }

    /// Returns the number of values and bytes per block; a floating-point value is its own block.
    pub fn block(self) -> [u64; 2] {
        TABLE[self as usize].2
    }

    /// Whether the values are stored in blocks of small integers with scales.
    pub fn is_blocks(self) -> bool {
        self.block()[0] > 1
    }

    /// Returns the size of `count` values in bytes.
    ///
    /// Returns `None` if the values do not fill whole blocks, or the size overflows.
    pub fn bytes(self, count: u64) -> Option<u64> {
        let [numbers, bytes] = self.block();
        (count / numbers).checked_mul(bytes).filter(|_| count.is_multiple_of(numbers))
    }

    /// Returns the embedding and head type for a model with weights of this type.
    ///
    /// Rounding the embedding and head to fewer than six bits costs more accuracy than rounding all other
    /// weights.
    pub fn of_tables(self) -> Self {
        match self {
            Self::Q5 | Self::Q4 => Self::Q6,
            other => other,
        }
    }
}

impl fmt::Display for NumberType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Error from [`NumberType::parse`]: the name is not an accepted number type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected one of {}; found `{found}`", NumberType::names(*uses).join(", "))]
pub struct UnknownNumberType {
    found: String,
    uses: u8,
}

/// Declares a [`NumberType`] wrapper for types with certain [uses] that users choose by name.
///
/// Each listed variant becomes a constant. `FromStr` accepts the names of all types with these uses.
#[doc(hidden)]
#[macro_export]
macro_rules! number_type_for {
    ($(#[$doc:meta])* $type:ident, $uses:expr, [$($variant:ident),+]) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $type($crate::NumberType);

        impl $type {
            $(
                #[doc = concat!("See [`NumberType::", stringify!($variant), "`](candle_gpt2_arithmetic::NumberType::", stringify!($variant), ").")]
                pub const $variant: Self = {
                    assert!($crate::NumberType::$variant.is_for($uses));
                    Self($crate::NumberType::$variant)
                };
            )+

            /// Returns all available types.
            pub fn all() -> impl Iterator<Item = Self> + Clone {
                $crate::NumberType::all($uses).map(Self)
            }

            /// Returns the number type.
            pub const fn number_type(self) -> $crate::NumberType {
                self.0
            }

            /// Returns the name.
            ///
            /// [`FromStr`](std::str::FromStr) parses it, and [`Display`](std::fmt::Display) prints it.
            pub fn name(self) -> &'static str {
                self.0.name()
            }
        }

        impl std::fmt::Debug for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Debug::fmt(&self.0, f)
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::UnknownNumberType;

            fn from_str(name: &str) -> Result<Self, $crate::UnknownNumberType> {
                $crate::NumberType::parse(name, $uses).map(Self)
            }
        }
    };
}
