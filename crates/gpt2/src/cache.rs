//! The key-value caches of all blocks, and the memory that they share.

use candle_core::{Device, Result, Tensor};
use candle_gpt2_arithmetic::KvSlot;
use candle_gpt2_attention::KvCache;
use candle_gpt2_kernels::{KvDType, KvMemory, TakenSlot};

use crate::steps::Steps;
use crate::{Gpt2Config, ModelError};

/// Memory for the keys and values of a number of tokens in all blocks, of which caches take and give back what their rows
/// need. A clone is the same memory.
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
    /// Memory for `tokens` tokens, and for what is missing to a multiple of 16. On a CPU it is there from the start and takes room
    /// once it is used. Each row takes a multiple of 16 too: [`KvSlot::room`].
    ///
    /// # Errors
    /// When it cannot be allocated on the device.
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

    /// A cache without rows, for [`Gpt2Cache::insert`].
    pub fn empty_cache(&self) -> Gpt2Cache {
        let layers = self.layers.iter().map(KvCache::in_memory).collect();
        Gpt2Cache { layers, pool: self.clone(), steps: Steps::default(), is_whole: true }
    }

    /// An empty cache for `batch` rows of up to `capacity` tokens each; `None` if there is no room for a row in one piece.
    pub fn cache(&self, batch: usize, capacity: usize) -> Option<Gpt2Cache> {
        let mut cache = self.empty_cache();
        (0..batch).try_for_each(|_| cache.add_row(capacity).map(|_| ()).ok())?;
        Some(cache)
    }

    /// Tokens that there is memory for.
    pub fn tokens(&self) -> usize {
        self.layers.last().map_or(0, KvMemory::tokens)
    }

    /// Tokens of the slots in use.
    pub fn tokens_in_use(&self) -> usize {
        self.layers.last().map_or(0, KvMemory::tokens_taken)
    }

    /// The first room in one piece: the same slot of every layer, in their order.
    ///
    /// The last layer decides. Slots are given back in the order of the layers, so a place that is free there is free in all of
    /// them.
    fn take(&self, capacity: usize) -> Option<Vec<TakenSlot>> {
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

/// One [`KvCache`] for each block. The rows' lengths are the positions of their next tokens. It is for inference: no gradient goes through
/// it.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, LogitsFor, Pass};
///
/// let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// let model = Gpt2LMHeadModel::load(&sizes, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// let mut cache = model.new_cache(1, 8)?;
/// for ids in [vec![1u32, 2, 3], vec![4], vec![5]] { // the prompt, then token by token
///     let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
///     model.forward_with(&ids, LogitsFor::LastToken, Some(&mut cache), &mut Pass::inference())?;
/// }
/// assert_eq!(cache.lengths(), [5]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Gpt2Cache {
    layers: Vec<KvCache>,
    pool: KvPool,
    /// On NVIDIA GPUs: the recording of a step that reads and writes these layers.
    pub(crate) steps: Steps,
    /// Whether no change has ended halfway, in some layers alone.
    is_whole: bool,
}

impl Gpt2Cache {
    /// An empty cache in memory of its own, for `batch` rows of up to `capacity` tokens each.
    ///
    /// # Errors
    /// When the memory cannot be allocated on the device.
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

    /// Tokens held by each row.
    pub fn lengths(&self) -> &[usize] {
        self.layers.first().map_or(&[], KvCache::lengths)
    }

    /// Forgets the tokens of `row` after the first `kept`.
    ///
    /// # Errors
    /// When the row holds fewer than `kept` tokens.
    pub fn truncate(&mut self, row: usize, kept: usize) -> Result<()> {
        let mut is_first = true;
        self.in_each_layer(|layer| {
            // Where passes stop, the layers after that are empty.
            let is_empty = !std::mem::take(&mut is_first) && layer.lengths().get(row) == Some(&0);
            layer.truncate(row, if is_empty { 0 } else { kept })
        })
    }

    /// An independent copy of the given rows in this order, in memory of its own.
    ///
    /// # Errors
    /// When a row does not exist, or the memory cannot be allocated.
    pub fn fork(&self, rows: &[usize]) -> Result<Self> {
        self.expect_whole()?;
        let layers = self.layers.iter().map(|layer| layer.fork(rows)).collect::<Result<Vec<_>>>()?;
        let pool = KvPool { layers: layers.iter().map(|layer| layer.memory().clone()).collect() };
        Ok(Self { layers, pool, steps: Steps::default(), is_whole: true })
    }

    /// Replaces the tokens of `row` by the first `tokens` of a row of another cache, such as a prompt that was computed alone.
    ///
    /// # Errors
    /// When a row does not exist or holds fewer, the caches are for different models, or the tokens do not fit.
    pub fn copy_row(&mut self, row: usize, source: &Self, source_row: usize, tokens: usize) -> Result<()> {
        if self.layers.len() != source.layers.len() {
            let (expected, found) = (self.layers.len(), source.layers.len());
            return Err(ModelError::CacheLayers { expected, found }.into());
        }
        source.expect_whole()?;
        let mut sources = source.layers.iter();
        self.in_each_layer(|layer| match sources.next() {
            Some(source) => layer.copy_row(row, source, source_row, tokens),
            None => Ok(()),
        })
    }

    /// Moves the rows of another cache of the same [`KvPool`] here, before row `row` or, if it is the number of rows, after
    /// the last one. Nothing is copied.
    ///
    /// # Errors
    /// When the caches share no memory, or there are fewer rows than `row`; `self` is then unchanged.
    pub fn insert(&mut self, row: usize, mut other: Self) -> Result<()> {
        self.expect_whole()?;
        other.expect_whole()?;
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

    /// How many rows of this cache lie before the rows of another one in the memory that they share.
    pub fn rows_before(&self, other: &Self) -> usize {
        let start = other.slots().iter().map(|slot| slot.start).min().unwrap_or(0);
        self.slots().iter().filter(|slot| slot.start < start).count()
    }

    /// Takes a row out of the cache, as a cache of its own; the rows after it move up. Nothing is copied.
    ///
    /// # Errors
    /// When the row does not exist.
    pub fn take(&mut self, row: usize) -> Result<Self> {
        self.expect_whole()?;
        let mut taken = self.pool.empty_cache();
        let mut others = taken.layers.iter_mut();
        self.in_each_layer(|layer| {
            let (slot, length) = layer.remove_row(row)?;
            others.next().map_or(Ok(()), |other| other.insert_row(0, slot, length))
        })?;
        self.steps = Steps::default();
        Ok(taken)
    }

    /// Removes a row; the last one takes its number and its place in memory, to which its tokens are copied. So adjacent rows of
    /// the same capacity stay adjacent.
    ///
    /// # Errors
    /// When the row does not exist, or has too little room for the last one.
    pub fn swap_remove(&mut self, row: usize) -> Result<()> {
        let rows = self.lengths().len();
        let last = rows.checked_sub(1).filter(|last| row <= *last);
        let last = last.ok_or(ModelError::NoSuchRow { row, held: rows })?;
        if row < last {
            self.in_each_layer(|layer| layer.copy_within(last, row, 0))?;
        }
        self.take(last).map(drop)
    }

    /// Gives the cache the rows `sources`, in this order, some of them more than once or not at all. Rows stay where they are;
    /// only further ones of the same source are copied, into the slots of rows that are gone or into new ones of the pool.
    ///
    /// `shared` says of two rows how many of their first tokens are known to be the same, 0 if nothing is known: those are
    /// not copied.
    ///
    /// # Errors
    /// When a row does not exist; the cache is then unchanged. When there is no room for another one: some rows may then be
    /// overwritten, so the cache refuses all further use.
    pub fn reorder(&mut self, sources: &[usize], shared: impl Fn(usize, usize) -> usize) -> Result<()> {
        self.expect_whole()?;
        let rows = self.lengths().len();
        if let Some(missing) = sources.iter().find(|source| **source >= rows) {
            return Err(ModelError::NoSuchRow { row: *missing, held: rows }.into());
        }
        self.is_whole = false;
        self.rearrange(sources, shared)?;
        self.is_whole = true;
        Ok(())
    }

    /// Gives the cache rows that exist; after an error nothing is certain.
    fn rearrange(&mut self, sources: &[usize], shared: impl Fn(usize, usize) -> usize) -> Result<()> {
        let rows = self.lengths().len();
        let mut gone: Vec<usize> = (0..rows).filter(|row| !sources.contains(row)).collect();
        // The place of each new row; the first of a source stays.
        let mut places = Vec::with_capacity(sources.len());
        for (index, source) in sources.iter().enumerate() {
            if !sources[..index].contains(source) {
                places.push(*source);
                continue;
            }
            let slots = self.slots();
            let capacity = slots[*source].capacity;
            let has_room = |row: &usize| slots[*row].capacity >= capacity;
            let best = gone.iter().copied().filter(has_room).max_by_key(|row| shared(*row, *source));
            let (place, known) = match best {
                Some(row) => (row, shared(row, *source)),
                None => (self.add_row(capacity)?, 0),
            };
            gone.retain(|row| *row != place);
            self.layers.iter_mut().try_for_each(|layer| layer.copy_within(*source, place, known))?;
            places.push(place);
        }
        if !places.iter().copied().eq(0..self.lengths().len()) {
            self.steps = Steps::default();
            self.layers.iter_mut().for_each(|layer| layer.select_rows(&places));
        }
        Ok(())
    }

    /// Adds an empty row, and says which it is.
    fn add_row(&mut self, capacity: usize) -> Result<usize> {
        let slots = self.pool.take(capacity).ok_or(ModelError::NoCacheRoom { tokens: capacity })?;
        let row = self.lengths().len();
        let layers = self.layers.iter_mut().zip(slots);
        layers.into_iter().try_for_each(|(layer, slot)| layer.insert_row(row, slot, 0))?;
        Ok(row)
    }

    /// Changes all layers alike. The first one, which an error leaves unchanged, refuses what all would; an error of a later one
    /// leaves the cache without use.
    fn in_each_layer(&mut self, mut change: impl FnMut(&mut KvCache) -> Result<()>) -> Result<()> {
        self.expect_whole()?;
        let Some((first, others)) = self.layers.split_first_mut() else { return Ok(()) };
        change(first)?;
        self.is_whole = false;
        others.iter_mut().try_for_each(change)?;
        self.is_whole = true;
        Ok(())
    }

    /// Refuses a cache in which a change ended halfway.
    pub(crate) fn expect_whole(&self) -> Result<()> {
        if self.is_whole { Ok(()) } else { Err(ModelError::BrokenCache.into()) }
    }

    /// Where the rows are in the memory of each layer.
    fn slots(&self) -> Vec<KvSlot> {
        self.layers.first().map_or_else(Vec::new, KvCache::slots)
    }

    /// Tokens that each row still has room for.
    pub fn rooms(&self) -> Vec<usize> {
        self.slots().iter().zip(self.lengths()).map(|(slot, length)| slot.capacity - length).collect()
    }

    /// Tokens that each row can hold; of rows with different room the least.
    pub(crate) fn capacity(&self) -> usize {
        self.slots().iter().map(|slot| slot.capacity).min().unwrap_or(0)
    }

    /// Counts the tokens of each row that a pass at positions in memory has written ([`Pass::at`](crate::Pass::at)).
    ///
    /// # Errors
    /// When a row would pass the capacity; the cache is then unchanged.
    pub fn advance(&mut self, tokens: usize) -> Result<()> {
        self.in_each_layer(|layer| layer.advance(tokens))
    }

    /// Computes with a cache, which after an error holds what it held before.
    pub(crate) fn restoring(
        mut cache: Option<&mut Self>,
        compute: impl FnOnce(Option<&mut Self>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        cache.as_deref().map_or(Ok(()), Self::expect_whole)?;
        let held = cache.as_deref().map(|cache| cache.lengths().to_vec());
        let computed = compute(cache.as_deref_mut());
        if let (Err(_), Some(cache), Some(held)) = (&computed, cache, held) {
            // Some blocks may have read what others have not.
            held.into_iter().enumerate().try_for_each(|(row, kept)| cache.truncate(row, kept))?;
        }
        computed
    }

    /// Whether the first so many layers hold the same tokens, and the others none.
    pub(crate) fn is_filled_to(&self, layers: usize) -> bool {
        let Some((filled, others)) = self.layers.split_at_checked(layers) else { return false };
        filled.iter().all(|layer| layer.lengths() == self.lengths())
            && others.iter().flat_map(KvCache::lengths).all(|length| *length == 0)
    }

    /// Number of blocks the cache is for.
    pub(crate) fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// The cache of block `index`.
    pub(crate) fn layer(&mut self, index: usize) -> Option<&mut KvCache> {
        self.layers.get_mut(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(tokens: usize) -> KvPool {
        let json = r#"{"model_type": "gpt2", "vocab_size": 11, "n_positions": 8, "n_embd": 6, "n_layer": 2, "n_head": 3}"#;
        let config = Gpt2Config::from_json(json).unwrap();
        KvPool::new(&config, tokens, KvDType::F32, &Device::Cpu).unwrap()
    }

    fn start(cache: &Gpt2Cache) -> usize {
        cache.slots()[0].start
    }

    #[test]
    fn room_is_taken_where_it_is_first_and_given_back() {
        // In panels of 16 tokens there is room for ten, of which a row takes whole ones.
        let pool = pool(160);
        let (first, second) = (pool.cache(1, 64).unwrap(), pool.cache(1, 33).unwrap());
        assert_eq!((start(&first), start(&second), pool.tokens_in_use()), (0, 64, 112));
        assert!(pool.cache(1, 49).is_none(), "48 are left");
        drop(first);
        assert!(pool.cache(1, 65).is_none(), "64 and 48, but not in one piece");
        assert!(pool.cache(3, 40).is_none(), "room for two of three rows");
        assert_eq!(pool.tokens_in_use(), 48, "what the two had is given back");
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
        assert!(rows.insert(3, first).is_err(), "there are two rows");
        assert_eq!((rows.lengths().len(), pool.tokens_in_use()), (2, 32), "what was not taken is given back");
        drop(rows.take(0).unwrap());
        assert_eq!(pool.tokens_in_use(), 16);
        let mut rows = pool.cache(3, 3).unwrap();
        rows.swap_remove(0).unwrap();
        let starts: Vec<usize> = rows.slots().iter().map(|slot| slot.start).collect();
        assert_eq!(starts, [0, 16], "the last one went into the place of the first");
        rows.swap_remove(1).unwrap();
        assert!(rows.swap_remove(1).is_err());
    }

    #[test]
    fn a_cache_that_was_left_halfway_refuses_use() {
        let pool = pool(48);
        let mut rows = pool.cache(2, 16).unwrap();
        assert!(rows.reorder(&[0, 2], |_, _| 0).is_err(), "there is no third row");
        rows.reorder(&[1, 0], |_, _| 0).unwrap();
        let _rest = pool.cache(1, 16).unwrap();
        let no_room = rows.reorder(&[0, 0, 1], |_, _| 0).unwrap_err().to_string();
        assert!(no_room.starts_with("no room for the keys and values of 16 more tokens"), "{no_room}");
        let other = pool.empty_cache();
        for (what, refused) in [
            ("truncate", rows.truncate(0, 0)),
            ("fork", rows.fork(&[0]).map(drop)),
            ("copy", pool.empty_cache().copy_row(0, &rows, 0, 0)),
            ("copy to it", rows.copy_row(0, &other, 0, 0)),
            ("insert", rows.insert(0, other)),
            ("take", rows.take(0).map(drop)),
            ("swap_remove", rows.swap_remove(0)),
            ("reorder", rows.reorder(&[0], |_, _| 0)),
            ("advance", rows.advance(1)),
            ("be inserted", pool.empty_cache().insert(0, rows)),
        ] {
            let refusal = refused.unwrap_err().to_string();
            assert!(
                refusal.starts_with("the cache was left halfway by a change that failed"),
                "{what}: {refusal}"
            );
        }
    }

    #[test]
    fn a_change_that_is_refused_leaves_the_cache_usable() {
        let pool = pool(48);
        let (mut rows, other) = (pool.cache(2, 16).unwrap(), self::pool(16).cache(1, 16).unwrap());
        assert!(rows.truncate(0, 1).is_err() && rows.truncate(2, 1).is_err());
        assert!(rows.copy_row(0, &other, 0, 1).is_err() && rows.copy_row(2, &other, 0, 0).is_err());
        assert!(rows.take(2).is_err() && rows.swap_remove(2).is_err() && rows.fork(&[2]).is_err());
        rows.swap_remove(0).unwrap();
        assert_eq!((rows.lengths().len(), pool.tokens_in_use()), (1, 16));
    }
}
