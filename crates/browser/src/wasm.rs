//! JavaScript API for the engine.
//!
//! Exceptions are `Error` objects with the engine's message. For a failed request, they also have `status`
//! and `param`.

#![expect(unreachable_pub, reason = "exported to JavaScript")]

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use candle_gpt2_api::ApiError;
use candle_gpt2_compression::{Compressed, Header};
use candle_gpt2_engine::{
    DeviceChoice, Inspection, ModelOptions, Progress, Reporter, Silent, Unit, fingerprint,
};
use candle_gpt2_weights::{Checkpoint as Opened, GivenFiles, OpenOptions, WeightsError};
use js_sys::{Array, Date, Error, Float32Array, Function, Object, Reflect, Uint8Array};
use wasm_bindgen::prelude::*;
use web_sys::Blob;

use crate::blob::BlobFile;
use crate::{Activation, CompletionStream, Session, check_memory, memory};

type Result<T> = std::result::Result<T, JsValue>;

thread_local! {
    /// Message from the last panic; after a panic, no other function in the module may be called.
    static LAST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Installs the panic hook when the module is loaded.
#[wasm_bindgen(start)]
fn start() {
    std::panic::set_hook(Box::new(|panic| {
        LAST_PANIC.with(|last| *last.borrow_mut() = Some(panic.to_string()));
    }));
}

/// Returns the message from the last panic; a call that panics throws `WebAssembly.RuntimeError`.
///
/// After a panic, the module must be loaded again.
#[wasm_bindgen]
pub fn last_panic() -> Option<String> {
    LAST_PANIC.with(|last| last.borrow().clone())
}

/// Returns the engine's version.
#[wasm_bindgen]
pub fn version() -> String {
    env!("CARGO_PKG_VERSION").to_owned()
}

/// Checkpoint files, keyed by name.
#[wasm_bindgen]
pub struct Files {
    name: String,
    files: GivenFiles,
}

#[wasm_bindgen]
impl Files {
    /// Creates an empty set of files; `name` becomes the model's name, including in messages.
    #[wasm_bindgen(constructor)]
    pub fn new(name: String) -> Self {
        Self { files: GivenFiles::new(&name), name }
    }

    /// Adds a file with these contents.
    pub fn add_bytes(&mut self, file: &str, bytes: Vec<u8>) {
        self.add(|files| files.with_bytes(file, bytes));
    }

    /// Adds a file that is read in parts on demand; works only in a web worker.
    pub fn add_file(&mut self, file: &str, blob: Blob) {
        self.add(|files| files.with_file(file, Arc::new(BlobFile::new(blob))));
    }

    fn add(&mut self, with: impl FnOnce(GivenFiles) -> GivenFiles) {
        let files = std::mem::replace(&mut self.files, GivenFiles::new(&self.name));
        self.files = with(files);
    }
}

/// Open checkpoint, whose weights have not been loaded yet.
#[wasm_bindgen]
pub struct Checkpoint {
    name: String,
    /// `None` after loading, so that the memory for the files can be freed.
    opened: Option<Opened>,
}

#[wasm_bindgen]
impl Checkpoint {
    /// Opens a checkpoint and consumes its files.
    #[wasm_bindgen(constructor)]
    pub fn new(files: Files) -> Result<Self> {
        let opened = Opened::open_given(files.files, &OpenOptions::default(), &|_| ()).map_err(js_error)?;
        Ok(Self { name: files.name, opened: Some(opened) })
    }

    /// Returns a description of the checkpoint: the JSON of `gpt2 inspect --json`.
    pub fn inspect(&self) -> Result<String> {
        let found = Inspection::of_checkpoint(self.opened()?, false, &Silent).map_err(js_error)?;
        serde_json::to_string(&found).map_err(js_error)
    }

    /// Returns the error if the tokenizer is missing or damaged; tokens then have no text.
    pub fn tokenizer_fault(&self) -> Result<Option<String>> {
        Ok(self.opened()?.tokenizer(None).err().map(|error| match error {
            WeightsError::NoTokenizer { .. } => {
                "no tokenizer found; add tokenizer.json, vocab.json and merges.txt, spiece.model or \
                 vocab.txt from the checkpoint's source"
                    .to_owned()
            }
            error => error.to_string(),
        }))
    }

    /// Returns the memory that the model needs, in bytes.
    ///
    /// `dtype` is the weight type: "f32", "f16", "q8", "q6", "q5" or "q4"; by default, the stored type.
    /// `kv_dtype` is the KV cache type: "f32", "f16" or "q8".
    pub fn memory(&self, dtype: Option<String>, kv_dtype: Option<String>) -> Result<f64> {
        let options = options(dtype, kv_dtype)?;
        Ok(memory(self.opened()?, &options).map_err(js_error)? as f64)
    }

    /// Loads the model with these weight and KV cache types, and consumes the checkpoint.
    ///
    /// `progress` is called with the number of bytes loaded and the total. If `progress` throws, loading
    /// stops.
    pub fn load(
        &mut self,
        dtype: Option<String>,
        kv_dtype: Option<String>,
        #[wasm_bindgen(unchecked_param_type = "(done: number, total: number) => void")] progress: Option<
            Function,
        >,
    ) -> Result<Model> {
        let options = options(dtype, kv_dtype)?;
        check_memory(self.opened()?, &options).map_err(js_error)?;
        let checkpoint = self.opened.take().ok_or_else(used_up)?;
        let loaded = JsReporter::while_working(progress, |reporter| {
            options.open_with(checkpoint, reporter)?.load(reporter)
        });
        let session = Session::new(loaded.map_err(js_error)?, &self.name, now).map_err(js_error)?;
        Ok(Model { session })
    }

    fn opened(&self) -> Result<&Opened> {
        self.opened.as_ref().ok_or_else(used_up)
    }
}

fn used_up() -> JsValue {
    js_error("this checkpoint was consumed when its model was loaded; open the files again")
}

fn options(dtype: Option<String>, kv_dtype: Option<String>) -> Result<ModelOptions> {
    let dtype = dtype.map(|dtype| dtype.parse()).transpose().map_err(js_error)?;
    let kv_dtype = kv_dtype.map(|dtype| dtype.parse()).transpose().map_err(js_error)?;
    Ok(ModelOptions { dtype, kv_dtype, device: DeviceChoice::Cpu, ..ModelOptions::default() })
}

/// Loaded model.
#[wasm_bindgen]
pub struct Model {
    session: Session,
}

#[wasm_bindgen]
impl Model {
    /// Name of the model.
    #[wasm_bindgen(getter)]
    pub fn name(&self) -> String {
        self.session.name()
    }

    /// Returns the configuration as JSON, with the keys of a `config.json`.
    pub fn config(&self) -> String {
        self.session.loaded().config().to_json().to_string()
    }

    /// Encodes a text as token ids.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.session.loaded().vocabulary().encode(text).map_err(js_error)
    }

    /// Decodes tokens to text, including special tokens.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.session.decode(ids).map_err(request_error)
    }

    /// Returns the logits after each token, `(T, V)`, flattened token by token.
    pub fn logits(&self, ids: &[u32]) -> Result<Float32Array> {
        let logits = self.session.logits(ids).map_err(request_error)?;
        Ok(Float32Array::from(logits.as_slice()))
    }

    /// Returns the activations at hook points, keyed by TransformerLens name.
    ///
    /// `hooks` is a comma-separated list of names, which may contain `*`. Shapes have no batch axis, and
    /// masked attention scores are minus infinity.
    #[wasm_bindgen(unchecked_return_type = "Record<string, { shape: number[]; data: Float32Array }>")]
    pub fn activations(&self, ids: &[u32], hooks: &str) -> Result<Object> {
        let found = Object::new();
        for Activation { hook, shape, values } in
            self.session.activations(ids, hooks).map_err(request_error)?
        {
            let shape: Array = shape.iter().map(|size| JsValue::from(*size as f64)).collect();
            let value = Object::new();
            Reflect::set(&value, &"shape".into(), &shape)?;
            Reflect::set(&value, &"data".into(), &Float32Array::from(values.as_slice()))?;
            Reflect::set(&found, &hook.into(), &value)?;
        }
        Ok(found)
    }

    /// Returns the SHA-256 hash of the logits after each token of a fixed prompt.
    ///
    /// `gpt2 verify --fingerprint` prints the same value.
    pub fn fingerprint(&self) -> Result<String> {
        fingerprint(self.session.loaded().model(), &Silent).map_err(js_error)
    }

    /// Sets the MLPs' transcoders, for `look/features`, `look/feature` and `look/graph`.
    ///
    /// For each layer, starting with the first, `configs` has the text of `cfg.json` and `weights` has the
    /// bytes of `sae_weights.safetensors`, in SAELens' format.
    pub fn set_transcoders(&self, configs: Vec<String>, weights: Vec<Uint8Array>) -> Result<()> {
        let files = configs.into_iter().zip(weights.iter().map(Uint8Array::to_vec)).collect();
        self.session.set_transcoders(files).map_err(js_error)
    }

    /// Answers a request with JSON, as the server does.
    pub fn ask(&self, path: &str, body: Option<String>) -> Result<String> {
        self.session.ask(path, body.unwrap_or_default().as_bytes()).map_err(request_error)
    }

    /// Compresses bytes with this model, in the format of `gpt2 compress`.
    ///
    /// `progress` is called with the number of bytes done and the total. If `progress` throws, compression
    /// stops.
    pub fn compress(
        &self,
        bytes: &[u8],
        #[wasm_bindgen(unchecked_param_type = "(done: number, total: number) => void")] progress: Option<
            Function,
        >,
    ) -> Result<Vec<u8>> {
        JsReporter::while_working(progress, |reporter| self.session.compress(bytes, reporter))
            .map_err(js_error)
    }

    /// Decompresses bytes that this model compressed.
    ///
    /// The model must have the precision that [`compressed_header`] returns. `progress` works as in
    /// `compress`.
    pub fn decompress(
        &self,
        bytes: &[u8],
        #[wasm_bindgen(unchecked_param_type = "(done: number, total: number) => void")] progress: Option<
            Function,
        >,
    ) -> Result<Vec<u8>> {
        JsReporter::while_working(progress, |reporter| self.session.decompress(bytes, reporter))
            .map_err(js_error)
    }

    /// Tokenizes bytes and returns JSON: each token's `id`, `bytes` and cost in `bits`.
    pub fn token_sizes(&self, bytes: &[u8]) -> Result<String> {
        let sizes = self.session.token_sizes(bytes, &Silent).map_err(js_error)?;
        serde_json::to_string(&sizes).map_err(js_error)
    }

    /// Starts a streamed completion: `v1/completions` with `stream`.
    ///
    /// This cancels the previous completion.
    pub fn start(&self, path: &str, body: &str) -> Result<Writing> {
        let text = self.session.start(path, body.as_bytes()).map_err(request_error)?;
        Ok(Writing { text })
    }
}

/// Returns the header of compressed bytes as JSON: `dtype`, `kv_dtype` and `name`.
///
/// The model must be loaded with this `dtype` and `kv_dtype`.
#[wasm_bindgen]
pub fn compressed_header(bytes: &[u8]) -> Result<String> {
    let compressed = Compressed::open(bytes).map_err(js_error)?;
    let Header { dtype, kv_dtype, name, .. } = compressed.header();
    let header = serde_json::json!({"dtype": dtype.name(), "kv_dtype": kv_dtype.name(), "name": name});
    Ok(header.to_string())
}

/// Completion in progress.
#[wasm_bindgen]
pub struct Writing {
    text: CompletionStream,
}

#[wasm_bindgen]
impl Writing {
    /// Runs the next step and returns its JSON chunks, possibly none; `undefined` at the end.
    pub fn next(&mut self) -> Result<Option<Vec<String>>> {
        self.text.step().map_err(request_error)
    }
}

thread_local! {
    /// Progress callback of the long call that is running.
    ///
    /// JavaScript functions cannot move between threads, but reporters may be called on any thread.
    static PROGRESS: RefCell<Option<Function>> = const { RefCell::new(None) };
}

/// Reporter that calls the function in [`PROGRESS`].
#[derive(Clone, Default)]
struct JsReporter {
    done: Arc<AtomicU64>,
    total: u64,
    has_thrown: Arc<AtomicBool>,
}

impl JsReporter {
    fn while_working<T>(progress: Option<Function>, work: impl FnOnce(&Self) -> T) -> T {
        PROGRESS.set(progress);
        let done = work(&Self::default());
        PROGRESS.set(None);
        done
    }
}

impl Reporter for JsReporter {
    fn start(&self, _: &str, total: u64, _: Unit) -> Box<dyn Progress> {
        Box::new(Self { total, ..self.clone() })
    }

    fn note(&self, _: &str) {}

    fn is_interrupted(&self) -> bool {
        self.has_thrown.load(Ordering::Relaxed)
    }
}

impl Progress for JsReporter {
    fn advance(&self, by: u64) {
        let done = self.done.fetch_add(by, Ordering::Relaxed) + by;
        let progress = PROGRESS.with_borrow(Clone::clone);
        let heard = progress.map(|progress| {
            progress.call2(&JsValue::NULL, &(done as f64).into(), &(self.total as f64).into())
        });
        if heard.is_some_and(|heard| heard.is_err()) {
            self.has_thrown.store(true, Ordering::Relaxed);
        }
    }
}

/// Seconds since the Unix epoch.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a clock after 1970")]
fn now() -> u64 {
    (Date::now() / 1000.0) as u64
}

/// Creates a JavaScript error with this message.
fn js_error(error: impl ToString) -> JsValue {
    Error::new(&error.to_string()).into()
}

/// Creates a JavaScript error for a failed request, with the status and any invalid parameter.
///
/// Callers own the model, so the error includes the internal cause if there is one.
fn request_error(error: ApiError) -> JsValue {
    let object = error.cause().map_or_else(|| js_error(&error), js_error);
    let param = error.param().map_or(JsValue::UNDEFINED, JsValue::from_str);
    for (key, value) in [("status", error.status().into()), ("param", param)] {
        // Cannot fail, because `object` was just created and is extensible.
        _ = Reflect::set(&object, &key.into(), &value);
    }
    object
}
