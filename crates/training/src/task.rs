//! Training tasks, and the format of their data.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use candle_gpt2_weights::UnknownName;
use serde::{Deserialize, Serialize};

/// Training task.
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
    /// Language modeling: predict every token from the tokens before it.
    #[default]
    Text,
    /// Classification: predict the label of a text. The data has rows with `text` and `label`.
    Classify,
    /// Answering: predict `completion` and the end token after `prompt`.
    Answer,
    /// Dictionary learning: represent a model's activations at a hook point as a sum of a few directions.
    ///
    /// The data is text or shards of activations.
    Dictionary,
}

impl Task {
    /// All tasks with their names.
    pub const NAMES: [(&'static str, Self); 4] = [
        ("text", Self::Text),
        ("classify", Self::Classify),
        ("answer", Self::Answer),
        ("dictionary", Self::Dictionary),
    ];

    /// Unit of the loss.
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

/// Loss weight for each label's rows.
///
/// ```
/// use candle_gpt2_training::ClassWeights;
///
/// assert_eq!("balanced".parse().ok(), Some(ClassWeights::Balanced));
/// let per_label = [("ham".to_owned(), 1.0), ("spam".to_owned(), 6.5)].into();
/// assert_eq!("ham=1,spam=6.5".parse().ok(), Some(ClassWeights::PerLabel(per_label)));
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "ClassWeightsJson", into = "ClassWeightsJson")]
pub enum ClassWeights {
    /// Equal total weight for every label: `rows / (labels · rows of the label)` per row.
    Balanced,
    /// Weights by label name; missing labels have weight 1.
    PerLabel(BTreeMap<String, f64>),
}

/// JSON format: `"balanced"`, or an object of numbers.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum ClassWeightsJson {
    Name(String),
    PerLabel(BTreeMap<String, f64>),
}

/// Description of valid class weights for error messages.
const EXPECTED: &str = "`balanced`, or a number greater than 0 for each label";
const BALANCED: &str = "balanced";

impl ClassWeights {
    fn per_label(weights: BTreeMap<String, f64>) -> Result<Self, UnknownName> {
        match weights.values().all(|weight| *weight > 0.0 && weight.is_finite()) {
            true => Ok(Self::PerLabel(weights)),
            false => Err(UnknownName { expected: EXPECTED.into() }),
        }
    }
}

impl TryFrom<ClassWeightsJson> for ClassWeights {
    type Error = UnknownName;

    fn try_from(written: ClassWeightsJson) -> Result<Self, UnknownName> {
        match written {
            ClassWeightsJson::Name(name) if name == BALANCED => Ok(Self::Balanced),
            ClassWeightsJson::Name(_) => Err(UnknownName { expected: EXPECTED.into() }),
            ClassWeightsJson::PerLabel(weights) => Self::per_label(weights),
        }
    }
}

impl From<ClassWeights> for ClassWeightsJson {
    fn from(weights: ClassWeights) -> Self {
        match weights {
            ClassWeights::Balanced => Self::Name(BALANCED.into()),
            ClassWeights::PerLabel(weights) => Self::PerLabel(weights),
        }
    }
}

/// Parses `balanced` or `ham=1,spam=6.5`.
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
        // A repeated label is a mistake.
        let weights = weights.filter(|weights| weights.len() == count);
        let expected = || UnknownName { expected: format!("{EXPECTED}, such as ham=1,spam=6.5") };
        weights.ok_or_else(expected).and_then(Self::per_label)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn class_weights_are_parsed_from_text_and_json() {
        let per_label = ClassWeights::PerLabel([("ham".to_owned(), 1.0), ("spam=x".to_owned(), 6.5)].into());
        assert_eq!("ham=1,spam=x=6.5".parse::<ClassWeights>().unwrap(), per_label);
        let json = serde_json::to_string(&per_label).unwrap();
        assert_eq!(json, r#"{"ham":1.0,"spam=x":6.5}"#);
        assert_eq!(serde_json::from_str::<ClassWeights>(&json).unwrap(), per_label);
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
