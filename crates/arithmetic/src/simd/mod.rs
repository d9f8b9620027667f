//! SIMD vectors and kernels for every supported instruction set.
//!
//! [`InstructionSet::run`] compiles a kernel for every instruction set and calls the detected
//! one, so the released program needs no `target-cpu`. Each instruction set has one file and
//! one or more rows of the table here.

use std::sync::OnceLock;

/// Runs a job in a tile of the given height.
///
/// Each arm lists a height and the number of panels that fill the registers. The last arm lists the height
/// and the number of panels for all other heights.
macro_rules! tiles {
    ($simd:ident, $height:ident, $job:ident: $($rows:tt => $panels:tt),+; else $most:expr => $fewest:tt) => {
        match $height {
            $($rows => $job.run::<{ $rows }, { $panels }>($simd),)+
            _ => $job.run::<{ $most }, { $fewest }>($simd),
        }
    };
}

mod arrays;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod doubles;
mod fused;
#[cfg(test)]
mod inlined;
mod job;
mod math;
mod mode;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(any(test, not(all(target_arch = "wasm32", target_feature = "simd128"))))]
mod portable;
mod real;
mod sums;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
pub(crate) mod tiles;
mod vectors;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod wasm128;

#[cfg(test)]
pub(crate) use job::F32Job;
pub(crate) use job::{Job, Simd};
pub(crate) use math::{
    gelu_erf, gelu_erf_slope, gelu_tanh, gelu_tanh_slope, swish, swish_slope, tanh, tanh_slope,
};
pub use mode::rounded_to_nearest;
pub(crate) use real::Real;
pub(crate) use sums::{Interleaved, PanelLine, SeparateRows, Sums, add_products, stored, sum_products};
pub use vectors::Number;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
pub(crate) use vectors::WordGroup;
#[cfg(test)]
pub(crate) use vectors::unpack_quad;
pub(crate) use vectors::{
    BYTE_INPUTS, BYTE_LINES, ByteGroup, ByteLines, GROUP, LANES, Line, MAX_TILE_PANELS, SMALL_OFFSET,
    TileJob, Vectors, Work, pack_quad, tile_height,
};

/// Declares `InstructionSet` from a table of instruction sets, slowest first.
///
/// Each row lists the compile-time condition, the variant, its type in a separate
/// file, its name and its description.
macro_rules! instruction_sets {
    ($($(#[$compiled:meta])? $variant:ident($set:ty), $name:literal, $what:literal;)+) => {
        /// Instruction set that this processor supports.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum InstructionSet {
            $(#[doc = $what] $(#[$compiled])? $variant($set),)+
        }

        impl InstructionSet {
            /// Returns the instruction sets that this processor supports, slowest first.
            pub(crate) fn available() -> Vec<Self> {
                let sets = [$($(#[$compiled])? <$set>::detect().map(Self::$variant),)+];
                sets.into_iter().flatten().collect()
            }

            /// Returns the name of the instruction set.
            pub(crate) fn name(self) -> &'static str {
                match self {
                    $($(#[$compiled])? Self::$variant(_) => $name,)+
                }
            }

            /// Runs `job` with these instructions, in the default IEEE 754 floating-point mode.
            pub(crate) fn run<J: Job>(self, job: J) -> J::Output {
                rounded_to_nearest(|| match self {
                    $($(#[$compiled])? Self::$variant(simd) => simd.run(job),)+
                })
            }
        }
    };
}

instruction_sets! {
    #[cfg(any(test, not(all(target_arch = "wasm32", target_feature = "simd128"))))]
    Portable(portable::Portable), "portable", "Plain Rust, on every processor.";
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2<false>), "avx2", "AVX2 with FMA and F16C.";
    #[cfg(target_arch = "x86_64")]
    Avx2Vnni(avx2::Avx2<true>), "avx2-vnni", "AVX2 with FMA, F16C and AVX-VNNI.";
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512<tiles::Pairs>), "avx512", "AVX-512 F, BW, DQ and VL.";
    #[cfg(all(target_arch = "x86_64", test))]
    TileModel(avx512::Avx512<tiles::Model>), "amx-model", "AVX-512 with a scalar model of AMX.";
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(avx512::Avx512<tiles::Vnni>), "avx512-vnni", "AVX-512 F, BW, DQ, VL and VNNI.";
    #[cfg(target_arch = "x86_64")]
    Amx(avx512::Avx512<tiles::Amx>), "amx", "AVX-512 with VNNI, and AMX for bytes.";
    #[cfg(target_arch = "aarch64")]
    Neon(neon::Neon<false>), "neon", "NEON.";
    #[cfg(target_arch = "aarch64")]
    NeonDot(neon::Neon<true>), "neon-dot", "NEON with dot products of bytes.";
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    Wasm128(wasm128::Wasm128<true>), "simd128", "simd128 of WebAssembly.";
}

static CHOSEN: OnceLock<InstructionSet> = OnceLock::new();

impl InstructionSet {
    /// Instruction set that needs no features beyond the program's own.
    #[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
    const COMPILED_FOR: Self = Self::Portable(portable::Portable);
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    const COMPILED_FOR: Self = Self::Wasm128(wasm128::Wasm128::<true>(()));

    /// Returns the fastest supported instruction set, or the one chosen before the first computation.
    pub(crate) fn detected() -> Self {
        *CHOSEN.get_or_init(|| Self::available().pop().unwrap_or(Self::COMPILED_FOR))
    }

    /// Makes [`InstructionSet::detected`] return this instruction set; returns false if it is too late.
    pub(crate) fn choose(self) -> bool {
        *CHOSEN.get_or_init(|| self) == self
    }
}
