//! Finds the subschemas that references point to, and rewrites the references for llguidance.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

use super::places::{at, at_mut, pointer};

/// Keywords whose value is a schema or a list of schemas.
const SCHEMAS: [&str; 7] =
    ["additionalItems", "additionalProperties", "allOf", "anyOf", "items", "oneOf", "prefixItems"];
/// Keywords whose value maps names to schemas.
const TABLES: [&str; 2] = ["patternProperties", "properties"];

/// Path of keys and indices to a value.
type Place = Vec<String>;

/// Returns the paths of all schemas reachable from the root through keywords and references.
///
/// # Errors
/// If a reference has no target, or is relative to an `$id` other than the root's.
pub(super) fn places(root: &Value) -> Result<Vec<Place>, String> {
    let (mut known, mut places, mut next) = (HashSet::new(), Vec::new(), vec![Place::new()]);
    while let Some(place) = next.pop() {
        if !known.insert(place.clone()) {
            continue;
        }
        if let Some(Value::Object(schema)) = at(root, &place) {
            if let Some(target) = target_of(root, schema, &place)? {
                next.push(target);
            }
            next.extend(subschemas(schema).into_iter().map(|inner| [place.clone(), inner].concat()));
        }
        places.push(place);
    }
    Ok(places)
}

/// Rewrites references so that the library finds their targets.
///
/// The library splits references at each `/` and decodes nothing. Targets that it cannot find in this way are
/// copied to the root.
pub(super) fn rewrite(original: &Value, rewritten: &mut Value, places: &[Place]) -> Result<(), String> {
    let mut copies: HashMap<Place, String> = HashMap::new();
    for place in places {
        let Some(Value::Object(schema)) = at(original, place) else { continue };
        let Some(target) = target_of(original, schema, place)? else { continue };
        let reference = if target.is_empty() {
            "#".to_owned()
        } else if is_plain(&target) {
            format!("#/{}", target.join("/"))
        } else {
            let number = copies.len();
            format!("#/{}", copies.entry(target).or_insert_with(|| format!("x-target-{number}")))
        };
        if let Some(Value::Object(schema)) = at_mut(rewritten, place) {
            schema.insert("$ref".into(), reference.into());
        }
    }
    // `patternProperties` may have new keys, so find each target by the positions of keys instead of by name.
    for (target, name) in copies {
        let copy = renamed(original, rewritten, &target).cloned();
        if let (Some(copy), Some(root)) = (copy, rewritten.as_object_mut()) {
            root.insert(name, copy);
        }
    }
    Ok(())
}

/// Finds the copy of the value at `place`; keys may have been renamed, but their order is the same.
fn renamed<'a>(original: &Value, mut copy: &'a Value, place: &[String]) -> Option<&'a Value> {
    let mut value = original;
    for key in place {
        copy = match (value, copy) {
            (Value::Object(members), Value::Object(copies)) => copies
                .get(key)
                .or_else(|| copies.values().nth(members.keys().position(|other| other == key)?))?,
            (_, copy) => at(copy, std::slice::from_ref(key))?,
        };
        value = at(value, std::slice::from_ref(key))?;
    }
    Some(copy)
}

/// Whether the library finds the value if the keys are joined with `/`.
fn is_plain(place: &[String]) -> bool {
    place.iter().all(|key| !key.contains('/') && key != "patternProperties") && place.concat() != ""
}

/// Relative paths of the direct subschemas of a schema.
fn subschemas(schema: &Map<String, Value>) -> Vec<Place> {
    let mut places = Vec::new();
    for (key, value) in schema {
        let names: Vec<String> = match value {
            Value::Object(members) if TABLES.contains(&key.as_str()) => members.keys().cloned().collect(),
            Value::Array(items) if SCHEMAS.contains(&key.as_str()) => {
                (0..items.len()).map(|index| index.to_string()).collect()
            }
            Value::Object(_) if SCHEMAS.contains(&key.as_str()) => {
                places.push(vec![key.clone()]);
                continue;
            }
            _ => continue,
        };
        places.extend(names.into_iter().map(|name| vec![key.clone(), name]));
    }
    places
}

/// Target of a schema's `$ref`; `None` if there is no `$ref` or the library rejects its form.
fn target_of(root: &Value, schema: &Map<String, Value>, place: &[String]) -> Result<Option<Place>, String> {
    let Some(reference) = schema.get("$ref").and_then(Value::as_str) else { return Ok(None) };
    let Some(fragment) = reference.strip_prefix('#') else { return Ok(None) };
    let wrong = |what: &str| Err(format!("at {}/$ref: `{reference}`: {what}", pointer(place)));
    let has_own_base = (1..=place.len()).any(|length| {
        let ancestor = at(root, &place[..length]);
        ancestor.and_then(|ancestor| ancestor.get("$id")?.as_str()).is_some_and(|id| !id.starts_with('#'))
    });
    if has_own_base {
        return wrong(
            "references inside a schema with its own `$id` are unsupported; \
             remove the `$id`, and write the reference relative to the root",
        );
    }
    let Some(fragment) = decoded(fragment) else {
        return wrong("expected percent-encoded UTF-8");
    };
    if fragment.is_empty() {
        return Ok(Some(Place::new()));
    }
    // The fragment is an anchor, which the library rejects.
    let Some(keys) = fragment.strip_prefix('/') else { return Ok(None) };
    let target: Place = keys.split('/').map(|key| key.replace("~1", "/").replace("~0", "~")).collect();
    if at(root, &target).is_some() { Ok(Some(target)) } else { wrong("not found in the schema") }
}

/// Decodes a URL fragment, in which each `%XX` is a byte of UTF-8.
fn decoded(fragment: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(fragment.len());
    let mut rest = fragment.bytes();
    while let Some(byte) = rest.next() {
        let mut digit = || char::from(rest.next()?).to_digit(16);
        bytes.push(if byte == b'%' { u8::try_from(digit()? << 4 | digit()?).ok()? } else { byte });
    }
    String::from_utf8(bytes).ok()
}
