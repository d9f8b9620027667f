//! Checks JSON schemas and rewrites the parts that the library would misinterpret.
//!
//! If a part cannot be rewritten, the schema is rejected with the location of that part.

mod numbers;
mod patterns;
mod places;
mod references;
mod values;

use llguidance::JsonCompileOptions;
use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use serde_json::{Map, Value, json};

use self::numbers::NumberContext;
pub(crate) use self::patterns::ANY;
use self::places::{at, at_mut, children, pointer};
use crate::reading;

/// Maximum number of subschemas compiled to locate an error.
const MAX_TRIES: usize = 500;
/// Allowed escapes in strings and names.
///
/// Since `\u` is not allowed, each name has a single spelling, and no other spelling can evade a property's
/// schema (llguidance 1.9.1, `gen_json_object`).
const ALLOWED_ESCAPES: &str = "nrbtf\\\"";
/// Keywords that apply further schemas to the same value.
const APPLICATORS: [&str; 4] = ["allOf", "anyOf", "oneOf", "$ref"];
/// Keywords that do not restrict values.
const ANNOTATIONS: [&str; 15] = [
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "default",
    "definitions",
    "description",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
];
/// Keywords that the library interprets together, unless an applicator is between them.
const READ_TOGETHER: [[&str; 2]; 2] =
    [["patternProperties", "additionalProperties"], ["items", "additionalItems"]];
/// Keywords whose values are counts.
const SIZES: [&str; 6] = ["minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"];

/// Rewrites a schema so that the library interprets it as the JSON Schema standard does.
///
/// # Errors
/// If the library would misinterpret a part of the schema that cannot be rewritten.
pub(crate) fn checked(schema: &Value) -> Result<Value, String> {
    let mut root = match schema {
        Value::Object(_) => schema.clone(),
        Value::Bool(true) => return Ok(json!({})),
        other => return Err(format!("expected an object, found {}", type_of(other))),
    };
    if ignores_siblings_of_references(&root) {
        drop_siblings_of_references(&mut root);
    }
    let places = references::places(&root)?;
    let schemas: Vec<&Map<String, Value>> =
        places.iter().filter_map(|place| at(&root, place)?.as_object()).collect();
    let merges = schemas.iter().any(|schema| merges_schemas(schema));
    let context = NumberContext::of(&schemas, merges);
    let mut rewritten = root.clone();
    for place in &places {
        let Some(Value::Object(schema)) = at_mut(&mut rewritten, place) else { continue };
        let wrong = |(keyword, what): (&str, String)| format!("at {}/{keyword}: {what}", pointer(place));
        rewrite_sizes(schema);
        check_repeated_names(schema).map_err(wrong)?;
        values::check(schema).map_err(wrong)?;
        numbers::rewrite(schema, &context).map_err(wrong)?;
        patterns::rewrite(schema).map_err(wrong)?;
        rewrite_arrays(schema);
        keep_together(schema);
    }
    references::rewrite(&root, &mut rewritten, &places)?;
    Ok(rewritten)
}

/// Wraps a schema for llguidance, allowing at most one space between the parts of a value.
///
/// Otherwise, a model could generate spaces forever.
pub(crate) fn to_llguidance(mut schema: Value) -> TopLevelGrammar {
    let whitespace_pattern = Some(r"\x20".to_owned());
    let json_allowed_escapes = Some(ALLOWED_ESCAPES.to_owned());
    let options =
        JsonCompileOptions { whitespace_pattern, json_allowed_escapes, ..JsonCompileOptions::default() };
    options.apply_to(&mut schema);
    TopLevelGrammar::from_json_schema(schema)
}

/// Location of the error `message` in a schema, formatted as `at POINTER: `.
///
/// The location is the innermost subschema that fails on its own with the same message.
pub(crate) fn location_of(schema: &Value, message: &str, factory: &ParserFactory) -> String {
    let mut tries = MAX_TRIES;
    let mut fails = |schema: &Value| {
        tries = tries.saturating_sub(1);
        let failed = || reading::parser(to_llguidance(schema.clone()), factory).err();
        tries > 0 && schema.is_object() && failed().is_some_and(|other| other == message)
    };
    let (mut place, mut pointer) = (schema, String::new());
    'inward: loop {
        for (key, child) in children(place) {
            // A list or table of schemas is not itself a schema, so look one level deeper.
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

/// Whether the root's `$schema` names a draft that ignores keywords next to a `$ref`.
fn ignores_siblings_of_references(root: &Value) -> bool {
    let draft = root.get("$schema").and_then(Value::as_str).unwrap_or_default();
    ["04", "06", "07"].iter().any(|number| draft.contains(&format!("json-schema.org/draft-{number}/")))
}

/// Removes the keywords next to each `$ref`, except those that references may point into.
fn drop_siblings_of_references(value: &mut Value) {
    match value {
        Value::Object(members) => {
            if members.get("$ref").is_some_and(Value::is_string) {
                members.retain(|key, _| key == "$ref" || ANNOTATIONS.contains(&key.as_str()));
            }
            members.values_mut().for_each(drop_siblings_of_references);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_siblings_of_references),
        _ => {}
    }
}

/// Whether the library intersects parts of this schema with each other.
fn merges_schemas(schema: &Map<String, Value>) -> bool {
    let restricting = schema.keys().filter(|key| !ANNOTATIONS.contains(&key.as_str())).count();
    let has_applicator = APPLICATORS.iter().any(|key| schema.contains_key(*key));
    let all = schema.get("allOf").and_then(Value::as_array).map_or(0, Vec::len);
    has_applicator && restricting > 1
        || all > 1
        || schema.contains_key("properties") && schema.contains_key("patternProperties")
}

/// Converts sizes such as `2.0` to integers, which the library expects.
fn rewrite_sizes(schema: &mut Map<String, Value>) {
    for key in SIZES {
        if let Some(size) = schema.get_mut(key)
            && let Some(whole) = whole_number(size)
        {
            *size = json!(whole);
        }
    }
}

/// Converts a float to an integer if it is a non-negative whole number.
fn whole_number(value: &Value) -> Option<u64> {
    let number = value.as_f64().filter(|number| value.is_f64() && number.fract() == 0.0)?;
    (0.0..numbers::LARGEST_EXACT).contains(&number).then(|| format!("{number:.0}").parse().ok()).flatten()
}

/// Rejects a `minProperties` that repeated names could satisfy; the library counts repetitions.
fn check_repeated_names(schema: &Map<String, Value>) -> Result<(), (&'static str, String)> {
    let least = schema.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
    let required = schema.get("required").and_then(Value::as_array).map_or(0, Vec::len);
    let is_closed = schema.get("additionalProperties") == Some(&Value::Bool(false))
        && !schema.contains_key("patternProperties");
    if is_closed || least <= required as u64 + 1 {
        return Ok(());
    }
    let what = format!(
        "expected at most {}, one more than the number of names in `required`, found {least}; list more names in `required`, because a repeated name would count twice",
        required + 1
    );
    Err(("minProperties", what))
}

/// Removes array keywords that have no effect.
///
/// These are `uniqueItems: false`, and `additionalItems` unless `items` is a list. Such an
/// `additionalItems` would make the library ignore `prefixItems`.
fn rewrite_arrays(schema: &mut Map<String, Value>) {
    if schema.get("uniqueItems") == Some(&Value::Bool(false)) {
        schema.shift_remove("uniqueItems");
    }
    if !schema.get("items").is_some_and(Value::is_array) {
        schema.shift_remove("additionalItems");
    }
}

/// Moves related keywords next to each other if the library would otherwise separate them.
fn keep_together(schema: &mut Map<String, Value>) {
    let splits = ["const", "enum"].iter().chain(&APPLICATORS).any(|key| schema.contains_key(*key));
    for pair in READ_TOGETHER {
        if !splits || !pair.iter().all(|key| schema.contains_key(*key)) {
            continue;
        }
        let mut moved: Vec<(String, Value)> = pair
            .iter()
            .filter_map(|key| schema.shift_remove(*key).map(|value| ((*key).to_owned(), value)))
            .collect();
        moved.extend(std::mem::take(schema));
        schema.extend(moved);
    }
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
