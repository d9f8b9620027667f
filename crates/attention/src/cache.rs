//! The keys and values of the tokens that a layer has seen, so that a step computes only the new ones.
//!
//! The memory is allocated once. Each row of the batch has its own length, and that length is the only source of
//! positions: rows of different lengths need no padding token. The tensors are written in place, so a cache is for
//! inference; training runs without one.

use candle_core::{DType, Device, Result, Tensor};
use gpt2_kernels::write_tokens;

use crate::AttentionError;

/// Axis of the tokens in a `(B, H, T, D)` tensor.
const TOKEN_DIM: usize = 2;
/// Axis of the batch in a `(B, H, T, D)` tensor.
const BATCH_DIM: usize = 0;

/// The sizes of a [`KvCache`].
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

/// Keys and values of one attention layer, preallocated, with a length for each row.
///
/// Not `Clone`: candle's tensors share their memory when cloned. [`KvCache::fork`] copies.
#[derive(Debug)]
pub struct KvCache {
    keys: Tensor,
    values: Tensor,
    lengths: Vec<usize>,
    shape: KvCacheShape,
}

impl KvCache {
    /// An empty cache.
    ///
    /// # Errors
    /// When the memory cannot be allocated on the device.
    pub fn new(shape: KvCacheShape, dtype: DType, device: &Device) -> Result<Self> {
        let memory =
            || Tensor::zeros((shape.batch, shape.num_heads, shape.capacity, shape.head_dim), dtype, device);
        Ok(Self { keys: memory()?, values: memory()?, lengths: vec![0; shape.batch], shape })
    }

    /// Tokens held by each row.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// The sizes the cache was made with.
    pub fn shape(&self) -> KvCacheShape {
        self.shape
    }

    /// Adds the keys and values of new tokens behind those of each row, rounded to the type of the cache.
    ///
    /// # Shapes
    /// `keys` and `values` `(B, H, T, D)`; returns views `(B, H, S, D)` with `S` the longest row. Where rows have
    /// different lengths, a shorter row holds arbitrary finite values behind its own length.
    ///
    /// # Errors
    /// When the shapes are not those of the cache, or a row would pass the capacity; the cache is then unchanged.
    pub fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<(Tensor, Tensor)> {
        let (batch, num_heads, added, head_dim) = keys.dims4()?;
        self.expect(batch, num_heads, head_dim)?;
        self.expect_room(added)?;
        write_tokens([&self.keys, &self.values], [keys, values], &self.lengths)?;
        self.lengths.iter_mut().for_each(|length| *length += added);
        let longest = self.longest();
        Ok((self.keys.narrow(TOKEN_DIM, 0, longest)?, self.values.narrow(TOKEN_DIM, 0, longest)?))
    }

    /// The memory of the keys and that of the values, `(B, H, capacity, D)` each.
    pub(crate) fn memories(&mut self) -> [&Tensor; 2] {
        [&self.keys, &self.values]
    }

    /// Counts the token of each row that a pass behind lengths in memory has written ([`Pass::behind`](crate::Pass::behind)).
    ///
    /// # Errors
    /// When a row would pass the capacity; the cache is then unchanged.
    pub fn advance(&mut self) -> Result<()> {
        self.expect_room(1)?;
        self.lengths.iter_mut().for_each(|length| *length += 1);
        Ok(())
    }

    /// Forgets the tokens of `row` behind the first `kept`.
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

    /// An independent copy with the given rows in this order, so that several continuations share a prefix.
    ///
    /// # Errors
    /// When a row does not exist, or the memory cannot be allocated.
    pub fn fork(&self, rows: &[usize]) -> Result<Self> {
        let missing = || AttentionError::NoSuchRow { rows: rows.to_vec(), held: self.lengths.len() };
        let lengths = rows.iter().map(|row| self.lengths.get(*row).copied()).collect::<Option<Vec<_>>>();
        let lengths = lengths.ok_or_else(missing)?;
        let copy = |memory: &Tensor| -> Result<Tensor> {
            let rows =
                rows.iter().map(|row| memory.narrow(BATCH_DIM, *row, 1)).collect::<Result<Vec<_>>>()?;
            // `cat` of a single tensor is a view of the old memory.
            Tensor::cat(&rows, BATCH_DIM)?.force_contiguous()
        };
        let shape = KvCacheShape { batch: rows.len(), ..self.shape };
        Ok(Self { keys: copy(&self.keys)?, values: copy(&self.values)?, lengths, shape })
    }

    /// Replaces the tokens of `row` by those of a row of another cache, such as a prompt that was computed alone.
    ///
    /// # Errors
    /// When a row does not exist, the heads are others, or the tokens do not fit; the cache is then unchanged.
    pub fn copy_row(&mut self, row: usize, source: &Self, source_row: usize) -> Result<()> {
        let length = |cache: &Self, row: usize| {
            let missing = || AttentionError::NoSuchRow { rows: vec![row], held: cache.lengths.len() };
            cache.lengths.get(row).copied().ok_or_else(missing)
        };
        length(self, row)?;
        let added = length(source, source_row)?;
        self.expect(self.shape.batch, source.shape.num_heads, source.shape.head_dim)?;
        let capacity = self.shape.capacity;
        if added > capacity {
            return Err(AttentionError::CacheFull { past: 0, added, capacity }.into());
        }
        if added > 0 {
            for (memory, new) in [(&self.keys, &source.keys), (&self.values, &source.values)] {
                let new = new.narrow(BATCH_DIM, source_row, 1)?.narrow(TOKEN_DIM, 0, added)?;
                memory.narrow(BATCH_DIM, row, 1)?.slice_set(&new.contiguous()?, TOKEN_DIM, 0)?;
            }
        }
        self.lengths[row] = added;
        Ok(())
    }

    /// Refuses keys and values of another shape than the cache's.
    pub(crate) fn expect(&self, batch: usize, num_heads: usize, head_dim: usize) -> Result<()> {
        let expected = (self.shape.batch, self.shape.num_heads, self.shape.head_dim);
        let found = (batch, num_heads, head_dim);
        if found != expected {
            return Err(AttentionError::CacheShape { expected, found }.into());
        }
        Ok(())
    }

    /// Refuses more tokens than the longest row has room for.
    fn expect_room(&self, added: usize) -> Result<()> {
        let (past, capacity) = (self.longest(), self.shape.capacity);
        if past + added > capacity {
            return Err(AttentionError::CacheFull { past, added, capacity }.into());
        }
        Ok(())
    }

    fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }
}
