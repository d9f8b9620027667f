//! The tokens of much text: those that the tokenizer gives, in a fraction of its time.
//!
//! A tokenizer that is GPT-2's (its words, byte pairs, nothing normalised, and added tokens that are found everywhere)
//! is implemented here, and SentencePiece's in `sentence_piece`; every other one is called itself.

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
use crate::library::{encode_whole, merges_of, places_of_library, without_panic};
use crate::library_encoder::LibraryEncoder;
use crate::sentence_piece::SentencePiece;
use crate::word_cache::WordCache;
use crate::words::Words;

/// Bytes of a text that are encoded at once, about.
const PIECE_BYTES: usize = 1 << 18;
/// The same for tokenizers that are asked themselves. Of their words nothing is known, so shorter texts stay whole.
const FOREIGN_PIECE_BYTES: usize = 1 << 20;
/// Added tokens that are looked for one by one.
const MOST_ADDED: usize = 16;

/// Encodes texts as a tokenizer does, without the special tokens that it may put around them. Threads share it, each with an
/// [`EncoderSession`].
///
/// The tokens are those of [`encode_piece`](crate::encode_piece), except after more than a million spaces in a row: there the engine of
/// expressions that [`Tokenizer`] is built with gives up and leaves the rest in one word, while here, as in its Python
/// package, spaces are spaces.
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
    own: Option<Own>,
    sentence_piece: Option<SentencePiece>,
    /// Every other tokenizer, unless it truncates or pads, or its post-processor drops the text.
    library: Option<LibraryEncoder>,
    /// Special tokens before and after a text.
    around: Option<(Vec<u32>, Vec<u32>)>,
}

/// A tokenizer that is borrowed or shared.
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

/// Ids with the characters of the text that each stands for.
type PlacedTokens = (Vec<u32>, Vec<Range<usize>>);

/// What encodes one text after the other in one thread. [`TextEncoder::session`] begins one.
pub struct EncoderSession<'a> {
    encoder: &'a TextEncoder<'a>,
    cache: WordCache,
}

/// GPT-2's tokenizer, written out.
struct Own {
    words: Words,
    pairs: BytePairs,
    added: Vec<Added>,
}

/// A token that stands for itself in a text.
struct Added {
    finder: Finder<'static>,
    id: u32,
}

impl<'a> TextEncoder<'a> {
    /// Returns an encoder with the tokens of `tokenizer`.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self::of(Source::Borrowed(tokenizer))
    }

    fn of(tokenizer: Source<'a>) -> Self {
        let own = Own::of(&tokenizer);
        let around = around(&tokenizer);
        let sentence_piece = SentencePiece::new(&tokenizer).filter(|_| around.is_some());
        let is_other = own.is_none() && sentence_piece.is_none() && around.is_some();
        let library = if is_other { LibraryEncoder::new(&tokenizer) } else { None };
        Self { own, sentence_piece, library, around, tokenizer }
    }

    /// Encodes a text, with the special tokens that the tokenizer adds if `special_tokens`.
    ///
    /// Takes little memory for each byte of the text wherever the text can be cut between words, see
    /// [`TextEncoder::memory`].
    ///
    /// # Errors
    /// If the tokenizer cannot encode the text, or would take too long.
    pub fn encode(&self, text: &str, special_tokens: bool) -> Result<Vec<u32>, WeightsError> {
        let Some((before, after)) = &self.around else {
            return encode_whole(&self.tokenizer, text, special_tokens);
        };
        let mut ids = if special_tokens { before.clone() } else { Vec::new() };
        match (&self.own, &self.sentence_piece, &self.library) {
            (Some(own), ..) => own.encode(text, &mut WordCache::new(), &mut ids),
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

    /// Encodes a text like [`encode_with_places`](crate::encode_with_places), which has an example.
    ///
    /// # Errors
    /// Same as [`TextEncoder::encode`].
    pub fn encode_with_places(&self, text: &str) -> Result<PlacedTokens, WeightsError> {
        let (Some((before, after)), Some(model)) = (&self.around, &self.sentence_piece) else {
            return places_of_library(&self.tokenizer, text);
        };
        let pieces = model.encode(text, self.tokenizer.get_encode_special_tokens());
        let placed = |pieces: Vec<(u32, Range<usize>)>| {
            let (mut ids, mut places) = (before.clone(), vec![0..0; before.len()]);
            // Places only grow, so that one pass counts the characters.
            let (mut byte, mut character) = (0, 0);
            let mut characters = |place: usize| {
                let (part, is_back) = match place.checked_sub(byte) {
                    Some(_) => (byte..place, false),
                    None => (place..byte, true),
                };
                let count = text[part].chars().count();
                character = if is_back { character - count } else { character + count };
                byte = place;
                character
            };
            for (id, place) in pieces {
                let start = characters(place.start);
                ids.push(id);
                places.push(start..characters(place.end));
            }
            ids.extend(after);
            places.resize(ids.len(), 0..0);
            (ids, places)
        };
        pieces.map(placed).map_err(|error| WeightsError::Encode { error })
    }

    /// Whether even short texts need an encoder, which is then worth keeping. True for models of SentencePiece.
    pub fn is_needed(tokenizer: &Tokenizer) -> bool {
        SentencePiece::is_shape_of(tokenizer)
    }

    /// Upper bound on the bytes of memory that [`TextEncoder::encode`] takes for a text.
    pub fn memory(&self, text: &str) -> usize {
        /// Taken for a word as long as the text, and for the cache of short words.
        const OWN_BYTES_PER_BYTE: usize = 80;
        match (&self.own, &self.sentence_piece, &self.library) {
            (Some(_), ..) => text.len().saturating_mul(OWN_BYTES_PER_BYTE).saturating_add(WordCache::BYTES),
            (_, Some(model), _) => text.len().saturating_mul(model.bytes_per_byte()),
            (.., Some(library)) => library.memory(text),
            _ => LibraryEncoder::whole_memory(&self.tokenizer, text),
        }
    }

    /// Whether the tokenizer is GPT-2's, which is written out here.
    pub fn is_own(&self) -> bool {
        self.own.is_some()
    }

    /// Upper bound on the bytes of memory that [`encode_with_places`](crate::encode_with_places) takes for a text.
    pub fn memory_with_places(&self, text: &str) -> usize {
        if self.sentence_piece.is_some() {
            return self.memory(text);
        }
        LibraryEncoder::memory_with_places(&self.tokenizer, text)
    }

    /// Bytes of a text that are worth encoding at once.
    pub fn piece_bytes(&self) -> usize {
        if self.is_own() { PIECE_BYTES } else { FOREIGN_PIECE_BYTES }
    }

    /// The first place from `from` on where a text may be cut: the tokens of the pieces, one after the other, are those of the
    /// whole. `bytes` may be no text at all. Of the words of a tokenizer that is not GPT-2's nothing is known: it cuts before
    /// a line break with something visible after it, and what it gives for the pieces is what counts.
    pub fn cut(&self, bytes: &[u8], from: usize) -> Option<usize> {
        let is_line =
            |place: &usize| bytes[*place] == b'\n' && bytes.get(place + 1).is_some_and(u8::is_ascii_graphic);
        match &self.own {
            Some(own) => own.words.cut(bytes, from),
            None => (from.max(1)..bytes.len()).find(is_line),
        }
    }

    /// What encodes texts in one thread.
    pub fn session(&self) -> EncoderSession<'_> {
        EncoderSession { encoder: self, cache: WordCache::new() }
    }
}

impl TextEncoder<'static> {
    /// Returns an encoder that shares the tokenizer.
    pub fn shared(tokenizer: Arc<Tokenizer>) -> Self {
        Self::of(Source::Shared(tokenizer))
    }
}

/// Special tokens that the tokenizer adds before and after a text; `None` if it does more than that.
fn around(tokenizer: &Tokenizer) -> Option<(Vec<u32>, Vec<u32>)> {
    /// Stands for the text.
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
    /// Appends the tokens of a text.
    ///
    /// # Errors
    /// When the tokenizer cannot encode it.
    pub fn encode(&mut self, text: &str, tokens: &mut Vec<u32>) -> Result<(), WeightsError> {
        match &self.encoder.own {
            Some(own) => own.encode(text, &mut self.cache, tokens),
            None => tokens.extend(self.encoder.encode(text, false)?),
        }
        Ok(())
    }
}

impl Own {
    /// `None` if the tokenizer is another one, in anything that could matter.
    fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let is_plain = tokenizer.get_normalizer().is_none()
            && tokenizer.get_truncation().is_none()
            && !tokenizer.get_encode_special_tokens();
        let Some(PreTokenizerWrapper::ByteLevel(words)) = tokenizer.get_pre_tokenizer() else { return None };
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
        if !is_plain || !words.use_regex || words.add_prefix_space {
            return None;
        }
        let added: Vec<(u32, AddedToken)> = tokenizer.get_added_tokens_decoder().into_iter().collect();
        // Those of one kind are looked for before those of the other.
        let is_one_kind = added.windows(2).all(|pair| pair[0].1.normalized == pair[1].1.normalized);
        let are_found = added.iter().all(|(_, token)| is_found_anywhere(token));
        if added.len() > MOST_ADDED || !is_one_kind || !are_found {
            return None;
        }
        let finder = |token: &AddedToken| Finder::new(&token.content).into_owned();
        let added = added.iter().map(|(id, token)| Added { finder: finder(token), id: *id }).collect();
        Some(Self { words: Words::new()?, pairs: byte_pairs(model)?, added })
    }

    /// Appends the tokens of a text. The parts between added tokens are cut into words by themselves.
    fn encode(&self, text: &str, cache: &mut WordCache, tokens: &mut Vec<u32>) {
        let find = |added: &Added, from: usize| {
            added.finder.find(&text.as_bytes()[from..]).map(|found| from + found)
        };
        let mut next: Vec<Option<usize>> = self.added.iter().map(|added| find(added, 0)).collect();
        let mut start = 0;
        loop {
            // The first one in the text, and of several there the longest.
            let found = next.iter().zip(&self.added).filter_map(|(place, added)| Some(((*place)?, added)));
            let length = |added: &Added| added.finder.needle().len();
            let first = found.min_by_key(|(place, added)| (*place, usize::MAX - length(added)));
            let Some((place, added)) = first else { break };
            self.encode_words(&text[start..place], cache, tokens);
            tokens.push(added.id);
            start = place + length(added);
            for (place, added) in next.iter_mut().zip(&self.added) {
                if place.is_some_and(|place| place < start) {
                    *place = find(added, start);
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

/// Whether a token is found wherever its characters are, and [`Words::cut`] never cuts through it or before it.
fn is_found_anywhere(token: &AddedToken) -> bool {
    let is_marked = token.single_word || token.lstrip || token.rstrip;
    let content = token.content.as_bytes();
    let begins_a_cut = content.first().is_none_or(u8::is_ascii_alphanumeric);
    !is_marked && !begins_a_cut && content.iter().all(u8::is_ascii_graphic)
}

/// The merges of a model, `None` if it does more than GPT-2's.
fn byte_pairs(model: &BPE) -> Option<BytePairs> {
    let is_empty = |part: &Option<String>| part.as_deref().unwrap_or_default().is_empty();
    let is_plain = model.dropout.is_none_or(|dropout| dropout == 0.0)
        && is_empty(&model.continuing_subword_prefix)
        && is_empty(&model.end_of_word_suffix)
        && !model.ignore_merges;
    let vocabulary = model.get_vocab();
    let mut ids: Vec<u32> = vocabulary.values().copied().collect();
    ids.sort_unstable();
    // Tokens that share an id could be joined in an order of their own.
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
    // With a token for each byte, nothing is unknown.
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
