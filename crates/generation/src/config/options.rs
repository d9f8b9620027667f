//! Merging of request options into a checkpoint's options, and conflicts between request options.
//!
//! Error messages put option names in backquotes. A front end with different names substitutes its own.

use std::borrow::Cow;

use super::kinds::{LongPrompt, MIN_TEMPERATURE, WhenFull};
use super::search::SearchMode;
use super::table::{GenerationConfig, GenerationOptions};
use crate::GenerationError;

/// Returns whether completions are sampled at this temperature.
///
/// At 0, and at temperatures below [`MIN_TEMPERATURE`], decoding is greedy and picks the most probable
/// token.
///
/// ```
/// use candle_gpt2_generation::samples_at;
///
/// assert!(samples_at(0.01) && !samples_at(0.0) && !samples_at(1e-40));
/// ```
pub fn samples_at(temperature: f64) -> bool {
    temperature >= MIN_TEMPERATURE
}

impl GenerationOptions {
    /// Performs the checks that do not need a checkpoint.
    ///
    /// # Errors
    /// Returns an error if an option is out of range or if two options contradict each other.
    pub fn check(&self) -> Result<(), GenerationError> {
        let is_temperature = |temperature: f64| (0.0..=f64::from(f32::MAX)).contains(&temperature);
        if let Some(temperature) = self.temperature.filter(|temperature| !is_temperature(*temperature))
            && self.do_sample != Some(false)
        {
            return Err(GenerationError::OptionOutOfRange {
                option: "temperature",
                expected: "at least 0 (0 selects greedy decoding) and finite in f32".into(),
                found: temperature.to_string(),
            });
        }
        self.resolved().check_resolved()
    }

    /// Returns whether a temperature of 0 requests greedy decoding.
    fn is_greedy(&self) -> bool {
        self.temperature.is_some_and(|temperature| (0.0..).contains(&temperature) && !samples_at(temperature))
    }

    /// Replaces a temperature of 0 with `do_sample: false` and drops options that then have no effect.
    fn resolved(&self) -> Cow<'_, Self> {
        if !self.is_greedy() {
            return Cow::Borrowed(self);
        }
        // Beam and contrastive search do not sample anyway.
        let do_sample = (!self.asks_for_a_search()).then_some(false);
        let without = self.clone().without_sampling(|name| self.is_for_search(name));
        Cow::Owned(Self { do_sample, ..without })
    }

    /// Returns notes about options that have no effect but are not errors.
    pub fn notes(&self) -> Vec<String> {
        if !self.is_greedy() {
            return Vec::new();
        }
        let idle: Vec<String> = [("do_sample", self.do_sample == Some(true))]
            .into_iter()
            .chain(self.sampling_options())
            .filter(|(option, is_set)| *is_set && *option != "temperature")
            .map(|(option, _)| format!("`{option}`"))
            .collect();
        match idle.as_slice() {
            [] => Vec::new(),
            [option] => vec![format!("`temperature` 0 selects greedy decoding, so {option} has no effect")],
            options => vec![format!(
                "`temperature` 0 selects greedy decoding, so {} have no effect",
                options.join(", ")
            )],
        }
    }

    fn check_resolved(&self) -> Result<(), GenerationError> {
        let conflict = |what: String| Err(GenerationError::Conflict { what });
        let searches = self.asks_for_a_search();
        if self.num_beams.is_some_and(|beams| beams > 1) && self.penalty_alpha.is_some_and(|x| x > 0.0) {
            return conflict(
                "`num_beams` and `penalty_alpha` are mutually exclusive; set only one of them".into(),
            );
        }
        if let Some(option) = first_set(self.sampling_options())
            && searches
            && self.do_sample.is_none()
        {
            return conflict(format!(
                "`{option}` is for sampling and cannot be used with `num_beams` or `penalty_alpha`"
            ));
        }
        if self.has_assistant && searches {
            return conflict(
                "`assistant_model` works only when decoding token by token; it cannot be used with `num_beams` or \
                 `penalty_alpha`"
                    .into(),
            );
        }
        if self.num_assistant_tokens.is_some() && !self.has_assistant {
            return conflict("`num_assistant_tokens` needs an assistant; set `assistant_model`".into());
        }
        if self.bad_words.iter().flatten().any(String::is_empty) {
            return Err(GenerationError::Option {
                what: "`bad_words`: expected non-empty strings, found \"\"".into(),
            });
        }
        if self.keep_head.is_some() && self.keep_last.is_none() && !self.slide {
            return conflict(
                "`keep_head` has no effect without `keep_last` or `slide`; set one of them".into(),
            );
        }
        // Token ids and combinations of options are checked later, together with the checkpoint's options.
        let sampling = GenerationConfig { do_sample: true, ..GenerationConfig::default() };
        self.merge_into(sampling).check_ranges()
    }

    /// Applies these options to a model's defaults.
    ///
    /// The result is not yet checked against the model.
    ///
    /// # Errors
    /// Returns the same errors as [`GenerationOptions::check`]. Also returns an error if an option of beam
    /// search is set without beams.
    pub fn applied_to(&self, defaults: GenerationConfig) -> Result<GenerationConfig, GenerationError> {
        self.check()?;
        let config = self.resolved().merge_into(defaults);
        if let Some(option) = self.option_of_beams()
            && config.search_mode() != SearchMode::Beams
        {
            let what = format!("`{option}` needs beam search; set `num_beams`");
            return Err(GenerationError::Conflict { what });
        }
        Ok(config)
    }

    /// Writes the set options into the configuration and resolves conflicts with its values.
    fn merge_into(&self, mut config: GenerationConfig) -> GenerationConfig {
        // A search method in the request replaces the one in the checkpoint's files.
        let (samples, searches) = (first_set(self.sampling_options()).is_some(), self.asks_for_a_search());
        if samples || searches || self.do_sample.is_some() {
            (config.num_beams, config.num_beam_groups, config.diversity_penalty) = (1, 1, 0.0);
            (config.penalty_alpha, config.do_sample) = (0.0, samples);
            if searches {
                config.prompt_lookup_num_tokens = None;
            } else if !self.do_sample.unwrap_or(samples) {
                config.num_return_sequences = 1;
            }
        }
        if self.has_assistant {
            config.prompt_lookup_num_tokens = None;
        }
        // The request's biases are added to the default ones.
        let biases = std::mem::take(&mut config.sequence_bias);
        self.put_into(&mut config);
        config.sequence_bias.splice(..0, biases);
        // A limit on new tokens overrides any limit on the total length. A limit on the total length
        // overrides the default limit on new tokens.
        match (self.max_new_tokens, self.max_length) {
            (Some(_), _) => config.max_length = None,
            (None, Some(_)) => config.max_new_tokens = usize::MAX,
            (None, None) => {}
        }
        config.prompt_lookup_num_tokens = config.prompt_lookup_num_tokens.filter(|tokens| *tokens > 0);
        let head = self.keep_head.unwrap_or(0);
        if let Some(last) = self.keep_last {
            config.long_prompt = LongPrompt::Keep { head, last };
        }
        if self.slide {
            config.when_full = WhenFull::Slide { head };
        }
        config
    }

    /// Returns whether the options request beam search or contrastive search.
    fn asks_for_a_search(&self) -> bool {
        self.num_beams.is_some_and(|beams| beams != 1) || self.is_contrastive()
    }

    /// Returns the first option that requests sampling, or a search other than greedy decoding.
    pub fn non_greedy_option(&self) -> Option<&'static str> {
        let searches = [
            ("num_beams", self.num_beams.is_some_and(|beams| beams != 1)),
            ("penalty_alpha", self.is_contrastive()),
        ];
        first_set(self.resolved().sampling_options()).or_else(|| first_set(searches))
    }

    fn is_contrastive(&self) -> bool {
        self.penalty_alpha.is_some_and(|alpha| alpha != 0.0)
    }

    /// Returns the sampling-only options of this request, and whether each one is set.
    fn sampling_options(&self) -> impl Iterator<Item = (&'static str, bool)> {
        self.options_for_sampling().filter(|(name, _)| !self.is_for_search(name))
    }

    /// Returns whether the requested search also uses this option.
    ///
    /// Contrastive search chooses among the top k tokens.
    fn is_for_search(&self, name: &str) -> bool {
        name == "top_k" && self.is_contrastive()
    }

    /// Returns the first option that is set but applies only to beam search.
    fn option_of_beams(&self) -> Option<&'static str> {
        first_set([
            ("num_beam_groups", self.num_beam_groups.is_some()),
            ("diversity_penalty", self.diversity_penalty.is_some()),
            ("length_penalty", self.length_penalty.is_some()),
            ("early_stopping", self.early_stopping.is_some()),
        ])
    }
}

fn first_set(options: impl IntoIterator<Item = (&'static str, bool)>) -> Option<&'static str> {
    options.into_iter().find(|(_, is_set)| *is_set).map(|(option, _)| option)
}
