//! The KV cache of a prefix, to continue from.

use std::sync::Arc;

use candle_core::Tensor;
use candle_gpt2::{Gpt2Cache, Gpt2LMHeadModel, LogitsFor, Pass};
use candle_gpt2_engine::LoadedModel;
use numpy::PyArrayDyn;
use pyo3::prelude::*;

use crate::errors::{Result, wrong_type, wrong_value};
use crate::model::Model;
use crate::process::{computing, start};
use crate::raised::{Lent, Raised};
use crate::values::{Text, Values, number};

/// A KV cache: the tokens that a model has read, with their keys and values. `model.logits(ids, cache=cache)` reads more.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct Cache {
    pub(crate) loaded: Arc<LoadedModel>,
    held: Lent<Held>,
}

/// What a cache holds.
pub(crate) struct Held {
    pub(crate) ids: Vec<u32>,
    pub(crate) cache: Gpt2Cache,
}

impl Cache {
    pub(crate) fn new(loaded: Arc<LoadedModel>, capacity: usize) -> Result<Self> {
        let cache = loaded.model().new_cache(1, capacity)?;
        Ok(Self::of(loaded, Held { ids: Vec::new(), cache }))
    }

    fn of(loaded: Arc<LoadedModel>, held: Held) -> Self {
        Self { loaded, held: Lent::new("the cache", held) }
    }
}

#[pymethods]
impl Cache {
    fn __len__(&self, py: Python<'_>) -> Result<usize> {
        self.held.with(py, |held| held.ids.len())
    }

    fn __repr__(&self, py: Python<'_>) -> Result<String> {
        let (tokens, room) =
            self.held.with(py, |held| (held.ids.len(), held.cache.rooms().into_iter().sum::<usize>()))?;
        Ok(format!("Cache({tokens} tokens, room for {room} more)"))
    }

    /// The tokens.
    #[getter]
    fn ids(&self, py: Python<'_>) -> Result<Vec<u32>> {
        self.held.with(py, |held| held.ids.clone())
    }

    /// An independent copy.
    fn fork(&self, py: Python<'_>) -> Result<Self> {
        let held = self.held.with(py, |held| {
            Ok::<_, candle_core::Error>(Held { ids: held.ids.clone(), cache: held.cache.fork(&[0])? })
        })??;
        Ok(Self::of(Arc::clone(&self.loaded), held))
    }

    /// Forgets the tokens after the first `length`; of a negative length as many at the end. Gives the cache itself.
    fn truncate(slf: Bound<'_, Self>, length: i64) -> Result<Bound<'_, Self>> {
        slf.get().held.with(slf.py(), |held| {
            let tokens = held.ids.len();
            let kept = match usize::try_from(length) {
                Ok(kept) => Some(kept),
                Err(_) => usize::try_from(length.unsigned_abs()).ok().and_then(|cut| tokens.checked_sub(cut)),
            };
            let Some(kept) = kept.filter(|kept| *kept <= tokens) else {
                return Err(wrong_value(format!("length {length}: the cache holds {tokens} tokens")));
            };
            held.cache.truncate(0, kept)?;
            held.ids.truncate(kept);
            Ok(())
        })??;
        Ok(slf)
    }

    fn __reduce__(&self) -> Result<()> {
        Err(wrong_type(
            "a cache cannot be pickled; pickle the model and the cache's `ids`, and read them again there",
        ))
    }
}

#[pymethods]
impl Model {
    /// Logits after the last token, an array (vocabulary,); with last_only=False after each token, (tokens, vocabulary). With a
    /// cache the tokens follow those that it holds, and are added to it.
    #[pyo3(signature = (ids, last_only = true, cache = None, hooks = None))]
    fn logits<'py>(
        &self,
        py: Python<'py>,
        ids: &Bound<'py, PyAny>,
        last_only: bool,
        cache: Option<&Bound<'py, Cache>>,
        hooks: Option<&Bound<'py, PyAny>>,
    ) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        start()?;
        let ids = Text::read(ids)?.into_ids(py, self.loaded.vocabulary())?;
        if let Some(id) = ids.iter().find(|id| !self.loaded.config().has_token(**id)) {
            let vocab_size = self.loaded.config().vocab_size;
            return Err(wrong_value(format!("token {id} is outside the vocabulary of {vocab_size}")));
        }
        let cache = cache.map(Bound::get);
        if cache.is_some_and(|cache| !Arc::ptr_eq(&cache.loaded, &self.loaded)) {
            return Err(wrong_value("the cache is another model's"));
        }
        let raised = Raised::default();
        let hooked = self.hooked(hooks, &raised)?;
        let wanted = if last_only { LogitsFor::LastToken } else { LogitsFor::EveryToken };
        let forward = |held: Option<&mut Held>| forward(hooked.model(), &ids, wanted, held);
        let logits = computing(py, &hooked, || {
            raised.computing(|| match cache {
                None => forward(None),
                Some(cache) => cache.held.lent_to(&raised, |held| forward(Some(held)))?,
            })
        });
        let (numbers, vocab_size) = (raised.or(logits)?, self.loaded.config().vocab_size);
        let shape = if last_only { vec![vocab_size] } else { vec![numbers.len() / vocab_size, vocab_size] };
        Ok(Values { numbers, shape }.into_array(py)?)
    }

    /// A cache for `logits`, with room for this many tokens, by default the whole context.
    #[pyo3(signature = (capacity = None))]
    fn cache(&self, #[pyo3(from_py_with = number)] capacity: Option<usize>) -> Result<Cache> {
        let most = self.loaded.config().n_positions;
        match capacity.unwrap_or(most) {
            capacity if capacity <= most => Cache::new(Arc::clone(&self.loaded), capacity),
            capacity => Err(wrong_value(format!(
                "capacity: expected at most the context of {most}, found {capacity}"
            ))),
        }
    }
}

/// The logits of tokens after those that are held, if any.
fn forward(
    model: &Gpt2LMHeadModel,
    ids: &[u32],
    wanted: LogitsFor,
    held: Option<&mut Held>,
) -> Result<Vec<f32>> {
    /// Tokens whose logits are held twice.
    const PIECE_TOKENS: usize = 128;

    if ids.is_empty() {
        return Err(wrong_value("there are no tokens; give at least one"));
    }
    let (past, room) = held.as_ref().map_or((0, model.config().n_positions), |held| {
        (held.ids.len(), held.cache.rooms().into_iter().sum())
    });
    if ids.len() > room {
        let tokens = ids.len();
        return Err(wrong_value(format!(
            "{tokens} tokens do not fit after {past}; there is room for {room}"
        )));
    }
    let input = Tensor::from_slice(ids, (1, ids.len()), model.device())?;
    let compute = |cache: Option<&mut Gpt2Cache>| -> candle_core::Result<Vec<f32>> {
        let pass = &mut Pass::inference();
        if wanted == LogitsFor::LastToken || model.is_observed() {
            return Ok(Values::of(&model.forward_with(&input, wanted, cache, pass)?)?.numbers);
        }
        // Those of a long text are large, and an array needs them in memory of its own.
        let hidden = model.transformer().forward_with(&input, cache, pass)?;
        let mut numbers = Vec::with_capacity(ids.len().saturating_mul(model.config().vocab_size));
        for first in (0..ids.len()).step_by(PIECE_TOKENS) {
            let count = PIECE_TOKENS.min(ids.len() - first);
            let piece = model.head(&hidden, LogitsFor::Tokens { first, count })?;
            numbers.extend(Values::of(&piece)?.numbers);
        }
        Ok(numbers)
    };
    let Some(Held { cache, ids: read }) = held else { return Ok(compute(None)?) };
    let numbers = compute(Some(&mut *cache));
    match numbers.is_ok() {
        true => read.extend(ids),
        // The head may have been ended after the blocks had read the tokens.
        false => cache.truncate(0, past)?,
    }
    Ok(numbers?)
}
