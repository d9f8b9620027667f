//! Python models: opening a model by name, its tokens and its configuration.
//!
//! Other files implement a model's computations.

use std::collections::HashMap;
use std::path::{self, Path, PathBuf};
use std::sync::{Arc, OnceLock};

use candle_core::Tensor;
use candle_gpt2::Gpt2Config;
use candle_gpt2_api::ServedModel;
use candle_gpt2_engine::{
    ADAPTER_BASE, AdapterChoice, BUILT_IN, DeviceChoice, EncoderStates, EngineError, HubOptions, LoadedModel,
    ModelOptions, Network, Reporter, WeightDType, device_name,
};
use candle_gpt2_grammar::Compiler;
use candle_gpt2_kernels::KvDType;
use candle_gpt2_look::Reader;
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};
use secrecy::SecretString;

use crate::errors::{Result, value_error};
use crate::process::{computing, start, thread_count};
use crate::reporting::reporting;
use crate::values::{Text, Values, report_to_dict, tensor, to_python};

/// GPT-2 language model.
///
/// It prepends no BOS token to texts by default, and `generate` returns the completion without the prompt. A
/// HookedTransformer, whose `native` is a Model, does the opposite; both accept `prepend_bos`.
///
/// Threads may share a Model. A pickle stores its name and options, and another process reopens the model
/// from them.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct Model {
    pub(crate) loaded: Arc<LoadedModel>,
    pub(crate) opened: OpenArguments,
    compiler: OnceLock<Compiler>,
    /// Served model, created for the first completion.
    pub(crate) served: OnceLock<Arc<ServedModel>>,
}

/// Arguments that a model was opened with, which the model's pickle stores.
///
/// Paths of local files are absolute, so they remain valid in other working directories.
#[derive(Debug, Clone)]
pub(crate) struct OpenArguments {
    /// Name as the caller passed it.
    name: Option<PathBuf>,
    name_or_path: Option<PathBuf>,
    dtype: Option<String>,
    kv_dtype: Option<String>,
    device: Option<String>,
    tokenizer: Option<PathBuf>,
    revision: Option<String>,
    hub: HubAccess,
    assistant_model: Option<PathBuf>,
    encoder_states: Option<States>,
    adapters: Vec<AdapterChoice>,
}

/// LoRA adapters: a path or `DIR=WEIGHT`, a pair of a path and a weight, or a list of these.
#[derive(FromPyObject)]
pub(crate) enum Adapters {
    #[pyo3(annotation = "str")]
    Text(String),
    #[pyo3(annotation = "PathLike")]
    Path(PathBuf),
    #[pyo3(annotation = "(path, weight)")]
    Weighted((PathBuf, f64)),
    #[pyo3(annotation = "list")]
    Several(Vec<Self>),
}

impl Adapters {
    fn append_to(self, adapters: &mut Vec<AdapterChoice>) -> Result<()> {
        let adapter = match self {
            Self::Text(text) => match text.parse() {
                Ok(adapter) => adapter,
                Err(never) => match never {},
            },
            Self::Path(path) => AdapterChoice::new(path),
            Self::Weighted((path, weight)) => AdapterChoice { path, weight },
            Self::Several(several) => {
                return several.into_iter().try_for_each(|adapter| adapter.append_to(adapters));
            }
        };
        adapters.push(AdapterChoice { path: absolute_if_local(adapter.path)?, ..adapter });
        Ok(())
    }

    pub(crate) fn into_list(this: Option<Self>) -> Result<Vec<AdapterChoice>> {
        let mut adapters = Vec::new();
        this.map_or(Ok(()), |this| this.append_to(&mut adapters))?;
        Ok(adapters)
    }
}

/// Access to models on the Hub.
#[derive(Debug, Clone)]
pub(crate) struct HubAccess {
    /// Whether only the cache is used.
    offline: bool,
    /// Cache folder, determined by the environment if `None`.
    cache_dir: Option<PathBuf>,
    /// Token from the caller or the environment; never pickled.
    token: Option<SecretString>,
}

/// Hub token as in transformers: a string, True for the environment's token, or False for none.
#[derive(FromPyObject)]
pub(crate) enum HubToken {
    #[pyo3(annotation = "bool")]
    FromEnvironment(bool),
    #[pyo3(annotation = "str")]
    Explicit(String),
}

impl HubAccess {
    pub(crate) fn new(offline: bool, cache_dir: Option<PathBuf>, token: Option<HubToken>) -> Result<Self> {
        let cache_dir = cache_dir.map(path::absolute).transpose().map_err(PyErr::from)?;
        let token = match token {
            None | Some(HubToken::FromEnvironment(true)) => hub(offline).token,
            Some(HubToken::FromEnvironment(false)) => None,
            Some(HubToken::Explicit(token)) => Some(SecretString::from(token)),
        };
        Ok(Self { offline, cache_dir, token })
    }

    fn options(&self) -> HubOptions {
        let environment = hub(self.offline);
        let cache = self.cache_dir.clone().unwrap_or(environment.cache);
        HubOptions { cache, token: self.token.clone(), ..environment }
    }
}

/// Encoder hidden states as passed from Python.
#[derive(Debug, Clone)]
enum States {
    File(PathBuf),
    Array(Tensor),
}

impl States {
    /// Reads a path or an array of numbers.
    fn read(value: &Bound<'_, PyAny>) -> Result<Self> {
        if let Ok(path) = value.extract::<PathBuf>() {
            return Ok(Self::File(absolute_if_local(path)?));
        }
        Ok(Self::Array(tensor(value)?))
    }

    /// Loads the states and checks them against a model's configuration.
    fn of(&self, config: &Gpt2Config) -> std::result::Result<EncoderStates, EngineError> {
        match self {
            Self::File(path) => EncoderStates::read(path, config),
            Self::Array(array) => EncoderStates::new(array.clone(), config),
        }
    }

    /// Converts the states back to the original argument, for pickling.
    fn into_python(self, py: Python<'_>) -> Result<Bound<'_, PyAny>> {
        Ok(match self {
            Self::File(path) => path.into_pyobject(py)?.into_any(),
            Self::Array(array) => Values::from_tensor(&array)?.into_array(py)?.into_any(),
        })
    }
}

impl OpenArguments {
    /// Collects the arguments for opening a classifier.
    pub(crate) fn classifier(
        name_or_path: Option<PathBuf>,
        dtype: Option<&Bound<'_, PyAny>>,
        device: Option<String>,
        tokenizer: Option<PathBuf>,
        (revision, hub): (Option<String>, HubAccess),
        adapter: Option<Adapters>,
    ) -> Result<Self> {
        Ok(Self {
            name: name_or_path.clone(),
            name_or_path: name_or_path.map(absolute_if_local).transpose()?,
            dtype: dtype_name(dtype)?,
            kv_dtype: None,
            device,
            tokenizer: tokenizer.map(absolute_if_local).transpose()?,
            revision,
            hub,
            assistant_model: None,
            encoder_states: None,
            adapters: Adapters::into_list(adapter)?,
        })
    }

    /// Fills in the adapter's base model if no model is specified.
    pub(crate) fn with_base_model(self, listener: &dyn Reporter) -> Result<Self> {
        let options = self.options()?.with_base_model(listener)?;
        if self.name_or_path.is_some() || self.adapters.is_empty() {
            return Ok(self);
        }
        Ok(Self {
            name: Some(options.model.clone()),
            name_or_path: Some(absolute_if_local(options.model)?),
            ..self
        })
    }

    /// Returns the adapter paths with their weights, for pickling.
    fn adapter_pairs(&self) -> Vec<(PathBuf, f64)> {
        self.adapters.iter().map(|adapter| (adapter.path.clone(), adapter.weight)).collect()
    }

    /// Returns the arguments that reopen the same classifier.
    pub(crate) fn classifier_arguments<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let adapters = self.adapter_pairs();
        let Self { name_or_path, dtype, device, tokenizer, revision, hub, .. } = self.clone();
        let HubAccess { offline, cache_dir, .. } = hub;
        let (token, local_files_only) = (py.None(), false);
        (
            name_or_path,
            dtype,
            device,
            tokenizer,
            revision,
            offline,
            cache_dir,
            token,
            local_files_only,
            adapters,
        )
            .into_pyobject(py)
    }

    /// Converts the arguments to the library's options.
    pub(crate) fn options(&self) -> Result<ModelOptions> {
        let unnamed = if self.adapters.is_empty() { BUILT_IN } else { ADAPTER_BASE };
        let mut model = self.name_or_path.clone().unwrap_or_else(|| unnamed.into());
        if let Some(revision) = &self.revision {
            if self.name_or_path.is_none() || model.exists() {
                return Err(value_error(
                    "revision applies only to models on the Hub, and this model is local",
                ));
            }
            model.as_mut_os_string().push(format!("@{revision}"));
        }
        let device = self.device.as_deref().map(str::parse::<DeviceChoice>).transpose();
        let dtype = self.dtype.as_deref().map(short_name).map(str::parse::<WeightDType>).transpose();
        let kv_dtype = self.kv_dtype.as_deref().map(short_name).map(str::parse::<KvDType>).transpose();
        Ok(ModelOptions {
            model,
            adapter: self.adapters.clone(),
            assistant_model: self.assistant_model.clone(),
            tokenizer: self.tokenizer.clone(),
            device: device.map_err(|error| value_error(format!("device: {error}")))?.unwrap_or_default(),
            dtype: dtype.map_err(|error| value_error(format!("dtype: {error}")))?,
            kv_dtype: kv_dtype.map_err(|error| value_error(format!("kv_dtype: {error}")))?,
            tf32: false,
            encoder_states: None,
            n_head: None,
            hub: self.hub.options(),
        })
    }

    pub(crate) fn name(&self) -> String {
        let name = self.name.as_ref().map_or(BUILT_IN.to_owned(), |name| name.display().to_string());
        let name = match &self.revision {
            Some(revision) => format!("{name}@{revision}"),
            None => name,
        };
        self.adapters.iter().fold(name, |name, adapter| format!("{name} + {adapter}"))
    }
}

/// Makes the path of a local file absolute, and returns other names unchanged.
fn absolute_if_local(name_or_path: PathBuf) -> Result<PathBuf> {
    let is_local = name_or_path != Path::new(BUILT_IN) && name_or_path.exists();
    Ok(if is_local { path::absolute(name_or_path).map_err(PyErr::from)? } else { name_or_path })
}

/// Returns the name of a dtype, which may be a torch or numpy object.
///
/// Returns `None` for None and "auto", which keep the stored dtype.
fn dtype_name(value: Option<&Bound<'_, PyAny>>) -> Result<Option<String>> {
    let Some(value) = value else { return Ok(None) };
    let named = match value.getattr_opt("__name__")? {
        Some(name) => Some(name),
        None => value.getattr_opt("name")?,
    };
    let name = named.unwrap_or_else(|| value.clone()).str()?.to_string();
    Ok(Some(name).filter(|name| name != "auto"))
}

/// Reads the Hub options from the environment.
pub(crate) fn hub(offline: bool) -> HubOptions {
    let mut hub = HubOptions::from_environment();
    if offline {
        hub.network = Network::Offline;
    }
    hub
}

/// Converts a dtype name from torch or transformers to this project's short name.
pub(crate) fn short_name(name: &str) -> &str {
    match name.strip_prefix("torch.").unwrap_or(name) {
        "float32" => "f32",
        "float16" | "half" => "f16",
        "bfloat16" => "bf16",
        name => name,
    }
}

impl Model {
    /// Returns the BOS token, or `None` without `prepend_bos`.
    pub(crate) fn bos(&self, prepend_bos: bool) -> Result<Option<u32>> {
        Ok(Reader::new(self.loaded.vocabulary(), prepend_bos)?.bos())
    }

    /// Returns the grammar compiler, created for the first grammar.
    pub(crate) fn compiler(&self) -> Result<&Compiler> {
        match self.compiler.get() {
            Some(compiler) => Ok(compiler),
            None => {
                let compiler = Compiler::new(self.loaded.vocabulary())?;
                Ok(self.compiler.get_or_init(|| compiler))
            }
        }
    }
}

#[pymethods]
impl Model {
    /// Opens a model from a folder, a weights file or the Hugging Face Hub.
    ///
    /// name_or_path: a checkpoint folder, a weights file (safetensors, PyTorch, TensorFlow, GGUF, llm.c), or
    /// a model on the Hub (`gpt2`, `owner/name`); by default the built-in model. With an adapter and no name,
    /// the base model that the first adapter names.
    ///
    /// dtype: data type of the weights in memory: f32, f16, q8, q6, q5 or q4, on GPUs also bf16, or a torch
    /// or numpy dtype; by default (or "auto") the stored one. kv_dtype: data type of the KV cache, f32, f16
    /// or q8. device: auto, cpu, cuda, cuda:N or metal. tokenizer: a tokenizer.json, spiece.model or
    /// vocab.txt, or a folder that contains one. revision: a branch, tag or commit on the Hub. offline,
    /// local_files_only: use only the Hub's cache. cache_dir: the cache folder. token: access token for
    /// private models on the Hub; False ignores the environment's token. A pickle never stores the token.
    /// assistant_model: a smaller model with the same vocabulary for speculative decoding, which does not
    /// change the completions. encoder_states: the encoder hidden states of a model with cross-attention, see
    /// with_encoder_states. adapter: a LoRA adapter in PEFT's format, a folder or a name on the Hub; (path,
    /// weight) scales it, and a list applies several.
    #[classmethod]
    #[pyo3(signature = (
        name_or_path = None, dtype = None, kv_dtype = None, device = None, tokenizer = None, revision = None,
        offline = false, assistant_model = None, encoder_states = None, cache_dir = None, token = None, local_files_only = false,
        adapter = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python keyword arguments")]
    fn from_pretrained(
        cls: &Bound<'_, PyType>,
        name_or_path: Option<PathBuf>,
        dtype: Option<&Bound<'_, PyAny>>,
        kv_dtype: Option<&Bound<'_, PyAny>>,
        device: Option<String>,
        tokenizer: Option<PathBuf>,
        revision: Option<String>,
        offline: bool,
        assistant_model: Option<PathBuf>,
        encoder_states: Option<&Bound<'_, PyAny>>,
        cache_dir: Option<PathBuf>,
        token: Option<HubToken>,
        local_files_only: bool,
        adapter: Option<Adapters>,
    ) -> Result<Self> {
        let py = cls.py();
        start()?;
        let opened = OpenArguments {
            name: name_or_path.clone(),
            name_or_path: name_or_path.map(absolute_if_local).transpose()?,
            dtype: dtype_name(dtype)?,
            kv_dtype: dtype_name(kv_dtype)?,
            device,
            tokenizer: tokenizer.map(absolute_if_local).transpose()?,
            revision,
            hub: HubAccess::new(offline || local_files_only, cache_dir, token)?,
            assistant_model: assistant_model.map(absolute_if_local).transpose()?,
            encoder_states: encoder_states.map(States::read).transpose()?,
            adapters: Adapters::into_list(adapter)?,
        };
        let opened = reporting(py, |listener| opened.with_base_model(listener))?;
        let options = opened.options()?;
        let loaded = reporting(py, |listener| {
            let checked = options.open(listener)?;
            let states = opened.encoder_states.as_ref();
            let states = states.map(|states| states.of(checked.config())).transpose()?;
            let loaded = checked.load(listener)?;
            match states {
                Some(states) => loaded.with_encoder_states(&states),
                None => Ok(loaded),
            }
        })?;
        let loaded = Arc::new(loaded);
        Ok(Self { loaded, opened, compiler: OnceLock::new(), served: OnceLock::new() })
    }

    /// Returns a model with the same weights that cross-attends to encoder hidden states.
    ///
    /// states: an array (1, S, width), or a safetensors file with a tensor encoder_hidden_states of that
    /// shape. A model without states skips its cross-attention.
    fn with_encoder_states(&self, py: Python<'_>, states: &Bound<'_, PyAny>) -> Result<Self> {
        let states = States::read(states)?;
        let loaded = computing(py, &self.loaded, || {
            let fitting = states.of(self.loaded.config())?;
            (*self.loaded).clone().with_encoder_states(&fitting)
        })?;
        let opened = OpenArguments { encoder_states: Some(states), ..self.opened.clone() };
        Ok(Self { loaded: Arc::new(loaded), opened, compiler: OnceLock::new(), served: OnceLock::new() })
    }

    fn __repr__(&self) -> String {
        let model = self.loaded.model();
        format!(
            "Model({:?}, {} parameters, {} weights in {:.1} MB on {}, {} threads)",
            self.opened.name(),
            model.parameter_count(),
            self.loaded.weight_type(),
            model.weight_bytes() as f64 / 1e6,
            device_name(self.loaded.device()),
            thread_count()
        )
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> Result<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let (py, opened) = (slf.py(), slf.get().opened.clone());
        let adapters = opened.adapter_pairs();
        let OpenArguments {
            name_or_path,
            dtype,
            kv_dtype,
            device,
            tokenizer,
            revision,
            hub: HubAccess { offline, cache_dir, .. },
            assistant_model,
            encoder_states,
            ..
        } = opened;
        let states = encoder_states.map(|states| states.into_python(slf.py())).transpose()?;
        let arguments =
            (name_or_path, dtype, kv_dtype, device, tokenizer, revision, offline, assistant_model, states);
        // The token is never pickled. `offline` already covers `local_files_only`.
        let others = (cache_dir, py.None(), false, adapters);
        let (arguments, others) = (arguments.into_pyobject(py)?, others.into_pyobject(py)?);
        let arguments = PyTuple::new(py, arguments.iter().chain(others.iter()).collect::<Vec<_>>())?;
        Ok((slf.get_type().getattr("from_pretrained")?, arguments))
    }

    /// Name or path that the model was opened with.
    #[getter]
    fn name(&self) -> String {
        self.opened.name()
    }

    /// Data type of the weights.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.loaded.weight_type()
    }

    /// Device that the model runs on.
    #[getter]
    fn device(&self) -> String {
        device_name(self.loaded.device())
    }

    /// Configuration as a dict with the keys of config.json.
    #[getter]
    fn config<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.loaded.config().to_json())
    }

    /// Default generation settings as a dict with the keys of generation_config.json.
    #[getter]
    fn generation_config<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        report_to_dict(py, self.loaded.defaults()?.config())
    }

    /// Encodes a text into token IDs.
    ///
    /// prepend_bos: prepend a BOS token.
    #[pyo3(signature = (text, prepend_bos = false))]
    fn encode(&self, py: Python<'_>, text: &str, prepend_bos: bool) -> Result<Vec<u32>> {
        let bos = self.bos(prepend_bos)?;
        let ids = py.detach(|| self.loaded.vocabulary().encode(text))?;
        Ok(bos.into_iter().chain(ids).collect())
    }

    /// Decodes token IDs into text.
    #[pyo3(signature = (ids, skip_special_tokens = true))]
    fn decode(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, skip_special_tokens: bool) -> Result<String> {
        let ids = Text::read(ids)?;
        py.detach(|| ids.decoded(self.loaded.vocabulary(), skip_special_tokens))
    }

    /// Returns the vocabulary as a dict from the tokenizer's token strings to IDs.
    ///
    /// In GPT-2's tokenizer each byte is a character, and a space is `Ġ`.
    fn vocab(&self) -> Result<HashMap<String, u32>> {
        Ok(self.loaded.vocabulary().required_tokenizer()?.get_vocab(true))
    }

    /// Returns the text of each token, as TransformerLens shows it.
    ///
    /// Incomplete UTF-8 characters become U+FFFD. prepend_bos: prepend a BOS token to a text.
    #[pyo3(signature = (text, prepend_bos = false))]
    fn str_tokens(&self, py: Python<'_>, text: &Bound<'_, PyAny>, prepend_bos: bool) -> Result<Vec<String>> {
        let (text, bos) = (Text::read(text)?, self.bos(prepend_bos)?);
        py.detach(|| {
            let vocabulary = self.loaded.vocabulary();
            let token = |id: &u32| String::from_utf8_lossy(&vocabulary.token_bytes(*id)).into_owned();
            Ok(text.encoded_after(bos, vocabulary)?.iter().map(token).collect())
        })
    }
}
