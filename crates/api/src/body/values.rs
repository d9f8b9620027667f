//! Values of fields: types that say which JSON they take, to messages and to the OpenAPI description.

use std::fmt::{self, Display};
use std::marker::PhantomData;

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::told::{INNER, located};

/// A type of values that the OpenAPI description describes.
pub(crate) trait Described {
    /// Several of them, in messages.
    const PLURAL: &'static str = "values";

    /// A JSON schema of them.
    fn schema() -> Value;
}

impl<T: Described> Described for Option<T> {
    fn schema() -> Value {
        T::schema()
    }
}

impl Described for bool {
    fn schema() -> Value {
        json!({ "type": "boolean" })
    }
}

impl Described for String {
    const PLURAL: &'static str = "strings";

    fn schema() -> Value {
        json!({ "type": "string" })
    }
}

/// What `read` makes of a value as it is written.
pub(crate) fn written<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    expected: impl Display,
    read: impl FnOnce(&'de str) -> Option<T>,
) -> Result<T, D::Error> {
    let json = <&RawValue>::deserialize(deserializer)?.get();
    read(json).ok_or_else(|| D::Error::custom(format_args!("expected {expected}")))
}

/// A value whose type depends on how it is written. What is wrong inside it keeps its path, in front of the message: an error of serde
/// is a text.
pub(crate) fn inner<'de, T: Deserialize<'de>, E: Error>(json: &'de RawValue) -> Result<T, E> {
    serde_path_to_error::deserialize(json).map_err(|error| {
        let (path, message) = located(error.path().iter(), error.inner(), String::new(), json.get());
        E::custom(format_args!("{INNER}{path}{INNER}{message}"))
    })
}

/// A number, if it is finite.
pub(crate) fn number(json: &str) -> Option<f64> {
    let is_number = json.starts_with(|c: char| c == '-' || c.is_ascii_digit());
    is_number.then(|| json.parse().ok()).flatten().filter(|number: &f64| number.is_finite())
}

/// A whole number; `16.0` is 16, as some clients write them.
pub(crate) fn whole_number(json: &str) -> Option<i64> {
    /// Beyond it f64 has gaps.
    const MAX_EXACT: f64 = 9_007_199_254_740_992.0;
    json.parse().ok().or_else(|| {
        let number = number(json)?;
        let is_whole = number.fract() == 0.0 && number.abs() <= MAX_EXACT;
        is_whole.then(|| format!("{number:.0}").parse().ok()).flatten()
    })
}

/// A whole number of 64 bits with a sign.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Integer(pub(crate) i64);

impl<'de> Deserialize<'de> for Integer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = format_args!("a whole number from {} to {}", i64::MIN, i64::MAX);
        written(deserializer, expected, whole_number).map(Self)
    }
}

impl Described for Integer {
    fn schema() -> Value {
        json!({ "type": "integer", "format": "int64" })
    }
}

/// A seed of 64 bits. A negative one is the same as that number plus 2^64.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Seed {
    /// A seed as OpenAI's clients write it.
    Signed(i64),
    /// A seed beyond `i64`, as the command line takes it.
    Unsigned(u64),
}

impl Seed {
    /// The seed of the random numbers.
    pub(crate) fn bits(self) -> u64 {
        match self {
            Self::Signed(seed) => seed.cast_unsigned(),
            Self::Unsigned(seed) => seed,
        }
    }
}

impl Serialize for Seed {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Signed(seed) => serializer.serialize_i64(*seed),
            Self::Unsigned(seed) => serializer.serialize_u64(*seed),
        }
    }
}

impl<'de> Deserialize<'de> for Seed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = format_args!("a whole number from {} to {}", i64::MIN, u64::MAX);
        written(deserializer, expected, |json| {
            whole_number(json).map(Self::Signed).or_else(|| json.parse().ok().map(Self::Unsigned))
        })
    }
}

impl Described for Seed {
    fn schema() -> Value {
        json!({ "type": "integer" })
    }
}

/// A whole number from `LEAST` to `MOST`.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Count<const LEAST: usize, const MOST: usize>(pub(crate) usize);

impl<'de, const LEAST: usize, const MOST: usize> Deserialize<'de> for Count<LEAST, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let count = |json| usize::try_from(whole_number(json)?).ok();
        let expected = format_args!("a whole number from {LEAST} to {MOST}");
        written(deserializer, expected, |json| count(json).filter(|count| (LEAST..=MOST).contains(count)))
            .map(Self)
    }
}

impl<const LEAST: usize, const MOST: usize> Described for Count<LEAST, MOST> {
    fn schema() -> Value {
        json!({ "type": "integer", "minimum": LEAST, "maximum": MOST })
    }
}

/// A string of 1 to `MOST` bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Text<const MOST: usize>(pub(crate) String);

impl<'de, const MOST: usize> Deserialize<'de> for Text<MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let length = match text.len() {
            0 => "an empty one".to_owned(),
            length if length > MOST => format!("one of {length} bytes"),
            _ => return Ok(Self(text)),
        };
        Err(D::Error::custom(format_args!("expected a string of 1 to {MOST} bytes, found {length}")))
    }
}

impl<const MOST: usize> Described for Text<MOST> {
    const PLURAL: &'static str = "strings";

    fn schema() -> Value {
        json!({ "type": "string", "minLength": 1, "maxLength": MOST })
    }
}

/// A list of at most `MOST` items.
#[derive(Debug, Clone)]
pub(crate) struct List<T, const MOST: usize>(pub(crate) Vec<T>);

impl<T, const MOST: usize> Default for List<T, MOST> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Described, const MOST: usize> Described for List<T, MOST> {
    fn schema() -> Value {
        json!({ "type": "array", "maxItems": MOST, "items": T::schema() })
    }
}

struct ListVisitor<T, const MOST: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de> + Described, const MOST: usize> Deserialize<'de> for List<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ListVisitor::<T, MOST>(PhantomData))
    }
}

impl<'de, T: Deserialize<'de> + Described, const MOST: usize> Visitor<'de> for ListVisitor<T, MOST> {
    type Value = List<T, MOST>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of {}", T::PLURAL)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<List<T, MOST>, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            if items.len() == MOST {
                return Err(A::Error::custom(format_args!("expected at most {MOST} items, found more")));
            }
            items.push(item);
        }
        Ok(List(items))
    }
}

/// A string that `S` reads, or a list of at most `MOST` items.
#[derive(Debug, Clone)]
pub(crate) enum TextOrList<S, T, const MOST: usize> {
    Text(S),
    List(Vec<T>),
}

impl<S: Described, T: Described, const MOST: usize> Described for TextOrList<S, T, MOST> {
    fn schema() -> Value {
        json!({ "oneOf": [S::schema(), List::<T, MOST>::schema()] })
    }
}

impl<'de, S, T, const MOST: usize> Deserialize<'de> for TextOrList<S, T, MOST>
where
    S: Deserialize<'de>,
    T: Deserialize<'de> + Described,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let json = <&RawValue>::deserialize(deserializer)?;
        match json.get().chars().next() {
            Some('"') => inner(json).map(Self::Text),
            Some('[') => inner(json).map(|List::<T, MOST>(items)| Self::List(items)),
            _ => Err(D::Error::custom(format_args!("expected a string or a list of {}", T::PLURAL))),
        }
    }
}

/// A list of at most `MOST` ids of tokens.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenIds<const MOST: usize>(pub(crate) Vec<u32>);

impl<'de, const MOST: usize> Deserialize<'de> for TokenIds<MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let List(ids) = List::<TokenId, MOST>::deserialize(deserializer)?;
        Ok(Self(ids.into_iter().map(|TokenId(id)| id).collect()))
    }
}

impl<const MOST: usize> Described for TokenIds<MOST> {
    fn schema() -> Value {
        List::<TokenId, MOST>::schema()
    }
}

/// The id of a token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TokenId(pub(crate) u32);

impl<'de> Deserialize<'de> for TokenId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        written(deserializer, "a token id", |json| u32::try_from(whole_number(json)?).ok()).map(Self)
    }
}

impl Described for TokenId {
    const PLURAL: &'static str = "token ids";

    fn schema() -> Value {
        json!({ "type": "integer", "minimum": 0 })
    }
}

/// Declares an enum whose values are words.
macro_rules! words {
    ($(#[doc = $about:literal])+ $name:ident { $($word:literal => $variant:ident),+ $(,)? }) => {
        $(#[doc = $about])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
        pub(crate) enum $name {
            $( #[serde(rename = $word)] $variant, )+
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let expected = $crate::body::one_of(&[$($word),+]);
                $crate::body::written(deserializer, expected, |json| {
                    match serde_json::from_str::<String>(json).ok()?.as_str() {
                        $( $word => Some(Self::$variant), )+
                        _ => None,
                    }
                })
            }
        }

        impl $crate::body::Described for $name {
            fn schema() -> serde_json::Value {
                serde_json::json!({ "enum": [$($word),+] })
            }
        }
    };
}
pub(crate) use words;

/// Words of which a value is one.
pub(crate) fn one_of(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    match quoted.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => quoted.concat(),
    }
}
