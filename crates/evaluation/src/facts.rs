//! Facts about a model that are known before its weights are read.

use candle_gpt2::KvDType;
use candle_gpt2_engine::{LoadedModel, ModelOptions, Opened, Vocabulary, device_name};

/// Facts about a model for reports, including everything that affects its results.
///
/// The crate documentation has an example with [`Plan::prepare`](crate::Plan::prepare).
#[derive(Debug, Clone)]
pub struct ModelFacts<'a> {
    /// Vocabulary of the model.
    pub(crate) vocabulary: &'a Vocabulary,
    /// Model name as the caller supplied it.
    pub(crate) name: String,
    /// Dtype of the weights.
    pub(crate) weight_type: &'static str,
    /// Readable summary of all settings that must match when a run is resumed.
    pub(crate) run: String,
}

impl<'a> ModelFacts<'a> {
    /// Collects the facts about a model that was opened with these options.
    pub fn of_opened(options: &ModelOptions, opened: &'a Opened) -> Self {
        let device = device_name(opened.device());
        Self::new(options, opened.vocabulary(), opened.weight_type(), device)
    }

    /// Collects the facts about a loaded model that was opened with these options.
    pub fn of_loaded(options: &ModelOptions, loaded: &'a LoadedModel) -> Self {
        let device = device_name(loaded.device());
        Self::new(options, loaded.vocabulary(), loaded.weight_type(), device)
    }

    fn new(
        options: &ModelOptions,
        vocabulary: &'a Vocabulary,
        weight_type: &'static str,
        device: String,
    ) -> Self {
        let name = options.display_name();
        let keys_and_values = options.kv_dtype.map_or("as the weights", KvDType::name);
        let mut parts =
            vec![name.clone(), weight_type.to_owned(), format!("keys and values {keys_and_values}"), device];
        parts.extend(options.tf32.then(|| "tf32".to_owned()));
        parts
            .extend(options.tokenizer.as_ref().map(|tokenizer| format!("tokenizer {}", tokenizer.display())));
        parts.extend(options.n_head.map(|n_head| format!("{n_head} heads")));
        Self { vocabulary, name, weight_type, run: parts.join(", ") }
    }
}
