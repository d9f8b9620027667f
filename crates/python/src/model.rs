//! A model that Python holds: from its name to texts, scores, logits and what is inside.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::Tensor;
use gpt2::{Gpt2LMHead, LogitsFor, Pass, Site};
use gpt2_api::ServedModel;
use gpt2_engine::{
    BUILT_IN, DeviceChoice, HubOptions, LoadedModel, ModelOptions, Network, Progress, Reporter, Silent, Unit,
    device_name,
};
use gpt2_grammar::Compiler;
use gpt2_interpret::{LensCell, LensOptions, LensValue, Run, logit_lens};
use gpt2_kernels::Matrix;
use gpt2_pictures::{Report, Scale, Token, shown};
use numpy::{IntoPyArray, PyArray1, PyArrayDyn, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple, PyType};

use crate::cache::{Cache, Held};
use crate::errors::{Failure, Result, failed, warn, wrong_value};
use crate::generate::{Shape, generate, told};
use crate::hooks::{Hooks, Raised};
use crate::options::Asked;
use crate::process::{computing, start, thread_count};
use crate::stream::{BatchStream, TextStream};
use crate::values::{Text, Texts, Values, python_of};
use crate::{complete, inside, score};

/// Most attention weights that are shown at once, as the program has it.
const MOST_WEIGHTS: usize = 160_000_000;

/// A GPT-2 in memory, with its tokenizer and its defaults. Threads may share it; processes pickle its name and open it again.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct Model {
    loaded: Arc<LoadedModel>,
    opened: Opened,
    compiler: OnceLock<Compiler>,
    served: OnceLock<ServedModel>,
}

/// What a model was opened with: what a pickle of it holds.
#[derive(Debug, Clone)]
struct Opened {
    name_or_path: Option<PathBuf>,
    dtype: Option<String>,
    kv_dtype: Option<String>,
    device: Option<String>,
    tokenizer: Option<PathBuf>,
    revision: Option<String>,
    offline: bool,
    assistant_model: Option<PathBuf>,
}

impl Opened {
    /// The same for the library.
    fn options(&self) -> Result<ModelOptions> {
        let mut hub = HubOptions::from_environment();
        if self.offline {
            hub.network = Network::Offline;
        }
        let mut model = self.name_or_path.clone().unwrap_or_else(|| BUILT_IN.into());
        if let Some(revision) = &self.revision {
            if self.name_or_path.is_none() || model.exists() {
                return Err(wrong_value("revision is of models of the hub; a local model has none"));
            }
            model.as_mut_os_string().push(format!("@{revision}"));
        }
        let device = self.device.as_deref().map(str::parse::<DeviceChoice>).transpose();
        let dtype = self.dtype.as_deref().map(short_name).map(str::parse).transpose();
        let kv_dtype = self.kv_dtype.as_deref().map(short_name).map(str::parse).transpose();
        Ok(ModelOptions {
            model,
            assistant_model: self.assistant_model.clone(),
            tokenizer: self.tokenizer.clone(),
            device: device.map_err(|error| wrong_value(format!("device: {error}")))?.unwrap_or_default(),
            dtype: dtype
                .map_err(|error: gpt2_weights::UnknownWeightDType| wrong_value(format!("dtype: {error}")))?,
            kv_dtype: kv_dtype
                .map_err(|error: gpt2_kernels::UnknownKvDType| wrong_value(format!("kv_dtype: {error}")))?,
            tf32: false,
            n_head: None,
            hub,
        })
    }

    fn name(&self) -> String {
        let name = self.name_or_path.as_ref().map_or(BUILT_IN.to_owned(), |name| name.display().to_string());
        match &self.revision {
            Some(revision) => format!("{name}@{revision}"),
            None => name,
        }
    }
}

/// Our name of a type, which torch and transformers write out.
fn short_name(name: &str) -> &str {
    match name.strip_prefix("torch.").unwrap_or(name) {
        "float32" => "f32",
        "float16" | "half" => "f16",
        "bfloat16" => "bf16",
        name => name,
    }
}

/// Keeps what is worth knowing until it can be warned of.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Reporter for Notes {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        Silent.start(what, total, unit)
    }

    fn note(&self, note: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(note.to_owned());
    }
}

impl Model {
    /// Compiles grammars; made for the first of them.
    fn compiler(&self) -> Result<&Compiler> {
        match self.compiler.get() {
            Some(compiler) => Ok(compiler),
            None => {
                let compiler = Compiler::new(self.loaded.vocabulary())?;
                Ok(self.compiler.get_or_init(|| compiler))
            }
        }
    }

    fn served(&self) -> Result<&ServedModel> {
        match self.served.get() {
            Some(served) => Ok(served),
            None => {
                let served = complete::served(&self.loaded, &self.opened.name())?;
                Ok(self.served.get_or_init(|| served))
            }
        }
    }

    /// The model with hooks, if there are any.
    fn hooked(&self, hooks: Option<&Bound<'_, PyAny>>, raised: &Raised) -> Result<LoadedModel> {
        let hooks = Hooks::read(hooks, self.loaded.config().n_layer, raised)?;
        let loaded = (*self.loaded).clone();
        Ok(if hooks.is_empty() { loaded } else { loaded.observed_by(Arc::new(Mutex::new(hooks))) })
    }

    /// The tokens of a text that is looked at, after the token in front where that is wanted.
    fn looked_at(&self, text: &Bound<'_, PyAny>, bos: bool) -> Result<Vec<u32>> {
        let ids = Text::read(text)?.into_ids(self.loaded.vocabulary())?;
        if !bos {
            return Ok(ids);
        }
        let missing =
            || wrong_value("bos: this model's configuration names no bos_token_id that its vocabulary has");
        let first = self.loaded.config().start_token().ok_or_else(missing)?;
        Ok([&[first], &ids[..]].concat())
    }

    fn shown(&self, id: u32) -> String {
        shown(&self.loaded.vocabulary().token_bytes(id))
    }

    /// A report without its values.
    fn report(&self, kind: &str, title: String, ids: &[u32], bos: bool) -> Report {
        let token =
            |(index, id): (usize, &u32)| Token::new(index, *id, &self.loaded.vocabulary().token_bytes(*id));
        Report::new(kind, title, self.opened.name(), ids.iter().enumerate().map(token).collect(), bos)
    }

    /// The one token that a text is, or this one.
    fn token(&self, value: &Bound<'_, PyAny>) -> Result<u32> {
        if let Ok(id) = value.extract::<u32>() {
            return match self.loaded.config().has_token(id) {
                true => Ok(id),
                false => Err(wrong_value(format!(
                    "token {id} is outside the vocabulary of {}",
                    self.loaded.config().vocab_size
                ))),
            };
        }
        let text: String = value.extract()?;
        match self.loaded.vocabulary().encode(&text)?[..] {
            [id] => Ok(id),
            ref ids => {
                let tokens: Vec<String> = ids.iter().map(|id| format!("{:?}", self.shown(*id))).collect();
                Err(wrong_value(format!(
                    "{text:?} has {} tokens ({}); give one token, most words with the space before them, or an id",
                    ids.len(),
                    tokens.join(" ")
                )))
            }
        }
    }
}

#[pymethods]
impl Model {
    /// Opens a model: a checkpoint folder or weights file (safetensors, PyTorch, TensorFlow, GGUF, llm.c), a model of the
    /// Hugging Face hub (`gpt2`, `owner/name`), or, without a name, the small one inside the package.
    ///
    /// dtype: precision of the weights in memory, f32, f16, q8, q6, q4, on GPUs bf16; by default as they are stored.
    /// kv_dtype: precision of cached keys and values, f32, f16 or q8. device: auto, cpu, cuda, cuda:N or metal.
    /// tokenizer: a tokenizer.json, or a folder with one. offline: only the hub's cache is used.
    /// assistant_model: a smaller model with the same vocabulary that drafts tokens; the texts stay the same.
    #[classmethod]
    #[pyo3(signature = (
        name_or_path = None, dtype = None, kv_dtype = None, device = None, tokenizer = None, revision = None,
        offline = false, assistant_model = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn from_pretrained(
        cls: &Bound<'_, PyType>,
        name_or_path: Option<PathBuf>,
        dtype: Option<String>,
        kv_dtype: Option<String>,
        device: Option<String>,
        tokenizer: Option<PathBuf>,
        revision: Option<String>,
        offline: bool,
        assistant_model: Option<PathBuf>,
    ) -> Result<Self> {
        let py = cls.py();
        start()?;
        let opened =
            Opened { name_or_path, dtype, kv_dtype, device, tokenizer, revision, offline, assistant_model };
        let (options, notes) = (opened.options()?, Notes::default());
        let loaded = py.detach(|| options.open(&notes)?.load(&notes));
        let notes = notes.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        notes.iter().try_for_each(|note| warn(py, note))?;
        py.check_signals()?;
        let loaded = Arc::new(loaded?);
        Ok(Self { loaded, opened, compiler: OnceLock::new(), served: OnceLock::new() })
    }

    fn __repr__(&self) -> String {
        let model = self.loaded.model();
        format!(
            "Model({:?}, {} parameters, {} weights in {:.1} MB on {}, {} threads)",
            self.opened.name(),
            model.parameter_count(),
            self.loaded.weight_type(),
            weight_bytes(model) as f64 / 1e6,
            device_name(self.loaded.device()),
            thread_count()
        )
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let opened = slf.get().opened.clone();
        let Opened { name_or_path, dtype, kv_dtype, device, tokenizer, revision, offline, assistant_model } =
            opened;
        let arguments =
            (name_or_path, dtype, kv_dtype, device, tokenizer, revision, offline, assistant_model);
        Ok((slf.get_type().getattr("from_pretrained")?, arguments.into_pyobject(slf.py())?))
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

    /// How it generates where nothing else is said, with the keys of a generation_config.json.
    #[getter]
    fn generation_config<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        let json = serde_json::to_value(self.loaded.defaults()?.config());
        Ok(python_of(py, &json.map_err(|error| failed(error.to_string()))?)?)
    }

    /// The tokens of a text.
    fn encode(&self, py: Python<'_>, text: &str) -> Result<Vec<u32>> {
        Ok(py.detach(|| self.loaded.vocabulary().encode(text))?)
    }

    /// The text of tokens.
    #[pyo3(signature = (ids, skip_special_tokens = true))]
    fn decode(&self, ids: &Bound<'_, PyAny>, skip_special_tokens: bool) -> Result<String> {
        let ids = Text::read(ids)?.into_ids(self.loaded.vocabulary())?;
        let tokenizer = self.loaded.vocabulary().required_tokenizer()?;
        tokenizer.decode(&ids, skip_special_tokens).map_err(|error| failed(error.to_string()))
    }

    /// The text of each token, as TransformerLens shows it: a part of a character as U+FFFD.
    fn str_tokens(&self, text: &Bound<'_, PyAny>) -> Result<Vec<String>> {
        let ids = Text::read(text)?.into_ids(self.loaded.vocabulary())?;
        let text =
            |id: &u32| String::from_utf8_lossy(&self.loaded.vocabulary().token_bytes(*id)).into_owned();
        Ok(ids.iter().map(text).collect())
    }

    /// Continues a prompt, or each of a list: a text (str) or token ids. Options are transformers' (max_new_tokens, do_sample,
    /// temperature, top_k, num_beams, repetition_penalty, …) with seed, stop, bad_words, logit_bias, keep_last, keep_head, slide,
    /// json_schema, json_object, regex, grammar and logits_processor; see help(candle_gpt2). The prompt is not repeated.
    ///
    /// batch_size: texts that are made at once. details: dicts with ids, text, stop_reason and score in place of texts.
    /// return_exceptions: what went wrong with a prompt stands in its place. hooks: see run_with_cache.
    #[pyo3(signature = (prompt, *, batch_size = 8, details = false, return_exceptions = false, hooks = None, **options))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn generate<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        batch_size: usize,
        details: bool,
        return_exceptions: bool,
        hooks: Option<&Bound<'py, PyAny>>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> Result<Bound<'py, PyAny>> {
        start()?;
        check_batch_size(batch_size)?;
        let raised = Raised::default();
        let asked = Asked::read(py, &self.loaded, || self.compiler(), options, &raised)?;
        let (is_list, prompts) = Texts::read(prompt)?.into_list();
        asked.check_seeds(prompts.len())?;
        let prompts: Vec<_> = prompts.into_iter().map(|prompt| self.prompt(prompt, &asked)).collect();
        let loaded = self.hooked(hooks, &raised)?;
        let (outcomes, interrupted) = raised.or(generate(py, &loaded, &asked, prompts, batch_size))?;
        let shape = Shape {
            is_list,
            has_several: asked.config.num_return_sequences > 1,
            has_details: details,
            returns_exceptions: return_exceptions,
        };
        told(py, outcomes, interrupted, shape)
    }

    /// Continues a prompt: an iterator of pieces of the text as they come. Options are those of generate.
    #[pyo3(signature = (prompt, *, hooks = None, **options))]
    fn stream(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        hooks: Option<&Bound<'_, PyAny>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> Result<TextStream> {
        start()?;
        let raised = Raised::default();
        let asked = Asked::read(py, &self.loaded, || self.compiler(), options, &raised)?;
        asked.check_seeds(1)?;
        self.loaded.vocabulary().required_tokenizer()?;
        let prompt = self.prompt(Text::read(prompt)?, &asked)?;
        TextStream::new(py, self.hooked(hooks, &raised)?, &asked, prompt, raised)
    }

    /// Continues every prompt of a list: an iterator of pairs, which prompt, from 0, and a piece of its text. Options are those of
    /// generate.
    #[pyo3(signature = (prompts, *, batch_size = 8, hooks = None, **options))]
    fn stream_batch(
        &self,
        py: Python<'_>,
        prompts: &Bound<'_, PyAny>,
        batch_size: usize,
        hooks: Option<&Bound<'_, PyAny>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> Result<BatchStream> {
        start()?;
        check_batch_size(batch_size)?;
        let raised = Raised::default();
        let asked = Asked::read(py, &self.loaded, || self.compiler(), options, &raised)?;
        self.loaded.vocabulary().required_tokenizer()?;
        let (_, prompts) = Texts::read(prompts)?.into_list();
        asked.check_seeds(prompts.len())?;
        let prompt = |(index, prompt)| {
            self.prompt(prompt, &asked)
                .map_err(|error: Failure| error.with_note(py, &format!("prompt {index}")))
        };
        let prompts = prompts.into_iter().enumerate().map(prompt).collect::<Result<_>>()?;
        BatchStream::new(py, self.hooked(hooks, &raised)?, &asked, prompts, batch_size, raised)
    }

    /// Continues a prompt as OpenAI's completions do: options in their words (max_tokens, temperature, n, logprobs, stop, seed, …),
    /// and the answer a dict in their shape.
    #[pyo3(signature = (prompt, **options))]
    fn complete<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> Result<Bound<'py, PyAny>> {
        start()?;
        complete::complete(py, &self.loaded, self.served()?, prompt, options)
    }

    /// How probable a text is: a dict with ids, logprobs (nan for the first token), sum, loss and perplexity, with `top` also the
    /// most probable alternatives of each token; of a list, a list of dicts. stride: distance between the windows of texts longer
    /// than the context, by default half of it.
    #[pyo3(signature = (text, stride = None, top = 0))]
    fn score<'py>(
        &self,
        py: Python<'py>,
        text: &Bound<'py, PyAny>,
        stride: Option<usize>,
        top: usize,
    ) -> Result<Bound<'py, PyAny>> {
        start()?;
        let (is_list, texts) = Texts::read(text)?.into_list();
        let score = |text: Text| {
            let ids = text.into_ids(self.loaded.vocabulary())?;
            score::score(py, &self.loaded, ids, stride, top)
        };
        let scored = texts.into_iter().enumerate().map(|(index, text)| {
            score(text)
                .map_err(|error| if is_list { error.with_note(py, &format!("text {index}")) } else { error })
        });
        let mut scored = scored.collect::<Result<Vec<_>>>()?;
        Ok(match (is_list, scored.len()) {
            (false, 1) => scored.swap_remove(0).into_any(),
            _ => PyList::new(py, scored)?.into_any(),
        })
    }

    /// How probable continuations of a prompt are: for each a dict with text, ids, logprobs, is_greedy and sum, and the sum
    /// per_token (mean is the same), per_character and per_byte, of which a space in front is not counted.
    fn score_continuations<'py>(
        &self,
        py: Python<'py>,
        prompt: &str,
        continuations: Vec<String>,
    ) -> Result<Vec<Bound<'py, PyDict>>> {
        start()?;
        score::score_continuations(py, &self.loaded, prompt, continuations)
    }

    /// Logits of the token after the last one, an array (vocabulary,); with last_only=False after each, (tokens, vocabulary). With
    /// a cache the tokens come after those that it holds, and it then holds them too.
    #[pyo3(signature = (ids, last_only = true, cache = None, hooks = None))]
    fn logits<'py>(
        &self,
        py: Python<'py>,
        ids: &Bound<'py, PyAny>,
        last_only: bool,
        cache: Option<&Bound<'py, Cache>>,
        hooks: Option<&Bound<'py, PyAny>>,
    ) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        start()?;
        let ids = Text::read(ids)?.into_ids(self.loaded.vocabulary())?;
        if let Some(id) = ids.iter().find(|id| !self.loaded.config().has_token(**id)) {
            let vocab_size = self.loaded.config().vocab_size;
            return Err(wrong_value(format!("token {id} is outside the vocabulary of {vocab_size}")));
        }
        let cache = cache.map(Bound::get);
        if cache.is_some_and(|cache| !Arc::ptr_eq(&cache.loaded, &self.loaded)) {
            return Err(wrong_value("the cache is another model's"));
        }
        let raised = Raised::default();
        let hooked = self.hooked(hooks, &raised)?;
        let wanted = if last_only { LogitsFor::LastToken } else { LogitsFor::EveryToken };
        let logits = computing(py, &hooked, || match cache {
            None => forward(hooked.model(), &ids, wanted, None),
            Some(cache) => cache.with(|held| forward(hooked.model(), &ids, wanted, Some(held))),
        });
        let Values { numbers, mut shape } = raised.or(logits)?;
        py.check_signals()?;
        // The batch of one, and the one token.
        shape.drain(..if last_only { 2 } else { 1 });
        Ok(Values { numbers, shape }.into_array(py)?)
    }

    /// A cache for `logits`, with room for this many tokens, by default the whole context.
    #[pyo3(signature = (capacity = None))]
    fn cache(&self, capacity: Option<usize>) -> Result<Cache> {
        let most = self.loaded.config().n_positions;
        match capacity.unwrap_or(most) {
            capacity if capacity <= most => Cache::new(Arc::clone(&self.loaded), capacity),
            capacity => Err(wrong_value(format!(
                "capacity: expected at most the context of {most}, found {capacity}"
            ))),
        }
    }

    /// Reads a text and keeps what is at the places of these names: the logits of every token, an array (1, tokens, vocabulary), and
    /// a dict of arrays. Names are TransformerLens', as `gpt2 cache` has them (`blocks.0.attn.hook_pattern`, `blocks.*.hook_resid_post`,
    /// `resid_post`); all of them where none are given.
    ///
    /// hooks: pairs of a name and a function of an array and its name. What it returns is put there; None changes nothing.
    /// bos: put the token that begins texts in front.
    #[pyo3(signature = (text, names = None, hooks = None, bos = false))]
    fn run_with_cache<'py>(
        &self,
        py: Python<'py>,
        text: &Bound<'py, PyAny>,
        names: Option<&Bound<'py, PyAny>>,
        hooks: Option<&Bound<'py, PyAny>>,
        bos: bool,
    ) -> Result<(Bound<'py, PyArrayDyn<f32>>, Bound<'py, PyDict>)> {
        start()?;
        let n_layer = self.loaded.config().n_layer;
        let ids = self.looked_at(text, bos)?;
        let sites = inside::sites(names, n_layer)?;
        let raised = Raised::default();
        let hooks = Hooks::read(hooks, n_layer, &raised)?;
        let seen = inside::run(py, &self.loaded, &ids, sites, hooks, &raised)?;
        py.check_signals()?;
        let values = PyDict::new(py);
        for (name, value) in seen.values {
            values.set_item(name, value.into_array(py)?)?;
        }
        Ok((seen.logits.into_array(py)?, values))
    }

    /// The names of all places that run_with_cache and hooks know.
    #[getter]
    fn hook_names(&self) -> Vec<String> {
        Site::all(self.loaded.config().n_layer).iter().map(Site::to_string).collect()
    }

    /// What each layer would predict if it were the last: a picture, whose values are of `show` (probability, entropy, divergence,
    /// next, rank, watched-probability; the last two of the first token of `watch`). Its details are arrays: top_ids and
    /// top_logprobs (layers, tokens, top), entropy, divergence and next_logprob (layers, tokens), and with `watch` watched_rank and
    /// watched_logprob (layers, tokens, watched).
    #[pyo3(signature = (text, *, show = "probability", top = 5, watch = None, bos = false))]
    fn logit_lens(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyAny>,
        show: &str,
        top: usize,
        watch: Option<Vec<Bound<'_, PyAny>>>,
        bos: bool,
    ) -> Result<crate::picture::Picture> {
        start()?;
        let (value, scale) = match show {
            "probability" => (LensValue::Probability, Scale::Share),
            "entropy" => (LensValue::Entropy, Scale::Amount),
            "divergence" => (LensValue::Divergence, Scale::Amount),
            "next" => (LensValue::Next, Scale::Signed),
            "rank" => (LensValue::Rank, Scale::Amount),
            "watched-probability" => (LensValue::WatchedProbability, Scale::Share),
            _ => {
                return Err(wrong_value(format!(
                    "show: expected probability, entropy, divergence, next, rank or watched-probability, found {show:?}"
                )));
            }
        };
        let watch =
            watch.unwrap_or_default().iter().map(|token| self.token(token)).collect::<Result<Vec<_>>>()?;
        if watch.is_empty() && matches!(value, LensValue::Rank | LensValue::WatchedProbability) {
            return Err(wrong_value("show: rank and watched-probability are of a token; give watch"));
        }
        let ids = self.looked_at(text, bos)?;
        let options = LensOptions { top: top.max(1), watch };
        let layers = computing(py, &self.loaded, || {
            let run = Run::new(self.loaded.model(), &ids)?;
            Ok::<_, Failure>(logit_lens(&run, &options, &|_, x| Ok(x))?)
        })?;
        py.check_signals()?;
        let cells: Vec<&LensCell> = layers.iter().flat_map(|layer| &layer.cells).collect();
        let most_probable =
            |cell: &&LensCell| cell.top.first().map_or(String::new(), |(id, _)| self.shown(*id));
        let report = self.report("lens", format!("logit lens: {}", value.title()), &ids, bos).with_lens(
            layers.iter().map(|layer| layer.label.clone()).collect(),
            cells.iter().map(|cell| value.of(cell)).collect(),
            cells.iter().map(most_probable).collect(),
            scale,
        );
        let (details, places) = (PyDict::new(py), [layers.len(), ids.len()]);
        let numbers = |of: &dyn Fn(&LensCell) -> f32| {
            let numbers: Vec<f32> = cells.iter().map(|cell| of(cell)).collect();
            PyArray1::from_vec(py, numbers).reshape(places)
        };
        details.set_item("entropy", numbers(&|cell| cell.entropy)?)?;
        details.set_item("divergence", numbers(&|cell| cell.divergence)?)?;
        details.set_item("next_logprob", numbers(&|cell| cell.next.unwrap_or(f32::NAN))?)?;
        let best = || cells.iter().flat_map(|cell| &cell.top);
        let kept = cells.first().map_or(0, |cell| cell.top.len());
        let of_top = [places[0], places[1], kept];
        let best_ids: Vec<u32> = best().map(|(id, _)| *id).collect();
        details.set_item("top_ids", best_ids.into_pyarray(py).reshape(of_top)?)?;
        let best_logprobs: Vec<f32> = best().map(|(_, logprob)| *logprob).collect();
        details.set_item("top_logprobs", best_logprobs.into_pyarray(py).reshape(of_top)?)?;
        if !options.watch.is_empty() {
            let watched = || cells.iter().flat_map(|cell| &cell.watched);
            let of_watched = [places[0], places[1], options.watch.len()];
            let ranks: Vec<u64> = watched().map(|(rank, _)| *rank as u64).collect();
            details.set_item("watched_rank", ranks.into_pyarray(py).reshape(of_watched)?)?;
            let logprobs: Vec<f32> = watched().map(|(_, logprob)| *logprob).collect();
            details.set_item("watched_logprob", logprobs.into_pyarray(py).reshape(of_watched)?)?;
        }
        Ok(crate::picture::Picture::new(report, details))
    }

    /// Where heads attend: a picture of their attention patterns, whose values are (layer, head, query, key), nan after the query.
    /// layers: only these; or heads: pairs of layer and head, or texts such as "9.6".
    #[pyo3(signature = (text, *, layers = None, heads = None, bos = false))]
    fn attention(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyAny>,
        layers: Option<Vec<usize>>,
        heads: Option<&Bound<'_, PyAny>>,
        bos: bool,
    ) -> Result<crate::picture::Picture> {
        start()?;
        let (ids, heads) = (self.looked_at(text, bos)?, inside::heads(&self.loaded, layers, heads)?);
        let weights = heads.len().saturating_mul(ids.len()).saturating_mul(ids.len());
        if weights > MOST_WEIGHTS {
            return Err(wrong_value(format!(
                "{} heads of {} tokens have {weights} weights, more than {MOST_WEIGHTS}; choose layers or heads, or a shorter text",
                heads.len(),
                ids.len()
            )));
        }
        let patterns = inside::patterns(py, &self.loaded, &ids, &heads)?;
        py.check_signals()?;
        let report = self.report("attention", "attention patterns".into(), &ids, bos);
        let report = report.with_patterns(patterns.layers, patterns.heads, patterns.values);
        Ok(crate::picture::Picture::new(report, PyDict::new(py)))
    }
}

impl Model {
    /// The tokens of a prompt as the model gets them.
    fn prompt(&self, prompt: Text, asked: &Asked) -> Result<Vec<u32>> {
        let vocabulary = self.loaded.vocabulary();
        Ok(vocabulary.prompt(prompt.into_ids(vocabulary)?, &asked.config)?)
    }
}

fn check_batch_size(batch_size: usize) -> Result<()> {
    match batch_size {
        0 => Err(wrong_value("batch_size: expected at least 1, found 0")),
        _ => Ok(()),
    }
}

/// The logits of tokens after those that are held, if any.
fn forward(model: &Gpt2LMHead, ids: &[u32], wanted: LogitsFor, held: Option<&mut Held>) -> Result<Values> {
    if ids.is_empty() {
        return Err(wrong_value("there are no tokens; give at least one"));
    }
    let (past, room) = held.as_ref().map_or((0, model.config().n_positions), |held| {
        (held.ids.len(), held.cache.rooms().into_iter().sum())
    });
    if ids.len() > room {
        let tokens = ids.len();
        return Err(wrong_value(format!(
            "{tokens} tokens do not fit after {past}; there is room for {room}"
        )));
    }
    let input = Tensor::from_slice(ids, (1, ids.len()), model.device())?;
    let logits = match held {
        None => model.forward(&input, wanted, None, &mut Pass::inference())?,
        Some(held) => {
            let logits = model.forward(&input, wanted, Some(&mut held.cache), &mut Pass::inference());
            if logits.is_err() {
                // Some layers may have read what others have not.
                held.cache.truncate(0, past)?;
            }
            let logits = logits?;
            held.ids.extend(ids);
            logits
        }
    };
    Ok(Values::of(&logits)?)
}

/// Bytes of the weights in memory.
fn weight_bytes(model: &Gpt2LMHead) -> usize {
    fn of(matrix: &Matrix) -> usize {
        match matrix {
            Matrix::Dense(weight) => weight.elem_count() * weight.dtype().size_in_bytes(),
            Matrix::Packed(weight) => weight.bytes(),
            Matrix::Adapted(_) => 0,
        }
    }
    // The embedding, the MLP's two matrices, and those of attention are held alike.
    let config = model.config();
    let head = of(model.lm_head().weight());
    let heads = if config.tie_word_embeddings { 1 } else { 2 };
    let of_block = |block: &gpt2::Block| {
        let out = of(block.attn().out_proj().weight());
        4 * out + 2 * of(block.mlp().contract().weight())
    };
    let vectors = 4 * (config.n_positions * config.n_embd + 13 * config.n_embd * config.n_layer);
    heads * head + model.transformer().blocks().iter().map(of_block).sum::<usize>() + vectors
}
