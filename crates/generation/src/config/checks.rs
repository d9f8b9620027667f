//! Validation of options in combination with each other and with the model.
//!
//! Ranges of single options are in `table.rs`.

use candle_gpt2::Gpt2Config;

use super::kinds::{LongPrompt, MAX_TEXTS, WhenFull};
use super::search::SearchMode;
use super::table::GenerationConfig;
use crate::GenerationError;
use crate::logits::to_f32;

impl GenerationConfig {
    /// Checks every option, individually and in combination with the others.
    ///
    /// # Errors
    /// Returns an error if an option is out of range or if two options contradict each other.
    pub fn check(&self) -> Result<(), GenerationError> {
        self.check_ranges()?;
        self.check_combinations()
    }

    /// Checks the options that depend on the model.
    ///
    /// Every token id must be in the vocabulary. The tokens to keep from long prompts and in sliding windows
    /// must fit into the context.
    ///
    /// # Errors
    /// Returns an error if an id is outside the vocabulary or if too many tokens are to be kept.
    pub fn check_model(&self, model: &Gpt2Config) -> Result<(), GenerationError> {
        self.check_window(model.n_positions)?;
        let lists: [(&'static str, Vec<u32>); 7] = [
            ("pad_token_id", self.pad_token_id.into_iter().collect()),
            ("eos_token_id", self.eos_token_id.clone()),
            ("bad_words_ids", self.bad_words_ids.concat()),
            ("sequence_bias", self.sequence_bias.iter().flat_map(|(ids, _)| ids.clone()).collect()),
            ("suppress_tokens", self.suppress_tokens.clone()),
            ("begin_suppress_tokens", self.begin_suppress_tokens.clone()),
            ("forced_bos_token_id", self.forced_bos_token_id.into_iter().collect()),
        ];
        for (option, ids) in lists {
            if let Some(id) = ids.into_iter().find(|id| !model.has_token(*id)) {
                let expected = format!("token ids below the vocabulary size of {}", model.vocab_size);
                return Err(out_of_range(option, &expected, id));
            }
        }
        Ok(())
    }

    /// Checks all options for this search mode and model.
    pub(crate) fn check_for(&self, mode: SearchMode, model: &Gpt2Config) -> Result<(), GenerationError> {
        self.check()?;
        self.check_model(model)?;
        if self.search_mode() == mode {
            return Ok(());
        }
        let what = match mode {
            SearchMode::TokenByToken => {
                "this function decodes token by token; use `beam_search` or `contrastive_search`"
            }
            SearchMode::Beams => "beam search needs `num_beams` of at least 2",
            SearchMode::Contrastive => {
                "contrastive search needs `penalty_alpha` above 0 and `do_sample` false"
            }
        };
        Err(GenerationError::Conflict { what: what.into() })
    }

    /// Checks that the tokens to keep fit into the context.
    fn check_window(&self, n_positions: usize) -> Result<(), GenerationError> {
        let fits = |kept: usize| match kept <= n_positions {
            true => Ok(()),
            false => Err(GenerationError::WindowTooLong { kept, n_positions }),
        };
        if let WhenFull::Slide { head } = self.when_full {
            fits(head.saturating_add(slid_tokens(n_positions)))?;
        }
        if let LongPrompt::Keep { head, last } = self.long_prompt {
            fits(head.saturating_add(last))?;
        }
        Ok(())
    }

    /// Applies the policy for long prompts and returns the tokens that the model reads.
    ///
    /// Invalid prompts are rejected here, before any computation.
    ///
    /// # Errors
    /// Returns an error if the prompt is empty, an id is outside the vocabulary, or the prompt is too long
    /// for the policy. Also returns an error if the policy keeps more tokens than the context holds.
    pub fn fit_prompt(&self, prompt: &[u32], model: &Gpt2Config) -> Result<Vec<u32>, GenerationError> {
        let n_positions = model.n_positions;
        check_ids(prompt, model)?;
        self.check_window(n_positions)?;
        match (prompt.len(), self.long_prompt) {
            (0, _) => Err(GenerationError::EmptyPrompt),
            (tokens, _) if tokens <= n_positions => Ok(prompt.to_vec()),
            (tokens, LongPrompt::Refuse) => Err(GenerationError::PromptTooLong { tokens, n_positions }),
            (tokens, LongPrompt::Keep { head, last }) => {
                Ok([&prompt[..head], &prompt[tokens - last..]].concat())
            }
        }
    }

    /// Checks every option individually.
    ///
    /// # Errors
    /// Returns an error if an option is out of range.
    pub fn check_ranges(&self) -> Result<(), GenerationError> {
        self.check_numbers()?;
        if self.penalty_alpha != 0.0 && self.top_k > MAX_TEXTS {
            let expected = format!("at most {MAX_TEXTS} in contrastive search");
            return Err(out_of_range("top_k", &expected, self.top_k));
        }
        if self.stop_strings.iter().any(String::is_empty) {
            return Err(out_of_range("stop_strings", "non-empty strings", "\"\""));
        }
        if self.bad_words_ids.iter().chain(self.sequence_bias.iter().map(|(ids, _)| ids)).any(Vec::is_empty) {
            return Err(out_of_range(
                "bad_words_ids`, `sequence_bias",
                "sequences of at least one token",
                "[]",
            ));
        }
        let is_bias = |bias: f64| to_f32(bias).is_finite() || bias == f64::NEG_INFINITY;
        if let Some((_, bias)) = self.sequence_bias.iter().find(|(_, bias)| !is_bias(*bias)) {
            return Err(out_of_range("sequence_bias", "numbers that are finite in f32, or -inf", bias));
        }
        if matches!(self.long_prompt, LongPrompt::Keep { last: 0, .. }) {
            return Err(out_of_range("keep_last", "at least 1", 0));
        }
        Ok(())
    }

    fn check_combinations(&self) -> Result<(), GenerationError> {
        let conflict = |what: &str| Err(GenerationError::Conflict { what: what.into() });
        let (beams, groups, texts) = (self.num_beams, self.num_beam_groups, self.num_return_sequences);
        if self.min_new_tokens > self.max_new_tokens {
            let (min, max) = (self.min_new_tokens, self.max_new_tokens);
            return conflict(&format!("`min_new_tokens` {min} exceeds `max_new_tokens` {max}"));
        }
        match self.search_mode() {
            SearchMode::Beams if self.do_sample => {
                conflict("beam search does not sample; set `do_sample` to false")
            }
            SearchMode::Beams if self.penalty_alpha > 0.0 => conflict(
                "`penalty_alpha` and `num_beams` are mutually exclusive (contrastive search, beam search)",
            ),
            SearchMode::Beams if !beams.is_multiple_of(groups) => {
                conflict(&format!("`num_beam_groups` {groups} does not divide `num_beams` {beams}"))
            }
            SearchMode::Beams if groups > 1 && self.diversity_penalty <= 0.0 => conflict(
                "`num_beam_groups` needs a `diversity_penalty` above 0; \
                 otherwise all groups find the same completions",
            ),
            SearchMode::Beams if texts > beams => {
                conflict(&format!("`num_return_sequences` {texts} exceeds `num_beams` {beams}"))
            }
            SearchMode::Contrastive if self.top_k < 2 => {
                conflict("contrastive search chooses among `top_k` tokens; set `top_k` to at least 2")
            }
            SearchMode::TokenByToken if self.penalty_alpha > 0.0 => {
                conflict("contrastive search does not sample; set `do_sample` to false")
            }
            SearchMode::Contrastive | SearchMode::TokenByToken
                if groups > 1 || self.diversity_penalty > 0.0 =>
            {
                conflict("`num_beam_groups` and `diversity_penalty` need beam search; set `num_beams`")
            }
            SearchMode::Contrastive | SearchMode::TokenByToken if texts > 1 && !self.do_sample => conflict(
                "without sampling or beam search, all completions would be the same; set `num_return_sequences` to 1",
            ),
            SearchMode::Beams | SearchMode::Contrastive if self.prompt_lookup_num_tokens.is_some() => {
                conflict(
                    "`prompt_lookup_num_tokens` works only when decoding token by token; it cannot be used with beam or contrastive search",
                )
            }
            SearchMode::Beams | SearchMode::Contrastive if !self.stop_strings.is_empty() => {
                conflict("`stop_strings` cannot be combined with beam or contrastive search")
            }
            SearchMode::Beams | SearchMode::Contrastive if self.when_full != WhenFull::Stop => {
                conflict("`slide` cannot be combined with beam or contrastive search")
            }
            _ => Ok(()),
        }
    }
}

fn out_of_range(option: &'static str, expected: &str, found: impl std::fmt::Display) -> GenerationError {
    GenerationError::OptionOutOfRange { option, expected: expected.to_owned(), found: found.to_string() }
}

/// Checks that every id is in the vocabulary.
pub(crate) fn check_ids(ids: &[u32], model: &Gpt2Config) -> Result<(), GenerationError> {
    match ids.iter().position(|id| !model.has_token(*id)) {
        Some(index) => Err(GenerationError::IdBeyondVocabulary {
            id: ids[index],
            position: index + 1,
            vocab_size: model.vocab_size,
        }),
        None => Ok(()),
    }
}

/// Number of tokens kept after the head when the window slides: half of the context.
pub(crate) fn slid_tokens(n_positions: usize) -> usize {
    (n_positions / 2).max(1)
}
