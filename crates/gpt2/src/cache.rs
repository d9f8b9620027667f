//! KV caches of all blocks, and the pool that they share.

use candle_core::{Device, Result, Tensor};
use candle_gpt2_arithmetic::KvSlot;
use candle_gpt2_attention::KvCache;
use candle_gpt2_kernels::{KvDType, KvMemory, SlotGuard};

use crate::steps::Steps;
use crate::{Gpt2Config, ModelError};

/// Pool of key and value storage for a fixed number of tokens in all blocks.
///
/// Caches take slots for their rows from the pool and return them. Clones share the same memory.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_gpt2::{Gpt2Config, KvPool};
///
/// let config = Gpt2Config { n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// let pool = KvPool::new(&config, 64, DType::F32, &Device::Cpu)?;
/// let cache = pool.cache(2, 20).expect("two rows of 32 tokens fit");
/// assert_eq!(pool.tokens_in_use(), 64);
/// assert!(pool.cache(1, 1).is_none());
/// drop(cache);
/// assert_eq!(pool.tokens_in_use(), 0);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct KvPool {
    layers: Vec<KvMemory>,
}

impl KvPool {
    /// Allocates storage for `tokens` tokens, rounded up to a multiple of 16.
    ///
    /// On a CPU, memory that is never written costs nothing. Each row also takes a multiple of 16 tokens;
    /// see [`KvSlot::room`].
    ///
    /// # Errors
    /// If allocation fails on the device.
    pub fn new(
        config: &Gpt2Config,
        tokens: usize,
        dtype: impl Into<KvDType>,
        device: &Device,
    ) -> Result<Self> {
        let dtype = dtype.into();
        let memory = |_| KvMemory::new(config.n_head, config.head_dim(), tokens, dtype, device);
        let layers = (0..config.n_layer).map(memory).collect::<Result<_>>()?;
        Ok(Self { layers })
    }

    /// Creates a cache without rows, to fill with [`Gpt2Cache::insert`].
    pub fn empty_cache(&self) -> Gpt2Cache {
        let layers = self.layers.iter().map(KvCache::in_memory).collect();
        Gpt2Cache { layers, pool: self.clone(), steps: Steps::default(), is_consistent: true }
    }

    /// Creates an empty cache for `batch` rows of up to `capacity` tokens each.
    ///
    /// Returns `None` if a row does not fit into one contiguous slot.
    pub fn cache(&self, batch: usize, capacity: usize) -> Option<Gpt2Cache> {
        let mut cache = self.empty_cache();
        (0..batch).try_for_each(|_| cache.add_row(capacity).map(|_| ()).ok())?;
        Some(cache)
    }

    /// Capacity in tokens.
    pub fn tokens(&self) -> usize {
        self.layers.last().map_or(0, KvMemory::tokens)
    }

    /// Number of tokens in slots that are in use.
    pub fn tokens_in_use(&self) -> usize {
        self.layers.last().map_or(0, KvMemory::tokens_taken)
    }

    /// Takes the first free contiguous slot, at the same location in every layer.
    ///
    /// The slots are in layer order. The last layer decides, because slots are released in layer order. So a
    /// location that is free in the last layer is free in all layers.
    fn take(&self, capacity: usize) -> Option<Vec<SlotGuard>> {
        let (last, others) = self.layers.split_last()?;
        let decided = last.take(capacity)?;
        let claimed = others.iter().map(|memory| memory.claim(decided.place()).ok());
        let mut slots = claimed.collect::<Option<Vec<_>>>()?;
        slots.push(decided);
        Some(slots)
    }

    fn is_same(&self, other: &Self) -> bool {
        let memories = self.layers.last().zip(other.layers.last());
        memories.is_some_and(|(memory, other)| memory.is_same(other))
    }
}

/// KV cache of a model: one [`KvCache`] per block.
///
/// The length of a row is the position of its next token. The cache is for inference, and no gradient flows
/// through it.
///
/// ```
/// use candle_core::{D, DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, LogitsFor, Pass};
///
/// let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// let model = Gpt2LMHeadModel::load(&sizes, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// let mut cache = model.new_cache(1, 8)?;
/// let mut ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?; // the prompt, then one token at a time
/// for _ in 0..5 {
///     let logits = model.forward_with(&ids, LogitsFor::LastToken, Some(&mut cache), &mut Pass::inference())?;
///     ids = logits.argmax(D::Minus1)?; // (1, 1)
/// }
/// assert_eq!(cache.lengths(), [7]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Gpt2Cache {
    layers: Vec<KvCache>,
    pool: KvPool,
    /// Recorded steps on NVIDIA GPUs; they read and write these layers.
    pub(crate) steps: Steps,
    /// Whether all layers are consistent: no change has failed partway.
    is_consistent: bool,
}

impl Gpt2Cache {
    /// Creates an empty cache with its own memory, for `batch` rows of up to `capacity` tokens each.
    ///
    /// # Errors
    /// If allocation fails on the device.
    pub fn new(
        config: &Gpt2Config,
        batch: usize,
        capacity: usize,
        dtype: impl Into<KvDType>,
        device: &Device,
    ) -> Result<Self> {
        let no_room = || ModelError::NoCacheRoom { tokens: batch.saturating_mul(capacity) };
        let tokens = batch.checked_mul(KvSlot::room_of(capacity)).ok_or_else(no_room)?;
        let pool = KvPool::new(config, tokens, dtype, device)?;
        Ok(pool.cache(batch, capacity).ok_or_else(no_room)?)
    }

    /// Number of cached tokens in each row.
    pub fn lengths(&self) -> &[usize] {
        self.layers.first().map_or(&[], KvCache::lengths)
    }

    /// Removes the tokens of `row` after the first `kept`.
    ///
    /// # Errors
    /// If the row does not exist or has fewer than `kept` tokens.
    pub fn truncate(&mut self, row: usize, kept: usize) -> Result<()> {
        let mut is_first = true;
        self.in_each_layer(|layer| {
            // If passes stop early, the layers from the stopping block onward are empty.
            let is_empty = !std::mem::take(&mut is_first) && layer.lengths().get(row) == Some(&0);
            layer.truncate(row, if is_empty { 0 } else { kept })
        })
    }

    /// Copies the selected rows, in this order, to a new cache with its own memory.
    ///
    /// # Errors
    /// If a row does not exist, or allocation fails.
    pub fn fork(&self, rows: &[usize]) -> Result<Self> {
        self.check_consistent()?;
        let layers = self.layers.iter().map(|layer| layer.fork(rows)).collect::<Result<Vec<_>>>()?;
        let pool = KvPool { layers: layers.iter().map(|layer| layer.memory().clone()).collect() };
        Ok(Self { layers, pool, steps: Steps::default(), is_consistent: true })
    }

    /// Replaces `row` with the first `tokens` tokens of a row in another cache.
    ///
    /// For example, the source can be a prompt that was prefilled separately.
    ///
    /// # Errors
    /// If a row does not exist, the source row has fewer tokens, the tokens do not fit, or the caches belong
    /// to different models.
    pub fn copy_row(&mut self, row: usize, source: &Self, source_row: usize, tokens: usize) -> Result<()> {
        if self.layers.len() != source.layers.len() {
            let (expected, found) = (self.layers.len(), source.layers.len());
            return Err(ModelError::CacheLayers { expected, found }.into());
        }
        source.check_consistent()?;
        let mut sources = source.layers.iter();
        self.in_each_layer(|layer| match sources.next() {
            Some(source) => layer.copy_row(row, source, source_row, tokens),
            None => Ok(()),
        })
    }

    /// Moves the rows of another cache of the same [`KvPool`] into this cache, without copying.
    ///
    /// They are inserted before `row`, or at the end if `row` is the number of rows.
    ///
    /// # Errors
    /// If the caches do not share a pool, or `row` exceeds the number of rows; `self` is then unchanged.
    pub fn insert(&mut self, row: usize, mut other: Self) -> Result<()> {
        self.check_consistent()?;
        other.check_consistent()?;
        if !self.pool.is_same(&other.pool) {
            return Err(ModelError::OtherPool.into());
        }
        if row > self.lengths().len() {
            return Err(ModelError::NoSuchRow { row, held: self.lengths().len() }.into());
        }
        self.steps = Steps::default();
        let mut others = other.layers.iter_mut();
        self.in_each_layer(|layer| {
            let Some(other) = others.next() else { return Ok(()) };
            for row in row..row + other.lengths().len() {
                let (slot, length) = other.remove_row(0)?;
                layer.insert_row(row, slot, length)?;
            }
            Ok(())
        })
    }

    /// Number of this cache's rows that precede the rows of `other` in their shared memory.
    pub fn rows_before(&self, other: &Self) -> usize {
        let start = other.slots().iter().map(|slot| slot.start).min().unwrap_or(0);
        self.slots().iter().filter(|slot| slot.start < start).count()
    }

    /// Moves a row to a new cache of the same pool, without copying; later rows move up.
    ///
    /// # Errors
    /// If the row does not exist.
    pub fn take(&mut self, row: usize) -> Result<Self> {
        self.check_consistent()?;
        let mut taken = self.pool.empty_cache();
        let mut others = taken.layers.iter_mut();
        self.in_each_layer(|layer| {
            let (slot, length) = layer.remove_row(row)?;
            others.next().map_or(Ok(()), |other| other.insert_row(0, slot, length))
        })?;
        self.steps = Steps::default();
        Ok(taken)
    }

    /// Removes a row; the last row takes its index.
    ///
    /// The last row's tokens are copied to the slot of the removed row. So adjacent rows of the same capacity
    /// stay adjacent.
    ///
    /// # Errors
    /// If the row does not exist, or its slot is too small for the last row.
    pub fn swap_remove(&mut self, row: usize) -> Result<()> {
        let rows = self.lengths().len();
        let last = rows.checked_sub(1).filter(|last| row <= *last);
        let last = last.ok_or(ModelError::NoSuchRow { row, held: rows })?;
        if row < last {
            self.in_each_layer(|layer| layer.copy_within(last, row, 0))?;
        }
        self.take(last).map(drop)
    }

    /// Replaces the rows with those at the indices `sources`, which may repeat or omit rows.
    ///
    /// The first occurrence of a source stays in its slot. Further occurrences are copied to slots of omitted
    /// rows, or to new slots of the pool.
    ///
    /// `shared(a, b)` returns the number of leading tokens that two rows are known to share, or 0 if unknown.
    /// These tokens are not copied.
    ///
    /// # Errors
    /// If a row does not exist; the cache is then unchanged. If the pool has no capacity for another row;
    /// some rows may then be overwritten, and the cache rejects all further use.
    pub fn reorder(&mut self, sources: &[usize], shared: impl Fn(usize, usize) -> usize) -> Result<()> {
        self.check_consistent()?;
        let rows = self.lengths().len();
        if let Some(missing) = sources.iter().find(|source| **source >= rows) {
            return Err(ModelError::NoSuchRow { row: *missing, held: rows }.into());
        }
        self.is_consistent = false;
        self.rearrange(sources, shared)?;
        self.is_consistent = true;
        Ok(())
    }

    /// Rearranges existing rows; after an error, the contents are undefined.
    fn rearrange(&mut self, sources: &[usize], shared: impl Fn(usize, usize) -> usize) -> Result<()> {
        let rows = self.lengths().len();
        let mut free_rows: Vec<usize> = (0..rows).filter(|row| !sources.contains(row)).collect();
        // Slot index for each new row; the first occurrence of a source keeps its slot.
        let mut slot_rows = Vec::with_capacity(sources.len());
        for (index, source) in sources.iter().enumerate() {
            if !sources[..index].contains(source) {
                slot_rows.push(*source);
                continue;
            }
            let slots = self.slots();
            let capacity = slots[*source].capacity;
            let has_room = |row: &usize| slots[*row].capacity >= capacity;
            let best = free_rows.iter().copied().filter(has_room).max_by_key(|row| shared(*row, *source));
            let (target, known) = match best {
                Some(row) => (row, shared(row, *source)),
                None => (self.add_row(capacity)?, 0),
            };
            free_rows.retain(|row| *row != target);
            self.layers.iter_mut().try_for_each(|layer| layer.copy_within(*source, target, known))?;
            slot_rows.push(target);
        }
        let keeps_slots = slot_rows.iter().copied().eq(0..self.lengths().len());
        // A recorded step computes a fixed number of rows in fixed slots.
        if !keeps_slots || slot_rows.len() != rows {
            self.steps = Steps::default();
        }
        if !keeps_slots {
            self.layers.iter_mut().for_each(|layer| layer.select_rows(&slot_rows));
        }
        Ok(())
    }

    /// Adds an empty row and returns its index.
    fn add_row(&mut self, capacity: usize) -> Result<usize> {
        let slots = self.pool.take(capacity).ok_or(ModelError::NoCacheRoom { tokens: capacity })?;
        let row = self.lengths().len();
        let layers = self.layers.iter_mut().zip(slots);
        layers.into_iter().try_for_each(|(layer, slot)| layer.insert_row(row, slot, 0))?;
        Ok(row)
    }

    /// Applies a change to all layers.
    ///
    /// If the first layer fails, the cache is unchanged. This catches every change that all layers
    /// would reject. If a later layer fails, the cache becomes unusable.
    fn in_each_layer(&mut self, mut change: impl FnMut(&mut KvCache) -> Result<()>) -> Result<()> {
        self.check_consistent()?;
        let Some((first, others)) = self.layers.split_first_mut() else { return Ok(()) };
        change(first)?;
        self.is_consistent = false;
        others.iter_mut().try_for_each(change)?;
        self.is_consistent = true;
        Ok(())
    }

    /// Rejects a cache in which a change failed partway.
    pub(crate) fn check_consistent(&self) -> Result<()> {
        if self.is_consistent { Ok(()) } else { Err(ModelError::BrokenCache.into()) }
    }

    /// Slots of the rows, which are the same in every layer.
    fn slots(&self) -> Vec<KvSlot> {
        self.layers.first().map_or_else(Vec::new, KvCache::slots)
    }

    /// Number of tokens that still fit into each row.
    pub fn free_tokens(&self) -> Vec<usize> {
        self.slots().iter().zip(self.lengths()).map(|(slot, length)| slot.capacity - length).collect()
    }

    /// Smallest capacity of a row, in tokens.
    pub(crate) fn capacity(&self) -> usize {
        self.slots().iter().map(|slot| slot.capacity).min().unwrap_or(0)
    }

    /// Adds `tokens` to each row's length, after a pass with [`Pass::at`](crate::Pass::at).
    ///
    /// # Errors
    /// If a row would exceed its capacity; the cache is then unchanged.
    pub fn advance(&mut self, tokens: usize) -> Result<()> {
        self.in_each_layer(|layer| layer.advance(tokens))
    }

    /// Runs `compute` with a cache, and restores the cache's lengths after an error.
    pub(crate) fn restoring(
        mut cache: Option<&mut Self>,
        compute: impl FnOnce(Option<&mut Self>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        cache.as_deref().map_or(Ok(()), Self::check_consistent)?;
        let past_lengths = cache.as_deref().map(|cache| cache.lengths().to_vec());
        let computed = compute(cache.as_deref_mut());
        if let (Err(_), Some(cache), Some(past_lengths)) = (&computed, cache, past_lengths) {
            // Some blocks may have more tokens than others.
            past_lengths.into_iter().enumerate().try_for_each(|(row, length)| cache.truncate(row, length))?;
        }
        computed
    }

    /// Checks that a pass ending before block `end` of `n_layer` can continue this cache.
    ///
    /// The layers that the pass fills must have the same tokens, and the other layers must be empty.
    pub(crate) fn expect_filled_to(&self, end: usize, n_layer: usize) -> Result<()> {
        if self.layers.len() != n_layer {
            return Err(ModelError::CacheLayers { expected: n_layer, found: self.layers.len() }.into());
        }
        let (filled, others) = self.layers.split_at(end);
        let is_filled = filled.iter().all(|layer| layer.lengths() == self.lengths())
            && others.iter().flat_map(KvCache::lengths).all(|length| *length == 0);
        if end == 0 || !is_filled { Err(ModelError::StopWithCache.into()) } else { Ok(()) }
    }

    /// Cache of block `index`.
    pub(crate) fn layer(&mut self, index: usize) -> Option<&mut KvCache> {
        self.layers.get_mut(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::Step;

    fn pool(tokens: usize) -> KvPool {
        let json = r#"{"model_type": "gpt2", "vocab_size": 11, "n_positions": 8, "n_embd": 6, "n_layer": 2, "n_head": 3}"#;
        let config = Gpt2Config::from_json(json).unwrap();
        KvPool::new(&config, tokens, KvDType::F32, &Device::Cpu).unwrap()
    }

    fn start(cache: &Gpt2Cache) -> usize {
        cache.slots()[0].start
    }

    #[test]
    fn slots_are_allocated_first_fit_and_released() {
        // The pool has ten panels of 16 tokens, and each row takes whole panels.
        let pool = pool(160);
        let (first, second) = (pool.cache(1, 64).unwrap(), pool.cache(1, 33).unwrap());
        assert_eq!((start(&first), start(&second), pool.tokens_in_use()), (0, 64, 112));
        assert!(pool.cache(1, 49).is_none(), "48 tokens are free");
        drop(first);
        assert!(pool.cache(1, 65).is_none(), "64 and 48 tokens are free, but not contiguous");
        assert!(pool.cache(3, 40).is_none(), "two of three rows fit");
        assert_eq!(pool.tokens_in_use(), 48, "the slots of both rows were released");
        let third = pool.cache(2, 32).unwrap();
        assert_eq!((start(&third), pool.tokens_in_use()), (0, 112));
        assert!(pool.cache(2, usize::MAX / 2).is_none());
        assert!(pool.cache(1, usize::MAX).is_none());
        assert_eq!(pool.cache(3, 0).unwrap().lengths(), [0; 3]);
    }

    #[test]
    fn rows_move_between_caches_of_one_pool() {
        let elsewhere = pool(16).cache(1, 3).unwrap();
        let pool = pool(64);
        let mut rows = pool.cache(3, 3).unwrap();
        let middle = rows.take(1).unwrap();
        assert_eq!((start(&middle), rows.lengths().len(), pool.tokens_in_use()), (16, 2, 48));
        rows.insert(1, middle).unwrap();
        let starts: Vec<usize> = rows.slots().iter().map(|slot| slot.start).collect();
        assert_eq!(starts, [0, 16, 32]);
        assert!(rows.take(3).is_err());
        assert!(rows.insert(3, elsewhere).is_err(), "another pool");
        let first = rows.take(0).unwrap();
        assert_eq!((rows.rows_before(&first), first.rows_before(&rows)), (0, 1));
        rows.insert(2, first).unwrap();
        let first = rows.take(2).unwrap();
        assert!(rows.insert(3, first).is_err(), "index 3 is past the end of two rows");
        assert_eq!(
            (rows.lengths().len(), pool.tokens_in_use()),
            (2, 32),
            "slots that were not inserted were released"
        );
        drop(rows.take(0).unwrap());
        assert_eq!(pool.tokens_in_use(), 16);
        let mut rows = pool.cache(3, 3).unwrap();
        rows.swap_remove(0).unwrap();
        let starts: Vec<usize> = rows.slots().iter().map(|slot| slot.start).collect();
        assert_eq!(starts, [0, 16], "the last row took the slot of the first");
        rows.swap_remove(1).unwrap();
        assert!(rows.swap_remove(1).is_err());
    }

    /// Recorded steps compute a fixed number of rows in fixed slots.
    #[test]
    fn changed_rows_reset_the_recording() {
        const COUNTED: usize = 1;
        type Change = fn(&mut Gpt2Cache) -> Result<()>;

        /// Applies `change` to a cache of `rows` rows and returns the number of counted steps.
        fn counted_after(rows: usize, change: Change) -> usize {
            let mut cache = pool(160).cache(rows, 16).unwrap();
            cache.advance(2).unwrap();
            *cache.steps.of_mut(1).unwrap() = Step::Counted(COUNTED);
            change(&mut cache).unwrap();
            match cache.steps.of(1) {
                Some(Step::Counted(steps)) => *steps,
                other => panic!("expected counted steps, found {other:?}"),
            }
        }

        let resetting: [(&str, usize, Change); 8] = [
            ("insert", 1, |cache| {
                let other = cache.pool.cache(1, 16).unwrap();
                cache.insert(1, other)
            }),
            ("take the last row", 2, |cache| cache.take(1).map(drop)),
            ("swap_remove the first row", 2, |cache| cache.swap_remove(0)),
            ("swap_remove the last row", 2, |cache| cache.swap_remove(1)),
            ("swap rows", 2, |cache| cache.reorder(&[1, 0], |_, _| 0)),
            ("drop a row", 2, |cache| cache.reorder(&[0], |_, _| 0)),
            ("repeat the only row", 1, |cache| cache.reorder(&[0, 0], |_, _| 0)),
            ("repeat a row of two", 2, |cache| cache.reorder(&[0, 1, 1], |_, _| 0)),
        ];
        for (what, rows, change) in resetting {
            assert_eq!(counted_after(rows, change), 0, "{what}");
        }
        let keeping: [(&str, usize, Change); 6] = [
            ("truncate", 2, |cache| cache.truncate(0, 1)),
            ("advance", 2, |cache| cache.advance(1)),
            ("copy a row", 2, |cache| {
                let mut source = cache.pool.cache(1, 16).unwrap();
                source.advance(1)?;
                cache.copy_row(0, &source, 0, 1)
            }),
            ("fork", 2, |cache| cache.fork(&[1]).map(drop)),
            ("keep the order", 2, |cache| cache.reorder(&[0, 1], |_, _| 0)),
            ("overwrite a row", 2, |cache| cache.reorder(&[0, 0], |_, _| 0)),
        ];
        for (what, rows, change) in keeping {
            assert_eq!(counted_after(rows, change), COUNTED, "{what}");
        }
    }

    #[test]
    fn partially_changed_cache_rejects_further_use() {
        let pool = pool(48);
        let mut rows = pool.cache(2, 16).unwrap();
        assert!(rows.reorder(&[0, 2], |_, _| 0).is_err(), "row 2 is out of range");
        rows.reorder(&[1, 0], |_, _| 0).unwrap();
        let _rest = pool.cache(1, 16).unwrap();
        let out_of_memory = rows.reorder(&[0, 0, 1], |_, _| 0).unwrap_err().to_string();
        assert!(
            out_of_memory.starts_with("no memory left for the keys and values of 16 more tokens"),
            "{out_of_memory}"
        );
        let other = pool.empty_cache();
        for (what, result) in [
            ("truncate", rows.truncate(0, 0)),
            ("fork", rows.fork(&[0]).map(drop)),
            ("copy_row from", pool.empty_cache().copy_row(0, &rows, 0, 0)),
            ("copy_row into", rows.copy_row(0, &other, 0, 0)),
            ("insert", rows.insert(0, other)),
            ("take", rows.take(0).map(drop)),
            ("swap_remove", rows.swap_remove(0)),
            ("reorder", rows.reorder(&[0], |_, _| 0)),
            ("advance", rows.advance(1)),
            ("insert into another", pool.empty_cache().insert(0, rows)),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.starts_with("an earlier change to this cache failed partway"), "{what}: {error}");
        }
    }

    #[test]
    fn rejected_change_leaves_the_cache_usable() {
        let pool = pool(48);
        let (mut rows, other) = (pool.cache(2, 16).unwrap(), self::pool(16).cache(1, 16).unwrap());
        assert!(rows.truncate(0, 1).is_err() && rows.truncate(2, 1).is_err());
        assert!(rows.copy_row(0, &other, 0, 1).is_err() && rows.copy_row(2, &other, 0, 0).is_err());
        assert!(rows.take(2).is_err() && rows.swap_remove(2).is_err() && rows.fork(&[2]).is_err());
        rows.swap_remove(0).unwrap();
        assert_eq!((rows.lengths().len(), pool.tokens_in_use()), (1, 16));
    }
}
