//! What a caller asks for: which protocols, on which data, and what becomes of the items.

use std::path::{Path, PathBuf};

use candle_gpt2_engine::{HubOptions, Spelling, WeightDType};

use crate::EvaluationError;
use crate::asked::Asked;

/// What is to be measured, of a model that is opened elsewhere.
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
#[derive(Debug, Clone)]
pub struct EvaluationOptions {
    /// Names of protocols, see [`protocols`](crate::protocols), and [`Kl::NAME`](crate::Kl::NAME); several share one loaded model.
    pub protocols: Vec<String>,
    /// The data: a file, a folder of files, or `owner/name[@revision]/path` of a dataset of the hub; one for all protocols, or one
    /// for each in their order. Without any they are the published data, from the hub.
    pub data: Vec<PathBuf>,
    /// Only the first so many items.
    pub limit: Option<usize>,
    /// Length of the windows in tokens, for protocols that leave it to the caller.
    pub context: Option<usize>,
    /// Where what the model says to each item is written, see [`ItemLog`](crate::ItemLog).
    pub items: Option<PathBuf>,
    /// Whether to go on with the `items` of a run that was interrupted.
    pub resume: bool,
    /// The `items` of another run of the same data, to compare with item by item.
    pub against: Option<PathBuf>,
    /// For `kl`, the model to compare with, named like a model; by default the model itself.
    pub base: Option<PathBuf>,
    /// For `kl`, the type of that model's weights; by default f32.
    pub base_dtype: Option<WeightDType>,
    /// Where data of the hub come from.
    pub hub: HubOptions,
    /// How the caller writes these options.
    pub spelling: Spelling,
}

impl EvaluationOptions {
    /// These protocols, on all of their published data; `hub` is still to say where these are, or `data` which others to take.
    pub fn new<S: Into<String>>(protocols: impl IntoIterator<Item = S>) -> Self {
        Self {
            protocols: protocols.into_iter().map(Into::into).collect(),
            data: Vec::new(),
            limit: None,
            context: None,
            items: None,
            resume: false,
            against: None,
            base: None,
            base_dtype: None,
            hub: HubOptions::default(),
            spelling: Spelling::Keywords,
        }
    }

    pub(crate) fn check_protocols(&self, asked: &[Asked]) -> Result<(), EvaluationError> {
        let names = &self.protocols;
        if names.is_empty() {
            return refuse("there is no protocol; name at least one".to_owned());
        }
        if let Some((_, name)) = names.iter().enumerate().find(|(index, name)| names[..*index].contains(name))
        {
            return refuse(format!("`{name}`: it is asked for twice"));
        }
        if self.context.is_some() && !asked.iter().any(Asked::takes_context) {
            return refuse(format!(
                "{}: it is for `wikitext:llama.cpp` and `kl`; other protocols have their own",
                self.spelling.of("context")
            ));
        }
        if self.against.is_some() && asked.iter().any(Asked::compares) {
            return refuse(format!(
                "{}: it is for items, and `kl` has two models side by side already",
                self.spelling.of("against")
            ));
        }
        Ok(())
    }

    pub(crate) fn check_base(&self, asked: &[Asked]) -> Result<(), EvaluationError> {
        let given = [("base", self.base.is_some()), ("base_dtype", self.base_dtype.is_some())];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) if !asked.iter().any(Asked::compares) => {
                refuse(format!("{} is for two models side by side; ask for `kl`", self.spelling.of(option)))
            }
            _ => Ok(()),
        }
    }

    /// The data of the protocol at this place.
    pub(crate) fn data_of(&self, index: usize) -> Option<&Path> {
        self.data.get(index).or(self.data.first()).map(PathBuf::as_path)
    }
}

/// A call that is wrong.
pub(crate) fn refuse<T>(what: String) -> Result<T, EvaluationError> {
    Err(EvaluationError::Call { what })
}
