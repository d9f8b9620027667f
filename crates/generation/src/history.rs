//! Tokens of a sequence so far.

/// Tokens so far, as input to [`LogitsProcessor::process`](crate::LogitsProcessor::process).
#[derive(Debug, Clone, Copy)]
pub struct History<'ids> {
    /// Prompt and generated tokens.
    pub ids: &'ids [u32],
    /// Number of prompt tokens.
    pub prompt_len: usize,
}

impl<'ids> History<'ids> {
    /// Returns the tokens of the prompt.
    pub fn prompt(self) -> &'ids [u32] {
        &self.ids[..self.prompt_len.min(self.ids.len())]
    }

    /// Returns the tokens after the prompt.
    pub fn generated(self) -> &'ids [u32] {
        self.ids.get(self.prompt_len..).unwrap_or_default()
    }
}
