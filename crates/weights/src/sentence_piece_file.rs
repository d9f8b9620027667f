//! Conversion of SentencePiece model files, such as `spiece.model`, to `tokenizer.json`.
//!
//! All other code can then treat them like any tokenizer, with the same limits, special tokens and
//! decoders. `sentence_piece` encodes the texts; it recognizes the [`Shape`] that this module writes.

use std::collections::{HashMap, HashSet};

use serde::Serialize;
use serde_json::{Value, json};

use crate::charsmap::Charsmap;
use crate::model_proto::{BPE, ModelProto, Piece, UNIGRAM, kind};
use crate::sentence_piece::{Shape, byte_of};

/// Advice for an unsupported model.
const REMEDY: &str =
    "save a tokenizer.json with transformers (`AutoTokenizer.from_pretrained(…).save_pretrained(…)`)";
/// Maximum number of bytes compared while deriving BPE merges.
const MAX_MERGE_BYTES: usize = 1 << 30;
/// Maximum number of merges per BPE piece; models trained by sentencepiece have about three.
const MAX_MERGES_PER_PIECE: usize = 16;

#[derive(Serialize)]
struct File<'a> {
    version: &'a str,
    truncation: Value,
    padding: Value,
    added_tokens: Vec<Value>,
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
    model: Model<'a>,
}

#[derive(Serialize)]
#[serde(tag = "type")]
enum Model<'a> {
    Unigram {
        unk_id: usize,
        vocab: Vec<(&'a str, f32)>,
        byte_fallback: bool,
    },
    #[serde(rename = "BPE")]
    Bpe {
        unk_token: &'a str,
        fuse_unk: bool,
        byte_fallback: bool,
        vocab: HashMap<&'a str, usize>,
        merges: Vec<(&'a str, &'a str)>,
    },
}

/// Whether a file looks like a SentencePiece model, judging by its first piece.
pub(crate) fn is_model(bytes: &[u8]) -> bool {
    // Field 1 of the model with a length of one or two bytes, then field 1 of the piece, its text.
    matches!(bytes, [0x0a, length, 0x0a, ..] if *length < 0x80)
        || matches!(bytes, [0x0a, 0x80..=0xff, _, 0x0a, ..])
}

/// Converts a model file to `tokenizer.json`; `is_cleaned` adds the text cleaning of `GPTSw3Tokenizer`.
///
/// # Errors
/// If the file is corrupt, or uses an unsupported SentencePiece feature.
pub(crate) fn tokenizer_json(bytes: &[u8], is_cleaned: bool) -> Result<String, String> {
    let model = ModelProto::new(bytes)?;
    let unknown = check(&model)?;
    let unknown_piece = model.pieces[unknown].text;
    let (trainer, normalizer) = (&model.trainer, &model.normalizer);
    let shape = Shape {
        is_cleaned,
        add_dummy_prefix: normalizer.add_dummy_prefix,
        remove_extra_whitespaces: normalizer.remove_extra_whitespaces,
        escape_whitespaces: normalizer.escape_whitespaces,
    };
    let byte_fallback = trainer.byte_fallback;
    let added = |(id, piece): (usize, &Piece)| {
        let is_special = [kind::UNKNOWN, kind::CONTROL].contains(&piece.kind);
        let is_added = is_special || piece.kind == kind::USER_DEFINED;
        is_added.then(|| {
            json!({
                "id": id, "content": piece.text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": is_special,
            })
        })
    };
    let file = File {
        version: "1.0",
        truncation: Value::Null,
        padding: Value::Null,
        added_tokens: model.pieces.iter().enumerate().filter_map(added).collect(),
        normalizer: shape.normalizer(normalizer.precompiled_charsmap),
        pre_tokenizer: Value::Null,
        post_processor: Value::Null,
        decoder: shape.decoder(unknown_piece, trainer.unk_surface, byte_fallback),
        model: match trainer.model_type {
            UNIGRAM => Model::Unigram {
                unk_id: unknown,
                vocab: model.pieces.iter().map(|piece| (piece.text, piece.score)).collect(),
                byte_fallback,
            },
            _ => Model::Bpe {
                unk_token: unknown_piece,
                fuse_unk: true,
                byte_fallback,
                vocab: model.pieces.iter().map(|piece| piece.text).zip(0..).collect(),
                merges: merges(&model.pieces)?,
            },
        },
    };
    serde_json::to_string(&file).map_err(|error| error.to_string())
}

/// Checks that the model is supported, and returns the id of the unknown piece.
fn check(model: &ModelProto) -> Result<usize, String> {
    let ModelProto { pieces, trainer, normalizer, has_denormalizer } = model;
    if pieces.is_empty() {
        return Err(
            "not a SentencePiece model, or a damaged one: it contains no pieces; download it again".into()
        );
    }
    let mut unknown = None;
    let mut seen = HashSet::new();
    let mut bytes = 0;
    for (index, piece) in pieces.iter().enumerate() {
        let refuse = |what: String| Err(format!("pieces[{index}]: {what}"));
        if piece.text.is_empty() {
            return refuse("the piece is empty; remove it".into());
        }
        if !seen.insert(piece.text) {
            return refuse(format!("duplicate piece {:?}; remove one", piece.text));
        }
        if !piece.score.is_finite() {
            return refuse(format!(
                "the score of {:?} is {}; expected a finite number",
                piece.text, piece.score
            ));
        }
        match piece.kind {
            kind::NORMAL | kind::CONTROL | kind::USER_DEFINED => {}
            kind::UNKNOWN => {
                if let Some(first) = unknown.replace(index) {
                    return refuse(format!("a second unknown piece, after pieces[{first}]; remove one"));
                }
            }
            kind::BYTE if trainer.byte_fallback && byte_of(piece.text).is_some() => bytes += 1,
            kind::BYTE if trainer.byte_fallback => {
                return refuse(format!("byte piece {:?} is not a byte such as <0x0A>", piece.text));
            }
            kind::BYTE => return refuse("a byte piece, but trainer_spec.byte_fallback is false".into()),
            other => return refuse(format!("the type {other} is unsupported; {REMEDY}")),
        }
    }
    if trainer.byte_fallback && bytes != 256 {
        return Err(format!(
            "trainer_spec.byte_fallback is true, but only {bytes} of 256 bytes are pieces; {REMEDY}"
        ));
    }
    if ![UNIGRAM, BPE].contains(&trainer.model_type) {
        let name = match trainer.model_type {
            3 => "WORD",
            4 => "CHAR",
            _ => "unknown",
        };
        return Err(format!(
            "trainer_spec.model_type: {} ({name}) is unsupported; expected 1 (UNIGRAM) or 2 (BPE); {REMEDY}",
            trainer.model_type
        ));
    }
    if trainer.treat_whitespace_as_suffix {
        return Err(format!("trainer_spec.treat_whitespace_as_suffix is unsupported; {REMEDY}"));
    }
    if *has_denormalizer {
        return Err(format!("denormalizer_spec.precompiled_charsmap is unsupported; {REMEDY}"));
    }
    if !normalizer.precompiled_charsmap.is_empty() {
        Charsmap::new(normalizer.precompiled_charsmap).map_err(|error| {
            format!("normalizer_spec.precompiled_charsmap {error}; download the file again")
        })?;
    }
    unknown.ok_or_else(|| "pieces: no unknown piece (type 2); download the file again".into())
}

/// Derives BPE merges: all splits of a piece into two pieces, highest-scoring pieces first.
fn merges<'a>(pieces: &[Piece<'a>]) -> Result<Vec<(&'a str, &'a str)>, String> {
    let too_long = |what: &str| format!("pieces: {what}; {REMEDY}");
    let ids: HashMap<&str, usize> = pieces.iter().map(|piece| piece.text).zip(0..).collect();
    let mut normal: Vec<&Piece> = pieces.iter().filter(|piece| piece.kind == kind::NORMAL).collect();
    normal.sort_by(|first, second| second.score.total_cmp(&first.score));
    let mut merges = Vec::new();
    let mut compared = 0;
    for piece in normal {
        let mut divisions = Vec::new();
        for (split, _) in piece.text.char_indices().skip(1) {
            compared += piece.text.len();
            if compared > MAX_MERGE_BYTES {
                return Err(too_long("their total length is too large to derive the merges"));
            }
            let (first, second) = piece.text.split_at(split);
            if let (Some(first_id), Some(second_id)) = (ids.get(first), ids.get(second)) {
                divisions.push((*first_id, *second_id, (first, second)));
            }
        }
        divisions.sort_unstable();
        merges.extend(divisions.into_iter().map(|(_, _, merge)| merge));
        if merges.len() > MAX_MERGES_PER_PIECE * pieces.len() {
            return Err(too_long("too many of them can be split into two other pieces"));
        }
    }
    Ok(merges)
}
