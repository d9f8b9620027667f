//! JSON encoding of numbers, including infinities and NaN.
//!
//! JSON has no such numbers, so they become the strings `Infinity`, `-Infinity` and `NaN`. A perplexity
//! too large for f64 is then neither invalid JSON nor a `null` that looks like a missing value.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    Finite(f64),
    Other(NotFinite),
}

#[derive(Serialize, Deserialize)]
enum NotFinite {
    Infinity,
    #[serde(rename = "-Infinity")]
    MinusInfinity,
    NaN,
}

impl From<f64> for Written {
    fn from(number: f64) -> Self {
        match number {
            f64::INFINITY => Self::Other(NotFinite::Infinity),
            f64::NEG_INFINITY => Self::Other(NotFinite::MinusInfinity),
            number if number.is_nan() => Self::Other(NotFinite::NaN),
            number => Self::Finite(number),
        }
    }
}

impl From<Written> for f64 {
    fn from(written: Written) -> Self {
        match written {
            Written::Finite(number) => number,
            Written::Other(NotFinite::Infinity) => Self::INFINITY,
            Written::Other(NotFinite::MinusInfinity) => Self::NEG_INFINITY,
            Written::Other(NotFinite::NaN) => Self::NAN,
        }
    }
}

pub(crate) fn serialize<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    Written::from(*number).serialize(serializer)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Written::deserialize(deserializer).map(f64::from)
}

/// Encoding of optional numbers; a missing one is `null`.
pub(crate) mod optional {
    use super::{Serialize, Serializer, Written};

    pub(crate) fn serialize<S: Serializer>(number: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
        number.map(Written::from).serialize(serializer)
    }
}
