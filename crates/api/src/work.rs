//! Turns an endpoint and a body into the work that answers the request.

use crate::about::{health, models, props, version};
use crate::classify::ClassifyCall;
use crate::embeddings::EmbeddingsCall;
use crate::look::{
    AttentionRequest, FeatureRequest, FeaturesRequest, GraphRequest, HeadRequest, LensRequest, NextRequest,
};
use crate::tokens::{detokenize, tokenize, tokenizer_info};
use crate::{
    Analysis, ApiError, Call, ChatRequest, CompletionRequest, Endpoint, Reply, ServedModel, Warnings,
};

/// Maximum length of a body, in bytes, that [`Endpoint::reads_quickly`] accepts.
const SHORT_BODY: usize = 8 << 10;

/// Parsed and validated request, which can be sent to the thread that owns the model.
///
/// Work holds no model. [`ServedModel::read`] returns work, and a [`Session`](crate::Session) runs it.
#[derive(Debug)]
pub enum Work {
    /// Finished reply.
    Reply(Reply),
    /// Prompt completions.
    Texts(Call),
    /// Embeddings, classification, or an analysis of the model's internals.
    Analysis(Analysis),
}

impl ServedModel {
    /// Parses and validates a request; `body` is empty if the endpoint takes no body.
    ///
    /// Completions with the same `reuse` value may share the KV cache of a common prefix.
    ///
    /// Tokenizing a long text or compiling a grammar may take seconds.
    ///
    /// # Errors
    /// If the body is invalid or the model cannot serve the request.
    ///
    /// ```
    /// use candle_gpt2_api::{ApiOptions, Endpoint, ServedModel, Work};
    ///
    /// # let model = candle_gpt2_engine::ModelOptions::default().open(&candle_gpt2_engine::Silent)?.load(&candle_gpt2_engine::Silent)?;
    /// # let served = ServedModel::new(&model, ApiOptions { name: "built-in".into(), ..ApiOptions::default() })?;
    /// let work = served.read(Endpoint::Completions, br#"{"prompt": ["One day", "Once there was"], "max_tokens": 5}"#, None)?;
    /// assert!(matches!(work, Work::Texts(call) if call.requests.len() == 2));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn read(&self, endpoint: Endpoint, body: &[u8], reuse: Option<u64>) -> Result<Work, ApiError> {
        self.check_endpoint(endpoint)?;
        let reply = |json| Work::Reply(Reply::new(json, Warnings::default()));
        Ok(match endpoint {
            Endpoint::Completions => {
                Work::Texts(Call::of_completion(CompletionRequest::parse(body)?, self, reuse)?)
            }
            Endpoint::ChatCompletions => {
                let read = self.read_chat.ok_or_else(not_found)?;
                Work::Texts(read(body, self, reuse)?)
            }
            Endpoint::Activations => Work::Texts(Call::of_activations(body, self)?),
            Endpoint::Classify => Work::Analysis(Analysis::labels(ClassifyCall::read(body, self)?)),
            Endpoint::Embeddings => Work::Analysis(Analysis::embeddings(EmbeddingsCall::read(body, self)?)),
            Endpoint::LookAttention => {
                Work::Analysis(Analysis::attention(AttentionRequest::read(body, self)?))
            }
            Endpoint::LookLens => Work::Analysis(Analysis::lens(LensRequest::read(body, self)?, self)),
            Endpoint::LookHead => Work::Analysis(Analysis::head(HeadRequest::read(body, self)?)),
            Endpoint::LookNext => Work::Analysis(Analysis::next(NextRequest::read(body, self)?)),
            Endpoint::LookFeatures => Work::Analysis(Analysis::features(FeaturesRequest::read(body, self)?)),
            Endpoint::LookFeature => Work::Analysis(Analysis::feature(FeatureRequest::read(body, self)?)),
            Endpoint::LookGraph => Work::Analysis(Analysis::graph(GraphRequest::read(body, self)?)),
            Endpoint::Tokenize => Work::Reply(tokenize(body, self)?),
            Endpoint::Detokenize => Work::Reply(detokenize(body, self)?),
            Endpoint::Models => reply(models(self)),
            Endpoint::TokenizerInfo => reply(tokenizer_info(self)),
            Endpoint::Health => reply(health()),
            Endpoint::Version => reply(version()),
            Endpoint::Props => reply(props(self)),
            Endpoint::Page | Endpoint::Model | Endpoint::Metrics | Endpoint::OpenApi => {
                return Err(not_found());
            }
        })
    }

    /// Parses a request as [`read`](Self::read) does, but returns `None` if validation may be slow.
    ///
    /// Completions with a grammar, steering or activations may take longer than a few milliseconds. This
    /// method is for servers that read short and long requests on separate threads.
    /// [`Endpoint::reads_quickly`] excludes the other slow requests.
    ///
    /// # Errors
    /// Same as [`ServedModel::read`].
    pub fn read_quickly(
        &self,
        endpoint: Endpoint,
        body: &[u8],
        reuse: Option<u64>,
    ) -> Result<Option<Work>, ApiError> {
        if endpoint != Endpoint::Completions {
            return self.read(endpoint, body, reuse).map(Some);
        }
        self.check_endpoint(endpoint)?;
        let request = CompletionRequest::parse(body)?;
        if request.options.takes_long() {
            return Ok(None);
        }
        Ok(Some(Work::Texts(Call::of_completion(request, self, reuse)?)))
    }
}

impl Endpoint {
    /// Whether parsing a body of `bytes` bytes usually takes less than a few milliseconds.
    ///
    /// Chat templates are programs supplied by the checkpoint, and long texts take up to a second to
    /// tokenize.
    ///
    /// ```
    /// use candle_gpt2_api::Endpoint;
    ///
    /// assert!(Endpoint::Completions.reads_quickly(100) && !Endpoint::Completions.reads_quickly(1 << 20));
    /// assert!(!Endpoint::ChatCompletions.reads_quickly(100));
    /// ```
    pub fn reads_quickly(self, bytes: usize) -> bool {
        !matches!(self, Self::ChatCompletions | Self::Activations) && bytes <= SHORT_BODY
    }
}

/// Implements [`ReadChat`](crate::served::ReadChat); programs that use this link the chat code.
pub(crate) fn read_chat(body: &[u8], served: &ServedModel, reuse: Option<u64>) -> Result<Call, ApiError> {
    Call::of_chat(ChatRequest::parse(body)?, served, reuse)
}

fn not_found() -> ApiError {
    ApiError::new(404, "not found")
}
