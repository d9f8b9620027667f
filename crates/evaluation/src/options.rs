//! Evaluation options: protocols, data and the item log.

use std::path::{Path, PathBuf};

use candle_gpt2_confined::WorkerProgram;
use candle_gpt2_engine::{HubOptions, WeightDType};
use serde::Deserialize;

use crate::asked::{Kind, RequestedProtocol};
use crate::{EvaluationError, protocols};

/// Options for evaluating a model that is opened separately.
///
/// In JSON, the options are an object whose keys are the field names, all of them optional. The object has
/// no `protocols` or `base`, because callers pass these as arguments.
///
/// ```
/// use candle_gpt2_evaluation::EvaluationOptions;
///
/// let options = EvaluationOptions {
///     data: vec!["hellaswag_val.jsonl".into()],
///     limit: Some(100),
///     items: Some("items.jsonl".into()),
///     ..EvaluationOptions::new(["hellaswag:lm-eval", "hellaswag:llama.cpp"])
/// };
/// assert!(!options.check()?.compares(), "only `kl` needs a second model");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct EvaluationOptions {
    /// Protocols (see --list) or lm-evaluation-harness task files (YAML); several share one loaded model
    #[serde(skip)]
    #[cfg_attr(
        feature = "clap",
        arg(value_name = "PROTOCOL", required_unless_present = "list", conflicts_with = "list")
    )]
    pub protocols: Vec<String>,
    /// The data: a file, a folder of files, or owner/name@revision/path for a dataset on the Hub; once
    /// for all protocols, or once for each, in order [default: the published data, from the Hub]
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub data: Vec<PathBuf>,
    /// Number of few-shot examples, sampled and formatted as in lm-evaluation-harness [default: 0, or as
    /// the task file sets it]
    #[cfg_attr(feature = "clap", arg(long, value_name = "K", allow_negative_numbers = true))]
    pub num_fewshot: Option<usize>,
    /// Data to sample the few-shot examples from: a training split, named like --data [default: the data
    /// itself, minus the question]
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub fewshot_data: Vec<PathBuf>,
    /// Seed for sampling the few-shot examples, as for Python's random.seed [default: 1234]
    #[cfg_attr(feature = "clap", arg(long, value_name = "SEED", allow_negative_numbers = true))]
    pub fewshot_seed: Option<u64>,
    /// Only the first N items
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", allow_negative_numbers = true))]
    pub limit: Option<usize>,
    /// Window length in tokens, for wikitext:llama.cpp and kl [default: 512, or the context if that is
    /// shorter]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", allow_negative_numbers = true))]
    pub context: Option<usize>,
    /// Write the model's answer to each item to this file as soon as it is known, one JSON object per line;
    /// a killed run loses only the work in progress, about a thousand tokens or one item
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub items: Option<PathBuf>,
    /// Resume an interrupted run from its --items file
    #[cfg_attr(feature = "clap", arg(long))]
    pub resume: bool,
    /// Compare item by item with the --items file from another run on the same data: which answers
    /// flipped, and the paired difference
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub against: Option<PathBuf>,
    /// For kl: the model to compare with, named like --model [default: the same model]
    #[serde(skip)]
    #[cfg_attr(feature = "clap", arg(long, value_name = "MODEL"))]
    pub base: Option<PathBuf>,
    /// For kl: precision of the base model's weights, as for --dtype [default: f32]
    #[serde(skip)]
    #[cfg_attr(feature = "clap", arg(long, value_name = "TYPE"))]
    pub base_dtype: Option<WeightDType>,
    /// Options for downloading data from the Hub.
    #[serde(skip)]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub hub: HubOptions,
    /// Program that renders the templates of task files in child processes with limits.
    ///
    /// Without it, templates run on threads of this process, and a hostile template can crash the
    /// process.
    #[serde(skip)]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub worker: Option<WorkerProgram>,
}

impl EvaluationOptions {
    /// Creates options that evaluate these protocols on all of their published data.
    ///
    /// Set `hub` to download the data, or `data` to replace it.
    pub fn new<S: Into<String>>(protocols: impl IntoIterator<Item = S>) -> Self {
        Self { protocols: protocols.into_iter().map(Into::into).collect(), ..Self::default() }
    }

    pub(crate) fn check_protocols(&self, asked: &[RequestedProtocol]) -> Result<(), EvaluationError> {
        let names = &self.protocols;
        if names.is_empty() {
            return usage_error("specify at least one protocol".to_owned());
        }
        if let Some((_, name)) = names.iter().enumerate().find(|(index, name)| names[..*index].contains(name))
        {
            return usage_error(format!("`{name}`: requested twice"));
        }
        if self.context.is_some() && !asked.iter().any(RequestedProtocol::takes_context) {
            let what = "`context` applies only to wikitext:llama.cpp and kl";
            return usage_error(what.into());
        }
        if self.against.is_some() && asked.iter().any(RequestedProtocol::compares) {
            let what =
                "`against` compares items and cannot be used with kl, which already compares two models";
            return usage_error(what.into());
        }
        Ok(())
    }

    pub(crate) fn check_base(&self, asked: &[RequestedProtocol]) -> Result<(), EvaluationError> {
        let given = [("base", self.base.is_some()), ("base_dtype", self.base_dtype.is_some())];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) if !asked.iter().any(RequestedProtocol::compares) => {
                usage_error(format!("`{option}` applies only to kl, which compares two models"))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn check_examples(&self, asked: &[RequestedProtocol]) -> Result<(), EvaluationError> {
        let wants = self.num_fewshot.is_some_and(|count| count > 0);
        let without = asked.iter().position(|asked| asked.protocol.few_shot.is_none());
        if wants && let Some(index) = without {
            let with = protocols().iter().filter(|protocol| protocol.few_shot.is_some());
            let with = with.map(|protocol| protocol.name).collect::<Vec<_>>().join(", ");
            return usage_error(format!(
                "`num_fewshot`: {} does not support examples; {with} and YAML task files do",
                self.protocols[index]
            ));
        }
        let is_file = |asked: &RequestedProtocol| matches!(asked.kind, Kind::Task(_));
        if !wants && !self.fewshot_data.is_empty() && !asked.iter().any(is_file) {
            return usage_error(
                "`fewshot_data` needs `num_fewshot`, the number of examples to sample".into(),
            );
        }
        Ok(())
    }

    /// Returns the source of few-shot examples for the protocol at `index`.
    pub(crate) fn fewshot_data_of(&self, index: usize) -> Option<&Path> {
        self.fewshot_data.get(index).or(self.fewshot_data.first()).map(PathBuf::as_path)
    }

    /// Returns the data for the protocol at `index`.
    pub(crate) fn data_of(&self, index: usize) -> Option<&Path> {
        self.data.get(index).or(self.data.first()).map(PathBuf::as_path)
    }
}

/// Returns a usage error.
pub(crate) fn usage_error<T>(what: String) -> Result<T, EvaluationError> {
    Err(EvaluationError::Call { what })
}
