//! Words that no text may contain: slurs and period stereotypes.

use std::collections::HashSet;
use std::sync::LazyLock;

/// Returns the words and phrases in lower case, decoded from a ROT13 file.
fn phrases() -> &'static HashSet<String> {
    static PHRASES: LazyLock<HashSet<String>> =
        LazyLock::new(|| include_str!("../english/unwanted.txt").lines().map(rotated).collect());
    &PHRASES
}

fn rotated(text: &str) -> String {
    let turned =
        |letter: u8| if letter.is_ascii_lowercase() { (letter - b'a' + 13) % 26 + b'a' } else { letter };
    text.bytes().map(|letter| char::from(turned(letter))).collect()
}

/// Whether a text contains a slur or a period stereotype.
///
/// ```
/// use story_generator::is_unwanted;
///
/// assert!(is_unwanted("The Savages came.") && !is_unwanted("A savage wind blew."));
/// ```
pub fn is_unwanted(text: &str) -> bool {
    let words: Vec<String> = text
        .split(|letter: char| !letter.is_alphabetic())
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
        .collect();
    words.iter().any(|word| phrases().contains(word))
        || words.windows(2).any(|pair| phrases().contains(&pair.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phrases_match_whole_words_only() {
        assert!(phrases().len() > 60 && phrases().iter().all(|phrase| phrase.split(' ').count() <= 2));
        assert!(is_unwanted("They played Wild Indians.") && !is_unwanted("a wild Indianapolis"));
    }
}
