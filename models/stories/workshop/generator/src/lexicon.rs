//! Words and their forms, read from `english/lexicon.txt`.

use std::collections::HashMap;
use std::sync::LazyLock;

use serde_json::{Value, json};

/// A noun with its adjectives or prepositions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Noun {
    /// Singular form.
    pub singular: &'static str,
    /// Plural form.
    pub plural: &'static str,
    /// Adjectives that fit the noun.
    pub adjectives: Vec<&'static str>,
    /// Prepositions for a place: "in" or "at", and "to" or "into".
    pub prepositions: (&'static str, &'static str),
    /// Whether a place is indoors.
    pub is_inside: bool,
}

/// Forms of a verb.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verb {
    /// Base form, such as "give".
    pub base: &'static str,
    /// Past tense, such as "gave".
    pub past: &'static str,
    /// Past participle, such as "given".
    pub participle: &'static str,
    /// Third person singular, such as "gives".
    pub third: &'static str,
    /// Present participle, such as "giving".
    pub ing: &'static str,
}

/// All words that the generator uses.
#[derive(Debug)]
pub struct Lexicon {
    /// Names of girls and women.
    pub she: Vec<&'static str>,
    /// Names of boys and men.
    pub he: Vec<&'static str>,
    /// Names that never occur in sentences in which one of two people gives something to the other.
    pub held_out_names: Vec<&'static str>,
    /// Nouns for things.
    pub objects: Vec<Noun>,
    /// Nouns for places.
    pub places: Vec<Noun>,
    /// Nouns for animals.
    pub animals: Vec<Noun>,
    /// Adjectives in `world.json`.
    pub adjectives: Vec<&'static str>,
    /// Traits of people.
    pub traits: Vec<&'static str>,
    /// Number words from one to twenty.
    pub numbers: Vec<&'static str>,
    /// Verbs by their base form.
    pub verbs: HashMap<&'static str, Verb>,
    /// Base forms of the verbs in `world.json`.
    pub world_verbs: Vec<&'static str>,
}

/// Returns the lexicon, parsed on first use.
///
/// ```
/// let lexicon = story_generator::lexicon();
/// assert_eq!(lexicon.verbs["give"].participle, "given");
/// assert!(lexicon.she.contains(&"Mia") && lexicon.he.contains(&"Tom"));
/// ```
pub fn lexicon() -> &'static Lexicon {
    static LEXICON: LazyLock<Lexicon> =
        LazyLock::new(|| Lexicon::parse(include_str!("../english/lexicon.txt")));
    &LEXICON
}

fn words(line: &'static str) -> Vec<&'static str> {
    line.split_whitespace().collect()
}

/// Returns field `place` of a semicolon-separated line, or an empty string if it is missing.
fn field(line: &'static str, place: usize) -> &'static str {
    line.split(';').nth(place).unwrap_or_default().trim()
}

/// Groups the lines of a list by section; a section begins with its name in brackets.
pub(crate) fn sections(text: &'static str) -> HashMap<&'static str, Vec<&'static str>> {
    let mut sections: HashMap<&str, Vec<&'static str>> = HashMap::new();
    let mut section = "";
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            Some(name) => section = name,
            None => sections.entry(section).or_default().push(line),
        }
    }
    sections
}

impl Lexicon {
    fn parse(text: &'static str) -> Self {
        let sections = sections(text);
        let lines = |name: &str| sections.get(name).cloned().unwrap_or_default();
        let all = |name: &str| lines(name).into_iter().flat_map(words).collect::<Vec<_>>();
        let noun = |line: &'static str| Noun {
            singular: field(line, 0),
            plural: field(line, 1),
            adjectives: words(field(line, 2)),
            prepositions: ("", ""),
            is_inside: false,
        };
        let place = |line| Noun {
            adjectives: Vec::new(),
            prepositions: (field(line, 2), field(line, 3)),
            is_inside: field(line, 4) == "inside",
            ..noun(line)
        };
        let listed = |name: &str| {
            lines(name).into_iter().flat_map(|line| line.split(';')).map(str::trim).collect::<Vec<_>>()
        };
        let verb_lines = lines("verbs");
        let of_world = verb_lines.iter().position(|line| *line == "---").unwrap_or(verb_lines.len());
        let base = |line: &&'static str| line.split(' ').next().unwrap_or_default();
        Self {
            she: all("she"),
            he: all("he"),
            held_out_names: all("held out names"),
            objects: lines("objects").into_iter().map(noun).collect(),
            places: lines("places").into_iter().map(place).collect(),
            animals: lines("animals").into_iter().map(noun).collect(),
            adjectives: all("adjectives"),
            traits: listed("traits"),
            numbers: all("numbers"),
            world_verbs: verb_lines[..of_world].iter().map(base).collect(),
            verbs: verb_lines
                .iter()
                .filter(|line| **line != "---")
                .map(|line| Verb::parse(line))
                .map(|verb| (verb.base, verb))
                .collect(),
        }
    }

    /// Returns the forms of a verb; verbs that are not listed are regular.
    pub fn verb(&self, base: &str) -> Verb {
        self.verbs.get(base).copied().unwrap_or_else(|| Verb::parse(base.to_owned().leak()))
    }

    /// Returns a number in words, or in digits if it is 100 or more.
    pub fn number(&self, number: usize) -> String {
        const TENS: [&str; 8] =
            ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"];
        match number {
            0 => "zero".into(),
            1..=20 => self.numbers[number - 1].into(),
            21..=99 if number.is_multiple_of(10) => TENS[number / 10 - 2].into(),
            21..=99 => format!("{}-{}", TENS[number / 10 - 2], self.numbers[number % 10 - 1]),
            _ => number.to_string(),
        }
    }

    /// Returns all words in `world.json`; each should be a single token.
    pub fn world_words(&self) -> Vec<&'static str> {
        let nouns =
            [&self.objects, &self.places, &self.animals].into_iter().flatten().map(|noun| noun.singular);
        let verbs = self.world_verbs.iter().map(|base| self.verb(base));
        self.she
            .iter()
            .chain(&self.he)
            .copied()
            .chain(nouns)
            .chain(self.adjectives.iter().copied())
            .chain(verbs.flat_map(|verb| [verb.base, verb.past, verb.third, verb.ing]))
            .chain(self.numbers.iter().copied())
            .collect()
    }

    /// Returns the content of `world.json`: the words for writing prompts about the stories.
    pub fn world(&self) -> Value {
        // The nouns follow "a", so leave out those that need "an".
        let after_a = |noun: &&Noun| !noun.singular.starts_with(['a', 'e', 'i', 'o', 'u']);
        let nouns = |nouns: &[Noun]| -> Vec<&str> {
            nouns.iter().filter(after_a).map(|noun| noun.singular).collect()
        };
        let verbs = self.world_verbs.iter().map(|base| {
            let verb = self.verb(base);
            json!({ "base": verb.base, "past": verb.past, "third": verb.third, "ing": verb.ing })
        });
        json!({
            "people": { "she": self.she, "he": self.he },
            "objects": nouns(&self.objects),
            "places": nouns(&self.places),
            "animals": nouns(&self.animals),
            "adjectives": self.adjectives,
            "verbs": verbs.collect::<Vec<_>>(),
            "numbers": self.numbers,
            "held_out": {
                "names": self.held_out_names,
                "note": "These names are in no exercise in which one of two people does something for the other. Stories use them like any name.",
            },
        })
    }
}

impl Verb {
    fn parse(line: &'static str) -> Self {
        let mut forms = line.split(' ');
        let base = forms.next().unwrap_or_default();
        match (forms.next(), forms.next(), forms.next(), forms.next()) {
            (Some(past), Some(participle), Some(third), Some(ing)) => {
                Self { base, past, participle, third, ing }
            }
            _ => Self::regular(base),
        }
    }

    /// Derives the forms of a regular verb.
    ///
    /// Examples: walk, walked, walks, walking; smile, smiled, smiles, smiling; carry, carried, carries,
    /// carrying; push, pushed, pushes, pushing.
    fn regular(base: &'static str) -> Self {
        let is_vowel = |letter: Option<char>| letter.is_some_and(|letter| "aeiou".contains(letter));
        let (past, third, ing) = if let Some(stem) = base.strip_suffix('e') {
            (format!("{base}d"), format!("{base}s"), format!("{stem}ing"))
        } else if let Some(stem) = base.strip_suffix('y').filter(|stem| !is_vowel(stem.chars().last())) {
            (format!("{stem}ied"), format!("{stem}ies"), format!("{base}ing"))
        } else {
            let hisses = ["s", "sh", "ch", "x", "z"].iter().any(|end| base.ends_with(end));
            (format!("{base}ed"), format!("{base}{}", if hisses { "es" } else { "s" }), format!("{base}ing"))
        };
        // Words live as long as the program, so leaking them is fine.
        let past: &'static str = past.leak();
        Self { base, past, participle: past, third: third.leak(), ing: ing.leak() }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn lexicon_is_complete_and_without_duplicates() {
        let lexicon = lexicon();
        let names: Vec<_> = lexicon.she.iter().chain(&lexicon.he).collect();
        assert_eq!((names.len(), names.iter().collect::<HashSet<_>>().len()), (120, 120));
        assert_eq!(lexicon.held_out_names.len(), 15);
        assert!(lexicon.held_out_names.iter().all(|name| names.contains(&name)));
        let nouns: Vec<_> =
            [&lexicon.objects, &lexicon.places, &lexicon.animals].into_iter().flatten().collect();
        assert_eq!(nouns.iter().map(|noun| noun.singular).collect::<HashSet<_>>().len(), nouns.len());
        assert!(nouns.iter().all(|noun| !noun.plural.is_empty()));
        assert!(lexicon.places.iter().all(|place| !place.prepositions.1.is_empty()));
        assert!(lexicon.objects.iter().all(|object| !object.adjectives.is_empty()));
        assert_eq!(lexicon.numbers.len(), 20);
    }

    #[test]
    fn verb_forms_follow_spelling_rules() {
        let forms = |base| {
            let verb = lexicon().verb(base);
            [verb.past, verb.participle, verb.third, verb.ing]
        };
        assert_eq!(forms("smile"), ["smiled", "smiled", "smiles", "smiling"]);
        assert_eq!(forms("carry"), ["carried", "carried", "carries", "carrying"]);
        assert_eq!(forms("watch"), ["watched", "watched", "watches", "watching"]);
        assert_eq!(forms("play"), ["played", "played", "plays", "playing"]);
        assert_eq!(forms("give"), ["gave", "given", "gives", "giving"]);
    }

    #[test]
    fn numbers_are_spelled_out() {
        let number = |number| lexicon().number(number);
        assert_eq!(
            [number(7), number(20), number(45), number(90)],
            ["seven", "twenty", "forty-five", "ninety"]
        );
    }
}
