//! SentencePiece's model files, `spiece.model`, as a `tokenizer.json`.
//!
//! The rest of the program then treats them like any other tokenizer: the same limits, special tokens and decoders. Texts are
//! encoded by `sentence_piece`, which recognizes the [`Shape`] that is written here.

use std::collections::{HashMap, HashSet};

use serde::Serialize;
use serde_json::{Value, json};

use crate::charsmap::Charsmap;
use crate::model_proto::{BPE, ModelProto, Piece, UNIGRAM, kind};
use crate::sentence_piece::{Shape, byte_of};

/// Advice for a model that is not read.
const WAY_OUT: &str =
    "save a tokenizer.json with transformers (`AutoTokenizer.from_pretrained(…).save_pretrained(…)`)";
/// Largest number of comparisons that the search for the merges of a BPE takes, in bytes.
const MAX_MERGE_BYTES: usize = 1 << 30;
/// Most merges of a BPE for each of its pieces; those that sentencepiece trains have about three.
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

/// Whether a file is a model of SentencePiece, judging by its first piece.
pub(crate) fn is_model(bytes: &[u8]) -> bool {
    // Field 1 of the model with its length, which may take two bytes, and field 1 of the piece: its text.
    matches!(bytes, [0x0a, length, 0x0a, ..] if *length < 0x80)
        || matches!(bytes, [0x0a, 0x80..=0xff, _, 0x0a, ..])
}

/// The `tokenizer.json` of a model file. `is_cleaned`: texts are cleaned as `GPTSw3Tokenizer` does.
///
/// # Errors
/// If the file is damaged, or uses a part of SentencePiece that is unsupported.
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

/// Checks the parts that have to be supported, and returns the id of the unknown piece.
fn check(model: &ModelProto) -> Result<usize, String> {
    let ModelProto { pieces, trainer, normalizer, has_denormalizer } = model;
    if pieces.is_empty() {
        return Err(
            "not a model of SentencePiece, or a damaged one: pieces is empty; download it again".into()
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
            return refuse(format!("{:?} is there a second time; remove one", piece.text));
        }
        if !piece.score.is_finite() {
            return refuse(format!("the score of {:?} is {}; give it a number", piece.text, piece.score));
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
                return refuse(format!("{:?} is not a byte such as <0x0A>", piece.text));
            }
            kind::BYTE => return refuse("a byte, and trainer_spec.byte_fallback is false".into()),
            other => return refuse(format!("the type {other} is unsupported; {WAY_OUT}")),
        }
    }
    if trainer.byte_fallback && bytes != 256 {
        return Err(format!(
            "trainer_spec.byte_fallback is true, and {bytes} of 256 bytes are pieces; {WAY_OUT}"
        ));
    }
    if ![UNIGRAM, BPE].contains(&trainer.model_type) {
        let name = match trainer.model_type {
            3 => "WORD",
            4 => "CHAR",
            _ => "unknown",
        };
        return Err(format!(
            "trainer_spec.model_type: {} ({name}) is unsupported, expected 1 (UNIGRAM) or 2 (BPE); {WAY_OUT}",
            trainer.model_type
        ));
    }
    if trainer.treat_whitespace_as_suffix {
        return Err(format!("trainer_spec.treat_whitespace_as_suffix is unsupported; {WAY_OUT}"));
    }
    if *has_denormalizer {
        return Err(format!("denormalizer_spec.precompiled_charsmap is unsupported; {WAY_OUT}"));
    }
    if !normalizer.precompiled_charsmap.is_empty() {
        Charsmap::new(normalizer.precompiled_charsmap).map_err(|error| {
            format!("normalizer_spec.precompiled_charsmap {error}; download the file again")
        })?;
    }
    unknown.ok_or_else(|| "pieces: no unknown piece (type 2); download the file again".into())
}

/// Merges of a BPE: every division of a piece into two others, the pieces with the highest scores first.
fn merges<'a>(pieces: &[Piece<'a>]) -> Result<Vec<(&'a str, &'a str)>, String> {
    let too_long = |what: &str| format!("pieces: {what}; {WAY_OUT}");
    let ids: HashMap<&str, usize> = pieces.iter().map(|piece| piece.text).zip(0..).collect();
    let mut normal: Vec<&Piece> = pieces.iter().filter(|piece| piece.kind == kind::NORMAL).collect();
    normal.sort_by(|first, second| second.score.total_cmp(&first.score));
    let mut merges = Vec::new();
    let mut compared = 0;
    for piece in normal {
        let mut divisions = Vec::new();
        for (place, _) in piece.text.char_indices().skip(1) {
            compared += piece.text.len();
            if compared > MAX_MERGE_BYTES {
                return Err(too_long("they are too long to search for merges"));
            }
            let (first, second) = piece.text.split_at(place);
            if let (Some(first_id), Some(second_id)) = (ids.get(first), ids.get(second)) {
                divisions.push((*first_id, *second_id, (first, second)));
            }
        }
        divisions.sort_unstable();
        merges.extend(divisions.into_iter().map(|(_, _, merge)| merge));
        if merges.len() > MAX_MERGES_PER_PIECE * pieces.len() {
            return Err(too_long("too many of them are divisible into others"));
        }
    }
    Ok(merges)
}
