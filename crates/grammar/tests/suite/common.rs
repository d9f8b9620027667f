//! Vocabularies, grammars with independent checks for their texts, and random walks.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_engine::Vocabulary;
use candle_gpt2_generation::{Constraint, LogitsProcessor};
use candle_gpt2_grammar::{Compiler, Grammar, GrammarError};
use candle_gpt2_testing::{CheckpointFolder, fixture_path};
use candle_gpt2_weights::{Checkpoint, Tokenizer, load_tokenizer};
use serde_json::{Value, json};

/// Vocabulary of the tiny checkpoint, which has a token for each byte; token 0 ends a text.
pub(crate) fn tiny() -> Vocabulary {
    let tokenizer = load_tokenizer(fixture_path("tiny-checkpoint")).unwrap();
    vocabulary(tokenizer, 300)
}

/// Creates a vocabulary with `vocab_size` rows.
pub(crate) fn vocabulary(tokenizer: Tokenizer, vocab_size: usize) -> Vocabulary {
    let folder = CheckpointFolder::tiny().with_config(json!({ "vocab_size": vocab_size }));
    Vocabulary::new(&Checkpoint::open(folder.path()).unwrap(), Some(tokenizer))
}

pub(crate) fn compiled(vocabulary: &Vocabulary, grammar: &Grammar, ends: &[u32]) -> Arc<dyn Constraint> {
    compiled_by(&Compiler::new(vocabulary).unwrap(), grammar, ends)
}

pub(crate) fn compiled_by(compiler: &Compiler, grammar: &Grammar, ends: &[u32]) -> Arc<dyn Constraint> {
    // Several tests compile grammars concurrently, so retry if the queue is full, as a client would.
    const MAX_TRIES: usize = 600;
    for _ in 0..MAX_TRIES {
        match compiler.compile(grammar, ends) {
            Ok(LogitsProcessor::Constraint(constraint)) => return constraint,
            Err(GrammarError::Busy { .. }) => thread::sleep(Duration::from_millis(50)),
            other => panic!("{other:?}"),
        }
    }
    panic!("the compiler is still busy after {MAX_TRIES} tries");
}

/// Returns the tokens that are allowed next.
pub(crate) fn allowed(constraint: &dyn Constraint, ids: &[u32], rows: usize) -> Vec<u32> {
    let mut allowed = vec![false; rows];
    constraint.allow(ids, &mut allowed).unwrap();
    (0..).zip(allowed).filter(|(_, allowed)| *allowed).map(|(id, _)| id).collect()
}

/// Samples allowed tokens uniformly; returns the tokens and whether the text has ended.
pub(crate) fn walk(
    constraint: &dyn Constraint,
    ends: &[u32],
    rows: usize,
    max_tokens: usize,
    random: &mut RandomStream,
) -> (Vec<u32>, bool) {
    let mut ids = Vec::new();
    while ids.len() < max_tokens {
        let next = allowed(constraint, &ids, rows);
        let id = next[usize::try_from(random.below(next.len() as u64)).unwrap()];
        ids.push(id);
        if ends.contains(&id) || constraint.is_complete(&ids).unwrap() {
            return (ids, true);
        }
    }
    (ids, false)
}

/// Grammar with independent checks for whole texts and, if possible, for prefixes.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) grammar: Grammar,
    pub(crate) is_whole: fn(&str) -> bool,
    pub(crate) is_prefix: fn(&str) -> bool,
}

pub(crate) fn cases() -> Vec<Case> {
    let person = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 4 },
            "age": { "type": "integer", "minimum": 0, "maximum": 120 },
            "tags": { "type": "array", "items": { "enum": ["a", "bc", null] }, "maxItems": 2 },
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": false,
    });
    let tree = json!({
        "$defs": { "tree": { "anyOf": [
            { "type": "boolean" },
            { "type": "array", "items": { "$ref": "#/$defs/tree" }, "minItems": 2, "maxItems": 2 },
        ] } },
        "$ref": "#/$defs/tree",
    });
    let sums = "start: term (\"+\" term)*\nterm: \"x\" | \"(\" start \")\"\n";
    let any = |_: &str| true;
    vec![
        Case { name: "person", grammar: Grammar::JsonSchema(person), is_whole: is_person, is_prefix: any },
        Case { name: "tree", grammar: Grammar::JsonSchema(tree), is_whole: is_tree_text, is_prefix: any },
        Case { name: "object", grammar: Grammar::JsonObject, is_whole: is_object, is_prefix: any },
        Case {
            name: "date",
            grammar: Grammar::Regex(r"[0-3]\d (May|June) 19[0-9]{2}".into()),
            is_whole: |text| is_date(text, true),
            is_prefix: |text| is_date(text, false),
        },
        Case {
            name: "words",
            grammar: Grammar::Regex("[a-z]{1,3}(, [a-z]{1,3})*!?".into()),
            is_whole: |text| is_words(text, true),
            is_prefix: |text| is_words(text, false),
        },
        Case {
            name: "sums",
            grammar: Grammar::Lark(sums.into()),
            is_whole: |text| is_sum(text, true),
            is_prefix: |text| is_sum(text, false),
        },
    ]
}

fn is_person(text: &str) -> bool {
    let Ok(Value::Object(person)) = serde_json::from_str(text) else { return false };
    let name = person["name"].as_str().is_some_and(|name| name.chars().count() <= 4);
    let age = person["age"].as_u64().is_some_and(|age| age <= 120);
    let is_tag = |tag: &Value| [json!("a"), json!("bc"), json!(null)].contains(tag);
    let tags = person["tags"].as_array().is_some_and(|tags| tags.len() <= 2 && tags.iter().all(is_tag));
    name && age && tags && person.len() == 3 && !text.contains("  ")
}

fn is_tree_text(text: &str) -> bool {
    fn is_tree(value: &Value) -> bool {
        value.is_boolean()
            || value.as_array().is_some_and(|items| items.len() == 2 && items.iter().all(is_tree))
    }
    serde_json::from_str(text).is_ok_and(|value| is_tree(&value))
}

/// Whether a text is a JSON object; parses no `Value`, because a number may exceed its range.
fn is_object(text: &str) -> bool {
    text.starts_with('{') && serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
}

fn is_date(text: &str, is_whole: bool) -> bool {
    ["May", "June"].iter().any(|month| {
        let pattern = format!("0d {month} 19dd");
        let fits = |(letter, pattern): (char, char)| match pattern {
            '0' => ('0'..='3').contains(&letter),
            'd' => letter.is_numeric(),
            other => letter == other,
        };
        let (length, longest) = (text.chars().count(), pattern.chars().count());
        (length == longest || !is_whole && length < longest) && text.chars().zip(pattern.chars()).all(fits)
    })
}

fn is_words(text: &str, is_whole: bool) -> bool {
    let (text, has_mark) = text.strip_suffix('!').map_or((text, false), |text| (text, true));
    let words: Vec<&str> = text.split(", ").collect();
    let letters = |word: &str| word.len() <= 3 && word.bytes().all(|byte| byte.is_ascii_lowercase());
    let is_word = |word: &&str| !word.is_empty() && letters(word);
    if is_whole || has_mark {
        return words.iter().all(is_word);
    }
    let Some((last, before)) = words.split_last() else { return false };
    before.iter().all(is_word) && letters(last.strip_suffix(',').unwrap_or(last))
}

fn is_sum(text: &str, is_whole: bool) -> bool {
    let (mut depth, mut needs_term) = (0, true);
    for letter in text.chars() {
        match (letter, needs_term) {
            ('x', true) => needs_term = false,
            ('(', true) => depth += 1,
            (')', false) if depth > 0 => depth -= 1,
            ('+', false) => needs_term = true,
            _ => return false,
        }
    }
    !is_whole || depth == 0 && !needs_term
}
