//! The model to measure.

use std::path::Path;

use anyhow::{Context, Result, bail};
use candle_gpt2_engine::{LoadedModel, ModelOptions, Silent};

/// A loaded model and its end token.
pub(crate) struct Subject {
    pub(crate) loaded: LoadedModel,
    /// Token that ends documents and begins every prompt.
    pub(crate) end: u32,
}

impl Subject {
    pub(crate) fn open(model: &Path) -> Result<Self> {
        let options = ModelOptions { model: model.to_owned(), ..ModelOptions::default() };
        let loaded = options.open(&Silent)?.load(&Silent)?;
        let Some(end) = loaded.config().end_tokens().first().copied() else {
            bail!("{}: the model has no end-of-text token", model.display());
        };
        Ok(Self { loaded, end })
    }

    /// First token of a continuation.
    pub(crate) fn first_token(&self, text: &str) -> Result<u32> {
        self.encode(text)?.first().copied().with_context(|| format!("the text `{text}` encodes to no tokens"))
    }

    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.loaded.vocabulary().encode(text)?)
    }

    /// Encodes a text after an end token, as if another document preceded it.
    pub(crate) fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = vec![self.end];
        ids.extend(self.encode(text)?);
        Ok(ids)
    }
}
