//! Text cleanup that matches the protocols' Python code.
//!
//! It covers the WikiText detokenizer of Megatron-LM and lm-evaluation-harness, HellaSwag's `preprocess`,
//! and Python's definitions of whitespace and capitalization.

use std::sync::LazyLock;

use regex::Regex;

/// Python's `str.isspace` and `\s`: Unicode whitespace and the four ASCII separators.
pub(crate) fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\x1c'..='\x1f').contains(&character)
}

/// Python's `str.strip`.
pub(crate) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// Number of parts between whitespace, including empty parts: `len(re.split(r"\s+", text))`.
pub(crate) fn count_words(text: &str) -> usize {
    let starts_run = |before: Option<char>, here: char| is_space(here) && !before.is_some_and(is_space);
    let before = std::iter::once(None).chain(text.chars().map(Some));
    1 + before.zip(text.chars()).filter(|(before, here)| starts_run(*before, *here)).count()
}

/// Detokenizes a WikiText page.
///
/// # Source
/// `wikitext_detokenizer` in lm-evaluation-harness' `tasks/wikitext/preprocess_wikitext.py`, in the same
/// order.
pub(crate) fn wikitext(page: &str) -> String {
    let mut text = substituted(&page.replace("s '", "s'"), &SLASHES);
    for (from, to) in [(" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")] {
        text = text.replace(from, to);
    }
    for (from, to) in
        [(" : ", ": "), (" ; ", "; "), (" . ", ". "), (" ! ", "! "), (" ? ", "? "), (" , ", ", ")]
    {
        text = text.replace(from, to);
    }
    text = substituted(&text, &INSIDE_MARKS);
    for (from, to) in [("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°")] {
        text = text.replace(from, to);
    }
    for (from, to) in [(" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")] {
        text = text.replace(from, to);
    }
    text
}

/// Compiles patterns in Python's `re` syntax, each with its replacement.
///
/// Python's `\s` includes the four ASCII separators.
fn patterns<const N: usize>(of: [(&str, &'static str); N]) -> Vec<(Regex, &'static str)> {
    let compiled = |pattern: &str| Regex::new(&pattern.replace(r"\s", r"[\s\x1c-\x1f]"));
    of.into_iter().filter_map(|(pattern, with)| Some((compiled(pattern).ok()?, with))).collect()
}

/// Patterns that remove whitespace just inside brackets and quotation marks.
static INSIDE_MARKS: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
    patterns([
        (r"\(\s*([^)]*?)\s*\)", "(${1})"),
        (r"\[\s*([^\]]*?)\s*\]", "[${1}]"),
        (r"\{\s*([^}]*?)\s*\}", "{${1}}"),
        (r#""\s*([^"]*?)\s*""#, "\"${1}\""),
        (r"'\s*([^']*?)\s*'", "'${1}'"),
    ])
});
/// First substitution in the detokenizer, with the original's bug.
///
/// The slashes in the pattern and in the replacement are a mistake in the original. As written, the
/// substitution inserts the literal replacement wherever the pattern matches, which is in hardly any text.
static SLASHES: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| patterns([("/' [0-9]/", "/'[0-9]/")]));
/// Pattern that removes brackets and their contents if they close on the same line.
static BRACKETS: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| patterns([(r"\[.*?\]", "")]));

fn substituted(text: &str, patterns: &[(Regex, &str)]) -> String {
    let substitute =
        |text: String, (pattern, with): &(Regex, &str)| pattern.replace_all(&text, *with).into_owned();
    patterns.iter().fold(text.to_owned(), substitute)
}

/// Removes WikiHow markup from a HellaSwag text.
///
/// # Source
/// `preprocess` in lm-evaluation-harness' `tasks/hellaswag/utils.py`.
pub(crate) fn hellaswag(text: &str) -> String {
    substituted(&strip(text).replace(" [title]", ". "), &BRACKETS).replace("  ", " ")
}

/// Python's `str.capitalize`: the first character in title case, the others in lower case.
pub(crate) fn capitalized(text: &str) -> String {
    let Some(first) = text.chars().next() else { return String::new() };
    // Lowercase the whole text first, because the form of a final sigma depends on what precedes it.
    let lower = text.to_lowercase();
    let lower_first: String = first.to_lowercase().collect();
    title_case(first) + lower.strip_prefix(&lower_first).unwrap_or_default()
}

/// Title case of a character by Unicode's full mapping.
///
/// It equals the upper case except for digraphs, ligatures, Georgian letters, and Greek letters with an
/// iota subscript.
fn title_case(character: char) -> String {
    match character {
        'Ǆ'..='ǆ' => "ǅ".to_owned(),
        'Ǉ'..='ǉ' => "ǈ".to_owned(),
        'Ǌ'..='ǌ' => "ǋ".to_owned(),
        'Ǳ'..='ǳ' => "ǲ".to_owned(),
        'ŉ' => "ʼN".to_owned(),
        'ა'..='ჺ' | 'ჽ'..='ჿ' => character.to_string(),
        // In these rows, each capital letter is eight code points after the small letter.
        'ᾀ'..='ᾯ' => char::from_u32(u32::from(character) | 8).unwrap_or(character).to_string(),
        'ᾳ' | 'ᾼ' => "ᾼ".to_owned(),
        'ῃ' | 'ῌ' => "ῌ".to_owned(),
        'ῳ' | 'ῼ' => "ῼ".to_owned(),
        'ᾲ' | 'ᾴ' | 'ᾷ' | 'ῂ' | 'ῄ' | 'ῇ' | 'ῲ' | 'ῴ' | 'ῷ' => {
            character.to_uppercase().map(|part| if part == 'Ι' { '\u{345}' } else { part }).collect()
        }
        _ => {
            let mut upper = character.to_uppercase();
            let capital = upper.next().unwrap_or(character);
            std::iter::once(capital).chain(upper.flat_map(char::to_lowercase)).collect()
        }
    }
}

#[cfg(test)]
mod tests;
