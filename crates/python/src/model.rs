//! A model that Python holds: opened by its name, with its tokens and its configuration. What it does is in the other files.

use std::collections::HashMap;
use std::path::{self, Path, PathBuf};
use std::sync::{Arc, OnceLock};

use candle_core::Tensor;
use candle_gpt2::Gpt2Config;
use candle_gpt2_api::ServedModel;
use candle_gpt2_engine::{
    ADAPTER_BASE, AdapterChoice, BUILT_IN, DeviceChoice, EncoderStates, EngineError, HubOptions, LoadedModel,
    ModelOptions, Network, Reporter, device_name,
};
use candle_gpt2_grammar::Compiler;
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};
use secrecy::SecretString;

use crate::errors::{Result, wrong_value};
use crate::process::{computing, start, thread_count};
use crate::reporting::reporting;
use crate::values::{Text, Values, dict_of, python_of, tensor};

/// A GPT-2 in memory: adds no BOS token to texts by default, and `generate` returns the continuation without the prompt.
///
/// A HookedTransformer, whose `native` is a Model, does the opposite; `prepend_bos` is a keyword of both. Threads may share a Model; a
/// pickle holds its name, by which another process opens it again.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct Model {
    pub(crate) loaded: Arc<LoadedModel>,
    pub(crate) opened: Opened,
    compiler: OnceLock<Compiler>,
    /// Made for the first completion.
    pub(crate) served: OnceLock<Arc<ServedModel>>,
}

/// What a model was opened with: what a pickle of it holds. Paths of what is on this machine are absolute, and so stay right in
/// other working directories.
#[derive(Debug, Clone)]
pub(crate) struct Opened {
    /// As it was given.
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

/// LoRA adapters: a path or `DIR=WEIGHT`, a pair of a path and a weight, or a list of them.
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
        adapters.push(AdapterChoice { path: lasting(adapter.path)?, ..adapter });
        Ok(())
    }

    pub(crate) fn into_list(this: Option<Self>) -> Result<Vec<AdapterChoice>> {
        let mut adapters = Vec::new();
        this.map_or(Ok(()), |this| this.append_to(&mut adapters))?;
        Ok(adapters)
    }
}

/// How models on the Hub are reached.
#[derive(Debug, Clone)]
pub(crate) struct HubAccess {
    /// Whether only the cache is used.
    offline: bool,
    /// Folder of the cache; by default the one that the environment names.
    cache_dir: Option<PathBuf>,
    /// The given token or that of the environment. No pickle has it.
    token: Option<SecretString>,
}

/// A token for the Hub, as transformers takes it: a text, True for the environment's, or False for none.
#[derive(FromPyObject)]
pub(crate) enum HubToken {
    #[pyo3(annotation = "bool")]
    FromEnvironment(bool),
    #[pyo3(annotation = "str")]
    Given(String),
}

impl HubAccess {
    pub(crate) fn new(offline: bool, cache_dir: Option<PathBuf>, token: Option<HubToken>) -> Result<Self> {
        let cache_dir = cache_dir.map(path::absolute).transpose().map_err(PyErr::from)?;
        let token = match token {
            None | Some(HubToken::FromEnvironment(true)) => hub(offline).token,
            Some(HubToken::FromEnvironment(false)) => None,
            Some(HubToken::Given(token)) => Some(SecretString::from(token)),
        };
        Ok(Self { offline, cache_dir, token })
    }

    fn options(&self) -> HubOptions {
        let environment = hub(self.offline);
        let cache = self.cache_dir.clone().unwrap_or(environment.cache);
        HubOptions { cache, token: self.token.clone(), ..environment }
    }
}

/// Encoder hidden states as Python gives them.
#[derive(Debug, Clone)]
enum States {
    File(PathBuf),
    Array(Tensor),
}

impl States {
    /// A path, or an array of numbers.
    fn read(value: &Bound<'_, PyAny>) -> Result<Self> {
        if let Ok(path) = value.extract::<PathBuf>() {
            return Ok(Self::File(lasting(path)?));
        }
        Ok(Self::Array(tensor(value)?))
    }

    /// The same if they fit a model.
    fn of(&self, config: &Gpt2Config) -> std::result::Result<EncoderStates, EngineError> {
        match self {
            Self::File(path) => EncoderStates::read(path, config),
            Self::Array(array) => EncoderStates::new(array.clone(), config),
        }
    }

    /// As they were given: for a pickle.
    fn into_python(self, py: Python<'_>) -> Result<Bound<'_, PyAny>> {
        Ok(match self {
            Self::File(path) => path.into_pyobject(py)?.into_any(),
            Self::Array(array) => Values::of(&array)?.into_array(py)?.into_any(),
        })
    }
}

impl Opened {
    /// What a classifier is opened with.
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
            name_or_path: name_or_path.map(lasting).transpose()?,
            dtype: type_named(dtype)?,
            kv_dtype: None,
            device,
            tokenizer: tokenizer.map(lasting).transpose()?,
            revision,
            hub,
            assistant_model: None,
            encoder_states: None,
            adapters: Adapters::into_list(adapter)?,
        })
    }

    /// The same with the base model that an adapter names, if no model is named.
    pub(crate) fn with_base_model(self, listener: &dyn Reporter) -> Result<Self> {
        let options = self.options()?.with_base_model(listener)?;
        if self.name_or_path.is_some() || self.adapters.is_empty() {
            return Ok(self);
        }
        Ok(Self { name: Some(options.model.clone()), name_or_path: Some(lasting(options.model)?), ..self })
    }

    /// The adapters with their weights: for a pickle.
    fn adapter_pairs(&self) -> Vec<(PathBuf, f64)> {
        self.adapters.iter().map(|adapter| (adapter.path.clone(), adapter.weight)).collect()
    }

    /// The arguments that open the same classifier again.
    pub(crate) fn classifier_arguments<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let adapters = self.adapter_pairs();
        let Self { name_or_path, dtype, device, tokenizer, revision, hub, .. } = self.clone();
        let HubAccess { offline, cache_dir, .. } = hub;
        let of_hub = (offline, cache_dir, py.None(), false);
        let (offline, cache_dir, token, local) = of_hub;
        (name_or_path, dtype, device, tokenizer, revision, offline, cache_dir, token, local, adapters)
            .into_pyobject(py)
    }

    /// The same for the library.
    pub(crate) fn options(&self) -> Result<ModelOptions> {
        let unnamed = if self.adapters.is_empty() { BUILT_IN } else { ADAPTER_BASE };
        let mut model = self.name_or_path.clone().unwrap_or_else(|| unnamed.into());
        if let Some(revision) = &self.revision {
            if self.name_or_path.is_none() || model.exists() {
                return Err(wrong_value("revision is of models on the Hub; a local model has none"));
            }
            model.as_mut_os_string().push(format!("@{revision}"));
        }
        let device = self.device.as_deref().map(str::parse::<DeviceChoice>).transpose();
        let dtype = self.dtype.as_deref().map(short_name).map(str::parse).transpose();
        let kv_dtype = self.kv_dtype.as_deref().map(short_name).map(str::parse).transpose();
        Ok(ModelOptions {
            model,
            adapter: self.adapters.clone(),
            assistant_model: self.assistant_model.clone(),
            tokenizer: self.tokenizer.clone(),
            device: device.map_err(|error| wrong_value(format!("device: {error}")))?.unwrap_or_default(),
            dtype: dtype.map_err(|error: candle_gpt2_weights::UnknownWeightDType| {
                wrong_value(format!("dtype: {error}"))
            })?,
            kv_dtype: kv_dtype.map_err(|error: candle_gpt2_kernels::UnknownKvDType| {
                wrong_value(format!("kv_dtype: {error}"))
            })?,
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

/// The absolute path of what is on this machine; the name of anything else.
fn lasting(name_or_path: PathBuf) -> Result<PathBuf> {
    let is_local = name_or_path != Path::new(BUILT_IN) && name_or_path.exists();
    Ok(if is_local { path::absolute(name_or_path).map_err(PyErr::from)? } else { name_or_path })
}

/// The name of a type, which may be an object of torch's or numpy's; none for the one that is there.
fn type_named(value: Option<&Bound<'_, PyAny>>) -> Result<Option<String>> {
    let Some(value) = value else { return Ok(None) };
    let named = match value.getattr_opt("__name__")? {
        Some(name) => Some(name),
        None => value.getattr_opt("name")?,
    };
    let name = named.unwrap_or_else(|| value.clone()).str()?.to_string();
    Ok(Some(name).filter(|name| name != "auto"))
}

/// Where models on the Hub come from.
pub(crate) fn hub(offline: bool) -> HubOptions {
    let mut hub = HubOptions::from_environment();
    if offline {
        hub.network = Network::Offline;
    }
    hub
}

/// Our name of a type, which torch and transformers write out.
pub(crate) fn short_name(name: &str) -> &str {
    match name.strip_prefix("torch.").unwrap_or(name) {
        "float32" => "f32",
        "float16" | "half" => "f16",
        "bfloat16" => "bf16",
        name => name,
    }
}

impl Model {
    /// Compiles grammars; made for the first of them.
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
    /// Opens a model: a checkpoint folder or weights file (safetensors, PyTorch, TensorFlow, GGUF, llm.c), a model on the
    /// Hugging Face Hub (`gpt2`, `owner/name`), or, without a name, the small one inside the package.
    ///
    /// dtype: precision of the weights in memory, f32, f16, q8, q6, q5, q4, on GPUs bf16, or a type of torch's or numpy's; by default (or
    /// "auto") as they are stored.
    /// kv_dtype: precision of cached keys and values, f32, f16 or q8. device: auto, cpu, cuda, cuda:N or metal.
    /// tokenizer: a tokenizer.json, spiece.model or vocab.txt, or a folder with one. offline, or local_files_only: use only the Hub's cache. cache_dir: its folder.
    /// token: for models on the Hub that are not public; False leaves out the environment's. A pickle does not hold it.
    /// assistant_model: a smaller model with the same vocabulary that drafts tokens; the texts stay the same.
    /// encoder_states: what a model with cross-attention attends to, see with_encoder_states.
    /// adapter: a LoRA adapter in PEFT's format, its folder or its name on the Hub, as it was trained; (folder, weight) scales it, and a
    /// list applies several. Without a name, the model is the base model that the first adapter names.
    #[classmethod]
    #[pyo3(signature = (
        name_or_path = None, dtype = None, kv_dtype = None, device = None, tokenizer = None, revision = None,
        offline = false, assistant_model = None, encoder_states = None, cache_dir = None, token = None, local_files_only = false,
        adapter = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
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
        let opened = Opened {
            name: name_or_path.clone(),
            name_or_path: name_or_path.map(lasting).transpose()?,
            dtype: type_named(dtype)?,
            kv_dtype: type_named(kv_dtype)?,
            device,
            tokenizer: tokenizer.map(lasting).transpose()?,
            revision,
            hub: HubAccess::new(offline || local_files_only, cache_dir, token)?,
            assistant_model: assistant_model.map(lasting).transpose()?,
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

    /// The same model with the same weights in memory, whose cross-attention attends to these encoder hidden states in all that it computes:
    /// an array (1, S, width), or a safetensors file with the tensor encoder_hidden_states of that shape. A model without them
    /// leaves its cross-attention out.
    fn with_encoder_states(&self, py: Python<'_>, states: &Bound<'_, PyAny>) -> Result<Self> {
        let states = States::read(states)?;
        let loaded = computing(py, &self.loaded, || {
            let fitting = states.of(self.loaded.config())?;
            (*self.loaded).clone().with_encoder_states(&fitting)
        })?;
        let opened = Opened { encoder_states: Some(states), ..self.opened.clone() };
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
        let Opened {
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
        // No pickle holds the token; `local_files_only` is in `offline`.
        let others = (cache_dir, py.None(), false, adapters);
        let (arguments, others) = (arguments.into_pyobject(py)?, others.into_pyobject(py)?);
        let arguments = PyTuple::new(py, arguments.iter().chain(others.iter()).collect::<Vec<_>>())?;
        Ok((slf.get_type().getattr("from_pretrained")?, arguments))
    }

    /// The name that it was opened by.
    #[getter]
    fn name(&self) -> String {
        self.opened.name()
    }

    /// The precision of the weights.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.loaded.weight_type()
    }

    /// The device that it runs on.
    #[getter]
    fn device(&self) -> String {
        device_name(self.loaded.device())
    }

    /// The configuration, with the keys of a config.json.
    #[getter]
    fn config<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        python_of(py, &self.loaded.config().to_json())
    }

    /// How it generates by default, with the keys of a generation_config.json.
    #[getter]
    fn generation_config<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        dict_of(py, self.loaded.defaults()?.config())
    }

    /// The tokens of a text.
    fn encode(&self, py: Python<'_>, text: &str) -> Result<Vec<u32>> {
        Ok(py.detach(|| self.loaded.vocabulary().encode(text))?)
    }

    /// The text of tokens.
    #[pyo3(signature = (ids, skip_special_tokens = true))]
    fn decode(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, skip_special_tokens: bool) -> Result<String> {
        let ids = Text::read(ids)?;
        py.detach(|| ids.decoded(self.loaded.vocabulary(), skip_special_tokens))
    }

    /// The ids of all tokens by what the tokenizer calls them: in GPT-2's, each byte is a character, and a space is `Ġ`.
    fn vocab(&self) -> Result<HashMap<String, u32>> {
        Ok(self.loaded.vocabulary().required_tokenizer()?.get_vocab(true))
    }

    /// The text of each token, as TransformerLens shows it: a part of a character as U+FFFD.
    fn str_tokens(&self, py: Python<'_>, text: &Bound<'_, PyAny>) -> Result<Vec<String>> {
        let text = Text::read(text)?;
        py.detach(|| {
            let vocabulary = self.loaded.vocabulary();
            let token = |id: &u32| String::from_utf8_lossy(&vocabulary.token_bytes(*id)).into_owned();
            Ok(text.encoded(vocabulary)?.iter().map(token).collect())
        })
    }
}
