//! From a path and a body to work: what there is to do until the request is answered.

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

/// Longest body, in bytes, that is read within a millisecond.
const SHORT_BODY: usize = 8 << 10;

/// A parsed and checked request. It holds no model, and goes to the thread that has it.
///
/// [`ServedModel::read`] gives it; a [`Session`](crate::Session) does it.
#[derive(Debug)]
pub enum Work {
    /// Nothing is left to do.
    Reply(Reply),
    /// Texts of prompts.
    Texts(Call),
    /// A look into the model, vectors or labels of texts.
    Analysis(Analysis),
}

impl ServedModel {
    /// Reads a request: an endpoint and the body, empty if the endpoint takes none. Texts with the same number `reuse` may share what was
    /// computed of equal beginnings.
    ///
    /// Tokenising a long text and reading a grammar may take seconds.
    ///
    /// # Errors
    /// When the body is wrong, or the model cannot serve it.
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
        self.check_asked(endpoint)?;
        let reply = |json| Work::Reply(Reply::new(json, Warnings::default()));
        Ok(match endpoint {
            Endpoint::Completions | Endpoint::ChatCompletions => {
                Work::Texts(self.call(endpoint, body, reuse, true)?.ok_or_else(nothing_here)?)
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
                return Err(nothing_here());
            }
        })
    }

    /// The same, if it takes no longer than a millisecond: that of texts without a grammar, whose activations are not asked for, from a
    /// short body.
    ///
    /// # Errors
    /// As [`ServedModel::read`].
    pub fn read_now(
        &self,
        endpoint: Endpoint,
        body: &[u8],
        reuse: Option<u64>,
    ) -> Result<Option<Work>, ApiError> {
        self.check_asked(endpoint)?;
        if body.len() > SHORT_BODY {
            return Ok(None);
        }
        Ok(self.call(endpoint, body, reuse, false)?.map(Work::Texts))
    }

    /// `None` for what takes long and is not to be read here, and if there are no texts.
    fn call(
        &self,
        endpoint: Endpoint,
        body: &[u8],
        reuse: Option<u64>,
        reads_all: bool,
    ) -> Result<Option<Call>, ApiError> {
        match (endpoint, self.read_chat) {
            (Endpoint::ChatCompletions, Some(read)) => read(body, self, reuse, reads_all),
            (Endpoint::Completions, _) => {
                let request = CompletionRequest::parse(body)?;
                let is_read = reads_all || !request.options.takes_long();
                is_read.then(|| Call::of_completion(request, self, reuse)).transpose()
            }
            _ => Ok(None),
        }
    }
}

/// A [`ReadChat`](crate::served::ReadChat), which holds the code of conversations.
pub(crate) fn read_chat(
    body: &[u8],
    served: &ServedModel,
    reuse: Option<u64>,
    reads_all: bool,
) -> Result<Option<Call>, ApiError> {
    // A template may take seconds.
    reads_all.then(|| Call::of_chat(ChatRequest::parse(body)?, served, reuse)).transpose()
}

fn nothing_here() -> ApiError {
    ApiError::new(404, "there is nothing at this path")
}
