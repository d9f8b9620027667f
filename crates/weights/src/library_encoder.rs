//! Encoding of long texts with the tokenizers library, for tokenizers other than GPT-2's.
//!
//! The library needs hundreds of bytes of memory for each byte of text, and some of its models take quadratic
//! time for a word. Texts are therefore split before spaces wherever that cannot change a token. The encoding
//! time is estimated word by word.

use std::cell::Cell;

use serde_json::Value;
use tokenizers::models::ModelWrapper;
use tokenizers::models::unigram::Unigram;
use tokenizers::{Model, OffsetReferential, OffsetType, PreTokenizer, Token, Tokenizer};

use crate::WeightsError;
use crate::library::without_panic;
use crate::tokenizer_limits;

/// Memory in bytes per byte of normalized text, if each character is a word and a token.
const BYTES_PER_BYTE: f64 = 400.0;
/// Memory in bytes per byte of pre-tokenizer output.
const BYTES_PER_PRE_TOKENIZED_BYTE: f64 = 50.0;
/// Memory in bytes per byte of text if token offsets are kept.
const BYTES_OF_PLACES: f64 = 250.0;
/// Minimum size of a text piece, in bytes.
const PIECE_BYTES: usize = 1 << 14;

/// Encoder for a single tokenizer, which callers pass to every method.
pub(crate) struct LibraryEncoder {
    /// Memory in bytes per byte of a piece.
    bytes_per_byte: f64,
    /// Whether texts may be split before a space between two letters.
    is_cut_at_spaces: bool,
    cost: Cost,
}

/// Cost of encoding a word, measured in bytes hashed or copied.
enum Cost {
    Linear {
        per_byte: usize,
    },
    /// Quadratic in the word length, for words of at most `max_chars` characters.
    WordPiece {
        max_chars: usize,
    },
}

impl LibraryEncoder {
    /// Creates an encoder; `None` if the library cannot describe the tokenizer.
    pub(crate) fn new(tokenizer: &Tokenizer) -> Option<Self> {
        let cost = match tokenizer.get_model() {
            ModelWrapper::WordPiece(model) => Cost::WordPiece { max_chars: model.max_input_chars_per_word },
            // Copying is faster than hashing.
            ModelWrapper::Unigram(model) => Cost::Linear { per_byte: bytes_of_prefixes(model).div_ceil(2) },
            ModelWrapper::BPE(_) | ModelWrapper::WordLevel(_) => Cost::Linear { per_byte: 1 },
        };
        Some(Self {
            bytes_per_byte: bytes_per_byte(tokenizer),
            is_cut_at_spaces: is_cut_at_spaces(tokenizer)?,
            cost,
        })
    }

    /// Appends the tokens of the text, without special tokens around it.
    pub(crate) fn encode(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        ids: &mut Vec<u32>,
    ) -> Result<(), WeightsError> {
        let mut budget = Budget::new(text.len());
        let failed = |error| WeightsError::Encode { error };
        for piece in self.pieces(text) {
            let encode = || self.encode_piece(tokenizer, piece, &mut budget, ids);
            without_panic(encode).map_err(failed)?.map_err(|error| failed(error.to_string()))?;
        }
        Ok(())
    }

    /// Performs the steps of the library's `encode` without keeping the strings and offsets of tokens.
    fn encode_piece(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        budget: &mut Budget,
        ids: &mut Vec<u32>,
    ) -> tokenizers::Result<()> {
        let added = tokenizer.get_added_vocabulary();
        let mut words = added.extract_and_normalize(tokenizer.get_normalizer(), text);
        if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut words)?;
        }
        let model = tokenizer.get_model();
        let spent = Cell::new(budget.spent);
        words.tokenize(|word| {
            spent.set(spent.get().saturating_add(self.cost.of(word.get())));
            budget.check(spent.get())?;
            let tokens = model.tokenize(word.get())?;
            Ok(tokens.into_iter().map(|token| Token::new(token.id, String::new(), (0, 0))).collect())
        })?;
        budget.spent = spent.get();
        let words = words.get_splits(OffsetReferential::Normalized, OffsetType::None);
        ids.extend(words.iter().flat_map(|(_, _, tokens)| tokens.iter().flatten()).map(|token| token.id));
        Ok(())
    }

    /// Splits text into pieces that can be encoded separately without changing the tokens.
    fn pieces<'t>(&self, text: &'t str) -> impl Iterator<Item = &'t str> + use<'t> {
        let is_cut_at_spaces = self.is_cut_at_spaces;
        let mut rest = Some(text);
        std::iter::from_fn(move || {
            let text = rest?;
            let cut = if is_cut_at_spaces { cut(text.as_bytes()) } else { None };
            let (piece, after) = cut.map_or((text, None), |offset| {
                let (piece, after) = text.split_at(offset);
                (piece, Some(after))
            });
            rest = after;
            Some(piece)
        })
    }

    /// Returns an upper bound on the memory of [`Self::encode`], in bytes.
    pub(crate) fn memory(&self, text: &str) -> usize {
        /// Memory for the ids per byte of text; the vector doubles its capacity.
        const IDS_PER_BYTE: usize = 12;
        let longest = self.pieces(text).map(str::len).max().unwrap_or(0);
        bytes(longest, self.bytes_per_byte).saturating_add(IDS_PER_BYTE.saturating_mul(text.len()))
    }

    /// Returns an upper bound on the memory for encoding text in a single call, in bytes.
    pub(crate) fn whole_memory(tokenizer: &Tokenizer, text: &str) -> usize {
        bytes(text.len(), bytes_per_byte(tokenizer))
    }

    /// Returns an upper bound on the memory for encoding text in a single call with token offsets.
    pub(crate) fn memory_with_places(tokenizer: &Tokenizer, text: &str) -> usize {
        bytes(text.len(), bytes_per_byte(tokenizer) + BYTES_OF_PLACES)
    }
}

fn bytes_per_byte(tokenizer: &Tokenizer) -> f64 {
    tokenizer_limits::growth(tokenizer).map_or(f64::INFINITY, |(normalized, pre_tokenized)| {
        normalized * (BYTES_PER_BYTE + BYTES_PER_PRE_TOKENIZED_BYTE * pre_tokenized)
    })
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an estimate; casts of floats saturate"
)]
fn bytes(text: usize, per_byte: f64) -> usize {
    (text as f64 * per_byte) as usize
}

/// Returns the first position after [`PIECE_BYTES`] with a space between two ASCII letters or digits.
fn cut(text: &[u8]) -> Option<usize> {
    let is_space_in_text = |bytes: &[u8]| matches!(bytes, [before, b' ', after] if before.is_ascii_alphanumeric() && after.is_ascii_alphanumeric());
    text.get(PIECE_BYTES..)?.windows(3).position(is_space_in_text).map(|offset| PIECE_BYTES + offset + 1)
}

/// Whether a space between two ASCII letters or digits always separates words; `None` if unknown.
fn is_cut_at_spaces(tokenizer: &Tokenizer) -> Option<bool> {
    let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
    let pre_tokenizer = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
    let added = tokenizer.get_added_tokens_decoder();
    let are_words = added.values().all(|token| {
        let is_marked = token.single_word || token.lstrip || token.rstrip;
        !is_marked && token.content.bytes().all(|byte| byte.is_ascii_graphic())
    });
    Some(are_words && is_local(&normalizer) && separates_words(&pre_tokenizer))
}

/// Whether a normalizer never changes text across a space.
fn is_local(normalizer: &Value) -> bool {
    match normalizer["type"].as_str() {
        None => normalizer.is_null(),
        Some("Sequence") => normalizer["normalizers"].as_array().into_iter().flatten().all(is_local),
        Some(kind) => {
            ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"].contains(&kind)
        }
    }
}

/// Whether a pre-tokenizer ends a word before each space.
fn separates_words(pre_tokenizer: &Value) -> bool {
    let is_inside_words = |part: &Value| match part["type"].as_str() {
        Some("Punctuation" | "Digits") => true,
        Some("ByteLevel") => part["add_prefix_space"] == false,
        _ => separates_words(part),
    };
    match pre_tokenizer["type"].as_str() {
        Some("BertPreTokenizer" | "Whitespace" | "WhitespaceSplit") => true,
        Some("ByteLevel") => pre_tokenizer["use_regex"] == true && pre_tokenizer["add_prefix_space"] == false,
        Some("Metaspace") => pre_tokenizer["split"] == true,
        Some("Sequence") => match pre_tokenizer["pretokenizers"].as_array().map(Vec::as_slice) {
            // Only the types in `drops` remove the space, so that later pre-tokenizers see single words.
            Some([first, rest @ ..]) => {
                let drops = ["BertPreTokenizer", "Whitespace", "WhitespaceSplit"];
                first["type"].as_str().is_some_and(|kind| drops.contains(&kind))
                    && rest.iter().all(is_inside_words)
            }
            _ => false,
        },
        _ => false,
    }
}

/// Returns the maximum total length of the tokens that can match at one position in the text.
///
/// The library copies and hashes each of them.
fn bytes_of_prefixes(model: &Unigram) -> usize {
    let mut tokens: Vec<&str> = model.iter().map(|(token, _)| token.as_str()).collect();
    tokens.sort_unstable();
    // In sorted order, each token follows its prefixes.
    let mut prefixes: Vec<&str> = Vec::new();
    let (mut sum, mut largest) = (0, 1);
    for token in tokens {
        while let Some(last) = prefixes.last()
            && !token.starts_with(*last)
        {
            sum -= last.len();
            prefixes.pop();
        }
        prefixes.push(token);
        sum += token.len();
        largest = largest.max(sum);
    }
    largest
}

impl Cost {
    fn of(&self, word: &str) -> usize {
        match self {
            Self::Linear { per_byte } => word.len().saturating_mul(*per_byte),
            Self::WordPiece { max_chars } => match word.chars().count() {
                chars if chars > *max_chars => word.len(),
                // Half of all (start, end) pairs are substrings, a third of the word's length on average.
                chars => chars.saturating_mul(chars).saturating_mul(word.len()) / 6,
            },
        }
    }
}

/// Time limit for encoding text, in units of [`Cost`].
pub(crate) struct Budget {
    spent: usize,
    limit: usize,
}

impl Budget {
    /// Creates a budget of about a second; for long texts, it is proportional to the length.
    pub(crate) fn new(text_bytes: usize) -> Self {
        const SECOND: usize = 1 << 30;
        const PER_BYTE: usize = 1 << 11;
        Self { spent: 0, limit: SECOND.max(text_bytes.saturating_mul(PER_BYTE)) }
    }

    /// Adds to the time spent, and fails once the limit is exceeded.
    pub(crate) fn spend(&mut self, bytes: usize) -> Result<(), String> {
        self.spent = self.spent.saturating_add(bytes);
        self.check(self.spent)
    }

    fn check(&self, spent: usize) -> Result<(), String> {
        match spent > self.limit {
            false => Ok(()),
            true => {
                Err("the words are too long for this tokenizer, whose encoding time grows with the square of the word length or with \
                     the length of its tokens; split the text or its words"
                    .into())
            }
        }
    }
}
