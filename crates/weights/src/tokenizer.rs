//! Checkpoint tokenizers, in one of four formats.
//!
//! - `tokenizer.json` of the tokenizers library.
//! - GPT-2's original vocabulary and merges, with the names of Hugging Face (`vocab.json`, `merges.txt`) or
//!   OpenAI (`encoder.json`, `vocab.bpe`).
//! - A SentencePiece model, such as `spiece.model`.
//! - `vocab.txt` of transformers' `BertTokenizer`.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer, Vocab};
use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, Tokenizer};

use crate::byte_pairs::byte_of;
use crate::files::Files;
use crate::gguf_keys::{CONTROL, USER_DEFINED};
use crate::library::{encode_whole, encode_whole_with_places, without_panic};
use crate::{
    TextEncoder, WeightsError, cleaning, mistaken_file, sentence_piece, sentence_piece_file,
    tokenizer_limits, vocabulary_file,
};

/// GPT-2's end-of-text token.
///
/// `vocab.json` does not mark it as special. [`train_tokenizer`] puts it first.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// Maximum size of a tokenizer file; GPT-2's is 1.4 MB.
pub(crate) const MAX_TOKENIZER_BYTES: u64 = 256 << 20;
/// Number of words that the library caches per thread; each takes up to 10 kB.
const CACHED_WORDS: usize = 1024;
/// Settings file that accompanies a tokenizer file.
pub(crate) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// File names of vocabularies and their merges.
const PAIRS: [(&str, &str); 2] = [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")];

/// Tokenizer file in the format of the tokenizers library.
pub(crate) const TOKENIZER: &str = "tokenizer.json";
/// SentencePiece models, as named by transformers.
pub(crate) const MODELS: [&str; 2] = ["spiece.model", "tokenizer.model"];
/// Vocabulary of transformers' `BertTokenizer`.
pub(crate) const VOCABULARY: &str = "vocab.txt";
/// Settings that name special tokens in transformers.
const SPECIAL_NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// Default special tokens of a `BertTokenizer`.
const BERT_SPECIAL: [(&str, &str); 5] = [
    ("unk_token", vocabulary_file::UNKNOWN),
    ("sep_token", "[SEP]"),
    ("pad_token", "[PAD]"),
    ("cls_token", "[CLS]"),
    ("mask_token", "[MASK]"),
];
/// transformers classes that preprocess texts before applying `vocab.txt` or a SentencePiece model.
const UNSUPPORTED_CLASSES: [(&str, &str); 5] = [
    ("BertJapaneseTokenizer", "a Japanese word segmenter"),
    ("CpmTokenizer", "a Chinese word segmenter"),
    ("CpmTokenizerFast", "a Chinese word segmenter"),
    ("XLNetTokenizer", "special rules for spaces, quotes and accents"),
    ("AlbertTokenizer", "special rules for spaces, quotes and accents"),
];

/// Loads a tokenizer from a file or a folder.
///
/// Supports `tokenizer.json`, a vocabulary with merges, a SentencePiece model and `vocab.txt`. If a folder
/// contains several, the first of these wins. The truncation, padding and dropout settings of
/// `tokenizer.json` are ignored: prompts are never truncated, and tokenization is deterministic.
///
/// Rejects files that could turn short text into very long text:
/// - normalizers, pre-tokenizers and decoders that turn one byte into more than 32
/// - post-processors that add more than 16 ids or repeat the text
/// - tokens of more than 1,024 characters
/// - a `max_input_chars_per_word` above 1,024
///
/// ```
/// use candle_gpt2_weights::{END_OF_TEXT, encode, load_tokenizer};
///
/// let file = tempfile::NamedTempFile::new()?;
/// std::fs::write(file.path(), candle_gpt2_stories::TOKENIZER)?;
/// let tokenizer = load_tokenizer(file.path())?;
/// assert_eq!(encode(&tokenizer, END_OF_TEXT)?, [0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the tokenizer is missing or unusable.
pub fn load_tokenizer(path: impl AsRef<Path>) -> Result<Tokenizer, WeightsError> {
    load(&Files::Disk, path.as_ref())
}

/// Loads a tokenizer like [`load_tokenizer`], from any source of files.
pub(crate) fn load(files: &Files, path: &Path) -> Result<Tokenizer, WeightsError> {
    let mut tokenizer = if files.is_file(path) {
        from_file(files, path)?
    } else if let Some(file) = vocabulary_of(files, path)? {
        from_file(files, &file)?
    } else if let Some((vocabulary, merges)) = pair_of_files(files, path) {
        from_vocabulary_and_merges(files, &vocabulary, &merges)?
    } else if files.is_folder(path) {
        return Err(WeightsError::NoTokenizer {
            folder: files.display_name(path),
            found: likely_name(files, path),
        });
    } else {
        let error = match files.exists(path) {
            true => "not a regular file; save the content to a file and pass that file",
            false => "no such file or folder",
        };
        return Err(WeightsError::Tokenizer { path: path.to_owned(), error: error.into() });
    };
    let failed = |error: String| WeightsError::Tokenizer { path: path.to_owned(), error };
    tokenizer_limits::check_built(&tokenizer).map_err(failed)?;
    tokenizer.with_truncation(None).map_err(|error| failed(error.to_string()))?;
    tokenizer.with_padding(None);
    if let ModelWrapper::BPE(model) = tokenizer.get_model() {
        let mut model = model.clone();
        model.dropout = None;
        model.resize_cache(CACHED_WORDS);
        tokenizer.with_model(model);
    }
    Ok(tokenizer)
}

/// Finds the vocabulary and merges files in a folder.
fn pair_of_files(files: &Files, folder: &Path) -> Option<(PathBuf, PathBuf)> {
    let pairs = PAIRS.map(|(vocabulary, merges)| (folder.join(vocabulary), folder.join(merges)));
    pairs.into_iter().find(|(first, second)| files.is_file(first) && files.is_file(second))
}

/// Finds the tokenizer in a folder, if it is a single file.
///
/// `tokenizer.json` comes first. Otherwise, if the folder has no vocabulary with merges, the usual
/// SentencePiece names, `vocab.txt` and a single `*.model` file are tried in this order.
///
/// # Errors
/// If several files end in `.model` and none has a usual name.
pub(crate) fn vocabulary_of(files: &Files, folder: &Path) -> Result<Option<PathBuf>, WeightsError> {
    let json = folder.join(TOKENIZER);
    if files.is_file(&json) {
        return Ok(Some(json));
    }
    if !files.is_folder(folder) || pair_of_files(files, folder).is_some() {
        return Ok(None);
    }
    let usual = MODELS.into_iter().chain([VOCABULARY]).map(|name| folder.join(name));
    if let Some(found) = usual.into_iter().find(|path| files.is_file(path)) {
        return Ok(Some(found));
    }
    let mut names = files.names(folder)?;
    names.retain(|name| name.ends_with(".model"));
    names.sort_unstable();
    match names.as_slice() {
        [] => Ok(None),
        [name] => Ok(Some(folder.join(name))),
        names => Err(WeightsError::Tokenizer {
            path: folder.to_owned(),
            error: format!(
                "several files may be the tokenizer: {}; select one with --tokenizer, or rename it to {}",
                names.join(", "),
                MODELS[0]
            ),
        }),
    }
}

/// Finds a file in a folder that may be a tokenizer.
///
/// Names like `my.tokenizer.json` come first, then files in unsupported formats.
fn likely_name(files: &Files, folder: &Path) -> Option<String> {
    let is_likely =
        |name: &&String| name.contains("tokenizer") && name.ends_with(".json") && *name != TOKENIZER_CONFIG;
    let names = files.names(folder).ok()?;
    let other =
        |name: &&String| name.as_str() == "meta.pkl" || (name.starts_with("vocab") && name.ends_with(".txt"));
    names.iter().filter(is_likely).min().or_else(|| names.iter().filter(other).min()).cloned()
}

/// Encodes text, including the special tokens that the tokenizer adds.
///
/// See [`load_tokenizer`] for an example. [`TextEncoder`] is faster for many texts.
///
/// # Errors
/// If the tokenizer cannot encode the text, or encoding would take too long.
pub fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, WeightsError> {
    encode_with(tokenizer, text, true)
}

/// Encodes part of a text, without special tokens around it. See [`TextEncoder`] for an example.
///
/// # Errors
/// Fails like [`encode`].
pub fn encode_piece(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, WeightsError> {
    encode_with(tokenizer, text, false)
}

/// Encodes text like [`encode`], and returns the character range of each token.
///
/// Ranges start at 0 and exclude the end. They are the offsets of transformers, without the space before a
/// word if the tokenizer omits it. A token for part of a character gets the whole character. Tokens added
/// around the text get an empty range at 0.
///
/// ```
/// use candle_gpt2_weights::{Tokenizer, encode_with_places};
///
/// let tokenizer = Tokenizer::from_bytes(candle_gpt2_stories::TOKENIZER)?;
/// let (ids, places) = encode_with_places(&tokenizer, "noble king")?;
/// assert_eq!(ids.len(), places.len());
/// assert_eq!(places.last().map(|place| place.end), Some(10));
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
///
/// # Errors
/// Fails like [`encode`].
pub fn encode_with_places(
    tokenizer: &Tokenizer,
    text: &str,
) -> Result<(Vec<u32>, Vec<Range<usize>>), WeightsError> {
    match TextEncoder::is_needed(tokenizer) {
        true => TextEncoder::new(tokenizer).encode_with_places(text),
        false => encode_whole_with_places(tokenizer, text),
    }
}

fn encode_with(tokenizer: &Tokenizer, text: &str, special_tokens: bool) -> Result<Vec<u32>, WeightsError> {
    /// Maximum text size for a single library call, which needs up to 700 bytes of memory per byte.
    const MAX_WHOLE_BYTES: usize = 1 << 16;
    if text.len() > MAX_WHOLE_BYTES || TextEncoder::is_needed(tokenizer) {
        return TextEncoder::new(tokenizer).encode(text, special_tokens);
    }
    encode_whole(tokenizer, text, special_tokens)
}

/// Returns the bytes that a token adds to the text, possibly only part of a character.
///
/// `None` if the token does not exist. Added tokens yield their literal text. SentencePiece pieces contain
/// spaces in place of their placeholder. Tokens of other vocabularies that are not byte-level are returned
/// as spelled in the vocabulary.
///
/// ```
/// use candle_gpt2_weights::{Tokenizer, encode, token_bytes};
///
/// let tokenizer = Tokenizer::from_bytes(candle_gpt2_stories::TOKENIZER)?;
/// let bytes: Vec<u8> = encode(&tokenizer, "é")?.into_iter().filter_map(|id| token_bytes(&tokenizer, id)).flatten().collect();
/// assert_eq!(bytes, "é".as_bytes());
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
pub fn token_bytes(tokenizer: &Tokenizer, id: u32) -> Option<Vec<u8>> {
    let written = tokenizer.id_to_token(id)?;
    if let Some(bytes) = sentence_piece::piece_bytes(tokenizer.get_decoder(), &written) {
        return Some(bytes);
    }
    let is_literal = tokenizer.get_added_vocabulary().get_added_tokens_decoder().contains_key(&id)
        || !tokenizer.get_decoder().is_none_or(is_byte_level);
    let bytes = || written.chars().map(byte_of).collect::<Option<Vec<u8>>>();
    Some((!is_literal).then(bytes).flatten().unwrap_or_else(|| written.into_bytes()))
}

/// Whether the decoder interprets each character of a token as a byte.
fn is_byte_level(decoder: &DecoderWrapper) -> bool {
    match decoder {
        DecoderWrapper::ByteLevel(_) => true,
        DecoderWrapper::Sequence(parts) => parts.get_decoders().iter().any(is_byte_level),
        _ => false,
    }
}

/// Trains a GPT-2-style byte-level BPE of at most `vocab_size` tokens on `texts`.
///
/// The vocabulary contains [`END_OF_TEXT`], then the 256 bytes, then merges. It is smaller than
/// `vocab_size` if the texts contain no more pairs that occur twice.
///
/// ```
/// use candle_gpt2_weights::{END_OF_TEXT, encode, train_tokenizer};
///
/// let texts = ["to be or not to be", "to be is to do"];
/// let tokenizer = train_tokenizer(texts.into_iter().map(Into::into), 260)?;
/// assert_eq!(tokenizer.get_vocab_size(true), 260, "an end token, 256 bytes and three merges");
/// assert!(encode(&tokenizer, "to be")?.len() < 5);
/// # Ok::<(), candle_gpt2_weights::WeightsError>(())
/// ```
///
/// # Errors
/// If `vocab_size` is too small for the bytes and the special token, or training fails.
pub fn train_tokenizer<'a>(
    texts: impl Iterator<Item = Cow<'a, str>> + Send,
    vocab_size: usize,
) -> Result<Tokenizer, WeightsError> {
    const MIN_TOKENS: usize = 257;
    let failed = |error| WeightsError::TrainTokenizer { error };
    if vocab_size < MIN_TOKENS {
        return Err(failed(format!(
            "a vocabulary of {vocab_size} tokens is too small for the 256 bytes and {END_OF_TEXT}; use at least {MIN_TOKENS}"
        )));
    }
    let trainer = BpeTrainer::builder()
        .vocab_size(vocab_size)
        .min_frequency(2)
        .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .show_progress(false)
        .build();
    let mut tokenizer = byte_level(BPE::default(), false);
    tokenizer.train(&mut TrainerWrapper::from(trainer), texts).map_err(|error| failed(error.to_string()))?;
    Ok(tokenizer)
}

/// Reads a tokenizer file.
fn read(files: &Files, path: &Path) -> Result<Vec<u8>, WeightsError> {
    let bytes = files.read_small(path, MAX_TOKENIZER_BYTES)?;
    match mistaken_file::misidentified(&bytes, "tokenizer") {
        Some(error) => Err(WeightsError::Tokenizer { path: path.to_owned(), error }),
        None => Ok(bytes),
    }
}

fn from_json(files: &Files, path: &Path) -> Result<Tokenizer, WeightsError> {
    let failed = |error| WeightsError::Tokenizer { path: path.to_owned(), error };
    let bytes = read(files, path)?;
    let text = str::from_utf8(strip_mark(&bytes)).map_err(|error| failed(error.to_string()))?;
    parse(text).map_err(failed)
}

/// Parses the text of a `tokenizer.json`.
fn parse(text: &str) -> Result<Tokenizer, String> {
    tokenizer_limits::check(text)?;
    // `Tokenizer::from_bytes` is generic and would compile the parser into this crate a second time.
    without_panic(|| text.parse::<Tokenizer>())?.map_err(|error| error.to_string())
}

/// Returns the usual file name for a tokenizer file's format.
///
/// The extension determines the format, or the content if the extension is ambiguous.
pub(crate) fn file_name_of(files: &Files, path: &Path) -> Result<&'static str, WeightsError> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let usual = MODELS.into_iter().find(|usual| *usual == name);
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("model") => Ok(usual.unwrap_or(MODELS[0])),
        Some("txt") if name != VOCABULARY && is_json_object(&read(files, path)?) => Ok(TOKENIZER),
        Some("txt") => Ok(VOCABULARY),
        Some("json") => Ok(TOKENIZER),
        _ if sentence_piece_file::is_model(&read(files, path)?) => Ok(MODELS[0]),
        _ => Ok(TOKENIZER),
    }
}

/// Whether a file is a JSON object, as opposed to a token list whose first token may be a brace.
fn is_json_object(bytes: &[u8]) -> bool {
    let inside = strip_mark(bytes).trim_ascii_start().strip_prefix(b"{");
    inside.is_some_and(|inside| inside.trim_ascii_start().starts_with(b"\""))
}

/// Loads a tokenizer from a single file.
fn from_file(files: &Files, path: &Path) -> Result<Tokenizer, WeightsError> {
    match file_name_of(files, path)? {
        TOKENIZER => from_json(files, path),
        VOCABULARY => from_vocabulary(files, path),
        _ => from_model(files, path),
    }
}

/// Loads a SentencePiece model, and the special tokens from the files next to it.
fn from_model(files: &Files, path: &Path) -> Result<Tokenizer, WeightsError> {
    let failed = |error| WeightsError::Tokenizer { path: path.to_owned(), error };
    let settings = TokenizerSettings::read(files, files.folder_of(path))?;
    settings.check_class().map_err(failed)?;
    let is_cleaned = settings.class() == cleaning::CLASS;
    let json = sentence_piece_file::tokenizer_json(&read(files, path)?, is_cleaned).map_err(failed)?;
    let mut tokenizer = parse(&json).map_err(failed)?;
    let defaults: &[_] = if is_cleaned { &cleaning::SPECIAL } else { &[] };
    settings.add_to(&mut tokenizer, defaults).map_err(failed)?;
    Ok(tokenizer)
}

/// Loads a `vocab.txt`, and the settings and special tokens from the files next to it.
fn from_vocabulary(files: &Files, path: &Path) -> Result<Tokenizer, WeightsError> {
    let failed = |error| WeightsError::Tokenizer { path: path.to_owned(), error };
    let settings = TokenizerSettings::read(files, files.folder_of(path))?;
    settings.check_class().map_err(failed)?;
    let unknown = settings.special("unk_token").unwrap_or_else(|| vocabulary_file::UNKNOWN.to_owned());
    let json =
        vocabulary_file::tokenizer_json(&read(files, path)?, &settings.config, &unknown).map_err(failed)?;
    let mut tokenizer = parse(&json).map_err(failed)?;
    settings.add_to(&mut tokenizer, &BERT_SPECIAL).map_err(failed)?;
    Ok(tokenizer)
}

/// Settings in the files next to a tokenizer file; null for missing files.
struct TokenizerSettings {
    config: Value,
    special: Value,
    added: Value,
}

impl TokenizerSettings {
    fn read(files: &Files, folder: &Path) -> Result<Self, WeightsError> {
        let read_json = |name: &str| -> Result<Value, WeightsError> {
            let path = folder.join(name);
            if !files.is_file(&path) {
                return Ok(Value::Null);
            }
            let bytes = read(files, &path)?;
            serde_json::from_slice(strip_mark(&bytes))
                .map_err(|error| WeightsError::Tokenizer { path, error: error.to_string() })
        };
        Ok(Self {
            config: read_json(TOKENIZER_CONFIG)?,
            special: read_json("special_tokens_map.json")?,
            added: read_json("added_tokens.json")?,
        })
    }

    /// Returns the text of a special token, such as `eos_token`.
    fn special(&self, name: &str) -> Option<String> {
        content(&self.special[name]).or_else(|| content(&self.config[name]))
    }

    /// Adds the tokens in `added_tokens.json`; their ids must follow the vocabulary's ids.
    fn add_plain(&self, tokenizer: &mut Tokenizer) -> Result<(), String> {
        let mut in_order: Vec<(Option<u64>, &String)> =
            self.added.as_object().into_iter().flatten().map(|(token, id)| (id.as_u64(), token)).collect();
        in_order.sort();
        for (id, token) in in_order {
            let result = tokenizer.add_tokens([AddedToken::from(token.as_str(), false)]);
            result.map_err(|error| error.to_string())?;
            if tokenizer.token_to_id(token).map(u64::from) != id {
                return Err(format!("added_tokens.json: the id of `{token}` does not follow the other ids"));
            }
        }
        Ok(())
    }

    /// Returns the tokens in `additional_special_tokens`.
    fn additional(&self) -> impl Iterator<Item = String> {
        [&self.special, &self.config]
            .into_iter()
            .flat_map(|file| file["additional_special_tokens"].as_array().into_iter().flatten())
            .filter_map(content)
    }

    /// Returns the transformers class; empty if unspecified.
    fn class(&self) -> &str {
        self.config["tokenizer_class"].as_str().unwrap_or_default()
    }

    /// Rejects transformers classes that produce different ids.
    fn check_class(&self) -> Result<(), String> {
        let class = self.class();
        let known = UNSUPPORTED_CLASSES.iter().find(|(name, _)| *name == class);
        known.map_or(Ok(()), |(name, part)| {
            Err(format!(
                "tokenizer_config.json: tokenizer_class `{name}` needs {part}, which is unsupported; tokenize with transformers and pass the ids"
            ))
        })
    }

    /// Adds the tokens that the files specify, and each of `defaults` that is in the vocabulary.
    fn add_to(&self, tokenizer: &mut Tokenizer, defaults: &[(&str, &str)]) -> Result<(), String> {
        self.add_plain(tokenizer)?;
        let failed = |error: tokenizers::Error| error.to_string();
        let mut listed: Vec<(u32, AddedToken)> = Vec::new();
        for (key, token) in self.config["added_tokens_decoder"].as_object().into_iter().flatten() {
            let field = || format!("tokenizer_config.json: added_tokens_decoder.{key}");
            let id = key.parse().map_err(|_| format!("{} is not an id", field()))?;
            let text = content(token).ok_or_else(|| format!("{} has no content", field()))?;
            let is = |option: &str| token[option] == true;
            let added = AddedToken::from(text, is("special"))
                .single_word(is("single_word"))
                .lstrip(is("lstrip"))
                .rstrip(is("rstrip"))
                .normalized(is("normalized"));
            listed.push((id, added));
        }
        listed.sort_by_key(|(id, _)| *id);
        for (id, token) in listed {
            let text = token.content.clone();
            match token.special {
                true => tokenizer.add_special_tokens([token]).map_err(failed)?,
                false => tokenizer.add_tokens([token]).map_err(failed)?,
            };
            if tokenizer.token_to_id(&text) != Some(id) {
                return Err(format!(
                    "tokenizer_config.json: added_tokens_decoder.{id}: `{text}` has a different id in the vocabulary, or its id \
                     does not follow the other ids; use both files from the same source"
                ));
            }
        }
        let mut special: Vec<String> = Vec::new();
        for name in SPECIAL_NAMES {
            let default = defaults.iter().find(|(known, _)| *known == name).map(|(_, token)| *token);
            let default = default.filter(|token| tokenizer.token_to_id(token).is_some());
            special.extend(self.special(name).or_else(|| default.map(str::to_owned)));
        }
        special.extend(self.additional());
        // Tokens with their own options keep them.
        special.retain(|token| {
            !tokenizer
                .get_added_tokens_decoder()
                .values()
                .any(|known| known.special && known.content == *token)
        });
        let special = special.into_iter().map(|token| AddedToken::from(token, true));
        tokenizer.add_special_tokens(special).map_err(failed)?;
        let around = |flag: &str, name: &str| {
            let token = self.special(name).filter(|_| self.config[flag] == true)?;
            tokenizer.token_to_id(&token)
        };
        let around = (around("add_bos_token", "bos_token"), around("add_eos_token", "eos_token"));
        add_around_texts(tokenizer, around)
    }
}

/// Returns the text of a token in a settings file: a string, or an object's `content`.
pub(crate) fn content(token: &Value) -> Option<String> {
    token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned)
}

/// Strips a byte order mark.
pub(crate) fn strip_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes)
}

/// Loads a vocabulary and merges, and the settings and special tokens from the files next to them.
///
/// Like transformers' `GPT2Tokenizer`, it reads `added_tokens.json`, `special_tokens_map.json` and
/// `tokenizer_config.json`.
fn from_vocabulary_and_merges(
    files: &Files,
    vocabulary: &Path,
    merges: &Path,
) -> Result<Tokenizer, WeightsError> {
    let folder = vocabulary.parent().unwrap_or(vocabulary);
    let failed = |error: String| WeightsError::Tokenizer { path: folder.to_owned(), error };
    let bpe = byte_pairs(&read(files, vocabulary)?, &read(files, merges)?)
        .map_err(|error| failed(format!("{} and {}: {error}", file_name(vocabulary), file_name(merges))))?;
    let settings = TokenizerSettings::read(files, folder)?;
    let mut tokenizer = byte_level(bpe, settings.config["add_prefix_space"] == Value::Bool(true));
    settings.add_plain(&mut tokenizer).map_err(failed)?;
    let bos = settings.special("bos_token").unwrap_or_else(|| END_OF_TEXT.to_owned());
    let mut special_tokens =
        vec![bos.clone(), settings.special("eos_token").unwrap_or_else(|| END_OF_TEXT.to_owned())];
    special_tokens.extend(settings.special("pad_token"));
    special_tokens.extend(settings.additional());
    let special_tokens = special_tokens.into_iter().map(|token| AddedToken::from(token, true));
    tokenizer.add_special_tokens(special_tokens).map_err(|error| failed(error.to_string()))?;
    let bos = tokenizer.token_to_id(&bos).filter(|_| settings.config["add_bos_token"] == Value::Bool(true));
    add_around_texts(&mut tokenizer, (bos, None)).map_err(failed)?;
    Ok(tokenizer)
}

/// Returns the text of token `id`, unless it is a special token.
///
/// A configuration that ends texts with an ordinary token is usually wrong.
///
/// ```
/// use candle_gpt2_weights::{Tokenizer, encode, ordinary_token};
///
/// let tokenizer = Tokenizer::from_bytes(candle_gpt2_stories::TOKENIZER)?;
/// assert_eq!(ordinary_token(&tokenizer, 0), None, "the end token is special");
/// assert_eq!(ordinary_token(&tokenizer, encode(&tokenizer, "K")?[0]).as_deref(), Some("K"));
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
pub fn ordinary_token(tokenizer: &Tokenizer, id: u32) -> Option<String> {
    let token = tokenizer.id_to_token(id)?;
    let is_marked = tokenizer.get_added_tokens_decoder().get(&id).is_some_and(|token| token.special);
    // Tokens spelled like `<|endoftext|>` or `</s>` count as special even if no file marks them so.
    let looks_special = token.len() > 2 && token.starts_with('<') && token.ends_with('>');
    let text = || String::from_utf8_lossy(&token_bytes(tokenizer, id).unwrap_or_default()).into_owned();
    (!is_marked && !looks_special).then(text)
}

/// Returns the token with the largest id, if that id is at least `rows`.
///
/// ```
/// use candle_gpt2_weights::{Tokenizer, largest_foreign_token};
///
/// let tokenizer = Tokenizer::from_bytes(candle_gpt2_stories::TOKENIZER)?;
/// assert_eq!(largest_foreign_token(&tokenizer, 4096), None);
/// assert_eq!(largest_foreign_token(&tokenizer, 4000).map(|(id, _)| id), Some(4095));
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
pub fn largest_foreign_token(tokenizer: &Tokenizer, rows: usize) -> Option<(u32, String)> {
    let (token, id) = tokenizer.get_vocab(true).into_iter().max_by_key(|(_, id)| *id)?;
    usize::try_from(id).is_ok_and(|id| id >= rows).then_some((id, token))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Configures a tokenizer to add tokens before and after every text.
fn add_around_texts(
    tokenizer: &mut Tokenizer,
    (before, after): (Option<u32>, Option<u32>),
) -> Result<(), String> {
    if before.is_none() && after.is_none() {
        return Ok(());
    }
    let named = |id: Option<u32>| {
        let token = |id| Some((tokenizer.id_to_token(id)?, id));
        id.map(|id| token(id).ok_or_else(|| format!("the vocabulary has no token {id}"))).transpose()
    };
    let (before, after) = (named(before)?, named(after)?);
    let text = |named: &Option<(String, u32)>| named.as_ref().map(|(token, _)| token.clone());
    let parts = text(&before).into_iter().chain(["$A".to_owned()]).chain(text(&after)).collect::<Vec<_>>();
    let mut tokens: Vec<(String, u32)> = before.into_iter().chain(after).collect();
    tokens.dedup();
    let mut template = TemplateProcessing::builder();
    let template = template.try_single(parts)?.special_tokens(tokens).build();
    tokenizer.with_post_processor(Some(template.map_err(|error| error.to_string())?));
    Ok(())
}

/// Builds a BPE from a JSON vocabulary that maps tokens to ids, and merges, one per line.
fn byte_pairs(vocabulary: &[u8], merges: &[u8]) -> Result<BPE, String> {
    let vocabulary: HashMap<String, Value> =
        serde_json::from_slice(strip_mark(vocabulary)).map_err(|error| error.to_string())?;
    let id = |(token, id): (String, Value)| {
        let invalid = || format!("the id of `{token}` is not a whole number");
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(invalid)?;
        Ok((token, id))
    };
    let ids = vocabulary.into_iter().map(id).collect::<Result<Vocab, String>>()?;
    let merges = str::from_utf8(strip_mark(merges)).map_err(|error| error.to_string())?;
    let mut pairs = Vec::new();
    for (line, number) in lines(merges).zip(1..).filter(|(line, _)| !line.starts_with("#version")) {
        let at_line = |what: String| format!("line {number} of the merges: {what}");
        let (first, second) = pair(line).map_err(at_line)?;
        let merged = format!("{first}{second}");
        if let Some(missing) = [&first, &second, &merged].into_iter().find(|token| !ids.contains_key(*token))
        {
            return Err(at_line(format!(
                "`{line}` needs the token `{missing}`, which is not in the vocabulary; use both files from the same source"
            )));
        }
        pairs.push((first, second));
    }
    built_pairs(ids, pairs)
}

/// Splits text into lines at any system's line endings.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    // A file with bare carriage returns would otherwise be a single line, and `#version` would hide all
    // merges.
    let end = if text.contains('\n') { '\n' } else { '\r' };
    text.split_terminator(end).map(|line| line.strip_suffix('\r').unwrap_or(line))
}

/// Builds a BPE from a vocabulary and merges.
fn built_pairs(vocabulary: Vocab, merges: Vec<(String, String)>) -> Result<BPE, String> {
    let entries = vocabulary.iter().map(|(token, id)| (token.as_str(), u64::from(*id)));
    tokenizer_limits::check_byte_pairs(entries, &merges)?;
    let build = || BPE::builder().vocab_and_merges(vocabulary, merges).build();
    without_panic(build)?.map_err(|error| error.to_string())
}

/// Parses a merge: two tokens separated by a space.
fn pair(merge: &str) -> Result<(String, String), String> {
    match merge.split_once(' ') {
        Some((first, second)) if !second.contains(' ') => Ok((first.to_owned(), second.to_owned())),
        _ => Err(format!("`{merge}` is not a merge of two tokens separated by one space")),
    }
}

/// Builds a tokenizer from the arrays of a GGUF file.
///
/// `tokens` contains tokens, ids and llama.cpp's token types. Each merge is two tokens separated by a
/// space. `around` contains the tokens before and after every text.
pub(crate) fn from_lists(
    tokens: Vec<(String, u32, i32)>,
    merges: &[String],
    around: (Option<u32>, Option<u32>),
) -> Result<Tokenizer, String> {
    let added = tokens.iter().filter(|(_, _, kind)| [CONTROL, USER_DEFINED].contains(kind));
    let added: Vec<AddedToken> =
        added.map(|(token, _, kind)| AddedToken::from(token.as_str(), *kind == CONTROL)).collect();
    let count = tokens.len();
    let vocabulary: Vocab = tokens.into_iter().map(|(token, id, _)| (token, id)).collect();
    if vocabulary.len() < count {
        return Err(format!("{} tokens are duplicates of other tokens", count - vocabulary.len()));
    }
    let pairs = merges.iter().map(|merge| pair(merge)).collect::<Result<Vec<_>, String>>()?;
    let mut tokenizer = byte_level(built_pairs(vocabulary, pairs)?, false);
    tokenizer.add_tokens(added).map_err(|error| error.to_string())?;
    add_around_texts(&mut tokenizer, around)?;
    tokenizer_limits::check_built(&tokenizer)?;
    Ok(tokenizer)
}

/// Builds GPT-2's tokenizer around a vocabulary, configured like transformers' `GPT2Tokenizer`.
fn byte_level(bpe: BPE, add_prefix_space: bool) -> Tokenizer {
    let mut tokenizer = Tokenizer::new(bpe);
    tokenizer.with_pre_tokenizer(Some(ByteLevel::default().add_prefix_space(add_prefix_space)));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    tokenizer.with_post_processor(Some(ByteLevel::default().trim_offsets(false)));
    tokenizer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_level_alphabet_covers_all_bytes() {
        let alphabet = ByteLevel::alphabet();
        let mut bytes: Vec<u8> = alphabet.into_iter().map(|c| byte_of(c).unwrap()).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(['Ġ', 'Ċ', 'A', 'Ń'].map(byte_of), [Some(b' '), Some(b'\n'), Some(b'A'), Some(0xad)]);
        assert_eq!([' ', '中'].map(byte_of), [None, None]);
    }
}
