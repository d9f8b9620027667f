//! The tasks of a training, and the format of their data.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use candle_gpt2_weights::UnknownName;
use serde::{Deserialize, Serialize};

/// The task of a training.
///
/// ```
/// use candle_gpt2_training::Task;
///
/// assert_eq!("classify".parse().ok(), Some(Task::Classify));
/// assert_eq!(Task::default(), Task::Text);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Task {
    /// To continue texts: every token from those before it.
    #[default]
    Text,
    /// To predict the label of a text: rows with `text` and `label`.
    Classify,
    /// To answer: the tokens of `completion`, and the end, after those of `prompt`.
    Answer,
    /// To write a model's activations at a hook point as a sum of few directions: texts, or shards of activations.
    Dictionary,
}

impl Task {
    /// Every task by its name.
    pub const NAMES: [(&'static str, Self); 4] = [
        ("text", Self::Text),
        ("classify", Self::Classify),
        ("answer", Self::Answer),
        ("dictionary", Self::Dictionary),
    ];

    /// The unit of the loss.
    pub fn loss_unit(self) -> &'static str {
        match self {
            Self::Text | Self::Answer => "nats per token",
            Self::Classify => "nats per row",
            Self::Dictionary => "of the variance not explained",
        }
    }
}

impl FromStr for Task {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        UnknownName::find(&Self::NAMES, name)
    }
}

impl fmt::Display for Task {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        let named = Self::NAMES.iter().find(|(_, task)| task == self);
        formatter.write_str(named.map_or("", |(name, _)| name))
    }
}

/// The weight of each label's rows in the loss.
///
/// ```
/// use candle_gpt2_training::ClassWeights;
///
/// assert_eq!("balanced".parse().ok(), Some(ClassWeights::Balanced));
/// let given = [("ham".to_owned(), 1.0), ("spam".to_owned(), 6.5)].into();
/// assert_eq!("ham=1,spam=6.5".parse().ok(), Some(ClassWeights::Given(given)));
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub enum ClassWeights {
    /// The rows of every label as much together as those of any other: `rows / (labels · rows of the label)`.
    Balanced,
    /// These, by the names of the labels; a label that is not here counts once.
    Given(BTreeMap<String, f64>),
}

/// The same as JSON: `"balanced"`, or an object of numbers.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    Name(String),
    Given(BTreeMap<String, f64>),
}

/// What is expected if class weights are wrong.
const EXPECTED: &str = "`balanced`, or a number greater than 0 for each label";
const BALANCED: &str = "balanced";

impl ClassWeights {
    fn given(weights: BTreeMap<String, f64>) -> Result<Self, UnknownName> {
        match weights.values().all(|weight| *weight > 0.0 && weight.is_finite()) {
            true => Ok(Self::Given(weights)),
            false => Err(UnknownName { expected: EXPECTED.into() }),
        }
    }
}

impl TryFrom<Written> for ClassWeights {
    type Error = UnknownName;

    fn try_from(written: Written) -> Result<Self, UnknownName> {
        match written {
            Written::Name(name) if name == BALANCED => Ok(Self::Balanced),
            Written::Name(_) => Err(UnknownName { expected: EXPECTED.into() }),
            Written::Given(weights) => Self::given(weights),
        }
    }
}

impl From<ClassWeights> for Written {
    fn from(weights: ClassWeights) -> Self {
        match weights {
            ClassWeights::Balanced => Self::Name(BALANCED.into()),
            ClassWeights::Given(weights) => Self::Given(weights),
        }
    }
}

/// `balanced`, or `ham=1,spam=6.5`.
impl FromStr for ClassWeights {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        if text == BALANCED {
            return Ok(Self::Balanced);
        }
        let pair = |pair: &str| {
            let (name, weight) = pair.rsplit_once('=')?;
            Some((name.to_owned(), weight.parse().ok()?))
        };
        let pairs: Option<Vec<(String, f64)>> = text.split(',').map(pair).collect();
        let count = pairs.as_ref().map_or(0, Vec::len);
        let weights: Option<BTreeMap<String, f64>> = pairs.map(|pairs| pairs.into_iter().collect());
        // A label that is named twice is a slip.
        let weights = weights.filter(|weights| weights.len() == count);
        let expected = || UnknownName { expected: format!("{EXPECTED}, as ham=1,spam=6.5") };
        weights.ok_or_else(expected).and_then(Self::given)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn class_weights_are_read_from_words_and_from_json() {
        let given = ClassWeights::Given([("ham".to_owned(), 1.0), ("spam=x".to_owned(), 6.5)].into());
        assert_eq!("ham=1,spam=x=6.5".parse::<ClassWeights>().unwrap(), given);
        let json = serde_json::to_string(&given).unwrap();
        assert_eq!(json, r#"{"ham":1.0,"spam=x":6.5}"#);
        assert_eq!(serde_json::from_str::<ClassWeights>(&json).unwrap(), given);
        assert_eq!(serde_json::to_string(&ClassWeights::Balanced).unwrap(), "\"balanced\"");
        assert_eq!(serde_json::from_str::<ClassWeights>("\"balanced\"").unwrap(), ClassWeights::Balanced);
        for wrong in ["", "ham", "ham=0", "ham=-1", "ham=x", "ham=inf", "ham=1,"] {
            assert!(wrong.parse::<ClassWeights>().is_err(), "{wrong}");
        }
        for wrong in ["\"even\"", r#"{"ham": 0}"#, "3"] {
            assert!(serde_json::from_str::<ClassWeights>(wrong).is_err(), "{wrong}");
        }
    }
}
