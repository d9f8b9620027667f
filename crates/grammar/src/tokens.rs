//! What the tokens of a vocabulary write, as grammars need it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use candle_gpt2_generation::decode;
use candle_gpt2_weights::{Tokenizer, ordinary_token, token_bytes};
use serde::{Deserialize, Serialize};
use tokenizers::DecoderWrapper;
use toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};

use crate::GrammarError;

/// Longest token that may be written; the trie has room for twice that.
const MAX_TOKEN_BYTES: usize = 512;
/// Most bytes of all tokens together, each of which may be a node of the trie; it has room for four million.
const MAX_VOCABULARY_BYTES: usize = 4_000_000;

/// What each token of a vocabulary adds to a text, as plain data, which another process can be given.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Words {
    /// The bytes that each token writes; empty if that is nothing, or what another one writes.
    bytes: Vec<Vec<u8>>,
    /// Tokens that write what another one writes, with that one.
    twins: Vec<(u32, u32)>,
    /// Tokens that write something else at the beginning of a text than inside it.
    other_at_start: Vec<u32>,
}

impl Words {
    /// What the tokens of `tokenizer` write, of a model with `vocab_size` rows. Special tokens and rows without a token write
    /// nothing.
    pub(crate) fn new(tokenizer: &Tokenizer, vocab_size: usize) -> Result<Self, GrammarError> {
        let refused = |what: String| GrammarError::Tokenizer { what };
        let too_many = || refused(format!("{vocab_size} tokens are too many"));
        let end = u32::try_from(vocab_size).ok().filter(|end| *end < u32::MAX).ok_or_else(too_many)?;
        let writes = Writes::of(tokenizer)?;
        let mut words = Self { bytes: Vec::new(), twins: Vec::new(), other_at_start: Vec::new() };
        let mut by_word: HashMap<Vec<u8>, u32> = HashMap::new();
        let mut total_bytes = 0;
        for id in 0..end {
            words.bytes.push(Vec::new());
            let written = writes.written_by(id).filter(|written| is_usable(&written.inside));
            let Some(Written { inside, is_other_at_start }) = written else { continue };
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

/// The tokens of a vocabulary as grammars need them.
pub(crate) struct Tokens {
    /// The tokens that write something, each text once, and one more for the end of the text.
    pub(crate) trie: TokEnv,
    /// The end of the text in the trie; the vocabulary has no such token.
    pub(crate) end: u32,
    /// Tokens that write what another one writes, with that one, which is in the trie.
    twins: HashMap<u32, u32>,
    other_at_start: Vec<u32>,
    /// Whether each token writes something.
    is_written: Vec<bool>,
}

impl Tokens {
    pub(crate) fn new(words: Words) -> Self {
        let Words { mut bytes, twins, other_at_start } = words;
        // `Words::new` has counted them.
        let end = u32::try_from(bytes.len()).unwrap_or(u32::MAX - 1);
        let twins: HashMap<u32, u32> = twins.into_iter().collect();
        let is_written =
            (0..).zip(&bytes).map(|(id, word)| !word.is_empty() || twins.contains_key(&id)).collect();
        bytes.push(Vec::new());
        let trie = TokTrie::from(&TokRxInfo::new(end + 1, end), &bytes);
        let trie: TokEnv = std::sync::Arc::new(ApproximateTokEnv::new(trie));
        Self { trie, end, twins, other_at_start, is_written }
    }

    /// The token of the trie that writes the same.
    pub(crate) fn in_trie(&self, id: u32) -> u32 {
        self.twins.get(&id).copied().unwrap_or(id)
    }

    /// Whether the token writes something.
    pub(crate) fn is_written(&self, id: u32) -> bool {
        usize::try_from(id).is_ok_and(|id| self.is_written.get(id) == Some(&true))
    }

    /// Adds the tokens that write what one of the set writes; at the beginning of a text takes those out that write something
    /// else there.
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

/// Bytes 0xff are no text, and have a meaning of their own to llguidance.
fn is_usable(bytes: &[u8]) -> bool {
    !bytes.is_empty() && bytes.len() <= MAX_TOKEN_BYTES && !bytes.contains(&u8::MAX)
}

/// What a token writes.
struct Written {
    /// Inside a text.
    inside: Vec<u8>,
    /// Whether it writes something else at the beginning of a text.
    is_other_at_start: bool,
}

/// How a tokenizer writes its tokens.
enum Writes<'a> {
    /// Each the same bytes everywhere, which may be parts of characters.
    Bytes(&'a Tokenizer),
    /// Each whole characters, with a space before it if the tokenizer has it begin a word.
    Words { tokenizer: &'a Tokenizer, before: u32, text_before: String },
}

impl<'a> Writes<'a> {
    fn of(tokenizer: &'a Tokenizer) -> Result<Self, GrammarError> {
        let refused = |what: &str| Err(GrammarError::Tokenizer { what: what.into() });
        match tokenizer.get_decoder() {
            Some(DecoderWrapper::ByteLevel(_)) => Ok(Self::Bytes(tokenizer)),
            Some(DecoderWrapper::WordPiece(_) | DecoderWrapper::CTC(_)) | None => refused(
                "what it writes for a token depends on the tokens around it; byte-level tokenizers and those of words with \
                 spaces can be used",
            ),
            Some(_) => {
                let letters = ('a'..='z').chain('A'..='Z').map(String::from);
                let mut letters = letters.filter_map(|letter| {
                    let id = tokenizer.token_to_id(&letter)?;
                    decode(tokenizer, &[id], true).ok().filter(|text| *text == letter).map(|text| (id, text))
                });
                match letters.next() {
                    Some((before, text_before)) => Ok(Self::Words { tokenizer, before, text_before }),
                    None => refused("no letter is a token"),
                }
            }
        }
    }

    /// What a token writes; `None` if that is nothing.
    fn written_by(&self, id: u32) -> Option<Written> {
        match self {
            Self::Bytes(tokenizer) => {
                ordinary_token(tokenizer, id)?;
                Some(Written { inside: token_bytes(tokenizer, id)?, is_other_at_start: false })
            }
            Self::Words { tokenizer, before, text_before } => {
                ordinary_token(tokenizer, id)?;
                let text = |ids: &[u32]| decode(tokenizer, ids, true).ok();
                let inside = text(&[*before, id])?.strip_prefix(text_before)?.to_owned();
                let is_whole = !inside.contains(char::REPLACEMENT_CHARACTER);
                let is_other_at_start = text(&[id])? != inside;
                is_whole.then(|| Written { inside: inside.into_bytes(), is_other_at_start })
            }
        }
    }
}
