//! Translates regular expressions in schemas from ECMAScript's syntax to the library's syntax.
//!
//! Only constructs that differ in meaning need a translation.

use serde_json::{Map, Value, json};

/// Characters that `.` matches in ECMAScript.
pub(crate) const ANY: &str = r"[^\n\r\u{2028}\u{2029}]";
/// Characters that `\s` matches in ECMAScript.
const SPACES: &str = r"\t-\r \u{a0}\u{feff}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}";

/// Date pattern with February 29 in leap years only.
///
/// The library's own date format allows February 29 in every year.
const DATE: &str = concat!(
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))",
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)",
);
/// Time of day in a date-time (RFC 3339).
const TIME: &str = concat!(
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:[.][0-9]+)?",
    "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])",
);

/// Rewrites `pattern`, the names of `patternProperties`, and date formats.
///
/// # Errors
/// The keyword and the reason, if a pattern has a different meaning in the library's syntax.
pub(super) fn rewrite(schema: &mut Map<String, Value>) -> Result<(), (&'static str, String)> {
    if let Some(Value::String(pattern)) = schema.get_mut("pattern") {
        *pattern = rewritten(pattern).map_err(|what| ("pattern", what))?;
    }
    if let Some(Value::Object(patterns)) = schema.get_mut("patternProperties") {
        let mut renamed = Map::new();
        for (pattern, inner) in std::mem::take(patterns) {
            let name = rewritten(&pattern).map_err(|what| ("patternProperties", what))?;
            if renamed.insert(name, inner).is_some() {
                return Err(("patternProperties", format!("duplicate pattern `{pattern}`; combine the two")));
            }
        }
        *patterns = renamed;
    }
    rewrite_dates(schema);
    Ok(())
}

/// Replaces date formats with a pattern, combined with any existing pattern.
fn rewrite_dates(schema: &mut Map<String, Value>) {
    let pattern = match schema.get("format").and_then(Value::as_str) {
        Some("date") => format!("^{DATE}$"),
        Some("date-time") => format!("^{DATE}[tT]{TIME}$"),
        _ => return,
    };
    schema.shift_remove("format");
    if !schema.contains_key("pattern") {
        schema.insert("pattern".into(), pattern.into());
    } else if let Value::Array(all) = schema.entry("allOf").or_insert_with(|| json!([])) {
        all.push(json!({ "pattern": pattern }));
    }
}

fn rewritten(pattern: &str) -> Result<String, String> {
    let wrong = |what: &str| Err(format!("`{pattern}`: {what}"));
    // JSON Schema's patterns have no inline flags, which may change the meaning of `.` and spaces. Leave a
    // pattern that has flags unchanged.
    let has_flags = pattern.match_indices("(?").any(|(start, _)| {
        pattern[start + 2..]
            .starts_with(|next: char| next.is_ascii_alphabetic() && next != 'P' || next == '-')
    });
    if has_flags {
        return Ok(pattern.to_owned());
    }
    let mut text = String::with_capacity(pattern.len());
    let mut letters = pattern.chars().peekable();
    let mut in_class = false;
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => match letters.next() {
                Some('s') if in_class => text.push_str(SPACES),
                Some('s') => text.push_str(&format!("[{SPACES}]")),
                Some('S') => text.push_str(&format!("[^{SPACES}]")),
                Some(next @ ('a' | 'A' | 'z' | 'Z' | '<' | '>' | 'U')) => {
                    return wrong(&format!(
                        "`\\{next}` has a different meaning in ECMAScript; write the character itself"
                    ));
                }
                Some('x') if letters.peek() == Some(&'{') => {
                    return wrong("`\\x{` has a different meaning in ECMAScript; write `\\u{`");
                }
                Some(next) => text.extend(['\\', next]),
                None => text.push('\\'),
            },
            '[' if in_class => text.push_str("\\["),
            '[' => {
                in_class = true;
                text.push('[');
                if letters.peek() == Some(&'^') {
                    text.extend(letters.next());
                }
                if letters.peek() == Some(&']') {
                    return wrong("empty character classes are unsupported");
                }
            }
            ']' if in_class => {
                in_class = false;
                text.push(']');
            }
            '&' | '~' if in_class => text.extend(['\\', letter]),
            '-' if in_class && letters.peek() == Some(&'-') => {
                return wrong("`--` in a class is unsupported; write `\\-`");
            }
            '.' if !in_class => text.push_str(ANY),
            '{' if !in_class && letters.peek() == Some(&',') => {
                return wrong("`{,` is not a repetition in ECMAScript; write `{0,` or `\\{,`");
            }
            other => text.push(other),
        }
    }
    Ok(text)
}
