//! Keywords of a generation: those of transformers, which are the fields of [`GenerationConfig`], and a few of the program's.
//!
//! What is not said is the model's default. A keyword that chooses how tokens are chosen takes the place of what the files say
//! about that, by the rules of `gpt2 generate`, so that the same options give the same text.

use std::sync::Arc;

use gpt2_engine::{LoadedModel, Vocabulary};
use gpt2_generation::{
    GenerationConfig, GenerationError, LogitsFunction, LogitsProcessor, LongPrompt, SearchMode, WhenFull,
};
use gpt2_grammar::{Compiler, Grammar};
use gpt2_weights::encode_piece;
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::{Map, Value};

use crate::errors::{Result, warn, wrong_type, wrong_value};
use crate::hooks::{Raised, called};
use crate::values::{Values, json_of};

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
/// What only a random draw knows.
const OF_DRAWS: [&str; 8] =
    ["temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "seed"];
/// What only beam search knows.
const OF_BEAMS: [&str; 4] = ["num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping"];

/// How to generate.
pub(crate) struct Asked {
    pub(crate) config: Arc<GenerationConfig>,
    pub(crate) processors: Vec<LogitsProcessor>,
    /// One for each prompt, where they are not all the configuration's.
    pub(crate) seeds: Option<Vec<u64>>,
}

impl Asked {
    /// Reads keywords. What is worth knowing of them is warned of; `compiler` is asked for where they have a grammar.
    pub(crate) fn read<'m>(
        py: Python<'_>,
        loaded: &LoadedModel,
        compiler: impl FnOnce() -> Result<&'m Compiler>,
        options: Option<&Bound<'_, PyDict>>,
        raised: &Raised,
    ) -> Result<Self> {
        let (defaults, vocabulary) = (loaded.defaults()?, loaded.vocabulary());
        let mut given = Given::read(options)?;
        let seeds = given.seeds()?;
        let (biases, words) = (given.biases()?, given.texts("bad_words")?);
        let (long_prompt, when_full) = given.long_texts()?;
        let grammar = given.grammar()?;
        if let Some(stop) = given.own("stop") {
            if given.fields.contains_key("stop_strings") {
                return Err(wrong_value("stop and stop_strings are the same; give one of them"));
            }
            given.fields.insert("stop_strings".into(), stop);
        }
        let mut config = given.start(defaults.config().clone())?;
        if loaded.assistant().is_some() && !given.has("prompt_lookup_num_tokens") {
            config.prompt_lookup_num_tokens = None;
        }
        let functions = std::mem::take(&mut given.functions);
        let of_beams = OF_BEAMS.into_iter().find(|option| given.has(option));
        let json = Value::Object(given.fields).to_string();
        config = config.with_json(&json).map_err(|error| wrong_value(error.to_string()))?;
        config.prompt_lookup_num_tokens = config.prompt_lookup_num_tokens.filter(|tokens| *tokens > 0);
        config.sequence_bias.extend(biases);
        ban_words(&mut config, &words, vocabulary)?;
        if let Some(long_prompt) = long_prompt {
            config.long_prompt = long_prompt;
        }
        if let Some(when_full) = when_full {
            config.when_full = when_full;
        }
        if let Some(option) = of_beams
            && config.search_mode() != SearchMode::Beams
        {
            return Err(wrong_value(format!("{option} is of beam search; give num_beams")));
        }
        let config = defaults.complete(config)?;
        defaults.notes(&config).iter().try_for_each(|note| warn(py, note))?;
        let mut processors = Vec::new();
        if let Some((name, grammar)) = grammar {
            processors.push(conforming(py, compiler, name, &grammar, &config)?);
        }
        // Each that is added goes before those that were, and the grammar has the last word.
        processors.extend(functions.into_iter().rev().map(|function| of_function(function, raised.clone())));
        Ok(Self { config: Arc::new(config), processors, seeds })
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
    fn read(options: Option<&Bound<'_, PyDict>>) -> Result<Self> {
        let known = serde_json::to_value(GenerationConfig::default())
            .map_err(|error| wrong_value(error.to_string()))?;
        let known: Vec<&str> =
            known.as_object().into_iter().flat_map(Map::keys).map(String::as_str).chain(OWN).collect();
        let mut given = Self {
            fields: Map::new(),
            own: Map::new(),
            sequence_bias: Vec::new(),
            logit_bias: Vec::new(),
            functions: Vec::new(),
        };
        for (key, value) in options.into_iter().flatten() {
            let key: String = key.extract()?;
            if !known.contains(&key.as_str()) {
                return Err(unknown_keyword(&key, known.iter().copied()));
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
                    let fields = if OWN.contains(&key.as_str()) { &mut given.own } else { &mut given.fields };
                    let json = json_of(&value).map_err(read)?;
                    fields.insert(key, json);
                }
            }
        }
        Ok(given)
    }

    fn has(&self, option: &str) -> bool {
        self.fields.contains_key(option)
    }

    fn own(&mut self, option: &str) -> Option<Value> {
        self.own.remove(option)
    }

    /// Whether a number is given that is another than this.
    fn differs(&self, option: &str, neutral: f64) -> bool {
        self.fields.get(option).is_some_and(|value| value.as_f64() != Some(neutral))
    }

    /// The configuration that the fields are put into: where they say how tokens are chosen, without what it says of that.
    fn start(&self, mut config: GenerationConfig) -> Result<GenerationConfig> {
        let is_contrastive = self.differs("penalty_alpha", 0.0);
        let searches = self.differs("num_beams", 1.0) || is_contrastive;
        // Contrastive search chooses among the top k too.
        let of_draws = |option: &&str| self.has(option) && !(is_contrastive && *option == "top_k");
        let draws = OF_DRAWS.into_iter().find(of_draws);
        let chosen = self.fields.get("do_sample").and_then(Value::as_bool);
        if let (Some(option), true, None) = (draws, searches, chosen) {
            return Err(wrong_value(format!(
                "{option} is for drawing at random and cannot be used with num_beams or penalty_alpha"
            )));
        }
        let is_drawn = chosen.unwrap_or(draws.is_some());
        if draws.is_some() || searches || chosen.is_some() {
            (config.num_beams, config.num_beam_groups, config.diversity_penalty) = (1, 1, 0.0);
            (config.penalty_alpha, config.do_sample) = (0.0, is_drawn);
            if searches {
                config.prompt_lookup_num_tokens = None;
            } else if !is_drawn {
                config.num_return_sequences = 1;
            }
        }
        if self.has("max_new_tokens") {
            config.max_length = None;
        }
        Ok(config)
    }

    /// One seed for each prompt, where it is a list.
    fn seeds(&mut self) -> Result<Option<Vec<u64>>> {
        let Some(Value::Array(seeds)) = self.fields.get("seed") else { return Ok(None) };
        let seeds: Option<Vec<u64>> = seeds.iter().map(Value::as_u64).collect();
        let seeds = seeds.ok_or_else(|| wrong_value("seed: expected numbers from 0 to 2**64 - 1"))?;
        // That there is a seed says that texts are drawn.
        self.fields.insert("seed".into(), Value::from(0));
        Ok(Some(seeds))
    }

    fn biases(&mut self) -> Result<Vec<(Vec<u32>, f64)>> {
        let biases = self.sequence_bias.drain(..).chain(self.logit_bias.drain(..));
        Ok(biases.collect())
    }

    /// Texts of an option: one, or a list.
    fn texts(&mut self, option: &str) -> Result<Vec<String>> {
        let expected = || wrong_type(format!("{option}: expected a text or a list of texts"));
        let items = match self.own(option) {
            None => return Ok(Vec::new()),
            Some(Value::Array(items)) => items,
            Some(item) => vec![item],
        };
        let texts: Vec<String> = items
            .into_iter()
            .map(|item| match item {
                Value::String(text) => Ok(text),
                _ => Err(expected()),
            })
            .collect::<Result<_>>()?;
        match texts.iter().any(String::is_empty) {
            true => Err(wrong_value(format!("{option}: expected a text, found an empty one"))),
            false => Ok(texts),
        }
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

    /// What becomes of a long prompt, and of a full context, where that is said.
    fn long_texts(&mut self) -> Result<(Option<LongPrompt>, Option<WhenFull>)> {
        let (last, head, slide) = (self.count("keep_last")?, self.count("keep_head")?, self.is_on("slide")?);
        if head.is_some() && last.is_none() && !slide {
            return Err(wrong_value("keep_head keeps tokens where others go; give keep_last or slide too"));
        }
        let head = head.unwrap_or(0);
        let long_prompt = last.map(|last| LongPrompt::Keep { head, last });
        Ok((long_prompt, slide.then_some(WhenFull::Slide { head })))
    }

    /// What all texts must conform to, and the option that says it.
    fn grammar(&mut self) -> Result<Option<(&'static str, Grammar)>> {
        let mut asked = Vec::new();
        match self.own("json_schema") {
            None => {}
            Some(Value::String(text)) => {
                let schema = serde_json::from_str(&text);
                let schema = schema.map_err(|error| wrong_value(format!("json_schema: no JSON: {error}")))?;
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

/// A keyword that there is not, with the one that is most like it.
pub(crate) fn unknown_keyword<'a>(key: &str, known: impl Iterator<Item = &'a str>) -> crate::errors::Failure {
    let nearest =
        known.max_by(|a, b| strsim::jaro(key, a).total_cmp(&strsim::jaro(key, b))).unwrap_or_default();
    wrong_type(format!("there is no option `{key}`; the nearest name is `{nearest}`"))
}

/// A function, or a list of them.
fn functions(value: &Bound<'_, PyAny>) -> Result<Vec<Py<PyAny>>> {
    let functions: Vec<Bound<'_, PyAny>> = match value.is_callable() {
        true => vec![value.clone()],
        false => value.extract().unwrap_or_default(),
    };
    if functions.is_empty() || !functions.iter().all(PyAnyMethods::is_callable) {
        return Err(wrong_type(
            "logits_processor: expected a function of token ids and logits, or a list of them",
        ));
    }
    Ok(functions.into_iter().map(Bound::unbind).collect())
}

/// A function of Python's as a change of logits; what it raises is raised where the text is asked for.
fn of_function(function: Py<PyAny>, raised: Raised) -> LogitsProcessor {
    LogitsProcessor::Function(LogitsFunction::new(move |history, logits| {
        let values = Values { numbers: logits.to_vec(), shape: vec![logits.len()] };
        let changed = Python::attach(|py| {
            let ids = PyArray1::from_slice(py, history.ids);
            called(py, values, "a logits processor", |array| function.call1(py, (ids, array)))
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
    let pairs = match value.cast::<PyDict>() {
        Ok(dict) => dict.items().into_any(),
        Err(_) => value.clone(),
    };
    let pair = |item: PyResult<Bound<'_, PyAny>>| {
        let (ids, bias): (Bound<'_, PyAny>, f64) = item?.extract().map_err(|_| expected())?;
        let ids = match ids.extract::<u32>() {
            Ok(id) => vec![id],
            Err(_) => ids.extract().map_err(|_| expected())?,
        };
        Ok((ids, bias))
    };
    pairs.try_iter().map_err(|_| expected())?.map(pair).collect()
}

fn ban_words(config: &mut GenerationConfig, words: &[String], vocabulary: &Vocabulary) -> Result<()> {
    for word in words {
        let tokenizer = vocabulary.required_tokenizer()?;
        config.bad_words_ids.push(encode_piece(tokenizer, word)?);
        // Inside a text a word has a space before it, and is another token then.
        if !word.starts_with(char::is_whitespace) {
            config.bad_words_ids.push(encode_piece(tokenizer, &format!(" {word}"))?);
        }
    }
    Ok(())
}

/// The constraint to texts of a grammar.
fn conforming<'m>(
    py: Python<'_>,
    compiler: impl FnOnce() -> Result<&'m Compiler>,
    name: &str,
    grammar: &Grammar,
    config: &GenerationConfig,
) -> Result<LogitsProcessor> {
    if config.search_mode() != SearchMode::TokenByToken && config.eos_token_id.is_empty() {
        return Err(wrong_value(format!(
            "{name}: beams and contrastive search need a token that ends a text, and this checkpoint names none; give eos_token_id"
        )));
    }
    let compiler = compiler()?;
    py.detach(|| compiler.compile(grammar, &config.eos_token_id))
        .map_err(|error| wrong_value(format!("{name}: {error}")))
}
