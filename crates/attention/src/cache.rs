//! KV cache for one attention layer, which lets each step compute only the new tokens.
//!
//! The memory is allocated once, and each row of the batch has a slot in it. Each row has its own length,
//! which is the only source of positions, so rows of different lengths need no padding tokens. Adding or
//! removing a row does not copy other rows. The tensors are written in place, so a cache is only for
//! inference. Training runs without one.

use std::ops::Range;

use candle_core::{Device, Result, Tensor};
use candle_gpt2_arithmetic::KvSlot;
use candle_gpt2_kernels::{KvDType, KvMemory, SlotGuard};

use crate::AttentionError;

/// Batch axis of a `(B, H, T, D)` tensor.
const BATCH_DIM: usize = 0;
/// Token axis of a `(B, H, T, D)` tensor.
const TOKEN_DIM: usize = 2;

/// Sizes of a [`KvCache`] whose rows have equal capacity, for [`KvCache::new`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvCacheShape {
    /// Number of rows in the batch.
    pub batch: usize,
    /// Number of attention heads.
    pub num_heads: usize,
    /// Capacity of each row, in tokens.
    pub capacity: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// Preallocated keys and values of one attention layer, with a slot and a length for each row.
///
/// A cache is for inference only: keys and values are written in place, so no gradient passes through it.
///
/// It is not `Clone`, because clones of candle tensors share their memory. [`KvCache::fork`] makes a copy.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_attention::{KvCache, KvCacheShape};
///
/// let shape = KvCacheShape { batch: 2, num_heads: 3, capacity: 16, head_dim: 4 };
/// let mut cache = KvCache::new(shape, DType::F32, &Device::Cpu)?;
/// let keys = Tensor::ones((2, 3, 5, 4), DType::F32, &Device::Cpu)?; // five new tokens of both rows
/// cache.append(&keys, &keys)?;
/// cache.truncate(1, 2)?;
/// assert_eq!(cache.lengths(), [5, 2]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
#[doc(alias("past_key_values", "DynamicCache", "layer_past"))]
pub struct KvCache {
    memory: KvMemory,
    /// Slots in row order.
    slots: Vec<SlotGuard>,
    lengths: Vec<usize>,
}

impl KvCache {
    /// Creates an empty cache with its own memory.
    ///
    /// # Errors
    /// If allocation fails or the device does not support the storage type.
    pub fn new(shape: KvCacheShape, dtype: impl Into<KvDType>, device: &Device) -> Result<Self> {
        let KvCacheShape { batch, num_heads, capacity, head_dim } = shape;
        let tokens = batch.saturating_mul(KvSlot::room_of(capacity));
        let memory = KvMemory::new(num_heads, head_dim, tokens, dtype, device)?;
        Self::with_slots(memory, &KvSlot::side_by_side(batch, capacity))
    }

    /// Creates a cache without rows in existing memory; [`KvCache::insert_row`] adds rows.
    pub fn in_memory(memory: &KvMemory) -> Self {
        Self { memory: memory.clone(), slots: Vec::new(), lengths: Vec::new() }
    }

    /// Creates a cache with one empty row in each of the given slots.
    fn with_slots(memory: KvMemory, slots: &[KvSlot]) -> Result<Self> {
        let slots = slots.iter().map(|slot| memory.claim(*slot)).collect::<Result<Vec<_>>>()?;
        Ok(Self { lengths: vec![0; slots.len()], memory, slots })
    }

    /// Number of cached tokens in each row.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Appends the keys and values of new tokens to each row, rounded to the storage type.
    ///
    /// # Shapes
    /// `keys` and `values` `(B, H, T, D)`.
    ///
    /// # Errors
    /// If the shapes do not match the cache, or a row would exceed its capacity. The cache is then unchanged.
    pub fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<()> {
        let (batch, num_heads, added, head_dim) = keys.dims4()?;
        self.expect(batch, num_heads, head_dim)?;
        self.expect_room(added)?;
        self.memory.write(&self.slots(), [keys, values], &self.lengths)?;
        self.lengths.iter_mut().for_each(|length| *length += added);
        Ok(())
    }

    /// Returns the keys and the values of all rows, `(B, H, S, D)` each.
    ///
    /// `S` is the length of the longest row; shorter rows are padded with zeros. If the memory has the layout
    /// of the CPU kernel, the result is an f32 copy. Otherwise, adjacent rows of equal length are returned as
    /// views of the memory.
    ///
    /// # Errors
    /// If the copy cannot be allocated.
    pub fn tensors(&self) -> Result<[Tensor; 2]> {
        let longest = self.longest();
        if self.lengths.iter().all(|length| *length == longest)
            && let Some(views) = self.views()?
        {
            return Ok(views);
        }
        let mut both = [Vec::new(), Vec::new()];
        for (slot, length) in self.slots.iter().zip(&self.lengths) {
            for (rows, held) in both.iter_mut().zip(self.memory.read(slot.place(), 0..*length)?) {
                rows.push(held.pad_with_zeros(TOKEN_DIM, 0, longest - length)?);
            }
        }
        let [keys, values] = both.map(|rows| Tensor::cat(&rows, BATCH_DIM));
        Ok([keys?, values?])
    }

    /// Returns views of the memory if it stores tensors and the rows are adjacent.
    ///
    /// After its own tokens, a shorter row contains leftovers from an earlier row, which may be NaN. Callers
    /// must not read them.
    pub(crate) fn views(&self) -> Result<Option<[Tensor; 2]>> {
        let Some([keys, values]) = self.memory.side_by_side(&self.slots())? else { return Ok(None) };
        let view = |memory: Tensor| memory.narrow(TOKEN_DIM, 0, self.longest());
        Ok(Some([view(keys)?, view(values)?]))
    }

    /// Memory slot of each row.
    pub fn slots(&self) -> Vec<KvSlot> {
        self.slots.iter().map(SlotGuard::place).collect()
    }

    /// Adds `tokens` to each row's length. Call it after a pass with [`Pass::at`](crate::Pass::at).
    ///
    /// # Errors
    /// If a row would exceed its capacity. The cache is then unchanged.
    pub fn advance(&mut self, tokens: usize) -> Result<()> {
        self.expect_room(tokens)?;
        self.lengths.iter_mut().for_each(|length| *length += tokens);
        Ok(())
    }

    /// Truncates `row` to its first `kept` tokens.
    ///
    /// # Errors
    /// If the row does not exist or has fewer than `kept` tokens.
    pub fn truncate(&mut self, row: usize, kept: usize) -> Result<()> {
        self.expect_rows(&[row])?;
        let held = self.lengths[row];
        if kept > held {
            return Err(AttentionError::Truncate { row, kept, held }.into());
        }
        self.lengths[row] = kept;
        Ok(())
    }

    /// Copies the given rows, in this order, into an independent cache.
    ///
    /// Several continuations can then share a prefix. Each copy has the same capacity as its source, and only
    /// the cached tokens are copied.
    ///
    /// # Errors
    /// If a row does not exist, or allocation fails.
    pub fn fork(&self, rows: &[usize]) -> Result<Self> {
        self.expect_rows(rows)?;
        let mut tokens = 0;
        let slot = |row: &usize| {
            let slot = KvSlot { start: tokens, ..self.slots[*row].place() };
            tokens += slot.room();
            slot
        };
        let slots: Vec<KvSlot> = rows.iter().map(slot).collect();
        let memory = &self.memory;
        let (num_heads, head_dim) = (memory.num_heads(), memory.head_dim());
        let memory = KvMemory::new(num_heads, head_dim, tokens, memory.dtype(), memory.device())?;
        let mut fork = Self::with_slots(memory, &slots)?;
        for (to, row) in rows.iter().enumerate() {
            fork.copy_row(to, self, *row, self.lengths[*row])?;
        }
        Ok(fork)
    }

    /// Replaces the tokens of `row` with the first `added` tokens of `source_row` in another cache.
    ///
    /// The source can be a prompt that was computed separately.
    ///
    /// # Errors
    /// If a row does not exist or has fewer tokens, the heads differ, or the tokens exceed the capacity. The
    /// cache is then unchanged.
    pub fn copy_row(&mut self, row: usize, source: &Self, source_row: usize, added: usize) -> Result<()> {
        self.expect_rows(&[row])?;
        source.expect_rows(&[source_row])?;
        self.expect(self.slots.len(), source.memory.num_heads(), source.memory.head_dim())?;
        let (held, to) = (source.lengths[source_row], self.slots[row].place());
        let capacity = to.capacity;
        if added > held {
            return Err(AttentionError::Truncate { row: source_row, kept: added, held }.into());
        }
        if added > capacity {
            return Err(AttentionError::CacheFull { past: 0, added, capacity }.into());
        }
        self.memory.copy(to, &source.memory, source.slots[source_row].place(), 0..added)?;
        self.lengths[row] = added;
        Ok(())
    }

    /// Inserts a row at index `row`, stored in a slot of this cache's memory; later rows move down.
    ///
    /// The row's first `length` tokens are the contents of the slot.
    ///
    /// # Errors
    /// If `row` is greater than the number of rows, the slot belongs to a different memory, or its capacity is
    /// less than `length`. The cache is then unchanged.
    pub fn insert_row(&mut self, row: usize, slot: SlotGuard, length: usize) -> Result<()> {
        if row > self.slots.len() {
            return Err(AttentionError::NoSuchRow { rows: vec![row], held: self.lengths.len() }.into());
        }
        if !self.memory.has(&slot) {
            return Err(AttentionError::OtherMemory.into());
        }
        let capacity = slot.place().capacity;
        if length > capacity {
            return Err(AttentionError::CacheFull { past: 0, added: length, capacity }.into());
        }
        self.slots.insert(row, slot);
        self.lengths.insert(row, length);
        Ok(())
    }

    /// Removes a row and returns its slot and its length; later rows move up.
    ///
    /// The slot keeps its contents.
    ///
    /// # Errors
    /// If the row does not exist.
    pub fn remove_row(&mut self, row: usize) -> Result<(SlotGuard, usize)> {
        self.expect_rows(&[row])?;
        Ok((self.slots.remove(row), self.lengths.remove(row)))
    }

    /// Calls `work` with a cache of only these rows, then restores all rows, even after an error.
    pub(crate) fn with_rows<R>(
        &mut self,
        rows: Range<usize>,
        work: impl FnOnce(&mut Self) -> Result<R>,
    ) -> Result<R> {
        let (slots, lengths) = (self.slots.drain(rows.clone()), self.lengths.drain(rows.clone()));
        let mut some =
            Self { memory: self.memory.clone(), slots: slots.collect(), lengths: lengths.collect() };
        let result = work(&mut some);
        self.slots.splice(rows.start..rows.start, some.slots);
        self.lengths.splice(rows.start..rows.start, some.lengths);
        result
    }

    /// Keeps only these rows, in this order and each at most once; releases the other slots.
    pub fn select_rows(&mut self, rows: &[usize]) {
        let mut held: Vec<_> = self.slots.drain(..).zip(self.lengths.drain(..)).map(Some).collect();
        (self.slots, self.lengths) = rows.iter().filter_map(|row| held.get_mut(*row)?.take()).unzip();
    }

    /// Memory that stores the rows.
    pub fn memory(&self) -> &KvMemory {
        &self.memory
    }

    /// Copies the tokens of row `from` to row `to`; the first `shared` tokens are already equal.
    ///
    /// # Errors
    /// If a row does not exist, or the tokens exceed the capacity. The cache is then unchanged.
    pub fn copy_within(&mut self, from: usize, to: usize, shared: usize) -> Result<()> {
        self.expect_rows(&[from, to])?;
        let (length, place) = (self.lengths[from], self.slots[to].place());
        let capacity = place.capacity;
        if length > capacity {
            return Err(AttentionError::CacheFull { past: 0, added: length, capacity }.into());
        }
        let shared = shared.min(length).min(self.lengths[to]);
        self.memory.copy(place, &self.memory, self.slots[from].place(), shared..length)?;
        self.lengths[to] = length;
        Ok(())
    }

    /// Rejects keys and values whose shape does not match the cache.
    pub(crate) fn expect(&self, batch: usize, num_heads: usize, head_dim: usize) -> Result<()> {
        let expected = (self.slots.len(), self.memory.num_heads(), self.memory.head_dim());
        let found = (batch, num_heads, head_dim);
        if found != expected {
            return Err(AttentionError::CacheShape { expected, found }.into());
        }
        Ok(())
    }

    fn expect_rows(&self, rows: &[usize]) -> Result<()> {
        if rows.iter().any(|row| *row >= self.lengths.len()) {
            return Err(AttentionError::NoSuchRow { rows: rows.to_vec(), held: self.lengths.len() }.into());
        }
        Ok(())
    }

    /// Returns an error if any row lacks the capacity for `added` more tokens.
    fn expect_room(&self, added: usize) -> Result<()> {
        let mut rows = self.lengths.iter().zip(self.slots.iter().map(|slot| slot.place().capacity));
        match rows.find(|(past, capacity)| past.saturating_add(added) > *capacity) {
            Some((past, capacity)) => Err(AttentionError::CacheFull { past: *past, added, capacity }.into()),
            None => Ok(()),
        }
    }

    fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    #[test]
    fn caches_in_one_memory_never_overlap() {
        let memory = KvMemory::new(3, 4, 64, DType::F32, &Device::Cpu).unwrap();
        let mut caches = [KvCache::in_memory(&memory), KvCache::in_memory(&memory)];
        for (row, cache) in caches.iter_mut().enumerate() {
            cache.insert_row(0, memory.take(20).unwrap(), 0).unwrap();
            let keys = Tensor::full(row as f32 + 1.0, (1, 3, 20, 4), &Device::Cpu).unwrap();
            cache.append(&keys, &keys).unwrap();
        }
        for (row, cache) in caches.iter().enumerate() {
            let [keys, _] = cache.tensors().unwrap();
            let values = keys.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert!(values.iter().all(|value| *value == row as f32 + 1.0), "row {row}");
            assert!(memory.claim(cache.slots()[0]).is_err(), "the slot is in use");
        }
        assert!(memory.take(1).is_none());
        let (slot, length) = caches[0].remove_row(0).unwrap();
        assert_eq!((slot.place().start, length, memory.tokens_taken()), (0, 20, 64));
        let other = KvMemory::new(3, 4, 64, DType::F32, &Device::Cpu).unwrap();
        let error = KvCache::in_memory(&other).insert_row(0, slot, 20).unwrap_err().to_string();
        assert!(error.contains("the slot belongs to a different `KvMemory`"), "{error}");
        assert_eq!(memory.tokens_taken(), 32, "the slot was released");
    }
}
