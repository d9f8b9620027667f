//! Served model with everything that requests are validated against.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use candle_gpt2::{Diagnose, ErrorKind, Gpt2Config};
use candle_gpt2_confined::WorkerProgram;
use candle_gpt2_engine::{Classifier, Defaults, EngineError, LoadedModel, Vocabulary};
use candle_gpt2_generation::LogitsProcessor;
use candle_gpt2_grammar::{Grammar, GrammarError};
use candle_gpt2_interpret::Dictionary;
use thiserror::Error;

use crate::body::{Body, Text};
use crate::chat::ChatTemplate;
use crate::encoding_memory::EncodingMemory;
use crate::pieces::Pieces;
use crate::{ApiError, Call, Endpoint, Warnings};

/// Limits on one request.
///
/// ```
/// use candle_gpt2_api::{ApiOptions, Call, CompletionRequest, Limits, ServedModel};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&candle_gpt2_engine::Silent)?.load(&candle_gpt2_engine::Silent)?;
/// let limits = Limits { max_prompts: 1, ..Limits::default() };
/// let served = ServedModel::new(&model, ApiOptions { limits, ..ApiOptions::default() })?;
/// let request = CompletionRequest::parse(br#"{"prompt": ["One day", "Once there was"]}"#)?;
/// assert!(Call::of_completion(request, &served, None).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of prompts in a request.
    pub max_prompts: usize,
    /// Maximum number of completions for each prompt: `n` and `best_of`.
    pub max_n: usize,
    /// Maximum number of alternatives for each token: `logprobs`.
    pub max_logprobs: usize,
    /// Maximum number of new tokens in a request, summed over all completions of all prompts.
    pub max_total_tokens: usize,
    /// Maximum size of the activations in a request: four bytes per value, over all completions.
    pub max_activation_bytes: usize,
    /// Whether a completion that exceeds the context ends there; otherwise the request is rejected.
    pub ends_at_context: bool,
}

impl Limits {
    /// No limits, for callers who own the model and have no server to protect.
    pub const NONE: Self = Self {
        max_prompts: usize::MAX,
        max_n: usize::MAX,
        max_logprobs: usize::MAX,
        max_total_tokens: usize::MAX,
        max_activation_bytes: usize::MAX,
        ends_at_context: false,
    };
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_prompts: 64,
            max_n: 16,
            max_logprobs: 20,
            max_total_tokens: 65_536,
            max_activation_bytes: 16 << 20,
            ends_at_context: false,
        }
    }
}

/// Source of the chat template.
///
/// A field of [`ApiOptions`]; see [`ChatRequest`](crate::ChatRequest) for an example.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ChatTemplateChoice {
    /// Template from the checkpoint, if it has one.
    #[default]
    Checkpoint,
    /// Each message followed by the EOS token, which is how DialoGPT was trained.
    EosJoin,
    /// Supplied Jinja template.
    Jinja(String),
}

/// Settings chosen by the server operator.
///
/// ```
/// use candle_gpt2_api::{ApiOptions, ServedModel, model};
///
/// # let loaded = candle_gpt2_engine::ModelOptions::default().open(&candle_gpt2_engine::Silent)?.load(&candle_gpt2_engine::Silent)?;
/// let options = ApiOptions { name: "stories".into(), aliases: vec!["gpt2".into()], ..ApiOptions::default() };
/// let served = ServedModel::new(&loaded, options)?;
/// assert_eq!(served.name(), "stories");
/// assert!(model("gpt2", &served)?.contains(r#""root":"stories""#));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct ApiOptions {
    /// Name that the model is served under.
    pub name: String,
    /// Additional names for the model.
    pub aliases: Vec<String>,
    /// Start time of the server, in seconds since the Unix epoch.
    pub created: u64,
    /// Source of the chat template.
    pub chat_template: ChatTemplateChoice,
    /// Limits on one request.
    pub limits: Limits,
    /// Whether the checkpoint's `generation_config.json` sets the generation defaults.
    ///
    /// The defaults cover sampling, penalties and the number of new tokens, as in the other front ends. If
    /// false, requests get the defaults of a checkpoint without that file.
    pub use_generation_config: bool,
    /// Whether responses report the number of prompt tokens reused from another request's KV cache.
    ///
    /// The number depends on other clients' requests, so the responses to identical requests may differ.
    pub prompt_tokens_details: bool,
    /// Whether requests with an unknown field are rejected; otherwise `warnings` names the field.
    pub strict: bool,
    /// Whether requests may read and change activations: `activations`, `steering`, `/v1/activations`.
    pub activations: bool,
    /// Dictionaries for `steering`, keyed by name. The caller must check that each fits the model.
    pub dictionaries: BTreeMap<String, Arc<Dictionary>>,
    /// Transcoders for the model's MLPs, one per layer; used by `/look/features` and `/look/graph`.
    ///
    /// The caller must check that they fit the model, and may set them while the model is being served.
    pub transcoders: Arc<OnceLock<Vec<Dictionary>>>,
    /// Maximum batch size, reported by `/props` as `total_slots`.
    pub parallel: usize,
    /// Clock for timestamps in responses, in seconds since the Unix epoch.
    ///
    /// The default is the system clock. In a browser, pass a function that asks JavaScript for the time.
    pub now: fn() -> u64,
    /// Program that runs chat templates and grammars in child processes with resource limits.
    ///
    /// If `None`, they run on threads of this process, and a hostile template can crash the process.
    pub worker: Option<WorkerProgram>,
}

impl Default for ApiOptions {
    fn default() -> Self {
        Self {
            name: String::new(),
            aliases: Vec::new(),
            created: 0,
            chat_template: ChatTemplateChoice::default(),
            limits: Limits::default(),
            use_generation_config: true,
            prompt_tokens_details: false,
            strict: false,
            activations: false,
            dictionaries: BTreeMap::new(),
            transcoders: Arc::default(),
            parallel: 0,
            now: system_time,
            worker: None,
        }
    }
}

fn system_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since_1970| since_1970.as_secs())
}

/// Reason why a model cannot be served.
///
/// [`ServedModel::new`] returns it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SetupError {
    /// The checkpoint's files are unusable.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The chat template named in the options is unusable.
    #[error("the chat template: {what}")]
    ChatTemplate {
        /// Description of the problem.
        what: String,
    },
}

impl Diagnose for SetupError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Engine(error) => error.kind(),
            Self::ChatTemplate { .. } => ErrorKind::Usage,
        }
    }
}

/// Compiles a grammar into a logits processor that enforces it.
pub(crate) trait Compiles: Debug + Send + Sync {
    fn compile(&self, grammar: &Grammar, ends: &[u32]) -> Result<LogitsProcessor, GrammarError>;
}

/// Function that converts a chat request body to a call.
pub(crate) type ReadChat = fn(&[u8], &ServedModel, Option<u64>) -> Result<Call, ApiError>;

/// Names, tokens, defaults and request limits for a model.
///
/// A served model holds no weights. Any thread can use it to validate requests. See [`ApiOptions`] for an
/// example.
#[derive(Debug)]
pub struct ServedModel {
    pub(crate) options: ApiOptions,
    pub(crate) vocabulary: Arc<Vocabulary>,
    pub(crate) defaults: Defaults,
    pub(crate) pieces: Arc<Pieces>,
    pub(crate) encoding_memory: EncodingMemory,
    /// Chat template; `Err` if the checkpoint's template is broken, which affects only chat requests.
    pub(crate) template: Result<Option<ChatTemplate>, String>,
    /// Grammar compiler; `None` if the model has no tokenizer or grammars are not served.
    pub(crate) compiler: Option<Box<dyn Compiles>>,
    /// Reader of chat requests; `None` if chat is not served.
    pub(crate) read_chat: Option<ReadChat>,
    pub(crate) parameters: usize,
    /// Random keys for hashing salts, so that clients cannot predict cache keys.
    pub(crate) random: RandomState,
}

impl ServedModel {
    /// Creates a served model without chat and structured output.
    ///
    /// A program that serves only completions then does not link the code for these features.
    ///
    /// # Errors
    /// If the checkpoint's `generation_config.json` is unusable.
    pub fn of_completions(model: &LoadedModel, options: ApiOptions) -> Result<Self, SetupError> {
        let vocabulary = prepared(model.vocabulary());
        Ok(Self {
            defaults: model.defaults()?.clone(),
            pieces: Arc::new(Pieces::new(&vocabulary)),
            encoding_memory: EncodingMemory::new(),
            template: Ok(None),
            compiler: None,
            read_chat: None,
            parameters: model.model().parameter_count(),
            vocabulary,
            options,
            random: RandomState::new(),
        })
    }

    /// Creates a served model for a classifier.
    pub fn of_classifier(model: &Classifier, options: ApiOptions) -> Self {
        let vocabulary = prepared(model.vocabulary());
        Self {
            defaults: Defaults::of_config(Arc::clone(&vocabulary)),
            pieces: Arc::new(Pieces::new(&vocabulary)),
            encoding_memory: EncodingMemory::new(),
            template: Ok(None),
            compiler: None,
            read_chat: None,
            parameters: model.parameter_count(),
            vocabulary,
            options,
            random: RandomState::new(),
        }
    }

    /// Checks that this kind of model supports the endpoint; [`ServedModel::read`] does so too.
    ///
    /// # Errors
    /// If the endpoint needs a language model and this is a classifier, or vice versa.
    pub fn check_endpoint(&self, endpoint: Endpoint) -> Result<(), ApiError> {
        let head = self.config().head;
        let (class, has_labels) = (head.class_name(), head.has_labels());
        let message = match endpoint {
            Endpoint::Completions
            | Endpoint::ChatCompletions
            | Endpoint::Activations
            | Endpoint::Embeddings
            | Endpoint::LookAttention
            | Endpoint::LookLens
            | Endpoint::LookHead
            | Endpoint::LookNext
            | Endpoint::LookFeatures
            | Endpoint::LookFeature
            | Endpoint::LookGraph
                if has_labels =>
            {
                format!(
                    "this server's model is a classifier ({class}) and cannot generate text; use /v1/classify"
                )
            }
            Endpoint::Classify if !has_labels => format!(
                "this server's model is a language model ({class}) and has no labels; classification needs a classifier"
            ),
            _ => return Ok(()),
        };
        Err(ApiError::invalid(message))
    }

    /// Name that the model is served under.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// Model configuration.
    pub(crate) fn config(&self) -> &Gpt2Config {
        self.vocabulary.config()
    }

    /// Checks that an optional name belongs to this model.
    pub(crate) fn check_name<const MAX: usize>(&self, name: Option<&Text<MAX>>) -> Result<(), ApiError> {
        name.map_or(Ok(()), |Text(name)| self.check_named(name))
    }

    /// Checks that a name belongs to this model.
    pub(crate) fn check_named(&self, name: &str) -> Result<(), ApiError> {
        if name == self.name() || self.options.aliases.iter().any(|alias| alias == name) {
            return Ok(());
        }
        let message = format!("model not found; this server serves `{}`", self.name());
        Err(ApiError::new(404, message).with_param("model").with_code("model_not_found"))
    }

    /// Returns a body's warnings, or an error about an unknown field if the server is strict.
    pub(crate) fn checked_warnings(&self, body: &Body<'_>) -> Result<Warnings, ApiError> {
        let warnings = body.warnings();
        self.reject_unknown_fields(&warnings).map(|()| warnings)
    }

    /// Rejects unknown fields if the server is strict.
    pub(crate) fn reject_unknown_fields(&self, warnings: &Warnings) -> Result<(), ApiError> {
        warnings.refusal().filter(|_| self.options.strict).map_or(Ok(()), Err)
    }

    /// Checks that a token id is in the vocabulary.
    pub(crate) fn check_token(&self, id: u32, path: impl FnOnce() -> String) -> Result<(), ApiError> {
        if self.config().has_token(id) {
            return Ok(());
        }
        let (path, vocab_size) = (path(), self.config().vocab_size);
        let message =
            format!("{path}: expected a token id below the vocabulary size of {vocab_size}, found {id}");
        Err(ApiError::invalid(message).with_param(path))
    }

    /// Name of the EOS token.
    pub(crate) fn eos_token(&self) -> Option<String> {
        self.token_name(self.defaults.config().eos_token_id.first().copied())
    }

    /// Name of the BOS token.
    pub(crate) fn bos_token(&self) -> Option<String> {
        self.token_name(self.config().start_token())
    }

    fn token_name(&self, id: Option<u32>) -> Option<String> {
        self.vocabulary.tokenizer()?.id_to_token(id?)
    }

    /// Key for sharing the KV cache, derived from the caller's key and the request's salt.
    pub(crate) fn reuse(&self, caller: Option<u64>, salt: Option<&str>) -> Option<u64> {
        let caller = caller?;
        Some(salt.map_or(caller, |salt| self.random.hash_one((caller, salt))))
    }
}

/// Builds the encoder, if there is a tokenizer, before the first request needs it.
fn prepared(vocabulary: &Arc<Vocabulary>) -> Arc<Vocabulary> {
    let _ = vocabulary.encoder();
    Arc::clone(vocabulary)
}

/// Returns an unpredictable number that never repeats.
pub(crate) fn fresh_number() -> u64 {
    // Each `RandomState` has its own keys, except in a browser, where all keys are the same.
    let number = RandomState::new().hash_one(());
    #[cfg(all(target_arch = "wasm32", target_os = "unknown"))]
    let number = getrandom::u64().unwrap_or(number);
    number
}
