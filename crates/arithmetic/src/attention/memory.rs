//! KV cache memory: keys and values of many rows, each row in its own slot.

use std::any::Any;
use std::fmt;
use std::ops::Range;

use super::attend::Attend;
use super::floats::Floats;
use super::format::Format;
use super::heads::{Heads, KvSlot};
use super::q8::Bytes;
use super::units::{CopyPanels, KvSizes, Read, Units, Write};
use crate::NumberType;
use crate::simd::{InstructionSet, LANES};

/// Keys and values in any format.
trait Storage: Any + Send + Sync {
    fn write(&mut self, write: &Write<'_>);
    fn read(&self, read: &Read) -> [Vec<f32>; 2];
    /// Copies a slot's panels from another memory or within this one.
    ///
    /// Returns false, without copying, if the formats differ.
    fn copy(&mut self, from: Option<&dyn Storage>, panels: &CopyPanels) -> bool;
    fn attend(&self, attend: &Attend<'_>) -> Vec<f32>;
}

impl<F: Format> Storage for Units<F> {
    fn write(&mut self, write: &Write<'_>) {
        self.write(write);
    }

    fn read(&self, read: &Read) -> [Vec<f32>; 2] {
        self.read(read)
    }

    fn copy(&mut self, from: Option<&dyn Storage>, panels: &CopyPanels) -> bool {
        let units = from.map(|from| (from as &dyn Any).downcast_ref());
        if let Some(None) = units {
            return false;
        }
        self.copy(units.flatten(), panels);
        true
    }

    fn attend(&self, attend: &Attend<'_>) -> Vec<f32> {
        attend.over(self)
    }
}

/// Memory for the keys and values of a fixed number of tokens.
///
/// New memory takes up no physical memory until it is written.
///
/// ```
/// use candle_gpt2_arithmetic::{Heads, KvMemory, KvSizes, KvSlot, NumberType};
///
/// let sizes = KvSizes { heads: 2, key_dim: 3, value_dim: 3 };
/// let mut memory = KvMemory::new(NumberType::F32, sizes, 16).expect("enough memory");
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
    dtype: NumberType,
    storage: Box<dyn Storage>,
}

impl fmt::Debug for KvMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sizes, tokens, dtype, .. } = self;
        write!(f, "KvMemory({tokens} tokens of {sizes:?} in {dtype})")
    }
}

impl KvMemory {
    /// Allocates memory for `tokens` tokens, rounded up to whole panels of 16.
    ///
    /// Returns `None` if there is not enough memory, or the type is not one of
    /// [`KV_CACHE`](crate::uses::KV_CACHE).
    pub fn new(dtype: NumberType, sizes: KvSizes, tokens: usize) -> Option<Self> {
        let tokens = tokens.checked_next_multiple_of(LANES)?;
        let storage: Box<dyn Storage> = match dtype {
            NumberType::F32 => Box::new(Units::<Floats<f32>>::new(sizes, tokens)?),
            NumberType::F16 => Box::new(Units::<Floats<u16>>::new(sizes, tokens)?),
            NumberType::Q8 => Box::new(Units::<Bytes>::new(sizes, tokens)?),
            _ => return None,
        };
        Some(Self { sizes, tokens, dtype, storage })
    }

    /// Returns the number of tokens that the memory holds.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the sizes of a token's keys and values.
    pub fn sizes(&self) -> KvSizes {
        self.sizes
    }

    /// Returns the storage type.
    pub fn dtype(&self) -> NumberType {
        self.dtype
    }

    /// Writes the keys and values of new tokens, rounded to the format.
    ///
    /// The tokens of row `b` go to its slot, starting at position `positions[b]`.
    ///
    /// # Shapes
    /// `keys` are `(B, H, T, D)` and `values` `(B, H, T, Dv)`, with a slot and a
    /// position for each of the `B` rows.
    ///
    /// # Panics
    /// Panics if the shapes do not match, a row's tokens do not fit into its
    /// slot, or a slot is outside the memory.
    pub fn write(&mut self, slots: &[KvSlot], [keys, values]: [&Heads<'_>; 2], positions: &[usize]) {
        self.write_with(slots, [keys, values], positions, InstructionSet::detected());
    }

    /// Runs [`KvMemory::write`] with a given instruction set.
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
        self.storage.write(&Write { sizes: self.sizes, slots, keys, values, positions, instructions });
    }

    /// Returns the keys `(H, T, D)` and values `(H, T, Dv)` of the requested tokens in a slot.
    ///
    /// # Panics
    /// Panics if the slot is outside this memory, or `tokens` exceeds its capacity.
    pub fn read(&self, slot: KvSlot, tokens: Range<usize>) -> [Vec<f32>; 2] {
        assert!(
            slot.is_in(self.tokens) && tokens.end <= slot.capacity,
            "tokens {tokens:?} of {slot:?} are out of range in {self:?}"
        );
        self.storage.read(&Read { sizes: self.sizes, slot, tokens })
    }

    /// Copies tokens from a slot of this or another memory to the same positions in slot `to`.
    ///
    /// The preceding tokens must be the same in both slots. Later tokens in slot `to` become invalid.
    ///
    /// # Panics
    /// Panics if the memories' sizes differ, a slot is outside its memory, or `tokens` exceeds a slot's
    /// capacity.
    pub fn copy(&mut self, to: KvSlot, from: Option<&Self>, from_slot: KvSlot, tokens: Range<usize>) {
        let source = from.unwrap_or(self);
        let fits = source.sizes == self.sizes
            && from_slot.is_in(source.tokens)
            && to.is_in(self.tokens)
            && tokens.end <= from_slot.capacity.min(to.capacity);
        assert!(fits, "cannot copy tokens {tokens:?} of {from_slot:?} in {source:?} to {to:?} in {self:?}");
        if tokens.is_empty() {
            return;
        }
        // Other tokens in these panels are either the same in both slots or not yet written.
        let panels = CopyPanels {
            sizes: self.sizes,
            slots: [from_slot, to],
            panels: tokens.start / LANES..tokens.end.div_ceil(LANES),
        };
        if let (false, Some(from)) = (self.storage.copy(from.map(|from| &*from.storage), &panels), from) {
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

    /// Computes attention over the keys and values.
    pub(super) fn attend(&self, attend: &Attend<'_>) -> Vec<f32> {
        self.storage.attend(attend)
    }
}
