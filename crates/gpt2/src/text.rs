//! Untrusted text in messages and on terminals.

use std::borrow::Cow;
use std::fmt::Write;

/// Start of a Git LFS pointer, a small text file in place of a file stored by Git LFS.
///
/// ```
/// use candle_gpt2::{ConfigError, GIT_LFS_POINTER, Gpt2Config};
///
/// let pointer = format!("{GIT_LFS_POINTER}.github.com/spec/v1\nsize 665\n");
/// assert_eq!(Gpt2Config::from_json(&pointer), Err(ConfigError::Pointer));
/// ```
pub const GIT_LFS_POINTER: &str = "version https://git-lfs";

/// Maximum length of an excerpt, in characters.
const EXCERPT_CHARACTERS: usize = 80;
/// Maximum length of a message, in characters.
const MESSAGE_CHARACTERS: usize = 2000;
/// Number of characters kept at the end of a long message, where the advice usually is.
const END_CHARACTERS: usize = 400;

/// Whether a character can change the state of a terminal or the order of the text around it.
///
/// These are the control characters C0, DEL and C1, line and paragraph separators, and the marks, embeddings,
/// overrides and isolates of bidirectional text.
///
/// ```
/// use candle_gpt2::is_unprintable;
///
/// assert!(is_unprintable('\u{9b}') && is_unprintable('\u{202e}') && !is_unprintable('é'));
/// ```
pub fn is_unprintable(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

/// Removes unprintable characters except line breaks and tabs.
///
/// ```
/// assert_eq!(candle_gpt2::printable("red \u{1b}[31m\n"), "red [31m\n");
/// ```
pub fn printable(text: &str) -> String {
    text.chars().filter(|character| !is_unprintable(*character) || matches!(character, '\n' | '\t')).collect()
}

/// Escapes unprintable characters in JSON, without changing what a parser reads.
///
/// ```
/// assert_eq!(candle_gpt2::printable_json("\"\u{9b}31m\""), r#""\u009b31m""#);
/// ```
pub fn printable_json(json: &str) -> Cow<'_, str> {
    let is_escaped = |character: char| is_unprintable(character) && !matches!(character, '\n' | '\t' | '\r');
    if !json.contains(is_escaped) {
        return Cow::Borrowed(json);
    }
    let mut escaped = String::with_capacity(json.len() + 64);
    for character in json.chars() {
        if is_escaped(character) {
            // All unprintable characters are in the basic multilingual plane.
            let _ = write!(escaped, "\\u{:04x}", u32::from(character));
        } else {
            escaped.push(character);
        }
    }
    Cow::Owned(escaped)
}

/// Truncates a long value for messages.
///
/// ```
/// use candle_gpt2::excerpt;
///
/// assert_eq!(excerpt("wte.weight"), "wte.weight");
/// assert_eq!(excerpt(&"a".repeat(3_000_000)).chars().count(), 81);
/// ```
pub fn excerpt(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(EXCERPT_CHARACTERS) {
        None => Cow::Borrowed(text),
        Some((end, _)) => Cow::Owned(format!("{}…", &text[..end])),
    }
}

/// Cuts the middle out of a long message; parsers may quote values of any length.
///
/// ```
/// use candle_gpt2::bounded_message;
///
/// let key = "a".repeat(900_000);
/// let message = format!("unknown field `{key}`; remove it");
/// let bounded = bounded_message(&message);
/// assert!(bounded.starts_with("unknown field `aaa") && bounded.ends_with("aaa`; remove it"));
/// assert!(bounded.len() < 2100);
/// ```
pub fn bounded_message(message: &str) -> Cow<'_, str> {
    if message.char_indices().nth(MESSAGE_CHARACTERS).is_none() {
        return Cow::Borrowed(message);
    }
    let start =
        message.char_indices().nth(MESSAGE_CHARACTERS - END_CHARACTERS).map_or(0, |(offset, _)| offset);
    let end = message.char_indices().nth_back(END_CHARACTERS - 1).map_or(0, |(offset, _)| offset);
    Cow::Owned(format!("{} … {}", &message[..start], &message[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_and_bidi_characters_are_removed_or_escaped() {
        let hidden = [
            '\0', '\u{7}', '\u{1b}', '\u{7f}', '\u{80}', '\u{9b}', '\u{9f}', '\u{61c}', '\u{200e}',
            '\u{200f}',
        ];
        let ranges = ('\u{202a}'..='\u{202e}').chain('\u{2066}'..='\u{2069}').chain(['\u{2028}', '\u{2029}']);
        for character in hidden.into_iter().chain(ranges) {
            assert_eq!(printable(&format!("a{character}b\n\t")), "ab\n\t", "{character:?}");
            let json = serde_json::to_string(&format!("a{character}b")).unwrap();
            let escaped = printable_json(&json);
            assert!(!escaped.contains(is_unprintable), "{escaped:?}");
            assert_eq!(serde_json::from_str::<String>(&escaped).unwrap(), format!("a{character}b"));
        }
        for text in ["für", "日本語", "🤗 \u{200d}", "\u{ad}"] {
            assert_eq!(printable(text), text);
            assert_eq!(printable_json(text), text);
        }
    }
}
