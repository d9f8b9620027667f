//! Keywords of a generation: those of transformers, which are the fields of [`GenerationConfig`], and a few of the program's.
//!
//! What is not said is the model's default. A keyword that chooses how tokens are chosen takes the place of what the files say
//! about that, by the rules of `gpt2 generate`, so that the same options give the same text.

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

use crate::errors::{Result, warn, wrong_type, wrong_value};
use crate::hooks::called;
use crate::keywords::take_bos;
pub(crate) use crate::keywords::unknown_keyword;
use crate::raised::Raised;
use crate::values::{Values, id_or_ids, is_mapping, json_of};

/// Keywords beside the fields of the configuration.
const OWN: [&str; 11] = [
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

/// How to generate.
pub(crate) struct Asked {
    pub(crate) config: Arc<GenerationConfig>,
    pub(crate) processors: Vec<LogitsProcessor>,
    /// One for each prompt, if they are not all the configuration's.
    pub(crate) seeds: Option<Vec<u64>>,
    /// BOS token in front of prompts that are texts.
    pub(crate) bos: Option<u32>,
}

impl Asked {
    /// Reads keywords. Notes on them become warnings; `compiler` is called if they have a grammar, and `others` are the method's
    /// own.
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
        let mut given = Given::read(options, others)?;
        let seeds = given.seeds()?;
        let grammar = given.grammar()?;
        let functions = std::mem::take(&mut given.functions);
        let options = given.options(loaded.assistant().is_some())?;
        let config = defaults.changed_by(&options)?;
        let notes = options.notes().into_iter().chain(defaults.notes(&config));
        notes.into_iter().try_for_each(|note| warn(py, &note))?;
        let mut processors = Vec::new();
        if let Some((name, grammar)) = grammar {
            processors.push(conforming(py, compiler, name, &grammar, &config)?);
        }
        // Each that is added goes before those that were, and the grammar has the last word.
        processors.extend(functions.into_iter().rev().map(|function| of_function(function, raised.clone())));
        Ok(Self { config: Arc::new(config), processors, seeds, bos })
    }

    /// The configuration of a prompt.
    pub(crate) fn config_of(&self, prompt: usize) -> Arc<GenerationConfig> {
        match self.seeds.as_ref().and_then(|seeds| seeds.get(prompt)) {
            Some(seed) => Arc::new(GenerationConfig { seed: *seed, ..(*self.config).clone() }),
            None => Arc::clone(&self.config),
        }
    }

    /// Checks that there are as many seeds as prompts.
    pub(crate) fn check_seeds(&self, prompts: usize) -> Result<()> {
        match &self.seeds {
            Some(seeds) if seeds.len() != prompts => Err(wrong_value(format!(
                "seed: expected one for each of the {prompts} prompts, or one for all, found {}",
                seeds.len()
            ))),
            _ => Ok(()),
        }
    }
}

/// Whether completions are sampled under these keywords, of which those of a grammar and of processors are not read.
pub(crate) fn samples(
    loaded: &LoadedModel,
    options: Option<&Bound<'_, PyDict>>,
    others: &[&str],
) -> Result<bool> {
    let own = options.map(PyDictMethods::copy).transpose()?;
    take_bos(own.as_ref())?;
    for other in others {
        own.iter()
            .filter(|own| own.contains(other).unwrap_or(false))
            .try_for_each(|own| own.del_item(other))?;
    }
    let options = Given::read(own.as_ref(), others)?.options(loaded.assistant().is_some())?;
    Ok(loaded.defaults()?.changed_by(&options)?.do_sample)
}

/// The options of generation that are a number: the name, whether it is a whole number, and what it does.
#[pyfunction]
#[pyo3(name = "_number_options")]
pub(crate) fn number_options() -> Vec<(&'static str, bool, &'static str)> {
    let numbers = OPTIONS.iter().filter(|option| matches!(option.kind, "usize" | "u32" | "u64" | "f64"));
    numbers.map(|option| (option.name, option.kind != "f64", option.doc.trim())).collect()
}

/// The keywords that are given, those that are None left out.
struct Given {
    /// Fields of the configuration.
    fields: Map<String, Value>,
    own: Map<String, Value>,
    /// The biases of sequences, which JSON cannot hold.
    sequence_bias: Vec<(Vec<u32>, f64)>,
    logit_bias: Vec<(Vec<u32>, f64)>,
    /// Functions that change logits.
    functions: Vec<Py<PyAny>>,
}

impl Given {
    fn read(options: Option<&Bound<'_, PyDict>>, others: &[&str]) -> Result<Self> {
        let known = || OPTIONS.iter().map(|option| option.name).chain(OWN);
        let mut given = Self {
            fields: Map::new(),
            own: Map::new(),
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
                "sequence_bias" => given.sequence_bias = biases(&value, "sequence_bias").map_err(read)?,
                "logits_processor" => given.functions = functions(&value).map_err(read)?,
                "logit_bias" => given.logit_bias = biases(&value, "logit_bias").map_err(read)?,
                _ => {
                    let json = json_of(&value).map_err(read)?;
                    let fields = if OWN.contains(&key.as_str()) { &mut given.own } else { &mut given.fields };
                    fields.insert(key, json);
                }
            }
        }
        Ok(given)
    }

    fn own(&mut self, option: &str) -> Option<Value> {
        self.own.remove(option)
    }

    /// The options, as the program has them.
    fn options(mut self, has_assistant: bool) -> Result<GenerationOptions> {
        if let Some(stop) = self.own("stop")
            && self.fields.insert("stop_strings".into(), stop).is_some()
        {
            return Err(wrong_value("stop and stop_strings are the same; give one of them"));
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

    /// One seed for each prompt, if it is a list.
    fn seeds(&mut self) -> Result<Option<Vec<u64>>> {
        let Some(Value::Array(seeds)) = self.fields.get("seed") else { return Ok(None) };
        let seeds: Option<Vec<u64>> = seeds.iter().map(Value::as_u64).collect();
        let seeds = seeds.ok_or_else(|| wrong_value("seed: expected numbers from 0 to 2**64 - 1"))?;
        // That there is a seed says that texts are drawn.
        self.fields.insert("seed".into(), Value::from(0));
        Ok(Some(seeds))
    }

    /// Texts of an option: one, or a list.
    fn texts(&mut self, option: &str) -> Result<Option<Vec<String>>> {
        let expected = || wrong_type(format!("{option}: expected a text or a list of texts"));
        let items = match self.own(option) {
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
        let Some(value) = self.own(option) else { return Ok(None) };
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
        let wrong = || wrong_value(format!("{option}: expected a number of tokens, found {value}"));
        count.map(Some).ok_or_else(wrong)
    }

    fn is_on(&mut self, option: &str) -> Result<bool> {
        match self.own(option) {
            None => Ok(false),
            Some(Value::Bool(is_on)) => Ok(is_on),
            Some(value) => Err(wrong_type(format!("{option}: expected True or False, found {value}"))),
        }
    }

    /// What all texts must conform to, and the option that says it.
    fn grammar(&mut self) -> Result<Option<(&'static str, Grammar)>> {
        let mut asked = Vec::new();
        match self.own("json_schema") {
            None => {}
            Some(Value::String(text)) => {
                let schema = serde_json::from_str(&text);
                let schema =
                    schema.map_err(|error| wrong_value(format!("json_schema: not valid JSON: {error}")))?;
                asked.push(("json_schema", Grammar::JsonSchema(schema)));
            }
            Some(schema) => asked.push(("json_schema", Grammar::JsonSchema(schema))),
        }
        if self.is_on("json_object")? {
            asked.push(("json_object", Grammar::JsonObject));
        }
        for (option, of_text) in
            [("regex", Grammar::Regex as fn(String) -> Grammar), ("grammar", Grammar::Lark)]
        {
            match self.own(option) {
                None => {}
                Some(Value::String(text)) => asked.push((option, of_text(text))),
                Some(_) => return Err(wrong_type(format!("{option}: expected a text"))),
            }
        }
        match asked.len() {
            0 | 1 => Ok(asked.pop()),
            _ => Err(wrong_value(
                "json_schema, json_object, regex and grammar cannot be used together; give one of them",
            )),
        }
    }
}

/// A function, or a list of them.
fn functions(value: &Bound<'_, PyAny>) -> Result<Vec<Py<PyAny>>> {
    let functions: PyResult<Vec<Bound<'_, PyAny>>> = match value.is_callable() {
        true => Ok(vec![value.clone()]),
        false => value.extract(),
    };
    match functions {
        Ok(functions) if functions.iter().all(PyAnyMethods::is_callable) => {
            Ok(functions.into_iter().map(Bound::unbind).collect())
        }
        _ => Err(wrong_type(
            "logits_processor: expected a function of token ids and logits, or a list of them",
        )),
    }
}

/// A function of Python's as a change of logits; what it raises is raised where the text is asked for.
fn of_function(function: Py<PyAny>, raised: Raised) -> LogitsProcessor {
    LogitsProcessor::Function(LogitsFunction::new(move |history, logits| {
        let values = Values { numbers: logits.to_vec(), shape: vec![logits.len()] };
        let changed = raised.serving(|| {
            Python::attach(|py| {
                let ids = PyArray1::from_slice(py, history.ids);
                called(py, values, "a logits processor", |array| function.call1(py, (ids, array)))
            })
        });
        match changed {
            Ok(changed) => {
                changed.into_iter().for_each(|changed| logits.copy_from_slice(&changed));
                Ok(())
            }
            Err(error) => {
                raised.keep(error);
                Err(GenerationError::Function { what: "a logits processor raised an exception".into() })
            }
        }
    }))
}

/// Biases as a dict of token ids, or of tuples of them, or as a list of pairs.
fn biases(value: &Bound<'_, PyAny>, option: &str) -> Result<Vec<(Vec<u32>, f64)>> {
    let expected = || {
        wrong_type(format!(
            "{option}: expected a dict of token ids, or of tuples of them, and numbers, such as {{464: -2.5}}"
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

/// The constraint to texts of a grammar.
fn conforming<'m>(
    py: Python<'_>,
    compiler: impl FnOnce() -> Result<&'m Compiler>,
    name: &str,
    grammar: &Grammar,
    config: &GenerationConfig,
) -> Result<LogitsProcessor> {
    let compiler = compiler()?;
    py.detach(|| compiler.compile_for(grammar, config))
        .map_err(|error| wrong_value(format!("{name}: {error}")))
}
