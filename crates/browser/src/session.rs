//! Loaded model that answers a web page's requests, which have the server's paths and bodies.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

use candle_core::{DType, Tensor};
use candle_gpt2::{LogitsFor, Site};
use candle_gpt2_api::{
    ApiError, ApiOptions, Call, Endpoint, Limits, ServedModel, Session as ApiSession, SetupError, Work,
    find_route,
};
use candle_gpt2_compression::{Compressed, CompressionError, Compressor, TokenSize};
use candle_gpt2_engine::{CallId, EngineError, LoadedModel, Reporter};
use candle_gpt2_generation::SchedulerOptions;
use candle_gpt2_interpret::{Chain, Dictionary, Run, Transcoders, named_sites};
use candle_gpt2_look::{LookError, dictionary_from_bytes};

/// Endpoints that a page may use.
const ENDPOINTS: [Endpoint; 12] = [
    Endpoint::Models,
    Endpoint::Props,
    Endpoint::Completions,
    Endpoint::Tokenize,
    Endpoint::Detokenize,
    Endpoint::LookAttention,
    Endpoint::LookLens,
    Endpoint::LookHead,
    Endpoint::LookNext,
    Endpoint::LookFeatures,
    Endpoint::LookFeature,
    Endpoint::LookGraph,
];
/// Number of prompt tokens prefilled per step; a page can stop generation between steps.
const CHUNK_TOKENS: usize = 64;
/// Key for prefix reuse; all texts share a key because they belong to one user.
const REUSE_KEY: u64 = 0;

/// Model in memory that answers requests, each with a path and a body.
pub struct Session {
    loaded: LoadedModel,
    api: Rc<RefCell<ApiSession>>,
    /// Most recently started completion.
    current: Cell<Option<CallId>>,
    transcoders: Arc<OnceLock<Vec<Dictionary>>>,
}

/// Values at one hook point, returned by [`Session::activations`].
#[derive(Debug, Clone, PartialEq)]
pub struct Activation {
    /// TransformerLens name of the hook point.
    pub hook: String,
    /// Shape as in TransformerLens, without the batch axis.
    pub shape: Vec<usize>,
    /// Values in row-major order; masked attention scores are minus infinity.
    pub values: Vec<f32>,
}

/// Completion in progress.
pub struct CompletionStream {
    api: Rc<RefCell<ApiSession>>,
    /// `None` after the end.
    call: Option<CallId>,
}

impl Session {
    /// Creates a session that serves a model as `name`; `now` returns the seconds since the Unix epoch.
    ///
    /// # Errors
    /// If the checkpoint's `generation_config.json` is invalid, or the KV cache does not fit into memory.
    pub fn new(loaded: LoadedModel, name: &str, now: fn() -> u64) -> Result<Self, SetupError> {
        // A page needs none of the limits that protect a server.
        let limits = Limits { ends_at_context: true, ..Limits::NONE };
        let options = ApiOptions {
            name: name.to_owned(),
            limits,
            created: now(),
            parallel: 1,
            now,
            ..ApiOptions::default()
        };
        let transcoders = Arc::clone(&options.transcoders);
        let served = Arc::new(ServedModel::of_completions(&loaded, options)?);
        let kv_tokens = loaded.config().n_positions;
        let scheduler = SchedulerOptions { max_texts: 1, kv_tokens, chunk_tokens: CHUNK_TOKENS };
        let scheduler = loaded.scheduler(scheduler).map_err(EngineError::from)?;
        let api = Rc::new(RefCell::new(ApiSession::new(loaded.clone(), served, scheduler)));
        Ok(Self { loaded, api, current: Cell::new(None), transcoders })
    }

    /// Sets the transcoders for all later requests, one for each layer's MLP.
    ///
    /// Each pair in `files` has the text of a `cfg.json` and the bytes of the tensors, in SAELens' format.
    ///
    /// # Errors
    /// If a file is damaged, or the transcoders are for another model.
    pub fn set_transcoders(&self, files: Vec<(String, Vec<u8>)>) -> Result<(), LookError> {
        let read =
            |(config, weights): (String, Vec<u8>)| dictionary_from_bytes("transcoders", &config, weights);
        let dictionaries = files.into_iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let of_files = |error| LookError::File { path: "transcoders".into(), error };
        let transcoders = Transcoders::of_dictionaries(dictionaries.clone()).map_err(of_files)?;
        transcoders.check_model(self.loaded.config()).map_err(of_files)?;
        // Fails if an earlier call has set transcoders, which then stay in effect.
        _ = self.transcoders.set(dictionaries);
        Ok(())
    }

    /// Returns the model.
    pub fn loaded(&self) -> &LoadedModel {
        &self.loaded
    }

    /// Returns the model's name.
    pub fn name(&self) -> String {
        self.api.borrow().served().name().to_owned()
    }

    /// Answers a request with JSON.
    ///
    /// # Errors
    /// 404 for an unknown path; otherwise, the same errors as from the server.
    pub fn ask(&self, path: &str, body: &[u8]) -> Result<String, ApiError> {
        let work = self.read(path, body)?;
        if matches!(&work, Work::Texts(call) if call.stream) {
            let message = "stream: expected false; use `start` for a streamed completion";
            return Err(ApiError::invalid(message).with_param("stream"));
        }
        let reply = self.api.borrow_mut().answer(work, || true)?;
        Ok(reply.map(|reply| reply.json).unwrap_or_default())
    }

    /// Starts a streamed completion: `v1/completions` with `stream`.
    ///
    /// Only one completion runs at a time, so this cancels the previous one.
    ///
    /// # Errors
    /// Same as [`Session::ask`].
    pub fn start(&self, path: &str, body: &[u8]) -> Result<CompletionStream, ApiError> {
        if path != "v1/completions" {
            return Err(no_such_path(path));
        }
        let Work::Texts(call @ Call { stream: true, .. }) = self.read(path, body)? else {
            let message = "stream: expected true; use `ask` for a completion that is not streamed";
            return Err(ApiError::invalid(message).with_param("stream"));
        };
        let mut api = self.api.borrow_mut();
        if let Some(before) = self.current.take() {
            api.end(before);
        }
        let call = api.begin(call)?;
        self.current.set(Some(call));
        Ok(CompletionStream { api: Rc::clone(&self.api), call: Some(call) })
    }

    /// Decodes tokens to text, including special tokens.
    ///
    /// # Errors
    /// If a token is outside the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<String, ApiError> {
        ids.iter().try_for_each(|id| self.check_token(*id))?;
        self.loaded.vocabulary().decode(ids, false).map_err(|error| ApiError::invalid(error.to_string()))
    }

    /// Returns the logits after each token, `(T, V)`, flattened token by token.
    ///
    /// # Errors
    /// If there are no tokens or too many for the context, or a token is outside the vocabulary.
    pub fn logits(&self, ids: &[u32]) -> Result<Vec<f32>, ApiError> {
        let run = Run::new(self.loaded.model(), ids).map_err(|error| ApiError::invalid(error.to_string()))?;
        let logits = run.logits(LogitsFor::EveryToken, &mut Chain(Vec::new()));
        let numbers = logits.and_then(|logits| logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1());
        numbers.map_err(ApiError::failed)
    }

    /// Returns activations; `hooks` is a comma-separated list of hook point names.
    ///
    /// Names may contain `*`, as in `gpt2 cache --sites`. Blocks after the last hook point are not computed.
    ///
    /// # Errors
    /// If a name is unknown, there are no tokens or too many for the context, or a token is outside the
    /// vocabulary.
    pub fn activations(&self, ids: &[u32], hooks: &str) -> Result<Vec<Activation>, ApiError> {
        let sites = named_sites(hooks, self.loaded.config().n_layer)
            .map_err(|error| ApiError::invalid(error.to_string()).with_param("hooks"))?;
        let run = Run::new(self.loaded.model(), ids).map_err(|error| ApiError::invalid(error.to_string()))?;
        let record = run.record(sites).map_err(ApiError::failed)?;
        let activation = |(site, value): (&Site, &Tensor)| -> candle_core::Result<Activation> {
            let value = value.squeeze(0)?.to_dtype(DType::F32)?;
            let shape = value.dims().to_vec();
            Ok(Activation { hook: site.to_string(), shape, values: value.flatten_all()?.to_vec1()? })
        };
        let found = record.values.iter().map(activation).collect::<candle_core::Result<_>>();
        found.map_err(ApiError::failed)
    }

    /// Compresses bytes with this model, in the format of `gpt2 compress`.
    ///
    /// # Errors
    /// If the model cannot compress, or `reporter` interrupts the compression.
    pub fn compress(&self, bytes: &[u8], reporter: &dyn Reporter) -> Result<Vec<u8>, CompressionError> {
        let mut compressed = Vec::new();
        let length = Some(bytes.len() as u64);
        self.compressor()?.compress(&mut &*bytes, length, &mut compressed, reporter)?;
        Ok(compressed)
    }

    /// Decompresses bytes that this model compressed.
    ///
    /// # Errors
    /// If another model compressed the bytes, the bytes are damaged, or `reporter` interrupts the work.
    pub fn decompress(&self, bytes: &[u8], reporter: &dyn Reporter) -> Result<Vec<u8>, CompressionError> {
        let mut restored = Vec::new();
        Compressed::open(bytes)?.decompress(&self.loaded, &mut restored, reporter)?;
        Ok(restored)
    }

    /// Tokenizes bytes and returns each token with its cost in bits.
    ///
    /// # Errors
    /// Same as [`Session::compress`].
    pub fn token_sizes(
        &self,
        bytes: &[u8],
        reporter: &dyn Reporter,
    ) -> Result<Vec<TokenSize>, CompressionError> {
        self.compressor()?.token_sizes(bytes, reporter)
    }

    fn compressor(&self) -> Result<Compressor, CompressionError> {
        Compressor::new(&self.loaded, &self.name(), None)
    }

    fn check_token(&self, id: u32) -> Result<(), ApiError> {
        let config = self.loaded.config();
        if config.has_token(id) {
            return Ok(());
        }
        Err(ApiError::invalid(format!(
            "token {id} is outside the vocabulary of {} tokens",
            config.vocab_size
        )))
    }

    fn read(&self, path: &str, body: &[u8]) -> Result<Work, ApiError> {
        let with_slash = format!("/{path}");
        let route = |method| find_route(method, &with_slash).ok().map(|(route, _)| route.endpoint);
        let endpoint = route("POST").or_else(|| route("GET")).filter(|endpoint| ENDPOINTS.contains(endpoint));
        let served = Arc::clone(self.api.borrow().served());
        served.read(endpoint.ok_or_else(|| no_such_path(path))?, body, Some(REUSE_KEY))
    }
}

impl CompletionStream {
    /// Runs one step and returns its JSON chunks, possibly none; `None` after the end.
    ///
    /// # Errors
    /// If another completion was started, or this one cannot continue. The completion has then ended.
    pub fn step(&mut self) -> Result<Option<Vec<String>>, ApiError> {
        let Some(call) = self.call.take() else { return Ok(None) };
        let mut api = self.api.borrow_mut();
        if !api.has(call) {
            return Err(ApiError::new(409, "another completion was started, which canceled this one"));
        }
        let chunks = api.step(call)?;
        self.call = chunks.is_some().then_some(call);
        Ok(chunks)
    }
}

/// Cancels the completion unless it has been read to its end.
impl Drop for CompletionStream {
    fn drop(&mut self) {
        if let Some(call) = self.call {
            self.api.borrow_mut().end(call);
        }
    }
}

fn no_such_path(path: &str) -> ApiError {
    ApiError::new(404, format!("path not found: {path}"))
}
