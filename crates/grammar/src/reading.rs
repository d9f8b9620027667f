//! Compiles a grammar into llguidance's parser, with limits and checks that llguidance lacks.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;

use llguidance::api::{GrammarInit, TopLevelGrammar};
use llguidance::earley::{CGrammar, CSymIdx};
use llguidance::{Logger, ParserFactory, TokenParser, panic_utils};

use crate::recursion;

/// All byte values, any of which may begin a lexeme.
const BYTES: std::ops::RangeInclusive<u8> = 0..=u8::MAX;

/// Compiles a grammar into a parser.
///
/// # Errors
/// If the grammar is invalid or too complex, or can reach a dead end. Messages from the library are
/// returned unchanged.
pub(crate) fn parser(source: TopLevelGrammar, factory: &ParserFactory) -> Result<TokenParser, String> {
    let read = panic_utils::catch_unwind(AssertUnwindSafe(|| {
        let tokens = || Some(factory.tok_env().clone());
        let limits = factory.limits();
        let (mut grammar, lexer) = GrammarInit::Serialized(source).to_internal(tokens(), limits.clone())?;
        let compiled = GrammarInit::Internal(grammar.clone(), lexer.clone()).to_cgrammar(
            tokens(),
            &mut Logger::new(0, 0),
            limits.clone(),
            factory.extra_lexemes(),
        )?;
        let reachable = reachable(&compiled);
        if let Err(what) = check_lexemes(&compiled, &reachable, factory) {
            return Ok(Err(what));
        }
        match recursion::without_right_recursion(&compiled, &reachable, &lexer) {
            Ok(left) => grammar = left.unwrap_or(grammar),
            Err(what) => return Ok(Err(what)),
        }
        factory.create_parser_from_init_default(GrammarInit::Internal(grammar, lexer)).map(Ok)
    }));
    read.map_err(|error| format!("{error:#}"))?
}

/// Symbols reachable from the start symbol.
fn reachable(grammar: &CGrammar) -> Vec<CSymIdx> {
    let mut symbols = vec![grammar.start()];
    let mut known: HashMap<usize, ()> = [(grammar.start().as_index(), ())].into();
    let mut next = 0;
    while let Some(symbol) = symbols.get(next).copied() {
        next += 1;
        for rule in grammar.rules_of(symbol) {
            for inner in grammar.rule_rhs(*rule).0 {
                if known.insert(inner.as_index(), ()).is_none() {
                    symbols.push(*inner);
                }
            }
        }
    }
    symbols
}

/// Rejects a grammar whose lexer is too complex or whose rules can reach a dead end.
///
/// The lexer's first step must stay within the limits. When llguidance 1.9.1 creates a parser
/// (`Lexer::from`), it runs this step without limits and never returns for some expressions with `&` and `~`.
fn check_lexemes(grammar: &CGrammar, reachable: &[CSymIdx], factory: &ParserFactory) -> Result<(), String> {
    let complex =
        || Err("too complex; simplify the parts combined with `&`, `~`, patterns or length limits".into());
    let mut limits = factory.limits().clone();
    // The parser reports all other lexer errors.
    let Ok(mut lexer) = grammar.lexer_spec().to_regex_vec(&mut limits) else { return Ok(()) };
    lexer.set_fuel(limits.initial_lexer_fuel);
    let start = lexer.initial_state(&grammar.lexer_spec().all_lexemes());
    for byte in BYTES {
        lexer.transition(start, byte);
        if lexer.has_error() {
            return complex();
        }
    }
    // Symbols from which at least one finite text can be derived.
    let mut has_text = HashMap::new();
    for symbol in reachable {
        let data = grammar.sym_data(*symbol);
        let Some(lexeme) = data.lexeme else {
            if data.is_nullable || !data.cond_nullable.is_empty() {
                has_text.insert(symbol.as_index(), ());
            }
            continue;
        };
        let mut alone = grammar.lexer_spec().alloc_lexeme_set();
        alone.add(lexeme);
        lexer.set_fuel(limits.initial_lexer_fuel);
        let start = lexer.initial_state(&alone);
        let is_special = lexer.state_desc(start).has_special_token
            || !grammar.lexer_spec().token_range_lexemes(&alone).is_empty();
        if is_special || BYTES.into_iter().any(|byte| !lexer.transition(start, byte).is_dead()) {
            has_text.insert(symbol.as_index(), ());
        }
        if lexer.has_error() {
            return complex();
        }
    }
    loop {
        let known = has_text.len();
        for symbol in reachable.iter().filter(|symbol| grammar.sym_data(**symbol).lexeme.is_none()) {
            let mut rules = grammar.rules_of(*symbol).iter().map(|rule| grammar.rule_rhs(*rule).0);
            if rules.any(|rule| rule.iter().all(|inner| has_text.contains_key(&inner.as_index()))) {
                has_text.insert(symbol.as_index(), ());
            }
        }
        if has_text.len() == known {
            break;
        }
    }
    let leads_nowhere = |rule: &[CSymIdx]| {
        let first = rule.iter().position(|inner| !has_text.contains_key(&inner.as_index()));
        first.is_some_and(|first| first > 0)
    };
    let mut rules = reachable.iter().flat_map(|symbol| grammar.rules_of(*symbol));
    if rules.any(|rule| leads_nowhere(grammar.rule_rhs(*rule).0)) {
        return Err("one part allows no finite text, so generation could never end; \
            remove unsatisfiable parts and infinitely recursive references"
            .into());
    }
    Ok(())
}
