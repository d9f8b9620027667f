//! The model that is measured.

use std::path::Path;

use anyhow::{Context, Result, bail};
use candle_gpt2_engine::{LoadedModel, ModelOptions, Silent};

/// A model with what encodes its texts.
pub(crate) struct Subject {
    pub(crate) loaded: LoadedModel,
    /// Token that ends documents; each prompt begins with it.
    pub(crate) end: u32,
}

impl Subject {
    pub(crate) fn open(model: &Path) -> Result<Self> {
        let options = ModelOptions { model: model.to_owned(), ..ModelOptions::default() };
        let loaded = options.open(&Silent)?.load(&Silent)?;
        let Some(end) = loaded.config().end_tokens().first().copied() else {
            bail!("{}: the model has no token that ends a document", model.display());
        };
        Ok(Self { loaded, end })
    }

    /// The first token of a continuation.
    pub(crate) fn first_token(&self, text: &str) -> Result<u32> {
        self.encode(text)?.first().copied().with_context(|| format!("`{text}` has no token"))
    }

    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.loaded.vocabulary().encode(text)?)
    }

    /// A text after the end of another document.
    pub(crate) fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = vec![self.end];
        ids.extend(self.encode(text)?);
        Ok(ids)
    }
}
