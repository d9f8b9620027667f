//! Responses as JSON.
//!
//! Source: OpenAI's OpenAPI description, `CreateCompletionResponse`, `CreateChatCompletionResponse` and
//! `CreateChatCompletionStreamResponse`.

use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::json;

use super::entries::{Entry, of_prompt, of_text};
use super::options::{Head, ResponseOptions, Shape};
use super::text::{PromptAnswer, Sent, TextAnswer};
use crate::pieces::Pieces;

/// Fingerprint that distinguishes server versions whose output may differ under the same seed.
const FINGERPRINT: &str = concat!("gpt2-", env!("CARGO_PKG_VERSION"));

/// Complete response or one chunk.
pub(super) struct Response<'a> {
    pub(super) head: &'a Head,
    pub(super) options: &'a ResponseOptions,
    pub(super) choices: &'a [Choice<'a>],
    /// Token counts: absent, null or present.
    pub(super) usage: Option<Option<Usage>>,
}

/// Token counts of the prompts and the completions.
pub(super) struct Usage {
    pub(super) prompt_tokens: usize,
    pub(super) completion_tokens: usize,
    /// Number of cached prompt tokens, if reported.
    pub(super) cached_tokens: Option<usize>,
}

/// Choice: a whole completion, or the next part of one in a stream.
pub(super) struct Choice<'a> {
    pub(super) index: usize,
    pub(super) options: &'a ResponseOptions,
    pub(super) pieces: &'a Pieces,
    pub(super) prompt: &'a PromptAnswer,
    /// Whether the choice includes the prompt.
    pub(super) echo: bool,
    /// Whether this is the first chunk of the completion.
    pub(super) is_first: bool,
    /// Completion, and how much of it has already been sent.
    pub(super) text: Option<(&'a TextAnswer, Sent)>,
}

/// Serializes a value. Cannot fail, because all map keys are strings and all numbers are finite.
pub(crate) fn json(answer: &impl Serialize) -> String {
    serde_json::to_string(answer).unwrap_or_default()
}

impl Serialize for Response<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Head { id, created, model, seed } = self.head;
        let object = match (self.options.shape, self.options.stream) {
            (Shape::Completion | Shape::Activations, _) => "text_completion",
            (Shape::Chat, false) => "chat.completion",
            (Shape::Chat, true) => "chat.completion.chunk",
        };
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("id", id)?;
        map.serialize_entry("object", object)?;
        map.serialize_entry("created", created)?;
        map.serialize_entry("model", model)?;
        map.serialize_entry("system_fingerprint", FINGERPRINT)?;
        map.serialize_entry("choices", self.choices)?;
        if let Some(usage) = &self.usage {
            map.serialize_entry("usage", usage)?;
        }
        if let Some(seed) = seed {
            map.serialize_entry("seed", seed)?;
        }
        map.end()
    }
}

impl Serialize for Usage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { prompt_tokens, completion_tokens, cached_tokens } = self;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("prompt_tokens", prompt_tokens)?;
        map.serialize_entry("completion_tokens", completion_tokens)?;
        map.serialize_entry("total_tokens", &(prompt_tokens + completion_tokens))?;
        if let Some(cached_tokens) = cached_tokens {
            map.serialize_entry("prompt_tokens_details", &json!({ "cached_tokens": cached_tokens }))?;
        }
        map.end()
    }
}

impl Serialize for Choice<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("index", &self.index)?;
        self.write_text(&mut map)?;
        if self.options.logprobs {
            let entries = self.entries();
            match self.options.shape {
                Shape::Chat => map.serialize_entry("logprobs", &ChatLogprobs(&entries, self.pieces))?,
                _ => map.serialize_entry("logprobs", &CompletionLogprobs(&entries))?,
            }
        } else {
            map.serialize_entry("logprobs", &())?;
        }
        let finish = self.text.and_then(|(text, _)| text.finish.as_ref());
        map.serialize_entry("finish_reason", &finish.map(|finish| finish.reason))?;
        map.serialize_entry("stop_reason", &finish.map(|finish| &finish.stop_reason))?;
        if self.options.return_token_ids {
            let ids = self.text.and_then(|(text, sent)| text.ids.get(sent.ids..));
            map.serialize_entry("token_ids", &ids.unwrap_or_default())?;
            let has_prompt_ids = self.is_first || !self.options.stream;
            map.serialize_entry("prompt_token_ids", &has_prompt_ids.then_some(&self.prompt.ids))?;
        }
        if let (Some((text, _)), Some(shown)) = (self.text, &self.options.shown)
            && let Some(activations) = &text.activations
        {
            activations.write(&mut map, shown, (self.prompt, text), self.pieces)?;
        }
        map.end()
    }
}

impl Choice<'_> {
    fn write_text<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        let new = self.text.and_then(|(text, sent)| text.text.get(sent.text..)).unwrap_or_default();
        match (self.options.shape, self.options.stream) {
            (Shape::Completion | Shape::Activations, _) => {
                let echoed = if self.echo { self.prompt.text.as_str() } else { "" };
                map.serialize_entry("text", &format_args!("{echoed}{new}"))
            }
            (Shape::Chat, false) => map
                .serialize_entry("message", &json!({ "role": "assistant", "content": new, "refusal": null })),
            (Shape::Chat, true) if self.is_first => {
                map.serialize_entry("delta", &json!({ "role": "assistant", "content": new }))
            }
            (Shape::Chat, true) if new.is_empty() => map.serialize_entry("delta", &json!({})),
            (Shape::Chat, true) => map.serialize_entry("delta", &json!({ "content": new })),
        }
    }

    fn entries(&self) -> Vec<Entry> {
        let mut entries =
            if self.echo { of_prompt(self.prompt, self.options, self.pieces) } else { Vec::new() };
        if let Some((text, sent)) = self.text {
            entries.extend(of_text(text, sent.entries, self.prompt.chars, self.options, self.pieces));
        }
        entries
    }
}

/// Log-probabilities for a completion: four lists of equal length.
struct CompletionLogprobs<'a>(&'a [Entry]);

impl Serialize for CompletionLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(entries) = self;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("tokens", &List(|| entries.iter().map(|entry| entry.name.as_str())))?;
        map.serialize_entry("token_logprobs", &List(|| entries.iter().map(|entry| entry.logprob)))?;
        map.serialize_entry("top_logprobs", &List(|| entries.iter().map(TopLogprobs)))?;
        map.serialize_entry("text_offset", &List(|| entries.iter().map(|entry| entry.offset)))?;
        map.end()
    }
}

/// Serializes an iterator as a list.
pub(crate) struct List<F>(pub(crate) F);

impl<F: Fn() -> I, I: Iterator<Item: Serialize>> Serialize for List<F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((self.0)())
    }
}

/// Most probable tokens plus the token itself, or null for the first token.
struct TopLogprobs<'a>(&'a Entry);

impl Serialize for TopLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Entry { id, name, logprob, alternatives, .. } = self.0;
        let Some(logprob) = logprob else { return serializer.serialize_none() };
        let is_among = alternatives.iter().any(|alternative| alternative.id == *id);
        let own = (!is_among).then_some((name, logprob));
        let others = alternatives.iter().map(|alternative| (&alternative.name, &alternative.logprob));
        serializer.collect_map(others.chain(own))
    }
}

/// Log-probabilities for a chat reply: `{content: [{token, logprob, bytes, top_logprobs}]}`.
struct ChatLogprobs<'a>(&'a [Entry], &'a Pieces);

impl Serialize for ChatLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(entries, pieces) = self;
        let token = |id: u32, name: &str, logprob: Option<f64>| {
            let bytes = if name.is_empty() { &[] } else { pieces.bytes(id) };
            json!({ "token": name, "logprob": logprob, "bytes": bytes })
        };
        let entry_json = |entry: &Entry| {
            let alternatives = entry.alternatives.iter();
            let mut value = token(entry.id, &entry.name, entry.logprob);
            value["top_logprobs"] =
                alternatives.map(|other| token(other.id, &other.name, Some(other.logprob))).collect();
            value
        };
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("content", &List(|| entries.iter().map(entry_json)))?;
        map.serialize_entry("refusal", &())?;
        map.end()
    }
}
