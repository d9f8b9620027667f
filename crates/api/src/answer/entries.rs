//! Token log-probabilities in responses.

use candle_gpt2_generation::TokenLogprobs;

use super::options::ResponseOptions;
use super::text::{PromptAnswer, TextAnswer};
use crate::pieces::{Pieces, name};

/// Substitute for the logarithm of zero, which JSON cannot represent.
const LOGPROB_OF_ZERO: f64 = -9999.0;

/// Token with its log-probability and alternatives.
pub(super) struct Entry {
    pub(super) id: u32,
    pub(super) name: String,
    /// Log-probability; `None` for the first token.
    pub(super) logprob: Option<f64>,
    /// Most probable tokens at this position, in descending order of probability and with unique names.
    pub(super) alternatives: Vec<Alternative>,
    /// Character offset of the token in the prompt followed by the completion.
    pub(super) offset: usize,
}

pub(super) struct Alternative {
    pub(super) id: u32,
    pub(super) name: String,
    pub(super) logprob: f64,
}

/// Origin of a token; determines whether special tokens appear by name.
#[derive(Clone, Copy)]
enum TokenOrigin {
    Prompt,
    Text,
}

/// Creates the entries for a prompt's tokens.
pub(super) fn of_prompt(prompt: &PromptAnswer, options: &ResponseOptions, pieces: &Pieces) -> Vec<Entry> {
    let scores = prompt.scores.iter().skip(prompt.echo_start);
    let tokens = prompt.reported_ids().iter().zip(&prompt.offsets).zip(scores);
    tokens
        .map(|((id, offset), score)| {
            entry(TokenOrigin::Prompt, *id, *offset, score.as_ref(), options, pieces)
        })
        .collect()
}

/// Creates the entries for a completion's tokens, starting with the token at index `sent`.
pub(super) fn of_text(
    text: &TextAnswer,
    sent: usize,
    chars_before: usize,
    options: &ResponseOptions,
    pieces: &Pieces,
) -> Vec<Entry> {
    let tokens = text.ids.iter().zip(&text.offsets).zip(&text.logprobs);
    let tokens = tokens.take(text.reportable_entries()).skip(sent);
    tokens
        .map(|((id, offset), logprobs)| {
            entry(TokenOrigin::Text, *id, chars_before + offset, Some(logprobs), options, pieces)
        })
        .collect()
}

fn entry(
    origin: TokenOrigin,
    id: u32,
    offset: usize,
    logprobs: Option<&TokenLogprobs>,
    options: &ResponseOptions,
    pieces: &Pieces,
) -> Entry {
    let by_id = |id: u32| format!("token_id:{id}");
    let own_name = match origin {
        _ if options.tokens_as_ids => by_id(id),
        // Special tokens add nothing to generated text.
        TokenOrigin::Text if pieces.is_hidden(id) => String::new(),
        TokenOrigin::Prompt | TokenOrigin::Text => name(pieces.bytes(id)),
    };
    let mut alternatives: Vec<Alternative> = Vec::new();
    for (other, logprob) in logprobs.into_iter().flat_map(|logprobs| &logprobs.alternatives) {
        let mut name = match (*other == id, options.tokens_as_ids) {
            (true, _) => own_name.clone(),
            (false, true) => by_id(*other),
            (false, false) => name(pieces.bytes(*other)),
        };
        let is_taken = alternatives.iter().any(|taken| taken.name == name);
        if *other != id && (is_taken || name == own_name) {
            name = by_id(*other);
        }
        alternatives.push(Alternative { id: *other, name, logprob: written_logprob(*logprob) });
    }
    let logprob = logprobs.map(|logprobs| written_logprob(logprobs.logprob));
    Entry { id, name: own_name, logprob, alternatives, offset }
}

fn written_logprob(logprob: f64) -> f64 {
    logprob.max(LOGPROB_OF_ZERO)
}
