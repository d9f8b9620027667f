//! Attention, `softmax(scale · Q Kᵀ) V`, in which every query sees a contiguous range of keys.
//!
//! This covers causal, full and windowed attention, with and without a cache.
//!
//! Keys and values are stored in panels of a [`KvMemory`]. Without a cache, they are first copied to a
//! temporary one. A query is computed over one [part](on_part) of its keys at a time, alone or in a tile with
//! others. A decoding step, a chunk of tokens after a cache and a whole prompt thus run the same computation,
//! and results are bit-identical. Keys that no query sees are skipped. Keys that a query does not see never
//! affect its result, even if they are NaN.

mod attend;
mod floats;
mod format;
mod heads;
mod memory;
mod on_part;
mod q8;
mod sequences;
mod softmax;
#[cfg(test)]
mod tests;
mod units;

use std::ops::Range;

use attend::Attend;
pub use heads::{Heads, KvSlot};
pub use memory::KvMemory;
pub use sequences::sequence_attention;
pub use units::KvSizes;

use crate::simd::InstructionSet;
use crate::threads::with_job_size;

/// Computes attention over a KV cache in which each batch row has its own slot.
///
/// ```
/// use candle_gpt2_arithmetic::{Heads, KvMemory, KvSizes, KvSlot, NumberType, slot_attention};
///
/// let sizes = KvSizes { heads: 1, key_dim: 2, value_dim: 2 };
/// let mut memory = KvMemory::new(NumberType::F32, sizes, 16).expect("enough memory");
/// let slots = KvSlot::side_by_side(1, 16);
/// let values = [1., 2., 3., 4., 5., 6.]; // three tokens of one head
/// let stored = Heads::strided(&values, [1, 1, 3, 2], [6, 6, 2]);
/// memory.write(&slots, [&stored, &stored], &[0]);
///
/// let query = Heads::strided(&[0., 0.], [1, 1, 1, 2], [2, 2, 2]); // attends to all tokens equally
/// assert_eq!(slot_attention(&query, &memory, &slots, 1.0, &[0..3]), [3., 4.]);
/// ```
///
/// # Shapes
/// `q` is `(B, H, T, D)`, with one slot for each of the `B` rows. `visible` has the range of visible keys
/// for each of the `B · T` queries. A range has at least one key and fits into the capacity of its slot.
/// Returns `(B, T, H, Dv)`. If the rows have different lengths, the result is `(T_1 + … + T_B, H, Dv)`,
/// with the same total number of queries.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn slot_attention(
    q: &Heads<'_>,
    memory: &KvMemory,
    slots: &[KvSlot],
    scale: f32,
    visible: &[Range<usize>],
) -> Vec<f32> {
    slot_attention_with(q, memory, slots, scale, visible, InstructionSet::detected())
}

/// Computes [`slot_attention`] with a given instruction set.
fn slot_attention_with(
    q: &Heads<'_>,
    memory: &KvMemory,
    slots: &[KvSlot],
    scale: f32,
    visible: &[Range<usize>],
    instructions: InstructionSet,
) -> Vec<f32> {
    let sizes = memory.sizes();
    let sees = |(query, keys): (usize, &Range<usize>)| {
        !keys.is_empty() && keys.end <= slots[q.place_of(query).0].capacity
    };
    let fits = (q.heads, q.head_dim) == (sizes.heads, sizes.key_dim)
        && slots.len() == q.rows.len()
        && slots.iter().all(|slot| slot.is_in(memory.tokens()))
        && visible.len() == q.all_tokens()
        && visible.iter().enumerate().all(sees);
    assert!(fits, "queries, memory, slots and visible keys do not match");
    if visible.len() * q.heads * sizes.value_dim == 0 {
        return Vec::new();
    }
    let keys: usize = visible.iter().map(ExactSizeIterator::len).sum();
    let products = keys * sizes.heads * (sizes.key_dim + sizes.value_dim);
    // Assumes two bytes per key or value element, the most common size in caches.
    with_job_size(2 * products, products, || {
        memory.attend(&Attend { q, sizes, slots, scale, visible, instructions, shares_keys: None })
    })
}
