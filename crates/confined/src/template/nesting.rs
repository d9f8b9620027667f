//! Checks a template's nesting before the template is parsed.
//!
//! minijinja's parser, compiler and destructors recurse once for each operator, filter, call and bracket that
//! an expression applies to a preceding result. minijinja does not limit this depth.
//!
//! Scanning the text is sufficient. Within a tag, the scan counts the operators and brackets since the last
//! comma, at each level of open brackets. The sum is at least the depth of the parser's tree.

/// Maximum nesting of operators and brackets. Chat templates stay below thirty.
const MAX_NESTING: usize = 200;
/// Maximum number of `elif` branches, which nest in the syntax tree.
///
/// The parser itself limits the nesting of statements to 150 levels.
const MAX_ELIFS: usize = 200;

/// Rejects a template that is nested too deeply to parse in this process.
pub(super) fn check(template: &str) -> Result<(), String> {
    let (mut rest, mut elifs) = (template, 0);
    while let Some(start) = rest.find('{') {
        let inside = &rest[start + 1..];
        rest = match inside.as_bytes().first() {
            Some(b'#') => inside.split_once("#}").map_or("", |(_, rest)| rest),
            Some(b'{' | b'%') => {
                let end = if inside.starts_with('{') { "}}" } else { "%}" };
                let inside = &inside[1..];
                let is_elif =
                    inside.trim_start_matches(['-', '+', ' ', '\n', '\t', '\r']).starts_with("elif");
                elifs += usize::from(is_elif);
                &inside[scan(inside, Some(end))?..]
            }
            _ => inside,
        };
    }
    match elifs > MAX_ELIFS {
        true => Err(format!("expected at most {MAX_ELIFS} elif branches, found {elifs}")),
        false => Ok(()),
    }
}

/// Same as [`check`], for a single expression.
pub(super) fn check_expression(expression: &str) -> Result<(), String> {
    scan(expression, None).map(|_| ())
}

/// Scans an expression up to `end` and returns the index of `end`.
fn scan(text: &str, end: Option<&str>) -> Result<usize, String> {
    let bytes = text.as_bytes();
    // `last` counts the operators since the last comma; `open` stores this count for each enclosing level.
    let (mut open, mut last) = (Vec::new(), 0_usize);
    let mut depth = 0_usize;
    let mut index = 0;
    while let Some(byte) = bytes.get(index) {
        if open.is_empty() && end.is_some_and(|end| text.as_bytes()[index..].starts_with(end.as_bytes())) {
            return Ok(index);
        }
        let mut step = 1;
        let applies = match byte {
            b'"' | b'\'' => {
                step = string_length(&bytes[index..]);
                false
            }
            b',' => {
                (depth, last) = (depth - last, 0);
                false
            }
            b')' | b']' | b'}' => {
                if let Some(outer) = open.pop() {
                    (depth, last) = (depth - last, outer);
                }
                false
            }
            b'(' | b'[' | b'{' => {
                open.push(last + 1);
                (depth, last) = (depth + 1, 0);
                false
            }
            byte if byte.is_ascii_alphanumeric() || *byte == b'_' => {
                step = bytes[index..]
                    .iter()
                    .take_while(|byte| byte.is_ascii_alphanumeric() || **byte == b'_')
                    .count();
                matches!(&text[index..index + step], "not" | "and" | "or" | "in" | "is" | "if" | "else")
            }
            byte => byte.is_ascii_punctuation(),
        };
        depth += usize::from(applies);
        last += usize::from(applies);
        if depth > MAX_NESTING {
            return Err(format!("nested too deeply: more than {MAX_NESTING} nested operators"));
        }
        index += step;
    }
    Ok(text.len())
}

/// Length of a string literal, including its quotes.
fn string_length(bytes: &[u8]) -> usize {
    let mut index = 1;
    while let Some(byte) = bytes.get(index) {
        match byte {
            b'\\' => index += 2,
            byte if *byte == bytes[0] => return index + 1,
            _ => index += 1,
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deep_nesting_of_every_kind_is_rejected() {
        const DEEP: usize = 50_000;
        let deep = [
            format!("{{{{ {}1 }}}}", "- ".repeat(DEEP)),
            format!("{{{{ {}1 }}}}", "-".repeat(DEEP)),
            format!("{{{{ {}1 }}}}", "not ".repeat(DEEP)),
            format!("{{{{ {}1 }}}}", "1+".repeat(DEEP)),
            format!("{{{{ {}1 }}}}", "1~".repeat(DEEP)),
            format!("{{{{ {}1 }}}}", "1 and ".repeat(DEEP)),
            format!("{{{{ {}1 }}}}", "1 if 1 else ".repeat(DEEP)),
            format!("{{{{ 1{} }}}}", " is defined".repeat(DEEP)),
            format!("{{{{ a{} }}}}", ".a".repeat(DEEP)),
            format!("{{{{ x{} }}}}", "[0:1]".repeat(DEEP)),
            format!("{{{{ 'a'{} }}}}", "|upper".repeat(DEEP)),
            format!("{{{{ f{} }}}}", "()".repeat(DEEP)),
            format!("{{{{ {} }}}}", "[".repeat(DEEP)),
            format!("{{{{ {} }}}}", "{1:".repeat(DEEP)),
            format!("{{% set x = {}1 %}}", "2**".repeat(DEEP)),
            format!("{{% if 1 %}}{}{{% endif %}}", "{%- elif 1 %}".repeat(DEEP)),
            format!("'{{{{ \"}}}}\" {} }}}}", "(1,".repeat(DEEP)),
        ];
        for template in &deep {
            assert!(check(template).is_err(), "{}", &template[..40]);
        }
        assert!(check_expression(&"[".repeat(DEEP)).is_err());
    }

    #[test]
    fn long_flat_templates_are_accepted() {
        let items = "{'a': [1, 2.5, x.y|upper], \"b\": f(1, not 2)}, ".repeat(10_000);
        check(&format!("{{{{ [{items}] }}}} {{# {} #}}", "(".repeat(10_000))).unwrap();
        check(&"{{ a.b }} {% if a is defined and b %} - {% elif c %} + {% endif %}".repeat(100)).unwrap();
        check(&format!("{{{{ '{}' }}}}", "\\'((((".repeat(10_000))).unwrap();
        check("{ {{ '}}' }} { {{").unwrap();
        check_expression("['yes', 'no']").unwrap();
    }
}
