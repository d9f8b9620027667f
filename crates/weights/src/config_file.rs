//! The configuration beside the weights: Hugging Face's `config.json`, OpenAI's `hparams.json`, or none at all.

use std::path::{Path, PathBuf};

use candle_gpt2::{ConfigError, Gpt2Config};
use serde_json::{Value, json};

use crate::files::Files;
use crate::naming::head_shown_by;
use crate::source::Format;
use crate::stored::StoredTensor;
use crate::{WeightsError, mistaken_file};

/// Defaults for generating.
pub(crate) const GENERATION_CONFIG: &str = "generation_config.json";
/// Largest configuration that is read: real ones have a few kilobytes.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Width of a head in every published GPT-2: what is assumed if nothing tells the number of heads.
const USUAL_HEAD_DIM: usize = 64;

/// A configuration, and where it comes from.
pub(crate) struct FoundConfig {
    pub(crate) config: Gpt2Config,
    /// The name of its file, or of its place in the weights.
    pub(crate) name: &'static str,
    /// Where it comes from, in words.
    pub(crate) rule: String,
    /// Whether nothing tells the number of heads, and the usual one is taken.
    pub(crate) has_guessed_heads: bool,
    /// The text of a `config.json`.
    pub(crate) text: Option<String>,
}

/// Reads the configuration of a folder. Where there is none, the tensors of the book's models give all sizes but the number of
/// heads, which is `n_head`, or guessed.
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
        return Ok(found(config, Some(text), ("config.json", "the configuration is config.json")));
    }
    let path = folder.join("hparams.json");
    if files.exists(&path) {
        let (config, _) = parse(files, &path, from_hparams)?;
        return Ok(found(config, None, ("hparams.json", "the configuration is OpenAI's hparams.json")));
    }
    let Some(sizes) = SizesOfTheBook::of(tensors) else {
        let name = if format == Format::TensorFlow { "hparams.json" } else { "config.json" };
        return Err(WeightsError::NoConfig { folder: files.told(folder), name });
    };
    let config = sizes.config(folder, n_head)?;
    let sizes = "there is no configuration: sizes are those of the tensors";
    let rule = match n_head {
        Some(n_head) => format!("{sizes}, and the {n_head} heads were named"),
        None => format!("{sizes}, heads are assumed {USUAL_HEAD_DIM} wide"),
    };
    Ok(FoundConfig { config, name: "their shapes", rule, has_guessed_heads: n_head.is_none(), text: None })
}

/// The text of `generation_config.json`, if there is such a file, and its path.
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

/// A configuration, and its text.
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

/// The text of a JSON file of settings, unless it is something else.
fn settings_text(files: &Files, path: &Path) -> Result<String, WeightsError> {
    let bytes = files.read_small(path, MAX_CONFIG_BYTES)?;
    if let Some(what) = mistaken_file::something_else(&bytes, "configuration") {
        return Err(WeightsError::NotWeights { path: path.to_owned(), what });
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// OpenAI's `hparams.json` has `n_vocab`, `n_ctx`, `n_embd`, `n_head` and `n_layer`.
fn from_hparams(text: &str) -> Result<Gpt2Config, ConfigError> {
    // What is no object is told by the configuration's own reader.
    let Ok(Value::Object(mut hparams)) = serde_json::from_str(text) else {
        return Gpt2Config::from_json(text);
    };
    let vocabulary = hparams.remove("n_vocab").unwrap_or_default();
    // The last token is the end of a text.
    if let Some(last) = vocabulary.as_u64().and_then(|size| size.checked_sub(1)) {
        hparams.insert("bos_token_id".into(), last.into());
        hparams.insert("eos_token_id".into(), last.into());
    }
    hparams.insert("vocab_size".into(), vocabulary);
    Gpt2Config::from_json(&Value::Object(hparams).to_string())
}

/// The sizes of a model of the book, whose files have no configuration.
struct SizesOfTheBook {
    vocab_size: usize,
    n_positions: usize,
    n_embd: usize,
    n_layer: usize,
    n_inner: usize,
}

impl SizesOfTheBook {
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

    /// The configuration with `n_head` heads, or with heads of the usual width.
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
