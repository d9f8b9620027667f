//! Hardware limits for comparison with the kernels: multiply-adds in registers and memory reads.
//!
//! Both functions use the kernels' threads and instructions. The caller measures the time.
//!
//! ```
//! use candle_gpt2_arithmetic::limits;
//!
//! let sets = limits::instruction_sets(); // slowest first, such as ["portable", "avx2", "avx512"]
//! assert_eq!(sets.last(), Some(&limits::instruction_set()));
//! assert!(!limits::choose_instruction_set("unknown"));
//! assert!(!limits::are_tiles_refused() || !sets.contains(&"amx"));
//! assert!(limits::multiply_adds(1_000_000) > 0);
//! assert_eq!(limits::read(&vec![0.5; 1 << 16]), 32_768.);
//! ```

use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::large_pages::LargeBox;
#[cfg(target_arch = "x86_64")]
use crate::simd::tiles;
use crate::simd::{InstructionSet, Job, LANES, Simd};
use crate::threads::for_each_index;

/// Returns the names of the instruction sets that this processor supports, slowest first.
///
/// The kernels use the last one.
pub fn instruction_sets() -> Vec<&'static str> {
    InstructionSet::available().into_iter().map(InstructionSet::name).collect()
}

/// Returns the name of the instruction set that the kernels use.
pub fn instruction_set() -> &'static str {
    InstructionSet::detected().name()
}

/// Selects the kernels' instruction set, for example to estimate the speed on other processors.
///
/// Returns whether the selection succeeded. The processor must support the set, and the
/// first computation fixes the choice.
pub fn choose_instruction_set(name: &str) -> bool {
    InstructionSet::available().into_iter().find(|set| set.name() == name).is_some_and(InstructionSet::choose)
}

/// Whether the processor supports AMX-INT8, but this process cannot use it.
///
/// Products are then computed with AVX-512.
pub fn are_tiles_refused() -> bool {
    #[cfg(target_arch = "x86_64")]
    return tiles::Availability::detect() == tiles::Availability::Refused;
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Number of work chunks that are divided among the threads.
const PIECES: usize = 64;

/// Runs about `flops` floating-point operations as multiply-adds in registers.
///
/// Returns the exact number of operations.
pub fn multiply_adds(flops: u64) -> u64 {
    let instructions = InstructionSet::detected();
    let chains = instructions.run(ChainCount);
    let per_round = (2 * LANES * chains * PIECES) as u64;
    let rounds = flops.div_ceil(per_round);
    let kept = AtomicU32::new(0);
    for_each_index(PIECES, |_| {
        let sum = instructions.run(Chains { rounds, chains });
        kept.fetch_xor(sum.to_bits(), Ordering::Relaxed);
    });
    std::hint::black_box(kept);
    rounds * per_round
}

/// Allocates `count` ones for [`read`], in the same kind of memory as packed weights.
#[expect(unsafe_code, reason = "the values are written once, into uninitialized memory")]
pub fn values_to_read(count: usize) -> impl Deref<Target = [f32]> {
    let mut values = LargeBox::new_uninit(count);
    for value in values.iter_mut() {
        value.write(1.0);
    }
    // SAFETY: the loop above wrote every value.
    unsafe { values.assume_init() }
}

/// Reads `values` and returns their sum.
///
/// The threads share 64 chunks. The sum omits the values past the last multiple of 64 in each chunk.
pub fn read(values: &[f32]) -> f32 {
    let instructions = InstructionSet::detected();
    let piece = values.len().div_ceil(PIECES).next_multiple_of(LANES);
    let sums = std::sync::Mutex::new(0.0);
    for_each_index(values.len().div_ceil(piece.max(1)), |index| {
        let sum = instructions.run(Sum(&values[index * piece..values.len().min((index + 1) * piece)]));
        if let Ok(mut sums) = sums.lock() {
            *sums += sum;
        }
    });
    sums.into_inner().unwrap_or_default()
}

/// Number of independent multiply-add chains that hide latency if a vector fits in one register.
const WIDE_CHAINS: usize = 12;
/// Number of independent multiply-add chains if a vector takes several registers.
const NARROW_CHAINS: usize = 6;

/// Job that returns the number of chains that fit into an instruction set's registers.
struct ChainCount;

impl Job for ChainCount {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        if S::TILE_ROWS == WIDE_CHAINS { WIDE_CHAINS } else { NARROW_CHAINS }
    }
}

struct Chains {
    rounds: u64,
    chains: usize,
}

impl Job for Chains {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        match self.chains {
            WIDE_CHAINS => chains::<S, WIDE_CHAINS>(simd, self.rounds),
            _ => chains::<S, NARROW_CHAINS>(simd, self.rounds),
        }
    }
}

#[inline(always)]
fn chains<S: Simd, const CHAINS: usize>(simd: S, rounds: u64) -> f32 {
    let mut sums = [simd.splat(1.0); CHAINS];
    let (factor, addend) = (simd.splat(0.999), simd.splat(std::hint::black_box(0.001)));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = simd.mul_add(*sum, factor, addend);
        }
    }
    let mut total = 0.0;
    for sum in sums {
        total += simd.sum(sum);
    }
    total
}

struct Sum<'a>(&'a [f32]);

impl Job for Sum<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let mut sums = [simd.splat(0.0); 4];
        for values in self.0.as_chunks::<{ 4 * LANES }>().0 {
            for (sum, values) in sums.iter_mut().zip(values.as_chunks::<LANES>().0) {
                *sum = simd.add(*sum, simd.load(values));
            }
        }
        let mut total = 0.0;
        for sum in sums {
            total += simd.sum(sum);
        }
        total
    }
}
