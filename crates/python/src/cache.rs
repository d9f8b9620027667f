//! Keys and values of tokens that were computed, to go on from.

use std::sync::{Arc, Mutex, PoisonError};

use gpt2::Gpt2Cache;
use gpt2_engine::LoadedModel;
use pyo3::prelude::*;

use crate::errors::{Result, wrong_type, wrong_value};

/// The tokens that a model has read, with their keys and values. `model.logits(ids, cache=cache)` reads more.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct Cache {
    pub(crate) loaded: Arc<LoadedModel>,
    held: Mutex<Held>,
}

/// What a cache holds.
pub(crate) struct Held {
    pub(crate) ids: Vec<u32>,
    pub(crate) cache: Gpt2Cache,
}

impl Cache {
    pub(crate) fn new(loaded: Arc<LoadedModel>, capacity: usize) -> Result<Self> {
        let cache = loaded.model().new_cache(1, capacity)?;
        Ok(Self { loaded, held: Mutex::new(Held { ids: Vec::new(), cache }) })
    }

    /// Does something with what it holds; to be called without the interpreter's lock.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut Held) -> T) -> T {
        work(&mut self.held.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[pymethods]
impl Cache {
    fn __len__(&self, py: Python<'_>) -> usize {
        py.detach(|| self.with(|held| held.ids.len()))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let (tokens, room) =
            py.detach(|| self.with(|held| (held.ids.len(), held.cache.rooms().into_iter().sum::<usize>())));
        format!("Cache({tokens} tokens, room for {room} more)")
    }

    /// The tokens.
    #[getter]
    fn ids(&self, py: Python<'_>) -> Vec<u32> {
        py.detach(|| self.with(|held| held.ids.clone()))
    }

    /// An independent copy.
    fn fork(&self, py: Python<'_>) -> Result<Self> {
        let held = py.detach(|| {
            self.with(|held| {
                Ok::<_, candle_core::Error>(Held { ids: held.ids.clone(), cache: held.cache.fork(&[0])? })
            })
        })?;
        Ok(Self { loaded: Arc::clone(&self.loaded), held: Mutex::new(held) })
    }

    /// Forgets the tokens after the first `length`; of a negative length as many at the end.
    fn truncate(&self, py: Python<'_>, length: i64) -> Result<()> {
        py.detach(|| {
            self.with(|held| {
                let tokens = held.ids.len();
                let kept = match usize::try_from(length) {
                    Ok(kept) => Some(kept),
                    Err(_) => {
                        usize::try_from(length.unsigned_abs()).ok().and_then(|cut| tokens.checked_sub(cut))
                    }
                };
                let Some(kept) = kept.filter(|kept| *kept <= tokens) else {
                    return Err(wrong_value(format!("length {length}: the cache holds {tokens} tokens")));
                };
                held.cache.truncate(0, kept)?;
                held.ids.truncate(kept);
                Ok(())
            })
        })
    }

    fn __reduce__(&self) -> Result<()> {
        Err(wrong_type(
            "a cache cannot be pickled; pickle the model and the cache's `ids`, and read them again there",
        ))
    }
}
