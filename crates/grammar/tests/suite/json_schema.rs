//! Conformance to the JSON Schema standard.
//!
//! Every accepted text is valid, whatever its spelling, and every valid value has an accepted text.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use candle_gpt2_engine::Vocabulary;
use candle_gpt2_generation::{Constraint, LogitsProcessor};
use candle_gpt2_grammar::{Compiler, Grammar, GrammarError};
use serde_json::{Value, json};

use crate::common::tiny;

const ROWS: usize = 300;
const END: u32 = 0;

/// Compiles grammars and checks texts byte by byte.
pub(crate) struct Checker {
    compiler: Compiler,
    byte_tokens: Vec<u32>,
}

impl Checker {
    pub(crate) fn new() -> Self {
        let vocabulary: Vocabulary = tiny();
        let token = |byte: u8| (1..300).find(|id| vocabulary.token_bytes(*id) == [byte]);
        let byte_tokens = (0..=u8::MAX).map(|byte| token(byte).unwrap_or(u32::MAX)).collect();
        Self { compiler: Compiler::new(&vocabulary).unwrap(), byte_tokens }
    }

    /// Compiles a grammar into a constraint or returns the error message.
    pub(crate) fn compile(&self, grammar: &Grammar) -> Result<Arc<dyn Constraint>, String> {
        loop {
            match self.compiler.compile(grammar, &[END]) {
                Ok(LogitsProcessor::Constraint(constraint)) => return Ok(constraint),
                Ok(other) => panic!("{other:?}"),
                Err(GrammarError::Busy { .. }) => thread::sleep(Duration::from_millis(20)),
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    /// Whether the constraint accepts the whole text.
    pub(crate) fn accepts(&self, constraint: &dyn Constraint, text: &str) -> bool {
        let mut ids = Vec::new();
        for byte in text.bytes() {
            let token = self.byte_tokens[usize::from(byte)];
            if constraint.is_complete(&ids).unwrap() || !self.may_follow(constraint, &ids, token) {
                return false;
            }
            ids.push(token);
        }
        self.may_follow(constraint, &ids, END)
    }

    fn may_follow(&self, constraint: &dyn Constraint, ids: &[u32], token: u32) -> bool {
        let mut allowed = vec![false; ROWS];
        constraint.allow(ids, &mut allowed).unwrap();
        allowed[usize::try_from(token).unwrap()]
    }
}

/// Lists spellings of a value: properties in any order, numbers with and without trailing zeros.
pub(crate) fn spellings(value: &Value) -> Vec<String> {
    const MAX_SPELLINGS: usize = 200;
    match value {
        Value::Number(number) => {
            let text = number.to_string();
            let mut texts = vec![text.clone()];
            texts.extend(text.strip_suffix(".0").map(str::to_owned));
            if let Some(number) = number.as_f64() {
                texts.push(format!("{number}"));
                texts.extend(
                    (1..4)
                        .map(|decimals| format!("{number:.decimals$}"))
                        .filter(|text| text.parse() == Ok(number)),
                );
            }
            texts
        }
        Value::Array(items) => {
            let inner: Vec<Vec<String>> = items.iter().map(spellings).collect();
            combinations(&inner, MAX_SPELLINGS)
                .into_iter()
                .map(|items| format!("[{}]", items.join(",")))
                .collect()
        }
        Value::Object(members) => {
            let inner: Vec<Vec<String>> = members
                .iter()
                .map(|(name, member)| {
                    let name = json!(name).to_string();
                    spellings(member).into_iter().map(|text| format!("{name}:{text}")).collect()
                })
                .collect();
            let orders = permutations(inner.len(), MAX_SPELLINGS);
            let combined = combinations(&inner, MAX_SPELLINGS);
            orders
                .iter()
                .flat_map(|order| {
                    combined.iter().map(move |members| {
                        let members: Vec<&str> = order.iter().map(|index| members[*index].as_str()).collect();
                        format!("{{{}}}", members.join(","))
                    })
                })
                .collect()
        }
        other => vec![other.to_string()],
    }
}

/// Lists spellings of a value that contain unnecessary escapes.
///
/// The escapes are in names, in other strings or in both, and replace all characters or only the first.
pub(crate) fn escaped_spellings(value: &Value) -> Vec<String> {
    let all = |text: &str| text.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect::<String>();
    let upper = |text: &str| text.encode_utf16().map(|unit| format!("\\u{unit:04X}")).collect::<String>();
    let first = |text: &str| {
        let plain = json!(text).to_string();
        let mut rest = text.chars();
        match rest.next() {
            Some(letter) if letter != '"' && letter != '\\' && letter >= ' ' => {
                let tail = json!(rest.as_str()).to_string();
                format!("{}{}", all(&letter.to_string()), &tail[1..tail.len() - 1])
            }
            _ => plain[1..plain.len() - 1].to_owned(),
        }
    };
    let slash = |text: &str| {
        let plain = json!(text).to_string();
        plain[1..plain.len() - 1].replace('/', "\\/")
    };
    let plain = |text: &str| {
        let plain = json!(text).to_string();
        plain[1..plain.len() - 1].to_owned()
    };
    let escapes: [&dyn Fn(&str) -> String; 4] = [&all, &upper, &first, &slash];
    let mut texts = Vec::new();
    for escape in escapes {
        texts.push(spell(value, escape, escape));
        texts.push(spell(value, escape, &plain));
        texts.push(spell(value, &plain, escape));
    }
    texts
}

fn spell(value: &Value, name: &dyn Fn(&str) -> String, text: &dyn Fn(&str) -> String) -> String {
    match value {
        Value::String(inner) => format!("\"{}\"", text(inner)),
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(|item| spell(item, name, text)).collect();
            format!("[{}]", items.join(","))
        }
        Value::Object(members) => {
            let members: Vec<String> = members
                .iter()
                .map(|(key, member)| format!("\"{}\":{}", name(key), spell(member, name, text)))
                .collect();
            format!("{{{}}}", members.join(","))
        }
        other => other.to_string(),
    }
}

fn combinations(choices: &[Vec<String>], max: usize) -> Vec<Vec<String>> {
    choices.iter().fold(vec![Vec::new()], |prefixes, choices| {
        let longer = prefixes.iter().flat_map(|prefix| {
            choices.iter().map(move |choice| [prefix.clone(), vec![choice.clone()]].concat())
        });
        longer.take(max).collect()
    })
}

fn permutations(length: usize, max: usize) -> Vec<Vec<usize>> {
    (0..length).fold(vec![Vec::new()], |orders, item| {
        let longer = orders.iter().flat_map(|order: &Vec<usize>| {
            (0..=order.len()).rev().map(move |index| {
                let mut longer = order.clone();
                longer.insert(index, item);
                longer
            })
        });
        longer.take(max).collect()
    })
}

/// Lists the texts that a schema wrongly accepts or rejects.
fn wrong_texts(checker: &Checker, schema: &Value, texts: &[&str], are_valid: bool) -> Vec<String> {
    let constraint = match checker.compile(&Grammar::JsonSchema(schema.clone())) {
        Ok(constraint) => constraint,
        Err(error) => return vec![format!("{schema}: {error}")],
    };
    let wrong = texts.iter().filter(|text| checker.accepts(&*constraint, text) != are_valid);
    wrong.map(|text| format!("{schema}: {text} is valid: {are_valid}")).collect()
}

#[test]
fn schemas_accept_exactly_the_valid_texts() {
    let open = json!({ "type": "object", "properties": { "a": { "type": "integer" }, "é": { "type": "integer" }, "b/": { "type": "null" } } });
    let patterns = json!({ "type": "object", "patternProperties": { "^x": { "type": "integer" } }, "additionalProperties": { "type": "string" } });
    let two_names = json!({ "type": "object", "required": ["a", "b"], "minProperties": 3 });
    let above = |min: f64, max: f64| json!({ "type": "number", "exclusiveMinimum": min, "maximum": max });
    let below = |min: f64, max: f64| json!({ "type": "number", "minimum": min, "exclusiveMaximum": max });
    let multiple = |multiple: f64| json!({ "type": "number", "multipleOf": multiple, "exclusiveMinimum": 0, "maximum": 1 });
    let tilde = json!({ "$defs": { "a~b": { "type": "integer" }, "c/d": { "type": "null" }, "e\"%": { "type": "boolean" }, "": { "const": "empty" } },
        "prefixItems": [{ "$ref": "#/$defs/a~0b" }, { "$ref": "#/$defs/c~1d" }, { "$ref": "#/$defs/e%22%25" }, { "$ref": "#/$defs/" }], "minItems": 4, "items": false });
    let tuple = json!({ "type": "array", "prefixItems": [{ "type": "integer" }], "items": { "type": "null" }, "additionalItems": false });
    let old_tuple =
        json!({ "items": [{ "type": "integer" }], "enum": [[1], [1, 2]], "additionalItems": false });
    let split = json!({ "additionalProperties": false, "anyOf": [{ "type": "object" }], "patternProperties": { "^x": { "type": "integer" } } });
    let draft_4 = json!({ "$schema": "http://json-schema.org/draft-04/schema#", "minimum": 5, "anyOf": [{ "type": "integer" }], "exclusiveMinimum": true });
    let draft_7 = json!({ "$schema": "http://json-schema.org/draft-07/schema#", "definitions": { "n": { "type": "integer" } }, "properties": { "a": { "$ref": "#/definitions/n", "maximum": 3 } }, "additionalProperties": false, "type": "object" });
    let combined = json!({ "allOf": [{ "type": "number", "exclusiveMinimum": 0 }, { "maximum": 0.5 }] });
    let longer = json!({ "type": "array", "minItems": 2.0, "uniqueItems": false, "items": { "type": "string", "maxLength": 1.0 } });
    let long_month = json!({ "type": "string", "format": "date", "pattern": "3" });
    let cases: [(Value, &[&str], &[&str]); 45] = [
        (
            json!({ "multipleOf": 0.25, "minimum": -3 }),
            &["-0.50", "-3.00", "-0.25", "0", "0.50", "7", "null"],
            &["-3.25", "-0.3", "0.3"],
        ),
        (
            json!({ "type": ["number", "string"], "maxLength": 1, "multipleOf": 0.0025, "maximum": 0.5 }),
            &["-0.0050", "-0.5000", "0", "0.5000", "\"a\""],
            &["0.5025", "-0.001", "null", "\"ab\""],
        ),
        (
            json!({ "type": "number", "multipleOf": 2.5, "exclusiveMinimum": -5, "exclusiveMaximum": 5 }),
            &["-2.5", "0", "2.5"],
            &["-5", "-5.0", "5", "5.0", "1"],
        ),
        (json!({ "multipleOf": 0.25, "maximum": -0.5 }), &["-0.50", "-0.75", "-1"], &["-0.25", "0"]),
        (
            json!({ "type": "string", "format": "date" }),
            &[r#""2024-02-29""#, r#""2000-02-29""#, r#""2023-02-28""#, r#""2023-12-31""#],
            &[r#""2023-02-29""#, r#""1900-02-29""#, r#""2024-02-30""#, r#""2023-11-31""#],
        ),
        (
            json!({ "format": "date-time" }),
            &[r#""2024-02-29T10:00:00Z""#, r#""2023-01-31t23:59:59.5+01:00""#, "1"],
            &[r#""2023-02-29T10:00:00Z""#, r#""2024-02-29""#],
        ),
        (long_month, &[r#""2024-01-31""#], &[r#""2024-01-21""#, r#""2023-02-29""#]),
        (
            open.clone(),
            &[r#"{"a":1}"#, r#"{"a":1,"b":"x\ny"}"#, r#"{"é":2,"aa":"x"}"#],
            &[
                r#"{"\u0061":"x"}"#,
                r#"{"a":1,"\u0061":"x"}"#,
                r#"{"\u00e9":"x"}"#,
                r#"{"\u00E9":1}"#,
                r#"{"b\/":1}"#,
                r#"{"b\u002f":1}"#,
            ],
        ),
        (
            patterns,
            &[r#"{"xy":1,"y":"z"}"#],
            &[r#"{"\u0078y":"wrong"}"#, r#"{"xy":"wrong"}"#, r#"{"x\u0079":1}"#],
        ),
        (
            json!({ "type": "object", "properties": { "a\u{1}b": { "type": "null" } }, "additionalProperties": false }),
            &[r#"{"a\u0001b":null}"#],
            &[r#"{"a\u0001b":1}"#],
        ),
        (two_names, &[r#"{"a":1,"b":2,"c":3}"#], &[r#"{"a":1,"b":2}"#, r#"{"a":1,"b":2,"a":3}"#]),
        (above(0.0, 0.5), &["0.5", "0.25", "0.0001"], &["0", "0.0", "-0", "0.000", "0.51"]),
        (above(0.0, 1.0), &["1", "0.25", "1.0"], &["0", "0.0", "1.01"]),
        (above(1.0, 1.5), &["1.5", "1.25", "1.0001"], &["1", "1.0", "1.00", "0.9"]),
        (above(-1.0, -0.5), &["-0.5", "-0.75"], &["-1", "-1.0", "-0.25"]),
        (below(-1.5, -1.0), &["-1.5", "-1.25"], &["-1", "-1.0", "-0.5"]),
        (below(-0.5, 0.0), &["-0.5", "-0.25"], &["-0", "0", "-0.0", "-0.51"]),
        (json!({ "exclusiveMinimum": 0, "exclusiveMaximum": 0.1 }), &["0.05", "null"], &["0", "0.1", "0.10"]),
        (combined, &["0.5", "0.001"], &["0", "0.0"]),
        (
            json!({ "type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 4 }),
            &["2", "3"],
            &["1", "4"],
        ),
        (multiple(0.25), &["0.25", "0.50", "0.75", "1"], &["0", "0.3", "0.26"]),
        (multiple(0.5), &["0.5", "1"], &["0", "0.0", "0.25"]),
        (multiple(0.07), &["0.07", "0.14", "0.98"], &["0", "0.08", "0.7001"]),
        (multiple(0.0001), &["0.0001", "0.5", "1"], &["0", "0.00001"]),
        (json!({ "multipleOf": 0.1, "minimum": 0.7, "maximum": 0.7 }), &["0.7"], &["0.6", "0.8"]),
        (
            json!({ "type": "number", "multipleOf": 0.25, "minimum": -0.5, "maximum": 0.5 }),
            &["-0.50", "-0.25", "0", "0.50"],
            &["-0.75", "0.75", "0.3"],
        ),
        (
            json!({ "type": "integer", "multipleOf": 0.7, "minimum": 21, "maximum": 21 }),
            &["21"],
            &["7", "14", "28"],
        ),
        (json!({ "type": "integer", "multipleOf": 1.5 }), &["3", "-6"], &["1", "2", "4"]),
        (json!({ "const": 9007199254740992_i64 }), &["9007199254740992"], &["9007199254740993"]),
        (
            json!({ "const": 1_152_921_504_606_846_976_i64 }),
            &["1152921504606846976"],
            &["1152921504606846977"],
        ),
        (
            json!({ "type": "integer", "minimum": 0, "maximum": i64::MAX }),
            &["9223372036854775807"],
            &["9223372036854775808", "-1"],
        ),
        (tilde, &[r#"[1,null,true,"empty"]"#], &[r#"["x",null,true,"empty"]"#, r#"[1,null,true,1]"#]),
        (tuple, &["[1]", "[1,null]"], &["[null]", "[1,1]", r#"["x"]"#]),
        (old_tuple, &["[1]"], &["[1,2]"]),
        (split, &[r#"{"x":1}"#, "{}"], &[r#"{"x":"y"}"#, r#"{"y":1}"#]),
        (draft_4, &["6"], &["5", "4"]),
        (draft_7, &[r#"{"a":9}"#], &[r#"{"a":"x"}"#]),
        (longer, &[r#"["a","b"]"#, r#"["a","a"]"#], &[r#"["a"]"#, r#"["ab","b"]"#]),
        (
            json!({ "type": "string", "pattern": "^.$" }),
            &[r#""a""#, r#""é""#],
            &[r#""\n""#, r#""\r""#, "\"\u{2028}\"", r#""ab""#],
        ),
        (
            json!({ "type": "string", "pattern": r"^\s$" }),
            &[r#"" ""#, r#""\t""#, "\"\u{feff}\""],
            &["\"\u{85}\"", r#""a""#],
        ),
        (json!({ "type": "string", "pattern": r"^[\S&&x]$" }), &[r#""a""#, r#""&""#], &[r#"" ""#]),
        (json!({ "type": "string", "pattern": "^[[a]$" }), &[r#""[""#, r#""a""#], &[r#""b""#]),
        (
            json!({ "type": "string", "pattern": "^[[:alpha:]]$" }),
            &[r#""a]""#, r#"":]""#],
            &[r#""b""#, r#""a""#],
        ),
        (json!({ "type": "string", "pattern": "(?s)^.$" }), &[r#""\n""#], &[r#""ab""#]),
        (
            json!({ "type": "string", "enum": ["\n", "é\"\\"] }),
            &[r#""\n""#, r#""é\"\\""#],
            &[r#""\u000a""#, r#""n""#],
        ),
    ];
    let checker = Checker::new();
    let mut wrong = Vec::new();
    for (schema, valid, invalid) in &cases {
        wrong.extend(wrong_texts(&checker, schema, valid, true));
        wrong.extend(wrong_texts(&checker, schema, invalid, false));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn schemas_the_library_mishandles_are_rejected() {
    let nested_id = json!({ "properties": { "a": { "$id": "x", "properties": { "b": { "$ref": "#/$defs/c" } } } }, "$defs": { "c": {} } });
    let infinite = json!({ "properties": { "next": { "$ref": "#/$defs/node" } }, "$defs": { "node": { "type": "object", "properties": { "next": { "$ref": "#/$defs/node" } }, "required": ["next"] } } });
    let split = json!({ "allOf": [{ "multipleOf": 0.25 }, { "maximum": 0.5 }] });
    let large = json!({ "allOf": [{ "multipleOf": 9_999 }, { "multipleOf": 9_998 }] });
    let cases = [
        (
            json!({ "const": 1_234_567_890_123_456_789_i64 }),
            "at /const: expected numbers of at most 9007199254740992",
        ),
        (json!({ "const": 18_446_744_073_709_551_615_u64 }), "at /const"),
        (json!({ "const": 1e300 }), "at /const"),
        (
            json!({ "items": { "enum": [1, { "a": [9_007_199_254_740_993_i64] }] } }),
            "at /items/enum: expected numbers of at most",
        ),
        (
            json!({ "type": "integer", "minimum": 9_007_199_254_740_993_i64 }),
            "at /minimum: expected at most 9007199254740992",
        ),
        (json!({ "type": "integer", "exclusiveMaximum": 9_007_199_254_740_992_i64 }), "at /exclusiveMaximum"),
        (json!({ "maximum": 1_152_921_504_606_846_976_i64 }), "at /maximum"),
        (json!({ "type": "integer", "minimum": i64::MIN }), "at /minimum"),
        (json!({ "type": "integer", "maximum": 1e300 }), "at /maximum"),
        (json!({ "minimum": 1e-300 }), "at /minimum: expected at most 75 decimal places"),
        (json!({ "multipleOf": 0 }), "at /multipleOf: expected a number above 0"),
        (json!({ "multipleOf": -2 }), "at /multipleOf: expected a number above 0"),
        (json!({ "multipleOf": 1e-10 }), "at /multipleOf: expected at most 8 decimal places"),
        (json!({ "multipleOf": 0.25, "enum": [0.5] }), "at /multipleOf: 0.25 has a fraction"),
        (split, "at /allOf/0/multipleOf: 0.25 has a fraction"),
        (large, "have no common multiple up to"),
        (json!({ "type": "object", "minProperties": 2 }), "at /minProperties: expected at most 1"),
        (
            json!({ "type": "object", "minProperties": 3, "required": ["a"], "patternProperties": { "^x": {} }, "additionalProperties": false }),
            "at /minProperties",
        ),
        (json!({ "const": "a\u{1}" }), "at /const: expected text without control characters"),
        (json!({ "enum": [["\u{7f}"]] }), "at /enum: expected text without control characters"),
        (
            json!({ "properties": { "a": { "type": "string", "pattern": "^\u{1}$" } } }),
            "allows no finite text",
        ),
        (
            json!({ "type": "object", "properties": { "a": { "type": "integer", "multipleOf": 33, "minimum": 1, "maximum": 32 } }, "required": ["a"] }),
            "multiple of 33",
        ),
        (infinite, "allows no finite text"),
        (
            nested_id,
            "at /properties/a/properties/b/$ref: `#/$defs/c`: references inside a schema with its own `$id`",
        ),
        (json!({ "$ref": "#/$defs/a~1b" }), "at /$ref: `#/$defs/a~1b`: not found"),
        (json!({ "$ref": "#/%FF" }), "at /$ref: `#/%FF`: expected percent-encoded UTF-8"),
        (json!({ "$ref": "#anchor" }), "$ref: only references within the schema"),
        (json!({ "pattern": r"\Aa" }), "at /pattern: `\\Aa`: `\\A` has a different meaning"),
        (json!({ "pattern": "[]a]" }), "at /pattern: `[]a]`: empty character classes"),
        (json!({ "pattern": "[^]" }), "empty character classes"),
        (json!({ "pattern": "[a--b]" }), "`--` in a class"),
        (json!({ "pattern": "a{,3}" }), "`{,` is not a repetition"),
        (json!({ "patternProperties": { r"\x{41}": {} } }), "at /patternProperties"),
    ];
    let checker = Checker::new();
    for (schema, expected) in cases {
        let found = checker.compile(&Grammar::JsonSchema(schema.clone())).err().unwrap_or_default();
        assert!(found.contains(expected), "{schema}: expected `{expected}`, found `{found}`");
    }
}

#[test]
fn right_recursion_accepts_long_texts() {
    let grammars = [
        ("start: u\nu: | /[^\\n]/ u\n", "ab"),
        ("start: \"a\" start | \"b\" other | \"a\"\nother: \"b\" start | \"b\" other | \"a\"\n", "a"),
        (
            "start: item (\",\" rest)? | \"(\" start \")\"\nrest: item | item \",\" rest\nitem: \"a\" | \"b\"\n",
            "a,",
        ),
        ("start: term \"+\" start | term\nterm: \"a\" | \"(\" start \")\"\n", "a+"),
    ];
    let checker = Checker::new();
    for (grammar, repeated) in grammars {
        let constraint = checker.compile(&Grammar::Lark(grammar.into())).unwrap();
        let text = format!("{}a", repeated.repeat(700));
        assert!(checker.accepts(&*constraint, &text), "{grammar}");
        assert!(!checker.accepts(&*constraint, &format!("{text}\n")), "{grammar}");
    }
}

/// The rewritten grammar accepts a short text if and only if the original grammar derives it.
#[test]
fn right_recursion_preserves_the_language() {
    let grammar = "start: \"a\" start | \"b\" other | end | \"x\" start \"y\"\nother: \"b\" start | \"b\" other | \"a\" | \nend: \"a\" | other\n";
    let checker = Checker::new();
    let constraint = checker.compile(&Grammar::Lark(grammar.into())).unwrap();
    let letters = ["a", "b", "x", "y"];
    let mut texts = vec![String::new()];
    for length in 0..6 {
        let longest: Vec<String> = texts.iter().filter(|text| text.len() == length).cloned().collect();
        texts.extend(longest.iter().flat_map(|text| letters.map(|letter| format!("{text}{letter}"))));
    }
    for text in texts {
        assert_eq!(checker.accepts(&*constraint, &text), is_start(&text), "{text}");
    }
}

fn is_start(text: &str) -> bool {
    text.strip_prefix('a').is_some_and(is_start)
        || text.strip_prefix('b').is_some_and(is_other)
        || text == "a"
        || is_other(text)
        || text.strip_prefix('x').and_then(|rest| rest.strip_suffix('y')).is_some_and(is_start)
}

fn is_other(text: &str) -> bool {
    text.strip_prefix('b').is_some_and(|rest| is_start(rest) || is_other(rest))
        || text == "a"
        || text.is_empty()
}
