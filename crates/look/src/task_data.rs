//! Pairs of prompts for three tasks with known circuits.
//!
//! A pair is a clean prompt and a corrupted one that differs in the token that decides the answer. Words are
//! one token each in the model's vocabulary, so both prompts have the same number of tokens.

use std::collections::BTreeMap;

use candle_gpt2::RandomStream;
use serde::Deserialize;

use crate::error::{Result, invalid_option};
use crate::named::choice;
#[cfg(feature = "clap")]
use crate::named::choices;
use crate::{ComparedTexts, DataTask, Reader, Text, TextPair};

const SHE: &[&str] = &[
    "Mary", "Mia", "Ann", "Lily", "Emma", "Rosa", "Nina", "Kate", "Lucy", "Zoe", "Ivy", "Ruth", "Jane",
    "Maya", "Nora", "Clara", "Alma", "Tess", "Lena", "Vera", "Wendy", "Molly", "Sally", "Polly", "Daisy",
    "Grace", "Hazel", "Jill", "Kim", "Pam", "Rita", "Sara", "Tara", "Bella", "Elsa", "Holly", "Lara",
    "Sophie", "Amy", "Beth", "Fiona",
];
const HE: &[&str] = &[
    "Tom", "Ben", "Sam", "Max", "Leo", "Jack", "Finn", "Noah", "Luke", "Adam", "Otto", "Paul", "Hugo",
    "Ivan", "Karl", "Liam", "Nick", "Oscar", "Peter", "Simon", "Theo", "Victor", "Alan", "Bob", "Carl",
    "Dan", "Eric", "Frank", "George", "Harry", "Ian", "Jim", "Ken", "Lars", "Ned", "Omar", "Pete", "Rob",
    "Seth", "Tim", "Toby", "Bruno", "Colin", "David", "Emil", "Felix", "Henry", "Jonas", "Louis",
];
const THINGS: &[&str] = &[
    "ball", "drum", "doll", "puzzle", "whistle", "bell", "book", "map", "letter", "card", "picture", "box",
    "basket", "bag", "jar", "cup", "plate", "bowl", "lamp", "clock", "mirror", "spoon", "rope", "hammer",
    "brush", "candle", "coin", "key", "ring", "button", "stone", "shell", "hat", "coat", "scarf", "ribbon",
    "blanket", "pillow", "cake", "pie", "cookie", "pear", "flower", "rose", "pencil", "pen", "flag", "pot",
    "bottle", "radio", "guitar", "camera",
];
const PLACES: &[&str] = &[
    "garden",
    "park",
    "library",
    "school",
    "market",
    "shop",
    "bakery",
    "station",
    "museum",
    "church",
    "hospital",
    "castle",
    "tower",
    "forest",
    "river",
    "lake",
    "pond",
    "beach",
    "harbor",
    "bridge",
    "farm",
    "mill",
    "playground",
    "cottage",
];
/// Events with a duration, for prompts about how long they lasted.
const EVENTS: &[&str] = &[
    "war",
    "trip",
    "festival",
    "contract",
    "dispute",
    "reign",
    "project",
    "strike",
    "drought",
    "campaign",
    "expedition",
    "siege",
    "conflict",
    "voyage",
    "trial",
    "study",
    "tour",
    "program",
    "marriage",
    "friendship",
    "rebellion",
    "revolution",
    "struggle",
    "journey",
    "competition",
    "conference",
    "operation",
    "crisis",
    "debate",
    "investigation",
    "mission",
    "partnership",
    "protest",
    "recession",
    "restoration",
    "riot",
    "survey",
    "tournament",
    "treaty",
];
const NUMBERS: &[&str] = &[
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
];
/// Professions stereotyped as female; [`HIS`] lists those stereotyped as male.
const HERS: &[&str] = &[
    "nurse",
    "teacher",
    "secretary",
    "maid",
    "dancer",
    "waitress",
    "therapist",
    "designer",
    "singer",
    "model",
];
const HIS: &[&str] = &[
    "mechanic",
    "soldier",
    "engineer",
    "pilot",
    "captain",
    "farmer",
    "guard",
    "sheriff",
    "chief",
    "lawyer",
    "doctor",
    "boss",
    "programmer",
    "driver",
    "miner",
    "hunter",
    "surgeon",
    "coach",
    "builder",
    "judge",
];

/// Sentence frames in which one of two people gives the other something; `A` is the giver.
///
/// `X` and `Y` are the two people in either order.
const GIVING: &[&str] = &[
    "When {X} and {Y} went to the {P}, {A} gave a {O} to",
    "When {X} and {Y} were at the {P}, {A} gave the {O} to",
    "After {X} and {Y} came back from the {P}, {A} handed a {O} to",
    "While {X} and {Y} were sitting near the {P}, {A} showed a {O} to",
    "Then {X} and {Y} walked to the {P}, and {A} offered the {O} to",
    "One day {X} and {Y} met at the {P}. Soon {A} gave the {O} to",
    "At the {P}, {X} and {Y} looked for a {O}. Then {A} gave one to",
];
const YEARS: &[&str] = &[
    "The {E} lasted from the year {C}{N} to the year {C}",
    "The {E} began in the year {C}{N} and ended in the year {C}",
    "The {E} went on from the year {C}{N} until the year {C}",
];
const HOURS: &[&str] = &[
    "The party lasted from {N} to",
    "The shop was open from {N} to",
    "The work went on from {N} to",
    "The game lasted from {N} to",
];
const OF_PROFESSIONS: &[&str] = &[
    "The {A} was late that day because",
    "The {A} asked for more time because",
    "The {A} went home early because",
    "The {A} told everyone that",
    "The {A} was so tired that",
];
const OF_NAMES: &[&str] = &[
    "That day {A} was hungry, so",
    "Then {A} sat down at the table because",
    "After {A} had found the {O},",
    "When {A} looked at the {O},",
];

/// Minimum number of usable words per category.
const FEWEST: usize = 3;
/// Maximum number of pairs.
const MOST_PAIRS: usize = 1_000_000;

/// Prompt pairs for a task with a known circuit, built from words in the model's vocabulary.
///
/// The same seed produces the same pairs.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_look::{DataTask, Reader, TaskData};
///
/// let opened = ModelOptions::default().open(&Silent)?;
/// let reader = Reader::without_bos(opened.vocabulary());
/// let pairs = TaskData { task: DataTask::Ioi, count: 3, seed: 0 }.pairs(&reader)?;
/// assert_eq!((pairs.len(), pairs[0].answer.len(), pairs[0].against.len()), (3, 1, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct TaskData {
    /// Task
    #[serde(deserialize_with = "choice")]
    #[cfg_attr(feature = "clap", arg(value_name = "TASK", value_parser = choices::<DataTask>()))]
    pub task: DataTask,
    /// Number of pairs
    #[serde(default = "usual_count")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = usual_count()))]
    pub count: usize,
    /// Random seed
    #[serde(default)]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 0))]
    pub seed: u64,
}

fn usual_count() -> usize {
    100
}

/// Generator of pairs, with a vocabulary and a random number stream.
struct PairGenerator<'a> {
    reader: &'a Reader,
    random: RandomStream,
}

/// A prompt pair under construction: a sentence frame with its shared and differing words.
struct Draft<'a> {
    frame: &'a str,
    shared: Vec<(&'a str, String)>,
    clean: Vec<(&'a str, String)>,
    corrupt: Vec<(&'a str, String)>,
}

impl Draft<'_> {
    fn texts(&self) -> ComparedTexts {
        let filled = |own: &[(&str, String)]| {
            let words = self.shared.iter().chain(own);
            let text = words
                .fold(self.frame.to_owned(), |text, (role, word)| text.replace(&format!("{{{role}}}"), word));
            Text::Words(text)
        };
        ComparedTexts { clean: filled(&self.clean), corrupt: filled(&self.corrupt) }
    }
}

impl TaskData {
    /// Generates the pairs.
    ///
    /// # Errors
    /// If `count` is above a million, the model has no tokenizer, or too few of the words are one token.
    pub fn pairs(&self, reader: &Reader) -> Result<Vec<TextPair>> {
        if self.count > MOST_PAIRS {
            return Err(invalid_option(format!(
                "`count`: expected at most {MOST_PAIRS} pairs, found {}",
                self.count
            )));
        }
        let mut generator = PairGenerator { reader, random: RandomStream::new(self.seed) };
        match self.task {
            DataTask::Ioi => generator.giving(self.count),
            DataTask::GreaterThan => generator.greater_than(self.count),
            DataTask::Gender => generator.gender(self.count),
        }
    }
}

impl PairGenerator<'_> {
    fn pick<'b, T>(&mut self, from: &'b [T]) -> &'b T {
        let place = self.random.below(from.len() as u64);
        &from[usize::try_from(place).unwrap_or_default()]
    }

    /// Returns the words that encode as a single token with a leading space.
    fn known(&self, words: &[&'static str]) -> Result<Vec<&'static str>> {
        let mut known = Vec::new();
        for word in words {
            if self.reader.vocabulary().encode(&format!(" {word}"))?.len() == 1 {
                known.push(*word);
            }
        }
        Ok(known)
    }

    /// Returns the words that encode as a single token; fails if there are fewer than [`FEWEST`].
    fn required(&self, what: &str, words: &[&'static str]) -> Result<Vec<&'static str>> {
        let known = self.known(words)?;
        match known.len() < FEWEST {
            true => Err(invalid_option(format!(
                "only {} of {} {what} are single tokens in this model's vocabulary, and at least {FEWEST} \
                 are needed; use another `model`, or write your own pairs",
                known.len(),
                words.len()
            ))),
            false => Ok(known),
        }
    }

    /// Completes a pair, after checking that the prompts have equal lengths and differ in one token.
    fn finished(
        &self,
        draft: &Draft<'_>,
        answer: Vec<String>,
        against: Vec<String>,
        spans: &[(&str, &str)],
    ) -> Result<TextPair> {
        let texts = draft.texts();
        let (clean, corrupted) = texts.ids(self.reader)?;
        let in_front = usize::from(self.reader.bos().is_some());
        let mut places: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        // Each occurrence of a word is a span, numbered if there are several. The last token is the span
        // `end`.
        for (name, word) in spans {
            let ids = self.reader.vocabulary().encode(word)?;
            let found = clean.iter().enumerate().skip(in_front).filter(|(_, id)| ids == [**id]);
            let found: Vec<usize> = found.map(|(place, _)| place - in_front).collect();
            for (time, place) in found.iter().enumerate() {
                let name = if found.len() > 1 { format!("{name}{}", time + 1) } else { (*name).to_owned() };
                places.insert(name, vec![*place]);
            }
        }
        places.insert("end".into(), vec![clean.len() - 1 - in_front]);
        let differing = clean.iter().zip(&corrupted).filter(|(one, other)| one != other).count();
        if differing != 1 {
            return Err(invalid_option(format!(
                "this model's tokenizer splits {:?} so that the prompts do not differ in exactly one token; \
                 use another `model`",
                draft.frame
            )));
        }
        let tokens = |words: Vec<String>| words.into_iter().map(crate::TokenChoice::Text).collect();
        Ok(TextPair { texts, answer: tokens(answer), against: tokens(against), spans: places })
    }

    /// Generates pairs for indirect object identification.
    ///
    /// One of two people gives the other something. In the corrupted prompt, a third person gives it.
    fn giving(&mut self, count: usize) -> Result<Vec<TextPair>> {
        let names = self.required("names", &[SHE, HE].concat())?;
        let (things, places) = (self.required("things", THINGS)?, self.required("places", PLACES)?);
        let mut pairs = Vec::new();
        while pairs.len() < count {
            let [giver, getter, third] = [*self.pick(&names), *self.pick(&names), *self.pick(&names)];
            if giver == getter || giver == third || getter == third {
                continue;
            }
            let [first, second] = *self.pick(&[[giver, getter], [getter, giver]]);
            let words = [("X", first), ("Y", second), ("P", *self.pick(&places)), ("O", *self.pick(&things))];
            let draft = Draft {
                frame: self.pick::<&str>(GIVING),
                shared: words.map(|(role, word)| (role, word.to_owned())).into(),
                clean: vec![("A", giver.to_owned())],
                corrupt: vec![("A", third.to_owned())],
            };
            let [giver, getter] = [giver, getter].map(|name| format!(" {name}"));
            let spans = [("S", giver.as_str()), ("IO", getter.as_str())];
            pairs.push(self.finished(&draft, vec![getter.clone()], vec![giver.clone()], &spans)?);
        }
        Ok(pairs)
    }

    /// Generates pairs for the greater-than task, in which the next word must be greater.
    ///
    /// Prompts have years of a century and two digits, or numbers in words if the vocabulary lacks such
    /// years. The corrupted prompt has the year 01, or the smallest number.
    fn greater_than(&mut self, count: usize) -> Result<Vec<TextPair>> {
        let years = self.centuries()?;
        if years.is_empty() {
            let numbers = self.required("numbers", NUMBERS)?;
            let last = numbers.len() - 1;
            let inner: Vec<usize> = (1..last).collect();
            let words = |places: &[&str]| places.iter().map(|word| format!(" {word}")).collect::<Vec<_>>();
            return (0..count)
                .map(|_| {
                    let place = *self.pick(&inner);
                    let draft = Draft {
                        frame: self.pick::<&str>(HOURS),
                        shared: Vec::new(),
                        clean: vec![("N", numbers[place].to_owned())],
                        corrupt: vec![("N", numbers[0].to_owned())],
                    };
                    let (low, high) = numbers.split_at(place + 1);
                    let number = format!(" {}", numbers[place]);
                    self.finished(&draft, words(high), words(low), &[("number", number.as_str())])
                })
                .collect();
        }
        let events = self.required("events", EVENTS)?;
        (0..count)
            .map(|_| {
                let (century, digits) = self.pick(&years).clone();
                // Excludes the ends of the century, so that both greater and smaller years exist.
                let places: Vec<usize> = (2..digits.len().saturating_sub(1)).collect();
                let place = *self.pick(&places);
                let of = |place: usize| format!("{:02}", digits[place]);
                let (low, high) = digits.split_at(place + 1);
                let words =
                    |digits: &[u32]| digits.iter().map(|digits| format!("{digits:02}")).collect::<Vec<_>>();
                let draft = Draft {
                    frame: self.pick::<&str>(YEARS),
                    shared: vec![("E", (*self.pick(&events)).to_owned()), ("C", century.to_string())],
                    clean: vec![("N", of(place))],
                    corrupt: vec![("N", "01".to_owned())],
                };
                self.finished(&draft, words(high), words(low), &[("year", of(place).as_str())])
            })
            .collect()
    }

    /// Centuries, each with its years that encode as two tokens: the century and two digits.
    ///
    /// Centuries without the year 01, or with fewer than 20 such years, are left out.
    fn centuries(&self) -> Result<Vec<(u32, Vec<u32>)>> {
        const FEWEST_YEARS: usize = 20;
        let vocabulary = self.reader.vocabulary();
        let mut centuries = Vec::new();
        for century in 11..=17 {
            let mut years = Vec::new();
            let head = vocabulary.encode(&format!(" {century}"))?;
            for year in 0..100 {
                let whole = vocabulary.encode(&format!(" {century}{year:02}"))?;
                let digits = vocabulary.encode(&format!("{year:02}"))?;
                if head.len() == 1 && digits.len() == 1 && whole == [head[0], digits[0]] {
                    years.push(year);
                }
            }
            if years.len() >= FEWEST_YEARS && years.contains(&1) {
                centuries.push((century, years));
            }
        }
        Ok(centuries)
    }

    /// Generates pairs for the pronoun task, with professions or with names.
    ///
    /// Names are used if the vocabulary has too few of the professions. The corrupted prompt has a subject of
    /// the other gender.
    fn gender(&mut self, count: usize) -> Result<Vec<TextPair>> {
        let [hers, his] = [self.known(HERS)?, self.known(HIS)?];
        let has_sexes = self.known(&["man", "woman"])?.len() == 2;
        let has_professions = has_sexes && hers.len() >= FEWEST && his.len() >= FEWEST;
        let (women, men) = match has_professions {
            true => (hers, his),
            false => (self.required("names of women", SHE)?, self.required("names of men", HE)?),
        };
        let things = self.required("things", THINGS)?;
        (0..count)
            .map(|_| {
                let is_she = *self.pick(&[true, false]);
                let subject = *self.pick(if is_she { &women } else { &men });
                let other = match (has_professions, is_she) {
                    (true, true) => "man",
                    (true, false) => "woman",
                    (false, true) => *self.pick(&men),
                    (false, false) => *self.pick(&women),
                };
                let draft = Draft {
                    frame: self.pick::<&str>(if has_professions { OF_PROFESSIONS } else { OF_NAMES }),
                    shared: vec![("O", (*self.pick(&things)).to_owned())],
                    clean: vec![("A", subject.to_owned())],
                    corrupt: vec![("A", other.to_owned())],
                };
                let [right, wrong] = if is_she { [" she", " he"] } else { [" he", " she"] };
                let subject = format!(" {subject}");
                self.finished(
                    &draft,
                    vec![right.into()],
                    vec![wrong.into()],
                    &[("subject", subject.as_str())],
                )
            })
            .collect()
    }
}
