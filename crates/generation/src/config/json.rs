//! Options from a `generation_config.json`.
//!
//! Source: `src/transformers/generation/configuration_utils.py`.

use candle_gpt2::{GIT_LFS_POINTER, Gpt2Config};
use serde_json::{Map, Value};

use super::table::{GenerationConfig, GenerationOptions, OPTIONS};
use crate::GenerationError;

/// Unsupported keys in `generation_config.json` that would change the completion.
///
/// Null, false and the number next to a key change nothing and are accepted.
const REFUSED_KEYS: [(&str, Option<f64>); 11] = [
    ("guidance_scale", Some(1.0)),
    ("min_length", Some(0.0)),
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
    /// Returns the default options for a model, whose end tokens end a completion.
    ///
    /// The default options alone have no end token.
    ///
    /// ```
    /// use candle_gpt2::Gpt2Config;
    /// use candle_gpt2_generation::GenerationConfig;
    ///
    /// assert_eq!(GenerationConfig::of_model(&Gpt2Config::gpt2()).eos_token_id, [50256]);
    /// assert_eq!(GenerationConfig::default().eos_token_id, [0; 0]);
    /// ```
    pub fn of_model(config: &Gpt2Config) -> Self {
        Self { eos_token_id: config.eos_token_id.clone(), ..Self::default() }
    }

    /// Applies the options in a `generation_config.json` and returns the new configuration.
    ///
    /// Keys that do not change the completion are ignored.
    ///
    /// # Errors
    /// Returns an error if the JSON is invalid, a value has the wrong type, or a key requests an
    /// unsupported feature.
    pub fn with_json(self, json: &str) -> Result<Self, GenerationError> {
        Ok(self.with_stated(&GenerationOptions::of_json(json)?))
    }

    /// Applies the options that [`GenerationOptions::of_json`] read from a `generation_config.json`.
    pub fn with_stated(mut self, stated: &GenerationOptions) -> Self {
        // A limit on the total length replaces the default limit on new tokens.
        if stated.max_length.is_some() {
            self.max_new_tokens = usize::MAX;
        }
        stated.put_into(&mut self);
        self
    }
}

impl GenerationOptions {
    /// Reads the options in a `generation_config.json`.
    ///
    /// Keys that do not change the completion are ignored.
    ///
    /// # Errors
    /// Returns the same errors as [`GenerationConfig::with_json`].
    pub fn of_json(json: &str) -> Result<Self, GenerationError> {
        let refuse = |what: String| GenerationError::Json { what };
        // Some editors write a byte order mark.
        let json = json.trim_start_matches('\u{feff}');
        let mut keys: Map<String, Value> = serde_json::from_str(json).map_err(|error| {
            refuse(match json.starts_with(GIT_LFS_POINTER) {
                true => "a Git LFS pointer in place of the file; run `git lfs pull`".to_owned(),
                false => format!("not a JSON object: {error}"),
            })
        })?;
        // A null value leaves the option unset.
        keys.retain(|_, value| !value.is_null());
        for (key, neutral) in REFUSED_KEYS {
            let value = keys.get(key).unwrap_or(&Value::Null);
            let changes_nothing = matches!(value, Value::Null | Value::Bool(false));
            if !changes_nothing && (neutral.is_none() || value.as_f64() != neutral) {
                return Err(refuse(format!("`{key}` {value} is not supported; remove the key")));
            }
        }
        // A limit on new tokens takes precedence over a limit on the total length.
        if keys.contains_key("max_new_tokens") {
            keys.remove("max_length");
        }
        let mut options = Self::default();
        for (key, value) in keys {
            if OPTIONS.iter().any(|option| option.name == key) {
                options.set(&key, value).map_err(|error| refuse(error.to_string()))?;
            }
        }
        Ok(options)
    }
}
