//! Rewrites right recursion as left recursion.
//!
//! The library's parser stores one item for each open right recursion. With `u: | WORD u`, a text of `n`
//! words needs `n` items per word and soon exceeds the limit per step. Left recursion needs one item.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use llguidance::earley::lexerspec::LexerSpec;
use llguidance::earley::{CGrammar, CSymIdx, Grammar, SymIdx};

/// Maximum number of mutually recursive symbols.
///
/// The number of replacement rules grows cubically.
const MAX_SYMBOLS: usize = 16;

/// Replaces right recursion with left recursion without changing the language.
///
/// Symbols `S` with rules `S -> a T` and `S -> b`, in which the last symbols recurse, form a finite
/// automaton. The parts before the last symbols are its transitions. For each symbol `E` that other rules
/// use, `from E to S` derives the texts that lead from `E` to `S`:
///
/// - `(from E to E) -> `
/// - `(from E to T) -> (from E to S) a`
/// - `E -> (from E to S) b`
///
/// # Errors
/// If the library rejects a rule.
pub(crate) fn without_right_recursion(
    grammar: &CGrammar,
    reachable: &[CSymIdx],
    lexer: &LexerSpec,
) -> Result<Option<Grammar>, String> {
    let wrong = |error: &dyn ToString| error.to_string();
    let components = components(grammar, reachable);
    if components.is_empty() || grammar.parametric() {
        return Ok(None);
    }
    let mut new_grammar = Grammar::new(None);
    let start = grammar.sym_data(grammar.start());
    let first = new_grammar.fresh_symbol_ext("start of all", start.props.clone());
    let mut symbols: HashMap<usize, SymIdx> = HashMap::new();
    for symbol in reachable {
        let data = grammar.sym_data(*symbol);
        let mut props = data.props.clone();
        props.is_start = false;
        let copy = new_grammar.fresh_symbol_ext(&data.name, props);
        symbols.insert(symbol.as_index(), copy);
        if let Some(lexeme) = data.lexeme {
            new_grammar.make_terminal(copy, lexeme, lexer).map_err(|error| wrong(&error))?;
        } else if let Some(options) = &data.gen_grammar {
            new_grammar.make_gen_grammar(copy, options.clone()).map_err(|error| wrong(&error))?;
        }
    }
    new_grammar.add_rule(first, vec![symbols[&grammar.start().as_index()]]).map_err(|error| wrong(&error))?;
    let copied = |rule: &[CSymIdx]| rule.iter().map(|inner| symbols[&inner.as_index()]).collect::<Vec<_>>();
    for symbol in reachable.iter().filter(|symbol| grammar.sym_data(**symbol).lexeme.is_none()) {
        let data = grammar.sym_data(*symbol);
        let copy = symbols[&symbol.as_index()];
        let Some(component) = components.iter().find(|component| component.contains(&symbol.as_index()))
        else {
            for rule in rules(grammar, *symbol) {
                new_grammar.add_rule(copy, copied(rule)).map_err(|error| wrong(&error))?;
            }
            if data.is_nullable {
                new_grammar.add_rule(copy, Vec::new()).map_err(|error| wrong(&error))?;
            }
            continue;
        };
        // Path symbols from this symbol to each symbol in the component.
        let props = data.props.for_wrapper();
        let mut path =
            |inner: &usize| new_grammar.fresh_symbol_ext(&format!("{}_to_{inner}", data.name), props.clone());
        let paths: BTreeMap<usize, SymIdx> = component.iter().map(|inner| (*inner, path(inner))).collect();
        new_grammar.add_rule(paths[&symbol.as_index()], Vec::new()).map_err(|error| wrong(&error))?;
        for from in component {
            let from_symbol = CSymIdx::new_checked(*from);
            for rule in rules(grammar, from_symbol) {
                let (to, before) = match rule.split_last() {
                    Some((last, before)) if component.contains(&last.as_index()) => {
                        (paths[&last.as_index()], before)
                    }
                    _ => (copy, rule),
                };
                let new = [vec![paths[from]], copied(before)].concat();
                if new != [to] {
                    new_grammar.add_rule(to, new).map_err(|error| wrong(&error))?;
                }
            }
            if grammar.sym_data(from_symbol).is_nullable {
                new_grammar.add_rule(copy, vec![paths[from]]).map_err(|error| wrong(&error))?;
            }
        }
    }
    Ok(Some(new_grammar))
}

/// Sets of symbols that are mutually right-recursive.
fn components(grammar: &CGrammar, reachable: &[CSymIdx]) -> Vec<BTreeSet<usize>> {
    let last_symbols = |symbol: CSymIdx| {
        let data = grammar.sym_data(symbol);
        let may_change = data.lexeme.is_none() && data.gen_grammar.is_none() && {
            let mut props = data.props.clone();
            props.is_start = false;
            !props.is_special()
        };
        let lasts = rules(grammar, symbol).filter_map(|rule| rule.last()).map(CSymIdx::as_index);
        if may_change { lasts.collect() } else { BTreeSet::new() }
    };
    let mut edges: BTreeMap<usize, BTreeSet<usize>> =
        reachable.iter().map(|symbol| (symbol.as_index(), last_symbols(*symbol))).collect();
    // A symbol without outgoing edges is not on a cycle. Remove such symbols until none are left.
    loop {
        let ends: BTreeSet<usize> =
            edges.iter().filter(|(_, lasts)| lasts.is_empty()).map(|(symbol, _)| *symbol).collect();
        if ends.is_empty() {
            break;
        }
        edges.retain(|symbol, _| !ends.contains(symbol));
        edges.values_mut().for_each(|lasts| lasts.retain(|last| !ends.contains(last)));
    }
    let reached = |from: usize| {
        let (mut known, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(symbol) = next.pop() {
            next.extend(edges[&symbol].iter().filter(|last| known.insert(**last)));
        }
        known
    };
    if edges.len() > MAX_SYMBOLS * MAX_SYMBOLS {
        return Vec::new();
    }
    let reached: BTreeMap<usize, BTreeSet<usize>> =
        edges.keys().map(|symbol| (*symbol, reached(*symbol))).collect();
    let recurses_through =
        |symbol: &usize, other: &usize| reached[symbol].contains(other) && reached[other].contains(symbol);
    let components: BTreeSet<BTreeSet<usize>> = edges
        .keys()
        .map(|symbol| edges.keys().copied().filter(|other| recurses_through(symbol, other)).collect())
        .collect();
    let is_small = |component: &BTreeSet<usize>| (1..=MAX_SYMBOLS).contains(&component.len());
    components.into_iter().filter(is_small).collect()
}

fn rules(grammar: &CGrammar, symbol: CSymIdx) -> impl Iterator<Item = &[CSymIdx]> {
    grammar.rules_of(symbol).iter().map(|rule| grammar.rule_rhs(*rule).0)
}
