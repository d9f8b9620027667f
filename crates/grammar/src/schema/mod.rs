//! JSON schemas before the library reads them: what it would get wrong is rewritten or refused, with its place.

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

/// Most subschemas that are read again to find the place of an error.
const MOST_TRIES: usize = 500;
/// Escapes in strings and names. Without `\u`, each name has one spelling, so no other spelling evades the schema of a property
/// (llguidance 1.9.1, `gen_json_object`).
const ALLOWED_ESCAPES: &str = "nrbtf\\\"";
/// Keywords that apply schemas to the same value.
const APPLICATORS: [&str; 4] = ["allOf", "anyOf", "oneOf", "$ref"];
/// Keywords that restrict nothing.
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
/// Keywords that the library reads together, and splits at the applicators between them.
const READ_TOGETHER: [[&str; 2]; 2] =
    [["patternProperties", "additionalProperties"], ["items", "additionalItems"]];
/// Keywords that count something.
const SIZES: [&str; 6] = ["minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"];

/// A schema that the library reads as JSON Schema means it, or the reason why there is none.
///
/// # Errors
/// If the schema has something that the library would get wrong and that cannot be rewritten.
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

/// A schema that is an object, with at most one space between the parts of a value: without a bound a model may write
/// spaces forever.
pub(crate) fn to_llguidance(mut schema: Value) -> TopLevelGrammar {
    let whitespace_pattern = Some(r"\x20".to_owned());
    let json_allowed_escapes = Some(ALLOWED_ESCAPES.to_owned());
    let options =
        JsonCompileOptions { whitespace_pattern, json_allowed_escapes, ..JsonCompileOptions::default() };
    options.apply_to(&mut schema);
    TopLevelGrammar::from_json_schema(schema)
}

/// Where in a schema the error `message` comes from, as `at POINTER: `: the innermost subschema that fails with it alone.
pub(crate) fn place_of(schema: &Value, message: &str, factory: &ParserFactory) -> String {
    let mut tries = MOST_TRIES;
    let mut fails = |schema: &Value| {
        tries = tries.saturating_sub(1);
        let failed = || reading::parser(to_llguidance(schema.clone()), factory).err();
        tries > 0 && schema.is_object() && failed().is_some_and(|other| other == message)
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

/// Whether the root's `$schema` is a draft in which the keywords beside a `$ref` mean nothing.
fn ignores_siblings_of_references(root: &Value) -> bool {
    let draft = root.get("$schema").and_then(Value::as_str).unwrap_or_default();
    ["04", "06", "07"].iter().any(|number| draft.contains(&format!("json-schema.org/draft-{number}/")))
}

/// Removes the keywords beside each `$ref`, but for those that other references may lead into.
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

/// Whether the library intersects this schema's parts with each other.
fn merges_schemas(schema: &Map<String, Value>) -> bool {
    let restricting = schema.keys().filter(|key| !ANNOTATIONS.contains(&key.as_str())).count();
    let has_applicator = APPLICATORS.iter().any(|key| schema.contains_key(*key));
    let all = schema.get("allOf").and_then(Value::as_array).map_or(0, Vec::len);
    has_applicator && restricting > 1
        || all > 1
        || schema.contains_key("properties") && schema.contains_key("patternProperties")
}

/// Writes sizes such as `2.0` as integers, which the library expects.
fn rewrite_sizes(schema: &mut Map<String, Value>) {
    for key in SIZES {
        if let Some(size) = schema.get_mut(key)
            && let Some(whole) = whole_number(size)
        {
            *size = json!(whole);
        }
    }
}

/// A float that is a whole number and not negative.
fn whole_number(value: &Value) -> Option<u64> {
    let number = value.as_f64().filter(|number| value.is_f64() && number.fract() == 0.0)?;
    (0.0..numbers::LARGEST_EXACT).contains(&number).then(|| format!("{number:.0}").parse().ok()).flatten()
}

/// Refuses a `minProperties` that a repeated name could meet: the library counts each occurrence.
fn check_repeated_names(schema: &Map<String, Value>) -> Result<(), (&'static str, String)> {
    let least = schema.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
    let required = schema.get("required").and_then(Value::as_array).map_or(0, Vec::len);
    let is_closed = schema.get("additionalProperties") == Some(&Value::Bool(false))
        && !schema.contains_key("patternProperties");
    if is_closed || least <= required as u64 + 1 {
        return Ok(());
    }
    let what = format!(
        "expected at most {}, one more than the {required} names in `required`, found {least}: a repeated name would count twice; list the names in `required`",
        required + 1
    );
    Err(("minProperties", what))
}

/// Drops what the keywords of arrays ignore: `uniqueItems: false`, and `additionalItems` beside anything but a list of items,
/// which would make the library ignore `prefixItems`.
fn rewrite_arrays(schema: &mut Map<String, Value>) {
    if schema.get("uniqueItems") == Some(&Value::Bool(false)) {
        schema.shift_remove("uniqueItems");
    }
    if !schema.get("items").is_some_and(Value::is_array) {
        schema.shift_remove("additionalItems");
    }
}

/// Moves keywords that the library reads together next to each other if it would split them.
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
