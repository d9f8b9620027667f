//! The model that is served, with all that requests are checked against.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use candle_gpt2::Gpt2Config;
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

/// The most that a request may ask for.
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
    /// Most prompts of a request.
    pub max_prompts: usize,
    /// Most texts for each prompt: `n` and `best_of`.
    pub max_n: usize,
    /// Most alternatives for each token: `logprobs`.
    pub max_logprobs: usize,
    /// Most new tokens of a request: those of all texts of all prompts together.
    pub max_total_tokens: usize,
    /// Most bytes of activations of a request, four for each number: those of all texts of all prompts together.
    pub max_activation_bytes: usize,
    /// Whether a text that is asked to be longer than the model's context ends there; otherwise its request is refused.
    pub ends_at_context: bool,
}

impl Limits {
    /// For callers who own the model: nothing that is there to keep a server from harm.
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

/// How a conversation becomes a prompt.
///
/// A field of [`ApiOptions`]; see [`ChatRequest`](crate::ChatRequest) for an example.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ChatTemplateChoice {
    /// By the checkpoint's own template, if it has one.
    #[default]
    Checkpoint,
    /// Each message followed by the token that ends texts, as DialoGPT was trained.
    EosJoin,
    /// By this Jinja template.
    Jinja(String),
}

/// The operator's settings.
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
    /// The name that the model is served under.
    pub name: String,
    /// Further names of it.
    pub aliases: Vec<String>,
    /// When the server was started, in seconds since 1970.
    pub created: u64,
    /// How a conversation becomes a prompt.
    pub chat_template: ChatTemplateChoice,
    /// The most that a request may ask for.
    pub limits: Limits,
    /// Whether the checkpoint's `generation_config.json` sets the defaults of sampling, penalties and the number of new tokens, as in the
    /// other front ends. Otherwise requests get the defaults of a checkpoint without that file.
    pub use_generation_config: bool,
    /// Whether answers tell how many tokens of a prompt had been computed for another request. That depends on what others ask,
    /// so that a request has no longer the same answer, byte for byte, whatever comes beside it.
    pub prompt_tokens_details: bool,
    /// Whether a request with an unknown field is refused; otherwise the answer names the field under `warnings`.
    pub strict: bool,
    /// Whether requests may see and change what is inside the model: `activations`, `steering` and `/v1/activations`.
    pub activations: bool,
    /// Dictionaries whose features `steering` may name, by their names. Each is checked against the model by its caller.
    pub dictionaries: BTreeMap<String, Arc<Dictionary>>,
    /// Transcoders of the model's MLPs, one for each layer, that `/look/features` and `/look/graph` show. Their caller checks them against
    /// the model, and may give them while it is served.
    pub transcoders: Arc<OnceLock<Vec<Dictionary>>>,
    /// Texts that are made at once: what `/props` tells as `total_slots`.
    pub parallel: usize,
    /// The time, in seconds since 1970, which answers tell: by default the system's. A browser's comes from JavaScript.
    pub now: fn() -> u64,
    /// Program that runs chat templates and grammars in child processes with limits. Without it they run on threads of this
    /// process, where a hostile template can end the process.
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

/// Why a model cannot be served.
///
/// Given by [`ServedModel::new`].
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SetupError {
    /// What the checkpoint says cannot be used.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The chat template that was named cannot be used.
    #[error("the chat template: {what}")]
    ChatTemplate {
        /// What is wrong with it.
        what: String,
    },
}

/// What makes of a grammar what keeps a text to it.
pub(crate) trait Compiles: Debug + Send + Sync {
    fn compile(&self, grammar: &Grammar, ends: &[u32]) -> Result<LogitsProcessor, GrammarError>;
}

/// Reads a conversation.
pub(crate) type ReadChat = fn(&[u8], &ServedModel, Option<u64>) -> Result<Call, ApiError>;

/// A model under its names, with its tokens, its defaults and the limits of requests. It holds no weights; requests are checked
/// and answered with it on any thread.
///
/// See [`ApiOptions`] for an example.
#[derive(Debug)]
pub struct ServedModel {
    pub(crate) options: ApiOptions,
    pub(crate) vocabulary: Arc<Vocabulary>,
    pub(crate) defaults: Defaults,
    pub(crate) pieces: Arc<Pieces>,
    pub(crate) encoding_memory: EncodingMemory,
    /// What is wrong with a checkpoint's own template matters to those who hold conversations only.
    pub(crate) template: Result<Option<ChatTemplate>, String>,
    /// `None` without a tokenizer, and if grammars are no part of what is served.
    pub(crate) compiler: Option<Box<dyn Compiles>>,
    /// `None` if conversations are no part of what is served.
    pub(crate) read_chat: Option<ReadChat>,
    pub(crate) parameters: usize,
    /// Makes unpredictable numbers.
    pub(crate) random: RandomState,
}

impl ServedModel {
    /// What completions need of a model, without conversations and without texts that conform to something: a program that serves
    /// nothing else holds no code for these.
    ///
    /// # Errors
    /// When the checkpoint's `generation_config.json` cannot be used.
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

    /// What classifying needs of a model.
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

    /// Whether a model of this kind answers there at all, which [`ServedModel::read`] checks too.
    ///
    /// # Errors
    /// Where texts, or looks into what makes them, are asked of a classifier, or labels of a language model.
    pub fn check_asked(&self, endpoint: Endpoint) -> Result<(), ApiError> {
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
                    "this server's model is a {class}, a classifier, which makes no texts; ask it at /v1/classify"
                )
            }
            Endpoint::Classify if !has_labels => format!(
                "this server's model is a {class}, a language model, which has no labels; a classifier answers here"
            ),
            _ => return Ok(()),
        };
        Err(ApiError::invalid(message))
    }

    /// The name that it is served under.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// The configuration of the model.
    pub(crate) fn config(&self) -> &Gpt2Config {
        self.vocabulary.config()
    }

    /// Whether a request for this name is for this model; one without a name is.
    pub(crate) fn check_name<const MOST: usize>(&self, name: Option<&Text<MOST>>) -> Result<(), ApiError> {
        name.map_or(Ok(()), |Text(name)| self.check_named(name))
    }

    /// Whether this is a name of this model.
    pub(crate) fn check_named(&self, name: &str) -> Result<(), ApiError> {
        if name == self.name() || self.options.aliases.iter().any(|alias| alias == name) {
            return Ok(());
        }
        let message = format!("there is no such model here; this server has `{}`", self.name());
        Err(ApiError::new(404, message).with_param("model").with_code("model_not_found"))
    }

    /// The warnings of a body.
    pub(crate) fn known(&self, body: &Body<'_>) -> Result<Warnings, ApiError> {
        let warnings = body.warnings();
        self.check_known(&warnings).map(|()| warnings)
    }

    /// Refuses unknown fields if the server is strict.
    pub(crate) fn check_known(&self, warnings: &Warnings) -> Result<(), ApiError> {
        warnings.refusal().filter(|_| self.options.strict).map_or(Ok(()), Err)
    }

    /// Checks that a token is one of the vocabulary.
    pub(crate) fn check_token(&self, id: u32, path: impl FnOnce() -> String) -> Result<(), ApiError> {
        if self.config().has_token(id) {
            return Ok(());
        }
        let (path, vocab_size) = (path(), self.config().vocab_size);
        let message =
            format!("{path}: expected a token id below the vocabulary's size of {vocab_size}, found {id}");
        Err(ApiError::invalid(message).with_param(path))
    }

    /// The name of the token that ends texts.
    pub(crate) fn eos_token(&self) -> Option<String> {
        self.token_name(self.defaults.config().eos_token_id.first().copied())
    }

    /// The name of the token that begins texts.
    pub(crate) fn bos_token(&self) -> Option<String> {
        self.token_name(self.config().start_token())
    }

    fn token_name(&self, id: Option<u32>) -> Option<String> {
        self.vocabulary.tokenizer()?.id_to_token(id?)
    }

    /// The number under which requests share what was computed: that of the caller, and of the salt that a request names.
    pub(crate) fn reuse(&self, caller: Option<u64>, salt: Option<&str>) -> Option<u64> {
        let caller = caller?;
        Some(salt.map_or(caller, |salt| self.random.hash_one((caller, salt))))
    }
}

/// A vocabulary whose encoder is built, so that no request waits for it. One without a tokenizer has none.
fn prepared(vocabulary: &Arc<Vocabulary>) -> Arc<Vocabulary> {
    let _ = vocabulary.encoder();
    Arc::clone(vocabulary)
}

/// An unpredictable number that never comes twice.
pub(crate) fn fresh_number() -> u64 {
    // Each has keys of its own, which in a browser are always the same: there the numbers come from its own source.
    let number = RandomState::new().hash_one(());
    #[cfg(all(target_arch = "wasm32", target_os = "unknown"))]
    let number = getrandom::u64().unwrap_or(number);
    number
}
