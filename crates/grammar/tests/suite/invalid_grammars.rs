//! Invalid and expensive grammars must neither hang the compiler nor exhaust memory.

use std::time::{Duration, Instant};

use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_grammar::{Compiler, Grammar, GrammarError, MAX_SOURCE_BYTES};
use serde_json::{Value, json};

use crate::common::{tiny, walk};

/// Time limit, far above the time needed even by a debug build on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(20);

fn rejection(grammar: Grammar) -> String {
    let error = Compiler::new(&tiny()).unwrap().compile(&grammar, &[0]).expect_err("a rejection");
    assert!(error.to_string().chars().count() < 2_000, "{error}");
    error.to_string()
}

#[test]
fn invalid_grammars_are_rejected_with_cause_and_location() {
    let schema = |schema: Value| Grammar::JsonSchema(schema);
    let regex = |pattern: &str| Grammar::Regex(pattern.to_owned());
    let lark = |grammar: &str| Grammar::Lark(grammar.to_owned());
    let nested =
        json!({ "type": "object", "properties": { "a/b": { "type": "array", "items": { "type": 7 } } } });
    let deep = json!({ "anyOf": [{ "type": "string" }, { "type": "object", "properties": { "c": { "not": {} } } }] });
    let cases = [
        (schema(json!({ "type": "strin" })), "JSON schema: Invalid type: strin"),
        (schema(nested), "JSON schema: at /properties/a~1b/items: type must be a string or array of strings"),
        (schema(deep), "JSON schema: at /anyOf/1/properties/c: remove these unsupported keywords: [\"not\"]"),
        (schema(json!(false)), "JSON schema: expected an object, found false, which allows nothing"),
        (schema(json!([1])), "JSON schema: expected an object, found an array"),
        (
            schema(json!({ "$ref": "https://example.com/a.json" })),
            "no schema is fetched from elsewhere; found 'https://example.com/a.json'",
        ),
        (schema(json!({ "$ref": "file:///etc/passwd" })), "no schema is fetched from elsewhere"),
        (
            schema(json!({ "$ref": "#/$defs/x" })),
            "JSON schema: at /$ref: `#/$defs/x`: not found in the schema",
        ),
        (schema(json!({ "$ref": "#" })), "no token in the vocabulary can come next"),
        (
            schema(json!({ "type": "integer", "minimum": 3, "maximum": 2 })),
            "minimum (3) is greater than maximum (2)",
        ),
        (
            schema(json!({ "oneOf": [{ "type": "string" }, { "type": "string", "maxLength": 3 }] })),
            "oneOf: two of the alternatives",
        ),
        (schema(json!({ "type": "string", "pattern": "(" })), "regex"),
        (
            schema(json!({ "items": { "multipleOf": 10_007 } })),
            "at /items/multipleOf: expected at most 10000",
        ),
        (schema(json!({ "multipleOf": 1.00001 })), "at /multipleOf"),
        (schema(json!({ "multipleOf": 1e300 })), "at /multipleOf"),
        (regex("a(b"), "regex parse error:\n    a(b\n     ^\nerror: unclosed group"),
        (regex("a(?=b)"), "look-around, including look-ahead and look-behind, is not supported"),
        (regex(r"(a)\1"), "backreferences are not supported"),
        (regex(r"\bab"), "lookarounds not supported"),
        (regex(""), "matches only the empty string"),
        (regex(r"[^\s\S]"), "no token in the vocabulary can come next"),
        (lark("start: \"a\" | foo\n"), "foo"),
        (lark("start: \"a\" (\n"), "1(13): Expected token ')'"),
        (lark("foo: \"a\""), "no start rule found"),
        (lark(""), "no start rule found"),
        (lark("start: <|endoftext|> \"a\""), "special tokens and token ids"),
        (lark("start: <[5]> \"a\""), "special tokens and token ids"),
        (lark("start: <[*]>"), "special tokens and token ids"),
        (lark("start: a\na[stop=\"x\"]: /.*/"), "`stop=` is not supported"),
        (lark("root ::= \"a\" | \"b\" root"), "this looks like GBNF"),
        (lark("start: A\nA: \"x\" A\n"), "circular reference in token \"A\""),
        // The library runs this grammar's first lexer step without a limit and uses gigabytes of memory.
        (
            lark("start: A\nA: /(.|\\n)*a(.|\\n){30}/ & ~/(.|\\n)*b(.|\\n){30}/ & ~/(.|\\n)*c(.|\\n){31}/\n"),
            "too complex",
        ),
    ];
    for (grammar, expected) in cases {
        let found = rejection(grammar.clone());
        assert!(found.contains(expected), "{grammar:?}: expected `{expected}`, found `{found}`");
        assert!(!found.contains("panic") && !found.contains("fuel"), "{found}");
    }
}

#[test]
fn supported_multiple_of_values_compile() {
    let compiler = Compiler::new(&tiny()).unwrap();
    for multiple in
        [json!(1), json!(10_000), json!(0.01), json!(1.5), json!(0.0025), json!(12.5), json!(5e-7)]
    {
        let schema = json!({ "type": "number", "multipleOf": multiple });
        compiler.compile(&Grammar::JsonSchema(schema), &[0]).expect("a multiple");
    }
}

#[test]
fn pathological_grammars_are_rejected_or_cheap() {
    let deep = |levels: usize| {
        (0..levels).fold(json!({ "type": "string" }), |inner, _| {
            let mut properties = serde_json::Map::new();
            properties.insert("a".into(), inner);
            let mut schema = serde_json::Map::new();
            schema.insert("type".into(), json!("object"));
            schema.insert("properties".into(), Value::Object(properties));
            schema.insert("required".into(), json!(["a"]));
            Value::Object(schema)
        })
    };
    let choice = |index: usize| {
        let property =
            |letter: &str| json!({ "type": "object", "properties": { format!("{letter}{index}"): true } });
        json!({ "anyOf": [property("a"), property("b")] })
    };
    let rules = |count: usize, rule: &dyn Fn(usize) -> String| (0..count).map(rule).collect::<String>();
    let schema = Grammar::JsonSchema;
    let grammars = [
        Grammar::Regex("(a|aa)*".into()),
        Grammar::Regex("(a*)*b".into()),
        Grammar::Regex("a{1,100000}".into()),
        Grammar::Regex("((((a{1,100}){1,100}){1,100}){1,100}){1,100}".into()),
        Grammar::Regex("(?s).*a.{20}".into()),
        Grammar::Regex("(?:[a-c]x|y[^z]){0,50000}y".into()),
        Grammar::Regex(r"\w{1,500}".into()),
        Grammar::Regex("(".repeat(100_000)),
        Grammar::Regex(format!("{}a{}", "(".repeat(60_000), ")".repeat(60_000))),
        Grammar::Regex("abcdefgh".repeat(30_000)),
        schema(deep(30)),
        schema(deep(100)),
        schema(
            json!({ "$defs": { "a": { "$ref": "#/$defs/b" }, "b": { "$ref": "#/$defs/a" } }, "$ref": "#/$defs/a" }),
        ),
        schema(json!({ "type": "object", "properties": { "c": { "$ref": "#" } }, "required": ["c"] })),
        schema(json!({ "type": "string", "maxLength": 100_000 })),
        schema(json!({ "type": "array", "items": { "type": "string" }, "maxItems": 100_000 })),
        schema(json!({ "type": "array", "minItems": 1_000_000_000 })),
        schema(json!({ "type": "string", "pattern": "(a|aa)*b{1,100000}" })),
        schema(json!({ "allOf": (0..200).map(choice).collect::<Vec<_>>() })),
        Grammar::Lark(format!("start: {}\"a\"{}", "(".repeat(50_000), ")".repeat(50_000))),
        Grammar::Lark("start: start start | \"a\" | \"\"".into()),
        Grammar::Lark("start: (\"a\" | \"b\")~1..100000000".into()),
        Grammar::Lark("start: ((\"a\" | b)~1..1000)~1..1000\nb: \"c\" b | \"d\"".into()),
        Grammar::Lark(format!("start: %lark {}", "{ start: %lark ".repeat(10_000))),
        Grammar::Lark(format!(
            "start: a0\n{}a40: \"x\"\n",
            rules(40, &|i| format!("a{i}: a{} a{}\n", i + 1, i + 1))
        )),
        Grammar::Lark(format!(
            "start: A0\n{}A40: \"x\"\n",
            rules(40, &|i| format!("A{i}: A{} A{}\n", i + 1, i + 1))
        )),
        Grammar::Lark(format!(
            "start: a0\n{}a5000: \"x\"\n",
            rules(5_000, &|i| format!("a{i}: a{} |\n", i + 1))
        )),
        Grammar::Lark("start: A\nA: /.*a.{15}/ & /.*b.{14}/ & ~/.*c.{13}/\n".into()),
    ];
    let vocabulary = tiny();
    let compiler = Compiler::new(&vocabulary).unwrap();
    for grammar in grammars {
        let started = Instant::now();
        let shown: String = format!("{grammar:?}").chars().take(60).collect();
        if let Ok(candle_gpt2_generation::LogitsProcessor::Constraint(constraint)) =
            compiler.compile(&grammar, &[0])
        {
            let mut random = RandomStream::with_stream(1, 0);
            // The cost of generating a text is limited too. Exceeding the limit must cause a constraint error
            // and nothing else.
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                walk(&*constraint, &[0], 300, 30, &mut random)
            }));
            let panic = result.err().map(|panic| panic.downcast_ref::<String>().cloned().unwrap_or_default());
            assert!(panic.as_ref().is_none_or(|panic| panic.contains("Constraint")), "{panic:?}");
        }
        assert!(started.elapsed() < TIMEOUT, "{shown}: {:?}", started.elapsed());
    }
}

#[test]
fn oversized_grammars_are_rejected_before_parsing() {
    let text = "a".repeat(MAX_SOURCE_BYTES + 1);
    let schema = json!({ "type": "string", "const": text });
    for grammar in [Grammar::Regex(text.clone()), Grammar::Lark(text), Grammar::JsonSchema(schema)] {
        let error = Compiler::new(&tiny()).unwrap().compile(&grammar, &[0]).unwrap_err();
        assert!(matches!(error, GrammarError::TooLong { max: MAX_SOURCE_BYTES, .. }), "{error}");
    }
}
