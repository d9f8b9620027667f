//! Writing the keys or values of new tokens into the memory of a cache, in its type, where they are.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::element::Element;
use super::heads::{Head, Heads, KvSlot};
use crate::simd::{InstructionSet, Job, LANES, Simd};
use crate::threads::{Parts, for_each_part};

/// Fewest values that are worth the threads.
const MIN_SHARED_VALUES: usize = 1 << 15;

/// The memory of keys or of values, to be written.
#[derive(Debug)]
pub enum KvValues<'a> {
    /// In f32.
    F32(&'a mut [f32]),
    /// In f16.
    F16(&'a mut [f16]),
}

/// Writes the keys or the values of new tokens into a memory, those of row `b` into its slot from place `positions[b]` on,
/// rounded to the type of the memory.
///
/// # Shapes
/// `memory` `(N, H · D)`; `tokens` `(B, H, T, D)`; a slot and a position for each of the `B` rows.
///
/// # Panics
/// When the tokens of a row do not fit into its slot, or the slot not into the memory.
pub fn write_tokens(memory: KvValues<'_>, tokens: &Heads<'_>, slots: &[KvSlot], positions: &[usize]) {
    let instructions = InstructionSet::detected();
    match memory {
        KvValues::F32(memory) => write(memory, tokens, slots, positions, instructions),
        KvValues::F16(memory) => write(memory.reinterpret_cast_mut(), tokens, slots, positions, instructions),
    }
}

pub(super) fn write<E: Element>(
    memory: &mut [E],
    tokens: &Heads<'_>,
    slots: &[KvSlot],
    positions: &[usize],
    instructions: InstructionSet,
) {
    let width = tokens.heads * tokens.head_dim;
    if width == 0 {
        return;
    }
    let is_shared = tokens.rows.len() * width * tokens.tokens >= MIN_SHARED_VALUES;
    for (row, (slot, position)) in slots.iter().zip(positions).enumerate() {
        let memory = &mut memory[slot.start * width..][..slot.capacity * width];
        let row_len = slot.capacity * tokens.head_dim;
        let write_head = |head: usize, memory: &mut [E]| {
            let to = &mut memory[position * tokens.head_dim..];
            instructions.run(WriteHead { tokens: tokens.head(row, head), to });
        };
        if is_shared && row_len > 0 {
            for_each_part(memory, Parts { row_len, rows: 1, columns: row_len }, |mut part| {
                write_head(part.first_row, part.row(0));
            });
        } else {
            // A slot without room gets no tokens.
            let heads = memory.chunks_mut(row_len.max(1)).enumerate();
            heads.for_each(|(head, memory)| write_head(head, memory));
        }
    }
}

/// The tokens of one head.
struct WriteHead<'a, E> {
    tokens: Head<'a>,
    to: &'a mut [E],
}

impl<E: Element> Job for WriteHead<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { tokens, to } = self;
        for (token, to) in to.chunks_mut(tokens.head_dim).take(tokens.tokens).enumerate() {
            let (from, from_rest) = tokens.row(token).as_chunks::<LANES>();
            let (to, to_rest) = to.as_chunks_mut::<LANES>();
            for (from, to) in from.iter().zip(to) {
                E::store(simd, simd.load(from), to);
            }
            for (from, to) in from_rest.iter().zip(to_rest) {
                *to = E::from_f32(*from);
            }
        }
    }
}
