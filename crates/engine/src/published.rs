//! Published values for public models, and checks that a checkpoint reproduces them.
//!
//! The table is `published.json`, which records a source for each value.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::Device;
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, ParameterCounts};
use candle_gpt2_generation::{Continuation, decode, first_best, score_continuations};
use candle_gpt2_weights::{Checkpoint, WeightDType, grouped};
use serde::{Deserialize, Serialize};

use crate::logits::{largest, logits};
use crate::memory::dtype_on_cpu;
use crate::{EngineError, ModelOptions, Reporter, Unit, Vocabulary};

/// Table of published values, compiled into the program.
const TABLE: &str = include_str!("published.json");

/// Published values for models, by model name.
///
/// ```
/// use candle_gpt2_engine::PublishedValues;
///
/// let values = PublishedValues::built_in()?;
/// assert!(values.names().any(|name| name == "gpt2"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedValues {
    models: Vec<PublishedModel>,
}

/// A model's names and its published values.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct PublishedModel {
    names: Vec<String>,
    values: Vec<Value>,
}

/// A published value and its source.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "check", rename_all = "snake_case", deny_unknown_fields)]
enum Value {
    /// Number of parameters, counting shared ones once.
    Parameters { value: usize, source: String },
    /// Keys of `config.json` that determine the shape of every tensor.
    Config { value: BTreeMap<String, usize>, source: String },
    /// Token ids for a text.
    Tokens { text: String, ids: Vec<u32>, source: String },
    /// Greedy continuation of a prompt, and whether the end-of-text token follows.
    Greedy {
        prompt: String,
        text: String,
        #[serde(default)]
        ends: bool,
        source: String,
    },
    /// Most probable token after a prompt, and its logit.
    Logit { prompt: String, token: u32, value: f64, source: String },
    /// Mean loss on a text after a prompt, in nats per token.
    Loss { prompt: String, text: String, value: f64, source: String },
}

impl Value {
    fn source(&self) -> &str {
        match self {
            Self::Parameters { source, .. }
            | Self::Config { source, .. }
            | Self::Tokens { source, .. }
            | Self::Greedy { source, .. }
            | Self::Logit { source, .. }
            | Self::Loss { source, .. } => source,
        }
    }

    /// Kind of value, such as "greedy text".
    fn kind(&self) -> &'static str {
        match self {
            Self::Parameters { .. } => "parameters",
            Self::Config { .. } => "shapes",
            Self::Tokens { .. } => "tokens",
            Self::Greedy { .. } => "greedy text",
            Self::Logit { .. } => "logit",
            Self::Loss { .. } => "loss",
        }
    }
}

/// Result of a comparison with one published value.
///
/// [`Verification`](crate::Verification) lists these results.
///
/// ```
/// # use candle_gpt2_engine::{ModelOptions, PublishedValues, Silent, VerifyOptions};
/// let table = r#"{"models": [{"names": ["built-in"], "values": [
///     {"check": "config", "value": {"n_positions": 512}, "source": "its config.json"}
/// ]}]}"#;
/// let options = VerifyOptions { published: Some(PublishedValues::from_json(table)?), ..VerifyOptions::default() };
/// let found = ModelOptions::default().verify(&options, &Silent)?;
/// assert!(found.sound && found.published[0].holds);
/// assert_eq!(found.published[0].difference, 0.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PublishedCheck {
    /// Description of the published value, plus the value found if it differs.
    pub check: String,
    /// Publisher of the value.
    pub source: String,
    /// Largest difference found.
    ///
    /// The unit depends on the check: a count, the number of differing token ids, a logit, or nats per token.
    /// For a greedy text it is the largest gap between the highest logit and the logit of the text's token.
    pub difference: f64,
    /// Largest allowed difference.
    pub tolerance: f64,
    /// Whether the difference is within the tolerance.
    pub holds: bool,
}

impl PublishedValues {
    /// Returns the built-in table: the four sizes of GPT-2, DistilGPT2 and DialoGPT.
    ///
    /// # Errors
    /// Only if the program itself is damaged.
    pub fn built_in() -> Result<Self, EngineError> {
        Self::from_json(TABLE)
    }

    /// Parses a table in the format of `published.json`.
    ///
    /// # Errors
    /// If `json` has a different structure.
    pub fn from_json(json: &str) -> Result<Self, EngineError> {
        let wrong =
            |error| EngineError::Published { what: format!("invalid table of published values: {error}") };
        serde_json::from_str(json).map_err(wrong)
    }

    /// Returns the names of all models.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.models.iter().flat_map(|model| &model.names).map(String::as_str)
    }

    /// Finds a model's values by its Hub name without the revision, or by the name of its folder.
    fn of(&self, model: &Path) -> Result<&[Value], EngineError> {
        let written = model.to_string_lossy();
        let written = written.trim_end_matches(['/', '\\']);
        let name = written.split_once('@').map_or(written, |(name, _)| name);
        let folder = name.rsplit(['/', '\\']).next().unwrap_or(name);
        let find =
            |name: &str| self.models.iter().find(|model| model.names.iter().any(|known| known == name));
        match find(name).or_else(|| find(folder)) {
            Some(model) => Ok(&model.values),
            None => {
                let known = self.names().collect::<Vec<_>>().join(", ");
                let what = format!("no published values for `{written}`; available models: {known}");
                Err(EngineError::Published { what })
            }
        }
    }
}

/// Compares a checkpoint with the published values for the model named by `options`.
///
/// Returns the results, and a note for each kind of value that is not published for this model.
///
/// # Errors
/// If the table lacks the model, the model has no tokenizer, or loading fails.
pub(crate) fn compare(
    options: &ModelOptions,
    checkpoint: &Checkpoint,
    values: &PublishedValues,
    reporter: &dyn Reporter,
) -> Result<(Vec<PublishedCheck>, Vec<String>), EngineError> {
    let values = values.of(&options.model)?;
    checkpoint.check_language_model()?;
    let compared = ModelUnderTest {
        model: options.load(checkpoint, &Device::Cpu, reporter)?,
        vocabulary: Vocabulary::read(checkpoint, options.tokenizer.as_deref())?,
        logit_tolerance: logit_tolerance(dtype_on_cpu(checkpoint, options.dtype)),
    };
    let progress = reporter.start("comparing", values.len() as u64, Unit::Items("values"));
    let mut checks = Vec::new();
    for value in values {
        if reporter.is_interrupted() {
            return Err(EngineError::Interrupted);
        }
        checks.push(compared.check(value)?);
        progress.advance(1);
    }
    let kinds: Vec<&str> = values.iter().map(Value::kind).collect();
    let unpublished = ["greedy text", "logit", "loss"].into_iter().filter(|kind| !kinds.contains(kind));
    Ok((checks, unpublished.map(|kind| format!("not published for this model: {kind}")).collect()))
}

/// Largest allowed difference between a logit and its published value.
///
/// In f32, published values have four digits, and sums are computed in a different order. Quantization to a
/// few bits moves the logits of these models by up to a few units.
fn logit_tolerance(dtype: WeightDType) -> f64 {
    match dtype {
        WeightDType::F32 => 5e-4,
        WeightDType::F16 => 0.05,
        WeightDType::BF16 => 0.4,
        WeightDType::Q8 => 0.5,
        WeightDType::Q6 => 1.0,
        WeightDType::Q5 => 2.0,
        // Q4, the coarsest type.
        _ => 4.0,
    }
}

/// A loaded model to compare with published values.
struct ModelUnderTest {
    model: Gpt2LMHeadModel,
    vocabulary: Vocabulary,
    logit_tolerance: f64,
}

impl ModelUnderTest {
    fn check(&self, value: &Value) -> Result<PublishedCheck, EngineError> {
        let config = self.model.config();
        let (check, difference, tolerance) = match value {
            Value::Parameters { value, .. } => {
                let found = ParameterCounts::new(config).unique;
                let check = format!(
                    "{} parameters{}",
                    grouped(*value),
                    found_suffix(found != *value, || grouped(found))
                );
                (check, found.abs_diff(*value) as f64, 0.0)
            }
            Value::Config { value, .. } => {
                let found = shapes(config);
                let of = |key: &str| found.iter().find(|(known, _)| *known == key).map(|(_, found)| *found);
                let pairs = value.iter().map(|(key, expected)| {
                    let other = found_suffix(of(key) != Some(*expected), || {
                        of(key).map_or("no value".into(), |found| found.to_string())
                    });
                    format!("{key} {expected}{other}")
                });
                let check = format!("shapes: {}", pairs.collect::<Vec<_>>().join(", "));
                let differences = value.iter().map(|(key, expected)| {
                    of(key).map_or(f64::NAN, |found| found.abs_diff(*expected) as f64)
                });
                (check, largest(differences), 0.0)
            }
            Value::Tokens { text, ids, .. } => {
                let found = self.vocabulary.encode(text)?;
                let differing = ids.iter().zip(&found).filter(|(expected, found)| expected != found).count()
                    + ids.len().abs_diff(found.len());
                (
                    format!("tokens for {text:?}{}", found_suffix(differing > 0, || format!("{found:?}"))),
                    differing as f64,
                    0.0,
                )
            }
            Value::Greedy { prompt, text, ends, .. } => {
                let (prompt_ids, mut ids) = self.split(prompt, text)?;
                ids.extend(config.eos_token_id.first().filter(|_| *ends));
                let rows = self.logits(&prompt_ids, &ids)?;
                let behind = rows.iter().zip(&ids).map(|(row, id)| logit(row, best(row)) - logit(row, *id));
                let most = largest(behind);
                let greedy = || self.greedy_text(&rows);
                let check = format!(
                    "greedy text {text:?} after {prompt:?}{}",
                    found_suffix(most > self.logit_tolerance, greedy)
                );
                (check, most, self.logit_tolerance)
            }
            Value::Logit { prompt, token, value, .. } => {
                let row = self.logits(&self.vocabulary.encode(prompt)?, &[*token])?.remove(0);
                let (found, most) = (logit(&row, *token), logit(&row, best(&row)));
                let difference = (found - value).abs().max(most - found);
                let other = found_suffix(difference > self.logit_tolerance, || {
                    format!("{found:.4}, and {most:.4} for the most probable token")
                });
                (
                    format!("logit {value} for token {token} after {prompt:?}{other}"),
                    difference,
                    self.logit_tolerance,
                )
            }
            Value::Loss { prompt, text, value, .. } => {
                let (prompt_ids, ids) = self.split(prompt, text)?;
                let scored = score_continuations(&self.model, &prompt_ids, &[ids], &|| ())?;
                let found = -scored.first().map_or(f64::NAN, Continuation::mean);
                // The loss averages over several logits, whose errors partly cancel out.
                let tolerance = (self.logit_tolerance / 5.0).max(5e-4);
                let difference = (found - value).abs();
                let other = found_suffix(difference > tolerance, || format!("{found:.4}"));
                (format!("loss {value:.4} on {text:?} after {prompt:?}{other}"), difference, tolerance)
            }
        };
        let holds = difference <= tolerance;
        Ok(PublishedCheck { check, source: value.source().to_owned(), difference, tolerance, holds })
    }

    /// Encodes a prompt and the text that follows it.
    fn split(&self, prompt: &str, text: &str) -> Result<(Vec<u32>, Vec<u32>), EngineError> {
        let prompt = self.vocabulary.encode(prompt)?;
        Ok((prompt, self.vocabulary.encode_piece(text)?))
    }

    /// Returns the logits that predict each of `ids`, the tokens after a prompt.
    fn logits(&self, prompt: &[u32], ids: &[u32]) -> Result<Vec<Vec<f32>>, EngineError> {
        let (before, _) = ids.split_at(ids.len().saturating_sub(1));
        let all = [prompt, before].concat();
        let config = self.model.config();
        if prompt.is_empty()
            || ids.is_empty()
            || all.len() > config.n_positions
            || ids.iter().any(|id| !config.has_token(*id))
        {
            let what = format!(
                "a published text of {} tokens does not fit this model's context or vocabulary",
                all.len() + 1
            );
            return Err(EngineError::Published { what });
        }
        let rows = logits(&self.model, &all)?;
        Ok(rows.chunks(config.vocab_size).skip(prompt.len() - 1).map(<[f32]>::to_vec).collect())
    }

    /// Decodes the most probable token of each row.
    fn greedy_text(&self, rows: &[Vec<f32>]) -> String {
        let ids: Vec<u32> = rows.iter().map(|row| best(row)).collect();
        match self.vocabulary.tokenizer() {
            Some(tokenizer) => {
                let text = decode(tokenizer, &ids, false);
                text.map_or_else(|error| error.to_string(), |text| format!("{text:?}"))
            }
            None => format!("{ids:?}"),
        }
    }
}

/// Returns "; found X" if the value differs, otherwise an empty string.
fn found_suffix(differs: bool, found: impl FnOnce() -> String) -> String {
    if differs { format!("; found {}", found()) } else { String::new() }
}

/// Keys of `config.json` that determine the shapes of all tensors.
fn shapes(config: &Gpt2Config) -> [(&'static str, usize); 6] {
    [
        ("n_layer", config.n_layer),
        ("n_head", config.n_head),
        ("n_embd", config.n_embd),
        ("n_inner", config.inner_width()),
        ("n_positions", config.n_positions),
        ("vocab_size", config.vocab_size),
    ]
}

fn logit(row: &[f32], id: u32) -> f64 {
    row.get(id as usize).map_or(f64::NAN, |logit| f64::from(*logit))
}

/// Returns the most probable token.
fn best(row: &[f32]) -> u32 {
    u32::try_from(first_best(row.iter().copied().map(f64::from))).unwrap_or_default()
}
