//! SentencePiece encoding: normalization, then the best segmentation into pieces.
//!
//! This encoder returns the ids of the `sentencepiece` package. The tokenizers library has the same models,
//! but differs in three ways: it normalizes by grapheme, matches control pieces in text, and does not
//! support user-defined pieces inside words.
//!
//! Settings come from a tokenizer in the [`Shape`] that `sentence_piece_file` writes. Sources:
//! `normalizer.cc`, `unigram_model.cc` (`EncodeOptimized`) and `bpe_model.cc` of sentencepiece 0.2.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::ops::Range;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tokenizers::Tokenizer;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::models::unigram::Unigram;
use tokenizers::normalizers::NormalizerWrapper;

use crate::charsmap::Charsmap;
use crate::cleaning;
use crate::library::merges_of;
use crate::library_encoder::Budget;
use crate::prefix_table::PrefixTable;

/// Character that represents a space in SentencePiece.
const SPACE: &str = "\u{2581}";
/// Placeholder for [`SPACE`] in decoders until leading spaces are removed.
///
/// It keeps spaces that come from byte pieces.
const SPACE_MARK: &str = "\u{10FFFE}";
/// Placeholder for an unknown piece in decoders. It keeps the spaces around the piece's text.
const UNKNOWN_MARK: &str = "\u{10FFFF}";
/// Difference between the lowest piece score and the score of an unknown character.
const UNKNOWN_PENALTY: f32 = 10.0;

/// Settings of a SentencePiece model that determine its normalizer and decoder in `tokenizer.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Whether to clean texts as `GPTSw3Tokenizer` does.
    pub(crate) is_cleaned: bool,
    /// Whether to prepend a space to the text.
    pub(crate) add_dummy_prefix: bool,
    /// Whether to strip spaces at both ends and collapse repeated ones.
    pub(crate) remove_extra_whitespaces: bool,
    /// Whether to encode spaces as [`SPACE`].
    pub(crate) escape_whitespaces: bool,
}

impl Shape {
    /// Returns all combinations of the settings other than `is_cleaned`.
    fn all(is_cleaned: bool) -> impl Iterator<Item = Self> {
        (0..8).map(move |bits: u8| Self {
            is_cleaned,
            add_dummy_prefix: bits & 1 == 1,
            remove_extra_whitespaces: bits & 2 == 2,
            escape_whitespaces: bits & 4 == 4,
        })
    }

    /// Builds a normalizer that starts with a nested sequence of cleaning and charsmap, if present.
    ///
    /// No other program writes such a nested sequence, so it identifies tokenizers that encode like
    /// SentencePiece.
    pub(crate) fn normalizer(self, charsmap: &[u8]) -> Value {
        let map = json!({ "type": "Precompiled", "precompiled_charsmap": STANDARD.encode(charsmap) });
        let mut first = if self.is_cleaned { cleaning::normalizers().to_vec() } else { Vec::new() };
        first.extend((!charsmap.is_empty()).then_some(map));
        let mut parts = vec![json!({ "type": "Sequence", "normalizers": first })];
        parts.extend(self.further_normalizers());
        json!({ "type": "Sequence", "normalizers": parts })
    }

    fn further_normalizers(self) -> Vec<Value> {
        let space = self.space();
        let mut parts = Vec::new();
        if self.remove_extra_whitespaces {
            parts.push(replace(&json!({ "Regex": "^ +" }), ""));
            parts.push(replace(&json!({ "Regex": "(?<= ) +" }), ""));
        }
        if self.add_dummy_prefix {
            parts.push(json!({ "type": "Prepend", "prepend": space }));
        }
        if self.escape_whitespaces {
            parts.push(replace(&json!({ "String": " " }), SPACE));
        }
        if self.remove_extra_whitespaces {
            parts.push(replace(&json!({ "Regex": format!("{space}+$") }), ""));
        }
        parts
    }

    /// Builds a decoder that restores spaces and removes those added by the normalizer.
    pub(crate) fn decoder(self, unknown: &str, unknown_surface: &str, byte_fallback: bool) -> Value {
        let text = |text: &str| json!({ "String": text });
        let mut parts = vec![replace(&text(unknown), UNKNOWN_MARK), replace(&text(SPACE), SPACE_MARK)];
        if byte_fallback {
            parts.push(json!({ "type": "ByteFallback" }));
        }
        parts.push(json!({ "type": "Fuse" }));
        if self.remove_extra_whitespaces {
            parts.push(replace(&json!({ "Regex": format!("^{SPACE_MARK}+") }), ""));
        } else if self.add_dummy_prefix {
            parts.push(replace(&json!({ "Regex": format!("^{SPACE_MARK}") }), ""));
        }
        parts.push(replace(&text(SPACE_MARK), " "));
        parts.push(replace(&text(UNKNOWN_MARK), unknown_surface));
        json!({ "type": "Sequence", "decoders": parts })
    }

    fn space(self) -> &'static str {
        if self.escape_whitespaces { SPACE } else { " " }
    }
}

fn replace(pattern: &Value, content: &str) -> Value {
    json!({ "type": "Replace", "pattern": pattern, "content": content })
}

/// Returns a piece's bytes: a single byte, or its text with spaces restored.
///
/// `None` if the decoder is not one of [`Shape::decoder`].
pub(crate) fn piece_bytes(decoder: Option<&DecoderWrapper>, piece: &str) -> Option<Vec<u8>> {
    let Some(DecoderWrapper::Sequence(parts)) = decoder else { return None };
    let parts = parts.get_decoders();
    let is_shaped =
        |part: &DecoderWrapper| matches!(part, DecoderWrapper::Replace(part) if part.content == SPACE_MARK);
    if !parts.iter().any(is_shaped) {
        return None;
    }
    let has_bytes = parts.iter().any(|part| matches!(part, DecoderWrapper::ByteFallback(_)));
    match byte_of(piece).filter(|_| has_bytes) {
        Some(byte) => Some(vec![byte]),
        None => Some(piece.replace(SPACE, " ").into_bytes()),
    }
}

/// Returns the byte of a piece such as `<0x0A>`.
pub(crate) fn byte_of(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_plain = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    u8::from_str_radix(digits, 16).ok().filter(|_| is_plain)
}

/// Encoder for a SentencePiece model.
pub(crate) struct SentencePiece {
    shape: Shape,
    charsmap: Option<Charsmap>,
    /// User-defined pieces, which normalization leaves unchanged.
    user_defined: PrefixTable,
    /// Added tokens, which split the text into parts.
    added: PrefixTable,
    /// Added tokens that are not special.
    plain_added: PrefixTable,
    model: Model,
    unknown: u32,
    /// Byte pieces for unknown characters, indexed by byte.
    bytes: Option<Box<[u32; 256]>>,
}

enum Model {
    Unigram(UnigramModel),
    Bpe(BpeModel),
}

/// Unigram model: finds the most probable segmentation.
struct UnigramModel {
    pieces: PrefixTable,
    /// Score of each id.
    scores: Vec<f32>,
    unknown_score: f32,
    is_user_defined: Vec<bool>,
}

/// BPE model: repeatedly merges the best pair of neighbors.
struct BpeModel {
    /// Rank of each piece that a merge creates; lower is better.
    ranks: HashMap<String, u32>,
    ids: HashMap<String, u32>,
}

/// Ids with their byte ranges in the text.
type Found = Vec<(u32, Range<usize>)>;

/// Normalized text and, for each of its bytes, the source offset; the last offset marks the end.
struct Normalized {
    text: String,
    offsets: Vec<usize>,
}

impl SentencePiece {
    /// Whether a tokenizer is structured like a SentencePiece [`Shape`].
    pub(crate) fn is_shape_of(tokenizer: &Tokenizer) -> bool {
        let Some(NormalizerWrapper::Sequence(parts)) = tokenizer.get_normalizer() else { return false };
        let is_first_nested = matches!(parts.as_ref().first(), Some(NormalizerWrapper::Sequence(_)));
        is_first_nested && tokenizer.get_pre_tokenizer().is_none()
    }

    /// Creates an encoder; `None` for tokenizers that do not match a SentencePiece [`Shape`].
    pub(crate) fn new(tokenizer: &Tokenizer) -> Option<Self> {
        if !Self::is_shape_of(tokenizer) {
            return None;
        }
        let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
        let [first, further @ ..] = normalizer["normalizers"].as_array()?.as_slice() else { return None };
        let first = first["normalizers"].as_array()?.as_slice();
        let cleaned = first.strip_prefix(&cleaning::normalizers());
        let charsmap = match cleaned.unwrap_or(first) {
            [] => None,
            [map] => {
                let bytes = STANDARD.decode(map["precompiled_charsmap"].as_str()?).ok()?;
                Some(Charsmap::new(&bytes).ok()?)
            }
            _ => return None,
        };
        let shape = Shape::all(cleaned.is_some()).find(|shape| shape.further_normalizers() == further)?;
        let decoder = serde_json::to_value(tokenizer.get_decoder()).ok()?;
        let unknown_piece = decoder["decoders"][0]["pattern"]["String"].as_str()?.to_owned();
        let surface = decoder["decoders"].as_array()?.last()?["content"].as_str()?;
        let byte_fallback = [false, true]
            .into_iter()
            .find(|bytes| shape.decoder(&unknown_piece, surface, *bytes) == decoder)?;
        let unknown = tokenizer.token_to_id(&unknown_piece)?;

        let pieces = tokenizer.get_vocab_size(false);
        let is_piece = |id: u32| (id as usize) < pieces;
        let added: Vec<_> = tokenizer.get_added_tokens_decoder().into_iter().collect();
        let entry = |(id, token): &(u32, tokenizers::AddedToken)| (token.content.clone().into_bytes(), *id);
        let user_defined =
            added.iter().filter(|(id, token)| is_piece(*id) && !token.special).map(entry).collect::<Vec<_>>();
        let special = added.iter().filter(|(_, token)| token.special).map(entry);
        let plain: Vec<_> =
            added.iter().filter(|(id, token)| !is_piece(*id) && !token.special).map(entry).collect();
        let all = special.chain(plain.iter().cloned()).collect();

        let special_ids: HashSet<u32> =
            added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        let is_byte = |piece: &str| byte_fallback && byte_of(piece).is_some();
        let is_text = |piece: &str, id: u32| !special_ids.contains(&id) && !is_byte(piece);
        let model = match tokenizer.get_model() {
            ModelWrapper::Unigram(model) => Model::Unigram(UnigramModel::new(model, is_text, &user_defined)),
            ModelWrapper::BPE(model) => Model::Bpe(BpeModel::new(model)?),
            _ => return None,
        };
        let bytes = match byte_fallback {
            true => {
                let mut bytes = Box::new([unknown; 256]);
                for byte in 0..=u8::MAX {
                    bytes[usize::from(byte)] = tokenizer.token_to_id(&format!("<0x{byte:02X}>"))?;
                }
                Some(bytes)
            }
            false => None,
        };
        Some(Self {
            shape,
            charsmap,
            user_defined: PrefixTable::new(user_defined),
            added: PrefixTable::new(all),
            plain_added: PrefixTable::new(plain),
            model,
            unknown,
            bytes,
        })
    }

    /// Returns an upper bound on the encoding memory, in bytes per byte of text.
    pub(crate) fn bytes_per_byte(&self) -> usize {
        /// BPE symbols and pairs with spare capacity, in bytes per normalized byte.
        const PER_NORMALIZED_BYTE: f64 = 160.0;
        let growth = self.charsmap.as_ref().map_or(1.0, |map| map.growth().total);
        let (cleaned, cleaning) = match self.shape.is_cleaned {
            true => (cleaning::GROWTH, cleaning::GROWTH * cleaning::BYTES_PER_BYTE),
            false => (1.0, 0.0),
        };
        // A space becomes three bytes.
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a small positive number"
        )]
        let bytes = ((growth + 3.0) * cleaned * PER_NORMALIZED_BYTE + cleaning) as usize;
        bytes
    }

    /// Encodes text and returns the ids with their byte ranges.
    ///
    /// With `is_plain`, names of special tokens are treated as text.
    ///
    /// # Errors
    /// If the pieces of the vocabulary are so long that encoding would take too long.
    pub(crate) fn encode(&self, text: &str, is_plain: bool) -> Result<Found, String> {
        let mut found = Vec::new();
        let mut budget = Budget::new(text.len());
        let added = if is_plain { &self.plain_added } else { &self.added };
        let mut start = 0;
        if !added.is_empty() {
            let mut offset = 0;
            while offset < text.len() {
                match added.longest(&text.as_bytes()[offset..], &mut budget)? {
                    Some((length, id)) => {
                        self.encode_part(text, start..offset, &mut budget, &mut found)?;
                        found.push((id, offset..offset + length));
                        offset += length;
                        start = offset;
                    }
                    None => offset += 1,
                }
            }
        }
        self.encode_part(text, start..text.len(), &mut budget, &mut found)?;
        Ok(found)
    }

    fn encode_part(
        &self,
        text: &str,
        part: Range<usize>,
        budget: &mut Budget,
        found: &mut Found,
    ) -> Result<(), String> {
        let text = &text[part.clone()];
        let Normalized { text, offsets } = match self.shape.is_cleaned {
            true => {
                let (cleaned, sources) = cleaning::clean(text);
                let mut normalized = self.normalize(&cleaned, budget)?;
                normalized.offsets.iter_mut().for_each(|offset| *offset = sources[*offset]);
                normalized
            }
            false => self.normalize(text, budget)?,
        };
        let pieces = match &self.model {
            Model::Unigram(model) => model.divide(&text, self.unknown, budget)?,
            Model::Bpe(model) => model.divide(&text, &self.user_defined, self.unknown, budget)?,
        };
        let mut is_after_unknown = false;
        for (id, piece) in pieces {
            let range = part.start + offsets[piece.start]..part.start + offsets[piece.end];
            let is_unknown = id == self.unknown;
            match (&self.bytes, found.last_mut()) {
                (Some(bytes), _) if is_unknown => {
                    let bytes = text[piece].bytes().map(|byte| bytes[usize::from(byte)]);
                    found.extend(bytes.map(|id| (id, range.clone())));
                }
                // Adjacent unknown characters form a single piece.
                (None, Some((_, last))) if is_unknown && is_after_unknown => last.end = range.end,
                _ => found.push((id, range)),
            }
            is_after_unknown = is_unknown;
        }
        Ok(())
    }

    fn normalize(&self, text: &str, budget: &mut Budget) -> Result<Normalized, String> {
        let Shape { add_dummy_prefix, remove_extra_whitespaces, .. } = self.shape;
        let mut normalized = Normalized { text: String::with_capacity(text.len() + 3), offsets: Vec::new() };
        let mut offset = 0;
        if remove_extra_whitespaces {
            while let Some((length, " ")) = self.normalized_prefix(&text[offset..], budget)? {
                offset += length;
            }
        }
        if offset == text.len() {
            normalized.offsets.push(0);
            return Ok(normalized);
        }
        let space = self.shape.space();
        if add_dummy_prefix {
            normalized.push(space, offset);
        }
        let mut is_after_space = remove_extra_whitespaces;
        while let Some((length, prefix)) = self.normalized_prefix(&text[offset..], budget)? {
            let prefix = if is_after_space { prefix.trim_start_matches(' ') } else { prefix };
            let mut bytes = [0; 4];
            for character in prefix.chars() {
                let written = if character == ' ' { space } else { character.encode_utf8(&mut bytes) };
                normalized.push(written, offset);
            }
            if !prefix.is_empty() {
                is_after_space = remove_extra_whitespaces && prefix.ends_with(' ');
            }
            offset += length;
        }
        if remove_extra_whitespaces {
            while normalized.text.ends_with(space) {
                let length = normalized.text.len() - space.len();
                offset = normalized.offsets[length];
                normalized.text.truncate(length);
                normalized.offsets.truncate(length);
            }
        }
        normalized.offsets.push(offset);
        Ok(normalized)
    }

    /// Normalizes the next unit of text, and returns its length and result; `None` at the end.
    fn normalized_prefix<'a>(
        &'a self,
        text: &'a str,
        budget: &mut Budget,
    ) -> Result<Option<(usize, &'a str)>, String> {
        if let Some((length, _)) = self.user_defined.longest(text.as_bytes(), budget)? {
            return Ok(Some((length, &text[..length])));
        }
        let replaced = self.charsmap.as_ref().and_then(|map| map.longest_match(text.as_bytes()));
        // The keys of a corrupt charsmap could end inside a character.
        let replaced = replaced.filter(|(length, _)| text.is_char_boundary(*length));
        let first = || text.chars().next().map(|first| (first.len_utf8(), &text[..first.len_utf8()]));
        Ok(replaced.or_else(first))
    }
}

impl Normalized {
    fn push(&mut self, text: &str, offset: usize) {
        self.text.push_str(text);
        self.offsets.extend(std::iter::repeat_n(offset, text.len()));
    }
}

impl UnigramModel {
    fn new(model: &Unigram, is_text: impl Fn(&str, u32) -> bool, user_defined: &[(Vec<u8>, u32)]) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "the file has 32-bit scores")]
        let scores: Vec<f32> = model.iter().map(|(_, score)| *score as f32).collect();
        let mut is_user_defined = vec![false; scores.len()];
        for (_, id) in user_defined {
            is_user_defined[*id as usize] = true;
        }
        let pieces = (0..).zip(model.iter()).filter(|(id, (piece, _))| is_text(piece, *id));
        let pieces: Vec<(Vec<u8>, u32)> =
            pieces.map(|(id, (piece, _))| (piece.clone().into_bytes(), id)).collect();
        let normal = pieces.iter().map(|(_, id)| *id as usize).filter(|id| !is_user_defined[*id]);
        let unknown_score = normal.map(|id| scores[id]).fold(f32::MAX, f32::min) - UNKNOWN_PENALTY;
        Self { pieces: PrefixTable::new(pieces), scores, unknown_score, is_user_defined }
    }

    fn score(&self, id: u32) -> f32 {
        /// Score of a user-defined piece: below zero, but above all other pieces.
        const USER_DEFINED: f32 = -0.1;
        match self.is_user_defined[id as usize] {
            true => USER_DEFINED,
            false => self.scores[id as usize],
        }
    }

    /// Returns the ids of the best segmentation, with their ranges.
    fn divide(&self, text: &str, unknown: u32, budget: &mut Budget) -> Result<Found, String> {
        /// Best segmentation of a prefix of the text: its score and last piece.
        #[derive(Clone, Copy)]
        struct Best {
            score: f32,
            start: usize,
            id: u32,
        }
        const NONE: usize = usize::MAX;
        let bytes = text.as_bytes();
        let mut ends = vec![Best { score: 0.0, start: NONE, id: unknown }; bytes.len() + 1];
        for (start, character) in text.char_indices() {
            let before = ends[start].score;
            let mut offer = |end: usize, id: u32, score: f32| {
                let score = before + score;
                if ends[end].start == NONE || score > ends[end].score {
                    ends[end] = Best { score, start, id };
                }
            };
            let mut is_known = false;
            let mut prefixes = self.pieces.prefixes(&bytes[start..]);
            for (length, id) in &mut prefixes {
                // Pieces consist of whole characters, like the text.
                offer(start + length, id, self.score(id));
                is_known |= length == character.len_utf8();
            }
            prefixes.spend(budget)?;
            if !is_known {
                offer(start + character.len_utf8(), unknown, self.unknown_score);
            }
        }
        let mut found = Vec::new();
        let mut end = bytes.len();
        while end > 0 {
            let best = ends[end];
            found.push((best.id, best.start..end));
            end = best.start;
        }
        found.reverse();
        Ok(found)
    }
}

/// Part of the text that a BPE may merge with its neighbors.
///
/// It becomes empty once merged into its left neighbor.
struct Symbol {
    range: Range<usize>,
    before: Option<usize>,
    after: Option<usize>,
    is_frozen: bool,
}

/// Pair of adjacent symbols, ordered for a heap: lowest rank first, then leftmost.
#[derive(PartialEq, Eq)]
struct Pair {
    rank: u32,
    left: usize,
    right: usize,
    length: usize,
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.rank, other.left).cmp(&(self.rank, self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl BpeModel {
    fn new(model: &BPE) -> Option<Self> {
        let mut ranks = HashMap::new();
        for ((first, second), rank) in merges_of(model)?.into_iter().zip(0..) {
            ranks.entry(first + &second).or_insert(rank);
        }
        Some(Self { ranks, ids: model.get_vocab().into_iter().collect() })
    }

    /// Returns the ids of the pieces with their ranges; `user_defined` pieces stay whole.
    fn divide(
        &self,
        text: &str,
        user_defined: &PrefixTable,
        unknown: u32,
        budget: &mut Budget,
    ) -> Result<Found, String> {
        let mut symbols: Vec<Symbol> = Vec::new();
        let mut start = 0;
        while let Some(character) = text[start..].chars().next() {
            let frozen = user_defined.longest(&text.as_bytes()[start..], budget)?.map(|(length, _)| length);
            let end = start + frozen.unwrap_or(character.len_utf8());
            let index = symbols.len();
            symbols.push(Symbol {
                range: start..end,
                before: index.checked_sub(1),
                after: (end < text.len()).then_some(index + 1),
                is_frozen: frozen.is_some(),
            });
            start = end;
        }
        let pair = |symbols: &[Symbol], left: Option<usize>, right: Option<usize>| {
            let (left, right) = (left?, right?);
            let (first, second) = (&symbols[left], &symbols[right]);
            if first.is_frozen || second.is_frozen {
                return None;
            }
            let joined = first.range.start..second.range.end;
            let rank = *self.ranks.get(&text[joined.clone()])?;
            Some(Pair { rank, left, right, length: joined.len() })
        };
        let mut queue = BinaryHeap::new();
        for right in 1..symbols.len() {
            queue.extend(pair(&symbols, right.checked_sub(1), Some(right)));
        }
        while let Some(Pair { left, right, length, .. }) = queue.pop() {
            let (first, second) = (symbols[left].range.clone(), symbols[right].range.clone());
            // At least one of the symbols has been merged since the pair was queued.
            if first.is_empty() || second.is_empty() || first.len() + second.len() != length {
                continue;
            }
            budget.spend(length)?;
            let after = symbols[right].after;
            symbols[left].range.end = second.end;
            symbols[left].after = after;
            symbols[right].range.start = second.end;
            if let Some(after) = after {
                symbols[after].before = Some(left);
            }
            queue.extend(pair(&symbols, symbols[left].before, Some(left)));
            queue.extend(pair(&symbols, Some(left), after));
        }
        let pieces = symbols.into_iter().map(|symbol| symbol.range).filter(|range| !range.is_empty());
        let id = |range: &Range<usize>| self.ids.get(&text[range.clone()]).copied().unwrap_or(unknown);
        Ok(pieces.map(|range| (id(&range), range)).collect())
    }
}
