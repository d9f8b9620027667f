//! How a request changes what a checkpoint's files say, and which of its options contradict each other.
//!
//! Messages write names of options in backquotes; a front end that has other names for them puts its own in their place.

use std::borrow::Cow;

use super::kinds::{LongPrompt, MIN_TEMPERATURE, WhenFull};
use super::search::SearchMode;
use super::table::{GenerationConfig, GenerationOptions};
use crate::GenerationError;

/// Whether completions are sampled at this temperature. At 0, and at what is too small to divide a logit by, they are greedy: the most
/// probable token is taken.
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
    /// Checks what can be checked before a checkpoint is opened.
    ///
    /// # Errors
    /// If an option is out of its range, or two contradict each other.
    pub fn check(&self) -> Result<(), GenerationError> {
        let is_temperature = |temperature: f64| (0.0..=f64::from(f32::MAX)).contains(&temperature);
        if let Some(temperature) = self.temperature.filter(|temperature| !is_temperature(*temperature))
            && self.do_sample != Some(false)
        {
            return Err(GenerationError::OptionOutOfRange {
                option: "temperature",
                expected: "at least 0 (0 is greedy) and finite in f32".into(),
                found: temperature.to_string(),
            });
        }
        self.settled().check_settled()
    }

    /// Whether a temperature of 0 asks for the most probable tokens.
    fn is_greedy(&self) -> bool {
        self.temperature.is_some_and(|temperature| (0.0..).contains(&temperature) && !samples_at(temperature))
    }

    /// The same options with a temperature of 0 written as `do_sample`, and without those that it leaves without effect.
    fn settled(&self) -> Cow<'_, Self> {
        if !self.is_greedy() {
            return Cow::Borrowed(self);
        }
        // A search does not sample anyway.
        let do_sample = (!self.asks_for_a_search()).then_some(false);
        let without = self.clone().without_sampling(|name| self.is_for_search(name));
        Cow::Owned(Self { do_sample, ..without })
    }

    /// Notes on these options; none is an error.
    pub fn notes(&self) -> Vec<String> {
        if !self.is_greedy() {
            return Vec::new();
        }
        let idle: Vec<String> = [("do_sample", self.do_sample == Some(true))]
            .into_iter()
            .chain(self.sampling_options())
            .filter(|(option, is_given)| *is_given && *option != "temperature")
            .map(|(option, _)| format!("`{option}`"))
            .collect();
        match idle.as_slice() {
            [] => Vec::new(),
            [option] => vec![format!("`temperature` 0 is greedy: {option} has no effect")],
            options => vec![format!("`temperature` 0 is greedy: {} have no effect", options.join(", "))],
        }
    }

    fn check_settled(&self) -> Result<(), GenerationError> {
        let conflict = |what: String| Err(GenerationError::Conflict { what });
        let searches = self.asks_for_a_search();
        if self.num_beams.is_some_and(|beams| beams > 1) && self.penalty_alpha.is_some_and(|x| x > 0.0) {
            return conflict(
                "`num_beams` and `penalty_alpha` cannot be used with each other; give one of them".into(),
            );
        }
        if let Some(option) = first_given(self.sampling_options())
            && searches
            && self.do_sample.is_none()
        {
            return conflict(format!(
                "`{option}` is for sampling and cannot be used with `num_beams` or `penalty_alpha`"
            ));
        }
        if self.has_assistant && searches {
            return conflict(
                "`assistant_model` drafts completions that are made token by token, and cannot be used with `num_beams` or \
                 `penalty_alpha`"
                    .into(),
            );
        }
        if self.num_assistant_tokens.is_some() && !self.has_assistant {
            return conflict("`num_assistant_tokens` is for an assistant; give `assistant_model`".into());
        }
        if self.bad_words.iter().flatten().any(String::is_empty) {
            return Err(GenerationError::Option {
                what: "`bad_words`: expected a text, found an empty one".into(),
            });
        }
        if self.keep_head.is_some() && self.keep_last.is_none() && !self.slide {
            return conflict(
                "`keep_head` keeps tokens when others are dropped; give `keep_last` or `slide` too".into(),
            );
        }
        // Tokens and combinations are checked later, with what the checkpoint says.
        let sampling = GenerationConfig { do_sample: true, ..GenerationConfig::default() };
        self.settled_into(sampling).check_ranges()
    }

    /// The defaults of a model, changed by these options and not yet checked with what belongs to the model.
    ///
    /// # Errors
    /// Those of [`GenerationOptions::check`], and if an option of beam search is given without beams.
    pub fn applied_to(&self, defaults: GenerationConfig) -> Result<GenerationConfig, GenerationError> {
        self.check()?;
        let config = self.settled().settled_into(defaults);
        if let Some(option) = self.option_of_beams()
            && config.search_mode() != SearchMode::Beams
        {
            let what = format!("`{option}` is an option of beam search; give `num_beams`");
            return Err(GenerationError::Conflict { what });
        }
        Ok(config)
    }

    /// The configuration with what is given put in its place.
    fn settled_into(&self, mut config: GenerationConfig) -> GenerationConfig {
        // One of the ways to choose tokens replaces what the file asks for.
        let (samples, searches) = (first_given(self.sampling_options()).is_some(), self.asks_for_a_search());
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
        // Biases are added to those of the defaults.
        let biases = std::mem::take(&mut config.sequence_bias);
        self.put_into(&mut config);
        config.sequence_bias.splice(..0, biases);
        // A number of new tokens takes precedence over a number of all tokens, and that over the default of the other.
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

    /// Whether an option asks for beams or contrastive search.
    fn asks_for_a_search(&self) -> bool {
        self.num_beams.is_some_and(|beams| beams != 1) || self.is_contrastive()
    }

    /// The first option that asks for sampling or for another search than taking the most probable token each time.
    pub fn chooses_otherwise(&self) -> Option<&'static str> {
        let searches = [
            ("num_beams", self.num_beams.is_some_and(|beams| beams != 1)),
            ("penalty_alpha", self.is_contrastive()),
        ];
        first_given(self.settled().sampling_options()).or_else(|| first_given(searches))
    }

    fn is_contrastive(&self) -> bool {
        self.penalty_alpha.is_some_and(|alpha| alpha != 0.0)
    }

    /// The options that only sampling reads here, and whether they are given.
    fn sampling_options(&self) -> impl Iterator<Item = (&'static str, bool)> {
        self.given_for_sampling().filter(|(name, _)| !self.is_for_search(name))
    }

    /// Whether the search that these options ask for reads the option too: contrastive search chooses among the top k.
    fn is_for_search(&self, name: &str) -> bool {
        name == "top_k" && self.is_contrastive()
    }

    /// The first option that only beam search reads.
    fn option_of_beams(&self) -> Option<&'static str> {
        first_given([
            ("num_beam_groups", self.num_beam_groups.is_some()),
            ("diversity_penalty", self.diversity_penalty.is_some()),
            ("length_penalty", self.length_penalty.is_some()),
            ("early_stopping", self.early_stopping.is_some()),
        ])
    }
}

fn first_given(options: impl IntoIterator<Item = (&'static str, bool)>) -> Option<&'static str> {
    options.into_iter().find(|(_, is_given)| *is_given).map(|(option, _)| option)
}
