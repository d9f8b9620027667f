//! Bits per byte, character and token of any text, computed in windows.

use candle_gpt2_engine::Vocabulary;
use candle_gpt2_generation::Sequence;

use super::lm_eval;
use super::shared::{DEFAULTS, limit, unusable, wrong_setting};
use crate::detokenize::count_words;
use crate::long_text::encode_text;
use crate::metric::Ratio;
use crate::protocol::Parameter;
use crate::{
    Choice, ChoiceResult, Data, EvaluationError, Item, ItemResult, Metric, Prepared, Protocol, Setting,
    Totals, Work,
};

/// Protocol that scores every token of the text, including the first one.
pub(super) const BITS: Protocol = Protocol {
    name: "text:bits",
    about: "any text: bits per byte, character and token, perplexities per byte, token and word",
    source: "this program: every window begins with the start token, and every token is scored once; \
             each text of a JSONL file is scored separately",
    parameter: Some(Parameter {
        default: None,
        about: "distance in tokens between the starts of windows; by default half the model's context",
    }),
    prepare,
    measure,
    ..DEFAULTS
};

fn prepare(data: &Data, setting: &Setting<'_>) -> Result<Prepared, EvaluationError> {
    let n_positions = setting.vocabulary.config().n_positions;
    let stride = match setting.parameter {
        0 => (n_positions / 2).max(1),
        given => stride(given, n_positions)?,
    };
    let prefix = lm_eval::prefix_token(setting.vocabulary)?;
    let (mut ids, mut windows, mut bytes) = (Vec::new(), Vec::new(), 0);
    for text in data.texts()? {
        let before = ids.len();
        ids.extend(encode_text(setting, &text)?);
        bytes += text.len();
        let of_text = &ids[before..];
        // A window is the BOS token and `n_positions` further tokens; the last one is scored but not read.
        let window = |index: usize| {
            let begin = index * stride;
            let scored = if index == 0 { 0 } else { begin + n_positions - stride };
            let end = of_text.len().min(begin + n_positions);
            (scored < end).then(|| {
                let sequence_ids =
                    std::iter::once(prefix).chain(of_text[begin..end].iter().copied()).collect();
                Window {
                    sequence: Sequence { ids: sequence_ids, first: 1 + scored - begin },
                    scored: before + scored..before + end,
                }
            })
        };
        windows.extend((0..).map_while(window));
    }
    windows.truncate(limit(setting)?);
    let tokens = windows.last().map_or(0, |window: &Window| window.scored.end);
    let items: Vec<Item> = windows_as_items(setting.vocabulary, &ids, windows);
    let counted: usize = items.iter().map(bytes_of).sum();
    let mut notes = Vec::new();
    if tokens == ids.len() && counted != bytes {
        notes.push(format!(
            "the tokenizer changes the length of the text from {bytes} to {counted} bytes; metrics use the length of the \
             tokens"
        ));
    }
    let covered =
        ids[..tokens].iter().flat_map(|id| setting.vocabulary.token_bytes(*id)).collect::<Vec<u8>>();
    let words = count_words(&String::from_utf8_lossy(&covered));
    if items.is_empty() {
        return Err(unusable(data, "expected text, found no tokens"));
    }
    Ok(Prepared { items, totals: Totals { tokens, words }, notes, ..Prepared::default() })
}

fn measure(totals: &Totals, results: &[ItemResult]) -> Vec<Metric> {
    let per = |units: fn(&ChoiceResult) -> usize| Ratio::of_texts(results, units);
    let (bytes, tokens) = (per(|text| text.bytes), per(|text| text.tokens));
    let words = bytes.and_then(|nats| nats.per(totals.words));
    let figures = [
        bytes.map(|nats| Metric::bits("bits_per_byte", &nats)),
        per(|text| text.characters).map(|nats| Metric::bits("bits_per_character", &nats)),
        tokens.map(|nats| Metric::bits("bits_per_token", &nats)),
        bytes.map(|nats| Metric::perplexity("byte_perplexity", &nats)),
        tokens.map(|nats| Metric::perplexity("token_perplexity", &nats)),
        words.map(|nats| Metric::perplexity("word_perplexity", &nats)),
    ];
    figures.into_iter().flatten().collect()
}

/// A window of text, with the range of tokens that it scores.
pub(super) struct Window {
    pub(super) sequence: Sequence,
    pub(super) scored: std::ops::Range<usize>,
}

/// Builds an item for each window, with the byte and character counts of its scored tokens.
///
/// A character belongs to the window in which it begins.
pub(super) fn windows_as_items(vocabulary: &Vocabulary, ids: &[u32], windows: Vec<Window>) -> Vec<Item> {
    let item = |(index, Window { sequence, scored }): (usize, Window)| {
        let bytes: Vec<u8> = ids[scored].iter().flat_map(|id| vocabulary.token_bytes(*id)).collect();
        let characters = bytes.iter().filter(|byte| !(0x80..0xc0).contains(*byte)).count();
        let context_tokens = sequence.first;
        let choice = Choice { sequences: vec![sequence], characters, bytes: bytes.len(), words: None };
        let work = Work::Score { choices: vec![choice], gold: None };
        Item { index, id: None, group: None, context_tokens, work }
    };
    windows.into_iter().enumerate().map(item).collect()
}

/// Returns the stride in a protocol's name, which must leave no gaps between windows.
pub(super) fn stride(given: usize, n_positions: usize) -> Result<usize, EvaluationError> {
    if given == 0 || given > n_positions {
        let expected = format!("from 1 to {n_positions} tokens (the model's context)");
        return Err(wrong_setting(
            "the number at the end of the protocol's name",
            expected,
            given.to_string(),
        ));
    }
    Ok(given)
}

fn bytes_of(item: &Item) -> usize {
    match &item.work {
        Work::Score { choices, .. } => choices.iter().map(|choice| choice.bytes).sum(),
        Work::Write { .. } => 0,
    }
}
