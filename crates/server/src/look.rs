//! Attention, lens, the steps of a head, and what may follow a text, on demand, as the page draws them.
//!
//! The model belongs to the engine's thread: a look asks it for a few tokens at a time, between the steps of the texts that are being
//! written, and does everything else on a thread of its own. One look is taken at a time, so that memory stays bounded.

use std::fmt::Display;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use candle_gpt2::{LogitsFor, Site, SiteKind};
use candle_gpt2_api::{
    ApiError, AttentionRequest, EmbeddingsCall, HeadRequest, LensRequest, NextRequest, Reply, ServedModel,
};
use candle_gpt2_engine::LoadedModel;
use candle_gpt2_interpret::{
    LensCell, LensOptions, Patterns, Record, Recording, lens_cells, lens_logits_at, lens_logprobs,
    residual_sites,
};
use candle_gpt2_look::{Attention, Lens};
use candle_gpt2_pictures::data;
use serde::Serialize;

use crate::busy::looks_full;
use crate::engine::Engine;
use crate::fault::blocking;
use crate::http::receive::Received;
use crate::metrics::Metrics;
use crate::turns::{Places, Turn, Turns};

/// Bytes of a body that asks for a look: more than those of the longest text that one is taken at.
const MAX_BODY: usize = 64 << 10;
/// Tokens that are computed at once, while texts that are written wait.
const TOKENS_AT_ONCE: usize = 32;

/// A look whose turn has come. Dropping it ends the look, as when its client is gone.
pub(crate) struct Looks<'a> {
    engine: &'a Engine,
    served: &'a Arc<ServedModel>,
    /// That of the request.
    id: &'a Arc<str>,
    /// Also held by what is being computed: it goes on when nobody waits for it any more.
    turn: Arc<Turn>,
    _place: Places<'a>,
}

impl<'a> Looks<'a> {
    /// Waits for a turn.
    pub(crate) async fn begin(
        engine: Result<&'a Engine, ApiError>,
        served: &'a Arc<ServedModel>,
        turns: &'a Turns,
        metrics: &Metrics,
        id: &'a Arc<str>,
    ) -> Result<Self, ApiError> {
        let engine = engine?;
        let place = turns.places(1).ok_or_else(|| {
            metrics.reject("looks_full");
            looks_full()
        })?;
        Ok(Self { engine, served, id, turn: Arc::new(turns.turn().await?), _place: place })
    }

    /// The answer to `POST /look/attention`: what [`candle_gpt2_pictures::data`] gives.
    pub(crate) async fn attention(&self, body: Vec<u8>) -> Result<Reply, ApiError> {
        let AttentionRequest { ids, heads, warnings } = self.read(body, AttentionRequest::read).await?;
        let record = self.recorded(&ids, Patterns::sites(&heads)).await?;
        let served = Arc::clone(self.served);
        let drawn = move || {
            let report = Attention::report(record, &ids, &heads, served.name(), &served.reader())?;
            Ok::<_, candle_core::Error>(data(&report))
        };
        Ok(Reply::new(self.computed(drawn).await?, warnings))
    }

    /// The answer to `POST /look/lens`: what [`candle_gpt2_pictures::data`] gives.
    pub(crate) async fn lens(&self, body: Vec<u8>) -> Result<Reply, ApiError> {
        let LensRequest { ids, show, warnings } = self.read(body, LensRequest::read).await?;
        let n_layer = self.served.reader().vocabulary().config().n_layer;
        let record = self.recorded(&ids, residual_sites(n_layer).collect()).await?;
        let residuals: Vec<Tensor> = record.values.into_values().collect();
        let last = residuals.last().ok_or_else(|| ApiError::failed("a model without layers"))?;
        let mut final_logprobs = Vec::new();
        for at in chunks(ids.len()) {
            let logits = self.lens_logits(n_layer, last, at).await?;
            final_logprobs.push(Arc::new(self.computed(move || lens_logprobs(&logits)).await?));
        }
        let mut cells: Vec<LensCell> = Vec::new();
        for (layer, residual) in residuals.iter().enumerate() {
            for (at, last) in chunks(ids.len()).zip(&final_logprobs) {
                let logits = self.lens_logits(layer, residual, at).await?;
                let (last, next) = (Arc::clone(last), ids.get(at.first + 1..).unwrap_or_default().to_vec());
                let of_chunk = move || {
                    let options = LensOptions { top: 1, watch: Vec::new() };
                    Ok::<_, candle_core::Error>(lens_cells(&lens_logprobs(&logits)?, &last, &options, &next))
                };
                cells.extend(self.computed(of_chunk).await?);
            }
        }
        let cells: Vec<&LensCell> = cells.iter().collect();
        let report =
            Lens::report("logit lens", show, &cells, &ids, self.served.name(), &self.served.reader());
        Ok(Reply::new(data(&report), warnings))
    }

    /// The answer to `POST /look/head`: [`HeadSteps`](candle_gpt2_look::HeadSteps).
    pub(crate) async fn head(&self, body: Vec<u8>) -> Result<Reply, ApiError> {
        let HeadRequest { head, warnings } = self.read(body, HeadRequest::read).await?;
        let record = self.recorded(head.ids(), head.sites()).await?;
        let served = Arc::clone(self.served);
        let steps = self.computed(move || head.steps(&record, &served.reader())).await?;
        Ok(Reply::new(json(&steps)?, warnings))
    }

    /// The answer to `POST /look/next`: [`NextTokens`](candle_gpt2_look::NextTokens).
    pub(crate) async fn next(&self, body: Vec<u8>) -> Result<Reply, ApiError> {
        let mut request = self.read(body, NextRequest::read).await?;
        let warnings = std::mem::take(&mut request.warnings);
        let normed = Site::outside(SiteKind::FinalNorm);
        let record = self.recorded(&request.ids, vec![normed]).await?;
        let hidden = record.get(normed).map_err(ApiError::failed)?.clone(); // (1, T, C)
        let logits = self.asked(move |model| model.model().head(&hidden, LogitsFor::LastToken)).await?;
        let served = Arc::clone(self.served);
        let answered = move || {
            let logits = logits.flatten_all().and_then(|logits| logits.to_vec1());
            request.answer(&logits.map_err(ApiError::failed)?, &served)
        };
        Ok(Reply::new(json(&self.blocking(answered).await?)?, warnings))
    }

    /// The answer to `POST /v1/embeddings`, one text after the other.
    pub(crate) async fn embeddings(
        &self,
        body: Vec<u8>,
        count: impl FnOnce(usize),
    ) -> Result<Reply, ApiError> {
        let EmbeddingsCall { rows, mut answer } = self.read(body, EmbeddingsCall::read).await?;
        count(answer.prompt_tokens());
        let normed = Site::outside(SiteKind::FinalNorm);
        for row in rows {
            let record = self.recorded(&row, vec![normed]).await?;
            let added = move || {
                let hidden_states = record.get(normed)?.to_dtype(DType::F32)?; // (1, T, C)
                answer.add(&hidden_states.flatten_all()?.to_vec1::<f32>()?);
                Ok::<_, candle_core::Error>(answer)
            };
            answer = self.computed(added).await?;
        }
        self.blocking(|| answer.into_reply()).await
    }

    async fn read<R: Send + 'static>(
        &self,
        body: Vec<u8>,
        read: impl FnOnce(&[u8], &ServedModel) -> Result<R, ApiError> + Send + 'static,
    ) -> Result<R, ApiError> {
        let served = Arc::clone(self.served);
        self.blocking(move || read(&body, &served)).await
    }

    async fn recorded(&self, ids: &[u32], sites: Vec<Site>) -> Result<Record, ApiError> {
        let ids = ids.to_owned();
        let mut recording = self.asked(move |model| Recording::new(model.model(), ids, sites)).await?;
        while !recording.is_complete() {
            let advance = move |model: &LoadedModel| {
                recording.advance(model.model(), TOKENS_AT_ONCE).map(|()| recording)
            };
            recording = self.asked(advance).await?;
        }
        self.computed(|| recording.into_record()).await
    }

    /// The lens at a layer, of some tokens.
    async fn lens_logits(&self, layer: usize, residual: &Tensor, at: Chunk) -> Result<Tensor, ApiError> {
        let residual = residual.clone();
        let logits = move |model: &LoadedModel| {
            let residual = residual.narrow(1, at.first, at.count)?.contiguous()?; // (1, T, C)
            lens_logits_at(model.model(), layer, residual, &|_, x| Ok(x))
        };
        self.asked(logits).await
    }

    /// What the engine's thread computes between two steps.
    async fn asked<R: Send + 'static, E: Display + 'static>(
        &self,
        question: impl FnOnce(&LoadedModel) -> Result<R, E> + Send + 'static,
    ) -> Result<R, ApiError> {
        let turn = Arc::clone(&self.turn);
        let question = move |model: &LoadedModel| {
            let _turn = turn;
            question(model)
        };
        self.engine.ask(self.id, question).await
    }

    /// What takes a while and needs no engine.
    async fn computed<T: Send + 'static, E: Display>(
        &self,
        work: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.blocking(move || work().map_err(ApiError::failed)).await
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let turn = Arc::clone(&self.turn);
        let work = move || {
            let _turn = turn;
            work()
        };
        blocking(self.id, work).await
    }
}

/// The body of a request for a look, which is refused before it waits.
pub(crate) fn short_body(received: Received) -> Result<Vec<u8>, ApiError> {
    if received.bytes().len() <= MAX_BODY {
        return Ok(received.into_bytes());
    }
    let message = format!("a look is taken at a short text: its body has at most {MAX_BODY} bytes");
    Err(ApiError::new(413, message).with_code("body_too_large"))
}

/// Some tokens of a text.
#[derive(Clone, Copy)]
struct Chunk {
    first: usize,
    count: usize,
}

fn chunks(tokens: usize) -> impl Iterator<Item = Chunk> {
    let starts = (0..tokens).step_by(TOKENS_AT_ONCE);
    starts.map(move |first| Chunk { first, count: TOKENS_AT_ONCE.min(tokens - first) })
}

fn json(found: &impl Serialize) -> Result<String, ApiError> {
    serde_json::to_string(found).map_err(ApiError::failed)
}
