//! Generation keywords: the fields of [`GenerationConfig`], as in transformers, and a few more.
//!
//! Omitted keywords keep the model's default. A keyword that sets the decoding method overrides the related
//! settings of the checkpoint's files, by the rules of `gpt2 generate`. The same options therefore give the
//! same text.

use std::sync::Arc;

use candle_gpt2_engine::LoadedModel;
use candle_gpt2_generation::{
    GenerationConfig, GenerationError, GenerationOptions, LogitsFunction, LogitsProcessor, OPTIONS,
};
use candle_gpt2_grammar::{Compiler, Grammar};
use candle_gpt2_look::Reader;
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::{Map, Value};

use crate::errors::{Result, type_error, value_error, warn};
use crate::hooks::call_with_values;
use crate::keywords::take_bos;
pub(crate) use crate::keywords::unknown_keyword;
use crate::raised::Raised;
use crate::values::{Values, id_or_ids, is_mapping, to_json};

/// Keywords that are not fields of the configuration.
const EXTRA: [&str; 11] = [
    "stop",
    "logit_bias",
    "bad_words",
    "keep_last",
    "keep_head",
    "slide",
    "json_schema",
    "json_object",
    "regex",
    "grammar",
    "logits_processor",
];

/// Parsed generation options.
pub(crate) struct ParsedOptions {
    pub(crate) config: Arc<GenerationConfig>,
    pub(crate) processors: Vec<LogitsProcessor>,
    /// One seed per prompt, unless all prompts use the configuration's seed.
    pub(crate) seeds: Option<Vec<u64>>,
    /// BOS token to prepend to prompts that are texts.
    pub(crate) bos: Option<u32>,
}

impl ParsedOptions {
    /// Parses the keywords of a call.
    ///
    /// Notes on the keywords become warnings. `compiler` is called only if a keyword sets a grammar. `others`
    /// are keywords that the method reads itself.
    pub(crate) fn read<'m>(
        py: Python<'_>,
        loaded: &LoadedModel,
        compiler: impl FnOnce() -> Result<&'m Compiler>,
        options: Option<&Bound<'_, PyDict>>,
        others: &[&str],
        raised: &Raised,
    ) -> Result<Self> {
        let defaults = loaded.defaults()?;
        let bos = match take_bos(options)? {
            true => Reader::new(loaded.vocabulary(), true)?.bos(),
            false => None,
        };
        let mut keywords = Keywords::read(options, others)?;
        let seeds = keywords.seeds()?;
        let grammar = keywords.grammar()?;
        let functions = std::mem::take(&mut keywords.functions);
        let options = keywords.options(loaded.assistant().is_some())?;
        let config = defaults.changed_by(&options)?;
        let notes = options.notes().into_iter().chain(defaults.notes(&config));
        notes.into_iter().try_for_each(|note| warn(py, &note))?;
        let mut processors = Vec::new();
        if let Some((name, grammar)) = grammar {
            processors.push(grammar_processor(py, compiler, name, &grammar, &config)?);
        }
        // Each added processor runs before the previous ones, so the grammar runs last.
        processors
            .extend(functions.into_iter().rev().map(|function| function_processor(function, raised.clone())));
        Ok(Self { config: Arc::new(config), processors, seeds, bos })
    }

    /// Returns the configuration for one prompt.
    pub(crate) fn config_for(&self, prompt: usize) -> Arc<GenerationConfig> {
        match self.seeds.as_ref().and_then(|seeds| seeds.get(prompt)) {
            Some(seed) => Arc::new(GenerationConfig { seed: *seed, ..(*self.config).clone() }),
            None => Arc::clone(&self.config),
        }
    }

    /// Checks that there is one seed per prompt.
    pub(crate) fn check_seeds(&self, prompts: usize) -> Result<()> {
        match &self.seeds {
            Some(seeds) if seeds.len() != prompts => Err(value_error(format!(
                "seed: expected one seed, or one for each of the {prompts} prompts, found {}",
                seeds.len()
            ))),
            _ => Ok(()),
        }
    }
}

/// Whether completions are sampled with these keywords, ignoring grammars and processors.
pub(crate) fn samples(
    loaded: &LoadedModel,
    options: Option<&Bound<'_, PyDict>>,
    others: &[&str],
) -> Result<bool> {
    let copy = options.map(PyDictMethods::copy).transpose()?;
    take_bos(copy.as_ref())?;
    for other in others {
        copy.iter()
            .filter(|copy| copy.contains(other).unwrap_or(false))
            .try_for_each(|copy| copy.del_item(other))?;
    }
    let options = Keywords::read(copy.as_ref(), others)?.options(loaded.assistant().is_some())?;
    Ok(loaded.defaults()?.changed_by(&options)?.do_sample)
}

/// Lists the numeric generation options as tuples: name, whether it is an integer, and description.
#[pyfunction]
#[pyo3(name = "_number_options")]
pub(crate) fn number_options() -> Vec<(&'static str, bool, &'static str)> {
    let numbers = OPTIONS.iter().filter(|option| matches!(option.kind, "usize" | "u32" | "u64" | "f64"));
    numbers.map(|option| (option.name, option.kind != "f64", option.doc.trim())).collect()
}

/// Keywords that are not None.
struct Keywords {
    /// Fields of the configuration.
    fields: Map<String, Value>,
    extra: Map<String, Value>,
    /// Biases for token sequences, which JSON cannot represent.
    sequence_bias: Vec<(Vec<u32>, f64)>,
    logit_bias: Vec<(Vec<u32>, f64)>,
    /// Functions that modify logits.
    functions: Vec<Py<PyAny>>,
}

impl Keywords {
    fn read(options: Option<&Bound<'_, PyDict>>, others: &[&str]) -> Result<Self> {
        let known = || OPTIONS.iter().map(|option| option.name).chain(EXTRA);
        let mut keywords = Self {
            fields: Map::new(),
            extra: Map::new(),
            sequence_bias: Vec::new(),
            logit_bias: Vec::new(),
            functions: Vec::new(),
        };
        for (key, value) in options.into_iter().flatten() {
            let key: String = key.extract()?;
            if !known().any(|known| known == key) {
                return Err(unknown_keyword(&key, known().chain(others.iter().copied())));
            }
            if value.is_none() {
                continue;
            }
            let read =
                |error: crate::errors::Failure| error.with_note(value.py(), &format!("in the option {key}"));
            match key.as_str() {
                "sequence_bias" => keywords.sequence_bias = biases(&value, "sequence_bias").map_err(read)?,
                "logits_processor" => keywords.functions = functions(&value).map_err(read)?,
                "logit_bias" => keywords.logit_bias = biases(&value, "logit_bias").map_err(read)?,
                _ => {
                    let json = to_json(&value).map_err(read)?;
                    let fields = if EXTRA.contains(&key.as_str()) {
                        &mut keywords.extra
                    } else {
                        &mut keywords.fields
                    };
                    fields.insert(key, json);
                }
            }
        }
        Ok(keywords)
    }

    fn take_extra(&mut self, option: &str) -> Option<Value> {
        self.extra.remove(option)
    }

    /// Converts the keywords to the library's options.
    fn options(mut self, has_assistant: bool) -> Result<GenerationOptions> {
        if let Some(stop) = self.take_extra("stop")
            && self.fields.insert("stop_strings".into(), stop).is_some()
        {
            return Err(value_error("stop and stop_strings are the same option; pass only one of them"));
        }
        let mut options = GenerationOptions {
            bad_words: self.texts("bad_words")?,
            keep_last: self.count("keep_last")?,
            keep_head: self.count("keep_head")?,
            slide: self.is_on("slide")?,
            has_assistant,
            ..GenerationOptions::default()
        };
        let biases = [self.sequence_bias, self.logit_bias].concat();
        options.sequence_bias = (!biases.is_empty()).then_some(biases);
        for (field, value) in self.fields {
            options.set(&field, value)?;
        }
        Ok(options)
    }

    /// Returns one seed per prompt if `seed` is a list.
    fn seeds(&mut self) -> Result<Option<Vec<u64>>> {
        let Some(Value::Array(seeds)) = self.fields.get("seed") else { return Ok(None) };
        let seeds: Option<Vec<u64>> = seeds.iter().map(Value::as_u64).collect();
        let seeds =
            seeds.ok_or_else(|| value_error("seed: expected a list of whole numbers from 0 to 2**64 - 1"))?;
        // Keep a placeholder, because the presence of a seed turns sampling on.
        self.fields.insert("seed".into(), Value::from(0));
        Ok(Some(seeds))
    }

    /// Reads an option that accepts one text or a list of texts.
    fn texts(&mut self, option: &str) -> Result<Option<Vec<String>>> {
        let expected = || type_error(format!("{option}: expected a string or a list of strings"));
        let items = match self.take_extra(option) {
            None => return Ok(None),
            Some(Value::Array(items)) => items,
            Some(item) => vec![item],
        };
        items
            .into_iter()
            .map(|item| match item {
                Value::String(text) => Ok(text),
                _ => Err(expected()),
            })
            .collect::<Result<_>>()
            .map(Some)
    }

    fn count(&mut self, option: &str) -> Result<Option<usize>> {
        let Some(value) = self.take_extra(option) else { return Ok(None) };
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
        let wrong = || value_error(format!("{option}: expected a number of tokens, found {value}"));
        count.map(Some).ok_or_else(wrong)
    }

    fn is_on(&mut self, option: &str) -> Result<bool> {
        match self.take_extra(option) {
            None => Ok(false),
            Some(Value::Bool(is_on)) => Ok(is_on),
            Some(value) => Err(type_error(format!("{option}: expected True or False, found {value}"))),
        }
    }

    /// Returns the grammar that completions must conform to, and the option that sets it.
    fn grammar(&mut self) -> Result<Option<(&'static str, Grammar)>> {
        let mut grammars = Vec::new();
        match self.take_extra("json_schema") {
            None => {}
            Some(Value::String(text)) => {
                let schema = serde_json::from_str(&text);
                let schema =
                    schema.map_err(|error| value_error(format!("json_schema: not valid JSON: {error}")))?;
                grammars.push(("json_schema", Grammar::JsonSchema(schema)));
            }
            Some(schema) => grammars.push(("json_schema", Grammar::JsonSchema(schema))),
        }
        if self.is_on("json_object")? {
            grammars.push(("json_object", Grammar::JsonObject));
        }
        for (option, from_text) in
            [("regex", Grammar::Regex as fn(String) -> Grammar), ("grammar", Grammar::Lark)]
        {
            match self.take_extra(option) {
                None => {}
                Some(Value::String(text)) => grammars.push((option, from_text(text))),
                Some(_) => return Err(type_error(format!("{option}: expected a string"))),
            }
        }
        match grammars.len() {
            0 | 1 => Ok(grammars.pop()),
            _ => Err(value_error(
                "json_schema, json_object, regex and grammar cannot be used together; pass only one of them",
            )),
        }
    }
}

/// Reads a function or a list of functions.
fn functions(value: &Bound<'_, PyAny>) -> Result<Vec<Py<PyAny>>> {
    let functions: PyResult<Vec<Bound<'_, PyAny>>> = match value.is_callable() {
        true => Ok(vec![value.clone()]),
        false => value.extract(),
    };
    match functions {
        Ok(functions) if functions.iter().all(PyAnyMethods::is_callable) => {
            Ok(functions.into_iter().map(Bound::unbind).collect())
        }
        _ => Err(type_error(
            "logits_processor: expected a function of token ids and logits, or a list of functions",
        )),
    }
}

/// Wraps a Python function as a logits processor.
///
/// If the function raises an exception, the call that requested the completion raises it.
fn function_processor(function: Py<PyAny>, raised: Raised) -> LogitsProcessor {
    LogitsProcessor::Function(LogitsFunction::new(move |history, logits| {
        let values = Values { numbers: logits.to_vec(), shape: vec![logits.len()] };
        let changed = raised.serving(|| {
            Python::attach(|py| {
                let ids = PyArray1::from_slice(py, history.ids);
                call_with_values(py, values, "a logits processor", |array| function.call1(py, (ids, array)))
            })
        });
        match changed {
            Ok(changed) => {
                changed.into_iter().for_each(|changed| logits.copy_from_slice(&changed));
                Ok(())
            }
            Err(error) => {
                raised.store(error);
                Err(GenerationError::Function { what: "a logits processor raised an exception".into() })
            }
        }
    }))
}

/// Reads biases from a dict keyed by token IDs or tuples of them, or from a list of pairs.
fn biases(value: &Bound<'_, PyAny>, option: &str) -> Result<Vec<(Vec<u32>, f64)>> {
    let expected = || {
        type_error(format!(
            "{option}: expected a dict that maps token ids, or tuples of them, to numbers, such as {{464: -2.5}}"
        ))
    };
    let pairs = if is_mapping(value)? { value.call_method0("items")? } else { value.clone() };
    let pair = |item: PyResult<Bound<'_, PyAny>>| {
        let pair: Vec<Bound<'_, PyAny>> = item?.extract().map_err(|_| expected())?;
        let [ids, bias] = &*pair else { return Err(expected()) };
        let ids = id_or_ids(ids).map_err(|_| expected())?;
        Ok((ids, bias.extract().map_err(|_| expected())?))
    };
    pairs.try_iter().map_err(|_| expected())?.map(pair).collect()
}

/// Compiles a grammar into a constraint for completions.
fn grammar_processor<'m>(
    py: Python<'_>,
    compiler: impl FnOnce() -> Result<&'m Compiler>,
    name: &str,
    grammar: &Grammar,
    config: &GenerationConfig,
) -> Result<LogitsProcessor> {
    let compiler = compiler()?;
    py.detach(|| compiler.compile_for(grammar, config))
        .map_err(|error| value_error(format!("{name}: {error}")))
}
