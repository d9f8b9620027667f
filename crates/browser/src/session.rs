//! A loaded model with everything that a page asks of it, by the paths and bodies of the server.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

use candle_core::DType;
use candle_gpt2::LogitsFor;
use candle_gpt2_api::{
    ApiError, ApiOptions, Call, Endpoint, Limits, ServedModel, Session as Works, SetupError, Work, find_route,
};
use candle_gpt2_compression::{Compressed, CompressionError, Compressor, TokenSize};
use candle_gpt2_engine::{CallId, EngineError, LoadedModel, Reporter};
use candle_gpt2_generation::SchedulerOptions;
use candle_gpt2_interpret::{Chain, Dictionary, Run, Transcoders};
use candle_gpt2_look::{LookError, given_dictionary};

/// What a page asks for.
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
/// Tokens of a prompt that are computed in a step: a page can stop between two steps.
const CHUNK_TOKENS: usize = 64;
/// All texts are one user's, and reuse what was computed for one another.
const REUSE: u64 = 0;

/// A model in memory that is asked by paths and bodies.
pub struct Session {
    loaded: LoadedModel,
    works: Rc<RefCell<Works>>,
    /// The text that was begun last.
    writing: Cell<Option<CallId>>,
    transcoders: Arc<OnceLock<Vec<Dictionary>>>,
}

/// A text in the making.
pub struct Writing {
    works: Rc<RefCell<Works>>,
    /// `None` when everything was told.
    call: Option<CallId>,
}

impl Session {
    /// A model under its name; `now` tells the seconds since 1970.
    ///
    /// # Errors
    /// When the checkpoint's `generation_config.json` cannot be used, or there is no memory for keys and values.
    pub fn new(loaded: LoadedModel, name: &str, now: fn() -> u64) -> Result<Self, SetupError> {
        // Nothing that is there to keep a server from harm.
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
        let works = Rc::new(RefCell::new(Works::new(loaded.clone(), served, scheduler)));
        Ok(Self { loaded, works, writing: Cell::new(None), transcoders })
    }

    /// Gives it transcoders of its MLPs, one for each layer, from then on: the `cfg.json` and the tensors of each, as SAELens has them.
    ///
    /// # Errors
    /// When one is damaged, or they are of another model.
    pub fn set_transcoders(&self, files: Vec<(String, Vec<u8>)>) -> Result<(), LookError> {
        let read = |(config, weights): (String, Vec<u8>)| given_dictionary("transcoders", &config, weights);
        let dictionaries = files.into_iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let of_files = |error| LookError::File { path: "transcoders".into(), error };
        let transcoders = Transcoders::of_dictionaries(dictionaries.clone()).map_err(of_files)?;
        transcoders.check_model(self.loaded.config()).map_err(of_files)?;
        // Those that are there already stay.
        _ = self.transcoders.set(dictionaries);
        Ok(())
    }

    /// The model.
    pub fn loaded(&self) -> &LoadedModel {
        &self.loaded
    }

    /// The name that it was given.
    pub fn name(&self) -> String {
        self.works.borrow().served().name().to_owned()
    }

    /// The answer to a request: JSON.
    ///
    /// # Errors
    /// 404 for a path that is none of these; otherwise as the server answers.
    pub fn ask(&self, path: &str, body: &[u8]) -> Result<String, ApiError> {
        let work = self.read(path, body)?;
        if matches!(&work, Work::Texts(call) if call.stream) {
            let message = "stream: a text that comes piece by piece is started, not asked for";
            return Err(ApiError::invalid(message).with_param("stream"));
        }
        let reply = self.works.borrow_mut().answer(work, || true)?;
        Ok(reply.map(|reply| reply.json).unwrap_or_default())
    }

    /// Begins a text that comes piece by piece: `v1/completions` with `stream`. One text is made at a time: this ends the one
    /// before.
    ///
    /// # Errors
    /// As [`Session::ask`].
    pub fn start(&self, path: &str, body: &[u8]) -> Result<Writing, ApiError> {
        if path != "v1/completions" {
            return Err(no_such_path(path));
        }
        let Work::Texts(call @ Call { stream: true, .. }) = self.read(path, body)? else {
            let message = "stream: expected true; an answer as a whole is asked for, not started";
            return Err(ApiError::invalid(message).with_param("stream"));
        };
        let mut works = self.works.borrow_mut();
        if let Some(before) = self.writing.take() {
            works.end(before);
        }
        let call = works.begin(call)?;
        self.writing.set(Some(call));
        Ok(Writing { works: Rc::clone(&self.works), call: Some(call) })
    }

    /// The text of tokens, with the names of special ones.
    ///
    /// # Errors
    /// When one is outside the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<String, ApiError> {
        ids.iter().try_for_each(|id| self.check_token(*id))?;
        self.loaded.vocabulary().decode(ids, false).map_err(|error| ApiError::invalid(error.to_string()))
    }

    /// The logits after each token, `(T, V)`, those of a token one after the other.
    ///
    /// # Errors
    /// When there are no tokens or more than the context holds, or one is outside the vocabulary.
    pub fn logits(&self, ids: &[u32]) -> Result<Vec<f32>, ApiError> {
        let run = Run::new(self.loaded.model(), ids).map_err(|error| ApiError::invalid(error.to_string()))?;
        let logits = run.logits(LogitsFor::EveryToken, &mut Chain(Vec::new()));
        let numbers = logits.and_then(|logits| logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1());
        numbers.map_err(ApiError::failed)
    }

    /// Bytes compressed by this model, as `gpt2 compress` writes them.
    ///
    /// # Errors
    /// When the model cannot compress, or `reporter` interrupts it.
    pub fn compress(&self, bytes: &[u8], reporter: &dyn Reporter) -> Result<Vec<u8>, CompressionError> {
        let mut compressed = Vec::new();
        let length = Some(bytes.len() as u64);
        self.compressor()?.compress(&mut &*bytes, length, &mut compressed, reporter)?;
        Ok(compressed)
    }

    /// The bytes that were compressed.
    ///
    /// # Errors
    /// When they were not by this model, or are damaged, or `reporter` interrupts it.
    pub fn decompress(&self, bytes: &[u8], reporter: &dyn Reporter) -> Result<Vec<u8>, CompressionError> {
        let mut restored = Vec::new();
        Compressed::open(bytes)?.decompress(&self.loaded, &mut restored, reporter)?;
        Ok(restored)
    }

    /// The tokens of some bytes, with the bits that each costs.
    ///
    /// # Errors
    /// As [`Session::compress`].
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
        Err(ApiError::invalid(format!("token {id} is outside the vocabulary of {}", config.vocab_size)))
    }

    fn read(&self, path: &str, body: &[u8]) -> Result<Work, ApiError> {
        let with_slash = format!("/{path}");
        let route = |method| find_route(method, &with_slash).ok().map(|(route, _)| route.endpoint);
        let endpoint = route("POST").or_else(|| route("GET")).filter(|endpoint| ENDPOINTS.contains(endpoint));
        let served = Arc::clone(self.works.borrow().served());
        served.read(endpoint.ok_or_else(|| no_such_path(path))?, body, Some(REUSE))
    }
}

impl Writing {
    /// One step: the JSON chunks that it brought, which may be none; `None` when the text has ended.
    ///
    /// # Errors
    /// When another text was begun, or the text cannot continue. It has then ended.
    pub fn step(&mut self) -> Result<Option<Vec<String>>, ApiError> {
        let Some(call) = self.call.take() else { return Ok(None) };
        let mut works = self.works.borrow_mut();
        if !works.has(call) {
            return Err(ApiError::new(409, "another text was begun, which ended this one"));
        }
        let chunks = works.step(call)?;
        self.call = chunks.is_some().then_some(call);
        Ok(chunks)
    }
}

/// What is not read to its end is not made either.
impl Drop for Writing {
    fn drop(&mut self) {
        if let Some(call) = self.call {
            self.works.borrow_mut().end(call);
        }
    }
}

fn no_such_path(path: &str) -> ApiError {
    ApiError::new(404, format!("there is nothing at this path: {path}"))
}
