//! Configuration of a GPT-2, read from the `config.json` of a Hugging Face checkpoint.
//!
//! Source: `GPT2Config` of transformers (`src/transformers/models/gpt2/configuration_gpt2.py`): its keys,
//! aliases (`attribute_map`) and defaults. A key that changes the arithmetic is either supported or rejected
//! by name. Sizes have no default here, because a file without them is more likely damaged than a 124M model.

use std::collections::HashSet;

use candle_gpt2_kernels::{Activation, KvDType};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::{ConfigError, GIT_LFS_POINTER, HeadKind, ProblemType, Summary, SummaryType};

/// Maximum accepted sizes.
///
/// They are far above every GPT-2, and small enough that the number of parameters fits into 64 bits.
const MAX_WIDTH: usize = 1 << 22;
const MAX_LAYERS: usize = 1 << 10;
const MAX_ROWS: usize = 1 << 26;
const MAX_LABELS: usize = 1 << 20;

/// Published GPT-2 models: name, `n_layer`, `n_head`, `n_embd`.
///
/// All other values equal those of [`Gpt2Config::gpt2`].
pub const PRESETS: [(&str, usize, usize, usize); 5] = [
    ("distilgpt2", 6, 12, 768),
    ("gpt2", 12, 12, 768),
    ("gpt2-medium", 24, 16, 1024),
    ("gpt2-large", 36, 20, 1280),
    ("gpt2-xl", 48, 25, 1600),
];

/// Sizes and options of a GPT-2, with the field names of `config.json`.
///
/// serde reads and writes that file, with its aliases and defaults and all checks of
/// [`Gpt2Config::from_json`].
///
/// ```
/// use candle_gpt2::Gpt2Config;
///
/// let text = r#"{"model_type": "gpt2", "vocab_size": 11, "n_positions": 8, "hidden_size": 6, "n_layer": 2, "n_head": 3}"#;
/// let config: Gpt2Config = serde_json::from_str(text)?;
/// assert_eq!(config.n_embd, 6);
/// assert_eq!(serde_json::to_value(&config)?["activation_function"], "gelu_new");
///
/// let error = serde_json::from_str::<Gpt2Config>(&text.replace("11", "-11")).expect_err("not a valid size");
/// assert!(error.to_string().starts_with("`vocab_size`: expected a whole number from 1 to"));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[doc(alias("GPT2Config", "GPTConfig"))]
pub struct Gpt2Config {
    /// Vocabulary size: number of rows in the token embedding.
    pub vocab_size: usize,
    /// Context length in tokens: number of rows in the position embedding.
    ///
    /// The key is `n_positions`, or `n_ctx` in files without it.
    pub n_positions: usize,
    /// Hidden size: width of the residual stream, `C`.
    pub n_embd: usize,
    /// Number of blocks.
    pub n_layer: usize,
    /// Number of attention heads per block.
    pub n_head: usize,
    /// Inner width of the MLP; `None` means `4 n_embd`.
    pub n_inner: Option<usize>,
    /// Activation function of the MLP.
    pub activation_function: Activation,
    /// Epsilon added to the variance in every layer norm.
    pub layer_norm_epsilon: f64,
    /// Whether attention scores are divided by the square root of the head width.
    pub scale_attn_weights: bool,
    /// Whether the scores of block `i` are also divided by `i + 1`.
    pub scale_attn_by_inverse_layer_idx: bool,
    /// Whether half-precision models compute scores and softmax in f32, which this crate always does.
    pub reorder_and_upcast_attn: bool,
    /// Whether the output head shares its weight with the token embedding.
    pub tie_word_embeddings: bool,
    /// Dropout rate after the embeddings, in training.
    pub embd_pdrop: f64,
    /// Dropout rate for the attention weights, in training.
    pub attn_pdrop: f64,
    /// Dropout rate for the output of each attention and MLP layer, in training.
    pub resid_pdrop: f64,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// Beginning-of-sequence token.
    pub bos_token_id: Option<u32>,
    /// End-of-sequence tokens; the file has one ID or a list.
    pub eos_token_id: Vec<u32>,
    /// Padding token.
    ///
    /// Rows need no padding in this crate. A sequence classifier skips padding tokens at the end of a row.
    pub pad_token_id: Option<u32>,
    /// Whether each block also attends to encoder hidden states.
    pub add_cross_attention: bool,
    /// Kind of head, from the class under `architectures`.
    pub head: HeadKind,
    /// Label names by index (`id2label`, `label2id`, `num_labels`); empty for a head without labels.
    pub id2label: Vec<String>,
    /// Interpretation of logits over labels; see [`Gpt2Config::problem`].
    pub problem_type: Option<ProblemType>,
    /// Dropout rate before the head of a token classifier, in training.
    pub classifier_dropout: f64,
    /// Options for the multiple-choice head of a double-heads model.
    pub summary: Summary,
}

impl Gpt2Config {
    /// Returns the configuration of the 124M model.
    ///
    /// Vocabulary 50,257, context length 1,024, hidden size 768, 12 blocks, 12 heads.
    pub fn gpt2() -> Self {
        Self {
            vocab_size: 50_257,
            n_positions: 1024,
            n_embd: 768,
            n_layer: 12,
            n_head: 12,
            n_inner: None,
            activation_function: Activation::GeluTanh,
            layer_norm_epsilon: 1e-5,
            scale_attn_weights: true,
            scale_attn_by_inverse_layer_idx: false,
            reorder_and_upcast_attn: false,
            tie_word_embeddings: true,
            embd_pdrop: 0.1,
            attn_pdrop: 0.1,
            resid_pdrop: 0.1,
            initializer_range: 0.02,
            bos_token_id: Some(50_256),
            eos_token_id: vec![50_256],
            pad_token_id: None,
            add_cross_attention: false,
            head: HeadKind::LanguageModel,
            id2label: Vec::new(),
            problem_type: None,
            classifier_dropout: 0.1,
            summary: Summary::default(),
        }
    }

    /// Returns the configuration of a published model, one of [`PRESETS`].
    ///
    /// # Errors
    /// If no preset has this name.
    pub fn preset(name: &str) -> Result<Self, ConfigError> {
        let Some((_, n_layer, n_head, n_embd)) = PRESETS.iter().find(|(known, ..)| *known == name) else {
            return Err(ConfigError::UnknownPreset {
                found: name.to_owned(),
                known: PRESETS.map(|(name, ..)| name).join(", "),
            });
        };
        Ok(Self { n_layer: *n_layer, n_head: *n_head, n_embd: *n_embd, ..Self::gpt2() })
    }

    /// Parses the text of a `config.json`.
    ///
    /// A file without a class describes a language model; see [`Gpt2Config::from_json_with_head`].
    ///
    /// # Errors
    /// If the text is not JSON, lacks a size, has a value out of range, or requires an unsupported feature.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let keys = object(text)?;
        let head = Keys(&keys).head()?.unwrap_or_default();
        Self::from_keys(&Keys(&keys), head)
    }

    /// Parses the text of a `config.json` for a model with this head.
    ///
    /// The class in the file is ignored. This is for callers that know the checkpoint's tensors.
    ///
    /// # Errors
    /// See [`Gpt2Config::from_json`].
    pub fn from_json_with_head(text: &str, head: HeadKind) -> Result<Self, ConfigError> {
        Self::from_keys(&Keys(&object(text)?), head)
    }

    /// Returns the head that a `config.json` names under `architectures`, or `None`.
    ///
    /// # Errors
    /// If the text is not JSON, or the class is not one of [`HeadKind::CLASSES`].
    pub fn named_head(text: &str) -> Result<Option<HeadKind>, ConfigError> {
        Keys(&object(text)?).head()
    }

    fn from_keys(keys: &Keys, head: HeadKind) -> Result<Self, ConfigError> {
        keys.reject_unsupported()?;
        let defaults = Self::gpt2();
        let n_head = keys.required_size("n_head", &["num_attention_heads"], MAX_WIDTH)?;
        let config = Self {
            vocab_size: keys.required_size("vocab_size", &[], MAX_ROWS)?,
            n_positions: keys.context_length()?,
            n_embd: keys.required_size("n_embd", &["hidden_size"], MAX_WIDTH)?,
            n_layer: keys.required_size("n_layer", &["num_hidden_layers"], MAX_LAYERS)?,
            n_head,
            n_inner: keys.size("n_inner", &[], MAX_WIDTH)?,
            activation_function: keys.activation()?.unwrap_or(defaults.activation_function),
            layer_norm_epsilon: keys
                .number("layer_norm_epsilon", 0.0, 1.0)?
                .unwrap_or(defaults.layer_norm_epsilon),
            scale_attn_weights: keys.flag("scale_attn_weights")?.unwrap_or(defaults.scale_attn_weights),
            scale_attn_by_inverse_layer_idx: keys.flag("scale_attn_by_inverse_layer_idx")?.unwrap_or(false),
            reorder_and_upcast_attn: keys.flag("reorder_and_upcast_attn")?.unwrap_or(false),
            tie_word_embeddings: keys.flag("tie_word_embeddings")?.unwrap_or(defaults.tie_word_embeddings),
            embd_pdrop: keys.number("embd_pdrop", 0.0, 1.0)?.unwrap_or(defaults.embd_pdrop),
            attn_pdrop: keys.number("attn_pdrop", 0.0, 1.0)?.unwrap_or(defaults.attn_pdrop),
            resid_pdrop: keys.number("resid_pdrop", 0.0, 1.0)?.unwrap_or(defaults.resid_pdrop),
            initializer_range: keys
                .number("initializer_range", 0.0, f64::MAX)?
                .unwrap_or(defaults.initializer_range),
            bos_token_id: keys.token_ids("bos_token_id", &defaults.eos_token_id)?.first().copied(),
            eos_token_id: keys.token_ids("eos_token_id", &defaults.eos_token_id)?,
            pad_token_id: keys.token_ids("pad_token_id", &[])?.first().copied(),
            add_cross_attention: keys.flag("add_cross_attention")?.unwrap_or(false),
            head,
            id2label: if head.has_labels() { keys.labels()? } else { Vec::new() },
            problem_type: match head {
                HeadKind::SequenceClassification => keys.named("problem_type", &ProblemType::NAMES)?,
                _ => None,
            },
            classifier_dropout: match head {
                HeadKind::TokenClassification => keys.classifier_dropout()?,
                _ => None,
            }
            .unwrap_or(defaults.classifier_dropout),
            summary: match head {
                HeadKind::DoubleHeads => keys.summary()?,
                _ => defaults.summary,
            },
        };
        config.check()?;
        Ok(config)
    }

    /// Validates sizes and numbers like [`Gpt2Config::from_json`], for a configuration built in code.
    ///
    /// # Errors
    /// If a size or number is out of range, `n_head` does not divide the hidden size, labels are missing or
    /// repeated, or the parameters exceed the address space of this machine.
    pub fn check(&self) -> Result<(), ConfigError> {
        for (key, size, largest) in [
            ("vocab_size", self.vocab_size, MAX_ROWS),
            ("n_positions", self.n_positions, MAX_ROWS),
            ("n_embd", self.n_embd, MAX_WIDTH),
            ("n_layer", self.n_layer, MAX_LAYERS),
            ("n_head", self.n_head, MAX_WIDTH),
            ("n_inner", self.n_inner.unwrap_or(1), MAX_WIDTH),
        ] {
            if !(1..=largest).contains(&size) {
                return Err(wrong(key, &size_range(largest), &size.into()));
            }
        }
        for (key, number, largest) in [
            ("layer_norm_epsilon", self.layer_norm_epsilon, 1.0),
            ("embd_pdrop", self.embd_pdrop, 1.0),
            ("attn_pdrop", self.attn_pdrop, 1.0),
            ("resid_pdrop", self.resid_pdrop, 1.0),
            ("initializer_range", self.initializer_range, f64::MAX),
            ("classifier_dropout", self.classifier_dropout, 1.0),
            ("summary_first_dropout", self.summary.first_dropout, 1.0),
            ("summary_last_dropout", self.summary.last_dropout, 1.0),
        ] {
            if !(0.0..=largest).contains(&number) {
                return Err(wrong(key, &number_range(0.0, largest), &number.into()));
            }
        }
        if !self.n_embd.is_multiple_of(self.n_head) {
            return Err(ConfigError::HeadsDoNotDivideWidth { n_head: self.n_head, n_embd: self.n_embd });
        }
        self.check_labels()?;
        if !self.is_addressable() {
            return Err(ConfigError::TooLarge);
        }
        Ok(())
    }

    /// Checks that a head over labels has uniquely named labels that fit the problem type.
    fn check_labels(&self) -> Result<(), ConfigError> {
        if !self.head.has_labels() {
            return Ok(());
        }
        let count = self.id2label.len();
        if !(1..=MAX_LABELS).contains(&count) {
            return Err(wrong("id2label", &format!("1 to {MAX_LABELS} labels"), &count.into()));
        }
        let mut seen = HashSet::new();
        if let Some(name) = self.id2label.iter().find(|name| !seen.insert(name.as_str())) {
            return Err(wrong("id2label", "a unique name for each label", &format!("`{name}` twice").into()));
        }
        if self.problem_type == Some(ProblemType::SingleLabelClassification) && count == 1 {
            return Err(ConfigError::Unsupported {
                key: "problem_type".into(),
                found: quoted(&ProblemType::SingleLabelClassification.name().into()),
                reason: "a single label is always correct; use two or more labels, or `regression`".into(),
            });
        }
        Ok(())
    }

    /// Converts the configuration to a JSON object with the keys of `config.json`.
    pub fn to_json(&self) -> Value {
        let mut keys = serde_json::json!({
            "model_type": "gpt2",
            "architectures": [self.head.class_name()],
            "vocab_size": self.vocab_size,
            "n_positions": self.n_positions,
            "n_ctx": self.n_positions,
            "n_embd": self.n_embd,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_inner": self.n_inner,
            "activation_function": activation_name(self.activation_function),
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "scale_attn_weights": self.scale_attn_weights,
            "scale_attn_by_inverse_layer_idx": self.scale_attn_by_inverse_layer_idx,
            "reorder_and_upcast_attn": self.reorder_and_upcast_attn,
            "tie_word_embeddings": self.tie_word_embeddings,
            "embd_pdrop": self.embd_pdrop,
            "attn_pdrop": self.attn_pdrop,
            "resid_pdrop": self.resid_pdrop,
            "initializer_range": self.initializer_range,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": match self.eos_token_id.as_slice() {
                [] => Value::Null,
                [one] => Value::from(*one),
                several => Value::from(several),
            },
        });
        if let Some(id) = self.pad_token_id {
            keys["pad_token_id"] = id.into();
        }
        if self.add_cross_attention {
            keys["add_cross_attention"] = true.into();
        }
        if self.head.has_labels() {
            let numbered = || self.id2label.iter().enumerate();
            keys["id2label"] =
                numbered().map(|(id, name)| (id.to_string(), Value::from(name.as_str()))).collect();
            keys["label2id"] = numbered().map(|(id, name)| (name.clone(), Value::from(id))).collect();
        }
        if let Some(problem) = self.problem_type {
            keys["problem_type"] = problem.name().into();
        }
        if self.head == HeadKind::TokenClassification {
            keys["classifier_dropout"] = self.classifier_dropout.into();
        }
        if self.head == HeadKind::DoubleHeads {
            let Summary { token, activation, first_dropout, last_dropout } = self.summary;
            keys["summary_type"] = token.name().into();
            keys["summary_activation"] = activation.map(activation_name).into();
            keys["summary_first_dropout"] = first_dropout.into();
            keys["summary_last_dropout"] = last_dropout.into();
        }
        keys
    }

    /// Whether the vocabulary has a token with this ID.
    pub fn has_token(&self, id: u32) -> bool {
        // An ID that does not fit into `usize` is outside every vocabulary.
        usize::try_from(id).is_ok_and(|id| id < self.vocab_size)
    }

    /// Returns the beginning-of-sequence token, if the vocabulary has it.
    ///
    /// A `config.json` without `bos_token_id` defaults to GPT-2's token, whatever its vocabulary is.
    pub fn start_token(&self) -> Option<u32> {
        self.bos_token_id.filter(|id| self.has_token(*id))
    }

    /// Returns the end-of-sequence tokens that the vocabulary has.
    ///
    /// A `config.json` without `eos_token_id` defaults to GPT-2's token, whatever its vocabulary is.
    /// [`Gpt2Config::end_token_note`] reports the omitted tokens.
    pub fn end_tokens(&self) -> Vec<u32> {
        self.eos_token_id.iter().copied().filter(|id| self.has_token(*id)).collect()
    }

    /// Returns a note about end tokens that [`Gpt2Config::end_tokens`] omits, if there are any.
    pub fn end_token_note(&self) -> Option<String> {
        let beyond: Vec<String> =
            self.eos_token_id.iter().filter(|id| !self.has_token(**id)).map(u32::to_string).collect();
        let note = || {
            format!(
                "eos_token_id {} is outside the vocabulary of {} tokens and is ignored",
                beyond.join(", "),
                self.vocab_size
            )
        };
        (!beyond.is_empty()).then(note)
    }

    /// Inner width of the MLP: `n_inner`, or `4 n_embd`.
    pub fn inner_width(&self) -> usize {
        self.n_inner.unwrap_or(self.n_embd.saturating_mul(4))
    }

    /// Width of an attention head, or 0 if `n_head` is 0, which [`Gpt2Config::check`] rejects.
    pub fn head_dim(&self) -> usize {
        self.n_embd.checked_div(self.n_head).unwrap_or(0)
    }

    /// Scale of the attention scores in block `layer`.
    pub fn attention_scale(&self, layer: usize) -> f64 {
        let width = if self.scale_attn_weights { (self.head_dim() as f64).sqrt() } else { 1.0 };
        let depth = if self.scale_attn_by_inverse_layer_idx { (layer + 1) as f64 } else { 1.0 };
        1.0 / (width * depth)
    }

    /// Size of one token in a KV cache of this storage type, in bytes.
    pub fn kv_bytes_per_token(&self, dtype: KvDType) -> usize {
        self.n_layer * dtype.bytes_per_token(self.n_head, self.head_dim())
    }

    /// Number of labels, 0 for a head without labels.
    pub fn num_labels(&self) -> usize {
        self.id2label.len()
    }

    /// Interpretation of logits over labels.
    ///
    /// Without `problem_type`, one label means regression and several labels mean single-label
    /// classification, as in transformers.
    pub fn problem(&self) -> ProblemType {
        match self.problem_type {
            Some(problem) => problem,
            None if self.num_labels() == 1 => ProblemType::Regression,
            None => ProblemType::SingleLabelClassification,
        }
    }

    /// Returns the index of the token in a row from which a sequence classifier computes its label.
    ///
    /// This is the last token that is not the padding token, as in transformers. Without a padding token, it
    /// is the last token.
    pub fn classified_token(&self, row: &[u32]) -> usize {
        match self.pad_token_id {
            Some(pad) => row.iter().rposition(|id| *id != pad).unwrap_or(0),
            None => row.len().saturating_sub(1),
        }
    }

    /// Whether the model has an output head over the vocabulary, separate from the token embedding.
    pub fn has_untied_head(&self) -> bool {
        self.head.has_language_model() && !self.tie_word_embeddings
    }
}

impl Serialize for Gpt2Config {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.to_json().serialize(serializer)
    }
}

/// Manual implementation, because keys depend on each other.
///
/// Aliases must agree, and label keys are read only for a head with labels.
impl<'de> Deserialize<'de> for Gpt2Config {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let keys = Map::deserialize(deserializer)?;
        let keys = Keys(&keys);
        let config = keys.head().and_then(|head| Self::from_keys(&keys, head.unwrap_or_default()));
        config.map_err(serde::de::Error::custom)
    }
}

fn activation_name(activation: Activation) -> &'static str {
    let named = Activation::NAMES.iter().find(|(_, known)| *known == activation);
    named.map_or("", |(name, _)| name)
}

/// Parses the JSON object of a `config.json`.
fn object(text: &str) -> Result<Map<String, Value>, ConfigError> {
    // Some editors write a byte order mark at the start of a file.
    let text = text.trim_start_matches('\u{feff}');
    let value = serde_json::from_str(text).map_err(|error| match text.starts_with(GIT_LFS_POINTER) {
        true => ConfigError::Pointer,
        false => ConfigError::NotJson(error.to_string()),
    })?;
    match value {
        Value::Object(keys) => Ok(keys),
        other => Err(ConfigError::NotAnObject { found: kind(&other) }),
    }
}

/// Typed access to the keys of a `config.json`.
///
/// A size may be `null`, which counts as missing. Flags, numbers and names may not, as in transformers.
struct Keys<'a>(&'a Map<String, Value>);

impl Keys<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn reject_unsupported(&self) -> Result<(), ConfigError> {
        let refuse = |key: &str, found: &Value, reason: &str| {
            Err(ConfigError::Unsupported { key: key.into(), found: quoted(found), reason: reason.into() })
        };
        if let Some(found) = self.get("model_type")
            && found != "gpt2"
        {
            return refuse("model_type", found, "only `gpt2` checkpoints can be loaded");
        }
        if self.flag("is_encoder_decoder")? == Some(true) {
            return refuse("is_encoder_decoder", &Value::Bool(true), "GPT-2 is decoder-only");
        }
        if let Some(found) = self.get("pruned_heads")
            && !matches!(found, Value::Object(heads) if heads.is_empty())
        {
            return refuse("pruned_heads", found, "every block must have all its heads");
        }
        if let Some(found) = self.get("quantization_config") {
            return refuse("quantization_config", found, "save the checkpoint with its weights dequantized");
        }
        Ok(())
    }

    /// Returns the value under `key` or one of its aliases, which must agree.
    fn aliased(
        &self,
        key: &'static str,
        aliases: &[&'static str],
    ) -> Result<Option<(&'static str, &Value)>, ConfigError> {
        let mut found: Option<(&'static str, &Value)> = None;
        for name in std::iter::once(key).chain(aliases.iter().copied()) {
            match (self.get(name), found) {
                (Some(value), None) => found = Some((name, value)),
                (Some(other), Some((key, value))) if other != value => {
                    return Err(ConfigError::Conflict {
                        key: key.into(),
                        value: value.to_string(),
                        alias: name.into(),
                        other: other.to_string(),
                    });
                }
                _ => {}
            }
        }
        Ok(found)
    }

    /// Reads a size from 1 to `largest`.
    fn size(
        &self,
        key: &'static str,
        aliases: &[&'static str],
        largest: usize,
    ) -> Result<Option<usize>, ConfigError> {
        let Some((name, value)) = self.aliased(key, aliases)? else {
            return Ok(None);
        };
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        match size.filter(|size| (1..=largest).contains(size)) {
            Some(size) => Ok(Some(size)),
            None => Err(wrong(name, &size_range(largest), value)),
        }
    }

    fn required_size(
        &self,
        key: &'static str,
        aliases: &[&'static str],
        largest: usize,
    ) -> Result<usize, ConfigError> {
        let missing = || ConfigError::MissingKey {
            key,
            aliases: match aliases {
                [] => String::new(),
                several => format!(" (also accepted as `{}`)", several.join("`, `")),
            },
        };
        self.size(key, aliases, largest)?.ok_or_else(missing)
    }

    /// Reads `n_positions`, or `n_ctx` if that key is missing, as in llama.cpp and old files.
    fn context_length(&self) -> Result<usize, ConfigError> {
        match self.size("n_positions", &["max_position_embeddings"], MAX_ROWS)? {
            Some(n_positions) => Ok(n_positions),
            None if self.get("n_ctx").is_some() => self.required_size("n_ctx", &[], MAX_ROWS),
            None => self.required_size("n_positions", &["max_position_embeddings", "n_ctx"], MAX_ROWS),
        }
    }

    fn number(&self, key: &str, smallest: f64, largest: f64) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_f64().filter(|number| (smallest..=largest).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(wrong(key, &number_range(smallest, largest), value)),
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        let Some(value) = self.0.get(key) else {
            return Ok(None);
        };
        value.as_bool().map(Some).ok_or_else(|| wrong(key, "true or false", value))
    }

    fn activation(&self) -> Result<Option<Activation>, ConfigError> {
        let key = "activation_function";
        match self.0.get(key) {
            Some(null @ Value::Null) => Err(wrong(key, "a name", null)),
            _ => self.named(key, &Activation::NAMES),
        }
    }

    /// Looks up a value by name; returns `None` if the key is missing or `null`.
    fn named<T: Copy>(&self, key: &str, known: &[(&str, T)]) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let name = value.as_str().ok_or_else(|| wrong(key, "a name", value))?;
        let unsupported = || ConfigError::Unsupported {
            key: key.into(),
            found: quoted(value),
            reason: format!("expected one of {}", names(known)),
        };
        let named = known.iter().find(|(known, _)| *known == name).map(|(_, named)| *named);
        named.map(Some).ok_or_else(unsupported)
    }

    /// Returns the head of the first class under `architectures`.
    fn head(&self) -> Result<Option<HeadKind>, ConfigError> {
        let key = "architectures";
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let classes = value.as_array().ok_or_else(|| wrong(key, "a list of class names", value))?;
        let Some(first) = classes.first() else {
            return Ok(None);
        };
        let name = first.as_str().ok_or_else(|| wrong(key, "a list of class names", value))?;
        let unsupported = || ConfigError::Unsupported {
            key: key.into(),
            found: quoted(first),
            reason: format!("expected one of {}", names(&HeadKind::CLASSES)),
        };
        HeadKind::from_class_name(name).map(Some).ok_or_else(unsupported)
    }

    /// Reads the label names by index from `id2label`, or else from `label2id`.
    ///
    /// transformers leaves an outdated `label2id` in the file if only `id2label` was set, so `id2label` takes
    /// precedence. `num_labels` must agree. Without any of these keys there are two labels, as in
    /// transformers.
    fn labels(&self) -> Result<Vec<String>, ConfigError> {
        let conflict = |key: &str, value: String, alias: &str, other: String| ConfigError::Conflict {
            key: key.into(),
            value,
            alias: alias.into(),
            other,
        };
        let named = match (self.get("id2label"), self.get("label2id")) {
            (Some(by_id), _) => Some(self.names_by_id(by_id)?),
            (None, Some(by_name)) => Some(self.ids_by_name(by_name)?),
            (None, None) => None,
        };
        let count = self.size("num_labels", &[], MAX_LABELS)?;
        match (named, count) {
            (Some(names), Some(count)) if names.len() != count => {
                let key = if self.get("id2label").is_some() { "id2label" } else { "label2id" };
                Err(conflict("num_labels", count.to_string(), key, self.quoted(key)))
            }
            (Some(names), _) => Ok(names),
            (None, count) => Ok((0..count.unwrap_or(2)).map(|id| format!("LABEL_{id}")).collect()),
        }
    }

    /// Converts `{"0": name, "1": name, …}` to a list.
    fn names_by_id(&self, value: &Value) -> Result<Vec<String>, ConfigError> {
        let expected = "a name for each index starting at 0, such as {\"0\": \"no\", \"1\": \"yes\"}";
        let malformed = || wrong("id2label", expected, value);
        let object = value.as_object().ok_or_else(malformed)?;
        let name = |id: usize| object.get(&id.to_string())?.as_str().map(str::to_owned);
        (0..object.len()).map(name).collect::<Option<_>>().ok_or_else(malformed)
    }

    /// Converts `{name: 0, name: 1, …}` to a list of names.
    fn ids_by_name(&self, value: &Value) -> Result<Vec<String>, ConfigError> {
        let expected =
            "consecutive indices starting at 0, one for each name, such as {\"no\": 0, \"yes\": 1}";
        let malformed = || wrong("label2id", expected, value);
        let object = value.as_object().ok_or_else(malformed)?;
        let mut names = vec![None; object.len()];
        for (name, id) in object {
            let id = id.as_u64().or_else(|| id.as_str()?.parse().ok());
            let id = id.and_then(|id| usize::try_from(id).ok()).ok_or_else(malformed)?;
            *names.get_mut(id).ok_or_else(malformed)? = Some(name.clone());
        }
        names.into_iter().collect::<Option<_>>().ok_or_else(malformed)
    }

    /// Reads `classifier_dropout`, or `hidden_dropout` if that key is missing.
    fn classifier_dropout(&self) -> Result<Option<f64>, ConfigError> {
        match self.number("classifier_dropout", 0.0, 1.0)? {
            Some(rate) => Ok(Some(rate)),
            None => self.number("hidden_dropout", 0.0, 1.0),
        }
    }

    /// Reads the options for the multiple-choice head.
    fn summary(&self) -> Result<Summary, ConfigError> {
        let defaults = Summary::default();
        for key in ["summary_use_proj", "summary_proj_to_labels"] {
            if self.flag(key)? == Some(false) {
                return Err(ConfigError::Unsupported {
                    key: key.into(),
                    found: quoted(&Value::Bool(false)),
                    reason: "the head must output one logit for each choice".into(),
                });
            }
        }
        Ok(Summary {
            token: self.named("summary_type", &SummaryType::NAMES)?.unwrap_or(defaults.token),
            activation: self.named("summary_activation", &Activation::NAMES)?,
            first_dropout: self.number("summary_first_dropout", 0.0, 1.0)?.unwrap_or(defaults.first_dropout),
            last_dropout: self.number("summary_last_dropout", 0.0, 1.0)?.unwrap_or(defaults.last_dropout),
        })
    }

    fn quoted(&self, key: &str) -> String {
        self.get(key).map_or_else(String::new, quoted)
    }

    /// Reads one ID, a list of IDs or an explicit `null`; a missing key means the default.
    fn token_ids(&self, key: &str, default: &[u32]) -> Result<Vec<u32>, ConfigError> {
        let id = |value: &Value| {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| wrong(key, "a token id or a list of token ids", value))
        };
        match self.0.get(key) {
            None => Ok(default.to_vec()),
            Some(Value::Null) => Ok(Vec::new()),
            Some(Value::Array(values)) => values.iter().map(id).collect(),
            Some(value) => Ok(vec![id(value)?]),
        }
    }
}

fn names<T>(known: &[(&str, T)]) -> String {
    known.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

fn size_range(largest: usize) -> String {
    format!("a whole number from 1 to {largest}")
}

fn number_range(smallest: f64, largest: f64) -> String {
    match largest {
        f64::MAX => format!("a number of at least {smallest}"),
        _ => format!("a number from {smallest} to {largest}"),
    }
}

fn wrong(key: &str, expected: &str, found: &Value) -> ConfigError {
    ConfigError::WrongValue { key: key.into(), expected: expected.into(), found: quoted(found) }
}

/// Quotes a value from the file, shortened if it is long.
fn quoted(value: &Value) -> String {
    /// Maximum length of a quoted value, in characters.
    const QUOTED: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(QUOTED) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
