//! Faults that a text has by itself, whoever wrote it: the stories of the corpus have none, and a model's are scored by them.

use std::collections::{HashMap, HashSet};
use std::sync::LazyLock;

use crate::lexicon::lexicon;

/// What is wrong with a text. [`faults`] finds them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Fault {
    /// A quotation mark or a bracket is not closed, in this paragraph.
    Unclosed(String),
    /// "He" or "she" before anybody is known who is one.
    UnknownPerson(String),
    /// "Tom … herself".
    Gender(String),
    /// "The ball" before there was one.
    UnknownThing(String),
    /// "Three things" and not three, or "five is more than nine".
    Number(String),
    /// Past and present are mixed, outside quotations.
    Tense(String),
    /// It does not end with a sentence.
    NoEnd(String),
    /// The same sentence twice one after the other.
    Repeated(String),
}

/// The words of a text with marks as words of their own.
pub(crate) fn words(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut start = None;
    for (place, letter) in text.char_indices() {
        let is_part = letter.is_alphanumeric() || (matches!(letter, '\'' | '-') && start.is_some());
        match (start, is_part) {
            (None, true) => start = Some(place),
            (Some(from), false) => {
                words.push(&text[from..place]);
                start = None;
            }
            _ => {}
        }
        if !is_part && !letter.is_whitespace() {
            words.push(&text[place..place + letter.len_utf8()]);
        }
    }
    if let Some(from) = start {
        words.push(&text[from..]);
    }
    words
}

/// A text without what is in quotation marks.
fn unquoted(text: &str) -> String {
    text.split('"').step_by(2).collect::<Vec<_>>().join("\" \"")
}

/// The sentences of a text.
pub(crate) fn sentences(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive(['.', '!', '?', '\n'])
        .map(|sentence| sentence.trim_matches([' ', '"', '\n']))
        .filter(|sentence| !sentence.is_empty())
}

struct Known {
    is_she: HashMap<String, bool>,
    female: HashSet<&'static str>,
    male: HashSet<&'static str>,
    things: HashSet<&'static str>,
    numbers: HashMap<String, usize>,
}

fn known() -> &'static Known {
    static KNOWN: LazyLock<Known> = LazyLock::new(|| {
        // Things that places have without being introduced: the door of a house, the clock on its wall.
        const BACKGROUND: [&str; 41] = [
            "window", "table", "bed", "door", "clock", "blanket", "chair", "lamp", "bench", "key", "leaf",
            "flower", "stone", "plate", "cup", "bag", "box", "radio", "bell", "drum", "bottle", "wheel",
            "letter", "seed", "bird", "dog", "cat", "horse", "cow", "hen", "owl", "mouse", "coat", "sheep",
            "basket", "pot", "fish", "candle", "card", "guitar", "pillow",
        ];
        let lexicon = lexicon();
        let names = |names: &[&'static str], is_she| {
            names.iter().map(|name| ((*name).to_owned(), is_she)).collect::<Vec<_>>()
        };
        Known {
            is_she: names(&lexicon.she, true).into_iter().chain(names(&lexicon.he, false)).collect(),
            female: ["girl", "woman", "mother", "sister", "aunt", "grandmother", "mom", "grandma"].into(),
            male: ["boy", "man", "father", "brother", "uncle", "grandfather", "king", "dad", "grandpa"]
                .into(),
            things: lexicon
                .objects
                .iter()
                .chain(&lexicon.animals)
                .map(|noun| noun.singular)
                .filter(|noun| !BACKGROUND.contains(noun))
                .collect(),
            numbers: (1..100).map(|number| (lexicon.number(number), number)).collect(),
        }
    });
    &KNOWN
}

/// Everything that is wrong with a story.
///
/// ```
/// use story_generator::{Fault, faults};
///
/// assert!(faults("Tom had a ball. He gave the ball to Mia.").is_empty());
/// let found = faults("Tom had a ball. She gives the kite to Mia.");
/// assert!(found.iter().any(|fault| matches!(fault, Fault::UnknownThing(_))));
/// ```
pub fn faults(text: &str) -> Vec<Fault> {
    let plain = unquoted(text);
    let mut faults = Vec::new();
    faults.extend(unclosed(text));
    faults.extend(people(&plain));
    faults.extend(things(text, &plain));
    faults.extend(numbers(text));
    faults.extend(tense(&plain));
    let end = text.trim_end();
    if !end.trim_end_matches('"').ends_with(['.', '!', '?']) {
        faults.push(Fault::NoEnd(end.chars().rev().take(30).collect::<Vec<_>>().into_iter().rev().collect()));
    }
    let all: Vec<&str> = sentences(text).collect();
    if let Some(twice) = all.windows(2).find(|pair| pair[0] == pair[1] && pair[0].contains(' ')) {
        faults.push(Fault::Repeated(twice[0].to_owned()));
    }
    faults
}

fn unclosed(text: &str) -> Option<Fault> {
    let is_open = |paragraph: &&str| {
        let mut depth = 0i32;
        let closes = paragraph.chars().all(|letter| {
            depth += i32::from(letter == '(') - i32::from(letter == ')');
            depth >= 0
        });
        !closes || depth != 0 || !paragraph.matches('"').count().is_multiple_of(2)
    };
    text.lines().find(is_open).map(|paragraph| Fault::Unclosed(paragraph.to_owned()))
}

fn people(plain: &str) -> Vec<Fault> {
    let known = known();
    let (mut has_she, mut has_he) = (false, false);
    for sentence in sentences(plain) {
        let all = words(sentence);
        let mut of_sentence = Vec::new();
        for (place, word) in all.iter().enumerate() {
            let bare = word.strip_suffix("'s").unwrap_or(word);
            let is_capital = bare.chars().next().is_some_and(char::is_uppercase);
            let lower = bare.to_lowercase();
            match known.is_she.get(bare) {
                Some(is_she) => {
                    has_she |= is_she;
                    has_he |= !is_she;
                    of_sentence.push(*is_she);
                }
                // A name that is nobody's may be anyone's.
                None if is_capital && place > 0 && bare != "I" => (has_she, has_he) = (true, true),
                None if is_capital && place == 0 && !is_common(&lower) => (has_she, has_he) = (true, true),
                None => {}
            }
            has_she |= known.female.contains(lower.as_str());
            has_he |= known.male.contains(lower.as_str());
            let is_she = ["she", "her", "hers", "herself"].contains(&lower.as_str());
            let is_he = ["he", "him", "his", "himself"].contains(&lower.as_str());
            if (is_she && !has_she) || (is_he && !has_he) {
                return vec![Fault::UnknownPerson(sentence.to_owned())];
            }
            let one =
                of_sentence.first().copied().filter(|_| of_sentence.len() == 1 && !all.contains(&"and"));
            if one.is_some_and(|one| (lower == "herself" && !one) || (lower == "himself" && one)) {
                let other = if lower == "herself" { &known.female } else { &known.male };
                if !all.iter().any(|word| other.contains(word) || ["she", "he"].contains(word)) {
                    return vec![Fault::Gender(sentence.to_owned())];
                }
            }
        }
    }
    Vec::new()
}

/// Whether a sentence may begin with a word that is no name.
fn is_common(word: &str) -> bool {
    static COMMON: LazyLock<HashSet<String>> = LazyLock::new(|| {
        const FILES: [&str; 5] = [
            include_str!("../english/same.txt"),
            include_str!("../english/words.txt"),
            include_str!("../english/story.txt"),
            include_str!("../english/plots.txt"),
            include_str!("../english/exercises.txt"),
        ];
        let lexicon = lexicon();
        let nouns = lexicon.objects.iter().chain(&lexicon.animals).chain(&lexicon.places);
        let nouns = nouns
            .flat_map(|noun| [noun.singular, noun.plural].into_iter().chain(noun.adjectives.iter().copied()));
        let verbs = lexicon
            .verbs
            .values()
            .flat_map(|verb| [verb.base, verb.past, verb.ing, verb.third, verb.participle]);
        FILES
            .iter()
            .flat_map(|file| words(file))
            .chain(nouns)
            .chain(verbs)
            .chain(lexicon.professions.iter().copied())
            .map(str::to_lowercase)
            .chain((0..100).map(|number| lexicon.number(number)))
            .chain(
                [
                    "its", "they", "them", "she", "he", "his", "her", "we", "our", "an", "my", "their", "me",
                    "us",
                ]
                .map(str::to_owned),
            )
            .collect()
    });
    COMMON.contains(word)
}

fn things(text: &str, plain: &str) -> Option<Fault> {
    let known = known();
    // What is said may introduce a thing too; and a plural or a compound does so as well.
    let mut introduced: HashSet<String> = HashSet::new();
    let mut quoted =
        text.split('"').skip(1).step_by(2).flat_map(words).map(str::to_lowercase).collect::<HashSet<_>>();
    quoted.retain(|word| known.things.contains(word.as_str()));
    for sentence in sentences(plain) {
        let all: Vec<String> = words(sentence).iter().map(|word| word.to_lowercase()).collect();
        for place in 0..all.len() {
            let word = &all[place];
            if !known.things.contains(word.as_str()) || quoted.contains(word) {
                continue;
            }
            let before = &all[place.saturating_sub(3)..place];
            let article = before.iter().rposition(|word| {
                [
                    "the", "a", "an", "no", "of", "my", "your", "his", "her", "its", "our", "their", "one",
                    "another", "some", "every", "what", "such", "and", "only",
                ]
                .contains(&word.as_str())
                    || word.ends_with("'s")
                    || word.ends_with("s'")
                    || known.numbers.contains_key(word)
            });
            let is_known_article =
                article.is_some_and(|found| before[found] == "the" && before.len() - found <= 2);
            if is_known_article && !introduced.contains(word) {
                return Some(Fault::UnknownThing(format!("the {word}: {sentence}")));
            }
            introduced.insert(word.clone());
        }
    }
    None
}

fn numbers(text: &str) -> Option<Fault> {
    let known = known();
    let value = |word: &str| known.numbers.get(word.to_lowercase().as_str()).copied();
    for sentence in sentences(text) {
        let all = words(sentence);
        for window in all.windows(5) {
            if let [few, is, how, than, many] = window
                && ["is", "was"].contains(is)
                && *than == "than"
                && let (Some(one), Some(two)) = (value(few), value(many))
            {
                let is_wrong = (*how == "more" && one <= two) || (*how == "less" && one >= two);
                if is_wrong {
                    return Some(Fault::Number(sentence.to_owned()));
                }
            }
        }
        if let Some(place) =
            all.windows(2).position(|pair| pair[0] == "things" && matches!(pair[1], ":" | "("))
            && let Some(said) = place.checked_sub(1).and_then(|place| value(all[place]))
        {
            let listed = &all[place + 2..];
            let end =
                listed.iter().position(|word| matches!(*word, ")" | "." | "\"")).unwrap_or(listed.len());
            let parts = listed[..end].iter().filter(|word| matches!(**word, "," | "and")).count() + 1;
            if parts != said {
                return Some(Fault::Number(sentence.to_owned()));
            }
        }
    }
    None
}

fn tense(plain: &str) -> Option<Fault> {
    const PAST: [&str; 8] = ["was", "were", "had", "went", "did", "said", "came", "took"];
    const PRESENT: [&str; 8] = ["is", "are", "has", "goes", "does", "says", "comes", "takes"];
    let mut seen: [Option<String>; 2] = [None, None];
    for sentence in sentences(plain) {
        for word in words(sentence) {
            let of = match word {
                word if PAST.contains(&word) => 0,
                word if PRESENT.contains(&word) => 1,
                _ => continue,
            };
            seen[of].get_or_insert_with(|| sentence.to_owned());
        }
    }
    match seen {
        [Some(past), Some(present)] => Some(Fault::Tense(format!("{past} … {present}"))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_is_found_and_nothing_else() {
        let found = |text| faults(text).into_iter().next();
        assert!(matches!(found("\"I am here, said Tom."), Some(Fault::Unclosed(_))));
        assert!(matches!(found("Tom (who was here went."), Some(Fault::Unclosed(_))));
        assert!(matches!(found("Tom slept. Then she woke up."), Some(Fault::UnknownPerson(_))));
        assert!(matches!(found("Tom and Mia sat down. Tom hurt herself."), Some(Fault::Gender(_))));
        assert!(matches!(found("Tom liked the kite."), Some(Fault::UnknownThing(_))));
        assert!(matches!(found("Five is more than nine."), Some(Fault::Number(_))));
        assert!(matches!(found("He, Tom, had three things: paper and glue."), Some(Fault::UnknownPerson(_))));
        assert!(matches!(found("Tom had three things: paper and glue."), Some(Fault::Number(_))));
        assert!(matches!(found("Tom was here. Mia is here."), Some(Fault::Tense(_))));
        assert!(matches!(found("Tom was here and"), Some(Fault::NoEnd(_))));
        assert!(matches!(found("Tom was here. Tom was here."), Some(Fault::Repeated(_))));
        let sound = "Tom had a red kite. \"It is mine,\" he said. Mia took three things: paper, glue and string. She found the kite.";
        assert_eq!(faults(sound), []);
    }
}
