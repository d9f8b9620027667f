//! `/v1/embeddings`: a vector for each text, made of the hidden states after the final norm.
//!
//! Source: OpenAI's OpenAPI description, `CreateEmbeddingRequest` and `CreateEmbeddingResponse`; vLLM's `normalize` and
//! `truncate_prompt_tokens`. GPT-2 was not trained to embed: `pooling` chooses the mean over all tokens, or the last token, which alone
//! has seen the whole text.

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Serialize;

use crate::answer::json;
use crate::body::{Field, Fields, Given, Unknown, Use, fields};
use crate::completion::input;
use crate::options::{MAX_NAME_BYTES, truncation};
use crate::prompts::{empty, tokens_of};
use crate::{ApiError, Reply, ServedModel, Warnings};

const SERVED: [Field; 7] = fields(
    ["model", "input", "encoding_format", "dimensions", "pooling", "normalize", "truncate_prompt_tokens"],
    Use::Served,
);
const IGNORED: [Field; 3] = fields(["user", "priority", "add_special_tokens"], Use::Ignored);
const TABLES: [&[Field]; 2] = [&SERVED, &IGNORED];

/// What a body asks for: the texts, and how their vectors are written.
#[derive(Debug)]
pub(crate) struct EmbeddingsCall {
    /// Token ids of each text.
    pub(crate) rows: Vec<Vec<u32>>,
    /// What becomes of their hidden states.
    pub(crate) answer: EmbeddingsAnswer,
}

/// An answer to which the hidden states of one text after the other are added.
#[derive(Debug)]
pub(crate) struct EmbeddingsAnswer {
    model: String,
    width: usize,
    pooling: Pooling,
    normalize: bool,
    is_base64: bool,
    prompt_tokens: usize,
    vectors: Vec<Vec<f32>>,
    warnings: Warnings,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pooling {
    Mean,
    Last,
}

/// The names of the fields that `/v1/embeddings` reads or ignores.
///
/// ```
/// assert!(candle_gpt2_api::embeddings_fields().any(|field| field == "encoding_format"));
/// ```
pub fn embeddings_fields() -> impl Iterator<Item = &'static str> {
    TABLES.into_iter().flatten().map(|field| field.name)
}

impl EmbeddingsCall {
    /// Reads a body.
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let unknown = Unknown::default();
        let fields = Fields::of_body(body, &TABLES, &unknown)?;
        let warnings = served.known(&unknown)?;
        let name = fields.read("model", |given| given.short_text(MAX_NAME_BYTES))?;
        served.check_name(name.as_deref())?;
        let input = input(&fields, served)?;
        let paths: Vec<String> = (0..input.prompts.len()).map(|prompt| input.path(prompt)).collect();
        let tokens = tokens_of(input, fields.read("truncate_prompt_tokens", truncation)?, 0, served)?;
        if let Some(place) = tokens.iter().position(|tokens| tokens.told_from > 0) {
            return Err(empty(&paths[place]));
        }
        let width = served.config().n_embd;
        fields.read("dimensions", |given| match given.count(0..=usize::MAX)? {
            found if found == width => Ok(()),
            _ => Err(given.wrong(format!("{width}, which is the width of this model"))),
        })?;
        let rows: Vec<Vec<u32>> = tokens.into_iter().map(|tokens| tokens.ids).collect();
        let answer = EmbeddingsAnswer {
            model: served.name().to_owned(),
            width,
            pooling: fields.read("pooling", pooling)?.unwrap_or(Pooling::Mean),
            normalize: fields.boolean("normalize", true)?,
            is_base64: fields.read("encoding_format", is_base64)?.unwrap_or(false),
            prompt_tokens: rows.iter().map(Vec::len).sum(),
            vectors: Vec::with_capacity(rows.len()),
            warnings,
        };
        Ok(Self { rows, answer })
    }
}

fn pooling(given: Given<'_, '_>) -> Result<Pooling, ApiError> {
    match given.text()?.as_str() {
        "mean" => Ok(Pooling::Mean),
        "last" => Ok(Pooling::Last),
        _ => Err(given.wrong("\"mean\" or \"last\"")),
    }
}

fn is_base64(given: Given<'_, '_>) -> Result<bool, ApiError> {
    match given.text()?.as_str() {
        "float" => Ok(false),
        "base64" => Ok(true),
        _ => Err(given.wrong("\"float\" or \"base64\"")),
    }
}

impl EmbeddingsAnswer {
    /// Tokens of all texts.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Adds the vector of the next text: `hidden_states` `(T, C)` after the final norm, token by token.
    pub(crate) fn add(&mut self, hidden_states: &[f32]) {
        let tokens = hidden_states.chunks_exact(self.width);
        let mut vector = vec![0.0; self.width];
        let (used, count) = match self.pooling {
            Pooling::Mean => (0, tokens.len()),
            Pooling::Last => (tokens.len().saturating_sub(1), 1),
        };
        for token in tokens.skip(used) {
            vector.iter_mut().zip(token).for_each(|(sum, x)| *sum += f64::from(*x) / count as f64);
        }
        let norm = vector.iter().map(|x| x * x).sum::<f64>().sqrt();
        let scale = if self.normalize && norm > 0.0 { norm.recip() } else { 1.0 };
        #[expect(clippy::cast_possible_truncation, reason = "embeddings are f32, as hidden states are")]
        self.vectors.push(vector.into_iter().map(|x| (x * scale) as f32).collect());
    }

    /// The answer.
    pub(crate) fn into_reply(self) -> Result<Reply, ApiError> {
        if self.vectors.iter().flatten().any(|x| !x.is_finite()) {
            return Err(ApiError::failed("hidden states that are not finite"));
        }
        let written = |vector: Vec<f32>| match self.is_base64 {
            true => {
                let bytes: Vec<u8> = vector.into_iter().flat_map(f32::to_le_bytes).collect();
                Written::Base64(STANDARD.encode(bytes))
            }
            false => Written::Float(vector),
        };
        let entry = |(index, vector)| Entry { object: "embedding", index, embedding: written(vector) };
        let data = self.vectors.into_iter().enumerate().map(entry).collect();
        let usage = Usage { prompt_tokens: self.prompt_tokens, total_tokens: self.prompt_tokens };
        let response = json(&Response { object: "list", data, model: &self.model, usage });
        Ok(Reply::new(response, self.warnings))
    }
}

#[derive(Serialize)]
struct Response<'a> {
    object: &'a str,
    data: Vec<Entry>,
    model: &'a str,
    usage: Usage,
}

#[derive(Serialize)]
struct Entry {
    object: &'static str,
    index: usize,
    embedding: Written,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Written {
    Float(Vec<f32>),
    /// Numbers of four bytes, the lowest first.
    Base64(String),
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: usize,
    total_tokens: usize,
}
