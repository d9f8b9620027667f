//! `gpt2 convert`: write a checkpoint in another format.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use gpt2_engine::{HubOptions, Reporter, Unit};
use gpt2_weights::{WeightsError, WrittenDType, write_gguf, write_hugging_face};
use serde_json::json;

use crate::exit::UsageError;
use crate::model_arguments::CommonArguments;
use crate::output;
use crate::progress::Terminal;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 convert ckpt.pt gpt2-hf
  gpt2 convert models/124M gpt2-hf --dtype f16
  gpt2 convert gpt2-hf gpt2.gguf --dtype q8_0

The result appears whole or not at all, and nothing that exists is overwritten.")]
pub(crate) struct ConvertArguments {
    /// Checkpoint folder, weights file of any format that is read, or a model of the hub (gpt2, owner/name[@revision])
    #[arg(value_name = "IN")]
    pub(crate) input: PathBuf,
    /// What to write: a GGUF file where the name ends in .gguf, else a Hugging Face folder
    #[arg(value_name = "OUT")]
    pub(crate) output: PathBuf,
    /// Type of the written weights: f32, f16, bf16, and for GGUF q8_0 and q4_0
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = parse_dtype)]
    pub(crate) dtype: WrittenDType,
    /// Tokenizer to write: a tokenizer.json, or a folder with one or with vocab.json and merges.txt [default: the input's]
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) common: CommonArguments,
    /// Print one JSON object: output, format, dtype, bytes
    #[arg(long)]
    pub(crate) json: bool,
}

fn parse_dtype(name: &str) -> Result<WrittenDType, String> {
    let names = WrittenDType::NAMES.map(|(name, _)| name).join(", ");
    let known = WrittenDType::NAMES.iter().find(|(known, _)| *known == name);
    known.map(|(_, dtype)| *dtype).ok_or_else(|| format!("expected one of {names}"))
}

pub(crate) fn run(arguments: &ConvertArguments, hub: &HubOptions) -> Result<ExitCode> {
    let ConvertArguments { input, output, dtype, tokenizer, json, common } = arguments;
    if !is_gguf(output) && matches!(dtype, WrittenDType::Q8_0 | WrittenDType::Q4_0) {
        let name = dtype.name();
        let message = format!(
            "--dtype {name}: a Hugging Face folder holds f32, f16 or bf16; name a .gguf file for {name}"
        );
        return Err(UsageError(message).into());
    }
    let checkpoint = common.open_checkpoint(input, hub)?;
    checkpoint.check()?;
    let tokenizer = match checkpoint.tokenizer(tokenizer.as_deref()) {
        Err(error @ WeightsError::NoTokenizer { .. }) if is_gguf(output) => return Err(error.into()),
        // A folder without a tokenizer is still a checkpoint.
        Err(WeightsError::NoTokenizer { .. }) => None,
        loaded => Some(loaded?),
    };
    let bar = Terminal.start("converting", checkpoint.parameter_bytes(), Unit::Bytes);
    let count = |bytes| bar.advance(bytes);
    let format = match &tokenizer {
        Some(tokenizer) if is_gguf(output) => {
            write_gguf(&checkpoint, tokenizer, output, *dtype, &count)?;
            "gguf"
        }
        tokenizer => {
            write_hugging_face(&checkpoint, tokenizer.as_ref(), output, *dtype, &count)?;
            "safetensors"
        }
    };
    drop(bar);
    let weights = if is_gguf(output) { output.clone() } else { output.join("model.safetensors") };
    let bytes = usize::try_from(fs::metadata(weights)?.len())?;
    let dtype = dtype.name();
    if *json {
        output::write_json(&json!({ "output": output, "format": format, "dtype": dtype, "bytes": bytes }))?;
    } else {
        let size = output::mebibytes(bytes);
        output::write_line(&format!("wrote {}: {format}, {dtype}, {size}", output.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn is_gguf(output: &Path) -> bool {
    output.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"))
}
