//! `gpt2 convert`: write a checkpoint in another format.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use candle_gpt2_engine::{ConvertOptions, HubOptions, ModelOptions};
use candle_gpt2_weights::WrittenDType;
use clap::Args;

use crate::model_arguments::CommonArguments;
use crate::output;
use crate::progress::Terminal;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 convert ckpt.pt gpt2-hf
  gpt2 convert models/124M gpt2-hf --dtype f16
  gpt2 convert gpt2-hf gpt2.gguf --dtype q8_0

The output appears only once it is complete, and existing files are never overwritten.")]
pub(crate) struct ConvertArguments {
    /// Checkpoint folder, weights file in any format that the program reads, or a model on the Hub (gpt2, owner/name[@revision])
    #[arg(value_name = "IN")]
    pub(crate) input: PathBuf,
    /// Output: a GGUF file if the name ends in .gguf, else a Hugging Face folder
    #[arg(value_name = "OUT")]
    pub(crate) output: PathBuf,
    /// Type of the written weights: f32, f16, bf16, and for GGUF q8_0 and q4_0
    #[arg(long, value_name = "TYPE", default_value = "f32")]
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

pub(crate) fn run(arguments: &ConvertArguments, hub: &HubOptions) -> Result<ExitCode> {
    let ConvertArguments { input, output, dtype, tokenizer, json, common } = arguments;
    let options = ConvertOptions { output: output.clone(), dtype: *dtype };
    let model = ModelOptions { tokenizer: tokenizer.clone(), ..common.checkpoint_options(input, hub) };
    let written = model.convert(&options, &Terminal)?;
    if *json {
        output::write_json(&written)?;
    } else {
        let size = output::mebibytes(written.bytes);
        let (format, dtype) = (written.format, written.dtype);
        output::write_line(&format!("wrote {}: {format}, {dtype}, {size}", output.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}
