//! Search mode and maximum length that follow from the options.

use super::table::GenerationConfig;

/// Search algorithm.
///
/// [`GenerationConfig::search_mode`] returns the one that the options select.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SearchMode {
    /// Decodes one token at a time, greedily or by sampling.
    TokenByToken,
    /// Beam search, with or without groups.
    Beams,
    /// Contrastive search.
    Contrastive,
}

impl GenerationConfig {
    /// Returns the search mode that the options select, by the rules of transformers.
    pub fn search_mode(&self) -> SearchMode {
        match self {
            Self { num_beams: 2.., .. } => SearchMode::Beams,
            Self { do_sample: false, penalty_alpha, .. } if *penalty_alpha > 0.0 => SearchMode::Contrastive,
            _ => SearchMode::TokenByToken,
        }
    }

    /// Returns the maximum number of new tokens for a prompt of this length, regardless of the context.
    pub(crate) fn new_tokens(&self, prompt_len: usize) -> usize {
        let of_length = self.max_length.map(|length| length.saturating_sub(prompt_len));
        self.max_new_tokens.min(of_length.unwrap_or(usize::MAX))
    }
}
