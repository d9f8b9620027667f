//! The tokens of a command: from an argument, a file or standard input, as text or as ids.

use std::fs;
use std::io::{IsTerminal, Read, stdin};

use anyhow::{Context, Result, bail};
use gpt2_generation::GenerationError;
use gpt2_weights::{Checkpoint, Tokenizer, WeightsError};

use crate::UsageError;
use crate::arguments::{InputArguments, ModelArguments};

/// The input of a command, and what is needed to print its output.
pub(crate) struct Input {
    /// The text, where the input is one.
    pub(crate) text: Option<String>,
    /// Its tokens, or the given ones.
    pub(crate) ids: Vec<u32>,
    /// The tokenizer; absent where ids were given and there is none.
    pub(crate) tokenizer: Option<Tokenizer>,
}

/// Reads the input and turns it into tokens.
pub(crate) fn read(input: &InputArguments, model: &ModelArguments, checkpoint: &Checkpoint) -> Result<Input> {
    let load = || checkpoint.tokenizer(model.tokenizer.as_deref());
    if let Some(ids) = &input.ids {
        // A tokenizer that was named must be right; one that merely stands beside the model may be missing.
        let tokenizer = if model.tokenizer.is_some() {
            Some(load()?)
        } else {
            load().ok()
        };
        return Ok(Input {
            text: None,
            ids: ids.0.clone(),
            tokenizer,
        });
    }
    let tokenizer = load()?;
    let text = text(input)?;
    let encoding = tokenizer
        .encode(text.as_str(), true)
        .map_err(|error| anyhow::anyhow!("the tokenizer cannot encode the text: {error}"))?;
    let ids = encoding.get_ids().to_vec();
    let vocab_size = checkpoint.config().vocab_size;
    if let Some(index) = ids
        .iter()
        .position(|id| usize::try_from(*id).is_ok_and(|id| id >= vocab_size))
    {
        let error = GenerationError::IdBeyondVocabulary {
            id: ids[index],
            position: index + 1,
            vocab_size,
        };
        bail!("the tokenizer does not belong to this checkpoint: {error}");
    }
    Ok(Input {
        text: Some(text),
        ids,
        tokenizer: Some(tokenizer),
    })
}

fn text(input: &InputArguments) -> Result<String> {
    if let Some(text) = &input.text {
        return Ok(text.clone());
    }
    let (name, bytes) = if let Some(path) = &input.prompt_file {
        (
            path.display().to_string(),
            fs::read(path).with_context(|| path.display().to_string())?,
        )
    } else if stdin().is_terminal() {
        let message =
            "no text: give it as an argument, with --prompt-file FILE, with --ids, or on standard input";
        return Err(UsageError(message.into()).into());
    } else {
        let mut bytes = Vec::new();
        stdin().lock().read_to_end(&mut bytes).context("standard input")?;
        ("standard input".to_owned(), bytes)
    };
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        anyhow::anyhow!("{name}: not valid UTF-8 at byte {valid}; convert the text to UTF-8")
    })
}
