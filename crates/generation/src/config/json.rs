//! The options as JSON: what a `generation_config.json` says.
//!
//! Source: `src/transformers/generation/configuration_utils.py`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::{EarlyStopping, GenerationConfig};
use crate::GenerationError;

/// Keys of `generation_config.json` that would change the text and that are not served; with the value, beside null
/// and false, that changes nothing.
const REFUSED_KEYS: [(&str, Option<f64>); 14] = [
    ("guidance_scale", Some(1.0)),
    ("encoder_repetition_penalty", Some(1.0)),
    ("encoder_no_repeat_ngram_size", Some(0.0)),
    ("min_length", Some(0.0)),
    ("top_h", None),
    ("exponential_decay_length_penalty", None),
    ("forced_eos_token_id", None),
    ("force_words_ids", None),
    ("constraints", None),
    ("watermarking_config", None),
    ("token_healing", None),
    ("dola_layers", None),
    ("assistant_early_exit", None),
    ("custom_generate", None),
];

impl GenerationConfig {
    /// The same configuration with what a `generation_config.json` sets. Keys that do not change the text are not
    /// looked at.
    ///
    /// # Errors
    /// When it is no valid JSON, a value has another type, or something is asked for that is not served.
    pub fn with_json(mut self, json: &str) -> Result<Self, GenerationError> {
        let refuse = |what: String| GenerationError::Json { what };
        let mut keys: Map<String, Value> =
            serde_json::from_str(json).map_err(|error| refuse(format!("not a JSON object: {error}")))?;
        // A key that is null is not set.
        keys.retain(|_, value| !value.is_null());
        for (key, neutral) in REFUSED_KEYS {
            let value = keys.get(key).unwrap_or(&Value::Null);
            let changes_nothing = matches!(value, Value::Null | Value::Bool(false));
            if !changes_nothing && (neutral.is_none() || value.as_f64() != neutral) {
                return Err(refuse(format!("`{key}` is {value}, which is not supported; remove the key")));
            }
        }
        // A number of new tokens goes before a number of all tokens, and a number of all before our own default.
        match (keys.contains_key("max_new_tokens"), keys.get("max_length").is_some_and(Value::is_u64)) {
            (true, _) => _ = keys.remove("max_length"),
            (false, true) => self.max_new_tokens = usize::MAX,
            (false, false) => {}
        }
        let known = serde_json::to_value(&self).map_err(|error| refuse(error.to_string()))?;
        for (key, value) in keys.into_iter().filter(|(key, _)| known.get(key).is_some()) {
            self = self.with_value(&key, value).map_err(|error| refuse(format!("`{key}`: {error}")))?;
        }
        Ok(self)
    }

    /// The same configuration with one field set by its name.
    fn with_value(&self, key: &str, value: Value) -> serde_json::Result<Self> {
        let mut fields = serde_json::to_value(self)?;
        // JSON has no infinity, which a bias may be.
        fields["sequence_bias"] = Value::Array(Vec::new());
        fields[key] = value;
        let mut changed: Self = serde_json::from_value(fields)?;
        (changed.long_prompt, changed.when_full) = (self.long_prompt, self.when_full);
        if key != "sequence_bias" {
            changed.sequence_bias.clone_from(&self.sequence_bias);
        }
        Ok(changed)
    }
}

impl Serialize for EarlyStopping {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Full => serializer.serialize_bool(true),
            Self::Heuristic => serializer.serialize_bool(false),
            Self::Never => serializer.serialize_str("never"),
        }
    }
}

impl<'de> Deserialize<'de> for EarlyStopping {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::Bool(true) => Ok(Self::Full),
            Value::Bool(false) => Ok(Self::Heuristic),
            Value::String(name) if name == "never" => Ok(Self::Never),
            other => {
                Err(serde::de::Error::custom(format!("expected true, false or \"never\", found {other}")))
            }
        }
    }
}

/// A list, or one value in place of a list of one.
pub(super) fn one_or_many<'de, D: Deserializer<'de>, T: serde::de::DeserializeOwned>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    let value = Value::deserialize(deserializer)?;
    let list = if value.is_array() { value } else { Value::Array(vec![value]) };
    serde_json::from_value(list).map_err(serde::de::Error::custom)
}
