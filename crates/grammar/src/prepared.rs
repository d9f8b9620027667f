//! Data that all grammars for a vocabulary share, and the limits on compiling a grammar.

use std::sync::Arc;
use std::time::Duration;

use llguidance::api::ParserLimits;
use llguidance::{Matcher, ParserFactory};

use crate::constraint::GrammarConstraint;
use crate::error::user_message;
use crate::tokens::{TokenBytes, Tokens};
use crate::{Grammar, GrammarError};

/// Stack size for compiling a grammar.
///
/// The library limits its recursion depth, so every grammar that it accepts needs far less than this.
pub(crate) const STACK_BYTES: usize = 64 << 20;
/// Maximum time to compile a grammar.
///
/// Typical tool schemas take milliseconds.
pub(crate) const COMPILE_TIMEOUT: Duration = Duration::from_secs(5);

/// Tokens of a vocabulary, and the library's parser factory for these tokens.
pub(crate) struct Prepared {
    tokens: Arc<Tokens>,
    factory: ParserFactory,
}

impl Prepared {
    pub(crate) fn new(words: TokenBytes) -> Result<Self, GrammarError> {
        let tokens = Arc::new(Tokens::new(words));
        let failed = |what: String| GrammarError::Tokenizer { what: user_message(&what) };
        let built = ParserFactory::new_simple(&tokens.trie);
        let mut factory = built.map_err(|error| failed(format!("{error:#}")))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self { tokens, factory })
    }

    /// Compiles a grammar into a constraint.
    pub(crate) fn read(
        &self,
        grammar: &Grammar,
        end_tokens: &[u32],
    ) -> Result<GrammarConstraint, GrammarError> {
        let parser = grammar.parser(&self.factory)?;
        GrammarConstraint::new(grammar.kind(), Matcher::new(Ok(parser)), Arc::clone(&self.tokens), end_tokens)
    }
}

/// Limits on a grammar's cost, which the library enforces.
fn limits() -> ParserLimits {
    /// Maximum number of lexer states, each of about a kilobyte.
    const MAX_LEXER_STATES: usize = 50_000;
    /// Maximum number of parser items per token.
    ///
    /// Typical grammars need tens of items. All sequences in a batch wait for the slowest grammar in each
    /// step, so this limit must be low.
    const MAX_STEP_ITEMS: usize = 2_000;
    const MAX_ROW_ITEMS: usize = 200;
    ParserLimits {
        max_lexer_states: MAX_LEXER_STATES,
        step_max_items: MAX_STEP_ITEMS,
        max_items_in_row: MAX_ROW_ITEMS,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}
