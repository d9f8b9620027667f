//! Grammar constraint, which computes the tokens that may follow a sequence's generated tokens.

use std::fmt;
use std::sync::Arc;

use candle_gpt2_generation::{Constraint, GenerationError};
use llguidance::Matcher;

use crate::GrammarError;
use crate::error::user_message;
use crate::states::{State, States};
use crate::tokens::Tokens;

/// Grammar compiled for a vocabulary's tokens.
pub(crate) struct GrammarConstraint {
    rules: Rules,
    /// State before the first token.
    start: Arc<State>,
    states: States,
}

/// Data shared by all states of a constraint.
struct Rules {
    kind: &'static str,
    tokens: Arc<Tokens>,
    /// End tokens without bytes.
    silent_ends: Vec<u32>,
    /// End tokens with bytes, which are part of the text.
    written_ends: Vec<u32>,
}

impl fmt::Debug for GrammarConstraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarConstraint").field("kind", &self.rules.kind).finish_non_exhaustive()
    }
}

impl GrammarConstraint {
    /// Creates a constraint from `matcher`, which must be in the initial state.
    pub(crate) fn new(
        kind: &'static str,
        matcher: Matcher,
        tokens: Arc<Tokens>,
        end_tokens: &[u32],
    ) -> Result<Self, GrammarError> {
        let wrong = |what: String| GrammarError::Grammar { kind, what };
        let (written_ends, silent_ends) = end_tokens.iter().partition(|id| tokens.is_written(**id));
        let rules = Rules { kind, tokens, silent_ends, written_ends };
        let start = rules.state(matcher, true).map_err(wrong)?;
        if start.is_complete {
            return Err(wrong("matches only the empty string".into()));
        }
        Ok(Self { rules, start: Arc::new(start), states: States::default() })
    }

    /// Returns a bit mask of the tokens that may follow; the lowest bit represents the first token.
    pub(crate) fn allowed(&self, generated: &[u32]) -> Result<Vec<u32>, GenerationError> {
        Ok(self.state(generated)?.allowed.as_slice().to_vec())
    }

    fn state(&self, generated: &[u32]) -> Result<Arc<State>, GenerationError> {
        if generated.is_empty() {
            return Ok(Arc::clone(&self.start));
        }
        let (known, from) = self.states.longest(generated).unwrap_or_else(|| (0, Arc::clone(&self.start)));
        if known == generated.len() {
            return Ok(from);
        }
        let failed = |what: String| GenerationError::Constraint { what };
        let state = Arc::new(self.rules.read(&from.matcher, generated, known).map_err(failed)?);
        self.states.keep(generated, known, &state);
        Ok(state)
    }
}

impl Constraint for GrammarConstraint {
    fn allow(&self, generated: &[u32], allowed: &mut [bool]) -> Result<(), GenerationError> {
        let state = self.state(generated)?;
        state
            .allowed
            .iter_set_entries(|index| allowed.get_mut(index).into_iter().for_each(|entry| *entry = true));
        Ok(())
    }

    fn is_complete(&self, generated: &[u32]) -> Result<bool, GenerationError> {
        let has_ended = generated.last().is_some_and(|id| self.rules.is_end(*id));
        Ok(has_ended || self.state(generated)?.is_complete)
    }

    fn option(&self) -> &'static str {
        self.rules.kind
    }
}

impl Rules {
    /// Advances `matcher` from the first `known` tokens to the end of `generated`.
    fn read(&self, matcher: &Matcher, generated: &[u32], known: usize) -> Result<State, String> {
        let mut matcher = matcher.clone();
        for (index, id) in generated.iter().enumerate().skip(known) {
            let unfit = |why: &str| {
                format!(
                    "{}: token {id} (token {} of the completion) does not conform: {why}",
                    self.kind,
                    index + 1
                )
            };
            if !self.tokens.is_written(*id) {
                return Err(unfit("it has no text"));
            }
            matcher
                .consume_token(self.tokens.in_trie(*id))
                .map_err(|error| unfit(&user_message(&error.to_string())))?;
        }
        let failed = |what: String| format!("{} after {} tokens: {what}", self.kind, generated.len());
        self.state(matcher, false).map_err(failed)
    }

    /// Computes the tokens that may follow in the matcher's current state.
    fn state(&self, mut matcher: Matcher, is_start: bool) -> Result<State, String> {
        let set = self.tokens.trie.tok_trie().alloc_token_set();
        // A stopped matcher accepts no further tokens.
        let (mut allowed, may_end) = if matcher.is_stopped() && !matcher.is_error() {
            (set, true)
        } else {
            let mut allowed = matcher.compute_mask().map_err(|error| user_message(&error.to_string()))?;
            let may_end = allowed.is_allowed(self.tokens.end);
            allowed.disallow_token(self.tokens.end);
            self.tokens.complete(&mut allowed, is_start);
            (allowed, may_end)
        };
        let (mut ends, written) = (Vec::new(), self.written_ends.iter().copied());
        for id in written.filter(|id| allowed.is_allowed(*id)).collect::<Vec<_>>() {
            allowed.disallow_token(id);
            ends.extend(self.may_end_with(&matcher, id).then_some(id));
        }
        let is_complete = may_end && allowed.is_zero();
        ends.into_iter().for_each(|id| allowed.allow_token(id));
        if may_end {
            self.silent_ends.iter().for_each(|id| allowed.allow_token(*id));
        }
        if allowed.is_zero() && !may_end {
            return Err("no token in the vocabulary can come next".into());
        }
        Ok(State { matcher, allowed, is_complete })
    }

    /// Whether the text may end with `id`, an end token with bytes.
    fn may_end_with(&self, matcher: &Matcher, id: u32) -> bool {
        let mut matcher = matcher.clone();
        matcher.consume_token(self.tokens.in_trie(id)).is_ok() && matcher.is_accepting().unwrap_or(false)
    }

    fn is_end(&self, id: u32) -> bool {
        self.silent_ends.contains(&id) || self.written_ends.contains(&id)
    }
}
