//! KV cache for a prefix that later calls extend.

use std::sync::Arc;

use candle_core::Tensor;
use candle_gpt2::{Gpt2Cache, Gpt2LMHeadModel, LogitsFor, Pass};
use candle_gpt2_engine::LoadedModel;
use numpy::PyArrayDyn;
use pyo3::prelude::*;

use crate::errors::{Result, type_error, value_error};
use crate::model::Model;
use crate::process::{computing, start};
use crate::raised::{Exclusive, Raised};
use crate::values::{Text, Values, number};

/// KV cache: tokens that a model has processed, with their keys and values.
///
/// `model.logits(ids, cache=cache)` appends tokens.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct Cache {
    pub(crate) loaded: Arc<LoadedModel>,
    contents: Exclusive<Contents>,
}

/// Contents of a cache.
pub(crate) struct Contents {
    pub(crate) ids: Vec<u32>,
    pub(crate) cache: Gpt2Cache,
}

impl Cache {
    pub(crate) fn new(loaded: Arc<LoadedModel>, capacity: usize) -> Result<Self> {
        let cache = loaded.model().new_cache(1, capacity)?;
        Ok(Self::from_contents(loaded, Contents { ids: Vec::new(), cache }))
    }

    fn from_contents(loaded: Arc<LoadedModel>, contents: Contents) -> Self {
        Self { loaded, contents: Exclusive::new("the cache", contents) }
    }
}

#[pymethods]
impl Cache {
    fn __len__(&self, py: Python<'_>) -> Result<usize> {
        self.contents.with(py, |contents| contents.ids.len())
    }

    fn __repr__(&self, py: Python<'_>) -> Result<String> {
        let (tokens, room) = self.contents.with(py, |contents| {
            (contents.ids.len(), contents.cache.free_tokens().into_iter().sum::<usize>())
        })?;
        Ok(format!("Cache({tokens} tokens, room for {room} more)"))
    }

    /// Token IDs in the cache.
    #[getter]
    fn ids(&self, py: Python<'_>) -> Result<Vec<u32>> {
        self.contents.with(py, |contents| contents.ids.clone())
    }

    /// Returns an independent copy of the cache.
    fn fork(&self, py: Python<'_>) -> Result<Self> {
        let contents = self.contents.with(py, |contents| {
            Ok::<_, candle_core::Error>(Contents {
                ids: contents.ids.clone(),
                cache: contents.cache.fork(&[0])?,
            })
        })??;
        Ok(Self::from_contents(Arc::clone(&self.loaded), contents))
    }

    /// Keeps only the first `length` tokens and returns the cache.
    ///
    /// A negative length drops that many tokens from the end.
    fn truncate(slf: Bound<'_, Self>, length: i64) -> Result<Bound<'_, Self>> {
        slf.get().contents.with(slf.py(), |contents| {
            let tokens = contents.ids.len();
            let kept = match usize::try_from(length) {
                Ok(kept) => Some(kept),
                Err(_) => usize::try_from(length.unsigned_abs()).ok().and_then(|cut| tokens.checked_sub(cut)),
            };
            let Some(kept) = kept.filter(|kept| *kept <= tokens) else {
                return Err(value_error(format!(
                    "length {length}: out of range; the cache holds {tokens} tokens"
                )));
            };
            contents.cache.truncate(0, kept)?;
            contents.ids.truncate(kept);
            Ok(())
        })??;
        Ok(slf)
    }

    fn __reduce__(&self) -> Result<()> {
        Err(type_error(
            "a cache cannot be pickled; pickle the model and the cache's `ids`, and rebuild the cache in the \
             other process",
        ))
    }
}

#[pymethods]
impl Model {
    /// Returns the logits after the last token of a text or token IDs, with shape (vocabulary,).
    ///
    /// Unlike HookedTransformer, this method prepends no BOS token by default.
    ///
    /// last_only: False returns the logits after every token, (tokens, vocabulary). cache: a prefix to extend;
    /// the call appends the tokens to it. hooks: see run_with_cache. prepend_bos: prepend a BOS token to a
    /// text.
    #[pyo3(signature = (ids, last_only = true, cache = None, hooks = None, prepend_bos = false))]
    fn logits<'py>(
        &self,
        py: Python<'py>,
        ids: &Bound<'py, PyAny>,
        last_only: bool,
        cache: Option<&Bound<'py, Cache>>,
        hooks: Option<&Bound<'py, PyAny>>,
        prepend_bos: bool,
    ) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        start()?;
        let (text, bos) = (Text::read(ids)?, self.bos(prepend_bos)?);
        let ids = py.detach(|| text.encoded_after(bos, self.loaded.vocabulary()))?;
        if let Some(id) = ids.iter().find(|id| !self.loaded.config().has_token(**id)) {
            let vocab_size = self.loaded.config().vocab_size;
            return Err(value_error(format!("token {id} is outside the vocabulary of {vocab_size} tokens")));
        }
        let cache = cache.map(Bound::get);
        if cache.is_some_and(|cache| !Arc::ptr_eq(&cache.loaded, &self.loaded)) {
            return Err(value_error("the cache was created by another model; pass one from this model"));
        }
        let raised = Raised::default();
        let hooked = self.hooked(hooks, &raised)?;
        let wanted = if last_only { LogitsFor::LastToken } else { LogitsFor::EveryToken };
        let forward = |contents: Option<&mut Contents>| forward(hooked.model(), &ids, wanted, contents);
        let logits = computing(py, &hooked, || {
            raised.computing(|| match cache {
                None => forward(None),
                Some(cache) => cache.contents.run_for(&raised, |contents| forward(Some(contents)))?,
            })
        });
        let (numbers, vocab_size) = (raised.or(logits)?, self.loaded.config().vocab_size);
        let shape = if last_only { vec![vocab_size] } else { vec![numbers.len() / vocab_size, vocab_size] };
        Ok(Values { numbers, shape }.into_array(py)?)
    }

    /// Creates an empty cache for `logits`.
    ///
    /// capacity: maximum number of tokens, by default the model's context.
    #[pyo3(signature = (capacity = None))]
    fn cache(&self, #[pyo3(from_py_with = number)] capacity: Option<usize>) -> Result<Cache> {
        let max_capacity = self.loaded.config().n_positions;
        match capacity.unwrap_or(max_capacity) {
            capacity if capacity <= max_capacity => Cache::new(Arc::clone(&self.loaded), capacity),
            capacity => Err(value_error(format!(
                "capacity: expected at most {max_capacity}, the model's context, found {capacity}"
            ))),
        }
    }
}

/// Computes the logits for `ids`, which follow any cached tokens.
fn forward(
    model: &Gpt2LMHeadModel,
    ids: &[u32],
    wanted: LogitsFor,
    contents: Option<&mut Contents>,
) -> Result<Vec<f32>> {
    /// Number of tokens whose logits are computed and copied at a time.
    const PIECE_TOKENS: usize = 128;

    if ids.is_empty() {
        return Err(value_error("ids: no tokens; pass a non-empty text or at least one token id"));
    }
    let (past, room) = contents.as_ref().map_or((0, model.config().n_positions), |contents| {
        (contents.ids.len(), contents.cache.free_tokens().into_iter().sum())
    });
    if ids.len() > room {
        let tokens = ids.len();
        return Err(value_error(format!(
            "{tokens} tokens do not fit after {past} cached tokens; the remaining capacity is {room}"
        )));
    }
    let input = Tensor::from_slice(ids, (1, ids.len()), model.device())?;
    let compute = |cache: Option<&mut Gpt2Cache>| -> candle_core::Result<Vec<f32>> {
        let pass = &mut Pass::inference();
        if wanted == LogitsFor::LastToken || model.is_observed() {
            return Ok(Values::from_tensor(&model.forward_with(&input, wanted, cache, pass)?)?.numbers);
        }
        // The logits for a long text are large, and the result is a copy. Computing them in pieces avoids
        // keeping all of them in memory twice.
        let hidden = model.transformer().forward_with(&input, cache, pass)?;
        let mut numbers = Vec::with_capacity(ids.len().saturating_mul(model.config().vocab_size));
        for first in (0..ids.len()).step_by(PIECE_TOKENS) {
            let count = PIECE_TOKENS.min(ids.len() - first);
            let piece = model.head(&hidden, LogitsFor::Tokens { first, count })?;
            numbers.extend(Values::from_tensor(&piece)?.numbers);
        }
        Ok(numbers)
    };
    let Some(Contents { cache, ids: read }) = contents else { return Ok(compute(None)?) };
    let numbers = compute(Some(&mut *cache));
    match numbers.is_ok() {
        true => read.extend(ids),
        // An interrupt may have stopped the head after the blocks had added the tokens to the cache.
        false => cache.truncate(0, past)?,
    }
    Ok(numbers?)
}
