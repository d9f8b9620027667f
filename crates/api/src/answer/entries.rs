//! Log-probabilities of tokens in answers: their names and numbers.

use candle_gpt2_generation::TokenLogprobs;

use super::text::{PromptAnswer, TextAnswer};
use super::wants::Wants;
use crate::pieces::{Pieces, name};

/// Written for the logarithm of zero, which JSON cannot hold.
const LOGPROB_OF_ZERO: f64 = -9999.0;

/// A token with its log-probability and those of others in its place.
pub(super) struct Entry {
    pub(super) id: u32,
    pub(super) name: String,
    /// `None` for a token with nothing before it.
    pub(super) logprob: Option<f64>,
    /// The most probable tokens in its place, most probable first, under different names.
    pub(super) alternatives: Vec<Alternative>,
    /// Its place in prompt and text, in characters.
    pub(super) offset: usize,
}

pub(super) struct Alternative {
    pub(super) id: u32,
    pub(super) name: String,
    pub(super) logprob: f64,
}

/// Whether a token is written with its name, or as what it shows.
#[derive(Clone, Copy)]
enum Of {
    Prompt,
    Text,
}

/// Those of a prompt's tokens.
pub(super) fn of_prompt(prompt: &PromptAnswer, wants: &Wants, pieces: &Pieces) -> Vec<Entry> {
    let scores = prompt.scores.iter().skip(prompt.told_from);
    let told = prompt.told().iter().zip(&prompt.offsets).zip(scores);
    told.map(|((id, offset), score)| entry(Of::Prompt, *id, *offset, score.as_ref(), wants, pieces)).collect()
}

/// Those of a text's tokens from number `sent` on.
pub(super) fn of_text(
    text: &TextAnswer,
    sent: usize,
    chars_before: usize,
    wants: &Wants,
    pieces: &Pieces,
) -> Vec<Entry> {
    let told = text.ids.iter().zip(&text.offsets).zip(&text.logprobs);
    let told = told.take(text.told_entries()).skip(sent);
    told.map(|((id, offset), logprobs)| {
        entry(Of::Text, *id, chars_before + offset, Some(logprobs), wants, pieces)
    })
    .collect()
}

fn entry(
    of: Of,
    id: u32,
    offset: usize,
    logprobs: Option<&TokenLogprobs>,
    wants: &Wants,
    pieces: &Pieces,
) -> Entry {
    let by_id = |id: u32| format!("token_id:{id}");
    let own_name = match of {
        _ if wants.tokens_as_ids => by_id(id),
        // The end of a text shows nothing.
        Of::Text if pieces.is_hidden(id) => String::new(),
        Of::Prompt | Of::Text => name(pieces.bytes(id)),
    };
    let mut alternatives: Vec<Alternative> = Vec::new();
    for (other, logprob) in logprobs.into_iter().flat_map(|logprobs| &logprobs.alternatives) {
        let mut name = match (*other == id, wants.tokens_as_ids) {
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
