//! Conversion of token ids to text, shared by all callers.

use tokenizers::decoders::DecoderWrapper;
use tokenizers::normalizers::byte_level::ByteLevel;
use tokenizers::{Decoder, NormalizedString, Normalizer, Tokenizer};

use crate::GenerationError;

/// Decodes `ids` like the `tokenizers` library, except that added tokens decode literally.
///
/// A byte-level decoder reads each character of a token as a byte. The library reads added tokens the
/// same way and turns `für` into `f\u{FFFD}r`.
///
/// Invalid bytes become U+FFFD. SentencePiece models mix bytes and pieces; for them, only bytes outside
/// valid characters are replaced. Ids without a token produce no text. Neither do special tokens if
/// `skip_special_tokens` is set.
///
/// ```
/// use candle_gpt2_generation::decode;
/// use candle_gpt2_weights::{END_OF_TEXT, Tokenizer, encode};
///
/// let tokenizer = Tokenizer::from_bytes(candle_gpt2_stories::TOKENIZER)?;
/// let mut ids = encode(&tokenizer, "a café")?;
/// ids.extend(tokenizer.token_to_id(END_OF_TEXT));
/// assert_eq!(decode(&tokenizer, &ids, true)?, "a café");
/// assert_eq!(decode(&tokenizer, &ids, false)?, "a café<|endoftext|>");
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
///
/// # Errors
/// Returns an error if the tokenizer's decoder fails.
pub fn decode(
    tokenizer: &Tokenizer,
    ids: &[u32],
    skip_special_tokens: bool,
) -> Result<String, GenerationError> {
    let added = tokenizer.get_added_vocabulary();
    let token = |id: &u32| {
        let token = tokenizer.id_to_token(*id)?;
        let is_skipped = skip_special_tokens && added.is_special_token(&token);
        (!is_skipped).then(|| match added.get_added_tokens_decoder().contains_key(id) {
            true => spelling(tokenizer, token),
            false => token,
        })
    };
    let mut tokens: Vec<String> = ids.iter().filter_map(token).collect();
    if tokenizer.get_decoder().is_some_and(is_sentence_piece) {
        replace_invalid_bytes(&mut tokens);
    }
    // The library's `BPEDecoder` panics on an empty list.
    let Some(decoder) = tokenizer.get_decoder().filter(|_| !tokens.is_empty()) else {
        return Ok(tokens.join(" "));
    };
    decoder.decode(tokens).map_err(|error| GenerationError::Decode(error.to_string()))
}

/// Returns whether `load_tokenizer` made this decoder for a SentencePiece model with byte fallback.
fn is_sentence_piece(decoder: &DecoderWrapper) -> bool {
    /// Placeholder for a space, used until the decoder strips leading spaces.
    const SPACE_MARK: &str = "\u{10FFFE}";
    let is_marked =
        |part: &DecoderWrapper| matches!(part, DecoderWrapper::Replace(part) if part.content == SPACE_MARK);
    contains(decoder, is_marked)
        && contains(decoder, |decoder| matches!(decoder, DecoderWrapper::ByteFallback(_)))
}

/// Replaces each byte token that is not part of a character with U+FFFD, as SentencePiece does.
///
/// The library would replace all bytes of a run that contains an invalid byte.
fn replace_invalid_bytes(tokens: &mut Vec<String>) {
    let mut replaced = Vec::with_capacity(tokens.len());
    for run in
        tokens.chunk_by(|first, second| fallback_byte(first).is_some() == fallback_byte(second).is_some())
    {
        let bytes: Vec<u8> = run.iter().filter_map(|token| fallback_byte(token)).collect();
        if bytes.is_empty() {
            replaced.extend_from_slice(run);
        }
        let mut run = run.iter();
        for chunk in bytes.utf8_chunks() {
            replaced.extend(run.by_ref().take(chunk.valid().len()).cloned());
            let invalid = run.by_ref().take(chunk.invalid().len());
            replaced.extend(invalid.map(|_| char::REPLACEMENT_CHARACTER.to_string()));
        }
    }
    *tokens = replaced;
}

/// Returns the byte of a token such as `<0xE2>`.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 2)
}

/// Returns the spelling that the decoder turns back into the literal text.
///
/// This is a spelling in GPT-2's byte alphabet if the decoder reads that alphabet.
fn spelling(tokenizer: &Tokenizer, literal: String) -> String {
    let mut spelled = NormalizedString::from(literal.as_str());
    let is_spelled = ByteLevel::new().normalize(&mut spelled).is_ok();
    let decoded =
        tokenizer.get_decoder().and_then(|decoder| decoder.decode(vec![spelled.get().to_owned()]).ok());
    if is_spelled && decoded.as_ref() == Some(&literal) { spelled.get().to_owned() } else { literal }
}

/// Returns whether the text of token `id` depends on its neighbors.
///
/// This holds for a byte such as `<0xE2>` in a vocabulary with byte fallback. If consecutive bytes are
/// not valid UTF-8 as a whole, each decodes to one U+FFFD. With a SentencePiece model, only the bytes
/// outside valid characters do.
///
/// ```
/// use candle_gpt2_generation::is_fallback_byte;
/// use candle_gpt2_weights::Tokenizer;
///
/// let tokenizer = Tokenizer::from_bytes(candle_gpt2_stories::TOKENIZER)?;
/// assert!(!is_fallback_byte(&tokenizer, 1), "a byte-level vocabulary needs no fallback");
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
pub fn is_fallback_byte(tokenizer: &Tokenizer, id: u32) -> bool {
    let is_fallback = |decoder: &DecoderWrapper| matches!(decoder, DecoderWrapper::ByteFallback(_));
    tokenizer.get_decoder().is_some_and(|decoder| contains(decoder, is_fallback))
        && tokenizer.id_to_token(id).is_some_and(|token| fallback_byte(&token).is_some())
}

fn contains(decoder: &DecoderWrapper, is_wanted: impl Fn(&DecoderWrapper) -> bool + Copy) -> bool {
    match decoder {
        DecoderWrapper::Sequence(parts) => parts.get_decoders().iter().any(|part| contains(part, is_wanted)),
        part => is_wanted(part),
    }
}
