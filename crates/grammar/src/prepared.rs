//! What all grammars of a vocabulary share, and the limits under which the library reads them.

use std::sync::Arc;
use std::time::Duration;

use llguidance::api::ParserLimits;
use llguidance::{Matcher, ParserFactory};

use crate::constraint::GrammarConstraint;
use crate::error::told;
use crate::tokens::{Tokens, Words};
use crate::{Grammar, GrammarError};

/// The library reads grammars by recursion, of a depth that it bounds: far below this for all that it accepts.
pub(crate) const STACK_BYTES: usize = 64 << 20;
/// Longest time to read a grammar. Schemas of tools take milliseconds.
pub(crate) const LONGEST: Duration = Duration::from_secs(5);

/// The tokens of a vocabulary, and the library's view of them.
pub(crate) struct Prepared {
    tokens: Arc<Tokens>,
    factory: ParserFactory,
}

impl Prepared {
    pub(crate) fn new(words: Words) -> Result<Self, GrammarError> {
        let tokens = Arc::new(Tokens::new(words));
        let failed = |what: String| GrammarError::Tokenizer { what: told(&what) };
        let built = ParserFactory::new_simple(&tokens.trie);
        let mut factory = built.map_err(|error| failed(format!("{error:#}")))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self { tokens, factory })
    }

    /// The constraint to texts of the grammar.
    pub(crate) fn read(
        &self,
        grammar: &Grammar,
        end_tokens: &[u32],
    ) -> Result<GrammarConstraint, GrammarError> {
        let parser = grammar.parser(&self.factory)?;
        GrammarConstraint::new(grammar.kind(), Matcher::new(Ok(parser)), Arc::clone(&self.tokens), end_tokens)
    }
}

/// What a grammar may cost, in the library's units.
fn limits() -> ParserLimits {
    /// States of its lexer, each about a kilobyte.
    const MAX_LEXER_STATES: usize = 50_000;
    /// Items of its parser for a token, of which usual grammars have tens: texts of others wait for each step.
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
