//! Bytes that each token in a vocabulary decodes to, for use by grammars.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use candle_gpt2_generation::decode;
use candle_gpt2_weights::{Tokenizer, ordinary_token, token_bytes};
use serde::{Deserialize, Serialize};
use tokenizers::DecoderWrapper;
use toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};

use crate::GrammarError;

/// Maximum length of a token, in bytes.
///
/// The trie supports twice that length.
const MAX_TOKEN_BYTES: usize = 512;
/// Maximum total length of all tokens, in bytes.
///
/// Each byte may become a node of the trie, which supports four million nodes.
const MAX_VOCABULARY_BYTES: usize = 4_000_000;

/// Bytes that each token adds to a text; serializable, so that child processes can receive them.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct TokenBytes {
    /// Bytes of each token; empty if the token decodes to nothing or duplicates another token.
    bytes: Vec<Vec<u8>>,
    /// Tokens with the same bytes as an earlier token, each paired with that token.
    twins: Vec<(u32, u32)>,
    /// Tokens that decode to different bytes at the beginning of the text.
    other_at_start: Vec<u32>,
}

impl TokenBytes {
    /// Collects the bytes of the tokenizer's tokens, for a model with `vocab_size` rows.
    ///
    /// Special tokens and rows without a token have no bytes.
    pub(crate) fn new(tokenizer: &Tokenizer, vocab_size: usize) -> Result<Self, GrammarError> {
        let unsupported = |what: String| GrammarError::Tokenizer { what };
        let too_many = || unsupported(format!("a vocabulary of {vocab_size} tokens is too large"));
        let end = u32::try_from(vocab_size).ok().filter(|end| *end < u32::MAX).ok_or_else(too_many)?;
        let tokenizer_kind = TokenizerKind::of(tokenizer)?;
        let mut words = Self { bytes: Vec::new(), twins: Vec::new(), other_at_start: Vec::new() };
        let mut by_word: HashMap<Vec<u8>, u32> = HashMap::new();
        let mut total_bytes = 0;
        for id in 0..end {
            words.bytes.push(Vec::new());
            let written = tokenizer_kind.written_by(id).filter(|written| is_usable(&written.inside));
            let Some(TokenOutput { inside, is_other_at_start }) = written else { continue };
            if is_other_at_start {
                words.other_at_start.push(id);
            }
            match by_word.entry(inside) {
                Entry::Occupied(first) => words.twins.push((id, *first.get())),
                Entry::Vacant(place) => {
                    total_bytes += place.key().len();
                    words.bytes.last_mut().into_iter().for_each(|word| word.clone_from(place.key()));
                    place.insert(id);
                }
            }
        }
        match total_bytes > MAX_VOCABULARY_BYTES {
            true => Err(too_many()),
            false => Ok(words),
        }
    }
}

/// Vocabulary tokens in the library's format.
pub(crate) struct Tokens {
    /// Trie of the tokens' bytes without duplicates, plus one token for the end of the text.
    pub(crate) trie: TokEnv,
    /// Id that represents the end of the text in the trie; not an id in the vocabulary.
    pub(crate) end: u32,
    /// Tokens with the same bytes as a token in the trie, mapped to that token.
    twins: HashMap<u32, u32>,
    other_at_start: Vec<u32>,
    /// Whether each token decodes to any bytes.
    is_written: Vec<bool>,
}

impl Tokens {
    pub(crate) fn new(words: TokenBytes) -> Self {
        let TokenBytes { mut bytes, twins, other_at_start } = words;
        // `TokenBytes::new` has checked the number of tokens.
        let end = u32::try_from(bytes.len()).unwrap_or(u32::MAX - 1);
        let twins: HashMap<u32, u32> = twins.into_iter().collect();
        let is_written =
            (0..).zip(&bytes).map(|(id, word)| !word.is_empty() || twins.contains_key(&id)).collect();
        bytes.push(Vec::new());
        let trie = TokTrie::from(&TokRxInfo::new(end + 1, end), &bytes);
        let trie: TokEnv = std::sync::Arc::new(ApproximateTokEnv::new(trie));
        Self { trie, end, twins, other_at_start, is_written }
    }

    /// Returns the token in the trie with the same bytes as `id`.
    pub(crate) fn in_trie(&self, id: u32) -> u32 {
        self.twins.get(&id).copied().unwrap_or(id)
    }

    /// Whether the token decodes to any bytes.
    pub(crate) fn is_written(&self, id: u32) -> bool {
        usize::try_from(id).is_ok_and(|id| self.is_written.get(id) == Some(&true))
    }

    /// Adds the duplicates of tokens in `set`.
    ///
    /// At the beginning of the text, also removes tokens that decode to different bytes there.
    pub(crate) fn complete(&self, set: &mut SimpleVob, is_start: bool) {
        for (twin, first) in &self.twins {
            if set.is_allowed(*first) {
                set.allow_token(*twin);
            }
        }
        if is_start {
            self.other_at_start.iter().for_each(|id| set.disallow_token(*id));
        }
    }
}

/// Whether a token with these bytes can be used.
///
/// Byte 0xff never occurs in text and has a special meaning in llguidance.
fn is_usable(bytes: &[u8]) -> bool {
    !bytes.is_empty() && bytes.len() <= MAX_TOKEN_BYTES && !bytes.contains(&u8::MAX)
}

/// Bytes that one token adds to a text.
struct TokenOutput {
    /// Bytes that the token adds anywhere but at the beginning of the text.
    inside: Vec<u8>,
    /// Whether the token adds different bytes at the beginning of the text.
    is_other_at_start: bool,
}

/// Kind of tokenizer, which determines the bytes that tokens decode to.
enum TokenizerKind<'a> {
    /// Each token decodes to the same bytes everywhere, possibly to part of a character.
    Bytes(&'a Tokenizer),
    /// Each token decodes to whole characters, with a leading space if it begins a word.
    Characters { tokenizer: &'a Tokenizer, before: u32, text_before: String },
}

impl<'a> TokenizerKind<'a> {
    fn of(tokenizer: &'a Tokenizer) -> Result<Self, GrammarError> {
        let unsupported = |what: &str| Err(GrammarError::Tokenizer { what: what.into() });
        match tokenizer.get_decoder() {
            Some(DecoderWrapper::ByteLevel(_)) => Ok(Self::Bytes(tokenizer)),
            Some(DecoderWrapper::WordPiece(_) | DecoderWrapper::CTC(_)) | None => unsupported(
                "the text of a token depends on the tokens around it; \
                 use a byte-level tokenizer, or one whose tokens \
                 include spaces",
            ),
            Some(_) => {
                let letters = ('a'..='z').chain('A'..='Z').map(String::from);
                let mut letters = letters.filter_map(|letter| {
                    let id = tokenizer.token_to_id(&letter)?;
                    decode(tokenizer, &[id], true).ok().filter(|text| *text == letter).map(|text| (id, text))
                });
                match letters.next() {
                    Some((before, text_before)) => Ok(Self::Characters { tokenizer, before, text_before }),
                    None => unsupported("no token consists of a single letter"),
                }
            }
        }
    }

    /// Decodes a token to bytes; returns `None` if there are none.
    fn written_by(&self, id: u32) -> Option<TokenOutput> {
        match self {
            Self::Bytes(tokenizer) => {
                ordinary_token(tokenizer, id)?;
                Some(TokenOutput { inside: token_bytes(tokenizer, id)?, is_other_at_start: false })
            }
            Self::Characters { tokenizer, before, text_before } => {
                ordinary_token(tokenizer, id)?;
                let text = |ids: &[u32]| decode(tokenizer, ids, true).ok();
                let inside = text(&[*before, id])?.strip_prefix(text_before)?.to_owned();
                let is_whole = !inside.contains(char::REPLACEMENT_CHARACTER);
                let is_other_at_start = text(&[id])? != inside;
                is_whole.then(|| TokenOutput { inside: inside.into_bytes(), is_other_at_start })
            }
        }
    }
}
