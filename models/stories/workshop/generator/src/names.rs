//! Replaces the names of a story's people, so that a model can only copy them from the text.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::LazyLock;

use crate::Choices;
use crate::lexicon::{lexicon, sections};

/// Percentage of copies that keep their names.
const UNCHANGED: u64 = 25;
/// Percentage of replaced names that become held-out names, which few exercises use.
const HELD_OUT: u64 = 30;
/// Percentage of copies with replaced names in which colors are also replaced.
const RECOLORED: u64 = 50;

/// Word lists from `english/names.txt` and `english/classes.txt`.
struct Lists {
    /// Whether each name is female, or `None` if only pronouns decide.
    is_she: HashMap<&'static str, Option<bool>>,
    /// Names that are also words.
    words: HashSet<&'static str>,
    never: HashSet<&'static str>,
    /// Groups of names that may belong to the same person.
    same: Vec<Vec<&'static str>>,
    colors: Vec<&'static str>,
    things: HashSet<&'static str>,
}

fn lists() -> &'static Lists {
    static LISTS: LazyLock<Lists> = LazyLock::new(|| {
        let names = sections(include_str!("../english/names.txt"));
        let classes = sections(include_str!("../english/classes.txt"));
        let all = |name: &str| names[name].iter().flat_map(|line| line.split_whitespace());
        let class = |name: &str| classes[name].iter().flat_map(|line| line.split_whitespace());
        let lexicon = lexicon();
        let is_she = all("she")
            .chain(lexicon.she.iter().copied())
            .map(|name| (name, Some(true)))
            .chain(all("he").chain(lexicon.he.iter().copied()).map(|name| (name, Some(false))))
            .chain(all("either").map(|name| (name, None)));
        Lists {
            is_she: is_she.collect(),
            words: all("words").collect(),
            never: all("never").collect(),
            same: names["same"].iter().map(|line| line.split_whitespace().collect()).collect(),
            colors: class("colors").collect(),
            things: class("things").collect(),
        }
    });
    &LISTS
}

/// A word in a text and its byte offset.
#[derive(Debug, Clone, Copy)]
struct Word<'a> {
    text: &'a str,
    start: usize,
}

fn words(text: &str) -> Vec<Word<'_>> {
    let mut words = Vec::new();
    let mut start = None;
    for (place, letter) in text.char_indices().chain([(text.len(), ' ')]) {
        match (letter.is_alphabetic(), start) {
            (true, None) => start = Some(place),
            (false, Some(first)) => {
                words.push(Word { text: &text[first..place], start: first });
                start = None;
            }
            _ => {}
        }
    }
    words
}

fn is_capitalized(word: &str) -> bool {
    word.starts_with(char::is_uppercase)
}

/// A story with its replaceable names and colors.
#[derive(Debug)]
pub(crate) struct Cast<'a> {
    text: &'a str,
    /// Names in alphabetical order, and whether each is female.
    people: BTreeMap<&'a str, bool>,
    colors: Vec<&'a str>,
    /// All words, in lower case.
    present: HashSet<String>,
    /// Capitalized words, in lower case.
    capitalized: HashSet<String>,
}

impl<'a> Cast<'a> {
    /// Finds the people and colors of a story.
    pub(crate) fn of(text: &'a str) -> Self {
        let lists = lists();
        let words = words(text);
        let mut places: BTreeMap<&'a str, Vec<usize>> = BTreeMap::new();
        for (place, word) in words.iter().enumerate() {
            if lists.is_she.contains_key(word.text) && !lists.never.contains(word.text) {
                places.entry(word.text).or_default().push(place);
            }
        }
        let present: HashSet<String> = words.iter().map(|word| word.text.to_lowercase()).collect();
        let capitalized = words
            .iter()
            .filter(|word| is_capitalized(word.text))
            .map(|word| word.text.to_lowercase())
            .collect();
        let exact: HashSet<&str> = words.iter().map(|word| word.text).collect();
        let is_clear = |name: &&'a str, places: &Vec<usize>| {
            let is_evident = places.iter().any(|place| is_inside_sentence(text, words[*place]));
            (!lists.words.contains(*name) || is_evident)
                && !exact.contains(name.to_lowercase().as_str())
                && !exact.contains(name.to_uppercase().as_str())
                && !places.iter().any(|place| is_part_of_more(text, words[*place]))
        };
        let short_forms = places
            .keys()
            .any(|name| exact.iter().any(|other| other != name && lists.is_one_person(name, other)));
        let mut people = BTreeMap::new();
        for (name, places) in &places {
            if is_clear(name, places)
                && !short_forms
                && let Some(is_she) = gender(text, &words, name)
            {
                people.insert(*name, is_she);
            }
        }
        let colors = lists.colors.iter().filter(|color| is_of_things(&words, color)).copied().collect();
        Self { text, people, colors, present, capitalized }
    }

    /// Copies the story with other names, one for each person.
    pub(crate) fn copy(&self, choices: &mut Choices) -> String {
        let lists = lists();
        let is_unchanged = choices.chance(UNCHANGED);
        let mut to: HashMap<&str, &str> = HashMap::new();
        for (name, is_she) in &self.people {
            if is_unchanged {
                continue;
            }
            let pool = if *is_she { &lexicon().she } else { &lexicon().he };
            let fits = |other: &&&'static str| {
                let lower = other.to_lowercase();
                !lists.never.contains(**other)
                    && !self.present.contains(&lower)
                    && !self.capitalized.iter().any(|word| shares_beginning(word, &lower))
                    && !to
                        .values()
                        .any(|chosen| chosen == *other || shares_beginning(&chosen.to_lowercase(), &lower))
                    && !self.people.keys().any(|name| lists.is_one_person(name, other))
            };
            let mut fitting: Vec<&'static str> = pool.iter().filter(fits).copied().collect();
            let is_held_out = |name: &&'static str| lexicon().held_out_names.contains(name);
            if choices.chance(HELD_OUT) && fitting.iter().any(is_held_out) {
                fitting.retain(is_held_out);
            }
            if !fitting.is_empty() {
                to.insert(name, choices.pick::<&str>(&fitting));
            }
        }
        if !is_unchanged && choices.chance(RECOLORED) {
            let mut free: Vec<&str> =
                lists.colors.iter().filter(|color| !self.present.contains(**color)).copied().collect();
            choices.shuffle(&mut free);
            to.extend(self.colors.iter().copied().zip(free));
        }
        replaced(self.text, &to)
    }
}

impl Lists {
    /// Whether two names may belong to the same person, such as Tim and Timmy, or Bill and William.
    fn is_one_person(&self, one: &str, other: &str) -> bool {
        self.same.iter().any(|names| names.contains(&one) && names.contains(&other))
            || self.is_she.contains_key(other) && shares_beginning(one, other)
    }
}

/// Whether one word is a prefix of the other, with at least three letters.
fn shares_beginning(one: &str, other: &str) -> bool {
    one.len().min(other.len()) >= 3 && (one.starts_with(other) || other.starts_with(one))
}

/// Whether a capitalized word is inside a sentence, where only names are capitalized.
fn is_inside_sentence(text: &str, word: Word<'_>) -> bool {
    let before = &text[..word.start];
    is_capitalized(word.text)
        && before
            .strip_suffix(' ')
            .is_some_and(|before| before.ends_with(|letter: char| letter.is_lowercase() || letter == ','))
}

/// Whether a name is part of something longer, as in Mary Jane, Jack Frost or jack-in-the-box.
fn is_part_of_more(text: &str, word: Word<'_>) -> bool {
    let (before, after) = (&text[..word.start], &text[word.start + word.text.len()..]);
    let next = after.strip_prefix(' ').map(|rest| rest.split(|letter: char| !letter.is_alphabetic()).next());
    let next = next.flatten().unwrap_or_default();
    const BEFORE: [&str; 7] = ["a", "an", "the", "The", "St", "Saint", "Santa"];
    let last = before.trim_end_matches([' ', '.']).rsplit(|letter: char| !letter.is_alphabetic()).next();
    let is_behind_capital = lists().words.contains(word.text)
        && before.ends_with(' ')
        && before.trim_end().ends_with(char::is_alphabetic)
        && last.is_some_and(is_capitalized);
    let is_adjacent = before.ends_with(' ') && last.is_some_and(|last| BEFORE.contains(&last));
    let is_behind_name = before.ends_with(' ')
        && before.trim_end().ends_with(char::is_alphabetic)
        && last.is_some_and(|last| lists().is_she.contains_key(last));
    before.ends_with('-')
        || after.starts_with('-')
        || is_capitalized(next) && next != "I"
        || is_adjacent
        || is_behind_name
        || is_behind_capital
}

/// Whether a person is female, or `None` if unknown.
///
/// Phrases such as "a girl named Sam" decide, and pronouns in sentences that mention no one else. Otherwise
/// the lists decide.
fn gender(text: &str, words: &[Word<'_>], name: &str) -> Option<bool> {
    const CLEAR: usize = 4;
    let mut counts = [0, 0];
    let mut pronouns = [0, 0];
    let (mut is_of_name, mut is_of_others) = (false, false);
    for (place, word) in words.iter().enumerate() {
        match word.text.to_lowercase().as_str() {
            "she" | "her" | "hers" | "herself" if is_of_name => pronouns[0] += 1,
            "he" | "him" | "his" | "himself" if is_of_name => pronouns[1] += 1,
            "mom" | "mommy" | "mum" | "mother" | "grandma" | "dad" | "daddy" | "father" | "grandpa"
            | "girl" | "boy" | "man" | "woman" | "sister" | "brother" | "friend" => is_of_others = true,
            _ if word.text == name => {
                is_of_name = true;
                if let [.., kind, link] = &words[..place]
                    && ["named", "called"].contains(&link.text)
                {
                    counts[0] += CLEAR * usize::from(["girl", "woman", "lady"].contains(&kind.text));
                    counts[1] += CLEAR * usize::from(["boy", "man"].contains(&kind.text));
                }
            }
            _ if is_capitalized(word.text) && lists().is_she.contains_key(word.text) => is_of_others = true,
            _ => {}
        }
        let end = words.get(place + 1).map_or(text.len(), |next| next.start);
        if text[word.start + word.text.len()..end].contains(['.', '!', '?', '"', '\n']) {
            if is_of_name && !is_of_others {
                counts = [counts[0] + pronouns[0], counts[1] + pronouns[1]];
            }
            (pronouns, is_of_name, is_of_others) = ([0, 0], false, false);
        }
    }
    let listed = lists().is_she.get(name).copied().flatten();
    match counts {
        [she, he] if she >= 2 && she > 2 * he => Some(true),
        [she, he] if he >= 2 && he > 2 * she => Some(false),
        [she, he] if listed.is_none() && she != he => Some(she > he),
        _ => listed,
    }
}

/// Whether a color occurs, and always directly before a thing that may have any color.
fn is_of_things(words: &[Word<'_>], color: &str) -> bool {
    let places: Vec<usize> =
        (0..words.len()).filter(|place| words[*place].text.eq_ignore_ascii_case(color)).collect();
    !places.is_empty()
        && places.iter().all(|place| {
            words[*place].text == color
                && words.get(place + 1).is_some_and(|next| lists().things.contains(next.text))
        })
}

/// Replaces words in a text.
fn replaced(text: &str, to: &HashMap<&str, &str>) -> String {
    let mut copy = String::with_capacity(text.len());
    let mut done = 0;
    for word in words(text) {
        if let Some(other) = to.get(word.text) {
            copy += &text[done..word.start];
            copy += other;
            done = word.start + word.text.len();
        }
    }
    copy + &text[done..]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns copies of a story for the first 60 seeds.
    fn copies(story: &str) -> Vec<String> {
        let cast = Cast::of(story);
        (0..60).map(|seed| cast.copy(&mut Choices::new(seed))).collect()
    }

    /// Returns the words in a copy that replace `name`.
    fn replacements_of<'a>(story: &str, copy: &'a str, name: &str) -> HashSet<&'a str> {
        let (from, to) = (words(story), words(copy));
        assert_eq!(from.len(), to.len(), "{copy}");
        from.iter().zip(to).filter(|(from, _)| from.text == name).map(|(_, to)| to.text).collect()
    }

    #[test]
    fn name_is_replaced_consistently_within_its_gender() {
        let story = "Once there was a boy named Tim. Tim met Lily. \"Hi, Lily's cat!\" said Tim.";
        let copies = copies(story);
        let mut unchanged = 0;
        for copy in &copies {
            let [tim, lily] = ["Tim", "Lily"].map(|name| replacements_of(story, copy, name));
            assert!(tim.len() == 1 && lily.len() == 1, "{copy}");
            assert!(tim.iter().all(|name| *name == "Tim" || lexicon().he.contains(name)), "{copy}");
            assert!(lily.iter().all(|name| *name == "Lily" || lexicon().she.contains(name)), "{copy}");
            unchanged += usize::from(copy == story);
        }
        assert!((5..25).contains(&unchanged), "{unchanged} of {}", copies.len());
        assert!(copies.iter().collect::<HashSet<_>>().len() > 40);
    }

    #[test]
    fn pronouns_determine_the_gender_of_ambiguous_names() {
        for (story, is_she) in [
            ("A girl named Sam had a hat. Sam lost it.", true),
            ("Max saw her hat and took her bag. Max said she was glad.", true),
            ("Max ran. Max sat down.", false),
        ] {
            let name = if story.contains("Sam") { "Sam" } else { "Max" };
            let found = Cast::of(story).people.get(name).copied();
            assert_eq!(found, (story.contains("her") || story.contains("girl")).then_some(is_she), "{story}");
        }
    }

    #[test]
    fn stories_with_short_forms_keep_their_names() {
        for story in ["Timmy laughed. \"Tim!\" said Sara.", "Bill saw Emma. \"William!\" she said."] {
            assert!(copies(story).iter().all(|copy| copy == story), "{:?}", copies(story));
        }
    }

    #[test]
    fn words_that_look_like_names_are_kept() {
        for story in [
            "\"Will you come?\" he said. \"May I?\" It was in May. Mark it. Rose petals fell. Hope is good. Grace.",
            "Mary Jane saw Jack Frost and Santa Claus. A jack-in-the-box came out.",
            "Peter Rabbit sat down. He bought a Max. It was on Christmas Eve.",
            "The Tims and timid Amyable sang.",
        ] {
            assert!(copies(story).iter().all(|copy| copy == story), "{:?}", copies(story));
        }
        let story = "The flower girl was called Rose. Rose sang, and Rose laughed.";
        assert!(copies(story).iter().any(|copy| copy != story));
    }

    #[test]
    fn object_colors_are_replaced_and_others_kept() {
        let ball = "She had a red ball. The red ball was gone.";
        let found = copies(ball);
        assert!(found.iter().any(|copy| copy.contains("blue ball. The blue ball")));
        assert!(
            found.iter().all(|copy| !copy.contains("a orange") && words(copy).len() == words(ball).len())
        );
        let sky = "The blue ball flew into the blue sky.";
        assert!(copies(sky).iter().all(|copy| copy == sky));
    }
}
