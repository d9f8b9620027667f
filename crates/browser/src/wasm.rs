//! What JavaScript sees. Errors are `Error` objects with the engine's sentence, and with `status` and `param` if a request is at
//! fault.

#![expect(unreachable_pub, reason = "JavaScript reaches it")]

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use candle_gpt2_api::ApiError;
use candle_gpt2_compression::{Compressed, Header};
use candle_gpt2_engine::{
    DeviceChoice, Inspection, ModelOptions, Progress, Reporter, Silent, Unit, fingerprint,
};
use candle_gpt2_weights::{Checkpoint as Opened, GivenFiles, OpenOptions, WeightsError};
use js_sys::{Date, Error, Float32Array, Function, Reflect, Uint8Array};
use wasm_bindgen::prelude::*;
use web_sys::Blob;

use crate::blob::BlobFile;
use crate::{Session, Writing as Text, check_room, memory};

type Result<T> = std::result::Result<T, JsValue>;

thread_local! {
    /// What a panic said. The module cannot continue after one, but for telling this.
    static LAST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs when the module is loaded.
#[wasm_bindgen(start)]
fn start() {
    std::panic::set_hook(Box::new(|panic| {
        LAST_PANIC.with(|last| *last.borrow_mut() = Some(panic.to_string()));
    }));
}

/// What the last panic said, after a call has thrown a `WebAssembly.RuntimeError`: the module has to be loaded anew.
#[wasm_bindgen]
pub fn last_panic() -> Option<String> {
    LAST_PANIC.with(|last| last.borrow().clone())
}

/// The version of the engine.
#[wasm_bindgen]
pub fn version() -> String {
    env!("CARGO_PKG_VERSION").to_owned()
}

/// The files of a checkpoint, by their names.
#[wasm_bindgen]
pub struct Files {
    name: String,
    files: GivenFiles,
}

#[wasm_bindgen]
impl Files {
    /// No files yet; `name` is what the model and messages call it.
    #[wasm_bindgen(constructor)]
    pub fn new(name: String) -> Self {
        Self { files: GivenFiles::new(&name), name }
    }

    /// Adds a file with its contents.
    pub fn add_bytes(&mut self, file: &str, bytes: Vec<u8>) {
        self.add(|files| files.with_bytes(file, bytes));
    }

    /// Adds a file that is read in parts as it is needed; in a worker only.
    pub fn add_file(&mut self, file: &str, blob: Blob) {
        self.add(|files| files.with_file(file, Arc::new(BlobFile::new(blob))));
    }

    fn add(&mut self, with: impl FnOnce(GivenFiles) -> GivenFiles) {
        let files = std::mem::replace(&mut self.files, GivenFiles::new(&self.name));
        self.files = with(files);
    }
}

/// A checkpoint that is opened, before its weights are read.
#[wasm_bindgen]
pub struct Checkpoint {
    name: String,
    /// `None` when it was loaded, so that what was read of it can go.
    opened: Option<Opened>,
}

#[wasm_bindgen]
impl Checkpoint {
    /// Opens a checkpoint, and uses up its files.
    #[wasm_bindgen(constructor)]
    pub fn new(files: Files) -> Result<Self> {
        let opened = Opened::open_given(files.files, &OpenOptions::default(), &|_| ()).map_err(told)?;
        Ok(Self { name: files.name, opened: Some(opened) })
    }

    /// What it is: the JSON of `gpt2 inspect --json`.
    pub fn inspect(&self) -> Result<String> {
        let found = Inspection::of_checkpoint(self.opened()?, false, &Silent).map_err(told)?;
        serde_json::to_string(&found).map_err(told)
    }

    /// Why its tokens cannot be told as text, if its tokenizer is missing or damaged.
    pub fn tokenizer_fault(&self) -> Result<Option<String>> {
        Ok(self.opened()?.tokenizer(None).err().map(|error| match error {
            WeightsError::NoTokenizer { .. } => {
                "there is no tokenizer: choose tokenizer.json, vocab.json and merges.txt, spiece.model or vocab.txt from where the checkpoint comes from"
                    .to_owned()
            }
            error => error.to_string(),
        }))
    }

    /// Bytes of memory that its model needs, with weights in this type (as stored without one; "f32", "f16", "q8", "q6",
    /// "q5" or "q4") and keys and values in that ("f32", "f16" or "q8").
    pub fn memory(&self, dtype: Option<String>, kv_dtype: Option<String>) -> Result<f64> {
        let options = options(dtype, kv_dtype)?;
        Ok(memory(self.opened()?, &options).map_err(told)? as f64)
    }

    /// Reads the weights, in these types, and uses the checkpoint up. `progress` is called with the bytes that are done and those that
    /// there are, and ends the loading if it throws.
    pub fn load(
        &mut self,
        dtype: Option<String>,
        kv_dtype: Option<String>,
        #[wasm_bindgen(unchecked_param_type = "(done: number, total: number) => void")] progress: Option<
            Function,
        >,
    ) -> Result<Model> {
        let options = options(dtype, kv_dtype)?;
        check_room(self.opened()?, &options).map_err(told)?;
        let checkpoint = self.opened.take().ok_or_else(used_up)?;
        let loaded =
            Hearer::while_working(progress, |hearer| options.open_with(checkpoint, hearer)?.load(hearer));
        let session = Session::new(loaded.map_err(told)?, &self.name, now).map_err(told)?;
        Ok(Model { session })
    }

    fn opened(&self) -> Result<&Opened> {
        self.opened.as_ref().ok_or_else(used_up)
    }
}

fn used_up() -> JsValue {
    told("this checkpoint is used up: its model was loaded; open its files again")
}

fn options(dtype: Option<String>, kv_dtype: Option<String>) -> Result<ModelOptions> {
    let dtype = dtype.map(|dtype| dtype.parse()).transpose().map_err(told)?;
    let kv_dtype = kv_dtype.map(|dtype| dtype.parse()).transpose().map_err(told)?;
    Ok(ModelOptions { dtype, kv_dtype, device: DeviceChoice::Cpu, ..ModelOptions::default() })
}

/// A loaded model.
#[wasm_bindgen]
pub struct Model {
    session: Session,
}

#[wasm_bindgen]
impl Model {
    /// Its name.
    #[wasm_bindgen(getter)]
    pub fn name(&self) -> String {
        self.session.name()
    }

    /// Its configuration: the keys of a `config.json`.
    pub fn config(&self) -> String {
        self.session.loaded().config().to_json().to_string()
    }

    /// The tokens of a text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.session.loaded().vocabulary().encode(text).map_err(told)
    }

    /// The text of tokens, with the names of special ones.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.session.decode(ids).map_err(refused)
    }

    /// The logits after each token, `(T, V)`, those of a token one after the other.
    pub fn logits(&self, ids: &[u32]) -> Result<Float32Array> {
        let logits = self.session.logits(ids).map_err(refused)?;
        Ok(Float32Array::from(logits.as_slice()))
    }

    /// The SHA-256 of the logits after each token of a fixed prompt, as `gpt2 verify --fingerprint` prints it.
    pub fn fingerprint(&self) -> Result<String> {
        fingerprint(self.session.loaded().model(), &Silent).map_err(told)
    }

    /// Gives it transcoders of its MLPs, for `look/features`, `look/feature` and `look/graph`: of each layer, from the first, the text of
    /// `cfg.json` and the bytes of `sae_weights.safetensors`, as SAELens has them.
    pub fn set_transcoders(&self, configs: Vec<String>, weights: Vec<Uint8Array>) -> Result<()> {
        let files = configs.into_iter().zip(weights.iter().map(Uint8Array::to_vec)).collect();
        self.session.set_transcoders(files).map_err(told)
    }

    /// The answer to a request, as the server gives it, in JSON.
    pub fn ask(&self, path: &str, body: Option<String>) -> Result<String> {
        self.session.ask(path, body.unwrap_or_default().as_bytes()).map_err(refused)
    }

    /// Bytes compressed by this model, as `gpt2 compress` writes them. `progress` is called with the bytes that are done and those that
    /// there are, and ends it if it throws.
    pub fn compress(
        &self,
        bytes: &[u8],
        #[wasm_bindgen(unchecked_param_type = "(done: number, total: number) => void")] progress: Option<
            Function,
        >,
    ) -> Result<Vec<u8>> {
        Hearer::while_working(progress, |hearer| self.session.compress(bytes, hearer)).map_err(told)
    }

    /// The bytes that were compressed by this model, in the precision that [`compressed_header`] tells; `progress` as of `compress`.
    pub fn decompress(
        &self,
        bytes: &[u8],
        #[wasm_bindgen(unchecked_param_type = "(done: number, total: number) => void")] progress: Option<
            Function,
        >,
    ) -> Result<Vec<u8>> {
        Hearer::while_working(progress, |hearer| self.session.decompress(bytes, hearer)).map_err(told)
    }

    /// The tokens of some bytes with what each costs, in JSON: `id`, `bytes`, `bits`.
    pub fn token_sizes(&self, bytes: &[u8]) -> Result<String> {
        let sizes = self.session.token_sizes(bytes, &Silent).map_err(told)?;
        serde_json::to_string(&sizes).map_err(told)
    }

    /// Begins a text that comes piece by piece: `v1/completions` with `stream`. It ends the one before.
    pub fn start(&self, path: &str, body: &str) -> Result<Writing> {
        let text = self.session.start(path, body.as_bytes()).map_err(refused)?;
        Ok(Writing { text })
    }
}

/// What compressed bytes say of themselves, in JSON: `dtype` and `kv_dtype` that the model must be loaded with, its `name`.
#[wasm_bindgen]
pub fn compressed_header(bytes: &[u8]) -> Result<String> {
    let compressed = Compressed::open(bytes).map_err(told)?;
    let Header { dtype, kv_dtype, name, .. } = compressed.header();
    let header = serde_json::json!({"dtype": dtype.name(), "kv_dtype": kv_dtype.name(), "name": name});
    Ok(header.to_string())
}

/// A text in the making.
#[wasm_bindgen]
pub struct Writing {
    text: Text,
}

#[wasm_bindgen]
impl Writing {
    /// The JSON chunks of the next step, which may be none; `undefined` at the end.
    pub fn next(&mut self) -> Result<Option<Vec<String>>> {
        self.text.step().map_err(refused)
    }
}

thread_local! {
    /// Receives the progress of a long call. Functions of JavaScript stay on their thread; reporters may be called on any.
    static PROGRESS: RefCell<Option<Function>> = const { RefCell::new(None) };
}

/// Tells [`PROGRESS`].
#[derive(Clone, Default)]
struct Hearer {
    done: Arc<AtomicU64>,
    total: u64,
    has_thrown: Arc<AtomicBool>,
}

impl Hearer {
    fn while_working<T>(progress: Option<Function>, work: impl FnOnce(&Self) -> T) -> T {
        PROGRESS.set(progress);
        let done = work(&Self::default());
        PROGRESS.set(None);
        done
    }
}

impl Reporter for Hearer {
    fn start(&self, _: &str, total: u64, _: Unit) -> Box<dyn Progress> {
        Box::new(Self { total, ..self.clone() })
    }

    fn note(&self, _: &str) {}

    fn is_interrupted(&self) -> bool {
        self.has_thrown.load(Ordering::Relaxed)
    }
}

impl Progress for Hearer {
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

/// Seconds since 1970.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a clock after 1970")]
fn now() -> u64 {
    (Date::now() / 1000.0) as u64
}

/// An error with its sentence.
fn told(error: impl ToString) -> JsValue {
    Error::new(&error.to_string()).into()
}

/// The same of a request, with the status that gives its kind and the field that is at fault. Callers here own the model, so they
/// see the internal cause too.
fn refused(error: ApiError) -> JsValue {
    let object = error.cause().map_or_else(|| told(&error), told);
    let param = error.param().map_or(JsValue::UNDEFINED, JsValue::from_str);
    for (key, value) in [("status", error.status().into()), ("param", param)] {
        // An object of our own takes both.
        _ = Reflect::set(&object, &key.into(), &value);
    }
    object
}
