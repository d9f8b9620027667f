//! `/v1/embeddings`: one vector for each text, from the hidden states after the final norm.
//!
//! Source: OpenAI's OpenAPI description, `CreateEmbeddingRequest` and `CreateEmbeddingResponse`; vLLM's
//! `normalize` and `truncate_prompt_tokens`.
//!
//! GPT-2 was not trained to produce embeddings. `pooling` selects the mean over all tokens or the last token,
//! which is the only one that attends to the whole text.

use serde::Serialize;

use crate::answer::json;
use crate::body::{Body, Fields, Integer, Text, fields, words};
use crate::completion::Prompts;
use crate::encoding::{Encoding, Numbers};
use crate::options::{MAX_NAME_BYTES, Truncation};
use crate::prompts::tokens_of;
use crate::{ApiError, Reply, ServedModel, Warnings};

fields! {
    /// Fields of `/v1/embeddings`.
    EmbeddingFields {
        /// The served name of the model, or an alias; may be absent.
        model: Option<Text<MAX_NAME_BYTES>>,
        /// A text, a list of texts, token ids, or lists of token ids; none may be empty.
        @required input: Option<Prompts>,
        /// Vector encoding: `float` (a list of numbers) or `base64` (little-endian f32 values).
        encoding_format: Encoding = Encoding::Float,
        /// Vector size; only the model's hidden size is supported.
        dimensions: Option<Integer>,
        /// Pooling method: `mean` (of all hidden states) or `last` (the last token's hidden state).
        pooling: Pooling = Pooling::Mean,
        /// Whether vectors are divided by their Euclidean norm.
        normalize: bool = true,
        /// Number of tokens to keep from the end of a text; -1 keeps all that fit into the context.
        truncate_prompt_tokens: Option<Truncation>,
    }
    ignored ["user", "priority", "add_special_tokens"]
}

words! {
    /// Pooling method that reduces a text's hidden states to one vector.
    Pooling { "mean" => Mean, "last" => Last }
}

/// Texts to embed, and the answer that collects the vectors.
#[derive(Debug)]
pub(crate) struct EmbeddingsCall {
    /// Token ids of each text.
    pub(crate) rows: Vec<Vec<u32>>,
    /// Answer that collects the vectors.
    pub(crate) answer: EmbeddingsAnswer,
}

/// Answer that collects the vectors, one text at a time.
#[derive(Debug)]
pub(crate) struct EmbeddingsAnswer {
    model: String,
    width: usize,
    pooling: Pooling,
    normalize: bool,
    encoding: Encoding,
    prompt_tokens: usize,
    vectors: Vec<Vec<f32>>,
    warnings: Warnings,
}

impl EmbeddingsCall {
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let body = Body::parse(body, EmbeddingFields::fields())?;
        let warnings = served.checked_warnings(&body)?;
        let fields: EmbeddingFields = body.read()?;
        served.check_name(fields.model.as_ref())?;
        let input = Prompts::of_input(fields.input, served)?;
        let tokens = tokens_of(input, fields.truncate_prompt_tokens, 0, served)?;
        if let Some(tokens) = tokens.iter().find(|tokens| tokens.echo_start > 0) {
            let message = format!("{}: the text is empty; add some text", tokens.path);
            return Err(ApiError::invalid(message).with_param(&tokens.path));
        }
        let width = served.config().n_embd;
        if fields.dimensions.is_some_and(|Integer(dimensions)| usize::try_from(dimensions) != Ok(width)) {
            return Err(body.wrong("dimensions", format_args!("{width}, the hidden size of this model")));
        }
        let rows: Vec<Vec<u32>> = tokens.into_iter().map(|tokens| tokens.ids).collect();
        let answer = EmbeddingsAnswer {
            model: served.name().to_owned(),
            width,
            pooling: fields.pooling,
            normalize: fields.normalize,
            encoding: fields.encoding_format,
            prompt_tokens: rows.iter().map(Vec::len).sum(),
            vectors: Vec::with_capacity(rows.len()),
            warnings,
        };
        Ok(Self { rows, answer })
    }
}

impl EmbeddingsAnswer {
    /// Number of tokens in all texts.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Adds the vector of the next text from `hidden_states` `(T, C)` after the final norm.
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

    /// Builds the reply.
    pub(crate) fn into_reply(self) -> Result<Reply, ApiError> {
        if self.vectors.iter().flatten().any(|x| !x.is_finite()) {
            return Err(ApiError::failed("the hidden states are not finite"));
        }
        let entries = self.vectors.iter().enumerate().map(|(index, numbers)| {
            let embedding = Numbers { numbers, encoding: self.encoding };
            Entry { object: "embedding", index, embedding }
        });
        let data = entries.collect();
        let usage = Usage { prompt_tokens: self.prompt_tokens, total_tokens: self.prompt_tokens };
        let response = json(&Response { object: "list", data, model: &self.model, usage });
        Ok(Reply::new(response, self.warnings))
    }
}

#[derive(Serialize)]
struct Response<'a> {
    object: &'a str,
    data: Vec<Entry<'a>>,
    model: &'a str,
    usage: Usage,
}

#[derive(Serialize)]
struct Entry<'a> {
    object: &'static str,
    index: usize,
    embedding: Numbers<'a>,
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: usize,
    total_tokens: usize,
}
