//! Prompts with known continuations.
//!
//! The prompts' names, frames and pairs are held out from the exercises.

use serde::Serialize;

use crate::exercises::{capitalized, invented, is_held_out};
use crate::lexicon::lexicon;
use crate::{Choices, Noun};

/// A prompt with correct and incorrect continuations.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Probe {
    /// Tested ability.
    pub kind: &'static str,
    /// Text to continue.
    pub prompt: String,
    /// Correct continuations, each with its leading space.
    pub answers: Vec<String>,
    /// Incorrect continuations for comparison.
    pub others: Vec<String>,
}

/// Generates `of_each` prompts of each kind.
///
/// ```
/// let probes = story_generator::probes(1, 20);
/// let ioi = probes.iter().find(|probe| probe.kind == "two people").unwrap();
/// assert_eq!((ioi.answers.len(), ioi.others.len()), (1, 1));
/// assert_eq!(probes.iter().filter(|probe| probe.kind == "two people").count(), 20);
/// ```
pub fn probes(seed: u64, of_each: usize) -> Vec<Probe> {
    let mut choices = Choices::new(seed ^ 0x0070_726f_6265_7300);
    type Make = fn(&mut Choices) -> Probe;
    const KINDS: [Make; 8] = [
        two_people,
        pronoun,
        possessive_behind_another,
        |choices| agreement(choices, false),
        |choices| agreement(choices, true),
        successor,
        recall,
        copy,
    ];
    KINDS.iter().flat_map(|make| (0..of_each).map(|_| make(&mut choices)).collect::<Vec<_>>()).collect()
}

fn filled(frame: &str, words: &[(&str, &str)]) -> String {
    words.iter().fold(frame.to_owned(), |text, (role, word)| text.replace(&format!("{{{role}}}"), word))
}

fn thing(choices: &mut Choices) -> &'static Noun {
    loop {
        let noun = choices.pick(&lexicon().objects);
        if !noun.singular.starts_with(['a', 'e', 'i', 'o', 'u']) {
            return noun;
        }
    }
}

/// Indirect objects: held-out names, in frames that no exercise contains.
fn two_people(choices: &mut Choices) -> Probe {
    const FRAMES: [&str; 6] = [
        "{X} and {Y} met by the {P}. It was windy. Then {A} opened a box with a {O} in it and gave it to",
        "The {P} was full of people, and {X} saw {Y} there. {A} held up a {O}, laughed, and handed it to",
        "When {X} and {Y} went to the {P}, {A} gave the {O} to",
        "{X} had breakfast with {Y}. {C} was late. Afterwards {A} found a {O} near the {P} and showed it to",
        "As {X} and {Y} were walking to the {P}, {A} smiled and showed a {O} to",
        "At the {P}, {X} and {Y} looked for a {O}. {A} found one and gave it to",
    ];
    let names = &lexicon().held_out_names;
    let chosen = choices.distinct(3, names.len());
    let [giver, other, third] = [0, 1, 2].map(|place| names[chosen[place]]);
    let [first, second] = if choices.chance(50) { [giver, other] } else { [other, giver] };
    let (thing, place) = (thing(choices).singular, choices.pick(&lexicon().places).singular);
    let words = [("X", first), ("Y", second), ("A", giver), ("C", third), ("O", thing), ("P", place)];
    Probe {
        kind: "two people",
        prompt: filled(choices.pick::<&str>(&FRAMES), &words),
        answers: vec![format!(" {other}")],
        others: vec![format!(" {giver}")],
    }
}

fn name(choices: &mut Choices, is_she: bool) -> &'static str {
    if is_she { choices.pick::<&str>(&lexicon().she) } else { choices.pick::<&str>(&lexicon().he) }
}

fn of_gender(kind: &'static str, prompt: String, [he, she]: [&str; 2], is_she: bool) -> Probe {
    let (right, wrong) = if is_she { (she, he) } else { (he, she) };
    Probe { kind, prompt, answers: vec![right.into()], others: vec![wrong.into()] }
}

fn pronoun(choices: &mut Choices) -> Probe {
    const FRAMES: [&str; 4] = [
        "{A} was hungry, so",
        "{A} sat down at the table because",
        "{A} looked at the {O}. Then",
        "After {A} had found the {O},",
    ];
    let is_she = choices.chance(50);
    let words = [("A", name(choices, is_she)), ("O", thing(choices).singular)];
    of_gender("pronoun", filled(choices.pick::<&str>(&FRAMES), &words), [" he", " she"], is_she)
}

/// Possessive pronouns, with a person of the other gender in between.
fn possessive_behind_another(choices: &mut Choices) -> Probe {
    const FRAMES: [&str; 4] = [
        "{A} waved to {B} and put on",
        "{A} stood near {B} and dropped",
        "{A} ran to {B} and held out",
        "At the {P}, {A} smiled at {B} and opened",
    ];
    let is_she = choices.chance(50);
    let place = choices.pick(&lexicon().places).singular;
    let words = [("A", name(choices, is_she)), ("B", name(choices, !is_she)), ("P", place)];
    let prompt = filled(choices.pick::<&str>(&FRAMES), &words);
    of_gender("possessive behind another", prompt, [" his", " her"], is_she)
}

/// Singular or plural, optionally with a noun of the other number in between.
fn agreement(choices: &mut Choices, has_attractor: bool) -> Probe {
    let objects = &lexicon().objects;
    let (subject, other) = loop {
        let chosen = choices.distinct(2, objects.len());
        let [subject, other] = [0, 1].map(|place| &objects[chosen[place]]);
        if !has_attractor || is_held_out(&[subject.singular, other.singular]) {
            break (subject, other);
        }
    };
    let is_many = choices.chance(50);
    let word = |noun: &Noun, is_many: bool| if is_many { noun.plural } else { noun.singular };
    let mut prompt = format!("The {}", word(subject, is_many));
    if has_attractor {
        let between = choices.pick::<&str>(&["near", "behind", "next to", "under", "beside"]);
        prompt += &format!(" {between} the {}", word(other, !is_many));
    }
    let verbs = [" is", " was"].map(String::from).to_vec();
    let plural_verbs = [" are", " were"].map(String::from).to_vec();
    let (answers, others) = if is_many { (plural_verbs, verbs) } else { (verbs, plural_verbs) };
    let kind = if has_attractor { "agreement, one other noun" } else { "agreement" };
    Probe { kind, prompt, answers, others }
}

fn successor(choices: &mut Choices) -> Probe {
    let lexicon = lexicon();
    let number = choices.between(1, 19);
    let frame = *choices.pick(&["{N} and one more is", "The number after {n} is", "After {n} comes"]);
    let this = lexicon.number(number);
    let capital = capitalized(&this);
    Probe {
        kind: "successor",
        prompt: filled(frame, &[("n", &this), ("N", &capital)]),
        answers: vec![format!(" {}", lexicon.number(number + 1))],
        others: (1..=20)
            .filter(|other| *other != number + 1)
            .map(|other| format!(" {}", lexicon.number(other)))
            .collect(),
    }
}

/// Filler sentences that mention no person.
fn filler(choices: &mut Choices, sentences: usize) -> String {
    const FILLERS: [&str; 12] = [
        "The wind blew from the sea.",
        "Two birds sat on the fence.",
        "A clock ticked on the wall.",
        "It smelled of bread.",
        "Far away a train could be heard.",
        "The path was wet.",
        "A lazy cat watched from a corner.",
        "Leaves flew by.",
        "The sky was gray and still.",
        "Somewhere a door creaked.",
        "The lamps went on one by one.",
        "Nobody else was near.",
    ];
    choices
        .distinct(sentences, FILLERS.len())
        .into_iter()
        .map(|place| FILLERS[place])
        .collect::<Vec<_>>()
        .join(" ")
}

/// Recall of an invented name after about a hundred tokens.
fn recall(choices: &mut Choices) -> Probe {
    let name = capitalized(choices.pick::<String>(invented()));
    let start = choices.pick::<&str>(&[
        "There was a brave girl by the name of {A}.",
        "{A} was a lazy boy from a small town.",
    ]);
    let start = filled(start, &[("A", &name)]);
    let filler = filler(choices, 12);
    let end = choices.pick::<&str>(&["\"Hello,", "\"Good night,", "\"Thank you,"]);
    Probe {
        kind: "invented name",
        prompt: format!("{start} {filler} {end}"),
        answers: vec![format!(" {name}")],
        others: Vec::new(),
    }
}

/// Repetition of invented words.
fn copy(choices: &mut Choices) -> Probe {
    let words: Vec<&str> = (0..5).map(|_| choices.pick::<String>(invented()).as_str()).collect();
    let said = words.join(" ");
    let frame = choices.pick::<&str>(&[
        "The old man said: \"{M}.\" And the child said: \"",
        "On the door it said {M}. Mia read it:",
    ]);
    let start = if frame.ends_with('"') { said.clone() } else { format!(" {said}") };
    Probe {
        kind: "copying",
        prompt: filled(frame, &[("M", &said)]),
        answers: vec![start],
        others: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Exercise;

    #[test]
    fn probe_frames_do_not_occur_in_exercises() {
        const FRAMES: [(Exercise, &[&str]); 6] = [
            (
                Exercise::TwoPeople,
                &["opened a box with", "was full of people, and", "had breakfast with", "looked for a"],
            ),
            (
                Exercise::Later,
                &[
                    "opened a box with",
                    "was full of people, and",
                    "had breakfast with",
                    "looked for a",
                    "found one",
                ],
            ),
            (Exercise::Strangers, &["by the name of", "from a small town"]),
            (Exercise::Spells, &["The old man said: ", "On the door"]),
            (Exercise::Pronouns, &["and put on", "and dropped", "and held out", "and opened"]),
            (Exercise::Gender, &["was hungry, so", "down at the table"]),
        ];
        for (exercise, parts) in FRAMES {
            let trained: String = (0..3000).map(|seed| exercise.document(seed)).collect();
            for part in parts {
                assert!(!trained.contains(part), "{part}");
            }
        }
    }

    #[test]
    fn answers_and_distractors_are_consistent_with_the_prompt() {
        for probe in probes(4, 60) {
            assert!(
                !probe.answers.is_empty()
                    && !probe.answers.iter().any(|answer| probe.others.contains(answer))
            );
            if probe.kind == "two people" {
                let name = probe.answers[0].trim();
                assert_eq!(probe.prompt.matches(name).count(), 1, "{probe:?}");
                assert_eq!(probe.prompt.matches(probe.others[0].trim()).count(), 2, "{probe:?}");
            }
        }
    }
}
