//! Attention and lens of a text, on demand, as the page draws them.
//!
//! The model belongs to the engine's thread: a look asks it for a few tokens at a time, between the steps of the texts that are being
//! written, and does everything else on a thread of its own. One look is taken at a time, so that memory stays bounded.

use std::sync::Arc;

use candle_core::Tensor;
use gpt2::{Gpt2Config, Site};
use gpt2_api::ApiError;
use gpt2_engine::{LoadedModel, Vocabulary};
use gpt2_interpret::{
    Head, LensCell, LensOptions, LensValue, Patterns, Record, Recording, lens_cells, lens_label,
    lens_logits_at, lens_logprobs, residual_sites,
};
use gpt2_pictures::{Report, Scale, Token, data, shown};
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use crate::engine::Engine;

/// Attention of longer texts is too large to be sent.
const MAX_ATTENTION_TOKENS: usize = 256;
/// Bytes of a body that asks for a look: more than as many tokens have.
const MAX_BODY: usize = 64 << 10;
/// Attention weights of one look: those of 144 heads over as many tokens, and a few more.
const MAX_WEIGHTS: usize = 10_000_000;
/// The lens computes the whole vocabulary for each layer and token.
const MAX_LENS_TOKENS: usize = 128;
/// Tokens that are computed at once, while texts that are written wait.
const TOKENS_AT_ONCE: usize = 32;

fn check_body(body: &[u8]) -> Result<(), ApiError> {
    if body.len() <= MAX_BODY {
        return Ok(());
    }
    let message = format!("a look is taken at a short text: its body has at most {MAX_BODY} bytes");
    Err(ApiError::new(413, message).with_code("body_too_large"))
}

static ONE_AT_A_TIME: Semaphore = Semaphore::const_new(1);

/// `POST /look/attention`: `{"prompt": text, "layers": [0, 1]}`, without `layers` those of all. The answer is what
/// [`gpt2_pictures::data`] gives.
pub(crate) async fn attention(engine: &Engine, model: &str, body: &[u8]) -> Result<String, ApiError> {
    check_body(body)?;
    let _turn = ONE_AT_A_TIME.acquire().await.map_err(|_| ApiError::internal())?;
    let text = Text::read(engine, body, MAX_ATTENTION_TOKENS).await?;
    let heads = text.heads()?;
    let record = text.recorded(engine, Patterns::sites(&heads)).await?;
    let report = text.report("attention", "attention patterns".into(), model);
    let drawn = move || {
        let Patterns { layers, heads, values } = Patterns::of(record, &heads)?;
        Ok(data(&report.with_patterns(layers, heads, values)))
    };
    blocking(drawn).await
}

/// `POST /look/lens`: `{"prompt": text, "show": "probability"}`, or `entropy`, `divergence`, `next`. The answer is what
/// [`gpt2_pictures::data`] gives.
pub(crate) async fn lens(engine: &Engine, model: &str, body: &[u8]) -> Result<String, ApiError> {
    check_body(body)?;
    let _turn = ONE_AT_A_TIME.acquire().await.map_err(|_| ApiError::internal())?;
    let text = Text::read(engine, body, MAX_LENS_TOKENS).await?;
    let (value, scale) = text.lens_value()?;
    let n_layer = text.config.n_layer;
    let record = text.recorded(engine, residual_sites(n_layer).collect()).await?;
    let residuals: Vec<Tensor> = record.values.into_values().collect();
    let last = residuals.last().ok_or_else(ApiError::internal)?;
    let mut final_logprobs = Vec::new();
    for at in text.chunks() {
        let logits = logits(engine, n_layer, last, at).await?;
        final_logprobs.push(Arc::new(blocking(move || lens_logprobs(&logits)).await?));
    }
    let mut cells = Vec::new();
    for (layer, residual) in residuals.iter().enumerate() {
        for (at, last) in text.chunks().zip(&final_logprobs) {
            let logits = logits(engine, layer, residual, at).await?;
            let (last, next) = (Arc::clone(last), text.ids.get(at.first + 1..).unwrap_or_default().to_vec());
            let of_chunk = move || {
                let options = LensOptions { top: 1, watch: Vec::new() };
                Ok(lens_cells(&lens_logprobs(&logits)?, &last, &options, &next))
            };
            cells.extend(blocking(of_chunk).await?);
        }
    }
    let report = text.report("lens", format!("logit lens: {}", value.title()), model);
    let most_probable = |cell: &LensCell| cell.top.first().map_or(String::new(), |(id, _)| text.shown(*id));
    Ok(data(&report.with_lens(
        (0..=n_layer).map(|layer| lens_label(layer, n_layer)).collect(),
        cells.iter().map(|cell| value.of(cell)).collect(),
        cells.iter().map(most_probable).collect(),
        scale,
    )))
}

/// A text to look at, and what else was asked for.
struct Text {
    vocabulary: Arc<Vocabulary>,
    config: Gpt2Config,
    ids: Vec<u32>,
    fields: Value,
}

/// Some tokens of a text.
#[derive(Clone, Copy)]
struct Chunk {
    first: usize,
    count: usize,
}

impl Text {
    async fn read(engine: &Engine, body: &[u8], most: usize) -> Result<Self, ApiError> {
        let invalid = |error| ApiError::invalid(format!("the body is no JSON: {error}"));
        let fields: Value = serde_json::from_slice(body).map_err(invalid)?;
        let prompt = match fields.get("prompt") {
            Some(Value::String(text)) if !text.is_empty() => text.clone(),
            Some(Value::String(_)) => {
                return Err(wrong("prompt", "the text is empty; give at least one token"));
            }
            _ => return Err(wrong("prompt", "expected the text to look at, as a string")),
        };
        let of = |model: &LoadedModel| (Arc::clone(model.vocabulary()), model.config().clone());
        let (vocabulary, config) = engine.ask(of).await.ok_or_else(ApiError::internal)?;
        let tokens = Arc::clone(&vocabulary);
        let encoded = spawn_blocking(move || tokens.encode(&prompt));
        let ids = encoded.await.map_err(|_| ApiError::internal())?;
        let ids = ids.map_err(|error| wrong("prompt", &error.to_string()))?;
        let most = most.min(config.n_positions);
        if ids.is_empty() || ids.len() > most {
            let message = format!("the text has {} tokens; this look takes 1 to {most}", ids.len());
            return Err(wrong("prompt", &message));
        }
        Ok(Self { vocabulary, config, ids, fields })
    }

    /// The heads of the layers that were asked for.
    fn heads(&self) -> Result<Vec<Head>, ApiError> {
        let n_layer = self.config.n_layer;
        let number = |layer: &Value| {
            let layer = layer.as_u64().and_then(|layer| usize::try_from(layer).ok());
            layer.filter(|layer| *layer < n_layer)
        };
        let expected = || {
            let last = n_layer.saturating_sub(1);
            wrong("layers", &format!("expected a list of layers, which are counted from 0 to {last}"))
        };
        let mut layers: Vec<usize> = match self.fields.get("layers") {
            None | Some(Value::Null) => (0..n_layer).collect(),
            Some(Value::Array(layers)) if !layers.is_empty() => {
                layers.iter().map(number).collect::<Option<_>>().ok_or_else(expected)?
            }
            Some(_) => return Err(expected()),
        };
        layers.sort_unstable();
        layers.dedup();
        let n_head = self.config.n_head;
        let (heads, tokens) = (layers.len().saturating_mul(n_head), self.ids.len());
        let weights = heads.saturating_mul(tokens * tokens);
        if weights > MAX_WEIGHTS {
            let message = format!(
                "{heads} heads of {tokens} tokens have {weights} weights, more than {MAX_WEIGHTS}; choose fewer layers or a shorter text"
            );
            return Err(wrong("layers", &message));
        }
        Ok(layers.into_iter().flat_map(|layer| (0..n_head).map(move |head| Head { layer, head })).collect())
    }

    /// What a cell of the lens shows, and its colours.
    fn lens_value(&self) -> Result<(LensValue, Scale), ApiError> {
        match self.fields.get("show").unwrap_or(&Value::Null) {
            Value::Null => Ok((LensValue::Probability, Scale::Share)),
            Value::String(name) if name == "probability" => Ok((LensValue::Probability, Scale::Share)),
            Value::String(name) if name == "entropy" => Ok((LensValue::Entropy, Scale::Amount)),
            Value::String(name) if name == "divergence" => Ok((LensValue::Divergence, Scale::Amount)),
            Value::String(name) if name == "next" => Ok((LensValue::Next, Scale::Signed)),
            _ => Err(wrong("show", "expected `probability`, `entropy`, `divergence` or `next`")),
        }
    }

    fn chunks(&self) -> impl Iterator<Item = Chunk> + use<> {
        let tokens = self.ids.len();
        let starts = (0..tokens).step_by(TOKENS_AT_ONCE);
        starts.map(move |first| Chunk { first, count: TOKENS_AT_ONCE.min(tokens - first) })
    }

    async fn recorded(&self, engine: &Engine, sites: Vec<Site>) -> Result<Record, ApiError> {
        let ids = self.ids.clone();
        let begun = engine.ask(move |model| Recording::new(model.model(), ids, sites)).await;
        let mut recording = begun.ok_or_else(ApiError::internal)?.map_err(|_| ApiError::internal())?;
        while !recording.is_complete() {
            let advance = move |model: &LoadedModel| {
                recording.advance(model.model(), TOKENS_AT_ONCE).map(|()| recording)
            };
            let advanced = engine.ask(advance).await.ok_or_else(ApiError::internal)?;
            recording = advanced.map_err(|_| ApiError::internal())?;
        }
        blocking(|| recording.into_record()).await
    }

    fn shown(&self, id: u32) -> String {
        shown(&self.vocabulary.token_bytes(id))
    }

    fn report(&self, kind: &str, title: String, model: &str) -> Report {
        let token = |(index, id): (usize, &u32)| Token::new(index, *id, &self.vocabulary.token_bytes(*id));
        Report::new(kind, title, model.to_owned(), self.ids.iter().enumerate().map(token).collect(), false)
    }
}

fn wrong(field: &str, what: &str) -> ApiError {
    ApiError::invalid(format!("{field}: {what}")).with_param(field)
}

/// The lens at a layer, of some tokens.
async fn logits(engine: &Engine, layer: usize, residual: &Tensor, at: Chunk) -> Result<Tensor, ApiError> {
    let residual = residual.clone();
    let logits = move |model: &LoadedModel| {
        let residual = residual.narrow(1, at.first, at.count)?.contiguous()?; // (1, T, C)
        lens_logits_at(model.model(), layer, residual, &|_, x| Ok(x))
    };
    engine.ask(logits).await.ok_or_else(ApiError::internal)?.map_err(|_| ApiError::internal())
}

/// What takes a while and needs no engine.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> candle_core::Result<T> + Send + 'static,
) -> Result<T, ApiError> {
    spawn_blocking(work).await.ok().and_then(Result::ok).ok_or_else(ApiError::internal)
}
