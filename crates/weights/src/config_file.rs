//! Configuration next to the weights: `config.json`, OpenAI's `hparams.json`, or none.

use std::path::{Path, PathBuf};

use candle_gpt2::{ConfigError, Gpt2Config};
use serde_json::{Value, json};

use crate::files::Files;
use crate::naming::head_shown_by;
use crate::source::Format;
use crate::stored::StoredTensor;
use crate::{WeightsError, mistaken_file};

/// File with the generation defaults.
pub(crate) const GENERATION_CONFIG: &str = "generation_config.json";
/// Maximum size of a configuration file; real ones are a few kilobytes.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Head dimension of every published GPT-2, assumed if the number of heads is not recorded.
const USUAL_HEAD_DIM: usize = 64;

/// Configuration and its origin.
pub(crate) struct FoundConfig {
    pub(crate) config: Gpt2Config,
    /// Configuration file name, or a description of where the weights file stores the configuration.
    pub(crate) name: &'static str,
    /// Description of the origin.
    pub(crate) rule: String,
    /// Whether the number of heads is missing and was inferred from the usual head dimension.
    pub(crate) has_guessed_heads: bool,
    /// Text of `config.json`.
    pub(crate) text: Option<String>,
}

/// Reads the configuration from a folder.
///
/// Models from "Build a Large Language Model (From Scratch)" have no configuration file. Their tensor shapes
/// determine all sizes except the number of heads, which is `n_head` or guessed.
pub(crate) fn read(
    files: &Files,
    folder: &Path,
    (format, tensors): (Format, &[StoredTensor]),
    n_head: Option<usize>,
) -> Result<FoundConfig, WeightsError> {
    let found = |config, text, (name, rule): (&'static str, &str)| FoundConfig {
        config,
        name,
        rule: rule.to_owned(),
        has_guessed_heads: false,
        text,
    };
    let path = folder.join("config.json");
    if files.exists(&path) {
        let of_tensors = |text: &str| match Gpt2Config::named_head(text)? {
            Some(_) => Gpt2Config::from_json(text),
            None => Gpt2Config::from_json_with_head(text, head_shown_by(tensors)),
        };
        let (config, text) = parse(files, &path, of_tensors)?;
        return Ok(found(config, Some(text), ("config.json", "the configuration comes from config.json")));
    }
    let path = folder.join("hparams.json");
    if files.exists(&path) {
        let (config, _) = parse(files, &path, from_hparams)?;
        return Ok(found(
            config,
            None,
            ("hparams.json", "the configuration comes from OpenAI's hparams.json"),
        ));
    }
    let Some(sizes) = ScratchBookSizes::of(tensors) else {
        let name = if format == Format::TensorFlow { "hparams.json" } else { "config.json" };
        return Err(WeightsError::NoConfig { folder: files.display_name(folder), name });
    };
    let config = sizes.config(folder, n_head)?;
    let sizes = "no configuration file: the sizes come from the tensors";
    let rule = match n_head {
        Some(n_head) => format!("{sizes}, and the number of heads, {n_head}, was specified"),
        None => format!("{sizes}, and the head dimension is assumed to be {USUAL_HEAD_DIM}"),
    };
    Ok(FoundConfig {
        config,
        name: "the sizes inferred from their shapes",
        rule,
        has_guessed_heads: n_head.is_none(),
        text: None,
    })
}

/// Returns the path and text of `generation_config.json`, if it exists.
pub(crate) fn generation_config(
    files: &Files,
    folder: &Path,
) -> Result<Option<(PathBuf, String)>, WeightsError> {
    let path = folder.join(GENERATION_CONFIG);
    if !files.exists(&path) {
        return Ok(None);
    }
    let text = settings_text(files, &path)?;
    Ok(Some((path, text)))
}

/// Parses a configuration file, and returns the configuration and the text.
fn parse(
    files: &Files,
    path: &Path,
    read: impl Fn(&str) -> Result<Gpt2Config, ConfigError>,
) -> Result<(Gpt2Config, String), WeightsError> {
    let text = settings_text(files, path)?;
    match read(&text) {
        Ok(config) => Ok((config, text)),
        Err(error) => Err(WeightsError::Config { path: path.to_owned(), error }),
    }
}

/// Reads the text of a JSON settings file, and rejects anything else.
fn settings_text(files: &Files, path: &Path) -> Result<String, WeightsError> {
    let bytes = files.read_small(path, MAX_CONFIG_BYTES)?;
    if let Some(what) = mistaken_file::misidentified(&bytes, "configuration") {
        return Err(WeightsError::NotWeights { path: path.to_owned(), what });
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Parses OpenAI's `hparams.json`: `n_vocab`, `n_ctx`, `n_embd`, `n_head` and `n_layer`.
fn from_hparams(text: &str) -> Result<Gpt2Config, ConfigError> {
    // `Gpt2Config::from_json` reports the error if the text is not a JSON object.
    let Ok(Value::Object(mut hparams)) = serde_json::from_str(text) else {
        return Gpt2Config::from_json(text);
    };
    let vocabulary = hparams.remove("n_vocab").unwrap_or_default();
    // The last token is the end-of-text token.
    if let Some(last) = vocabulary.as_u64().and_then(|size| size.checked_sub(1)) {
        hparams.insert("bos_token_id".into(), last.into());
        hparams.insert("eos_token_id".into(), last.into());
    }
    hparams.insert("vocab_size".into(), vocabulary);
    Gpt2Config::from_json(&Value::Object(hparams).to_string())
}

/// Sizes of a model from "Build a Large Language Model (From Scratch)", inferred from its tensors.
struct ScratchBookSizes {
    vocab_size: usize,
    n_positions: usize,
    n_embd: usize,
    n_layer: usize,
    n_inner: usize,
}

impl ScratchBookSizes {
    fn of(tensors: &[StoredTensor]) -> Option<Self> {
        let shape = |name: &str| {
            tensors.iter().find(|tensor| tensor.name.ends_with(name)).map(|tensor| tensor.shape.as_slice())
        };
        let [vocab_size, n_embd] = *shape("tok_emb.weight")? else { return None };
        let [n_positions, _] = *shape("pos_emb.weight")? else { return None };
        let n_layer = tensors.iter().filter(|tensor| tensor.name.ends_with(".norm1.scale")).count();
        let n_inner = *shape("trf_blocks.0.ff.layers.0.weight")?.first()?;
        Some(Self { vocab_size, n_positions, n_embd, n_layer, n_inner })
    }

    /// Builds the configuration with `n_head` heads, or with heads of the usual dimension if `None`.
    fn config(&self, folder: &Path, n_head: Option<usize>) -> Result<Gpt2Config, WeightsError> {
        let Self { vocab_size, n_positions, n_embd, n_layer, n_inner } = *self;
        if n_head.is_none() && !n_embd.is_multiple_of(USUAL_HEAD_DIM) {
            return Err(WeightsError::UnknownHeads { folder: folder.to_owned(), n_embd });
        }
        let json = json!({
            "vocab_size": vocab_size, "n_positions": n_positions, "n_embd": n_embd, "n_layer": n_layer,
            "n_head": n_head.unwrap_or(n_embd / USUAL_HEAD_DIM), "n_inner": n_inner, "tie_word_embeddings": false,
        });
        Gpt2Config::from_json(&json.to_string())
            .map_err(|error| WeightsError::Config { path: folder.to_owned(), error })
    }
}
