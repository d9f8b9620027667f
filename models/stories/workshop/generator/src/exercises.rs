//! Exercises that each practice a single ability.
//!
//! The abilities are copying, indirect objects, gender, agreement, numbers, quotation marks and brackets.

use std::sync::LazyLock;

use crate::Choices;
use crate::choices::mixed;
use crate::lexicon::{Noun, lexicon};
use crate::teller::{Bound, Id, Teller};

/// Ability that a document practices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exercise {
    /// A phrase that is repeated.
    Copying,
    /// Two people, one of whom does something for the other.
    TwoPeople,
    /// A subject and its verb, with up to two other nouns in between.
    Agreement,
    /// The pronouns he and she.
    Gender,
    /// Counting, successors and comparisons.
    Numbers,
    /// Nested quotation marks and brackets.
    Nesting,
    /// Two people, and a later sentence that names only the one who does something for the other.
    Later,
    /// An invented name that recurs after other sentences.
    Strangers,
    /// Invented words that are repeated.
    Spells,
    /// Two people with one thing each, and a later mention of one of the things.
    Belongings,
    /// The successor of a number.
    OneMore,
    /// The pronouns he and she, with a second person in between.
    Pronouns,
    /// Nested brackets.
    Brackets,
    /// Two people in a single short sentence, one of whom does something for the other.
    Brief,
}

impl Exercise {
    /// Returns the label of the exercise.
    pub fn name(self) -> &'static str {
        match self {
            Self::Copying => "copying",
            Self::TwoPeople => "two people",
            Self::Agreement => "agreement",
            Self::Gender => "gender",
            Self::Numbers => "numbers",
            Self::Nesting => "nesting",
            Self::Later => "two people, later",
            Self::Strangers => "strangers",
            Self::Spells => "spells",
            Self::Belongings => "belongings",
            Self::OneMore => "one more",
            Self::Pronouns => "pronouns",
            Self::Brackets => "brackets",
            Self::Brief => "two people, brief",
        }
    }

    /// Generates a document from a seed.
    ///
    /// Half of the documents are pages of a book or a game, as their first sentence states. This keeps
    /// stories from continuing like them. The others are a few sentences about the same people.
    pub fn document(self, seed: u64) -> String {
        let mut choices = Choices::new(seed);
        let is_framed = self == Self::Brief || choices.chance(50);
        self.written(choices, is_framed)
    }

    /// Generates a page of a book or a game from a seed.
    pub fn page(self, seed: u64) -> String {
        self.written(Choices::new(seed), true)
    }

    fn written(self, choices: Choices, is_framed: bool) -> String {
        let (fewest, most) = match (self, is_framed) {
            (Self::Strangers, true) => (1, 4),
            (Self::Strangers, false) => (1, 1),
            (Self::Copying | Self::TwoPeople | Self::Later, true) => (3, 12),
            (_, true) => (8, 20),
            (_, false) => (1, 4),
        };
        let mut desk = Desk { teller: Teller::new(choices), cast: None };
        const WEATHERS: [&str; 5] = ["sun", "rain", "wind", "snow", "fog"];
        let weather = *desk.choices().pick(&WEATHERS);
        desk.teller.flags.insert(weather);
        if is_framed {
            desk.teller.tell(self.frame());
            desk.teller.paragraph();
        }
        for _ in 0..desk.choices().between(fewest, most) {
            desk.teller.forget();
            if is_framed {
                desk.cast = None;
            }
            match self {
                Self::Copying => desk.copying(),
                Self::TwoPeople => desk.two_people("two.scene"),
                Self::Agreement => desk.agreement(),
                Self::Gender => desk.gender("gender"),
                Self::Numbers => desk.numbers(),
                Self::Nesting => desk.nesting("nest"),
                Self::Later => desk.two_people("later"),
                Self::Strangers => desk.stranger(),
                Self::Spells => desk.spell(),
                Self::Belongings => desk.belongings(),
                Self::OneMore => desk.one_more(),
                Self::Pronouns => desk.gender("pronouns"),
                Self::Brackets => desk.nesting("brackets"),
                Self::Brief => desk.two_people("two.brief"),
            }
            if is_framed && desk.choices().chance(60) {
                desk.teller.paragraph();
            }
        }
        desk.teller.text().trim_end().replace('\n', "\n\n")
    }

    /// Grammar rule for the first sentence of a framed document.
    fn frame(self) -> &'static str {
        match self {
            Self::Copying | Self::Spells => "frame.again",
            Self::Numbers | Self::OneMore => "frame.numbers",
            Self::Agreement => "frame.pictures",
            Self::Nesting | Self::Brackets => "frame.notes",
            _ => "frame.tales",
        }
    }
}

/// Invented words of two or three syllables, so that no tokenizer encodes one as a single token.
pub(crate) fn invented() -> &'static [String] {
    static WORDS: LazyLock<Vec<String>> = LazyLock::new(|| {
        const ONSETS: [&str; 17] =
            ["b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "tr"];
        const VOWELS: [&str; 5] = ["a", "e", "i", "o", "u"];
        const ENDS: [&str; 14] =
            ["n", "l", "k", "x", "m", "sh", "ro", "lo", "mi", "ka", "bu", "ni", "r", "ta"];
        const WORDS: usize = 6000;
        let mut choices = Choices::new(0);
        (0..WORDS)
            .map(|_| {
                let mut word = String::new();
                for _ in 0..choices.between(1, 2) {
                    word.push_str(choices.pick::<&str>(&ONSETS));
                    word.push_str(choices.pick::<&str>(&VOWELS));
                }
                word.push_str(choices.pick::<&str>(&ONSETS[..15]));
                word.push_str(choices.pick::<&str>(&VOWELS));
                word + *choices.pick::<&str>(&ENDS)
            })
            .collect()
    });
    &WORDS
}

/// Capitalizes a word.
pub(crate) fn capitalized(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}

/// Whether a combination is reserved for tests: one in ten, decided by a hash of its words.
pub fn is_held_out(words: &[&str]) -> bool {
    const SHARE: u64 = 10;
    let hash = words
        .iter()
        .flat_map(|word| word.bytes().chain([0]))
        .fold(0, |hash, byte| mixed(hash ^ u64::from(byte)).wrapping_add(0x9e37_79b9_7f4a_7c15));
    hash.is_multiple_of(SHARE)
}

/// Sorts a pair, so that both orders count as the same combination.
pub(crate) fn pair<'a>(one: &'a str, other: &'a str) -> [&'a str; 2] {
    if one < other { [one, other] } else { [other, one] }
}

struct Desk {
    teller: Teller,
    /// Names of the document's people and whether each is female, or `None` before they are chosen.
    cast: Option<[(&'static str, bool); 3]>,
}

impl Desk {
    fn choices(&mut self) -> &mut Choices {
        &mut self.teller.choices
    }

    fn set(&mut self, role: &'static str, word: impl Into<String>) {
        self.bind(role, Bound::Word(word.into()));
    }

    fn bind(&mut self, role: &'static str, to: impl Into<Bound>) {
        self.teller.standing.retain(|(name, _)| *name != role);
        self.teller.standing.push((role, to.into()));
    }

    /// Binds three people with different names to the roles, in random order.
    ///
    /// They are the document's people, or new ones if it has none. Held-out names are used only if
    /// `may_be_held_out`.
    fn people(&mut self, may_be_held_out: bool) -> [Id; 3] {
        let lexicon = lexicon();
        let mut cast = self.cast.unwrap_or_else(|| {
            let all: Vec<(&str, bool)> = lexicon
                .she
                .iter()
                .map(|name| (*name, true))
                .chain(lexicon.he.iter().map(|name| (*name, false)))
                .filter(|(name, _)| may_be_held_out || !lexicon.held_out_names.contains(name))
                .collect();
            let chosen = self.choices().distinct(3, all.len());
            [0, 1, 2].map(|place| all[chosen[place]])
        });
        self.cast = Some(cast);
        self.choices().shuffle(&mut cast);
        let ids = cast.map(|(name, is_she)| self.teller.person(name, is_she));
        for (role, id) in ["A", "B", "C"].into_iter().zip(ids) {
            self.bind(role, id);
        }
        ids
    }

    fn thing(&mut self, role: &'static str) -> &'static str {
        let noun = self.choices().pick(&lexicon().objects);
        let thing = self.teller.thing(noun);
        self.bind(role, thing);
        noun.singular
    }

    fn place(&mut self) {
        let noun = self.choices().pick(&lexicon().places);
        let place = self.teller.place(noun);
        self.bind("P", place);
    }

    fn number(&mut self, role: &'static str, number: usize) {
        self.set(role, lexicon().number(number));
    }

    fn two_people(&mut self, rule: &'static str) {
        let [giver, other, _] = self.people(false);
        let names = [giver, other].map(|id| self.teller.name(id).to_owned());
        let [one, two] = pair(&names[0], &names[1]);
        let thing = loop {
            let thing = self.thing("O");
            if !is_held_out(&[one, two, thing]) {
                break thing;
            }
        };
        self.place();
        let noun = lexicon().objects.iter().find(|noun| noun.singular == thing);
        let adjective = noun.map_or("good", |noun| *self.choices().pick(&noun.adjectives));
        self.set("W", adjective);
        let order = if self.choices().chance(50) { [giver, other] } else { [other, giver] };
        self.bind("X", order[0]);
        self.bind("Y", order[1]);
        self.teller.tell(rule);
    }

    fn gender(&mut self, rule: &'static str) {
        self.people(true);
        self.thing("O");
        self.place();
        let number = self.choices().between(2, 20);
        self.number("K", number);
        self.teller.tell(rule);
    }

    fn agreement(&mut self) {
        self.people(true);
        let nouns: Vec<_> = lexicon().objects.iter().chain(&lexicon().animals).collect();
        let (subject, one, two) = loop {
            let chosen = self.choices().distinct(3, nouns.len());
            let [subject, one, two] = [0, 1, 2].map(|place| nouns[chosen[place]]);
            let held_out = [one, two].iter().any(|noun| is_held_out(&[subject.singular, noun.singular]));
            if !held_out {
                break (subject, one, two);
            }
        };
        let [many, many_one, many_two] = [0; 3].map(|_| self.choices().chance(50));
        let word = |noun: &Noun, many| if many { noun.plural } else { noun.singular };
        let adjectives = ["old", "new", "red", "big", "small", "strange", "dirty", "clean"];
        let adjective = *self.choices().pick(&adjectives);
        self.set("J", adjective);
        let subject_word = word(subject, many);
        self.set("S0", subject_word);
        const BETWEEN: [&str; 9] =
            ["near", "behind", "next to", "under", "beside", "with", "in front of", "above", "by"];
        for (role, noun, many) in [("Q", one, many_one), ("T", two, many_two)] {
            self.set(role, format!("the {}", word(noun, many)));
        }
        for role in ["L", "L2"] {
            let preposition = *self.choices().pick(&BETWEEN);
            self.set(role, preposition);
        }
        const VERBS: [(&str, &str); 12] = [
            ("is", "are"),
            ("was", "were"),
            ("is", "are"),
            ("was", "were"),
            ("looks", "look"),
            ("seems", "seem"),
            ("has", "have"),
            ("stands", "stand"),
            ("belongs", "belong"),
            ("comes", "come"),
            ("makes", "make"),
            ("does", "do"),
        ];
        let (singular, plural) = *self.choices().pick(&VERBS);
        let ends: &[&str] = match singular {
            "has" => &["a long story", "no name", "red dots", "lost some color"],
            "stands" => &["there", "in the way", "outside"],
            "belongs" => &["to me", "to nobody", "to the school"],
            "comes" => &["from far away", "from the market"],
            "makes" => &["people laugh", "a lot of noise", "me happy"],
            "does" => &["not move", "not belong here", "not fit"],
            "looks" | "seems" => {
                &["old", "new", "wet", "clean", "very big", "strange", "too heavy", "all right"]
            }
            _ => &[
                "old",
                "gone",
                "wet",
                "clean",
                "very big",
                "here",
                "not for sale",
                "lost",
                "too heavy",
                "all right",
            ],
        };
        let end = *self.choices().pick(ends);
        self.set("V1", if many { plural } else { singular });
        self.set("E", end);
        self.teller.tell("agree-one");
    }

    fn numbers(&mut self) {
        self.people(true);
        self.thing("O");
        self.place();
        match self.choices().below(6) {
            0 | 1 => {
                let first = self.choices().between(1, 25);
                for (role, more) in [("N1", 0), ("N2", 1), ("N3", 2), ("N4", 3), ("N5", 4)] {
                    self.number(role, first + more);
                }
                self.teller.tell("count");
            }
            2 => {
                const DAYS: [&str; 7] =
                    ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
                let first = self.choices().below(7);
                for (role, more) in [("D1", 0), ("D2", 1), ("D3", 2)] {
                    self.set(role, DAYS[(first + more) % 7]);
                }
                self.teller.tell("day-after");
            }
            _ => {
                let most = if self.choices().chance(70) { 20 } else { 99 };
                self.teller.flags.remove("small");
                if most == 20 {
                    self.teller.flags.insert("small");
                }
                let (few, many) = loop {
                    let (one, two) = (self.choices().between(1, most), self.choices().between(1, most));
                    let (few, many) = (one.min(two), one.max(two));
                    if few < many && !is_held_out(&[&few.to_string(), &many.to_string()]) {
                        break (few, many);
                    }
                };
                self.number("F", few);
                self.number("M", many);
                self.teller.tell("more");
            }
        }
    }

    fn nesting(&mut self, rule: &'static str) {
        self.people(true);
        self.thing("O");
        self.place();
        let number = self.choices().between(2, 90);
        self.number("K", number);
        for role in ["X", "Y", "Z"] {
            let noun = self.choices().pick(&lexicon().objects);
            let adjective = *self.choices().pick(&noun.adjectives);
            self.set(role, format!("a {adjective} {}", noun.singular));
        }
        let word = self.choices().pick::<String>(invented()).clone();
        self.set("W", word);
        self.teller.tell(rule);
    }

    fn stranger(&mut self) {
        self.people(true);
        self.place();
        let name = capitalized(self.choices().pick::<String>(invented()));
        self.set("W", name);
        let nature = *self.choices().pick(&lexicon().traits);
        self.set("J", nature);
        self.teller.tell("stranger");
        for _ in 0..self.choices().below(6) {
            self.teller.tell("meanwhile");
        }
        self.teller.tell("stranger.again");
    }

    fn spell(&mut self) {
        self.people(true);
        let choices = self.choices();
        let length = choices.between(2, 7);
        let said: Vec<&str> = (0..length).map(|_| choices.pick::<String>(invented()).as_str()).collect();
        self.set("M", said.join(" "));
        self.teller.tell("spell");
    }

    fn belongings(&mut self) {
        self.people(true);
        self.place();
        let objects = &lexicon().objects;
        let things = loop {
            let chosen = self.choices().distinct(2, objects.len());
            let things = [0, 1].map(|place| objects[chosen[place]].singular);
            if !is_held_out(&pair(things[0], things[1])) {
                break things;
            }
        };
        self.set("X", things[0]);
        self.set("Y", things[1]);
        self.teller.tell("belongings");
        for _ in 0..self.choices().below(4) {
            self.teller.tell("meanwhile");
        }
        self.teller.tell("belongings.again");
    }

    fn one_more(&mut self) {
        self.people(true);
        self.thing("O");
        let first = self.choices().between(1, 24);
        self.number("N1", first);
        self.number("N2", first + 1);
        let is_of_things = first > 1 && self.choices().chance(20);
        self.teller.tell(if is_of_things { "one-more.things" } else { "one-more" });
    }

    fn copying(&mut self) {
        self.people(true);
        let lexicon = lexicon();
        let choices = self.choices();
        let kind = choices.below(7);
        let length = choices.between(2, 9);
        let said = match kind {
            0 | 1 => {
                (0..length).map(|_| choices.pick::<String>(invented()).clone()).collect::<Vec<_>>().join(" ")
            }
            2 => (0..length).map(|_| lexicon.number(choices.between(1, 20))).collect::<Vec<_>>().join(" "),
            3 => (0..length)
                .map(|_| choices.pick(&lexicon.objects).singular)
                .collect::<Vec<_>>()
                .join(if choices.chance(50) { ", " } else { " " }),
            4 => (0..length)
                .map(|_| *choices.pick(if choices.clone().chance(50) { &lexicon.she } else { &lexicon.he }))
                .collect::<Vec<_>>()
                .join(", "),
            5 => (0..length).map(|_| choices.between(0, 99).to_string()).collect::<Vec<_>>().join(" "),
            _ => {
                let words: Vec<&str> = lexicon.adjectives.iter().chain(&lexicon.traits).copied().collect();
                let verbs: Vec<&str> = lexicon.world_verbs.clone();
                (0..length)
                    .map(|_| match choices.below(3) {
                        0 => *choices.pick(&words),
                        1 => *choices.pick(&verbs),
                        _ => choices.pick(&lexicon.animals).plural,
                    })
                    .collect::<Vec<_>>()
                    .join(" ")
            }
        };
        let said = if self.choices().chance(30) { capitalized(&said) } else { said };
        self.set("M", said);
        self.teller.tell("copy");
    }
}

/// Random token IDs below `vocab_size` in which a row repeats.
///
/// The tokens come from the whole vocabulary or from a small alphabet. A short row repeats many times and a
/// long row two or more times, or pieces of a row follow it in random order. The next token is predictable
/// only from what followed the same token earlier.
pub fn random_rows(seed: u64, vocab_size: u32) -> Vec<u32> {
    let mut choices = Choices::new(seed);
    let (length, times) = match choices.below(4) {
        0 => (choices.between(3, 12), choices.between(4, 9)),
        1 => (choices.between(13, 40), choices.between(2, 4)),
        2 => (choices.between(41, 120), 2),
        _ => (choices.between(8, 40), 1),
    };
    // A small alphabet teaches the heads what to look for. The whole vocabulary teaches them to do so
    // for every token.
    let alphabet = choices.chance(60).then(|| 1 << choices.between(4, 9));
    let row = random_row(&mut choices, vocab_size, length, alphabet);
    let mut ids = row.repeat(times);
    if times == 1 {
        for _ in 0..choices.between(4, 16) {
            ids.extend(piece(&mut choices, &row, 3));
        }
    }
    ids
}

/// Pieces of a row of 3 to 8 random tokens, in random order, that fill a window of 32 tokens.
///
/// In random order, the distance to the beginning of the row carries no information. Only what followed the
/// same token earlier does. Rows are short because a model learns more slowly from longer rows.
pub fn short_rows(seed: u64, vocab_size: u32) -> Vec<u32> {
    const FILLED: usize = 34;
    let mut choices = Choices::new(seed);
    let length = choices.between(3, 8);
    let row = random_row(&mut choices, vocab_size, length, None);
    let mut ids = row.clone();
    while ids.len() < FILLED {
        ids.extend(piece(&mut choices, &row, 2));
    }
    ids
}

/// Returns a piece of a row with `shortest` to 8 tokens, or the whole row if the row is shorter.
fn piece<'a>(choices: &mut Choices, row: &'a [u32], shortest: usize) -> &'a [u32] {
    let length = choices.between(shortest, 8).min(row.len());
    let start = choices.below(row.len() - length + 1);
    &row[start..start + length]
}

/// Returns a row of tokens from the whole vocabulary or from an alphabet of `alphabet` tokens.
fn random_row(choices: &mut Choices, vocab_size: u32, length: usize, alphabet: Option<usize>) -> Vec<u32> {
    // A tokenizer's first merges are its most frequent tokens. Their ids follow the bytes and the end token.
    const MERGES: usize = 257;
    let all = usize::try_from(vocab_size).unwrap_or(1);
    let (first, count) = alphabet.map_or((0, all), |alphabet| (MERGES, alphabet));
    let id = |_| u32::try_from((first + choices.below(count)) % all).unwrap_or_default();
    (0..length).map(id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_people_exercises_never_contain_held_out_names() {
        let lexicon = lexicon();
        for seed in 0..500 {
            let text = Exercise::TwoPeople.document(seed);
            for name in &lexicon.held_out_names {
                assert!(
                    !text.split(|letter: char| !letter.is_alphabetic()).any(|word| word == *name),
                    "{text}"
                );
            }
        }
    }

    #[test]
    fn invented_words_are_not_names() {
        let lexicon = lexicon();
        let names: Vec<String> =
            lexicon.she.iter().chain(&lexicon.he).map(|name| name.to_lowercase()).collect();
        assert!(invented().iter().all(|word| !names.contains(word) && word.len() >= 4));
    }

    #[test]
    fn one_name_pair_in_ten_is_held_out() {
        let names: Vec<_> = lexicon().she.iter().chain(&lexicon().he).collect();
        let all = names.iter().flat_map(|one| names.iter().map(move |two| pair(one, two)));
        let held_out = all.clone().filter(|pair| is_held_out(&pair[..])).count();
        let share = held_out as f64 / all.count() as f64;
        assert!((0.08..0.12).contains(&share), "{share}");
        assert_eq!(pair("Tom", "Mia"), pair("Mia", "Tom"));
    }

    #[test]
    fn repeated_tokens_have_the_same_successor() {
        let mut kinds = [0; 2];
        for seed in 0..80 {
            let ids = random_rows(seed, 2048);
            assert!(ids.iter().all(|id| *id < 2048));
            let is_repeated_pair = |place: usize| {
                ids[..place].windows(2).any(|pair| pair[0] == ids[place - 1] && pair[1] == ids[place])
            };
            let share = (ids.len() / 2..ids.len()).filter(|place| is_repeated_pair(*place)).count() as f64
                / (ids.len() - ids.len() / 2) as f64;
            // In random order, pieces begin anywhere in the row, so some of the pairs are new.
            kinds[usize::from(share > 0.95)] += 1;
            assert!(share > 0.45, "{seed}: {share}");
        }
        assert!(kinds[0] > 8 && kinds[1] > 40, "{kinds:?}");
    }

    #[test]
    fn short_rows_fill_a_window_with_repeated_pieces() {
        use std::collections::HashSet;
        let mut lengths = HashSet::new();
        for seed in 0..400 {
            let ids = short_rows(seed, 2048);
            assert!((34..42).contains(&ids.len()) && ids.iter().all(|id| *id < 2048), "{ids:?}");
            // 8 tokens have 7 pairs. Pieces have 2 or more tokens, so at most every second pair is new.
            let tokens = ids.iter().collect::<HashSet<_>>().len();
            let pairs = ids[..8].windows(2).chain(ids[8..].windows(2)).collect::<HashSet<_>>().len();
            assert!(pairs <= 7 + 32 / 2, "{seed}: {pairs}");
            lengths.insert(tokens);
        }
        // A row may contain the same token twice.
        assert!((3..=8).all(|length| lengths.contains(&length)) && *lengths.iter().max().unwrap() == 8);
    }

    #[test]
    fn verbs_agree_with_distant_subjects() {
        let nouns: Vec<_> = lexicon().objects.iter().chain(&lexicon().animals).collect();
        let mut checked = 0;
        for seed in 0..300 {
            let text = Exercise::Agreement.document(seed);
            for sentence in text.split(['.', '\n']) {
                let words: Vec<&str> = sentence.split_whitespace().collect();
                let subject = words
                    .iter()
                    .position(|word| nouns.iter().any(|noun| noun.singular == *word || noun.plural == *word));
                let verb = words.iter().find(|word| ["is", "are"].contains(word));
                if let (Some(subject), Some(verb)) = (subject, verb) {
                    let same = nouns
                        .iter()
                        .any(|noun| noun.singular == noun.plural && noun.singular == words[subject]);
                    let is_plural = nouns.iter().any(|noun| noun.plural == words[subject]);
                    assert!(same || (*verb == "are") == is_plural, "{sentence}");
                    checked += 1;
                }
            }
        }
        assert!(checked > 200, "{checked}");
    }
}
