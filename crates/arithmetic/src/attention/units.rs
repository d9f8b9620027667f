//! Keys and values in one storage format: memory layout, writing, reading and copying.

use std::ops::Range;

use super::format::{Format, key_lines, value_panels};
use super::heads::{Head, Heads, KvSlot};
use super::q8::Bytes;
use crate::NumberType;
use crate::large_pages::LargeBox;
use crate::simd::{InstructionSet, Job, LANES, Simd};
use crate::threads::{Parts, for_each_part};

/// Minimum number of values worth dividing among threads.
const MIN_SHARED_VALUES: usize = 1 << 15;

/// Sizes of a token's keys and values, for [`KvMemory::new`](crate::KvMemory::new).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvSizes {
    /// Number of heads.
    pub heads: usize,
    /// Width of a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
}

impl KvSizes {
    /// Returns the bytes per token, excluding the padding of floating-point heads.
    pub fn bytes_per_token(self, dtype: NumberType) -> usize {
        if dtype == NumberType::Q8 {
            let units = UnitSizes::of::<Bytes>(self).map_or(usize::MAX, |unit_sizes| unit_sizes.units(LANES));
            return units.saturating_mul(size_of::<<Bytes as Format>::Unit>()) / LANES;
        }
        let numbers = self.heads.saturating_mul(self.key_dim.saturating_add(self.value_dim));
        dtype.bytes(numbers as u64).and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX)
    }
}

/// Keys and values in one format.
pub(super) struct Units<F: Format> {
    keys: LargeBox<F::Unit>,
    values: LargeBox<F::Unit>,
}

/// Token sizes in a format's units.
#[derive(Clone, Copy)]
struct UnitSizes {
    /// Units for the keys of 16 tokens in one head.
    key_panel: usize,
    /// Units for the keys of 16 tokens in all heads.
    keys: usize,
    /// Units for the values of one token in one head.
    value: usize,
    /// Units for the values of one token in all heads.
    values: usize,
}

impl UnitSizes {
    /// Computes the sizes, or returns `None` if they overflow.
    #[inline(always)]
    fn of<F: Format>(sizes: KvSizes) -> Option<Self> {
        let KvSizes { heads, key_dim, value_dim } = sizes;
        let key_panel = key_lines::<F>(key_dim).checked_mul(F::KEY_LINE)?;
        let value = value_panels(value_dim).checked_mul(F::VALUE_LINE)?;
        let (keys, values) = (key_panel.checked_mul(heads)?, value.checked_mul(heads)?);
        Some(Self { key_panel, keys, value, values })
    }

    /// Returns the number of units that the keys and values of `tokens` tokens occupy.
    fn units(self, tokens: usize) -> usize {
        (self.keys / LANES).saturating_add(self.values).saturating_mul(tokens)
    }

    /// Returns the unit range of a slot's keys in one head.
    #[inline(always)]
    fn keys_of(self, slot: KvSlot, head: usize) -> Range<usize> {
        let len = slot.room() / LANES * self.key_panel;
        let start = slot.start / LANES * self.keys + head * len;
        start..start + len
    }

    /// Returns the unit range of a slot's values in one head.
    #[inline(always)]
    fn values_of(self, slot: KvSlot, head: usize) -> Range<usize> {
        let len = slot.room() * self.value;
        let start = slot.start * self.values + head * len;
        start..start + len
    }
}

/// Returns the unit sizes of an existing memory.
#[inline(always)]
fn unit_sizes<F: Format>(sizes: KvSizes) -> UnitSizes {
    match UnitSizes::of::<F>(sizes) {
        Some(unit_sizes) => unit_sizes,
        None => UnitSizes { key_panel: 0, keys: 0, value: 0, values: 0 },
    }
}

impl<F: Format> Units<F> {
    pub(super) fn new(sizes: KvSizes, tokens: usize) -> Option<Self> {
        let UnitSizes { keys, values, .. } = UnitSizes::of::<F>(sizes)?;
        let (keys, values) = ((tokens / LANES).checked_mul(keys)?, tokens.checked_mul(values)?);
        let bytes = keys.checked_add(values)?.checked_mul(size_of::<F::Unit>())?;
        Vec::<u8>::new().try_reserve_exact(bytes).ok()?;
        Some(Self { keys: LargeBox::zeros(keys)?, values: LargeBox::zeros(values)? })
    }

    /// Returns one head of a slot.
    #[inline(always)]
    pub(super) fn head(&self, sizes: KvSizes, slot: KvSlot, head: usize) -> KvHead<'_, F> {
        let unit_sizes = unit_sizes::<F>(sizes);
        KvHead {
            keys: &self.keys[unit_sizes.keys_of(slot, head)],
            values: &self.values[unit_sizes.values_of(slot, head)],
            key_panel_len: unit_sizes.key_panel,
            value_panel_len: slot.room() * F::VALUE_LINE,
            value_dim: sizes.value_dim,
        }
    }

    /// Writes the keys and values of new tokens.
    pub(super) fn write(&mut self, write: &Write<'_>) {
        let Write { sizes, slots, keys, values, positions, instructions } = *write;
        let unit_sizes = unit_sizes::<F>(sizes);
        for (row, (slot, position)) in slots.iter().zip(positions).enumerate() {
            let (slot, position) = (*slot, *position);
            let in_all = |heads: Range<usize>| heads.start..heads.start + heads.len() * sizes.heads;
            let is_shared = keys.tokens * sizes.heads * sizes.key_dim >= MIN_SHARED_VALUES;
            let key_panel_len = unit_sizes.key_panel;
            let to_keys = &mut self.keys[in_all(unit_sizes.keys_of(slot, 0))];
            each_head(to_keys, sizes.heads, is_shared, |head, memory| {
                let tokens = keys.head(row, head);
                instructions.run(WriteKeys::<F> { tokens, position, panel_len: key_panel_len, memory });
            });
            let to_values = &mut self.values[in_all(unit_sizes.values_of(slot, 0))];
            each_head(to_values, sizes.heads, is_shared, |head, memory| {
                let tokens = values.head(row, head);
                let panel_len = slot.room() * F::VALUE_LINE;
                instructions.run(WriteValues::<F> { tokens, position, panel_len, memory });
            });
        }
    }

    /// Returns the keys and values of the requested tokens.
    pub(super) fn read(&self, read: &Read) -> [Vec<f32>; 2] {
        let Read { sizes, slot, tokens } = read;
        let KvSizes { heads, key_dim, value_dim } = *sizes;
        let mut keys = vec![0.0; heads * tokens.len() * key_dim];
        let mut values = vec![0.0; heads * tokens.len() * value_dim];
        let places = (0..heads).flat_map(|head| tokens.clone().map(move |token| (head, token)));
        for ((head, token), to) in places.clone().zip(keys.chunks_mut(key_dim.max(1))) {
            let kv_head = self.head(*sizes, *slot, head);
            let panel = &kv_head.keys[token / LANES * kv_head.key_panel_len..][..kv_head.key_panel_len];
            F::read_key(panel, token % LANES, to);
        }
        for ((head, token), to) in places.zip(values.chunks_mut(value_dim.max(1))) {
            let kv_head = self.head(*sizes, *slot, head);
            for (panel, to) in to.chunks_mut(LANES).enumerate() {
                let line = panel * kv_head.value_panel_len + token * F::VALUE_LINE;
                F::read_value(&kv_head.values[line..line + F::VALUE_LINE], to);
            }
        }
        [keys, values]
    }

    /// Copies a slot's panels from another memory or within this one.
    pub(super) fn copy(&mut self, from: Option<&Self>, panels: &CopyPanels) {
        let CopyPanels { sizes, slots, panels } = panels;
        let unit_sizes = unit_sizes::<F>(*sizes);
        for head in 0..sizes.heads {
            let [source, to] = slots.map(|slot| {
                let start = unit_sizes.keys_of(slot, head).start;
                start + panels.start * unit_sizes.key_panel..start + panels.end * unit_sizes.key_panel
            });
            copy_units(&mut self.keys, from.map(|from| &from.keys[..]), source, to);
            for panel in 0..value_panels(sizes.value_dim) {
                let line = LANES * F::VALUE_LINE;
                let [source, to] = slots.map(|slot| {
                    let start = unit_sizes.values_of(slot, head).start + panel * slot.room() * F::VALUE_LINE;
                    start + panels.start * line..start + panels.end * line
                });
                copy_units(&mut self.values, from.map(|from| &from.values[..]), source, to);
            }
        }
    }
}

/// Copies units from `from`, or within `to` if there is no other memory.
fn copy_units<T: Copy>(to: &mut [T], from: Option<&[T]>, source: Range<usize>, place: Range<usize>) {
    match from {
        Some(from) => to[place].copy_from_slice(&from[source]),
        None => to.copy_within(source, place.start),
    }
}

/// One head of a slot.
pub(super) struct KvHead<'a, F: Format> {
    pub(super) keys: &'a [F::Unit],
    pub(super) values: &'a [F::Unit],
    pub(super) key_panel_len: usize,
    /// Units per value panel.
    pub(super) value_panel_len: usize,
    pub(super) value_dim: usize,
}

impl<F: Format> Clone for KvHead<'_, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Format> Copy for KvHead<'_, F> {}

/// Panels to copy from one slot to another.
pub(super) struct CopyPanels {
    pub(super) sizes: KvSizes,
    pub(super) slots: [KvSlot; 2],
    pub(super) panels: Range<usize>,
}

/// New tokens and their positions.
pub(super) struct Write<'a> {
    pub(super) sizes: KvSizes,
    pub(super) slots: &'a [KvSlot],
    pub(super) keys: &'a Heads<'a>,
    pub(super) values: &'a Heads<'a>,
    pub(super) positions: &'a [usize],
    pub(super) instructions: InstructionSet,
}

/// Calls `write` with the memory of each head, on all threads if `is_shared` is true.
fn each_head<T: Send>(
    memory: &mut [T],
    heads: usize,
    is_shared: bool,
    write: impl Fn(usize, &mut [T]) + Sync,
) {
    let row_len = memory.len() / heads.max(1);
    if row_len == 0 {
        // A slot without capacity has nothing to write.
    } else if is_shared {
        for_each_part(memory, Parts { row_len, rows: 1, columns: row_len }, |mut part| {
            write(part.first_row, part.row(0));
        });
    } else {
        memory.chunks_mut(row_len).enumerate().for_each(|(head, memory)| write(head, memory));
    }
}

/// Job that writes the keys of one head.
struct WriteKeys<'a, F: Format> {
    tokens: Head<'a>,
    position: usize,
    panel_len: usize,
    memory: &'a mut [F::Unit],
}

impl<F: Format> Job for WriteKeys<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for token in 0..self.tokens.tokens {
            let place = self.position + token;
            let panel = &mut self.memory[place / LANES * self.panel_len..][..self.panel_len];
            F::write_key(simd, self.tokens.row(token), panel, place % LANES);
        }
    }
}

/// Job that writes the values of one head.
struct WriteValues<'a, F: Format> {
    tokens: Head<'a>,
    position: usize,
    panel_len: usize,
    memory: &'a mut [F::Unit],
}

impl<F: Format> Job for WriteValues<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for token in 0..self.tokens.tokens {
            let (value, place) = (self.tokens.row(token), self.position + token);
            for panel in 0..value_panels(value.len()) {
                let line = panel * self.panel_len + place * F::VALUE_LINE;
                let line = &mut self.memory[line..line + F::VALUE_LINE];
                F::write_value(simd, &value[panel * LANES..], line);
            }
        }
    }
}

/// Tokens to read from a slot.
pub(super) struct Read {
    pub(super) sizes: KvSizes,
    pub(super) slot: KvSlot,
    pub(super) tokens: Range<usize>,
}
