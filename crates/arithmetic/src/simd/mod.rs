//! What differs between processors.
//!
//! [`InstructionSet::run`] compiles a kernel for every instruction set and calls the one that was detected, so the released
//! program needs no `target-cpu`. An instruction set is one file and its rows here.

use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod doubles;
#[cfg(test)]
mod inlined;
mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod real;
#[cfg(test)]
mod tests;
mod vectors;

pub(crate) use math::{gelu_tanh, gelu_tanh_slope};
pub(crate) use real::Real;
pub use vectors::Number;
#[cfg(test)]
pub(crate) use vectors::OfFloats;
pub(crate) use vectors::{
    BYTE_INPUTS, BYTE_LINES, ByteGroup, ByteLines, GROUP, Job, LANES, Line, MAX_TILE_PANELS, SMALL_OFFSET,
    Simd, TileJob, Vectors, Work, tile_height,
};

/// The instruction sets, slowest first: name of the variant, its type in a file of its own, the processors that have it, its
/// name, what it is.
macro_rules! instruction_sets {
    ($($variant:ident($set:ty) $(on $processor:literal)?, $name:literal, $what:literal;)+) => {
        /// An instruction set that this processor has.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum InstructionSet {
            $(#[doc = $what] $(#[cfg(target_arch = $processor)])? $variant($set),)+
        }

        impl InstructionSet {
            /// All that this processor has, slowest first.
            pub(crate) fn available() -> Vec<Self> {
                let sets = [$($(#[cfg(target_arch = $processor)])? <$set>::detect().map(Self::$variant),)+];
                sets.into_iter().flatten().collect()
            }

            /// Its name.
            pub(crate) fn name(self) -> &'static str {
                match self {
                    $($(#[cfg(target_arch = $processor)])? Self::$variant(_) => $name,)+
                }
            }

            /// Runs `job` with these instructions.
            pub(crate) fn run<J: Job>(self, job: J) -> J::Output {
                match self {
                    $($(#[cfg(target_arch = $processor)])? Self::$variant(simd) => simd.run(job),)+
                }
            }
        }
    };
}

instruction_sets! {
    Portable(portable::Portable), "portable", "Plain Rust, on every processor.";
    Avx2(avx2::Avx2<false>) on "x86_64", "avx2", "AVX2 with FMA and F16C.";
    Avx2Vnni(avx2::Avx2<true>) on "x86_64", "avx2-vnni", "AVX2 with FMA, F16C and AVX-VNNI.";
    Avx512(avx512::Avx512<false>) on "x86_64", "avx512", "AVX-512 F, BW, DQ and VL.";
    Avx512Vnni(avx512::Avx512<true>) on "x86_64", "avx512-vnni", "AVX-512 F, BW, DQ, VL and VNNI.";
    Neon(neon::Neon<false>) on "aarch64", "neon", "NEON.";
    NeonDot(neon::Neon<true>) on "aarch64", "neon-dot", "NEON with dot products of bytes.";
}

static CHOSEN: OnceLock<InstructionSet> = OnceLock::new();

impl InstructionSet {
    /// The fastest one here, or the one that was chosen before the first computation.
    pub(crate) fn detected() -> Self {
        *CHOSEN.get_or_init(|| Self::available().pop().unwrap_or(Self::Portable(portable::Portable)))
    }

    /// Makes [`InstructionSet::detected`] return this one; returns whether it could.
    pub(crate) fn choose(self) -> bool {
        *CHOSEN.get_or_init(|| self) == self
    }
}
