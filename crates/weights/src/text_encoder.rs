//! Fast encoding of large texts, with the same tokens as the tokenizer.
//!
//! GPT-2's own tokenizer is implemented here: its words, byte pairs, no normalization, and added tokens
//! that match anywhere. SentencePiece is implemented in `sentence_piece`. All other tokenizers are called
//! through the library.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use memchr::memmem::Finder;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::{AddedToken, Encoding, Token, Tokenizer};

use crate::WeightsError;
use crate::byte_pairs::{BytePairs, byte_of};
use crate::library::{encode_whole, encode_whole_with_places, merges_of, without_panic};
use crate::library_encoder::LibraryEncoder;
use crate::sentence_piece::SentencePiece;
use crate::word_cache::WordCache;
use crate::words::Words;

/// Approximate number of bytes encoded at a time.
const PIECE_BYTES: usize = 1 << 18;
/// Equivalent of [`PIECE_BYTES`] for tokenizers that are called through the library.
///
/// Their word boundaries are unknown, so shorter texts are not split.
const FOREIGN_PIECE_BYTES: usize = 1 << 20;
/// Maximum number of added tokens that are searched for one by one.
const MAX_ADDED: usize = 16;

/// Encoder for texts, without the special tokens that the tokenizer may add around them.
///
/// Threads can share it; each needs its own [`EncoderSession`].
///
/// The tokens equal the output of [`encode_piece`](crate::encode_piece), except after more than a million
/// consecutive spaces. There, the regex engine that [`Tokenizer`] is built with gives up and leaves the
/// rest in one word. This encoder treats them as spaces, like the tokenizers Python package.
///
/// ```
/// use candle_gpt2_weights::{TextEncoder, encode_piece, train_tokenizer};
///
/// let text = "words and more words";
/// let tokenizer = train_tokenizer([text.into()].into_iter(), 260)?;
/// let encoder = TextEncoder::new(&tokenizer);
/// let mut tokens = Vec::new();
/// encoder.session().encode(text, &mut tokens)?;
/// assert_eq!(tokens, encode_piece(&tokenizer, text)?);
/// # Ok::<(), candle_gpt2_weights::WeightsError>(())
/// ```
///
/// ```
/// use candle_gpt2_weights::{TextEncoder, Tokenizer};
///
/// let tokenizer = Tokenizer::from_bytes(candle_gpt2_stories::TOKENIZER)?;
/// let encoder = TextEncoder::new(&tokenizer);
/// let (mut session, mut tokens) = (encoder.session(), Vec::new());
/// session.encode("To be, or not to be", &mut tokens)?;
/// assert_eq!(tokenizer.decode(&tokens, false)?, "To be, or not to be");
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
pub struct TextEncoder<'a> {
    tokenizer: Source<'a>,
    gpt2: Option<Gpt2Encoder>,
    sentence_piece: Option<SentencePiece>,
    /// Encoder for tokenizers that have no implementation in this crate.
    ///
    /// `None` if the tokenizer truncates or pads, or its post-processor drops the text.
    library: Option<LibraryEncoder>,
    /// Special tokens before and after the text.
    around: Option<(Vec<u32>, Vec<u32>)>,
}

/// Borrowed or shared tokenizer.
enum Source<'a> {
    Borrowed(&'a Tokenizer),
    Shared(Arc<Tokenizer>),
}

impl Deref for Source<'_> {
    type Target = Tokenizer;

    fn deref(&self) -> &Tokenizer {
        match self {
            Self::Borrowed(tokenizer) => tokenizer,
            Self::Shared(tokenizer) => tokenizer,
        }
    }
}

impl fmt::Debug for TextEncoder<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("TextEncoder").field("is_own", &self.is_own()).finish_non_exhaustive()
    }
}

/// Token ids with the character range of each token.
type PlacedTokens = (Vec<u32>, Vec<Range<usize>>);

/// Encoder for consecutive texts on one thread; started by [`TextEncoder::session`].
pub struct EncoderSession<'a> {
    encoder: &'a TextEncoder<'a>,
    cache: WordCache,
}

/// Built-in implementation of GPT-2's tokenizer.
struct Gpt2Encoder {
    words: Words,
    pairs: BytePairs,
    added: Vec<Added>,
}

/// Added token that matches its text literally.
struct Added {
    finder: Finder<'static>,
    id: u32,
}

impl<'a> TextEncoder<'a> {
    /// Creates an encoder that returns the tokens of `tokenizer`.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self::of(Source::Borrowed(tokenizer))
    }

    fn of(tokenizer: Source<'a>) -> Self {
        let gpt2 = Gpt2Encoder::new(&tokenizer);
        let around = around(&tokenizer);
        let sentence_piece = SentencePiece::new(&tokenizer).filter(|_| around.is_some());
        let is_other = gpt2.is_none() && sentence_piece.is_none() && around.is_some();
        let library = if is_other { LibraryEncoder::new(&tokenizer) } else { None };
        Self { gpt2, sentence_piece, library, around, tokenizer }
    }

    /// Encodes text, with the tokenizer's special tokens if `special_tokens` is true.
    ///
    /// If the text can be split between words, the encoder needs little memory per byte; see
    /// [`TextEncoder::memory`].
    ///
    /// # Errors
    /// If the tokenizer cannot encode the text, or encoding would take too long.
    pub fn encode(&self, text: &str, special_tokens: bool) -> Result<Vec<u32>, WeightsError> {
        let Some((before, after)) = &self.around else {
            return encode_whole(&self.tokenizer, text, special_tokens);
        };
        let mut ids = if special_tokens { before.clone() } else { Vec::new() };
        match (&self.gpt2, &self.sentence_piece, &self.library) {
            (Some(gpt2), ..) => gpt2.encode(text, &mut WordCache::new(), &mut ids),
            (_, Some(model), _) => {
                let pieces = model.encode(text, self.tokenizer.get_encode_special_tokens());
                ids.extend(
                    pieces.map_err(|error| WeightsError::Encode { error })?.into_iter().map(|(id, _)| id),
                );
            }
            (.., Some(library)) => library.encode(&self.tokenizer, text, &mut ids)?,
            _ => return encode_whole(&self.tokenizer, text, special_tokens),
        }
        if special_tokens {
            ids.extend(after);
        }
        Ok(ids)
    }

    /// Encodes text like [`encode_with_places`](crate::encode_with_places), which has an example.
    ///
    /// # Errors
    /// Fails like [`TextEncoder::encode`].
    pub fn encode_with_places(&self, text: &str) -> Result<PlacedTokens, WeightsError> {
        let (Some((before, after)), Some(model)) = (&self.around, &self.sentence_piece) else {
            return encode_whole_with_places(&self.tokenizer, text);
        };
        let pieces = model.encode(text, self.tokenizer.get_encode_special_tokens());
        let placed = |pieces: Vec<(u32, Range<usize>)>| {
            let (mut ids, mut places) = (before.clone(), vec![0..0; before.len()]);
            // Positions only increase, so that a single pass counts the characters.
            let (mut byte, mut character) = (0, 0);
            let mut characters = |offset: usize| {
                let (part, is_back) = match offset.checked_sub(byte) {
                    Some(_) => (byte..offset, false),
                    None => (offset..byte, true),
                };
                let count = text[part].chars().count();
                character = if is_back { character - count } else { character + count };
                byte = offset;
                character
            };
            for (id, range) in pieces {
                let start = characters(range.start);
                ids.push(id);
                places.push(start..characters(range.end));
            }
            ids.extend(after);
            places.resize(ids.len(), 0..0);
            (ids, places)
        };
        pieces.map(placed).map_err(|error| WeightsError::Encode { error })
    }

    /// Whether even short texts need an encoder; callers should then reuse it.
    ///
    /// True for SentencePiece models.
    pub fn is_needed(tokenizer: &Tokenizer) -> bool {
        SentencePiece::is_shape_of(tokenizer)
    }

    /// Returns an upper bound on the memory of [`TextEncoder::encode`] for this text, in bytes.
    pub fn memory(&self, text: &str) -> usize {
        /// Worst case: a single word as long as the text.
        const BYTES_PER_BYTE: usize = 80;
        match (&self.gpt2, &self.sentence_piece, &self.library) {
            (Some(_), ..) => text.len().saturating_mul(BYTES_PER_BYTE).saturating_add(WordCache::BYTES),
            (_, Some(model), _) => text.len().saturating_mul(model.bytes_per_byte()),
            (.., Some(library)) => library.memory(text),
            _ => LibraryEncoder::whole_memory(&self.tokenizer, text),
        }
    }

    /// Whether the tokenizer is GPT-2's and uses the built-in implementation.
    pub fn is_own(&self) -> bool {
        self.gpt2.is_some()
    }

    /// Returns an upper bound on the memory of [`encode_with_places`](crate::encode_with_places), in bytes.
    pub fn memory_with_places(&self, text: &str) -> usize {
        if self.sentence_piece.is_some() {
            return self.memory(text);
        }
        LibraryEncoder::memory_with_places(&self.tokenizer, text)
    }

    /// Returns the recommended number of bytes to encode at a time.
    pub fn piece_bytes(&self) -> usize {
        if self.is_own() { PIECE_BYTES } else { FOREIGN_PIECE_BYTES }
    }

    /// Finds the first position at or after `from` where the text can be split without changing its tokens.
    ///
    /// `bytes` need not be valid UTF-8. For tokenizers other than GPT-2's, word boundaries are unknown.
    /// Their texts are split before a line break followed by a visible character, and the tokens of the
    /// pieces are authoritative.
    pub fn cut(&self, bytes: &[u8], from: usize) -> Option<usize> {
        let is_line = |offset: &usize| {
            bytes[*offset] == b'\n' && bytes.get(offset + 1).is_some_and(u8::is_ascii_graphic)
        };
        match &self.gpt2 {
            Some(gpt2) => gpt2.words.cut(bytes, from),
            None => (from.max(1)..bytes.len()).find(is_line),
        }
    }

    /// Starts a session that encodes texts on one thread.
    pub fn session(&self) -> EncoderSession<'_> {
        EncoderSession { encoder: self, cache: WordCache::new() }
    }
}

impl TextEncoder<'static> {
    /// Creates an encoder that shares the tokenizer.
    pub fn shared(tokenizer: Arc<Tokenizer>) -> Self {
        Self::of(Source::Shared(tokenizer))
    }
}

/// Returns the special tokens added before and after the text.
///
/// `None` if the tokenizer changes the text in any other way.
fn around(tokenizer: &Tokenizer) -> Option<(Vec<u32>, Vec<u32>)> {
    /// Placeholder id for the text.
    const MARK: u32 = u32::MAX;
    if tokenizer.get_truncation().is_some() || tokenizer.get_padding().is_some() {
        return None;
    }
    let mark = || Encoding::from_tokens(vec![Token::new(MARK, String::new(), (0, 0))], 0);
    let ids = |special_tokens| {
        let encoding = without_panic(|| tokenizer.post_process(mark(), None, special_tokens)).ok()?.ok()?;
        Some(encoding.get_ids().to_vec())
    };
    let all = ids(true)?;
    let (before, rest) = all.split_at(all.iter().position(|id| *id == MARK)?);
    let (_, after) = rest.split_first()?;
    let is_plain = ids(false)? == [MARK] && !after.contains(&MARK);
    is_plain.then(|| (before.to_vec(), after.to_vec()))
}

impl EncoderSession<'_> {
    /// Appends the tokens of the text.
    ///
    /// # Errors
    /// If the tokenizer cannot encode the text.
    pub fn encode(&mut self, text: &str, tokens: &mut Vec<u32>) -> Result<(), WeightsError> {
        match &self.encoder.gpt2 {
            Some(gpt2) => gpt2.encode(text, &mut self.cache, tokens),
            None => tokens.extend(self.encoder.encode(text, false)?),
        }
        Ok(())
    }
}

impl Gpt2Encoder {
    /// Creates an encoder; `None` unless the tokenizer is equivalent to GPT-2's in every respect.
    fn new(tokenizer: &Tokenizer) -> Option<Self> {
        let is_plain = tokenizer.get_normalizer().is_none()
            && tokenizer.get_truncation().is_none()
            && !tokenizer.get_encode_special_tokens();
        let Some(PreTokenizerWrapper::ByteLevel(words)) = tokenizer.get_pre_tokenizer() else { return None };
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
        if !is_plain || !words.use_regex || words.add_prefix_space {
            return None;
        }
        let added: Vec<(u32, AddedToken)> = tokenizer.get_added_tokens_decoder().into_iter().collect();
        // The library searches for normalized and other tokens separately, so a mixture changes the result.
        let is_one_kind = added.windows(2).all(|pair| pair[0].1.normalized == pair[1].1.normalized);
        let are_found = added.iter().all(|(_, token)| is_found_anywhere(token));
        if added.len() > MAX_ADDED || !is_one_kind || !are_found {
            return None;
        }
        let finder = |token: &AddedToken| Finder::new(&token.content).into_owned();
        let added = added.iter().map(|(id, token)| Added { finder: finder(token), id: *id }).collect();
        Some(Self { words: Words::new()?, pairs: byte_pairs(model)?, added })
    }

    /// Appends the tokens of the text. The parts between added tokens are split into words separately.
    fn encode(&self, text: &str, cache: &mut WordCache, tokens: &mut Vec<u32>) {
        let find = |added: &Added, from: usize| {
            added.finder.find(&text.as_bytes()[from..]).map(|found| from + found)
        };
        let mut next: Vec<Option<usize>> = self.added.iter().map(|added| find(added, 0)).collect();
        let mut start = 0;
        loop {
            // Finds the first match in the text, and the longest one at that position.
            let found = next.iter().zip(&self.added).filter_map(|(offset, added)| Some(((*offset)?, added)));
            let length = |added: &Added| added.finder.needle().len();
            let first = found.min_by_key(|(offset, added)| (*offset, usize::MAX - length(added)));
            let Some((offset, added)) = first else { break };
            self.encode_words(&text[start..offset], cache, tokens);
            tokens.push(added.id);
            start = offset + length(added);
            for (offset, added) in next.iter_mut().zip(&self.added) {
                if offset.is_some_and(|offset| offset < start) {
                    *offset = find(added, start);
                }
            }
        }
        self.encode_words(&text[start..], cache, tokens);
    }

    fn encode_words(&self, text: &str, cache: &mut WordCache, tokens: &mut Vec<u32>) {
        let mut start = 0;
        while start < text.len() {
            let end = self.words.end(text, start);
            cache.encode(&self.pairs, text.as_bytes(), start, end, tokens);
            start = end;
        }
    }
}

/// Whether a token matches anywhere, and [`Words::cut`] never splits inside or right before it.
fn is_found_anywhere(token: &AddedToken) -> bool {
    let is_marked = token.single_word || token.lstrip || token.rstrip;
    let content = token.content.as_bytes();
    let begins_a_cut = content.first().is_none_or(u8::is_ascii_alphanumeric);
    !is_marked && !begins_a_cut && content.iter().all(u8::is_ascii_graphic)
}

/// Returns the merges of a model; `None` if it has features that GPT-2's model lacks.
fn byte_pairs(model: &BPE) -> Option<BytePairs> {
    let is_empty = |part: &Option<String>| part.as_deref().unwrap_or_default().is_empty();
    let is_plain = model.dropout.is_none_or(|dropout| dropout == 0.0)
        && is_empty(&model.continuing_subword_prefix)
        && is_empty(&model.end_of_word_suffix)
        && !model.ignore_merges;
    let vocabulary = model.get_vocab();
    let mut ids: Vec<u32> = vocabulary.values().copied().collect();
    ids.sort_unstable();
    // The merge order of tokens that share an id could differ.
    if !is_plain || ids.windows(2).any(|pair| pair[0] == pair[1]) {
        return None;
    }
    let mut bytes = [None; 256];
    for (token, id) in &vocabulary {
        let mut characters = token.chars();
        if let (Some(byte), None) = (characters.next().and_then(byte_of), characters.next()) {
            bytes[usize::from(byte)] = Some(*id);
        }
    }
    // With a token for each byte, no input is unknown.
    let [first, ..] = bytes;
    let mut of_bytes = [first?; 256];
    for (id, found) in of_bytes.iter_mut().zip(bytes) {
        *id = found?;
    }
    let merge = |(first, second): (String, String)| {
        let pair = (*vocabulary.get(&first)?, *vocabulary.get(&second)?);
        Some((pair, *vocabulary.get(&(first + &second))?))
    };
    let merges = merges_of(model)?.into_iter().map(merge).collect::<Option<Vec<_>>>()?;
    Some(BytePairs::new(of_bytes, merges.into_iter()))
}
