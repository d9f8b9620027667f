//! User-defined rules for the next token: allowed tokens, constraints and functions of the logits.

use std::fmt;
use std::sync::Arc;

use crate::{GenerationError, History};

/// A function that returns the tokens that may follow; it must return at least one token.
///
/// ```
/// use candle_gpt2_generation::{AllowedTokens, History, LogitsProcessor};
///
/// let even = AllowedTokens::new(|_| (0..11).step_by(2).collect());
/// let mut logits = [1.0; 11];
/// let history = History { ids: &[5, 7], prompt_len: 1 };
/// LogitsProcessor::AllowedTokens(even).process(history, &mut logits)?;
/// assert_eq!(logits[..3], [1.0, f32::NEG_INFINITY, 1.0]);
/// # Ok::<(), candle_gpt2_generation::GenerationError>(())
/// ```
#[derive(Clone)]
pub struct AllowedTokens(pub(super) Arc<dyn Fn(History<'_>) -> Vec<u32> + Send + Sync>);

impl AllowedTokens {
    /// Wraps the function.
    pub fn new(allowed: impl Fn(History<'_>) -> Vec<u32> + Send + Sync + 'static) -> Self {
        Self(Arc::new(allowed))
    }
}

impl fmt::Debug for AllowedTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a function")
    }
}

/// A function that may change the logits in any way.
///
/// The result must depend only on the tokens and the logits. Completions call the function on several
/// threads and in any order.
///
/// ```
/// use candle_gpt2_generation::{History, LogitsFunction, LogitsProcessor};
///
/// // Makes the end, token 0, more likely with each new token.
/// let ending = LogitsFunction::new(|history, logits| {
///     logits[0] += history.generated().len() as f32;
///     Ok(())
/// });
/// let mut logits = [0.5; 11];
/// LogitsProcessor::Function(ending).process(History { ids: &[5, 7, 9, 4], prompt_len: 1 }, &mut logits)?;
/// assert_eq!(logits[..2], [3.5, 0.5]);
/// # Ok::<(), candle_gpt2_generation::GenerationError>(())
/// ```
#[derive(Clone)]
pub struct LogitsFunction(pub(super) Arc<ChangesLogits>);

type ChangesLogits = dyn Fn(History<'_>, &mut [f32]) -> Result<(), GenerationError> + Send + Sync;

impl LogitsFunction {
    /// Wraps the function; an error from the function ends the completion.
    pub fn new(
        function: impl Fn(History<'_>, &mut [f32]) -> Result<(), GenerationError> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(function))
    }
}

impl fmt::Debug for LogitsFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a function")
    }
}

/// A constraint on the completion of a prompt, such as a grammar.
///
/// Its results must depend only on the tokens that it receives. Completions of one request share the
/// constraint and call it on several threads and in any order.
///
/// ```
/// use candle_gpt2_generation::{Constraint, GenerationError};
///
/// /// Allows only increasing ids.
/// #[derive(Debug)]
/// struct Rising;
///
/// impl Constraint for Rising {
///     fn allow(&self, generated: &[u32], allowed: &mut [bool]) -> Result<(), GenerationError> {
///         let last = generated.last().map_or(0, |last| *last as usize + 1);
///         allowed.iter_mut().take(last).for_each(|is_allowed| *is_allowed = false);
///         Ok(())
///     }
///
///     fn is_complete(&self, generated: &[u32]) -> Result<bool, GenerationError> {
///         Ok(generated.len() == 3)
///     }
/// }
///
/// let mut allowed = [true; 5];
/// Rising.allow(&[0, 2], &mut allowed)?;
/// assert_eq!(allowed, [false, false, false, true, true]);
/// # Ok::<(), GenerationError>(())
/// ```
pub trait Constraint: Send + Sync + fmt::Debug {
    /// Sets `allowed` to true for every token that may come next.
    ///
    /// `allowed` has one entry for each row of the vocabulary, initially false. End-of-text tokens may come
    /// where the completion may end.
    ///
    /// # Errors
    /// Returns an error if no continuation can be determined, for example because the tokens violate the
    /// constraint.
    fn allow(&self, generated: &[u32], allowed: &mut [bool]) -> Result<(), GenerationError>;

    /// Name of the option that sets the constraint, for error messages.
    fn option(&self) -> &'static str {
        "constraint"
    }

    /// Returns whether the completion must end after `generated`.
    ///
    /// # Errors
    /// Returns the same errors as [`Constraint::allow`].
    fn is_complete(&self, generated: &[u32]) -> Result<bool, GenerationError>;
}

pub(super) fn keep_allowed(allowed: &[u32], logits: &mut [f32]) -> Result<(), GenerationError> {
    let vocab_size = logits.len();
    let indices: Vec<usize> = allowed
        .iter()
        .filter_map(|id| usize::try_from(*id).ok())
        .filter(|index| *index < vocab_size)
        .collect();
    if indices.is_empty() || indices.len() < allowed.len() {
        return Err(GenerationError::AllowedTokens { vocab_size, found: allowed.to_vec() });
    }
    let mut is_allowed = vec![false; vocab_size];
    indices.into_iter().for_each(|index| is_allowed[index] = true);
    keep_only(&is_allowed, logits);
    Ok(())
}

pub(super) fn keep_conforming(
    constraint: &dyn Constraint,
    generated: &[u32],
    logits: &mut [f32],
) -> Result<(), GenerationError> {
    let mut allowed = vec![false; logits.len()];
    constraint.allow(generated, &mut allowed)?;
    keep_only(&allowed, logits);
    Ok(())
}

/// Removes all tokens that are not allowed.
fn keep_only(allowed: &[bool], logits: &mut [f32]) {
    let others = logits.iter_mut().zip(allowed).filter(|(_, allowed)| !**allowed);
    others.for_each(|(logit, _)| *logit = f32::NEG_INFINITY);
}
