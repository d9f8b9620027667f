//! Grammar of sentences: rules with variants, read from files in the folder `english`.
//!
//! A rule is a line `name:` followed by its variants in indented lines. `name*:` is a habit of each document.
//! A variant consists of text and these signs:
//!
//! | sign | meaning |
//! |---|---|
//! | `{A}`, `{A.o}`, `{O.to}` | value bound to a role, in a form; see [`Teller`](crate::teller::Teller) |
//! | `~give`, `~>give` | past tense (present tense in quotations), agreeing with the subject, or plural |
//! | `%give`, `+give` | participle; -ing form |
//! | `~[give|show]` | one of several verbs |
//! | `[one|two|]` | one of several alternatives |
//! | `<name>` | a variant of another rule |
//! | `^` | the next letter is a capital |
//! | `?sun`, `?!snow` | at the beginning of a variant: only for documents with (without) this flag |

use std::collections::HashMap;
use std::sync::LazyLock;

/// A piece of a variant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece {
    Text(&'static str),
    /// A verb's base form and the required form.
    Verb(&'static str, VerbForm),
    /// A role and a form.
    Slot(&'static str, &'static str),
    /// One of several alternatives.
    Choice(Vec<Vec<Self>>),
    Rule(usize),
    Capital,
    /// One of several interchangeable words: index of the habit, and the pieces of each word.
    Same(usize, Vec<Vec<Self>>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VerbForm {
    Finite,
    /// Finite form for a plural subject, regardless of earlier mentions.
    Plural,
    Participle,
    Ing,
}

/// Variant of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Variant {
    /// Tested flags: true if the flag must be set, false if it must be unset.
    pub(crate) conditions: Vec<(&'static str, bool)>,
    pub(crate) pieces: Vec<Piece>,
    /// Roles in the variant itself; all of them must be bound.
    pub(crate) roles: Vec<&'static str>,
}

/// Collects the roles that occur in pieces.
fn collect_roles(pieces: &[Piece], roles: &mut Vec<&'static str>) {
    for piece in pieces {
        match piece {
            Piece::Slot(name, _) => roles.push(name),
            Piece::Choice(alternatives) | Piece::Same(_, alternatives) => {
                alternatives.iter().for_each(|pieces| collect_roles(pieces, roles))
            }
            _ => {}
        }
    }
}

#[derive(Debug)]
pub(crate) struct Rule {
    pub(crate) name: &'static str,
    pub(crate) is_habit: bool,
    pub(crate) variants: Vec<Variant>,
}

/// All rules of the grammar.
#[derive(Debug)]
pub(crate) struct Grammar {
    pub(crate) rules: Vec<Rule>,
    pub(crate) by_name: HashMap<&'static str, usize>,
}

/// Groups of interchangeable words.
fn same() -> &'static [Vec<&'static str>] {
    static SAME: LazyLock<Vec<Vec<&'static str>>> = LazyLock::new(|| {
        let lines = include_str!("../english/same.txt").lines().filter(|line| !line.starts_with('#'));
        lines.map(|line| line.split('|').collect()).collect()
    });
    &SAME
}

/// Returns the grammar, parsed on first use.
pub(crate) fn grammar() -> &'static Grammar {
    static GRAMMAR: LazyLock<Grammar> =
        LazyLock::new(|| Grammar::parse(include_str!("../english/exercises.txt"), same()));
    &GRAMMAR
}

/// Parses a form that is not part of a rule.
#[cfg(test)]
pub(crate) fn parse_form(form: &'static str) -> Vec<Piece> {
    let mut reader = Reader { rest: form, by_name: &grammar().by_name, same: same() };
    reader.pieces()
}

impl Grammar {
    fn parse(text: &'static str, same: &[Vec<&'static str>]) -> Self {
        let lines: Vec<&'static str> =
            text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#')).collect();
        let headers = lines.iter().filter(|line| !line.starts_with(' '));
        let names = headers.map(|line| line.trim().trim_end_matches(':').trim_end_matches('*'));
        let by_name: HashMap<_, _> = names.enumerate().map(|(place, name)| (name, place)).collect();
        let mut rules: Vec<Rule> = Vec::new();
        for line in lines {
            if line.starts_with(' ') {
                let mut text = line.trim();
                let mut conditions = Vec::new();
                while let Some((condition, rest)) =
                    text.strip_prefix('?').and_then(|rest| rest.split_once(' '))
                {
                    conditions.push((condition.trim_start_matches('!'), !condition.starts_with('!')));
                    text = rest.trim_start();
                }
                let mut reader = Reader { rest: text, by_name: &by_name, same };
                let pieces = reader.pieces();
                assert!(reader.rest.is_empty(), "unmatched closing bracket: {line}");
                if let Some(rule) = rules.last_mut() {
                    let mut roles = Vec::new();
                    collect_roles(&pieces, &mut roles);
                    rule.variants.push(Variant { conditions, pieces, roles });
                }
            } else {
                let name = line.trim().trim_end_matches(':');
                rules.push(Rule {
                    name: name.trim_end_matches('*'),
                    is_habit: name.ends_with('*'),
                    variants: Vec::new(),
                });
            }
        }
        Self { rules, by_name }
    }

    /// Returns the index of a rule.
    ///
    /// # Panics
    /// If the rule is missing. Tests cover every name in the program.
    pub(crate) fn rule(&self, name: &str) -> usize {
        *self.by_name.get(name).unwrap_or_else(|| panic!("unknown rule `{name}`"))
    }
}

/// Parser for a variant.
struct Reader<'a> {
    rest: &'static str,
    by_name: &'a HashMap<&'static str, usize>,
    /// Groups of interchangeable words.
    same: &'a [Vec<&'static str>],
}

impl Reader<'_> {
    /// Parses pieces up to the end, or up to a sign that ends an alternative.
    fn pieces(&mut self) -> Vec<Piece> {
        const SIGNS: [char; 9] = ['{', '[', '<', '~', '%', '+', '^', '|', ']'];
        let mut pieces = Vec::new();
        loop {
            if let Some(same) = self.same_verb() {
                pieces.push(same);
            }
            let text = self.until(|letter| SIGNS.contains(&letter));
            self.plain(text, &mut pieces);
            let Some(sign) = self.rest.chars().next().filter(|sign| !matches!(sign, '|' | ']')) else {
                return pieces;
            };
            self.rest = &self.rest[1..];
            pieces.push(match sign {
                '{' => {
                    let slot = self.enclosed('}');
                    let (role, form) = slot.split_once('.').unwrap_or((slot, ""));
                    Piece::Slot(role, form)
                }
                '<' => {
                    let name = self.enclosed('>');
                    Piece::Rule(*self.by_name.get(name).unwrap_or_else(|| panic!("unknown rule `{name}`")))
                }
                '[' => {
                    let mut alternatives = vec![self.pieces()];
                    while self.rest.starts_with('|') {
                        self.rest = &self.rest[1..];
                        alternatives.push(self.pieces());
                    }
                    assert!(self.rest.starts_with(']'), "unclosed `[` before: {}", self.rest);
                    self.rest = &self.rest[1..];
                    Piece::Choice(alternatives)
                }
                '^' => Piece::Capital,
                _ => {
                    let form = match sign {
                        '~' => VerbForm::Finite,
                        '%' => VerbForm::Participle,
                        _ => VerbForm::Ing,
                    };
                    self.verb(form)
                }
            });
        }
    }

    /// Parses plain text; some words are interchangeable with others.
    fn plain(&self, mut text: &'static str, pieces: &mut Vec<Piece>) {
        let is_edge = |letter: Option<char>| letter.is_none_or(|letter| !letter.is_alphanumeric());
        let found = |text: &str, word: &str| {
            text.match_indices(word).map(|(place, _)| place).find(|place| {
                (word.starts_with('.') || is_edge(text[..*place].chars().next_back()))
                    && is_edge(text[place + word.len()..].chars().next())
            })
        };
        while !text.is_empty() {
            let lower = text.to_lowercase();
            let first = self
                .same
                .iter()
                .enumerate()
                .filter(|(_, words)| !words[0].starts_with('~'))
                .filter_map(|(number, words)| Some((found(&lower, words[0])?, words[0].len(), number)))
                .min_by_key(|(place, length, _)| (*place, std::cmp::Reverse(*length)));
            let Some((place, length, number)) = first else {
                pieces.push(Piece::Text(text));
                return;
            };
            if place > 0 {
                pieces.push(Piece::Text(&text[..place]));
            }
            if text[place..].starts_with(char::is_uppercase) {
                pieces.push(Piece::Capital);
            }
            let alternatives = self.same[number].iter().map(|word| vec![Piece::Text(word)]).collect();
            pieces.push(Piece::Same(number, alternatives));
            text = &text[place + length..];
        }
    }

    /// Parses a verb that is interchangeable with others.
    fn same_verb(&mut self) -> Option<Piece> {
        if !self.rest.starts_with('~') {
            return None;
        }
        let is_one = |words: &&Vec<&'static str>| {
            let rest = self.rest.strip_prefix(words[0]);
            rest.is_some_and(|rest| {
                words[0].ends_with(['{', '<', 'N', 'O'])
                    || !rest.starts_with(|letter: char| letter.is_ascii_alphabetic())
            })
        };
        let (number, words) = self.same.iter().enumerate().find(|(_, words)| is_one(words))?;
        // Text after the verb, such as "{O", only limits where the verb is interchangeable.
        let own = |word: &'static str| word.split(['{', '<']).next().unwrap_or_default().trim_end();
        self.rest = &self.rest[own(words[0]).len()..];
        let alternatives = words.iter().map(|word| {
            let mut words = own(word)[1..].splitn(2, ' ');
            let mut pieces = vec![Piece::Verb(words.next().unwrap_or_default(), VerbForm::Finite)];
            pieces.extend(words.next().map(|rest| Piece::Text(format!(" {rest}").leak())));
            pieces
        });
        Some(Piece::Same(number, alternatives.collect()))
    }

    fn verb(&mut self, form: VerbForm) -> Piece {
        if let Some(rest) = self.rest.strip_prefix('>') {
            self.rest = rest;
            return self.verb(VerbForm::Plural);
        }
        if !self.rest.starts_with('[') {
            return Piece::Verb(self.until(|letter| !letter.is_ascii_alphabetic()), form);
        }
        let mut alternatives = Vec::new();
        while !self.rest.starts_with(']') {
            self.rest = &self.rest[1..]; // `[` or `|`
            let mut alternative = vec![self.verb(form)];
            alternative.extend(self.pieces());
            alternatives.push(alternative);
        }
        self.rest = &self.rest[1..];
        Piece::Choice(alternatives)
    }

    fn until(&mut self, is_end: impl Fn(char) -> bool) -> &'static str {
        let end = self.rest.find(is_end).unwrap_or(self.rest.len());
        let (text, rest) = self.rest.split_at(end);
        self.rest = rest;
        text
    }

    fn enclosed(&mut self, end: char) -> &'static str {
        let text = self.until(|letter| letter == end);
        self.rest = self.rest.get(1..).unwrap_or_default();
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_syntax_element_of_a_rule_is_parsed() {
        let grammar = Grammar::parse(
            "# words\nmanner*:\n  slowly\n\ngive:\n  ?sun {A} ~give {B.o} [a|the] {O}<manner>.\n  \"^{B.o}\"\n",
            &[],
        );
        assert_eq!(grammar.rules.len(), 2);
        assert!(grammar.rules[0].is_habit && !grammar.rules[1].is_habit);
        let text = Piece::Text;
        let first = &grammar.rules[1].variants[0];
        assert_eq!(first.conditions, [("sun", true)]);
        assert_eq!(
            first.pieces,
            [
                Piece::Slot("A", ""),
                text(" "),
                Piece::Verb("give", VerbForm::Finite),
                text(" "),
                Piece::Slot("B", "o"),
                text(" "),
                Piece::Choice(vec![vec![text("a")], vec![text("the")]]),
                text(" "),
                Piece::Slot("O", ""),
                Piece::Rule(0),
                text("."),
            ]
        );
        let second = &grammar.rules[1].variants[1].pieces;
        assert_eq!(second[1..3], [Piece::Capital, Piece::Slot("B", "o")]);
    }
}
