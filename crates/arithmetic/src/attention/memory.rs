//! The memory of a cache: keys and values of many rows, each row in a slot of its own.

use std::fmt;
use std::ops::Range;

use super::floats::Floats;
use super::format::{Format, key_lines, value_panels};
use super::heads::{Head, Heads, KvSlot};
use super::q8::Bytes;
use crate::large_pages::LargeBox;
use crate::simd::{InstructionSet, Job, LANES, Simd};
use crate::threads::{Parts, for_each_part};

/// Fewest values that are worth the threads.
const MIN_SHARED_VALUES: usize = 1 << 15;

/// The formats: variant, name and what says how it holds numbers.
macro_rules! formats {
    ($($(#[$doc:meta])* $variant:ident $name:literal $format:ty;)+) => {
        /// How a memory on the CPU holds keys and values. A choice of [`KvMemory::new`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum KvFormat {
            $($(#[$doc])* $variant,)+
        }

        impl KvFormat {
            /// Every format, with its name.
            pub const NAMES: &'static [(&'static str, Self)] = &[$(($name, Self::$variant)),+];

            /// Bytes that one token takes.
            pub fn bytes_per_token(self, sizes: KvSizes) -> usize {
                match self {
                    $(Self::$variant => {
                        let units = Room::of::<$format>(sizes).map_or(usize::MAX, |room| room.units(LANES));
                        units.saturating_mul(size_of::<<$format as Format>::Unit>()) / LANES
                    })+
                }
            }
        }

        enum Held {
            $($variant(Units<$format>),)+
        }

        impl Held {
            fn new(format: KvFormat, sizes: KvSizes, tokens: usize) -> Option<Self> {
                match format {
                    $(KvFormat::$variant => Units::new(sizes, tokens).map(Self::$variant),)+
                }
            }

            fn format(&self) -> KvFormat {
                match self {
                    $(Self::$variant(_) => KvFormat::$variant,)+
                }
            }

            fn with<W: OnUnits>(&self, work: W) -> W::Output {
                match self {
                    $(Self::$variant(units) => work.run(units),)+
                }
            }

            fn change(&mut self, work: impl ChangeUnits) {
                match self {
                    $(Self::$variant(units) => work.run(units),)+
                }
            }

            /// Copies panels of a slot to another one, from another memory or within this one; returns whether the formats are
            /// the same.
            fn copy(&mut self, from: Option<&Self>, panels: &CopyPanels) -> bool {
                match (self, from) {
                    $((Self::$variant(to), None) => to.copy(None, panels),)+
                    $((Self::$variant(to), Some(Self::$variant(from))) => to.copy(Some(from), panels),)+
                    _ => return false,
                }
                true
            }
        }
    };
}

formats! {
    /// 32-bit floating point: as they are computed.
    F32 "f32" Floats<f32>;
    /// 16-bit floating point: the nearest of 11 significant bits; what is beyond 65,504 becomes infinite.
    F16 "f16" Floats<u16>;
    /// 8-bit integers with scales in f16, 8.75 bits a number: `x ≈ s q` with `s = max|x| / 127`, of a key for every 32 inputs, of
    /// a value for every 16 columns. Scores are computed in integers: queries are rounded likewise.
    Q8 "q8" Bytes;
}

/// Work on a memory of any format.
pub(super) trait OnUnits {
    /// What it returns.
    type Output;

    fn run<F: Format>(self, units: &Units<F>) -> Self::Output;
}

/// Work that changes a memory of any format.
trait ChangeUnits {
    fn run<F: Format>(self, units: &mut Units<F>);
}

/// The sizes of the keys and values of a token. [`KvMemory::new`] takes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvSizes {
    /// Heads.
    pub heads: usize,
    /// Width of a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
}

/// Keys and values of `tokens` tokens. New memory takes room once something is written there.
///
/// ```
/// use candle_gpt2_arithmetic::{Heads, KvFormat, KvMemory, KvSizes, KvSlot};
///
/// let sizes = KvSizes { heads: 2, key_dim: 3, value_dim: 3 };
/// let mut memory = KvMemory::new(KvFormat::F32, sizes, 16).expect("room for 16 tokens");
/// let slots = KvSlot::side_by_side(1, 16);
/// let keys: Vec<f32> = (0..24).map(|value| value as f32).collect(); // (1, 2, 4, 3): four tokens
/// let heads = Heads::strided(&keys, [1, 2, 4, 3], [24, 12, 3]);
/// memory.write(&slots, [&heads, &heads], &[0]);
/// let [read, _] = memory.read(slots[0], 1..2);
/// assert_eq!(read, [3., 4., 5., 15., 16., 17.], "the second token in both heads");
/// ```
pub struct KvMemory {
    sizes: KvSizes,
    tokens: usize,
    held: Held,
}

impl fmt::Debug for KvMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sizes, tokens, held } = self;
        write!(f, "KvMemory({tokens} tokens of {sizes:?} in {:?})", held.format())
    }
}

impl KvMemory {
    /// Memory for `tokens` tokens, and for what is missing to whole panels of 16; `None` if there is no room for it.
    pub fn new(format: KvFormat, sizes: KvSizes, tokens: usize) -> Option<Self> {
        let tokens = tokens.checked_next_multiple_of(LANES)?;
        Held::new(format, sizes, tokens).map(|held| Self { sizes, tokens, held })
    }

    /// Tokens that there is memory for.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The sizes of a token.
    pub fn sizes(&self) -> KvSizes {
        self.sizes
    }

    /// How it holds them.
    pub fn format(&self) -> KvFormat {
        self.held.format()
    }

    /// Writes the keys and values of new tokens, rounded, those of row `b` into its slot from place `positions[b]` on.
    ///
    /// # Shapes
    /// `keys` `(B, H, T, D)`, `values` `(B, H, T, Dv)`; a slot and a position for each of the `B` rows.
    ///
    /// # Panics
    /// When the shapes are not these, the tokens of a row do not fit into its slot, or the slot not into the memory.
    pub fn write(&mut self, slots: &[KvSlot], [keys, values]: [&Heads<'_>; 2], positions: &[usize]) {
        self.write_with(slots, [keys, values], positions, InstructionSet::detected());
    }

    /// The same with these instructions.
    pub(super) fn write_with(
        &mut self,
        slots: &[KvSlot],
        [keys, values]: [&Heads<'_>; 2],
        positions: &[usize],
        instructions: InstructionSet,
    ) {
        let KvSizes { heads, key_dim, value_dim } = self.sizes;
        let has_room = |(row, (slot, position)): (usize, (&KvSlot, &usize))| {
            let end = position.checked_add(keys.tokens_of(row));
            slot.is_in(self.tokens) && end.is_some_and(|end| end <= slot.capacity)
        };
        let fits = [keys.heads, values.heads] == [heads; 2]
            && (keys.head_dim, values.head_dim) == (key_dim, value_dim)
            && keys.tokens == values.tokens
            && [keys.rows.len(), values.rows.len(), positions.len()] == [slots.len(); 3]
            && slots.iter().zip(positions).enumerate().all(has_room);
        assert!(fits, "{keys:?} and {values:?} do not fit into {self:?} at {positions:?} of {slots:?}");
        self.held.change(Write { sizes: self.sizes, slots, keys, values, positions, instructions });
    }

    /// The keys and values of some tokens of a slot, `(H, T, D)` and `(H, T, Dv)`.
    ///
    /// # Panics
    /// When the slot is not one of this memory, or has fewer tokens.
    pub fn read(&self, slot: KvSlot, tokens: Range<usize>) -> [Vec<f32>; 2] {
        assert!(slot.is_in(self.tokens) && tokens.end <= slot.capacity, "{tokens:?} of {slot:?} in {self:?}");
        self.held.with(Read { sizes: self.sizes, slot, tokens })
    }

    /// Copies tokens of a slot of another memory, or of this one, to the same places of a slot of this one. The tokens before
    /// them must be the same in both slots; what is after them in the slot of this one means nothing any more.
    ///
    /// # Panics
    /// When the memories have other sizes, a slot is not one of its memory, or has fewer tokens.
    pub fn copy(&mut self, to: KvSlot, from: Option<&Self>, from_slot: KvSlot, tokens: Range<usize>) {
        let source = from.unwrap_or(self);
        let fits = source.sizes == self.sizes
            && from_slot.is_in(source.tokens)
            && to.is_in(self.tokens)
            && tokens.end <= from_slot.capacity.min(to.capacity);
        assert!(fits, "{tokens:?} of {from_slot:?} in {source:?} to {to:?} in {self:?}");
        if tokens.is_empty() {
            return;
        }
        // What else is in the panels is either the same in both slots or not yet written.
        let panels = CopyPanels {
            sizes: self.sizes,
            slots: [from_slot, to],
            panels: tokens.start / LANES..tokens.end.div_ceil(LANES),
        };
        if let (false, Some(from)) = (self.held.copy(from.map(|from| &from.held), &panels), from) {
            let KvSizes { heads, key_dim, value_dim } = self.sizes;
            let first = tokens.start;
            let [keys, values] = from.read(from_slot, tokens);
            let of = |values, len: usize, dim: usize| {
                let tokens = len / (heads * dim).max(1);
                Heads::strided(values, [1, heads, tokens, dim], [len, tokens * dim, dim])
            };
            let (key_heads, value_heads) =
                (of(&keys, keys.len(), key_dim), of(&values, values.len(), value_dim));
            self.write(&[to], [&key_heads, &value_heads], &[first]);
        }
    }

    /// What `work` makes of the units.
    pub(super) fn with<W: OnUnits>(&self, work: W) -> W::Output {
        self.held.with(work)
    }
}

/// Keys and values in one format.
pub(super) struct Units<F: Format> {
    keys: LargeBox<F::Unit>,
    values: LargeBox<F::Unit>,
}

/// Units that tokens take, for the memory of a format.
#[derive(Clone, Copy)]
struct Room {
    /// Of the keys of a panel of 16 tokens, in one head and in all.
    key_panel: usize,
    keys: usize,
    /// Of the values of one token, in one head and in all.
    value: usize,
    values: usize,
}

impl Room {
    /// `None` if the numbers are too large.
    #[inline(always)]
    fn of<F: Format>(sizes: KvSizes) -> Option<Self> {
        let KvSizes { heads, key_dim, value_dim } = sizes;
        let key_panel = key_lines::<F>(key_dim).checked_mul(F::KEY_LINE)?;
        let value = value_panels(value_dim).checked_mul(F::VALUE_LINE)?;
        let (keys, values) = (key_panel.checked_mul(heads)?, value.checked_mul(heads)?);
        Some(Self { key_panel, keys, value, values })
    }

    /// Of the keys and values of so many tokens.
    fn units(self, tokens: usize) -> usize {
        (self.keys / LANES).saturating_add(self.values).saturating_mul(tokens)
    }

    /// Where the keys of a head of a slot are.
    #[inline(always)]
    fn keys_of(self, slot: KvSlot, head: usize) -> Range<usize> {
        let len = slot.room() / LANES * self.key_panel;
        let start = slot.start / LANES * self.keys + head * len;
        start..start + len
    }

    /// Where the values of a head of a slot are.
    #[inline(always)]
    fn values_of(self, slot: KvSlot, head: usize) -> Range<usize> {
        let len = slot.room() * self.value;
        let start = slot.start * self.values + head * len;
        start..start + len
    }
}

/// The room of a memory that exists.
#[inline(always)]
fn room<F: Format>(sizes: KvSizes) -> Room {
    match Room::of::<F>(sizes) {
        Some(room) => room,
        None => Room { key_panel: 0, keys: 0, value: 0, values: 0 },
    }
}

impl<F: Format> Units<F> {
    fn new(sizes: KvSizes, tokens: usize) -> Option<Self> {
        let Room { keys, values, .. } = Room::of::<F>(sizes)?;
        let (keys, values) = ((tokens / LANES).checked_mul(keys)?, tokens.checked_mul(values)?);
        let bytes = keys.checked_add(values)?.checked_mul(size_of::<F::Unit>())?;
        Vec::<u8>::new().try_reserve_exact(bytes).ok()?;
        Some(Self { keys: LargeBox::zeros(keys)?, values: LargeBox::zeros(values)? })
    }

    /// A head of a slot.
    #[inline(always)]
    pub(super) fn head(&self, sizes: KvSizes, slot: KvSlot, head: usize) -> HeldHead<'_, F> {
        let room = room::<F>(sizes);
        HeldHead {
            keys: &self.keys[room.keys_of(slot, head)],
            values: &self.values[room.values_of(slot, head)],
            key_panel_len: room.key_panel,
            value_panel_len: slot.room() * F::VALUE_LINE,
            value_dim: sizes.value_dim,
        }
    }

    fn copy(&mut self, from: Option<&Self>, copy: &CopyPanels) {
        let CopyPanels { sizes, slots, panels } = copy;
        let room = room::<F>(*sizes);
        for head in 0..sizes.heads {
            let [source, to] = slots.map(|slot| {
                let start = room.keys_of(slot, head).start;
                start + panels.start * room.key_panel..start + panels.end * room.key_panel
            });
            copy_units(&mut self.keys, from.map(|from| &from.keys[..]), source, to);
            for panel in 0..value_panels(sizes.value_dim) {
                let line = LANES * F::VALUE_LINE;
                let [source, to] = slots.map(|slot| {
                    let start = room.values_of(slot, head).start + panel * slot.room() * F::VALUE_LINE;
                    start + panels.start * line..start + panels.end * line
                });
                copy_units(&mut self.values, from.map(|from| &from.values[..]), source, to);
            }
        }
    }
}

/// Copies from elsewhere, or within `to`.
fn copy_units<T: Copy>(to: &mut [T], from: Option<&[T]>, source: Range<usize>, place: Range<usize>) {
    match from {
        Some(from) => to[place].copy_from_slice(&from[source]),
        None => to.copy_within(source, place.start),
    }
}

/// One head of a slot.
pub(super) struct HeldHead<'a, F: Format> {
    pub(super) keys: &'a [F::Unit],
    pub(super) values: &'a [F::Unit],
    pub(super) key_panel_len: usize,
    /// Units of a panel of values.
    pub(super) value_panel_len: usize,
    pub(super) value_dim: usize,
}

impl<F: Format> Clone for HeldHead<'_, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Format> Copy for HeldHead<'_, F> {}

/// Which panels are copied from a slot to another.
struct CopyPanels {
    sizes: KvSizes,
    slots: [KvSlot; 2],
    panels: Range<usize>,
}

/// See [`KvMemory::write`].
struct Write<'a> {
    sizes: KvSizes,
    slots: &'a [KvSlot],
    keys: &'a Heads<'a>,
    values: &'a Heads<'a>,
    positions: &'a [usize],
    instructions: InstructionSet,
}

impl ChangeUnits for Write<'_> {
    fn run<F: Format>(self, units: &mut Units<F>) {
        let Self { sizes, slots, keys, values, positions, instructions } = self;
        let room = room::<F>(sizes);
        for (row, (slot, position)) in slots.iter().zip(positions).enumerate() {
            let (slot, position) = (*slot, *position);
            let in_all = |heads: Range<usize>| heads.start..heads.start + heads.len() * sizes.heads;
            let is_shared = keys.tokens * sizes.heads * sizes.key_dim >= MIN_SHARED_VALUES;
            let key_panel_len = room.key_panel;
            let to_keys = &mut units.keys[in_all(room.keys_of(slot, 0))];
            each_head(to_keys, sizes.heads, is_shared, |head, memory| {
                let tokens = keys.head(row, head);
                instructions.run(WriteKeys::<F> { tokens, position, panel_len: key_panel_len, memory });
            });
            let to_values = &mut units.values[in_all(room.values_of(slot, 0))];
            each_head(to_values, sizes.heads, is_shared, |head, memory| {
                let tokens = values.head(row, head);
                let panel_len = slot.room() * F::VALUE_LINE;
                instructions.run(WriteValues::<F> { tokens, position, panel_len, memory });
            });
        }
    }
}

/// Gives the memory of each head to `write`, on all threads if that is worth it.
fn each_head<T: Send>(
    memory: &mut [T],
    heads: usize,
    is_shared: bool,
    write: impl Fn(usize, &mut [T]) + Sync,
) {
    let row_len = memory.len() / heads.max(1);
    if row_len == 0 {
        // A slot without room gets no tokens.
    } else if is_shared {
        for_each_part(memory, Parts { row_len, rows: 1, columns: row_len }, |mut part| {
            write(part.first_row, part.row(0));
        });
    } else {
        memory.chunks_mut(row_len).enumerate().for_each(|(head, memory)| write(head, memory));
    }
}

/// The keys of one head.
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

/// The values of one head.
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

/// See [`KvMemory::read`].
struct Read {
    sizes: KvSizes,
    slot: KvSlot,
    tokens: Range<usize>,
}

impl OnUnits for Read {
    type Output = [Vec<f32>; 2];

    fn run<F: Format>(self, units: &Units<F>) -> [Vec<f32>; 2] {
        let Self { sizes, slot, tokens } = self;
        let KvSizes { heads, key_dim, value_dim } = sizes;
        let mut keys = vec![0.0; heads * tokens.len() * key_dim];
        let mut values = vec![0.0; heads * tokens.len() * value_dim];
        let places = (0..heads).flat_map(|head| tokens.clone().map(move |token| (head, token)));
        for ((head, token), to) in places.clone().zip(keys.chunks_mut(key_dim.max(1))) {
            let held = units.head(sizes, slot, head);
            let panel = &held.keys[token / LANES * held.key_panel_len..][..held.key_panel_len];
            F::read_key(panel, token % LANES, to);
        }
        for ((head, token), to) in places.zip(values.chunks_mut(value_dim.max(1))) {
            let held = units.head(sizes, slot, head);
            for (panel, to) in to.chunks_mut(LANES).enumerate() {
                let line = panel * held.value_panel_len + token * F::VALUE_LINE;
                F::read_value(&held.values[line..line + F::VALUE_LINE], to);
            }
        }
        [keys, values]
    }
}
