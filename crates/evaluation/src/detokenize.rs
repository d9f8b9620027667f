//! Cleaning of texts, as the Python of the protocols does it: the de-tokenizer of WikiText that Megatron-LM and
//! lm-evaluation-harness share, HellaSwag's `preprocess`, and what Python means by white space and by a capital letter.

use std::sync::LazyLock;

use regex::Regex;

/// Python's `str.isspace` and `\s`: Unicode's white space, and the four separators of ASCII.
pub(crate) fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\x1c'..='\x1f').contains(&character)
}

/// Python's `str.strip`.
pub(crate) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// Parts of a split at runs of white space, empty ones at the edges counted: `len(re.split(r"\s+", text))`.
pub(crate) fn count_words(text: &str) -> usize {
    let starts_run = |before: Option<char>, here: char| is_space(here) && !before.is_some_and(is_space);
    let before = std::iter::once(None).chain(text.chars().map(Some));
    1 + before.zip(text.chars()).filter(|(before, here)| starts_run(*before, *here)).count()
}

/// The text of a page of WikiText without its tokenization.
///
/// # Source
/// `wikitext_detokenizer` in lm-evaluation-harness' `tasks/wikitext/preprocess_wikitext.py`, in its order.
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

/// Compiles patterns of Python's `re`, whose `\s` has the four separators of ASCII too; each with what is put in its place.
fn patterns<const N: usize>(of: [(&str, &'static str); N]) -> Vec<(Regex, &'static str)> {
    let compiled = |pattern: &str| Regex::new(&pattern.replace(r"\s", r"[\s\x1c-\x1f]"));
    of.into_iter().filter_map(|(pattern, with)| Some((compiled(pattern).ok()?, with))).collect()
}

/// White space inside marks, from each opening one to the next closing one.
static INSIDE_MARKS: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
    patterns([
        (r"\(\s*([^)]*?)\s*\)", "(${1})"),
        (r"\[\s*([^\]]*?)\s*\]", "[${1}]"),
        (r"\{\s*([^}]*?)\s*\}", "{${1}}"),
        (r#""\s*([^"]*?)\s*""#, "\"${1}\""),
        (r"'\s*([^']*?)\s*'", "'${1}'"),
    ])
});
/// Both patterns of the first substitution were meant without their slashes; so it puts the second pattern itself wherever the first
/// is found, which is in hardly any text.
static SLASHES: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| patterns([("/' [0-9]/", "/'[0-9]/")]));
/// Brackets with what is in them, if they close in the same line.
static BRACKETS: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| patterns([(r"\[.*?\]", "")]));

fn substituted(text: &str, patterns: &[(Regex, &str)]) -> String {
    let substitute =
        |text: String, (pattern, with): &(Regex, &str)| pattern.replace_all(&text, *with).into_owned();
    patterns.iter().fold(text.to_owned(), substitute)
}

/// A text of HellaSwag without the marks of WikiHow's pages.
///
/// # Source
/// `preprocess` in lm-evaluation-harness' `tasks/hellaswag/utils.py`.
pub(crate) fn hellaswag(text: &str) -> String {
    substituted(&strip(text).replace(" [title]", ". "), &BRACKETS).replace("  ", " ")
}

/// Python's `str.capitalize`: the first character in title case, the others in lower case.
pub(crate) fn capitalized(text: &str) -> String {
    let Some(first) = text.chars().next() else { return String::new() };
    // Lowered as a whole, as a sigma's form depends on what precedes it.
    let lower = text.to_lowercase();
    let lower_first: String = first.to_lowercase().collect();
    title_case(first) + lower.strip_prefix(&lower_first).unwrap_or_default()
}

/// A character as it begins a word, by Unicode's full mapping: its capital letter but for digraphs, ligatures, Georgian, and
/// Greek with an iota below.
fn title_case(character: char) -> String {
    match character {
        'Ǆ'..='ǆ' => "ǅ".to_owned(),
        'Ǉ'..='ǉ' => "ǈ".to_owned(),
        'Ǌ'..='ǌ' => "ǋ".to_owned(),
        'Ǳ'..='ǳ' => "ǲ".to_owned(),
        'ŉ' => "ʼN".to_owned(),
        'ა'..='ჺ' | 'ჽ'..='ჿ' => character.to_string(),
        // In these rows the capital letters are eight after the small ones.
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
