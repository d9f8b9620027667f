//! Types of field values; each defines the JSON that it accepts, for error messages and OpenAPI.

use std::fmt::{self, Display};
use std::marker::PhantomData;

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::messages::{INNER, located};

/// Value type with a schema in the OpenAPI description.
pub(crate) trait Described {
    /// Plural noun for the values, used in error messages.
    const PLURAL: &'static str = "values";

    /// JSON schema for the values.
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

/// Parses a value from its raw JSON text with `read`.
pub(crate) fn parse_raw<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    expected: impl Display,
    read: impl FnOnce(&'de str) -> Option<T>,
) -> Result<T, D::Error> {
    let json = <&RawValue>::deserialize(deserializer)?.get();
    read(json).ok_or_else(|| D::Error::custom(format_args!("expected {expected}")))
}

/// Parses a value whose type depends on its first character.
///
/// serde errors carry only a string, so an inner error stores its path in front of its message.
pub(crate) fn inner<'de, T: Deserialize<'de>, E: Error>(json: &'de RawValue) -> Result<T, E> {
    serde_path_to_error::deserialize(json).map_err(|error| {
        let (path, message) = located(error.path().iter(), error.inner(), String::new(), json.get());
        E::custom(format_args!("{INNER}{path}{INNER}{message}"))
    })
}

/// Parses a finite number.
pub(crate) fn number(json: &str) -> Option<f64> {
    let is_number = json.starts_with(|c: char| c == '-' || c.is_ascii_digit());
    is_number.then(|| json.parse().ok()).flatten().filter(|number: &f64| number.is_finite())
}

/// Parses an integer; accepts `16.0` as 16, because some clients write integers that way.
pub(crate) fn whole_number(json: &str) -> Option<i64> {
    /// Magnitude up to which f64 represents every integer exactly.
    const MAX_EXACT: f64 = 9_007_199_254_740_992.0;
    json.parse().ok().or_else(|| {
        let number = number(json)?;
        let is_whole = number.fract() == 0.0 && number.abs() <= MAX_EXACT;
        is_whole.then(|| format!("{number:.0}").parse().ok()).flatten()
    })
}

/// Signed 64-bit integer.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Integer(pub(crate) i64);

impl<'de> Deserialize<'de> for Integer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = format_args!("a whole number from {} to {}", i64::MIN, i64::MAX);
        parse_raw(deserializer, expected, whole_number).map(Self)
    }
}

impl Described for Integer {
    fn schema() -> Value {
        json!({ "type": "integer", "format": "int64" })
    }
}

/// 64-bit seed; a negative seed is equivalent to the seed plus 2^64.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Seed {
    /// Signed seed, as OpenAI's clients send it.
    Signed(i64),
    /// Seed above `i64::MAX`, which the command line accepts too.
    Unsigned(u64),
}

impl Seed {
    /// Returns the seed for the random number generator.
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
        parse_raw(deserializer, expected, |json| {
            whole_number(json).map(Self::Signed).or_else(|| json.parse().ok().map(Self::Unsigned))
        })
    }
}

impl Described for Seed {
    fn schema() -> Value {
        json!({ "type": "integer" })
    }
}

/// Integer from `MIN` to `MAX`.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Count<const MIN: usize, const MAX: usize>(pub(crate) usize);

impl<'de, const MIN: usize, const MAX: usize> Deserialize<'de> for Count<MIN, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let count = |json| usize::try_from(whole_number(json)?).ok();
        let expected = format_args!("a whole number from {MIN} to {MAX}");
        parse_raw(deserializer, expected, |json| count(json).filter(|count| (MIN..=MAX).contains(count)))
            .map(Self)
    }
}

impl<const MIN: usize, const MAX: usize> Described for Count<MIN, MAX> {
    fn schema() -> Value {
        json!({ "type": "integer", "minimum": MIN, "maximum": MAX })
    }
}

/// String of 1 to `MAX` bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Text<const MAX: usize>(pub(crate) String);

impl<'de, const MAX: usize> Deserialize<'de> for Text<MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let length = match text.len() {
            0 => "an empty string".to_owned(),
            length if length > MAX => format!("{length} bytes"),
            _ => return Ok(Self(text)),
        };
        Err(D::Error::custom(format_args!("expected a string of 1 to {MAX} bytes, found {length}")))
    }
}

impl<const MAX: usize> Described for Text<MAX> {
    const PLURAL: &'static str = "strings";

    fn schema() -> Value {
        json!({ "type": "string", "minLength": 1, "maxLength": MAX })
    }
}

/// List of at most `MAX` items.
#[derive(Debug, Clone)]
pub(crate) struct List<T, const MAX: usize>(pub(crate) Vec<T>);

impl<T, const MAX: usize> Default for List<T, MAX> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Described, const MAX: usize> Described for List<T, MAX> {
    fn schema() -> Value {
        json!({ "type": "array", "maxItems": MAX, "items": T::schema() })
    }
}

struct ListVisitor<T, const MAX: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de> + Described, const MAX: usize> Deserialize<'de> for List<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ListVisitor::<T, MAX>(PhantomData))
    }
}

impl<'de, T: Deserialize<'de> + Described, const MAX: usize> Visitor<'de> for ListVisitor<T, MAX> {
    type Value = List<T, MAX>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of {}", T::PLURAL)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<List<T, MAX>, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            if items.len() == MAX {
                return Err(A::Error::custom(format_args!("expected at most {MAX} items, found more")));
            }
            items.push(item);
        }
        Ok(List(items))
    }
}

/// String parsed as `S`, or a list of at most `MAX` items.
#[derive(Debug, Clone)]
pub(crate) enum TextOrList<S, T, const MAX: usize> {
    Text(S),
    List(Vec<T>),
}

impl<S: Described, T: Described, const MAX: usize> Described for TextOrList<S, T, MAX> {
    fn schema() -> Value {
        json!({ "oneOf": [S::schema(), List::<T, MAX>::schema()] })
    }
}

impl<'de, S, T, const MAX: usize> Deserialize<'de> for TextOrList<S, T, MAX>
where
    S: Deserialize<'de>,
    T: Deserialize<'de> + Described,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let json = <&RawValue>::deserialize(deserializer)?;
        match json.get().chars().next() {
            Some('"') => inner(json).map(Self::Text),
            Some('[') => inner(json).map(|List::<T, MAX>(items)| Self::List(items)),
            _ => Err(D::Error::custom(format_args!("expected a string or a list of {}", T::PLURAL))),
        }
    }
}

/// List of at most `MAX` token ids.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenIds<const MAX: usize>(pub(crate) Vec<u32>);

impl<'de, const MAX: usize> Deserialize<'de> for TokenIds<MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let List(ids) = List::<TokenId, MAX>::deserialize(deserializer)?;
        Ok(Self(ids.into_iter().map(|TokenId(id)| id).collect()))
    }
}

impl<const MAX: usize> Described for TokenIds<MAX> {
    fn schema() -> Value {
        List::<TokenId, MAX>::schema()
    }
}

/// Token id.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TokenId(pub(crate) u32);

impl<'de> Deserialize<'de> for TokenId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parse_raw(deserializer, "a token id", |json| u32::try_from(whole_number(json)?).ok()).map(Self)
    }
}

impl Described for TokenId {
    const PLURAL: &'static str = "token ids";

    fn schema() -> Value {
        json!({ "type": "integer", "minimum": 0 })
    }
}

/// Declares an enum whose JSON values are strings.
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
                $crate::body::parse_raw(deserializer, expected, |json| {
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

/// Formats the accepted strings for a message.
pub(crate) fn one_of(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    match quoted.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => quoted.concat(),
    }
}
