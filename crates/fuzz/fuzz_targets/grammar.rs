//! Fuzzes untrusted grammars with the built-in model's tokens.
//!
//! Covers parsing a grammar and computing the tokens that may follow a prefix. The first byte selects the
//! kind of grammar.
#![no_main]

use std::sync::LazyLock;

use candle_gpt2_engine::{ModelOptions, Silent};
use candle_gpt2_generation::LogitsProcessor;
use candle_gpt2_grammar::{Compiler, Grammar, GrammarError};

static COMPILER: LazyLock<(Compiler, usize)> = LazyLock::new(|| {
    let opened = ModelOptions::default().open(&Silent).expect("the model inside the program");
    let compiler = Compiler::new(opened.vocabulary()).expect("a tokenizer");
    (compiler, opened.config().vocab_size)
});

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some((kind, source)) = input.split_first() else { return };
    let Ok(source) = std::str::from_utf8(source) else { return };
    let grammar = match kind % 3 {
        0 => Grammar::Regex(source.into()),
        1 => Grammar::Lark(source.into()),
        _ => match serde_json::from_str(source) {
            Ok(schema) => Grammar::JsonSchema(schema),
            Err(_) => return,
        },
    };
    let (compiler, vocab_size) = &*COMPILER;
    let constraint = match compiler.compile(&grammar, &[]) {
        Ok(LogitsProcessor::Constraint(constraint)) => constraint,
        Ok(_) => unreachable!("a grammar is a constraint"),
        Err(error) => return assert!(!matches!(error, GrammarError::Busy { .. }), "{error}"),
    };
    let mut generated = Vec::new();
    for step in 0..16 {
        let mut allowed = vec![false; *vocab_size];
        // Computing the allowed tokens may exceed a limit, which ends generation.
        if constraint.allow(&generated, &mut allowed).is_err() {
            break;
        }
        let ids: Vec<usize> = (0..*vocab_size).filter(|id| allowed[*id]).collect();
        if ids.is_empty() {
            break;
        }
        let chosen = usize::from(input[step % input.len()]) * 7919 % ids.len();
        generated.push(u32::try_from(ids[chosen]).expect("an id"));
    }
});
