//! Observer for a sequence, and the checks for requests with observers.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_gpt2::Observer;

use crate::{GenerationConfig, GenerationError, SearchMode, WhenFull};

/// Observer for one sequence in a [`Request`](crate::Request).
///
/// It sees every pass of its own sequence and nothing of other sequences. The caller keeps a handle to
/// read what the observer recorded.
///
/// ```
/// use std::sync::{Arc, Mutex};
///
/// use candle_core::Tensor;
/// use candle_gpt2::{Observer, Site, SiteKind};
/// use candle_gpt2_generation::{GenerationConfig, Request, TextObserver, TokenGenerator};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// /// Counts the tokens that the last block reads.
/// struct Count(usize);
///
/// impl Observer for Count {
///     fn wants(&self, site: Site) -> bool {
///         site == Site::in_block(1, SiteKind::ResidPre)
///     }
///
///     fn observe(&mut self, _: Site, value: Tensor) -> candle_core::Result<Tensor> {
///         self.0 += value.dim(1)?; // (1, T, C)
///         Ok(value)
///     }
/// }
///
/// let count = Arc::new(Mutex::new(Count(0)));
/// let config = GenerationConfig { max_new_tokens: 3, eos_token_id: vec![], ..GenerationConfig::default() };
/// let observers = vec![TextObserver::new(count.clone())];
/// let request = Request { observers, ..Request::new(vec![1, 2], config) };
/// let tokens = <TokenGenerator>::of_request(&model, request, None)?;
/// assert_eq!(tokens.collect::<Result<Vec<_>, _>>()?.len(), 3);
/// assert_eq!(count.lock().unwrap().0, 2 + 2, "the model does not read the last new token");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct TextObserver(Arc<Mutex<dyn Observer + Send>>);

impl TextObserver {
    /// Wraps a shared observer; the caller can keep a clone of the `Arc`.
    pub fn new(observer: Arc<Mutex<dyn Observer + Send>>) -> Self {
        Self(observer)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, dyn Observer + Send + 'static> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for TextObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TextObserver")
    }
}

/// Checks the number of observers, and that the request can be observed.
pub(super) fn check_observers(
    observers: &[TextObserver],
    config: &GenerationConfig,
) -> Result<(), GenerationError> {
    let conflict = |what: &str| Err(GenerationError::Conflict { what: what.into() });
    let (texts, found) = (config.num_return_sequences, observers.len());
    if found == 0 {
        return Ok(());
    }
    if config.search_mode() != SearchMode::TokenByToken {
        return conflict(
            "observers work only when decoding token by token, not with beam or contrastive search",
        );
    }
    if matches!(config.when_full, WhenFull::Slide { .. }) {
        return conflict("an observed completion cannot slide; it must end when the context is full");
    }
    if found != texts {
        let expected = format!("0 or {texts}, one for each completion");
        return Err(GenerationError::OptionOutOfRange {
            option: "observers",
            expected,
            found: found.to_string(),
        });
    }
    Ok(())
}
