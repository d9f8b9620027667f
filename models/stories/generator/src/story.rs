//! A story: its people, places and weather, and which plots it has. What happens in a plot is in `plots.rs`.

use std::sync::LazyLock;

use crate::lexicon::{Noun, lexicon};
use crate::teller::{Bound, Id, Teller};
use crate::{Choices, Impossible, World};

/// A document of the corpus.
#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    /// What it says.
    pub text: String,
    /// What it contains: kinds of exercises, plots, tense and person.
    pub labels: Vec<String>,
    /// The information of the choices that made it, in millionths of a bit: at least −log₂ p of the text.
    pub microbits: u64,
}

/// What a story is about, apart from what happens in it.
#[derive(Debug, Clone)]
pub(crate) struct Story {
    pub(crate) teller: Teller,
    pub(crate) world: World,
    /// Nouns that it has already, so that "the ball" is always one ball.
    nouns: Vec<&'static str>,
    names: Vec<String>,
    /// How often of a hundred times something is said beside the plot.
    asides: u64,
}

/// Words and names that are no one's: of two or three syllables, so that a tokenizer has none of them as one token.
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

/// A word with a capital.
pub(crate) fn capitalised(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}

impl Story {
    /// The story of a seed.
    ///
    /// # Errors
    /// When something happens in it that cannot: a fault of a plot.
    pub(crate) fn of(seed: u64) -> Result<Document, Impossible> {
        let mut choices = Choices::new(seed);
        let is_past = choices.chance(80);
        let is_first = choices.chance(15);
        let mut story = Self {
            teller: Teller::new(choices, is_past),
            world: World::default(),
            nouns: Vec::new(),
            names: Vec::new(),
            asides: 0,
        };
        story.teller.fronts = true;
        story.asides = [0, 15, 30, 45][story.choices().below(4)];
        let labels = [
            if is_past { "past" } else { "present" },
            if is_first { "first person" } else { "third person" },
        ];
        story.teller.labels.extend(labels.map(str::to_owned));
        const WEATHERS: [&str; 5] = ["sun", "rain", "wind", "snow", "fog"];
        let weather = WEATHERS[story.choices().weighted(&[4, 2, 3, 1, 1])];
        story.teller.flags.insert(weather);
        story.people(is_first);
        story.new_place("P");
        let (main, place) = (story.id("A"), story.id("P"));
        story.world.go(main, place);
        story.arrive();
        let traits = &lexicon().traits;
        let chosen = *story.choices().pick(traits);
        story.bind("J", chosen);
        if story.choices().chance(90) {
            story.tell("begin");
        }
        story.aside();
        story.plot()?;
        if story.choices().chance(20) {
            story.teller.paragraph();
            story.perhaps(50, "next-plot");
            story.plot()?;
        }
        story.end();
        let text = story.teller.text().trim_end().to_owned();
        let microbits = story.teller.choices.microbits();
        Ok(Document { text, labels: story.teller.labels.into_iter().collect(), microbits })
    }

    pub(crate) fn choices(&mut self) -> &mut Choices {
        &mut self.teller.choices
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.teller.choices.chance(percent)
    }

    pub(crate) fn bind(&mut self, role: &'static str, to: impl Into<Bound>) {
        self.teller.standing.retain(|(name, _)| *name != role);
        self.teller.standing.push((role, to.into()));
    }

    /// Who or what a role is.
    ///
    /// # Panics
    /// When nothing is bound to it: a fault of a plot, which its test finds.
    pub(crate) fn id(&self, role: &str) -> Id {
        let found = self.teller.standing.iter().find(|(name, _)| *name == role);
        match found {
            Some((_, Bound::Of(id))) => *id,
            _ => panic!("no role {role}"),
        }
    }

    pub(crate) fn tell(&mut self, rule: &str) {
        self.teller.tell(rule, &[]);
    }

    /// Tells with people and things in other roles: `"AB BA"` puts B where the rule has A, and A where it has B.
    pub(crate) fn tell_as(&mut self, rule: &str, roles: &str) {
        let pairs: Vec<(&'static str, Bound)> = roles
            .split(' ')
            .filter_map(|pair| {
                const ROLES: [&str; 14] =
                    ["A", "B", "C", "G", "N", "O", "Q", "V", "T", "P", "R", "X", "Y", "Z"];
                let role = ROLES.into_iter().find(|role| pair.starts_with(role))?;
                Some((role, Bound::Of(self.id(pair.get(1..)?))))
            })
            .collect();
        self.teller.tell(rule, &pairs);
    }

    /// Tells something, or leaves it out.
    pub(crate) fn perhaps(&mut self, percent: u64, rule: &str) {
        if self.chance(percent) {
            self.tell(rule);
        }
    }

    /// Says something beside the plot, or nothing.
    pub(crate) fn aside(&mut self) {
        if self.chance(self.asides) {
            self.tell("scenery");
        }
    }

    /// What the main person feels or thinks, or nothing.
    pub(crate) fn mood(&mut self, rule: &str) {
        if self.chance(self.asides) {
            self.tell(rule);
        }
    }

    fn new_name(&mut self) -> (String, bool) {
        let is_she = self.chance(50);
        loop {
            let name = if self.teller.flags.contains("invented") && self.chance(60) {
                capitalised(self.choices().pick::<String>(invented()))
            } else {
                let names = if is_she { &lexicon().she } else { &lexicon().he };
                (*self.choices().pick(names)).to_owned()
            };
            if !self.names.contains(&name) {
                self.names.push(name.clone());
                return (name, is_she);
            }
        }
    }

    /// Somebody whom nobody knows is in role B from now on.
    pub(crate) fn stranger(&mut self) {
        let (name, is_she) = self.new_name();
        let stranger = self.teller.person(&name, is_she, None);
        self.bind("B", stranger);
    }

    fn people(&mut self, is_first: bool) {
        if self.chance(20) {
            self.teller.flags.insert("invented");
            self.teller.labels.insert("invented name".into());
        }
        let (name, is_she) = self.new_name();
        let main = self.teller.person(&name, is_she, None);
        self.bind("A", main);
        if is_first {
            self.teller.narrator = Some(main);
        }
        for role in ["B", "C"] {
            let (name, is_she) = self.new_name();
            let of_gender = if is_she { ["sister", "older sister"] } else { ["brother", "older brother"] };
            let relations = [
                "friend",
                "cousin",
                "neighbor",
                "classmate",
                "best friend",
                of_gender[0],
                of_gender[1],
                "",
                "",
            ];
            let relation = *self.choices().pick(&relations);
            let person = self.teller.person(&name, is_she, Some((main, relation)));
            self.bind(role, person);
        }
        let (name, is_she) = self.new_name();
        let relation = match (self.chance(40), is_she) {
            (false, _) => "",
            (true, true) => *self.choices().pick(&["aunt", "grandmother", "teacher"]),
            (true, false) => *self.choices().pick(&["uncle", "grandfather", "teacher"]),
        };
        let grown = self.teller.person(&name, is_she, Some((main, relation)));
        let profession = *self.choices().pick(&lexicon().professions);
        self.teller.set_profession(grown, profession);
        self.bind("G", grown);
    }

    /// A noun of a kind that the story does not have yet.
    fn noun(&mut self, nouns: &'static [Noun], kinds: &[&str]) -> &'static Noun {
        let fits = |noun: &&Noun| kinds.is_empty() || kinds.iter().any(|kind| noun.is(kind));
        let free: Vec<&Noun> =
            nouns.iter().filter(fits).filter(|noun| !self.nouns.contains(&noun.singular)).collect();
        // Every kind has more nouns than a story needs.
        let noun = *self.choices().pick(&free);
        self.nouns.push(noun.singular);
        noun
    }

    /// A thing of one of some kinds in a role; in some stories one that nobody has heard of.
    pub(crate) fn new_thing(&mut self, role: &'static str, kinds: &[&str]) -> Id {
        let noun = self.noun(&lexicon().objects, kinds);
        let is_strange = self.teller.flags.contains("invented") && kinds.contains(&"toy") && self.chance(40);
        let thing = if is_strange {
            self.teller.labels.insert("invented noun".into());
            let word = self.choices().pick(invented()).as_str();
            self.teller.thing(&Noun { singular: word, ..noun.clone() }, 1)
        } else {
            self.teller.thing(noun, 1)
        };
        self.bind(role, thing);
        thing
    }

    pub(crate) fn new_animal(&mut self, role: &'static str, kinds: &[&str]) -> Id {
        let noun = self.noun(&lexicon().animals, kinds);
        let animal = self.teller.thing(noun, 1);
        self.bind(role, animal);
        animal
    }

    pub(crate) fn new_place(&mut self, role: &'static str) -> Id {
        let noun = self.noun(&lexicon().places, &[]);
        let place = self.teller.place(noun);
        self.bind(role, place);
        if role == "P" {
            self.bind("R", place);
        }
        place
    }

    /// The main person's place is the one that is spoken of.
    pub(crate) fn arrive(&mut self) {
        let place = self.world.place_of(self.id("A")).unwrap_or_else(|| self.id("P"));
        self.teller.flags.remove("inside");
        if self.teller.noun(place).is_some_and(|noun| noun.is("inside")) {
            self.teller.flags.insert("inside");
        }
        self.bind("P", place);
        self.bind("R", place);
    }

    /// The main person goes to the place in role R, alone or with others.
    pub(crate) fn travel(&mut self, with: &[&str]) {
        let place = self.id("R");
        self.tell(if with.is_empty() { "go" } else { "go-both" });
        for role in ["A"].iter().chain(with) {
            self.world.go(self.id(role), place);
        }
        self.arrive();
        self.aside();
    }

    /// Everybody in these roles is where the main person is, and is met there if wanted.
    pub(crate) fn meet(&mut self, role: &str) {
        let here = self.id("P");
        let person = self.id(role);
        if self.world.place_of(person) == Some(here) {
            return;
        }
        self.world.go(person, here);
        let roles = format!("B{role}");
        let rule = if self.chance(30) { "visit" } else { "meet" };
        self.tell_as(rule, &roles);
        if self.chance(35) {
            self.tell_as("greet", &roles);
        }
    }

    /// Two are together without a word of how.
    pub(crate) fn join(&mut self, role: &str) {
        let here = self.id("P");
        self.world.go(self.id(role), here);
    }

    fn end(&mut self) {
        if self.chance(50) {
            self.teller.paragraph();
        }
        if self.chance(25) {
            self.tell("home");
        }
        self.mood("feeling-good");
        // Whoever was not there is not at the end.
        let teller = &self.teller;
        let is_known = |bound: &Bound| !matches!(bound, Bound::Of(id) if !teller.is_mentioned(*id));
        let known =
            teller.standing.iter().filter(|(role, bound)| *role == "A" || is_known(bound)).cloned().collect();
        self.teller.standing = known;
        let main = self.id("A");
        let thing =
            self.teller.standing.iter().find(|(role, _)| *role == "O").map(|(_, bound)| bound.clone());
        // What is eaten or withers is not kept.
        let lasts =
            |thing: Id| self.teller.noun(thing).is_some_and(|noun| !noun.is("food") && !noun.is("plant"));
        let keeps = matches!(thing, Some(Bound::Of(thing)) if lasts(thing) && self.world.has(main, thing) && self.world.owner_of(thing) == Some(main) && self.teller.is_mentioned(thing));
        let ending = match (keeps, self.choices().below(5)) {
            (true, 0 | 1) => "end-callback",
            (_, 2) => "end-lesson",
            _ => "end",
        };
        self.tell(ending);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_impossible_happens_in_three_thousand_stories() {
        for seed in 0..3000 {
            let story = Story::of(seed);
            assert!(story.is_ok(), "story {seed}: {}", story.unwrap_err());
        }
    }

    #[test]
    fn invented_words_are_no_words_of_the_lexicon() {
        let known: Vec<String> =
            lexicon().she.iter().chain(&lexicon().he).map(|name| name.to_lowercase()).collect();
        assert!(invented().iter().all(|word| !known.contains(word) && word.len() >= 4));
    }
}
