//! Prompts whose continuation is known: names, frames and pairs in them are kept out of the exercises.

use serde::Serialize;

use crate::exercises::{is_held_out, pair};
use crate::lexicon::lexicon;
use crate::story::{capitalised, invented};
use crate::{Choices, Noun};

/// A prompt, how it should go on, and how it should not.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Probe {
    /// What is tested.
    pub kind: &'static str,
    /// The text so far.
    pub prompt: String,
    /// Continuations that are right, each with the space before it.
    pub answers: Vec<String>,
    /// Those that it is compared with.
    pub others: Vec<String>,
}

/// How many prompts there are of each kind.
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
    const KINDS: [Make; 12] = [
        two_people,
        pronoun,
        pronoun_behind_another,
        |choices| agreement(choices, 0),
        |choices| agreement(choices, 1),
        |choices| agreement(choices, 2),
        successor,
        greater,
        recall,
        copy,
        place_of_thing,
        brackets,
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

/// Who gets it: names that no exercise has in this role, in frames that none has.
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

const PRONOUNS: [&str; 2] = [" he", " she"];

fn of_gender(kind: &'static str, prompt: String, is_she: bool) -> Probe {
    let [wrong, right] = if is_she { PRONOUNS } else { [PRONOUNS[1], PRONOUNS[0]] };
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
    of_gender("pronoun", filled(choices.pick::<&str>(&FRAMES), &words), is_she)
}

fn pronoun_behind_another(choices: &mut Choices) -> Probe {
    const FRAMES: [&str; 3] =
        ["{A} waved to {B} and said that", "{A} did not see {B}, because", "{A} told {B} that"];
    let is_she = choices.chance(50);
    let words = [("A", name(choices, is_she)), ("B", name(choices, !is_she))];
    of_gender("pronoun, another nearer", filled(choices.pick::<&str>(&FRAMES), &words), is_she)
}

/// One or many, with so many other nouns between that are of the other number.
fn agreement(choices: &mut Choices, attractors: usize) -> Probe {
    let objects = &lexicon().objects;
    let (subject, others) = loop {
        let chosen = choices.distinct(3, objects.len());
        let [subject, one, two] = [0, 1, 2].map(|place| &objects[chosen[place]]);
        let is_kept = |noun: &Noun| is_held_out(&[subject.singular, noun.singular]);
        let is_fit = match attractors {
            0 => true,
            1 => is_kept(one),
            _ => is_kept(one) || is_kept(two),
        };
        if is_fit {
            break (subject, [one, two]);
        }
    };
    let is_many = choices.chance(50);
    let word = |noun: &Noun, is_many: bool| if is_many { noun.plural } else { noun.singular };
    let mut prompt = format!("The {}", word(subject, is_many));
    for other in &others[..attractors] {
        let between = choices.pick::<&str>(&["near", "behind", "next to", "under", "beside"]);
        prompt += &format!(" {between} the {}", word(other, !is_many));
    }
    let [right, wrong] = if is_many { [" are", " is"] } else { [" is", " are"] };
    let kind = ["agreement", "agreement, one other noun", "agreement, two other nouns"][attractors];
    Probe { kind, prompt, answers: vec![right.into()], others: vec![wrong.into()] }
}

fn successor(choices: &mut Choices) -> Probe {
    let lexicon = lexicon();
    let number = choices.between(1, 19);
    let frame = *choices.pick(&["{N} and one more is", "The number after {n} is", "After {n} comes"]);
    let this = lexicon.number(number);
    let capital = capitalised(&this);
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

fn greater(choices: &mut Choices) -> Probe {
    let lexicon = lexicon();
    let number = choices.between(2, 18);
    let frame = choices.pick::<&str>(&[
        "The party lasted from {n} to",
        "The shop was open from {n} to",
        "{A} worked from {n} to",
    ]);
    let word = |number: usize| format!(" {}", lexicon.number(number));
    Probe {
        kind: "greater than",
        prompt: filled(frame, &[("n", &lexicon.number(number)), ("A", name(choices, true))]),
        answers: (number + 1..=20).map(word).collect(),
        others: (1..=number).map(word).collect(),
    }
}

/// Sentences that say nothing of anybody.
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

/// A name that is no one's, a hundred tokens later.
fn recall(choices: &mut Choices) -> Probe {
    let name = capitalised(choices.pick::<String>(invented()));
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

/// Words that are no words, said again.
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

/// Where a thing is, said once and asked for once.
fn place_of_thing(choices: &mut Choices) -> Probe {
    let objects = &lexicon().objects;
    let [one, other] = loop {
        let chosen = choices.distinct(2, objects.len());
        let names = [0, 1].map(|place| objects[chosen[place]].singular);
        if is_held_out(&pair(names[0], names[1])) {
            break names;
        }
    };
    let [a, b] = [name(choices, true), name(choices, false)];
    let prompt =
        format!("{a} lost the {one}, and {b} sold the {other}. {} {a} found the", filler(choices, 2));
    Probe {
        kind: "who has what",
        prompt,
        answers: vec![format!(" {one}")],
        others: vec![format!(" {other}")],
    }
}

/// Brackets in brackets and in quotation marks, all of them open.
fn brackets(choices: &mut Choices) -> Probe {
    const FRAMES: [&str; 4] = [
        "On the shelf stood a {X} (with a {Y} (a gift from {A}",
        "\"I have a {X} (it came with the {Y}",
        "{B} (whose {X} was still wet) and {A} (who had a {Y}",
        "{A} read: \"Bring the {X} (the {Y} can stay",
    ];
    let [a, b] = [name(choices, true), name(choices, false)];
    let (x, y) = (thing(choices).singular, thing(choices).singular);
    let words = [("A", a), ("B", b), ("X", x), ("Y", y)];
    Probe {
        kind: "brackets",
        prompt: filled(choices.pick::<&str>(&FRAMES), &words),
        answers: vec![")".into()],
        others: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Exercise;

    #[test]
    fn frames_of_probes_are_in_no_exercise() {
        const FRAMES: [(Exercise, &[&str]); 5] = [
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
            (Exercise::Brackets, &["On the shelf", "(it came with", "was still wet", "can stay"]),
        ];
        for (exercise, parts) in FRAMES {
            let trained: String = (0..3000).map(|seed| exercise.document(seed).text).collect();
            for part in parts {
                assert!(!trained.contains(part), "{part}");
            }
        }
    }

    #[test]
    fn answers_are_right_and_others_are_wrong() {
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
