//! What all grammars of a vocabulary share, and the limits under which the library reads them.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::{Logger, Matcher, ParserFactory, panic_utils};

use crate::constraint::GrammarConstraint;
use crate::error::told;
use crate::tokens::{Tokens, Words};
use crate::{Grammar, GrammarError};

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

/// Fails where the first step of the grammar's lexer is beyond its limits. The library takes that step without any when it makes
/// a parser (llguidance 1.9.1, `Lexer::from`), and does not come back from some expressions with `&` and `~`.
pub(crate) fn check_first_step(grammar: TopLevelGrammar, factory: &ParserFactory) -> Result<(), String> {
    // What the library panics at is wrong with the grammar otherwise, too.
    let checked = panic_utils::catch_unwind(AssertUnwindSafe(|| Ok(first_step(grammar, factory))));
    checked.unwrap_or(Ok(()))
}

fn first_step(grammar: TopLevelGrammar, factory: &ParserFactory) -> Result<(), String> {
    let mut limits = factory.limits().clone();
    let (tokens, logger) = (factory.tok_env().clone(), &mut Logger::new(0, 0));
    // What is wrong with it otherwise is said by the parser.
    let read = GrammarInit::Serialized(grammar).to_cgrammar(
        Some(tokens),
        logger,
        limits.clone(),
        factory.extra_lexemes(),
    );
    let Ok(read) = read else { return Ok(()) };
    let Ok(mut lexer) = read.lexer_spec().to_regex_vec(&mut limits) else { return Ok(()) };
    lexer.set_fuel(limits.initial_lexer_fuel);
    let start = lexer.initial_state(&read.lexer_spec().all_lexemes());
    for byte in 0..=u8::MAX {
        lexer.transition(start, byte);
        if lexer.has_error() {
            return Err("it is too complex; make what `&`, `~`, patterns and lengths combine simpler".into());
        }
    }
    Ok(())
}
