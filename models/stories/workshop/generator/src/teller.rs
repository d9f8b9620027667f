//! Generates sentences from rules, with names or pronouns, tense, number and articles.
//!
//! A [`Teller`] tracks the people, things and places of a document, and which of them this sentence and the
//! previous one mention. It uses a pronoun only for an entity that was mentioned and is the only one of its
//! class. If two compete, it repeats the name or noun. Forms of a slot:
//!
//! | form | person | thing | place |
//! |---|---|---|---|
//! | none | subject: Tom, he | subject: a red ball, the ball, it | the garden |
//! | `r` | himself | | |
//! | `s`, `q2`, `q`, `S` | he, him, his, He, always | `s`: balls | |
//! | `n`, `no`, `np` | name as subject, object, possessive | `n`: noun; `N`: noun as subject | `N`: subject |
//! | `v` | the name as a form of address | | |
//! | `k`, `b` | `k`: girl, boy | `b`: ball | `b`: garden |
//! | `at`, `to` | | | in the garden; into the garden |

use std::collections::HashSet;

use crate::grammar::{Piece, VerbForm, grammar};
use crate::lexicon::{Noun, lexicon};
use crate::{Choices, Verb};

/// Index of a person, thing or place in the document's list.
pub(crate) type Id = usize;

/// Entity that can be mentioned.
#[derive(Debug, Clone)]
enum Kind {
    Person { name: String, is_she: bool },
    Thing { noun: &'static Noun, adjective: Option<&'static str> },
    Place { noun: &'static Noun, adjective: Option<&'static str> },
}

#[derive(Debug, Clone)]
struct Entity {
    kind: Kind,
    is_mentioned: bool,
}

/// Value bound to a role.
#[derive(Debug, Clone)]
pub(crate) enum Bound {
    /// A person, thing or place in the document.
    Of(Id),
    /// A literal text.
    Word(String),
}

impl From<Id> for Bound {
    fn from(id: Id) -> Self {
        Self::Of(id)
    }
}

impl From<&str> for Bound {
    fn from(word: &str) -> Self {
        Self::Word(word.to_owned())
    }
}

impl From<String> for Bound {
    fn from(word: String) -> Self {
        Self::Word(word)
    }
}

/// Grammatical number of a subject in the third person.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Subject {
    Singular,
    Plural,
}

/// Pronouns of a class: subject, object, possessive, reflexive.
type Pronouns = [&'static str; 4];
const SHE: Pronouns = ["she", "her", "her", "herself"];
const HE: Pronouns = ["he", "him", "his", "himself"];
const IT: Pronouns = ["it", "it", "its", "itself"];

/// Percentage of possible pronouns that are used.
const PRONOUN_PERCENT: u64 = 78;
/// Index of the first habit of interchangeable words, after the habits of rules.
const SAME_HABITS: usize = 1 << 20;
/// Writer that builds a document sentence by sentence.
#[derive(Debug, Clone)]
pub(crate) struct Teller {
    /// Source of random choices.
    pub(crate) choices: Choices,
    entities: Vec<Entity>,
    /// Flags that the conditions of variants test.
    pub(crate) flags: HashSet<&'static str>,
    /// Values of the roles.
    pub(crate) standing: Vec<(&'static str, Bound)>,
    text: String,
    /// Byte offset of the current sentence.
    sentence: usize,
    subject: Subject,
    /// Entity that is the subject of the sentence.
    subject_id: Option<Id>,
    now: Vec<Id>,
    before: Vec<Id>,
    is_quoted: bool,
    capital: bool,
    used: HashSet<(usize, usize)>,
}

impl Teller {
    /// Creates an empty document.
    pub(crate) fn new(choices: Choices) -> Self {
        Self {
            choices,
            entities: Vec::new(),
            flags: HashSet::new(),
            standing: Vec::new(),
            text: String::new(),
            sentence: 0,
            subject: Subject::Singular,
            subject_id: None,
            now: Vec::new(),
            before: Vec::new(),
            is_quoted: false,
            capital: false,
            used: HashSet::new(),
        }
    }

    /// Text so far.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    fn add(&mut self, kind: Kind) -> Id {
        self.entities.push(Entity { kind, is_mentioned: false });
        self.entities.len() - 1
    }

    /// Adds a person.
    pub(crate) fn person(&mut self, name: &str, is_she: bool) -> Id {
        self.add(Kind::Person { name: name.to_owned(), is_she })
    }

    /// Adds a thing.
    pub(crate) fn thing(&mut self, noun: &'static Noun) -> Id {
        let adjective = match noun.adjectives.is_empty() || self.choices.chance(35) {
            true => None,
            false => Some(*self.choices.pick(&noun.adjectives)),
        };
        self.add(Kind::Thing { noun, adjective })
    }

    /// Adds a place.
    pub(crate) fn place(&mut self, noun: &'static Noun) -> Id {
        const OUTSIDE: [&str; 5] = ["old", "quiet", "little", "wide", "green"];
        const INSIDE: [&str; 5] = ["old", "quiet", "little", "dark", "big"];
        let adjectives = if noun.is_inside { INSIDE } else { OUTSIDE };
        let adjective = if self.choices.chance(25) { Some(*self.choices.pick(&adjectives)) } else { None };
        self.add(Kind::Place { noun, adjective })
    }

    pub(crate) fn name(&self, id: Id) -> &str {
        match &self.entities[id].kind {
            Kind::Person { name, .. } => name,
            Kind::Thing { noun, .. } | Kind::Place { noun, .. } => noun.singular,
        }
    }

    /// Forgets all people, things, places and roles.
    pub(crate) fn forget(&mut self) {
        self.entities.clear();
        self.standing.clear();
        (self.now, self.before) = (Vec::new(), Vec::new());
    }

    /// Begins a new paragraph and clears all mentions, so that names are repeated.
    pub(crate) fn paragraph(&mut self) {
        if !self.text.is_empty() && !self.text.ends_with('\n') {
            self.text.push('\n');
            self.now.clear();
            self.before.clear();
        }
    }

    /// Writes a sentence from a grammar rule.
    pub(crate) fn tell(&mut self, rule: &str) {
        let rule = grammar().rule(rule);
        self.unit(|teller, roles| teller.rule(rule, roles));
    }

    fn unit(&mut self, write: impl FnOnce(&mut Self, &[(&'static str, Bound)])) {
        if !self.text.is_empty() && !self.text.ends_with('\n') {
            self.text.push(' ');
        }
        self.sentence = self.text.len();
        self.end_sentence();
        self.capital = true;
        self.is_quoted = false;
        write(self, &self.standing.clone());
        let written = finished(&self.text[self.sentence..]);
        self.text.truncate(self.sentence);
        self.text.push_str(&written);
    }

    fn end_sentence(&mut self) {
        self.before = std::mem::take(&mut self.now);
        (self.subject, self.subject_id) = (Subject::Singular, None);
    }

    fn rule(&mut self, number: usize, roles: &[(&'static str, Bound)]) {
        let rule = &grammar().rules[number];
        let fitting: Vec<usize> = (0..rule.variants.len())
            .filter(|place| {
                let variant = &rule.variants[*place];
                let has = |name: &&str| roles.iter().any(|(role, _)| role == name);
                variant.roles.iter().all(has)
                    && variant
                        .conditions
                        .iter()
                        .all(|(condition, wanted)| self.flags.contains(condition) == *wanted)
            })
            .collect();
        assert!(!fitting.is_empty(), "rule `{}` has no variant for this document", rule.name);
        let chosen = if rule.is_habit {
            self.choices.habit(number, fitting.len())
        } else {
            // A variant is reused only if no other is left.
            let is_new = |place: &usize| !self.used.contains(&(number, *place));
            let any_new = fitting.iter().any(is_new);
            let weights: Vec<u64> =
                fitting.iter().map(|place| u64::from(!any_new || is_new(place))).collect();
            self.choices.weighted(&weights)
        };
        let place = fitting[chosen];
        self.used.insert((number, place));
        let pieces = &rule.variants[place].pieces;
        self.pieces(pieces, roles);
    }

    fn pieces(&mut self, pieces: &[Piece], roles: &[(&'static str, Bound)]) {
        for (place, piece) in pieces.iter().enumerate() {
            match piece {
                Piece::Text(text) => self.plain(text),
                Piece::Verb(base, form) => {
                    let word = self.verb(base, *form);
                    self.word(word);
                }
                Piece::Slot(name, form) => {
                    let word = self.slot(name, form, roles, &pieces[place + 1..]);
                    self.word(&word);
                }
                Piece::Choice(alternatives) => {
                    let chosen = self.choices.below(alternatives.len());
                    self.pieces(&alternatives[chosen], roles);
                }
                Piece::Same(group, alternatives) => {
                    let chosen = self.choices.habit(SAME_HABITS + group, alternatives.len());
                    self.pieces(&alternatives[chosen], roles);
                }
                Piece::Rule(rule) => self.rule(*rule, roles),
                Piece::Capital => self.capital = true,
            }
        }
    }

    fn word(&mut self, word: &str) {
        if word.is_empty() {
            return;
        }
        let mut letters = word.chars();
        match letters.next().filter(|_| std::mem::take(&mut self.capital)) {
            Some(first) => {
                self.text.extend(first.to_uppercase());
                self.text.push_str(letters.as_str());
            }
            None => self.text.push_str(word),
        }
    }

    fn plain(&mut self, text: &str) {
        let mut previous = self.text.chars().next_back().unwrap_or(' ');
        for letter in text.chars() {
            if letter == '"' {
                self.is_quoted = !self.is_quoted;
            } else if letter == ' ' && matches!(previous, '.' | '!' | '?') {
                if self.is_quoted {
                    self.capital = true;
                } else {
                    self.end_sentence();
                    self.capital = true;
                }
            }
            if self.capital && letter.is_alphabetic() {
                self.text.extend(letter.to_uppercase());
                self.capital = false;
            } else {
                self.text.push(letter);
            }
            previous = letter;
        }
    }

    /// Whether a word at the current position may be capitalized.
    fn may_be_capital(&self) -> bool {
        let before = self.text[self.sentence..].trim_end_matches([' ', '"']);
        before.is_empty() || before.ends_with(['.', '!', '?', ',', ':'])
    }

    /// Subject for a verb at the current position; may come from a literal word such as "it".
    fn subject_here(&self) -> Subject {
        const ADVERBS: [&str; 12] = [
            "never", "still", "just", "only", "always", "soon", "almost", "now", "even", "once", "also",
            "already",
        ];
        const THIRD: [&str; 21] = [
            "it",
            "there",
            "that",
            "this",
            "one",
            "nobody",
            "everyone",
            "everybody",
            "somebody",
            "someone",
            "nothing",
            "everything",
            "what",
            "something",
            "else",
            "day",
            "all",
            "rest",
            "loser",
            "anyone",
            "neither",
        ];
        const BEFORE_NOUNS: [&str; 14] = [
            "the", "a", "an", "every", "each", "no", "my", "your", "his", "her", "its", "our", "their", "one",
        ];
        let mut words = self.text[self.sentence..]
            .trim_end()
            .rsplit(' ')
            .map(str::to_lowercase)
            .skip_while(|word| ADVERBS.contains(&word.as_str()));
        let [last, before, first] = [0; 3].map(|_| words.next().unwrap_or_default());
        let is_before_noun = |word: &str| BEFORE_NOUNS.contains(&word) || word.ends_with("'s");
        // Matches "the next mile", but not "the way I".
        let is_pair = is_before_noun(&first)
            && before.chars().all(char::is_alphabetic)
            && !["i", "we", "you", "they", "and", "or", "but", "who"].contains(&last.as_str());
        let is_noun = !last.is_empty() && (is_before_noun(&before) || is_pair);
        let plural = self.subject == Subject::Plural && last.ends_with('s');
        match THIRD.contains(&last.as_str()) || (is_noun && !plural) {
            true => Subject::Singular,
            false if last == "they" || last == "both" => Subject::Plural,
            false => self.subject,
        }
    }

    fn verb(&self, base: &str, form: VerbForm) -> &'static str {
        let is_past = !self.is_quoted;
        let verb = match base {
            "was" if is_past => return "was",
            "was" => return "is",
            "were" if is_past => return "were",
            "were" => return "are",
            base => lexicon().verb(base),
        };
        let subject = if form == VerbForm::Plural { Subject::Plural } else { self.subject_here() };
        inflected(verb, form, is_past, subject)
    }

    fn pronouns(&self, id: Id) -> Pronouns {
        match &self.entities[id].kind {
            Kind::Person { is_she: true, .. } => SHE,
            Kind::Person { .. } => HE,
            _ => IT,
        }
    }

    /// Whether a pronoun can only refer to this entity.
    fn is_clear(&self, id: Id) -> bool {
        // A person who was only addressed by name, in a quotation, is not introduced yet.
        if !self.is_quoted && !self.entities[id].is_mentioned {
            return false;
        }
        let class = self.pronouns(id)[0];
        let competes = |other: &Id| *other != id && self.pronouns(*other)[0] == class;
        if self.now.contains(&id) {
            return !self.now.iter().any(competes);
        }
        self.before.contains(&id) && !self.now.iter().chain(&self.before).any(competes)
    }

    fn mention(&mut self, id: Id) {
        if !self.now.contains(&id) {
            self.now.push(id);
        }
    }

    fn slot(
        &mut self,
        name: &str,
        form: &'static str,
        roles: &[(&'static str, Bound)],
        following: &[Piece],
    ) -> String {
        match roles.iter().find(|(role, _)| *role == name).map(|(_, bound)| bound) {
            Some(Bound::Of(id)) => self.single(*id, form, following),
            Some(Bound::Word(word)) => {
                self.capital |= form == "C" && self.may_be_capital();
                word.clone()
            }
            None => panic!("unknown role `{name}` in: {}", &self.text[self.sentence..]),
        }
    }

    fn single(&mut self, id: Id, form: &'static str, following: &[Piece]) -> String {
        match self.entities[id].kind {
            Kind::Person { .. } => self.person_slot(id, form),
            Kind::Thing { noun, adjective } => self.thing_slot(id, noun, adjective, form, following),
            Kind::Place { noun, adjective } => {
                let is_new = !std::mem::replace(&mut self.entities[id].is_mentioned, true);
                let adjective = adjective.filter(|_| is_new && form != "b").map(|word| format!("{word} "));
                let named = format!("{}{}", adjective.unwrap_or_default(), noun.singular);
                match form {
                    "at" => format!("{} the {named}", noun.prepositions.0),
                    "to" => format!("{} the {named}", noun.prepositions.1),
                    "b" => named,
                    _ => {
                        if form == "N" {
                            (self.subject, self.subject_id) = (Subject::Singular, None);
                        }
                        format!("the {named}")
                    }
                }
            }
        }
    }

    fn person_slot(&mut self, id: Id, form: &'static str) -> String {
        let pronouns = self.pronouns(id);
        if form == "k" {
            return if pronouns == SHE { "girl".into() } else { "boy".into() };
        }
        if let Some(place) = ["s", "q2", "q", "S"].iter().position(|known| *known == form) {
            self.capital |= form == "S";
            self.mention(id);
            if place % 3 == 0 {
                (self.subject, self.subject_id) = (Subject::Singular, Some(id));
            }
            return pronouns[place % 3].to_owned();
        }
        if form == "v" {
            self.mention(id);
            self.entities[id].is_mentioned |= !self.is_quoted;
            return self.name(id).to_owned();
        }
        let of_form = match form {
            "no" => 1,
            "np" => 2,
            "r" => 3,
            _ => 0,
        };
        let is_pronoun = form == "r"
            || (!form.starts_with('n') && self.is_clear(id) && self.choices.chance(PRONOUN_PERCENT));
        let word = if is_pronoun {
            pronouns[of_form].to_owned()
        } else {
            self.entities[id].is_mentioned |= !self.is_quoted;
            let name = self.name(id);
            if of_form == 2 { possessive(name) } else { name.to_owned() }
        };
        self.entities[id].is_mentioned |= is_pronoun;
        self.mention(id);
        if of_form == 0 {
            (self.subject, self.subject_id) = (Subject::Singular, Some(id));
        }
        word
    }

    fn thing_slot(
        &mut self,
        id: Id,
        noun: &'static Noun,
        adjective: Option<&'static str>,
        form: &'static str,
        following: &[Piece],
    ) -> String {
        match form {
            "b" => {
                self.entities[id].is_mentioned = true;
                self.mention(id);
                return noun.singular.to_owned();
            }
            "s" => return noun.plural.to_owned(),
            _ => {}
        }
        let is_new = !std::mem::replace(&mut self.entities[id].is_mentioned, true);
        // "which" and "that" follow nouns, not pronouns.
        let is_relative = following.first().is_some_and(|piece| {
            matches!(piece, Piece::Text(text) if text.starts_with(" that") || text.starts_with(", which"))
        });
        let is_pronoun = form.is_empty()
            && !is_new
            && !is_relative
            && self.is_clear(id)
            && self.choices.chance(PRONOUN_PERCENT);
        let described = adjective.map(|adjective| format!("{adjective} {}", noun.singular));
        let described = described.as_deref().unwrap_or(noun.singular);
        let text = if is_pronoun {
            self.pronouns(id)[0].to_owned()
        } else if is_new {
            format!("a {described}")
        } else if self.choices.chance(18) {
            format!("the {described}")
        } else {
            format!("the {}", noun.singular)
        };
        self.mention(id);
        if matches!(form, "" | "N") {
            (self.subject, self.subject_id) = (Subject::Singular, Some(id));
        }
        text
    }
}

fn possessive(name: &str) -> String {
    format!("{name}'s")
}

fn inflected(verb: Verb, form: VerbForm, is_past: bool, subject: Subject) -> &'static str {
    match (form, verb.base) {
        (VerbForm::Participle, _) => verb.participle,
        (VerbForm::Ing, _) => verb.ing,
        (_, "be") => match (is_past, subject) {
            (true, Subject::Plural) => "were",
            (true, Subject::Singular) => "was",
            (false, Subject::Singular) => "is",
            (false, Subject::Plural) => "are",
        },
        _ if is_past => verb.past,
        _ if subject == Subject::Singular => verb.third,
        _ => verb.base,
    }
}

/// Corrects spaces, punctuation and articles.
fn finished(text: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        let is_mark = word.chars().all(|letter| matches!(letter, '.' | ',' | '!' | '?' | ';' | ':'));
        match words.last_mut() {
            Some(last) if is_mark => last.push_str(word),
            _ => words.push(word.to_owned()),
        }
    }
    for place in 1..words.len() {
        let next = words[place].trim_start_matches('"').to_lowercase();
        let is_vowel = next.starts_with(['a', 'e', 'i', 'o', 'u'])
            && !next.starts_with("one")
            && !next.starts_with("use");
        match words[place - 1].as_str() {
            "a" if is_vowel => words[place - 1] = "an".into(),
            "A" if is_vowel => words[place - 1] = "An".into(),
            _ => {}
        }
    }
    let mut text = words.join(" ");
    for (wrong, right) in [
        (",.", "."),
        (",,", ","),
        (",!", "!"),
        (",?", "?"),
        (",;", ";"),
        (",\".", ".\""),
        ("..", "."),
        ("!.", "!"),
        ("?.", "?"),
        (",'s", "'s"),
        (" ,", ","),
        (", and,", ", and"),
    ] {
        while text.contains(wrong) {
            text = text.replace(wrong, right);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grammar::parse_form;

    fn teller() -> (Teller, [Id; 3]) {
        let mut teller = Teller::new(Choices::new(3));
        let people =
            [("Tom", false), ("Ben", false), ("Mia", true)].map(|(name, is_she)| teller.person(name, is_she));
        teller.standing = ["A", "B", "C"].into_iter().zip(people.map(Bound::Of)).collect();
        (teller, people)
    }

    /// Writes a form that is not part of a rule.
    fn write_form(teller: &mut Teller, form: &'static str) {
        teller.unit(|teller, roles| teller.pieces(&parse_form(form), roles));
    }

    #[test]
    fn verbs_agree_with_subjects_and_quotations_use_the_present() {
        let (mut teller, _) = teller();
        write_form(
            &mut teller,
            "{A.n} ~be here and ~see {C.no}. Two men ~>be glad and ~>do not go. \"Who ~be there?\" {C.n} ~ask.",
        );
        assert_eq!(
            teller.text(),
            "Tom was here and saw Mia. Two men were glad and did not go. \"Who is there?\" Mia asked."
        );
    }

    #[test]
    fn ambiguous_pronouns_are_replaced_by_the_name() {
        let (mut teller, _) = teller();
        write_form(&mut teller, "{A.n} ~see {B.no}.");
        for _ in 0..40 {
            let mut again = teller.clone();
            again.choices = Choices::new(again.choices.below(1000) as u64);
            write_form(&mut again, "{A} ~laugh.");
            assert!(again.text().ends_with("Ben. Tom laughed."), "{}", again.text());
        }
        let mut pronouns = 0;
        for seed in 0..200 {
            let mut again = teller.clone();
            again.choices = Choices::new(seed);
            write_form(&mut again, "{C.n} ~come.");
            write_form(&mut again, "{C} ~sing.");
            pronouns += u32::from(again.text().ends_with("She sang."));
        }
        assert!((130..185).contains(&pronouns), "{pronouns} of 200 at {PRONOUN_PERCENT}%");
    }

    #[test]
    fn new_objects_get_an_indefinite_article_first() {
        let (mut teller, _) = teller();
        let ball = teller.add(Kind::Thing { noun: &lexicon().objects[0], adjective: Some("old") });
        teller.standing.push(("O", Bound::Of(ball)));
        write_form(&mut teller, "There ~was {O.n}. {O.N} ~be round.");
        assert!(teller.text().starts_with("There was an old ball. The "), "{}", teller.text());
    }

    #[test]
    fn punctuation_and_articles_are_corrected() {
        assert_eq!(finished("a old  man, . He saw a apple ,"), "an old man. He saw an apple,");
    }
}
