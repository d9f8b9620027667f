//! The key-value caches of all blocks.

use candle_core::{DType, Device, Result};
use gpt2_attention::{KvCache, KvCacheShape};

use crate::recorder::Steps;
use crate::{Gpt2Config, Gpt2LMHead, ModelError};

/// One [`KvCache`] for each block. The rows' lengths are the positions of their next tokens.
#[derive(Debug)]
pub struct Gpt2Cache {
    layers: Vec<KvCache>,
    /// On NVIDIA GPUs: the recording of a step that reads and writes these layers.
    pub(crate) steps: Steps,
}

impl Gpt2Cache {
    /// An empty cache for `batch` rows of up to `capacity` tokens each.
    ///
    /// # Errors
    /// When the memory cannot be allocated on the device.
    pub fn new(
        config: &Gpt2Config,
        batch: usize,
        capacity: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let shape = KvCacheShape { batch, num_heads: config.n_head, capacity, head_dim: config.head_dim() };
        let layers =
            (0..config.n_layer).map(|_| KvCache::new(shape, dtype, device)).collect::<Result<_>>()?;
        Ok(Self { layers, steps: Steps::default() })
    }

    /// Tokens held by each row.
    pub fn lengths(&self) -> &[usize] {
        self.layers.first().map_or(&[], KvCache::lengths)
    }

    /// Forgets the tokens of `row` behind the first `kept`.
    ///
    /// # Errors
    /// When the row holds fewer than `kept` tokens.
    pub fn truncate(&mut self, row: usize, kept: usize) -> Result<()> {
        self.layers.iter_mut().try_for_each(|layer| layer.truncate(row, kept))
    }

    /// An independent copy with the given rows in this order.
    ///
    /// # Errors
    /// When a row does not exist, or the memory cannot be allocated.
    pub fn fork(&self, rows: &[usize]) -> Result<Self> {
        let layers = self.layers.iter().map(|layer| layer.fork(rows)).collect::<Result<_>>()?;
        Ok(Self { layers, steps: Steps::default() })
    }

    /// Replaces the tokens of `row` by those of a row of another cache, such as a prompt that was computed alone.
    ///
    /// # Errors
    /// When a row does not exist, the caches are for different models, or the tokens do not fit.
    pub fn copy_row(&mut self, row: usize, source: &Self, source_row: usize) -> Result<()> {
        if self.layers.len() != source.layers.len() {
            let (expected, found) = (self.layers.len(), source.layers.len());
            return Err(ModelError::CacheLayers { expected, found }.into());
        }
        let layers = self.layers.iter_mut().zip(&source.layers);
        layers.into_iter().try_for_each(|(layer, source)| layer.copy_row(row, source, source_row))
    }

    /// Tokens that each row can hold.
    pub(crate) fn capacity(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.shape().capacity)
    }

    /// Counts a token of each row that a pass behind lengths in memory has written ([`Pass::behind`](crate::Pass::behind)).
    ///
    /// # Errors
    /// When a row would pass the capacity; the cache is then unchanged.
    pub fn advance(&mut self) -> Result<()> {
        self.layers.iter_mut().try_for_each(KvCache::advance)
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

impl Gpt2LMHead {
    /// The type of the keys and values in the caches of this model. By default f32 beside weights in f32, and f16 beside all
    /// others: rounding keys and values to 11 bits loses no more than rounding weights to 11 bits or fewer, and a long
    /// context is read in half the time. f16 ends at 65,504: a model with larger keys or values needs f32.
    pub fn kv_dtype(&self) -> DType {
        self.kv_dtype
    }

    /// The same model with keys and values of another type, f32 or f16.
    pub fn with_kv_dtype(mut self, kv_dtype: DType) -> Self {
        self.kv_dtype = kv_dtype;
        self
    }

    /// An empty cache for `batch` texts of up to `capacity` tokens each.
    ///
    /// # Errors
    /// When the memory cannot be allocated on the device.
    pub fn new_cache(&self, batch: usize, capacity: usize, device: &Device) -> Result<Gpt2Cache> {
        Gpt2Cache::new(self.config(), batch, capacity, self.kv_dtype, device)
    }
}
