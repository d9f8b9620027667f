//! The tokenizer of a checkpoint: `tokenizer.json`, or GPT-2's original pair of a vocabulary and merges, under Hugging
//! Face's names (`vocab.json`, `merges.txt`) or OpenAI's (`encoder.json`, `vocab.bpe`).

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use serde_json::Value;
use tokenizers::models::bpe::{BPE, BpeTrainer, Vocab};
use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, Tokenizer};

use crate::byte_pairs::byte_of;
use crate::files::Files;
use crate::library::{encode_whole, without_panic};
use crate::{TextEncoder, WeightsError, mistaken_file, tokenizer_limits};

/// The token that GPT-2 puts between texts; in `vocab.json` nothing marks it as special. [`train_tokenizer`] puts it first.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// Largest tokenizer file that is read: GPT-2's has 1.4 MB.
const MAX_TOKENIZER_BYTES: u64 = 256 << 20;
/// Words whose tokens each thread of the library remembers, each with up to 10 kB.
const CACHED_WORDS: usize = 1024;
/// Settings of a tokenizer that is elsewhere.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// The pairs of a vocabulary and merges.
const PAIRS: [(&str, &str); 2] = [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")];

/// Loads a tokenizer from a `tokenizer.json`, or from a folder with a `tokenizer.json` or with a vocabulary and merges.
/// Ignores its truncation, padding and dropout: a prompt is used whole, and its tokens are always the same.
///
/// Rejects files that could turn a short text into a very long one: normalizers, pre-tokenizers and decoders that make more
/// than 32 bytes of one, post-processors that add more than 16 ids or repeat the text, tokens of more than 1,024 characters,
/// and a `max_input_chars_per_word` above 1,024.
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
/// When there is none, or it cannot be used.
pub fn load_tokenizer(path: &Path) -> Result<Tokenizer, WeightsError> {
    load(&Files::Disk, path)
}

/// As [`load_tokenizer`], from any files.
pub(crate) fn load(files: &Files, path: &Path) -> Result<Tokenizer, WeightsError> {
    let json = path.join("tokenizer.json");
    let pairs = PAIRS.map(|(vocabulary, merges)| (path.join(vocabulary), path.join(merges)));
    let mut tokenizer = if files.is_file(path) {
        from_json(files, path)?
    } else if files.is_file(&json) {
        from_json(files, &json)?
    } else if let Some((vocabulary, merges)) =
        pairs.iter().find(|(first, second)| files.is_file(first) && files.is_file(second))
    {
        from_vocabulary_and_merges(files, vocabulary, merges)?
    } else if files.is_folder(path) {
        return Err(WeightsError::NoTokenizer { folder: files.told(path), found: likely_name(files, path) });
    } else {
        let error = match files.exists(path) {
            true => "not a regular file; save it to a file, and name that",
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

/// The first file of a folder whose name is like that of a tokenizer, such as `my.tokenizer.json`.
fn likely_name(files: &Files, folder: &Path) -> Option<String> {
    let is_likely =
        |name: &String| name.contains("tokenizer") && name.ends_with(".json") && name != TOKENIZER_CONFIG;
    files.names(folder).ok()?.into_iter().filter(is_likely).min()
}

/// Token ids of a text, with the special tokens that the tokenizer adds. See [`load_tokenizer`] for an example.
///
/// [`TextEncoder`] encodes many texts faster.
///
/// # Errors
/// If the tokenizer cannot encode the text, or would take too long.
pub fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, WeightsError> {
    encode_with(tokenizer, text, true)
}

/// Token ids of a part of a text, without special tokens around it. See [`TextEncoder`] for an example.
///
/// # Errors
/// Same as [`encode`].
pub fn encode_piece(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, WeightsError> {
    encode_with(tokenizer, text, false)
}

/// As [`encode`], with the characters of the text that each token stands for, counted from 0, the end excluded: transformers'
/// offsets, without the space before a word if the tokenizer leaves it out. Tokens that stand for a part of a character have
/// the whole of it, and those that are put around the text an empty range at 0.
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
/// As [`encode`].
pub fn encode_with_places(
    tokenizer: &Tokenizer,
    text: &str,
) -> Result<(Vec<u32>, Vec<Range<usize>>), WeightsError> {
    let failed = |error| WeightsError::Encode { error };
    let encoding = without_panic(|| tokenizer.encode_char_offsets(text, true)).map_err(failed)?;
    let encoding = encoding.map_err(|error| failed(error.to_string()))?;
    let places = encoding.get_offsets().iter().map(|(start, end)| *start..*end);
    Ok((encoding.get_ids().to_vec(), places.collect()))
}

fn encode_with(tokenizer: &Tokenizer, text: &str, special_tokens: bool) -> Result<Vec<u32>, WeightsError> {
    /// Longest text that the library encodes whole: it takes up to 700 bytes of memory for each byte.
    const MAX_WHOLE_BYTES: usize = 1 << 16;
    if text.len() > MAX_WHOLE_BYTES {
        return TextEncoder::new(tokenizer).encode(text, special_tokens);
    }
    encode_whole(tokenizer, text, special_tokens)
}

/// The bytes of a token, which may be a part of a character: those that GPT-2's alphabet writes with its characters, or of a
/// tokenizer with another alphabet those of the token as it is written. `None` if there is no such token.
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
    let is_special = tokenizer.get_added_tokens_decoder().contains_key(&id);
    let bytes = written.chars().map(byte_of).collect::<Option<Vec<u8>>>();
    Some(bytes.filter(|_| !is_special).unwrap_or_else(|| written.into_bytes()))
}

/// Trains a byte-level BPE of at most `vocab_size` tokens on `texts`, as GPT-2's own was made: [`END_OF_TEXT`] first, then
/// the 256 bytes, then merges. It has fewer tokens if the texts hold no more pairs that occur twice.
///
/// ```
/// use candle_gpt2_weights::{END_OF_TEXT, encode, train_tokenizer};
///
/// let texts = ["to be or not to be", "to be is to do"];
/// let tokenizer = train_tokenizer(texts.into_iter().map(Into::into), 260)?;
/// assert_eq!(tokenizer.get_vocab_size(true), 260, "the end of a text, 256 bytes and three merges");
/// assert!(encode(&tokenizer, "to be")?.len() < 5);
/// # Ok::<(), candle_gpt2_weights::WeightsError>(())
/// ```
///
/// # Errors
/// When `vocab_size` has no room for the bytes and the special token, or training fails.
pub fn train_tokenizer<'a>(
    texts: impl Iterator<Item = Cow<'a, str>> + Send,
    vocab_size: usize,
) -> Result<Tokenizer, WeightsError> {
    const SMALLEST: usize = 257;
    let failed = |error| WeightsError::TrainTokenizer { error };
    if vocab_size < SMALLEST {
        return Err(failed(format!(
            "a vocabulary of {vocab_size} tokens has no room for the 256 bytes and {END_OF_TEXT}; make it at least {SMALLEST}"
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

/// Reads one of a tokenizer's files.
fn read(files: &Files, path: &Path) -> Result<Vec<u8>, WeightsError> {
    let bytes = files.read_small(path, MAX_TOKENIZER_BYTES)?;
    match mistaken_file::something_else(&bytes, "tokenizer") {
        Some(error) => Err(WeightsError::Tokenizer { path: path.to_owned(), error }),
        None => Ok(bytes),
    }
}

fn from_json(files: &Files, path: &Path) -> Result<Tokenizer, WeightsError> {
    let failed = |error| WeightsError::Tokenizer { path: path.to_owned(), error };
    let bytes = read(files, path)?;
    let text = str::from_utf8(strip_mark(&bytes)).map_err(|error| failed(error.to_string()))?;
    tokenizer_limits::check(text).map_err(failed)?;
    // `Tokenizer::from_bytes` is generic: its reader would be compiled here once more.
    without_panic(|| text.parse::<Tokenizer>()).map_err(failed)?.map_err(|error| failed(error.to_string()))
}

/// The bytes without a byte order mark.
fn strip_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes)
}

/// The tokenizer of a vocabulary file and a merges file, and of the files beside them that transformers' `GPT2Tokenizer`
/// reads: `added_tokens.json`, `special_tokens_map.json`, `tokenizer_config.json`.
fn from_vocabulary_and_merges(
    files: &Files,
    vocabulary: &Path,
    merges: &Path,
) -> Result<Tokenizer, WeightsError> {
    let folder = vocabulary.parent().unwrap_or(vocabulary);
    let failed = |error: String| WeightsError::Tokenizer { path: folder.to_owned(), error };
    let bpe = byte_pairs(&read(files, vocabulary)?, &read(files, merges)?)
        .map_err(|error| failed(format!("{} and {}: {error}", file_name(vocabulary), file_name(merges))))?;
    let beside = |name: &str| -> Result<Value, WeightsError> {
        let path = folder.join(name);
        if !files.is_file(&path) {
            return Ok(Value::Null);
        }
        let bytes = files.read_small(&path, MAX_TOKENIZER_BYTES)?;
        serde_json::from_slice(strip_mark(&bytes))
            .map_err(|error| WeightsError::Tokenizer { path, error: error.to_string() })
    };
    let (added, special, config) =
        (beside("added_tokens.json")?, beside("special_tokens_map.json")?, beside(TOKENIZER_CONFIG)?);

    let mut tokenizer = byte_level(bpe, config["add_prefix_space"] == Value::Bool(true));
    let mut in_order: Vec<(Option<u64>, &String)> =
        added.as_object().into_iter().flatten().map(|(token, id)| (id.as_u64(), token)).collect();
    in_order.sort();
    for (id, token) in in_order {
        let result = tokenizer.add_tokens([AddedToken::from(token.as_str(), false)]);
        result.map_err(|error| failed(error.to_string()))?;
        if tokenizer.token_to_id(token).map(u64::from) != id {
            return Err(failed(format!("added_tokens.json: the id of `{token}` does not follow the others")));
        }
    }
    // A token is a text, or an object with its content.
    let content = |token: &Value| token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned);
    let named = |key: &str| content(&special[key]).or_else(|| content(&config[key]));
    let bos = named("bos_token").unwrap_or_else(|| END_OF_TEXT.to_owned());
    let mut special_tokens = vec![bos.clone(), named("eos_token").unwrap_or_else(|| END_OF_TEXT.to_owned())];
    special_tokens.extend(named("pad_token"));
    let additional = special["additional_special_tokens"].as_array().into_iter().flatten();
    special_tokens.extend(additional.filter_map(content));
    let special_tokens = special_tokens.into_iter().map(|token| AddedToken::from(token, true));
    tokenizer.add_special_tokens(special_tokens).map_err(|error| failed(error.to_string()))?;
    if config["add_bos_token"] == Value::Bool(true)
        && let Some(id) = tokenizer.token_to_id(&bos)
    {
        let template = TemplateProcessing::builder().try_single(vec![bos.clone(), "$A".to_owned()]).and_then(
            |builder| builder.special_tokens(vec![(bos, id)]).build().map_err(|error| error.to_string()),
        );
        tokenizer.with_post_processor(Some(template.map_err(failed)?));
    }
    Ok(tokenizer)
}

/// The text of token `id` if it is an ordinary one, no special token: a configuration that ends texts with it is
/// usually wrong.
///
/// ```
/// use candle_gpt2_weights::{Tokenizer, encode, ordinary_token};
///
/// let tokenizer = Tokenizer::from_bytes(candle_gpt2_stories::TOKENIZER)?;
/// assert_eq!(ordinary_token(&tokenizer, 0), None, "the end of a text");
/// assert_eq!(ordinary_token(&tokenizer, encode(&tokenizer, "K")?[0]).as_deref(), Some("K"));
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
pub fn ordinary_token(tokenizer: &Tokenizer, id: u32) -> Option<String> {
    let token = tokenizer.id_to_token(id)?;
    let is_marked = tokenizer.get_added_tokens_decoder().get(&id).is_some_and(|token| token.special);
    // Written `<|endoftext|>` or `</s>`, whether or not the files call it special.
    let looks_special = token.len() > 2 && token.starts_with('<') && token.ends_with('>');
    let text = || tokenizer.decode(&[id], false).unwrap_or_else(|_| token.clone());
    (!is_marked && !looks_special).then(text)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The pairs of a vocabulary, an object of ids by token, and of merges, one a line.
fn byte_pairs(vocabulary: &[u8], merges: &[u8]) -> Result<BPE, String> {
    let vocabulary: HashMap<String, Value> =
        serde_json::from_slice(strip_mark(vocabulary)).map_err(|error| error.to_string())?;
    let id = |(token, id): (String, Value)| {
        let of_token = || format!("`{token}` has no whole number for its id");
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(of_token)?;
        Ok((token, id))
    };
    let ids = vocabulary.into_iter().map(id).collect::<Result<Vocab, String>>()?;
    let lines = str::from_utf8(merges).map_err(|error| error.to_string())?.lines();
    let pairs = lines.filter(|line| !line.starts_with("#version")).map(pair);
    built_pairs(ids, pairs.collect::<Result<Vec<_>, String>>()?)
}

/// The model of a vocabulary and merges.
fn built_pairs(vocabulary: Vocab, merges: Vec<(String, String)>) -> Result<BPE, String> {
    let entries = vocabulary.iter().map(|(token, id)| (token.as_str(), u64::from(*id)));
    tokenizer_limits::check_byte_pairs(entries, &merges)?;
    let build = || BPE::builder().vocab_and_merges(vocabulary, merges).build();
    without_panic(build)?.map_err(|error| error.to_string())
}

/// A merge as it is written: two tokens with a space between them.
fn pair(merge: &str) -> Result<(String, String), String> {
    match merge.split_once(' ') {
        Some((first, second)) if !second.contains(' ') => Ok((first.to_owned(), second.to_owned())),
        _ => Err(format!("`{merge}` is not a merge of two tokens")),
    }
}

/// The tokenizer of lists, as GGUF files hold them: tokens with their ids, merges of two tokens each with a space between
/// them, and the tokens that stand for themselves in a text.
pub(crate) fn from_lists(
    tokens: impl IntoIterator<Item = (String, u32)>,
    merges: &[String],
    special: impl IntoIterator<Item = String>,
) -> Result<Tokenizer, String> {
    let vocabulary = tokens.into_iter().collect();
    let pairs = merges.iter().map(|merge| pair(merge)).collect::<Result<Vec<_>, String>>()?;
    let mut tokenizer = byte_level(built_pairs(vocabulary, pairs)?, false);
    let special = special.into_iter().map(|token| AddedToken::from(token, true));
    tokenizer.add_special_tokens(special).map_err(|error| error.to_string())?;
    tokenizer_limits::check_built(&tokenizer)?;
    Ok(tokenizer)
}

/// GPT-2's tokenizer around a vocabulary, as transformers' `GPT2Tokenizer` sets it up.
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
    fn characters_of_the_alphabet_are_bytes() {
        let alphabet = ByteLevel::alphabet();
        let mut bytes: Vec<u8> = alphabet.into_iter().map(|c| byte_of(c).unwrap()).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(['Ġ', 'Ċ', 'A', 'Ń'].map(byte_of), [Some(b' '), Some(b'\n'), Some(b'A'), Some(0xad)]);
        assert_eq!([' ', '中'].map(byte_of), [None, None]);
    }
}
