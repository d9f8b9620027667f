//! The keys and values of the tokens that a layer has seen, so that a step computes only the new ones.
//!
//! The memory is allocated once, and each row of the batch has a slot of it. Each row has its own length, and that length is
//! the only source of positions: rows of different lengths need no padding token. Rows come and go without a copy of the
//! others. The tensors are written in place, so a cache is for inference; training runs without one.

use std::ops::Range;

use candle_core::{Device, Result, Tensor};
use candle_gpt2_arithmetic::KvSlot;
use candle_gpt2_kernels::{KvDType, KvMemory, TakenSlot};

use crate::AttentionError;

/// Axis of the batch in a `(B, H, T, D)` tensor.
const BATCH_DIM: usize = 0;
/// Axis of the tokens in a `(B, H, T, D)` tensor.
const TOKEN_DIM: usize = 2;

/// The sizes of a [`KvCache`] whose rows have the same room. What [`KvCache::new`] takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvCacheShape {
    /// Rows of the batch.
    pub batch: usize,
    /// Heads of the layer.
    pub num_heads: usize,
    /// Tokens that each row can hold.
    pub capacity: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// Keys and values of one attention layer, preallocated, with a slot and a length for each row.
///
/// It is for inference: keys and values are written in place, so no gradient goes through it to the layers that made them.
///
/// Not `Clone`: candle's tensors share their memory when cloned. [`KvCache::fork`] copies.
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
    /// Those of the rows, in their order.
    slots: Vec<TakenSlot>,
    lengths: Vec<usize>,
}

impl KvCache {
    /// An empty cache in memory of its own.
    ///
    /// # Errors
    /// When the memory cannot be allocated on the device.
    pub fn new(shape: KvCacheShape, dtype: impl Into<KvDType>, device: &Device) -> Result<Self> {
        let KvCacheShape { batch, num_heads, capacity, head_dim } = shape;
        let tokens = batch.saturating_mul(KvSlot::room_of(capacity));
        let memory = KvMemory::new(num_heads, head_dim, tokens, dtype, device)?;
        Self::with_slots(memory, &KvSlot::side_by_side(batch, capacity))
    }

    /// A cache without rows, for [`KvCache::insert_row`].
    pub fn in_memory(memory: &KvMemory) -> Self {
        Self { memory: memory.clone(), slots: Vec::new(), lengths: Vec::new() }
    }

    /// An empty cache with rows in these slots of a memory.
    fn with_slots(memory: KvMemory, slots: &[KvSlot]) -> Result<Self> {
        let slots = slots.iter().map(|slot| memory.claim(*slot)).collect::<Result<Vec<_>>>()?;
        Ok(Self { lengths: vec![0; slots.len()], memory, slots })
    }

    /// Tokens held by each row.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Adds the keys and values of new tokens after those of each row, rounded to the type of the cache.
    ///
    /// # Shapes
    /// `keys` and `values` `(B, H, T, D)`.
    ///
    /// # Errors
    /// When the shapes are not those of the cache, or a row would pass its room; the cache is then unchanged.
    pub fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<()> {
        let (batch, num_heads, added, head_dim) = keys.dims4()?;
        self.expect(batch, num_heads, head_dim)?;
        self.expect_room(added)?;
        self.memory.write(&self.slots(), [keys, values], &self.lengths)?;
        self.lengths.iter_mut().for_each(|length| *length += added);
        Ok(())
    }

    /// The keys and the values of all rows, `(B, H, S, D)` each with `S` the longest row. A shorter row has zeros after its own
    /// tokens. On a CPU they are a copy in f32; elsewhere rows of one length that lie side by side are a view of the memory.
    ///
    /// # Errors
    /// When the copy cannot be allocated.
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

    /// The same as views of the memory, if it is made of tensors and the rows are adjacent. After its own tokens a shorter row has
    /// what an earlier row left there, which may be NaN: for callers that do not read it.
    pub(crate) fn views(&self) -> Result<Option<[Tensor; 2]>> {
        let Some([keys, values]) = self.memory.side_by_side(&self.slots())? else { return Ok(None) };
        let view = |memory: Tensor| memory.narrow(TOKEN_DIM, 0, self.longest());
        Ok(Some([view(keys)?, view(values)?]))
    }

    /// Where the rows are in the memory.
    pub fn slots(&self) -> Vec<KvSlot> {
        self.slots.iter().map(TakenSlot::place).collect()
    }

    /// Counts the tokens of each row that a pass at positions in memory has written ([`Pass::at`](crate::Pass::at)).
    ///
    /// # Errors
    /// When a row would pass its room; the cache is then unchanged.
    pub fn advance(&mut self, tokens: usize) -> Result<()> {
        self.expect_room(tokens)?;
        self.lengths.iter_mut().for_each(|length| *length += tokens);
        Ok(())
    }

    /// Forgets the tokens of `row` after the first `kept`.
    ///
    /// # Errors
    /// When the row holds fewer than `kept` tokens.
    pub fn truncate(&mut self, row: usize, kept: usize) -> Result<()> {
        let held = self.lengths.get(row).copied().unwrap_or(0);
        if kept > held {
            return Err(AttentionError::Truncate { row, kept, held }.into());
        }
        if let Some(length) = self.lengths.get_mut(row) {
            *length = kept;
        }
        Ok(())
    }

    /// An independent copy of the given rows in this order, with room for as many tokens as they have room for, so that
    /// several continuations share a prefix. Only the tokens that are held are copied.
    ///
    /// # Errors
    /// When a row does not exist, or the memory cannot be allocated.
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

    /// Replaces the tokens of `row` by the first `added` of a row of another cache, such as a prompt that was computed alone.
    ///
    /// # Errors
    /// When a row does not exist or holds fewer, the heads are others, or the tokens do not fit; the cache is then unchanged.
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

    /// Adds a row as number `row`, in a slot of the same memory; those from `row` on move down. Its first `length` tokens are what
    /// the slot holds.
    ///
    /// # Errors
    /// When there are fewer rows than `row`, the slot is another memory's, or has no room for `length` tokens; the cache is then
    /// unchanged.
    pub fn insert_row(&mut self, row: usize, slot: TakenSlot, length: usize) -> Result<()> {
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

    /// Takes a row out of the cache; its slot keeps what it holds. The rows after it move up.
    ///
    /// # Errors
    /// When the row does not exist.
    pub fn remove_row(&mut self, row: usize) -> Result<(TakenSlot, usize)> {
        self.expect_rows(&[row])?;
        Ok((self.slots.remove(row), self.lengths.remove(row)))
    }

    /// What `work` makes of a cache of these rows alone; after an error too this cache has all its rows.
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

    /// Gives the cache these of its rows, in this order; each at most once. The slots of the others are free.
    pub fn select_rows(&mut self, rows: &[usize]) {
        let mut held: Vec<_> = self.slots.drain(..).zip(self.lengths.drain(..)).map(Some).collect();
        (self.slots, self.lengths) = rows.iter().filter_map(|row| held.get_mut(*row)?.take()).unzip();
    }

    /// The memory that holds the rows.
    pub fn memory(&self) -> &KvMemory {
        &self.memory
    }

    /// Copies the tokens of row `from` to row `to`, whose first `shared` tokens are the same already.
    ///
    /// # Errors
    /// When a row does not exist, or the tokens do not fit; the cache is then unchanged.
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

    /// Refuses keys and values of another shape than the cache's.
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

    /// Refuses more tokens than a row has room for.
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
    fn rows_of_caches_in_one_memory_never_overlap() {
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
            assert!(memory.claim(cache.slots()[0]).is_err(), "it has an owner");
        }
        assert!(memory.take(1).is_none());
        let (slot, length) = caches[0].remove_row(0).unwrap();
        assert_eq!((slot.place().start, length, memory.tokens_taken()), (0, 20, 64));
        let other = KvMemory::new(3, 4, 64, DType::F32, &Device::Cpu).unwrap();
        let refusal = KvCache::in_memory(&other).insert_row(0, slot, 20).unwrap_err().to_string();
        assert!(refusal.contains("the slot was taken from another memory"), "{refusal}");
        assert_eq!(memory.tokens_taken(), 32, "and it was given back");
    }
}
