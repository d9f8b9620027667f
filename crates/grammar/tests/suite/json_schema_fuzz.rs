//! Random schemas and instances, which an independent validator checks.
//!
//! Each schema is either handled correctly or rejected.

use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_grammar::Grammar;
use serde_json::{Map, Value, json};

use crate::common::{tiny, walk};
use crate::json_schema::{Checker, escaped_spellings, spellings};

const SEEDS: u64 = 8;
const SCHEMAS_PER_SEED: usize = 100;
const INSTANCES: usize = 8;
const WALKS: usize = 3;
const MAX_WALK_TOKENS: usize = 60;
const MAX_SPELLINGS: usize = 400;
const ROWS: usize = 300;
const END: u32 = 0;

/// Function that decides whether a text matches a pattern.
type Matcher = fn(&str) -> bool;

/// ECMAScript patterns and functions that implement them.
const PATTERNS: [(&str, Matcher); 7] = [
    ("^a", |text| text.starts_with('a')),
    ("b$", |text| text.ends_with('b')),
    ("^[a-c]*$", |text| text.chars().all(|letter| ('a'..='c').contains(&letter))),
    ("^.$", |text| text.chars().count() == 1 && !text.contains(['\n', '\r', '\u{2028}', '\u{2029}'])),
    (r"\s", |text| {
        text.contains(|letter: char| letter == '\u{feff}' || letter != '\u{85}' && letter.is_whitespace())
    }),
    ("^[[/é]", |text| text.starts_with(['[', '/', 'é'])),
    (r"^\w$", |text| {
        text.len() == 1 && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    }),
];
const NAMES: [&str; 8] = ["a", "b", "é", "a/b", "~c", "x\"y", "\n", "ab"];
const STRINGS: [&str; 12] = ["", "a", "b", "ab", "abc", "é", "a/b", "[x", "\n", " ", "\u{feff}", "a\"\\"];
const BOUNDS: [f64; 17] =
    [-3.0, -2.5, -2.0, -1.5, -1.0, -0.75, -0.5, 0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0];
const MULTIPLES: [f64; 11] = [1.0, 2.0, 3.0, 0.5, 0.25, 0.1, 0.07, 1.5, 0.01, 0.0025, 2.5];

struct Generator {
    random: RandomStream,
}

impl Generator {
    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.random.below(bound as u64)).unwrap()
    }

    fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }

    fn bound(&mut self) -> Value {
        if self.chance(20) {
            return self
                .pick(
                    &[json!(9_007_199_254_740_993_i64), json!(9_007_199_254_740_991_i64), json!(1e300)]
                        .each_ref(),
                )
                .clone();
        }
        let bound = self.pick(&BOUNDS);
        if bound.fract() == 0.0 && self.chance(2) {
            json!(format!("{bound:.0}").parse::<i64>().unwrap())
        } else {
            json!(bound)
        }
    }

    fn number(&mut self) -> Value {
        match self.below(3) {
            0 => self.bound(),
            1 => json!(i64::try_from(self.below(9)).unwrap() - 4),
            _ => {
                let multiple = self.pick(&MULTIPLES);
                let times = self.below(9) as f64 - 4.0;
                // Format with four decimals to remove the float's rounding error.
                serde_json::from_str(&format!("{:.4}", multiple * times)).unwrap()
            }
        }
    }

    fn value(&mut self, depth: usize) -> Value {
        match self.below(if depth == 0 { 5 } else { 7 }) {
            0 => Value::Null,
            1 => json!(self.chance(2)),
            2 => self.number(),
            3 | 4 => json!(self.pick(&STRINGS)),
            5 => (0..self.below(4)).map(|_| self.value(depth - 1)).collect(),
            _ => {
                let members =
                    (0..self.below(4)).map(|_| (self.pick(&NAMES).to_owned(), self.value(depth - 1)));
                Value::Object(members.collect())
            }
        }
    }

    fn schema(&mut self, depth: usize) -> Value {
        if self.chance(12) {
            return self.pick(&[json!({}), json!(true), json!(false)].each_ref()).clone();
        }
        let mut schema = Map::new();
        let kinds = if depth == 0 { 4 } else { 8 };
        match self.below(kinds) {
            0 | 1 => self.limit_numbers(&mut schema),
            2 => self.limit_strings(&mut schema),
            3 => {
                let values: Vec<Value> = (0..=self.below(3)).map(|_| self.value(1)).collect();
                if self.chance(2) {
                    schema.insert("const".into(), values[0].clone());
                } else {
                    schema.insert("enum".into(), values.into());
                }
                if self.chance(4) {
                    self.limit_numbers(&mut schema);
                }
            }
            4 | 5 => self.limit_objects(&mut schema, depth),
            6 => self.limit_arrays(&mut schema, depth),
            _ => {
                let keyword = self.pick(&["allOf", "anyOf", "oneOf"]);
                let schemas: Vec<Value> = (0..=self.below(2)).map(|_| self.schema(depth - 1)).collect();
                if self.chance(3) {
                    self.limit_objects(&mut schema, depth - 1);
                }
                schema.insert(keyword.into(), schemas.into());
                match self.below(4) {
                    0 => self.limit_numbers(&mut schema),
                    1 => self.limit_objects(&mut schema, depth - 1),
                    _ => {}
                }
            }
        }
        if self.chance(15) {
            schema.insert("$ref".into(), json!(self.pick(&["#/$defs/a~1b", "#/$defs/x%22y", "#/$defs/~0c"])));
        }
        Value::Object(schema)
    }

    fn limit_numbers(&mut self, schema: &mut Map<String, Value>) {
        if self.chance(2) {
            schema.insert(
                "type".into(),
                self.pick(&[json!("number"), json!("integer"), json!(["integer", "null"])].each_ref())
                    .clone(),
            );
        }
        for keyword in ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"] {
            if self.chance(3) {
                schema.insert(keyword.into(), self.bound());
            }
        }
        if self.chance(3) {
            schema.insert("multipleOf".into(), json!(self.pick(&MULTIPLES)));
        }
    }

    fn limit_strings(&mut self, schema: &mut Map<String, Value>) {
        if self.chance(2) {
            schema.insert("type".into(), json!("string"));
        }
        if self.chance(2) {
            schema.insert("pattern".into(), json!(self.pick(&PATTERNS).0));
        }
        if self.chance(2) {
            schema.insert("minLength".into(), json!(self.below(3)));
        }
        if self.chance(2) {
            schema.insert("maxLength".into(), json!(self.below(3) as f64));
        }
    }

    fn limit_objects(&mut self, schema: &mut Map<String, Value>, depth: usize) {
        let inner = depth.saturating_sub(1);
        if self.chance(2) {
            schema.insert("type".into(), json!("object"));
        }
        if self.chance(3) {
            let other = if self.chance(2) { json!(false) } else { self.schema(inner) };
            schema.insert("additionalProperties".into(), other);
        }
        if !self.chance(3) {
            let properties: Map<String, Value> =
                (0..=self.below(2)).map(|_| (self.pick(&NAMES).to_owned(), self.schema(inner))).collect();
            schema.insert("properties".into(), properties.into());
        }
        if self.chance(3) {
            let pattern = self.pick(&PATTERNS).0.to_owned();
            schema.insert("patternProperties".into(), json!({ pattern: self.schema(inner) }));
        }
        if self.chance(2) {
            let mut names: Vec<&str> = (0..self.below(3)).map(|_| self.pick(&NAMES)).collect();
            names.sort_unstable();
            names.dedup();
            schema.insert("required".into(), json!(names));
        }
        if self.chance(4) {
            schema.insert("minProperties".into(), json!(self.below(3)));
        }
        if self.chance(4) {
            schema.insert("maxProperties".into(), json!(self.below(3)));
        }
    }

    fn limit_arrays(&mut self, schema: &mut Map<String, Value>, depth: usize) {
        if self.chance(2) {
            schema.insert("type".into(), json!("array"));
        }
        if self.chance(2) {
            let first: Vec<Value> = (0..=self.below(1)).map(|_| self.schema(depth - 1)).collect();
            schema.insert("prefixItems".into(), first.into());
        }
        if self.chance(2) {
            let items = if self.chance(3) { json!(false) } else { self.schema(depth - 1) };
            schema.insert("items".into(), items);
        }
        if self.chance(5) {
            schema.insert("additionalItems".into(), json!(false));
        }
        if self.chance(3) {
            schema.insert("minItems".into(), json!(self.below(3)));
        }
        if self.chance(3) {
            schema.insert("maxItems".into(), json!(self.below(3)));
        }
        if self.chance(5) {
            schema.insert("uniqueItems".into(), json!(false));
        }
    }

    /// Generates a value that the schema may allow.
    fn instance(&mut self, root: &Value, schema: &Value, depth: usize) -> Value {
        let Some(members) = schema.as_object() else { return self.value(depth) };
        if self.chance(8) {
            return self.value(depth);
        }
        if let Some(reference) = members.get("$ref").and_then(Value::as_str)
            && self.chance(2)
        {
            return self.instance(root, target(root, reference), depth);
        }
        if let Some(value) = members.get("const") {
            return value.clone();
        }
        for keyword in ["enum", "allOf", "anyOf", "oneOf"] {
            if let Some(Value::Array(items)) = members.get(keyword)
                && !items.is_empty()
                && self.chance(2)
            {
                let item = items[self.below(items.len())].clone();
                return if keyword == "enum" { item } else { self.instance(root, &item, depth) };
            }
        }
        let has = |keywords: &[&str]| keywords.iter().any(|keyword| members.contains_key(*keyword));
        if has(&["pattern", "minLength", "maxLength"]) {
            return json!(self.pick(&STRINGS));
        }
        if depth > 0
            && has(&["properties", "patternProperties", "additionalProperties", "required", "minProperties"])
        {
            let mut object = Map::new();
            let empty = Map::new();
            let properties = members.get("properties").and_then(Value::as_object).unwrap_or(&empty);
            for (name, inner) in properties {
                if !self.chance(3) {
                    object.insert(name.clone(), self.instance(root, inner, depth - 1));
                }
            }
            for name in members.get("required").and_then(Value::as_array).into_iter().flatten() {
                let name = name.as_str().unwrap();
                if !object.contains_key(name) && !self.chance(6) {
                    object.insert(name.to_owned(), self.value(depth - 1));
                }
            }
            if self.chance(3) {
                let name = self.pick(&NAMES).to_owned();
                let inner = members.get("additionalProperties").cloned().unwrap_or_default();
                object.insert(name, self.instance(root, &inner, depth - 1));
            }
            return object.into();
        }
        if depth > 0 && has(&["prefixItems", "items", "minItems", "maxItems"]) {
            let length = self.below(4);
            let first = members.get("prefixItems").and_then(Value::as_array).cloned().unwrap_or_default();
            let rest = members.get("items").cloned().unwrap_or_default();
            return (0..length)
                .map(|index| self.instance(root, first.get(index).unwrap_or(&rest), depth - 1))
                .collect();
        }
        if has(&["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]) {
            return self.number();
        }
        self.value(depth)
    }
}

fn target<'a>(root: &'a Value, reference: &str) -> &'a Value {
    root.pointer(&reference.trim_start_matches('#').replace("%22", "\"")).unwrap()
}

/// Whether a value is valid according to the standard; knows the keywords that [`Generator`] uses.
fn is_valid(root: &Value, schema: &Value, value: &Value) -> bool {
    let members = match schema {
        Value::Bool(all) => return *all,
        schema => schema.as_object().unwrap(),
    };
    members
        .iter()
        .all(|(keyword, argument)| keyword_holds(root, members, (keyword.as_str(), argument), value))
}

fn keyword_holds(
    root: &Value,
    schema: &Map<String, Value>,
    (keyword, argument): (&str, &Value),
    value: &Value,
) -> bool {
    let valid = |schema: &Value, value: &Value| is_valid(root, schema, value);
    let count = argument.as_f64().unwrap_or_default();
    let schemas = || argument.as_array().unwrap().iter();
    match (keyword, value) {
        ("$ref", value) => valid(target(root, argument.as_str().unwrap()), value),
        ("const", value) => are_equal(argument, value),
        ("enum", value) => schemas().any(|other| are_equal(other, value)),
        ("allOf", value) => schemas().all(|schema| valid(schema, value)),
        ("anyOf", value) => schemas().any(|schema| valid(schema, value)),
        ("oneOf", value) => schemas().filter(|schema| valid(schema, value)).count() == 1,
        ("type", value) => match argument {
            Value::Array(types) => types.iter().any(|name| has_type(value, name.as_str().unwrap())),
            name => has_type(value, name.as_str().unwrap()),
        },
        ("minimum", Value::Number(_)) => compare(value, argument) != std::cmp::Ordering::Less,
        ("maximum", Value::Number(_)) => compare(value, argument) != std::cmp::Ordering::Greater,
        ("exclusiveMinimum", Value::Number(_)) => compare(value, argument) == std::cmp::Ordering::Greater,
        ("exclusiveMaximum", Value::Number(_)) => compare(value, argument) == std::cmp::Ordering::Less,
        ("multipleOf", Value::Number(_)) => match (units(value), units(argument)) {
            (Some(value), Some(multiple)) => value % multiple == 0,
            _ => false,
        },
        ("minLength", Value::String(text)) => text.chars().count() as f64 >= count,
        ("maxLength", Value::String(text)) => text.chars().count() as f64 <= count,
        ("pattern", Value::String(text)) => matches(argument.as_str().unwrap(), text),
        ("minItems", Value::Array(items)) => items.len() as f64 >= count,
        ("maxItems", Value::Array(items)) => items.len() as f64 <= count,
        ("prefixItems", Value::Array(items)) => {
            schemas().zip(items).all(|(schema, item)| valid(schema, item))
        }
        ("items", Value::Array(items)) => {
            let first = schema.get("prefixItems").and_then(Value::as_array).map_or(0, Vec::len);
            items.iter().skip(first).all(|item| valid(argument, item))
        }
        ("minProperties", Value::Object(members)) => members.len() as f64 >= count,
        ("maxProperties", Value::Object(members)) => members.len() as f64 <= count,
        ("required", Value::Object(members)) => {
            schemas().all(|name| members.contains_key(name.as_str().unwrap()))
        }
        ("properties", Value::Object(members)) => argument
            .as_object()
            .unwrap()
            .iter()
            .all(|(name, schema)| members.get(name).is_none_or(|member| valid(schema, member))),
        ("patternProperties", Value::Object(members)) => {
            argument.as_object().unwrap().iter().all(|(pattern, schema)| {
                members.iter().all(|(name, member)| !matches(pattern, name) || valid(schema, member))
            })
        }
        ("additionalProperties", Value::Object(members)) => members.iter().all(|(name, member)| {
            let named = schema.get("properties").and_then(|properties| properties.get(name)).is_some();
            let patterns = schema.get("patternProperties").and_then(Value::as_object);
            let matched =
                patterns.is_some_and(|patterns| patterns.keys().any(|pattern| matches(pattern, name)));
            named || matched || valid(argument, member)
        }),
        _ => true,
    }
}

fn matches(pattern: &str, text: &str) -> bool {
    PATTERNS.iter().find(|(known, _)| *known == pattern).unwrap().1(text)
}

fn has_type(value: &Value, name: &str) -> bool {
    match value {
        Value::Null => name == "null",
        Value::Bool(_) => name == "boolean",
        Value::Number(number) => {
            name == "number"
                || name == "integer" && (!number.is_f64() || number.as_f64().unwrap().fract() == 0.0)
        }
        Value::String(_) => name == "string",
        Value::Array(_) => name == "array",
        Value::Object(_) => name == "object",
    }
}

fn compare(a: &Value, b: &Value) -> std::cmp::Ordering {
    match (a.as_i64(), b.as_i64()) {
        (Some(a), Some(b)) => a.cmp(&b),
        _ => a.as_f64().unwrap().partial_cmp(&b.as_f64().unwrap()).unwrap(),
    }
}

fn are_equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(_), Value::Number(_)) => compare(a, b).is_eq(),
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| are_equal(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| are_equal(a, b)))
        }
        _ => a == b,
    }
}

/// Converts a number's shortest spelling to units of the twelfth decimal place.
///
/// `None` if the number has more decimal places.
fn units(value: &Value) -> Option<i128> {
    const DECIMALS: usize = 12;
    let text = format!("{}", value.as_f64()?);
    let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
    format!("{whole}{fraction:0<DECIMALS$}").parse().ok().filter(|_| fraction.len() <= DECIMALS)
}

#[test]
fn random_schemas_are_correct_or_rejected() {
    let checker = Checker::new();
    let vocabulary = tiny();
    let (mut wrong, mut accepted_schemas, mut valid, mut invalid, mut walked) = (Vec::new(), 0, 0, 0, 0);
    for seed in 0..SEEDS {
        let mut generator = Generator { random: RandomStream::with_stream(seed, 66) };
        for _ in 0..SCHEMAS_PER_SEED {
            let mut schema = generator.schema(2);
            let definitions = json!({ "a/b": generator.schema(1), "x\"y": generator.schema(0), "~c": { "type": "integer" } });
            let Value::Object(members) = &mut schema else { continue };
            members.insert("$defs".into(), definitions);
            if schema.to_string().matches("$ref").count() > 0 && is_circular(&schema) {
                continue;
            }
            let constraint = match checker.compile(&Grammar::JsonSchema(schema.clone())) {
                Ok(constraint) => constraint,
                Err(message) => {
                    assert!(!message.contains("panic"), "{schema}: {message}");
                    continue;
                }
            };
            accepted_schemas += 1;
            for _ in 0..INSTANCES {
                let instance = generator.instance(&schema, &schema, 2);
                let is_valid = is_valid(&schema, &schema, &instance);
                let mut texts = spellings(&instance);
                if !is_valid {
                    texts.extend(escaped_spellings(&instance));
                }
                texts.truncate(MAX_SPELLINGS);
                let accepted = texts.into_iter().find(|text| checker.accepts(&*constraint, text));
                *(if is_valid { &mut valid } else { &mut invalid }) += 1;
                if accepted.is_some() != is_valid && !has_many_digits(&instance) {
                    wrong.push(format!(
                        "seed {seed}: {schema}: {instance} is valid: {is_valid}, {accepted:?}"
                    ));
                }
            }
            for _ in 0..WALKS {
                let (ids, has_ended) =
                    walk(&*constraint, &[END], ROWS, MAX_WALK_TOKENS, &mut generator.random);
                let bytes = ids.iter().filter(|id| **id != END).flat_map(|id| vocabulary.token_bytes(*id));
                let bytes: Vec<u8> = bytes.collect();
                if !has_ended {
                    continue;
                }
                // Numbers beyond a float's range are valid JSON, but serde_json rejects them.
                let Ok(value) = serde_json::from_slice::<Value>(&bytes) else { continue };
                walked += 1;
                if !has_many_digits(&value) && !is_valid(&schema, &schema, &value) {
                    wrong.push(format!("seed {seed}: {schema}: generated {}", bytes.escape_ascii()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}\n{}", wrong.len(), wrong.join("\n"));
    let counts = (accepted_schemas, valid, invalid, walked);
    assert!(accepted_schemas > 100 && valid > 200 && invalid > 200 && walked > 100, "{counts:?}");
}

/// Whether a value contains a number with more digits than this validator supports.
fn has_many_digits(value: &Value) -> bool {
    const DIGITS: usize = 15;
    match value {
        Value::Number(number) => {
            let number = number.as_f64().unwrap();
            let text = format!("{number:e}");
            let digits = text.split('e').next().unwrap().chars().filter(char::is_ascii_digit).count();
            number.abs() > 1e15 || digits > DIGITS
        }
        Value::Array(items) => items.iter().any(has_many_digits),
        Value::Object(members) => members.values().any(has_many_digits),
        _ => false,
    }
}

/// Whether definitions refer to each other and could therefore make an instance infinite.
fn is_circular(schema: &Value) -> bool {
    schema["$defs"].to_string().contains("$ref")
}
