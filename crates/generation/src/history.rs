//! The tokens that a text has so far.

/// The tokens so far. [`LogitsProcessor::process`](crate::LogitsProcessor::process) takes it.
#[derive(Debug, Clone, Copy)]
pub struct History<'ids> {
    /// Prompt and generated tokens.
    pub ids: &'ids [u32],
    /// How many of them are the prompt.
    pub prompt_len: usize,
}

impl<'ids> History<'ids> {
    /// The tokens of the prompt.
    pub fn prompt(self) -> &'ids [u32] {
        &self.ids[..self.prompt_len.min(self.ids.len())]
    }

    /// The tokens after the prompt.
    pub fn generated(self) -> &'ids [u32] {
        self.ids.get(self.prompt_len..).unwrap_or_default()
    }
}
