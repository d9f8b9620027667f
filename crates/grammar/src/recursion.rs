//! Right recursion as left recursion.
//!
//! The library's parser keeps an item for each open right recursion, so a text of `n` words by `u: | WORD u` would take `n` items
//! for each word, and soon more than a step may have. Left recursion takes one.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use llguidance::earley::lexerspec::LexerSpec;
use llguidance::earley::{CGrammar, CSymIdx, Grammar, SymIdx};

/// Most symbols that recurse through each other. The rules that replace them are the third power.
const MOST_SYMBOLS: usize = 16;

/// The grammar with its right recursions turned around, which changes none of its texts. `None` if it has none.
///
/// Symbols `S` with rules `S -> a T` and `S -> b`, where the last symbols recurse, are a finite automaton over the parts before
/// them. For each symbol `E` that others use, `from E to S` has the texts that lead from `E` to `S`:
/// `(from E to E) -> `, `(from E to T) -> (from E to S) a` and `E -> (from E to S) b`.
///
/// # Errors
/// The library's, if it refuses a rule.
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
    let mut made = Grammar::new(None);
    let start = grammar.sym_data(grammar.start());
    let first = made.fresh_symbol_ext("start of all", start.props.clone());
    let mut symbols: HashMap<usize, SymIdx> = HashMap::new();
    for symbol in reachable {
        let data = grammar.sym_data(*symbol);
        let mut props = data.props.clone();
        props.is_start = false;
        let copy = made.fresh_symbol_ext(&data.name, props);
        symbols.insert(symbol.as_index(), copy);
        if let Some(lexeme) = data.lexeme {
            made.make_terminal(copy, lexeme, lexer).map_err(|error| wrong(&error))?;
        } else if let Some(options) = &data.gen_grammar {
            made.make_gen_grammar(copy, options.clone()).map_err(|error| wrong(&error))?;
        }
    }
    made.add_rule(first, vec![symbols[&grammar.start().as_index()]]).map_err(|error| wrong(&error))?;
    let copied = |rule: &[CSymIdx]| rule.iter().map(|inner| symbols[&inner.as_index()]).collect::<Vec<_>>();
    for symbol in reachable.iter().filter(|symbol| grammar.sym_data(**symbol).lexeme.is_none()) {
        let data = grammar.sym_data(*symbol);
        let copy = symbols[&symbol.as_index()];
        let Some(component) = components.iter().find(|component| component.contains(&symbol.as_index()))
        else {
            for rule in rules(grammar, *symbol) {
                made.add_rule(copy, copied(rule)).map_err(|error| wrong(&error))?;
            }
            if data.is_nullable {
                made.add_rule(copy, Vec::new()).map_err(|error| wrong(&error))?;
            }
            continue;
        };
        // From this symbol to each of the component.
        let props = data.props.for_wrapper();
        let mut path =
            |inner: &usize| made.fresh_symbol_ext(&format!("{}_to_{inner}", data.name), props.clone());
        let paths: BTreeMap<usize, SymIdx> = component.iter().map(|inner| (*inner, path(inner))).collect();
        made.add_rule(paths[&symbol.as_index()], Vec::new()).map_err(|error| wrong(&error))?;
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
                    made.add_rule(to, new).map_err(|error| wrong(&error))?;
                }
            }
            if grammar.sym_data(from_symbol).is_nullable {
                made.add_rule(copy, vec![paths[from]]).map_err(|error| wrong(&error))?;
            }
        }
    }
    Ok(Some(made))
}

/// Symbols that recurse through each other at the ends of their rules.
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
    // What leads to no recursion goes, from the ends inward.
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
    if edges.len() > MOST_SYMBOLS * MOST_SYMBOLS {
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
    let is_small = |component: &BTreeSet<usize>| (1..=MOST_SYMBOLS).contains(&component.len());
    components.into_iter().filter(is_small).collect()
}

fn rules(grammar: &CGrammar, symbol: CSymIdx) -> impl Iterator<Item = &[CSymIdx]> {
    grammar.rules_of(symbol).iter().map(|rule| grammar.rule_rhs(*rule).0)
}
