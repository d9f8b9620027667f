//! JSON schemas: what is refused of them beforehand, and where in one an error is.

use llguidance::JsonCompileOptions;
use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};

/// Largest `multipleOf`, in units of its last decimal: numbers are checked digit by digit, with a state for each remainder.
const MAX_MULTIPLE_OF: u64 = 10_000;
/// Most subschemas that are read again to find the place of an error.
const MOST_TRIES: usize = 500;

/// The schema, as an object; or what is wrong with it.
pub(crate) fn checked(schema: &Value) -> Result<Value, String> {
    match schema {
        Value::Object(_) => {}
        Value::Bool(true) => return Ok(json!({})),
        other => return Err(format!("expected an object, found {}", type_of(other))),
    }
    let mut path = String::new();
    match large_multiple(schema, &mut path) {
        Some(found) => Err(format!(
            "at {path}: expected a multipleOf of at most {MAX_MULTIPLE_OF} in units of its last decimal, found {found}"
        )),
        None => Ok(schema.clone()),
    }
}

/// A schema that is an object, with at most one space between the parts of a value: without a bound a model may write
/// spaces forever.
pub(crate) fn to_llguidance(mut schema: Value) -> TopLevelGrammar {
    let whitespace_pattern = Some(r"\x20".to_owned());
    let options = JsonCompileOptions { whitespace_pattern, ..JsonCompileOptions::default() };
    options.apply_to(&mut schema);
    TopLevelGrammar::from_json_schema(schema)
}

/// Where in a schema the error `message` comes from, as `at POINTER: `: the innermost subschema that fails with it alone.
pub(crate) fn place_of(schema: &Value, message: &str, factory: &ParserFactory) -> String {
    let mut tries = MOST_TRIES;
    let mut fails = |schema: &Value| {
        tries = tries.saturating_sub(1);
        let failed = || factory.create_parser(to_llguidance(schema.clone())).err();
        tries > 0 && schema.is_object() && failed().is_some_and(|error| format!("{error:#}") == message)
    };
    let (mut place, mut pointer) = (schema, String::new());
    'inward: loop {
        for (key, child) in children(place) {
            // A list or a table of schemas is none itself.
            for (inner_key, inner) in children(child) {
                if fails(inner) {
                    pointer = format!("{pointer}/{key}/{inner_key}");
                    place = inner;
                    continue 'inward;
                }
            }
            if fails(child) {
                pointer = format!("{pointer}/{key}");
                place = child;
                continue 'inward;
            }
        }
        return if pointer.is_empty() { pointer } else { format!("at {pointer}: ") };
    }
}

/// The values in a value, with their keys as a JSON pointer has them.
fn children(value: &Value) -> Vec<(String, &Value)> {
    let escaped = |key: &String| key.replace('~', "~0").replace('/', "~1");
    match value {
        Value::Object(members) => members.iter().map(|(key, member)| (escaped(key), member)).collect(),
        Value::Array(items) => {
            items.iter().enumerate().map(|(index, item)| (index.to_string(), item)).collect()
        }
        _ => Vec::new(),
    }
}

/// A `multipleOf` that is too large; `path` is where it was looked for, and becomes where it is.
fn large_multiple(value: &Value, path: &mut String) -> Option<String> {
    for (key, child) in children(value) {
        let length = path.len();
        path.push('/');
        path.push_str(&key);
        if let ("multipleOf", Value::Number(number)) = (key.as_str(), child)
            && !is_small(number.as_f64())
        {
            return Some(number.to_string());
        }
        if let Some(found) = large_multiple(child, path) {
            return Some(found);
        }
        path.truncate(length);
    }
    None
}

/// Whether the digits of a number, without the zeros at its ends, are at most [`MAX_MULTIPLE_OF`].
fn is_small(number: Option<f64>) -> bool {
    let digits = number.map(|number| format!("{:e}", number.abs())).unwrap_or_default();
    let (digits, exponent) = digits.split_once('e').unwrap_or((&digits, "0"));
    let whole =
        |exponent: i32| {
            let decimals = digits
                .split_once('.')
                .map_or(0, |(_, decimals)| i32::try_from(decimals.len()).unwrap_or(i32::MAX));
            digits.replace('.', "").parse::<u64>().ok()?.checked_mul(
                10_u64.checked_pow(u32::try_from(exponent.saturating_sub(decimals)).unwrap_or(0))?,
            )
        };
    exponent.parse().ok().and_then(whole).is_some_and(|whole| whole <= MAX_MULTIPLE_OF)
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(false) => "false, which allows nothing",
        Value::Bool(true) => "true",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
