//! Which search the options ask for, and how long it may be.

use super::table::GenerationConfig;

/// How the next token is searched for. [`GenerationConfig::search_mode`] says which it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SearchMode {
    /// One token after the other, greedily or at random.
    TokenByToken,
    /// Beam search, with or without groups.
    Beams,
    /// Contrastive search.
    Contrastive,
}

impl GenerationConfig {
    /// How the next token is searched for; as in transformers, the options decide.
    pub fn search_mode(&self) -> SearchMode {
        match self {
            Self { num_beams: 2.., .. } => SearchMode::Beams,
            Self { do_sample: false, penalty_alpha, .. } if *penalty_alpha > 0.0 => SearchMode::Contrastive,
            _ => SearchMode::TokenByToken,
        }
    }

    /// Most tokens that are generated for a prompt of this length, whatever the context holds.
    pub(crate) fn new_tokens(&self, prompt_len: usize) -> usize {
        let of_length = self.max_length.map(|length| length.saturating_sub(prompt_len));
        self.max_new_tokens.min(of_length.unwrap_or(usize::MAX))
    }
}
