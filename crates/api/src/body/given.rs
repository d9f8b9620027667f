//! A value of a body, as it is written, with its path.

use std::fmt;
use std::ops::RangeInclusive;

use serde_json::Value;

use super::unknown::Unknown;
use super::walk::{Interruption, entries, items};
use crate::ApiError;

/// Most characters of a value, or of a name, that a message repeats.
const SHOWN_CHARS: usize = 40;

/// Where a value stands.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Path<'p> {
    /// The whole body, with what is noted while it is read.
    Body(&'p Unknown),
    /// An entry of an object.
    Key(&'p Self, &'p str),
    /// An item of a list.
    Item(&'p Self, usize),
}

impl<'p> Path<'p> {
    /// Where the body's unknown fields are noted.
    pub(super) fn unknown(self) -> &'p Unknown {
        match self {
            Self::Body(unknown) => unknown,
            Self::Key(outer, _) | Self::Item(outer, _) => outer.unknown(),
        }
    }
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Body(_) => f.write_str("the body"),
            Self::Key(Self::Body(_), name) => f.write_str(&beginning(name)),
            Self::Key(object, name) => write!(f, "{object}.{}", beginning(name)),
            Self::Item(list, index) => write!(f, "{list}[{index}]"),
        }
    }
}

/// A value that was given.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Given<'a, 'p> {
    json: &'a str,
    path: Path<'p>,
}

impl<'a, 'p> Given<'a, 'p> {
    /// The whole body.
    pub(super) fn body(json: &'a str, unknown: &'p Unknown) -> Self {
        Self { json, path: Path::Body(unknown) }
    }

    /// A value, which is JSON, at a place.
    pub(super) fn new(json: &'a str, path: Path<'p>) -> Self {
        Self { json, path }
    }

    pub(super) fn path(&self) -> Path<'p> {
        self.path
    }

    /// As it is written.
    pub(crate) fn json(&self) -> &'a str {
        self.json
    }

    /// What is wrong with it.
    pub(crate) fn wrong(&self, expected: impl fmt::Display) -> ApiError {
        self.wrong_as(expected, found(self.json))
    }

    /// The same, where what was found needs other words.
    pub(crate) fn wrong_as(&self, expected: impl fmt::Display, found: impl fmt::Display) -> ApiError {
        let error = ApiError::invalid(format!("{}: expected {expected}, found {found}", self.path));
        match self.path {
            Path::Body(_) => error,
            path => error.with_param(path.to_string()),
        }
    }

    /// That the field is not served.
    pub(crate) fn refused(&self, hint: &str) -> ApiError {
        let message = format!("{}: this server does not serve this field; {hint}", self.path);
        ApiError::invalid(message).with_param(self.path.to_string()).with_code("unsupported_parameter")
    }

    /// Whether it asks for nothing.
    pub(crate) fn is_nothing(&self) -> bool {
        let without_space = |json: &str| json.chars().filter(|c| !c.is_ascii_whitespace()).take(3).collect();
        let written: String = if self.json.len() > 16 { return false } else { without_space(self.json) };
        self.json == "null" || self.json == "false" || ["\"\"", "[]", "{}"].contains(&written.as_str())
    }

    /// Its path, in words.
    pub(crate) fn name(&self) -> String {
        self.path.to_string()
    }

    /// Whether this is the name that it was given by.
    pub(crate) fn is_named(&self, name: &str) -> bool {
        matches!(self.path, Path::Key(_, given_as) if given_as == name)
    }

    /// Whether it is a list, and not a single value.
    pub(crate) fn is_list(&self) -> bool {
        self.json.starts_with('[')
    }

    /// Whether it is a text.
    pub(crate) fn is_text(&self) -> bool {
        self.json.starts_with('"')
    }

    /// Whether it is an object.
    pub(crate) fn is_object(&self) -> bool {
        self.json.starts_with('{')
    }

    /// Whether its first item, if it is a list, begins with one of these.
    pub(crate) fn first_item_begins_with(&self, beginnings: &[char]) -> bool {
        let first = self.json.strip_prefix('[').map(str::trim_start);
        first.is_some_and(|first| first.starts_with(beginnings))
    }

    pub(crate) fn boolean(self) -> Result<bool, ApiError> {
        match self.json {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(self.wrong("true or false")),
        }
    }

    /// A whole number in a range.
    pub(crate) fn integer(self, range: RangeInclusive<i64>) -> Result<i64, ApiError> {
        let number = self.whole_number().and_then(|number| i64::try_from(number).ok());
        number.filter(|number| range.contains(number)).ok_or_else(|| self.wrong(whole_numbers(&range)))
    }

    /// A whole number in a range.
    pub(crate) fn count(self, range: RangeInclusive<usize>) -> Result<usize, ApiError> {
        let number = self.whole_number().and_then(|number| usize::try_from(number).ok());
        number.filter(|number| range.contains(number)).ok_or_else(|| self.wrong(whole_numbers(&range)))
    }

    /// The id of a token.
    pub(crate) fn token_id(self) -> Result<u32, ApiError> {
        let id = self.whole_number().and_then(|number| u32::try_from(number).ok());
        id.ok_or_else(|| self.wrong("a token id"))
    }

    /// A list of ids of tokens.
    pub(crate) fn token_ids(self, most: usize) -> Result<Vec<u32>, ApiError> {
        self.list("a list of token ids", most, |id| id.token_id())
    }

    /// `16.0` is 16, as some clients write whole numbers.
    fn whole_number(self) -> Option<i128> {
        /// Beyond it f64 has gaps.
        const MAX_EXACT: f64 = 9_007_199_254_740_992.0;
        if !self.is_number() {
            return None;
        }
        self.json.parse().ok().or_else(|| {
            let number: f64 = self.json.parse().ok()?;
            let is_whole = number.fract() == 0.0 && number.abs() <= MAX_EXACT;
            is_whole.then(|| format!("{number:.0}").parse().ok()).flatten()
        })
    }

    fn is_number(self) -> bool {
        self.json.starts_with(|c: char| c == '-' || c.is_ascii_digit())
    }

    /// A finite number for which `holds`.
    pub(crate) fn number(self, expected: &str, holds: impl FnOnce(f64) -> bool) -> Result<f64, ApiError> {
        let number = self.is_number().then(|| self.json.parse::<f64>().ok()).flatten();
        number.filter(|number| number.is_finite() && holds(*number)).ok_or_else(|| self.wrong(expected))
    }

    /// A text.
    pub(crate) fn text(self) -> Result<String, ApiError> {
        if !self.is_text() {
            return Err(self.wrong("a string"));
        }
        // All that can be wrong by now is a `\u` of half a character.
        serde_json::from_str(self.json)
            .map_err(|error| self.wrong_as("a string of Unicode characters", told(&error)))
    }

    /// A text of at most so many bytes, that is not empty.
    pub(crate) fn short_text(self, most: usize) -> Result<String, ApiError> {
        let text = self.text()?;
        let length = match text.len() {
            0 => "an empty one".to_owned(),
            length if length > most => format!("one of {length} bytes"),
            _ => return Ok(text),
        };
        Err(self.wrong_as(format!("a string of 1 to {most} bytes"), length))
    }

    /// A list of at most `most` items, each read by `read`.
    pub(crate) fn list<T>(
        self,
        expected: &str,
        most: usize,
        mut read: impl FnMut(Given<'a, '_>) -> Result<T, ApiError>,
    ) -> Result<Vec<T>, ApiError> {
        if !self.is_list() {
            return Err(self.wrong(expected));
        }
        let mut list = Vec::new();
        let walked = items(self.json, |item| {
            if list.len() == most {
                return Err(self.wrong_as(format!("at most {most} items"), "more"));
            }
            list.push(read(Given::new(item, Path::Item(&self.path, list.len())))?);
            Ok(())
        });
        self.told(walked).map(|()| list)
    }

    /// Gives each entry of an object to `take`.
    pub(crate) fn each_entry(
        self,
        expected: &str,
        mut take: impl FnMut(&str, Given<'a, '_>) -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        // A body may be anything, and is told what is wrong with it.
        if !self.is_object() && (!matches!(self.path, Path::Body(_)) || self.is_any_json()) {
            return Err(self.wrong(expected));
        }
        let walked =
            entries(self.json, |name, value| take(name, Given::new(value, Path::Key(&self.path, name))));
        self.told(walked)
    }

    /// What it is, as a tree, of at most so many bytes.
    pub(crate) fn tree(self, most: usize) -> Result<Value, ApiError> {
        if self.json.len() > most {
            let length = format!("one of {} bytes", self.json.len());
            return Err(self.wrong_as(format!("JSON of at most {most} bytes"), length));
        }
        serde_json::from_str(self.json).map_err(|error| self.wrong_as("JSON", told(&error)))
    }

    fn is_any_json(self) -> bool {
        serde_json::from_str::<serde::de::IgnoredAny>(self.json).is_ok()
    }

    fn told(self, walked: Result<(), Interruption>) -> Result<(), ApiError> {
        walked.map_err(|interruption| match interruption {
            Interruption::Said(error) => error,
            Interruption::Json(_) if self.json.is_empty() => self.wrong_as("a JSON object", "nothing"),
            Interruption::Json(error) => ApiError::invalid(format!("{} is not JSON: {error}", self.path)),
        })
    }
}

/// What serde says, without the place, which is one of the value and not of the body.
fn told(error: &serde_json::Error) -> String {
    let told = error.to_string();
    told.split(" at line ").next().unwrap_or_default().to_owned()
}

fn whole_numbers<T: fmt::Display + PartialEq + Bounds>(range: &RangeInclusive<T>) -> String {
    match (range.start(), range.end()) {
        (start, end) if *end == T::LARGEST && *start == T::SMALLEST => "a whole number".into(),
        (start, end) if *end == T::LARGEST => format!("a whole number of at least {start}"),
        (start, end) => format!("a whole number from {start} to {end}"),
    }
}

/// The ends of a type, which are no bounds that a reader knows.
trait Bounds {
    const SMALLEST: Self;
    const LARGEST: Self;
}

impl Bounds for i64 {
    const SMALLEST: Self = Self::MIN;
    const LARGEST: Self = Self::MAX;
}

impl Bounds for usize {
    const SMALLEST: Self = Self::MIN;
    const LARGEST: Self = Self::MAX;
}

/// A value as a message repeats it: as it is written where that is short, else what it is.
fn found(json: &str) -> String {
    if json.chars().count() <= SHOWN_CHARS && !json.is_empty() {
        return json.to_owned();
    }
    match json.chars().next() {
        Some('"') => "a long string".into(),
        Some('[') => "a list".into(),
        Some('{') => "an object".into(),
        None => "nothing".into(),
        Some(_) => beginning(json),
    }
}

fn beginning(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}
