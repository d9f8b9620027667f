//! From what happens to sentences: names or pronouns, tense, person, articles, who speaks.
//!
//! A [`Teller`] knows who and what a story has, and what was mentioned in this sentence and the one before. A pronoun is used only for
//! the one of its class that was; if two compete, the name or noun is said again. Forms of a slot:
//!
//! | form | person | thing or animal | place |
//! |---|---|---|---|
//! | none | subject: Tom, he, I | subject: a red ball, the ball, it | the garden |
//! | `o` | object: Tom, him, me | the same as an object | |
//! | `p` | Tom's, his, my | its, their | |
//! | `r` | himself, myself | itself | |
//! | `s`, `q2`, `q`, `S` | he, him, his, He, always | | |
//! | `n`, `no`, `np` | subject, object, possessive without pronouns | `n`: noun; `N`: noun as a subject | |
//! | `v` | the name as one is called | | |
//! | `a`, `b`, `s` | | a ball; ball; balls | `b`: garden |
//! | `at`, `to` | | | in the garden; into the garden |
//! | `tag:say` | who says it, behind a quotation | | |

use std::collections::{BTreeSet, HashSet};

use crate::grammar::{Piece, VerbForm, grammar};
use crate::lexicon::{Noun, lexicon};
use crate::{Choices, Verb};

/// Somebody or something in a story, by its place in the story's list.
pub type Id = usize;

/// What can be mentioned.
#[derive(Debug, Clone)]
pub(crate) enum Kind {
    Person { name: String, noun: &'static str, is_she: bool, relation: Option<(Id, &'static str)> },
    Thing { noun: Noun, adjective: Option<&'static str>, owner: Option<Id>, count: usize },
    Place { noun: &'static Noun, adjective: Option<&'static str> },
}

#[derive(Debug, Clone)]
pub(crate) struct Entity {
    pub(crate) kind: Kind,
    is_mentioned: bool,
}

/// What a role stands for.
#[derive(Debug, Clone)]
pub enum Bound {
    /// One of the story's people, things, places.
    Of(Id),
    /// A text as it is.
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

/// The person that a finite verb agrees with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Subject {
    I,
    Third,
    /// Also "you".
    Plural,
}

/// Pronouns of a class: subject, object, possessive, reflexive.
type Pronouns = [&'static str; 4];
const I: Pronouns = ["I", "me", "my", "myself"];
const YOU: Pronouns = ["you", "you", "your", "yourself"];
const WE: Pronouns = ["we", "us", "our", "ourselves"];
const SHE: Pronouns = ["she", "her", "her", "herself"];
const HE: Pronouns = ["he", "him", "his", "himself"];
const IT: Pronouns = ["it", "it", "its", "itself"];
const THEY: Pronouns = ["they", "them", "their", "themselves"];

/// How often, of a hundred times, a pronoun is used where one may be.
const PRONOUN_PERCENT: u64 = 78;
/// Number of the first habit that is a word's, behind those of rules.
const SAME_HABITS: usize = 1 << 20;
/// How often a sentence that begins with the main person has something in front.
const FRONT_PERCENT: u64 = 22;
/// How often "said Tom" is followed by how.
const TAG_PERCENT: u64 = 36;

/// Tells what happens, sentence by sentence.
///
/// ```
/// use story_generator::{Choices, Teller};
///
/// let mut teller = Teller::new(Choices::new(1), true);
/// let tom = teller.person("Tom", false, None);
/// teller.say("{A} ~take {A.p} time. Then {A} ~laugh.", &[("A", tom.into())]);
/// assert!(teller.text().starts_with("Tom took his time. Then "));
/// ```
#[derive(Debug, Clone)]
pub struct Teller {
    /// Where its choices come from.
    pub choices: Choices,
    pub(crate) entities: Vec<Entity>,
    /// Whether it tells in the past.
    pub(crate) is_past: bool,
    /// Who says "I".
    pub(crate) narrator: Option<Id>,
    /// What else conditions of rules ask for.
    pub(crate) flags: HashSet<&'static str>,
    /// What the story contains.
    pub(crate) labels: BTreeSet<String>,
    /// Roles that every sentence has: the main person, the place.
    pub(crate) standing: Vec<(&'static str, Bound)>,
    text: String,
    /// Where the sentence that is being written begins.
    sentence: usize,
    subject: Subject,
    /// The one in the role of the sentence's subject.
    subject_id: Option<Id>,
    now: Vec<Id>,
    before: Vec<Id>,
    speaker: Option<(Id, Option<Id>)>,
    is_quoted: bool,
    capital: bool,
    /// Whether sentences may begin with how and when: those of exercises do not.
    pub(crate) fronts: bool,
    used: HashSet<(usize, usize)>,
}

impl Teller {
    /// One that has told nothing yet.
    pub fn new(choices: Choices, is_past: bool) -> Self {
        Self {
            choices,
            entities: Vec::new(),
            is_past,
            narrator: None,
            flags: HashSet::new(),
            labels: BTreeSet::new(),
            standing: Vec::new(),
            text: String::new(),
            sentence: 0,
            subject: Subject::Third,
            subject_id: None,
            now: Vec::new(),
            before: Vec::new(),
            speaker: None,
            is_quoted: false,
            capital: false,
            fronts: false,
            used: HashSet::new(),
        }
    }

    /// What it has told.
    pub fn text(&self) -> &str {
        &self.text
    }

    fn add(&mut self, kind: Kind) -> Id {
        self.entities.push(Entity { kind, is_mentioned: false });
        self.entities.len() - 1
    }

    /// Adds a person, with what he or she is to another one.
    pub fn person(&mut self, name: &str, is_she: bool, relation: Option<(Id, &'static str)>) -> Id {
        let noun = if is_she { "girl" } else { "boy" };
        self.add(Kind::Person { name: name.to_owned(), noun, is_she, relation })
    }

    /// Says what a person is, such as "baker".
    pub(crate) fn set_profession(&mut self, person: Id, profession: &'static str) {
        if let Kind::Person { noun, .. } = &mut self.entities[person].kind {
            *noun = profession;
        }
    }

    /// Adds things of a kind, or animals.
    pub fn thing(&mut self, noun: &Noun, count: usize) -> Id {
        let adjective = match noun.adjectives.is_empty() || self.choices.chance(35) {
            true => None,
            false => Some(*self.choices.pick(&noun.adjectives)),
        };
        self.add(Kind::Thing { noun: noun.clone(), adjective, owner: None, count })
    }

    /// Adds a place.
    pub fn place(&mut self, noun: &'static Noun) -> Id {
        const OUTSIDE: [&str; 5] = ["old", "quiet", "little", "wide", "green"];
        const INSIDE: [&str; 5] = ["old", "quiet", "little", "dark", "big"];
        let adjectives = if noun.is("inside") { INSIDE } else { OUTSIDE };
        let adjective = if self.choices.chance(25) { Some(*self.choices.pick(&adjectives)) } else { None };
        self.add(Kind::Place { noun, adjective })
    }

    pub(crate) fn name(&self, id: Id) -> &str {
        match &self.entities[id].kind {
            Kind::Person { name, .. } => name,
            Kind::Thing { noun, .. } => noun.singular,
            Kind::Place { noun, .. } => noun.singular,
        }
    }

    pub(crate) fn noun(&self, id: Id) -> Option<&Noun> {
        match &self.entities[id].kind {
            Kind::Person { .. } => None,
            Kind::Thing { noun, .. } => Some(noun),
            Kind::Place { noun, .. } => Some(noun),
        }
    }

    pub(crate) fn is_mentioned(&self, id: Id) -> bool {
        self.entities[id].is_mentioned || self.narrator == Some(id)
    }

    /// Says whose a thing is.
    pub(crate) fn set_owner(&mut self, thing: Id, person: Option<Id>) {
        if let Kind::Thing { owner, .. } = &mut self.entities[thing].kind {
            *owner = person;
        }
    }

    /// Everybody and everything is new again.
    pub(crate) fn forget(&mut self) {
        self.entities.clear();
        self.standing.clear();
        (self.now, self.before) = (Vec::new(), Vec::new());
    }

    /// Begins a new paragraph, in which names are said again.
    pub fn paragraph(&mut self) {
        if !self.text.is_empty() && !self.text.ends_with('\n') {
            self.text.push('\n');
            self.now.clear();
            self.before.clear();
        }
    }

    /// Tells by a rule of the grammar.
    pub fn tell(&mut self, rule: &str, roles: &[(&'static str, Bound)]) {
        let rule = grammar().rule(rule);
        self.unit(roles, |teller, roles| teller.rule(rule, roles));
    }

    /// Tells by a form that is given.
    pub fn say(&mut self, form: &'static str, roles: &[(&'static str, Bound)]) {
        let pieces = crate::grammar::parse_form(form);
        self.unit(roles, |teller, roles| teller.pieces(&pieces, roles));
    }

    fn unit(
        &mut self,
        roles: &[(&'static str, Bound)],
        write: impl FnOnce(&mut Self, &[(&'static str, Bound)]),
    ) {
        let mut all = roles.to_vec();
        all.extend(self.standing.iter().cloned());
        if !self.text.is_empty() && !self.text.ends_with('\n') {
            self.text.push(' ');
        }
        self.sentence = self.text.len();
        self.end_sentence();
        self.capital = true;
        (self.speaker, self.is_quoted) = (None, false);
        write(self, &all);
        let written = finished(&self.text[self.sentence..]);
        self.text.truncate(self.sentence);
        self.text.push_str(&written);
        if written.is_empty() && self.text.ends_with(' ') {
            self.text.pop();
        }
    }

    fn end_sentence(&mut self) {
        self.before = std::mem::take(&mut self.now);
        (self.subject, self.subject_id) = (Subject::Third, None);
    }

    fn holds(&self, condition: &str) -> bool {
        match condition {
            "past" => self.is_past,
            "first" => self.narrator.is_some(),
            other => self.flags.contains(other),
        }
    }

    fn rule(&mut self, number: usize, roles: &[(&'static str, Bound)]) {
        let rule = &grammar().rules[number];
        let fitting: Vec<usize> = (0..rule.variants.len())
            .filter(|place| {
                let variant = &rule.variants[*place];
                let has = |name: &&str| roles.iter().any(|(role, _)| role == name);
                variant.roles.iter().all(has)
                    && variant.conditions.iter().all(|(condition, wanted)| self.holds(condition) == *wanted)
            })
            .collect();
        assert!(!fitting.is_empty(), "rule `{}` has no variant for this story", rule.name);
        let chosen = if rule.is_habit {
            self.choices.habit(number, fitting.len())
        } else {
            // What the story has said already is only said again when there is nothing else.
            let is_new = |place: &usize| !self.used.contains(&(number, *place));
            let any_new = fitting.iter().any(is_new);
            let weights: Vec<u64> =
                fitting.iter().map(|place| u64::from(!any_new || is_new(place))).collect();
            self.choices.weighted(&weights)
        };
        let place = fitting[chosen];
        self.used.insert((number, place));
        let pieces = &rule.variants[place].pieces;
        // A sentence that begins with its subject may have something in front of it.
        let is_plain = matches!(pieces.first(), Some(Piece::Slot(names, "" | "n")) if names[..] == ["A"]);
        if is_plain && self.text.len() == self.sentence && self.fronts && self.choices.chance(FRONT_PERCENT) {
            let front = grammar().rule("front");
            self.rule(front, roles);
            self.text.push_str(", ");
            (self.subject, self.subject_id) = (Subject::Third, None);
        }
        self.pieces(pieces, roles);
    }

    fn pieces(&mut self, pieces: &[Piece], roles: &[(&'static str, Bound)]) {
        for (place, piece) in pieces.iter().enumerate() {
            match piece {
                Piece::Text(text) => self.plain(text),
                Piece::Verb(base, form) => {
                    let word = self.verb(base, *form);
                    self.word(&word);
                }
                Piece::Slot(names, form) => {
                    let following = &pieces[place + 1..];
                    let word = self.slot(names, form, roles, following);
                    self.word(&word);
                    let is_last =
                        matches!(following.first(), Some(Piece::Text(text)) if text.starts_with('.'));
                    // Who cries or whispers has said how.
                    let is_calm = ["tag:say", "tag:ask", "tag:answer", "tag:reply"].contains(form);
                    if is_calm && is_last && self.choices.chance(TAG_PERCENT) {
                        self.text.push(' ');
                        let more = grammar().rule("tag-more");
                        let speaker = roles
                            .iter()
                            .find(|(role, _)| *role == names[0])
                            .map(|(_, bound)| ("S", bound.clone()));
                        self.rule(
                            more,
                            &speaker.into_iter().chain(roles.iter().cloned()).collect::<Vec<_>>(),
                        );
                    }
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
                Piece::Speaker(speaker, hearer) => {
                    self.speaker = of_role(roles, speaker).map(|speaker| (speaker, of_role(roles, hearer)));
                }
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

    /// Whether a sentence begins here.
    fn may_be_capital(&self) -> bool {
        let before = self.text[self.sentence..].trim_end_matches([' ', '"']);
        before.is_empty() || before.ends_with(['.', '!', '?', ',', ':'])
    }

    /// The subject of a verb that is written now: words as "it" are no slots.
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
        // "The mile", "the next mile"; not "the way I".
        let is_pair = is_before_noun(&first)
            && before.chars().all(char::is_alphabetic)
            && !["i", "we", "you", "they", "and", "or", "but", "who"].contains(&last.as_str());
        let is_noun = !last.is_empty() && (is_before_noun(&before) || is_pair);
        let plural = self.subject == Subject::Plural && last.ends_with('s');
        match THIRD.contains(&last.as_str()) || (is_noun && !plural) {
            true => Subject::Third,
            false if last == "they" || last == "both" => Subject::Plural,
            false => self.subject,
        }
    }

    fn verb(&self, base: &str, form: VerbForm) -> String {
        let is_past = self.is_past && !self.is_quoted;
        let verb = match base {
            "was" if is_past => return "was".into(),
            "was" => return "is".into(),
            "were" if is_past => return "were".into(),
            "were" => return "are".into(),
            base => lexicon().verb(base),
        };
        let subject = if form == VerbForm::Plural { Subject::Plural } else { self.subject_here() };
        inflected(verb, form, is_past, subject).to_owned()
    }

    /// The pronouns of an id, its grammatical person, and whether names can be replaced by them always ("I").
    fn pronouns(&self, id: Id) -> (Pronouns, Subject, bool) {
        if self.is_quoted {
            match self.speaker {
                Some((speaker, _)) if speaker == id => return (I, Subject::I, true),
                Some((_, Some(hearer))) if hearer == id => return (YOU, Subject::Plural, true),
                _ => {}
            }
        } else if self.narrator == Some(id) {
            return (I, Subject::I, true);
        }
        match &self.entities[id].kind {
            Kind::Person { is_she: true, .. } => (SHE, Subject::Third, false),
            Kind::Person { .. } => (HE, Subject::Third, false),
            Kind::Thing { count: 2.., .. } => (THEY, Subject::Plural, false),
            _ => (IT, Subject::Third, false),
        }
    }

    /// Whether a pronoun can only mean this one.
    fn is_clear(&self, id: Id) -> bool {
        // Who was only called by name, in a quotation, is not known yet.
        if !self.is_quoted && !self.is_mentioned(id) {
            return false;
        }
        let class = self.pronouns(id).0[0];
        let competes = |other: &Id| *other != id && self.pronouns(*other).0[0] == class;
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
        names: &[&'static str],
        form: &'static str,
        roles: &[(&'static str, Bound)],
        following: &[Piece],
    ) -> String {
        if let [name] = names {
            return match roles.iter().find(|(role, _)| role == name).map(|(_, bound)| bound) {
                Some(Bound::Of(id)) => self.single(*id, form, following),
                Some(Bound::Word(word)) => {
                    self.capital |= form == "C" && self.may_be_capital();
                    match form {
                        "w" => word.rsplit(' ').next().unwrap_or_default().to_owned(),
                        _ => word.clone(),
                    }
                }
                None => panic!("no role `{name}` in: {}", &self.text[self.sentence..]),
            };
        }
        let ids: Vec<Id> = names.iter().filter_map(|name| of_role(roles, name)).collect();
        self.together(&ids, form)
    }

    /// Two or more people.
    fn together(&mut self, ids: &[Id], form: &'static str) -> String {
        let has_me = ids.iter().any(|id| self.pronouns(*id).1 == Subject::I);
        let has_you = ids.iter().any(|id| self.pronouns(*id).0[0] == "you");
        let pronouns = if has_me {
            WE
        } else if has_you {
            YOU
        } else {
            THEY
        };
        let of_form = match form {
            "o" | "no" => 1,
            "p" => 2,
            "r" => 3,
            _ => 0,
        };
        let is_here = |id: &Id| {
            (self.now.contains(id) || self.before.contains(id)) && (self.is_quoted || self.is_mentioned(*id))
        };
        let is_known = ids.iter().all(|id| is_here(id) || has_me || has_you);
        let others = |id: &Id| {
            !ids.contains(id)
                && matches!(self.entities[*id].kind, Kind::Person { .. } | Kind::Thing { count: 2.., .. })
        };
        let is_clear = is_known && !self.now.iter().chain(&self.before).any(others);
        // "They" is short, and more natural than two names again.
        let is_pronoun = form == "r"
            || (form == "p" && self.subject == Subject::Plural && ids.iter().all(|id| self.now.contains(id)))
            || (!form.starts_with('n') && is_clear && self.choices.chance(85));
        let word = if is_pronoun {
            pronouns[of_form].to_owned()
        } else {
            let mut ordered = ids.to_vec();
            // "I" and "me" come last.
            ordered.sort_by_key(|id| self.pronouns(*id).1 == Subject::I);
            let mut words = Vec::new();
            for (place, id) in ordered.iter().enumerate() {
                let own = self.pronouns(*id);
                words.push(match own.2 {
                    true => own.0[usize::from(of_form == 1)].to_owned(),
                    false => self.person_name(*id, place == 0 && of_form == 0),
                });
                self.mention(*id);
            }
            let last = words.pop().unwrap_or_default();
            let joined = format!("{} and {last}", words.join(", "));
            if of_form == 2 { possessive(&joined) } else { joined }
        };
        ids.iter().for_each(|id| self.mention(*id));
        if of_form == 0 {
            (self.subject, self.subject_id) = (Subject::Plural, None);
        }
        word
    }

    fn single(&mut self, id: Id, form: &'static str, following: &[Piece]) -> String {
        match &self.entities[id].kind {
            Kind::Person { .. } => self.person_slot(id, form),
            Kind::Thing { .. } => self.thing_slot(id, form, following),
            Kind::Place { noun, adjective } => {
                let (noun, adjective) = (*noun, *adjective);
                let is_new = !std::mem::replace(&mut self.entities[id].is_mentioned, true);
                let adjective = adjective.filter(|_| is_new && form != "b").map(|word| format!("{word} "));
                let named = format!("{}{}", adjective.unwrap_or_default(), noun.singular);
                match form {
                    "at" => format!("{} the {named}", noun.prepositions.0),
                    "to" => format!("{} the {named}", noun.prepositions.1),
                    "b" => named,
                    "N" => {
                        (self.subject, self.subject_id) = (Subject::Third, None);
                        format!("the {named}")
                    }
                    _ => format!("the {named}"),
                }
            }
        }
    }

    fn person_slot(&mut self, id: Id, form: &'static str) -> String {
        let (pronouns, subject, is_always) = self.pronouns(id);
        if form == "k" {
            let Kind::Person { noun, .. } = &self.entities[id].kind else { return String::new() };
            return (*noun).to_owned();
        }
        if let Some(place) = ["s", "q2", "q", "S"].iter().position(|known| *known == form) {
            self.capital |= form == "S";
            self.mention(id);
            if place % 3 == 0 {
                (self.subject, self.subject_id) = (subject, Some(id));
            }
            return pronouns[place % 3].to_owned();
        }
        if form == "v" {
            let name = self.name(id).to_owned();
            self.mention(id);
            self.entities[id].is_mentioned |= !self.is_quoted;
            return name;
        }
        if let Some(verb) = form.strip_prefix("tag:") {
            return self.tag(id, verb);
        }
        let of_form = match form {
            "o" | "no" => 1,
            "p" | "np" => 2,
            "r" => 3,
            _ => 0,
        };
        let is_bound = of_form >= 2 && self.subject_id == Some(id);
        let is_pronoun = is_always
            || (is_bound && form == "p")
            || form == "r"
            || (!form.starts_with('n')
                && self.is_clear(id)
                && (form == "p" || self.choices.chance(PRONOUN_PERCENT)));
        let is_first_word = self.text.len() == self.sentence;
        let word = if is_pronoun {
            pronouns[of_form].to_owned()
        } else {
            let name = self.person_name(id, is_first_word && of_form == 0);
            if of_form == 2 { possessive(&name) } else { name }
        };
        if is_always || is_pronoun {
            self.entities[id].is_mentioned = true;
        }
        self.mention(id);
        if of_form == 0 {
            (self.subject, self.subject_id) = (subject, Some(id));
        }
        word
    }

    /// Who says what was quoted.
    fn tag(&mut self, id: Id, verb: &str) -> String {
        const ORDER: usize = usize::MAX;
        let verb = lexicon().verb(verb);
        let (pronouns, subject, is_always) = self.pronouns(id);
        let verb = inflected(verb, VerbForm::Finite, self.is_past, subject);
        let is_clear = is_always || (self.is_clear(id) && self.choices.chance(60));
        let who = if is_clear { pronouns[0].to_owned() } else { self.person_name(id, false) };
        self.mention(id);
        (self.subject, self.subject_id) = (subject, Some(id));
        match is_clear || self.choices.habit(ORDER, 2) == 0 {
            true => format!("{who} {verb}"),
            false => format!("{verb} {who}"),
        }
    }

    /// A person's name; at the first time with what he or she is to another.
    fn person_name(&mut self, id: Id, is_plain: bool) -> String {
        const INTRODUCTION: usize = usize::MAX - 1;
        let Kind::Person { name, relation, noun, .. } = &self.entities[id].kind else { return String::new() };
        let (name, relation, noun) = (name.clone(), *relation, *noun);
        if self.is_quoted
            || std::mem::replace(&mut self.entities[id].is_mentioned, true)
            || is_plain && relation.is_none()
        {
            return name;
        }
        let Some((main, relation)) = relation else { return name };
        let whose = match self.pronouns(main) {
            (pronouns, _, true) => pronouns[2].to_owned(),
            (pronouns, ..)
                if self.is_mentioned(main) && (self.subject_id == Some(main) || self.is_clear(main)) =>
            {
                pronouns[2].to_owned()
            }
            _ => possessive(self.name(main)),
        };
        self.mention(main);
        match (relation, self.choices.habit(INTRODUCTION, 3)) {
            ("", 0) => format!("a {noun} named {name}"),
            ("", 1) if noun != "girl" && noun != "boy" => format!("{name} the {noun}"),
            ("", _) => name,
            (relation, 0 | 1) => format!("{whose} {relation} {name}"),
            (relation, _) => format!("{name}, {whose} {relation},"),
        }
    }

    fn thing_slot(&mut self, id: Id, form: &'static str, following: &[Piece]) -> String {
        let Kind::Thing { noun, adjective, owner, count } = &self.entities[id].kind else {
            return String::new();
        };
        let (noun, adjective, owner, count) = (noun.clone(), *adjective, *owner, *count);
        let word = if count > 1 { noun.plural } else { noun.singular };
        match form {
            "b" => {
                self.entities[id].is_mentioned = true;
                self.mention(id);
                return word.to_owned();
            }
            "s" => return noun.plural.to_owned(),
            "adj" => {
                return adjective.unwrap_or(noun.adjectives.first().copied().unwrap_or("good")).to_owned();
            }
            _ => {}
        }
        let (pronouns, subject, _) = self.pronouns(id);
        let is_new = !self.entities[id].is_mentioned;
        let of_form = match form {
            "o" => 1,
            "p" => 2,
            "r" => 3,
            _ => 0,
        };
        let is_noun = matches!(form, "n" | "N" | "a" | "A");
        if form == "A" {
            self.capital |= self.may_be_capital();
        }
        // "which" and "that" follow nouns, not pronouns.
        let is_relative = following.first().is_some_and(|piece| {
            matches!(piece, Piece::Text(text) if text.starts_with(" that") || text.starts_with(", which"))
        });
        let is_pronoun = form == "r"
            || (of_form == 2 && self.subject_id == Some(id))
            || (!is_noun
                && !is_new
                && !is_relative
                && self.is_clear(id)
                && self.choices.chance(PRONOUN_PERCENT));
        let described = adjective.map_or_else(|| word.to_owned(), |adjective| format!("{adjective} {word}"));
        let text = if is_pronoun {
            pronouns[of_form].to_owned()
        } else if matches!(form, "a" | "A") || is_new {
            let owner = owner.filter(|owner| {
                !matches!(form, "a" | "A") && self.is_mentioned(*owner) && self.choices.chance(60)
            });
            match (owner, count) {
                (Some(owner), _) => {
                    let whose = self.person_slot(owner, "p");
                    if count > 1 {
                        format!("{whose} {} {described}", lexicon().number(count))
                    } else {
                        format!("{whose} {described}")
                    }
                }
                (None, 1) => format!("a {described}"),
                (None, count) => format!("{} {described}", lexicon().number(count)),
            }
        } else if count > 1 && self.choices.chance(30) {
            format!("the {} {word}", lexicon().number(count))
        } else if self.choices.chance(18) {
            format!("the {described}")
        } else {
            format!("the {word}")
        };
        self.entities[id].is_mentioned = true;
        self.mention(id);
        if matches!(form, "" | "N" | "A") {
            (self.subject, self.subject_id) = (subject, Some(id));
        }
        if of_form == 2 && !is_pronoun { possessive(&text) } else { text }
    }
}

fn of_role(roles: &[(&'static str, Bound)], name: &str) -> Option<Id> {
    roles.iter().find(|(role, _)| *role == name).and_then(|(_, bound)| match bound {
        Bound::Of(id) => Some(*id),
        Bound::Word(_) => None,
    })
}

fn possessive(name: &str) -> String {
    match name.strip_suffix(',') {
        Some(name) => possessive(name),
        None if name.ends_with("ss") || !name.ends_with('s') => format!("{name}'s"),
        // Plurals; names in -s have the long form.
        None if name.chars().next().is_some_and(char::is_uppercase) => format!("{name}'s"),
        None => format!("{name}'"),
    }
}

fn inflected(verb: Verb, form: VerbForm, is_past: bool, subject: Subject) -> &'static str {
    match (form, verb.base) {
        (VerbForm::Participle, _) => verb.participle,
        (VerbForm::Ing, _) => verb.ing,
        (_, "be") => match (is_past, subject) {
            (true, Subject::Plural) => "were",
            (true, _) => "was",
            (false, Subject::I) => "am",
            (false, Subject::Third) => "is",
            (false, Subject::Plural) => "are",
        },
        _ if is_past => verb.past,
        _ if subject == Subject::Third => verb.third,
        _ => verb.base,
    }
}

/// Puts spaces, commas and articles right.
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

    fn teller(is_past: bool) -> Teller {
        Teller::new(Choices::new(3), is_past)
    }

    #[test]
    fn verbs_agree_with_their_subject_in_both_tenses() {
        let told = |is_past, is_first: bool| {
            let mut teller = teller(is_past);
            let (tom, mia) = (teller.person("Tom", false, None), teller.person("Mia", true, None));
            teller.narrator = is_first.then_some(tom);
            teller.say(
                "{A.n} ~be here and ~see {B.no}. {A+B.n} ~be glad and ~do not go.",
                &[("A", tom.into()), ("B", mia.into())],
            );
            teller.text().to_owned()
        };
        assert_eq!(told(true, false), "Tom was here and saw Mia. Tom and Mia were glad and did not go.");
        assert_eq!(told(false, false), "Tom is here and sees Mia. Tom and Mia are glad and do not go.");
        assert_eq!(told(false, true), "I am here and see Mia. Mia and I are glad and do not go.");
    }

    #[test]
    fn a_name_is_said_again_when_two_compete() {
        let mut teller = teller(true);
        let (tom, ben, mia) = (
            teller.person("Tom", false, None),
            teller.person("Ben", false, None),
            teller.person("Mia", true, None),
        );
        let roles = [("A", tom.into()), ("B", ben.into()), ("C", mia.into())];
        teller.say("{A.n} ~see {B.no}.", &roles);
        for _ in 0..40 {
            let mut again = teller.clone();
            again.choices = Choices::new(again.choices.below(1000) as u64);
            again.say("{A} ~laugh.", &roles);
            assert!(again.text().ends_with("Ben. Tom laughed."), "{}", again.text());
        }
        let mut pronouns = 0;
        for seed in 0..200 {
            let mut again = teller.clone();
            again.choices = Choices::new(seed);
            again.say("{C.n} ~come.", &roles);
            again.say("{C} ~sing.", &roles);
            pronouns += u32::from(again.text().ends_with("She sang."));
        }
        assert!((130..185).contains(&pronouns), "{pronouns} of 200 at {PRONOUN_PERCENT}%");
    }

    #[test]
    fn quoted_people_speak_of_themselves() {
        let mut teller = teller(true);
        let (tom, mia) = (teller.person("Tom", false, None), teller.person("Mia", true, None));
        teller.say(
            "\"@AB {A} ~be glad that {B} ~have {A.p} key, {B.v},\" {A.n} ~say.",
            &[("A", tom.into()), ("B", mia.into())],
        );
        assert_eq!(teller.text(), "\"I am glad that you have my key, Mia,\" Tom said.");
    }

    #[test]
    fn things_are_introduced_before_they_are_known() {
        let ball = &lexicon().objects[0];
        let mut teller = teller(true);
        let thing =
            teller.add(Kind::Thing { noun: ball.clone(), adjective: Some("old"), owner: None, count: 1 });
        let many = teller.add(Kind::Thing { noun: ball.clone(), adjective: None, owner: None, count: 3 });
        teller.say("There ~was {O.n}. {O.N} ~be round.", &[("O", thing.into())]);
        assert!(teller.text().starts_with("There was an old ball. The "), "{}", teller.text());
        teller.say("There ~were {O.n}. {O.N} ~be round.", &[("O", many.into())]);
        assert!(
            teller.text().contains("There were three balls. The ")
                && teller.text().ends_with("balls were round.")
        );
    }

    #[test]
    fn marks_and_articles_are_put_right() {
        assert_eq!(finished("a old  man, . He saw a apple ,"), "an old man. He saw an apple,");
    }
}
