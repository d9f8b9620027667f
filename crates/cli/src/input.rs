//! Token input for a command: from an argument, a file or standard input, as text or as ids.

use std::fs::File;
use std::io::{IsTerminal, Read, stdin};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result};
use candle_gpt2_engine::Vocabulary;
use candle_gpt2_weights::read_to_limit;
use clap::Args;

use crate::exit::UsageError;
use crate::output;

/// Text argument that means standard input.
pub(crate) const STANDARD_INPUT: &str = "-";

/// Input tokens, supplied in one of these ways.
#[derive(Debug, Default, Args)]
#[group(id = "input", multiple = false)]
pub(crate) struct InputArguments {
    /// The prompt, as an option in place of the argument
    #[arg(short, long, value_name = "TEXT")]
    pub(crate) prompt: Option<String>,
    /// Read the prompt from this file
    #[arg(long, value_name = "FILE")]
    pub(crate) prompt_file: Option<PathBuf>,
    /// Token ids in place of text, separated by commas; no tokenizer is needed then
    #[arg(long, value_name = "ID,ID,…")]
    pub(crate) ids: Option<Ids>,
    /// Prompt; without a prompt, or with -, it is read from standard input, final newline included
    #[arg(value_name = "TEXT")]
    pub(crate) text: Option<String>,
}

/// List of token ids in a single argument.
#[derive(Debug, Clone)]
pub(crate) struct Ids(pub(crate) Vec<u32>);

impl FromStr for Ids {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let id = |part: &str| {
            part.trim()
                .parse::<u32>()
                .map_err(|error| format!("`{}` is not a token id: {error}", part.trim()))
        };
        text.split(',').map(id).collect::<Result<_, _>>().map(Self)
    }
}

/// Input as supplied by the user.
pub(crate) enum RawInput {
    Text(String),
    Ids(Vec<u32>),
}

/// Tokenized input of a command.
pub(crate) struct Input {
    /// Input text, if the input is not a list of ids.
    pub(crate) text: Option<String>,
    /// Tokens of the text, or the supplied ids.
    pub(crate) ids: Vec<u32>,
}

impl InputArguments {
    /// Whether the command line names an input, including `-` for standard input.
    pub(crate) fn is_given(&self) -> bool {
        let Self { prompt, prompt_file, ids, text } = self;
        prompt.is_some() || prompt_file.is_some() || ids.is_some() || text.is_some()
    }

    /// Reads the input as text or ids.
    pub(crate) fn read(&self, vocabulary: &Vocabulary) -> Result<RawInput> {
        if let Some(Ids(ids)) = &self.ids {
            return Ok(RawInput::Ids(ids.clone()));
        }
        // Check for a tokenizer first, to avoid waiting for text that cannot be encoded.
        vocabulary.required_tokenizer()?;
        Ok(RawInput::Text(self.text()?))
    }

    /// Reads and tokenizes the input.
    pub(crate) fn tokenized(&self, vocabulary: &Vocabulary) -> Result<Input> {
        Ok(match self.read(vocabulary)? {
            RawInput::Ids(ids) => Input { text: None, ids },
            RawInput::Text(text) => {
                let ids = vocabulary.encode(&text)?;
                vocabulary.lost_note(&text).iter().for_each(|note| output::print_note(note));
                Input { text: Some(text), ids }
            }
        })
    }

    /// Reads an input that is not a list of ids.
    pub(crate) fn text(&self) -> Result<String> {
        let is_standard_input = self.text.as_deref() == Some(STANDARD_INPUT);
        if let Some(text) = self.text.as_ref().or(self.prompt.as_ref())
            && !is_standard_input
        {
            return Ok(text.clone());
        }
        if let Some(path) = &self.prompt_file {
            return read_text(path);
        }
        if stdin().is_terminal() && !is_standard_input {
            let message =
                "no text; pass it as an argument, with --prompt-file FILE, with --ids, or on standard input";
            return Err(UsageError(message.into()).into());
        }
        let name = "standard input";
        text_of(name, read_bytes(name, stdin())?)
    }
}

/// Reads a text file.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    text_of(&path.display().to_string(), read_file(path)?)
}

/// Reads the bytes of a text file.
pub(crate) fn read_file(path: &Path) -> Result<Vec<u8>> {
    let name = path.display().to_string();
    read_bytes(&name, File::open(path).with_context(|| name.clone())?)
}

fn read_bytes(name: &str, source: impl Read) -> Result<Vec<u8>> {
    /// Maximum size of a text, far more than any context holds.
    const MAX_TEXT_BYTES: u64 = 256 << 20;
    read_to_limit(source, MAX_TEXT_BYTES).with_context(|| name.to_owned())
}

/// Decodes UTF-8 without the byte order mark that some editors prepend.
fn text_of(name: &str, mut bytes: Vec<u8>) -> Result<String> {
    const MARK: &[u8] = "\u{feff}".as_bytes();
    if bytes.starts_with(MARK) {
        bytes.drain(..MARK.len());
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        anyhow::anyhow!("{name}: not valid UTF-8 at byte {valid}; convert the text to UTF-8")
    })
}
