//! The tokens of a command: from an argument, a file or standard input, as text or as ids.

use std::fs::File;
use std::io::{IsTerminal, Read, stdin};
use std::path::Path;

use anyhow::{Context, Result, bail};
use gpt2::Gpt2Config;
use gpt2_weights::{Checkpoint, Tokenizer, WeightsError, encode};

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
        // Without a tokenizer the ids themselves are the output; a broken one is an error all the same.
        let tokenizer = match load() {
            Err(WeightsError::NoTokenizer { .. }) => None,
            loaded => Some(loaded?),
        };
        return Ok(Input { text: None, ids: ids.0.clone(), tokenizer });
    }
    let tokenizer = load()?;
    let text = text(input)?;
    let ids = encode(&tokenizer, &text)?;
    check_tokenizer(&ids, checkpoint.config())?;
    Ok(Input { text: Some(text), ids, tokenizer: Some(tokenizer) })
}

/// Checks that the ids a tokenizer gave are tokens of the model.
pub(crate) fn check_tokenizer(ids: &[u32], config: &Gpt2Config) -> Result<()> {
    match ids.iter().find(|id| !config.has_token(**id)) {
        Some(id) => bail!(
            "the tokenizer does not belong to this checkpoint: it gives the token id {id}, and the vocabulary has \
             {} tokens",
            config.vocab_size
        ),
        None => Ok(()),
    }
}

fn text(input: &InputArguments) -> Result<String> {
    if let Some(text) = &input.text {
        return Ok(text.clone());
    }
    if let Some(path) = &input.prompt_file {
        return read_text_file(path);
    }
    if stdin().is_terminal() {
        let message =
            "no text: give it as an argument, with --prompt-file FILE, with --ids, or on standard input";
        return Err(UsageError(message.into()).into());
    }
    read_text("standard input", stdin())
}

/// The text of a file.
pub(crate) fn read_text_file(path: &Path) -> Result<String> {
    let name = path.display().to_string();
    read_text(&name, File::open(path).with_context(|| name.clone())?)
}

fn read_text(name: &str, source: impl Read) -> Result<String> {
    /// Largest text that is read: far more than any context holds, and less than memory does.
    const MAX_TEXT_BYTES: u64 = 256 << 20;
    let mut bytes = Vec::new();
    source.take(MAX_TEXT_BYTES + 1).read_to_end(&mut bytes).with_context(|| name.to_owned())?;
    if bytes.len() as u64 > MAX_TEXT_BYTES {
        bail!("{name}: more than {MAX_TEXT_BYTES} bytes of text; split it");
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        anyhow::anyhow!("{name}: not valid UTF-8 at byte {valid}; convert the text to UTF-8")
    })
}
