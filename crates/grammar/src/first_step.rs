//! The one step of a grammar that the library takes without a limit, taken under one before.

use std::panic::AssertUnwindSafe;

use llguidance::api::{GrammarInit, TopLevelGrammar};
use llguidance::{Logger, ParserFactory, panic_utils};

/// Fails if the first step of the grammar's lexer is beyond its limits. The library takes that step without any when it makes
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
