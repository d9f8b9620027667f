//! `gpt2 tokenize` without `--out`: prints the tokens of a text.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use candle_gpt2_engine::{BUILT_IN, HubOptions};
use candle_gpt2_weights::{CharacterCheck, Tokenizer, encode, load_tokenizer, token_bytes};
use serde::{Serialize, Serializer};

use super::tokenize::TokenizeArguments;
use crate::exit::UsageError;
use crate::input::InputArguments;
use crate::output;
use crate::progress::Terminal;

/// Output of `--json`.
#[derive(Serialize)]
struct Report<I: Iterator<Item = Token> + Clone> {
    #[serde(serialize_with = "written_in_order")]
    tokens: I,
}

#[derive(Serialize)]
struct Token {
    index: usize,
    id: u32,
    /// Bytes of the token as text; incomplete characters are replaced.
    text: String,
    bytes: Vec<u8>,
}

/// Serializes tokens one by one.
///
/// A list of them would take a hundred times the memory of the text.
fn written_in_order<S: Serializer>(
    tokens: &(impl Iterator<Item = Token> + Clone),
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(tokens.clone())
}

pub(crate) fn run(arguments: &TokenizeArguments, hub: &HubOptions) -> Result<ExitCode> {
    let text = text(&arguments.data)?;
    let tokenizer = tokenizer(arguments, hub)?;
    let text = InputArguments { text, ..InputArguments::default() }.text()?;
    let token = |(index, id)| {
        let bytes = token_bytes(&tokenizer, id).unwrap_or_default();
        Token { index, id, text: String::from_utf8_lossy(&bytes).into_owned(), bytes }
    };
    let ids = encode(&tokenizer, &text)?;
    if let Some(lost) = CharacterCheck::new(&tokenizer).and_then(|check| check.first_lost(&tokenizer, &text))
    {
        output::print_note(&lost.to_string());
    }
    let tokens = ids.iter().copied().enumerate().map(token);
    if arguments.json {
        output::write_json(&Report { tokens })?;
        return Ok(ExitCode::SUCCESS);
    }
    for Token { id, text, bytes, .. } in tokens {
        let bytes: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let text = format!("{text:?}");
        output::write_line(&format!("{id:>8}  {text:<16}  {}", bytes.join(" ")))?;
    }
    let unit = if ids.len() == 1 { "token" } else { "tokens" };
    output::write_line(&format!("{} {unit}, {} bytes of text", ids.len(), text.len()))?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the text from the arguments, if there is one.
fn text(data: &[PathBuf]) -> Result<Option<String>> {
    match data {
        [] => Ok(None),
        [text] => {
            if Path::new(text).is_file() {
                let name = text.display();
                output::print_note(&format!(
                    "{name} is treated as text, not as a file: `gpt2 tokenize < {name}` prints the file's tokens, and --out DIR writes them"
                ));
            }
            let text = text.clone().into_os_string().into_string();
            Ok(Some(text.map_err(|_| UsageError("the text is not valid UTF-8".into()))?))
        }
        [_, ..] => {
            let message = "expected one argument; put the text in quotes, or use --out DIR to encode files";
            Err(UsageError(message.into()).into())
        }
    }
}

/// Loads the named tokenizer, or the model's tokenizer.
fn tokenizer(arguments: &TokenizeArguments, hub: &HubOptions) -> Result<Tokenizer> {
    let named = arguments.tokenizer.as_deref();
    match (&arguments.model, named) {
        (None, Some(named)) => Ok(load_tokenizer(named)?),
        (model, _) => {
            let model = model.as_deref().unwrap_or(Path::new(BUILT_IN));
            let checkpoint = arguments.common.checkpoint_options(model, hub).open_checkpoint(&Terminal)?;
            Ok(checkpoint.tokenizer(named)?)
        }
    }
}
