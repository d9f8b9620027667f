//! `gpt2 convert`: writes a checkpoint in another format.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use candle_gpt2_engine::{ADAPTER_BASE, ConvertOptions, HubOptions, ModelOptions};
use candle_gpt2_weights::WrittenDType;
use clap::Args;

use crate::model_arguments::{AdapterArguments, CommonArguments};
use crate::output;
use crate::progress::Terminal;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 convert ckpt.pt gpt2-hf
  gpt2 convert models/124M gpt2-hf --dtype f16
  gpt2 convert gpt2-hf gpt2.gguf --dtype q8_0
  gpt2 convert gpt2 merged --adapter adapted/adapter
  gpt2 convert merged --adapter adapted/adapter    # its own base model

The output appears only once it is complete, and existing files are never overwritten. Settings next to the weights (generation_config.json, \
tokenizer_config.json, special tokens, chat template) are kept; a note names those that GGUF cannot hold.")]
pub(crate) struct ConvertArguments {
    /// Checkpoint folder, weights file in any format that the program reads, or a model on the Hub (gpt2,
    /// owner/name[@revision])
    #[arg(value_name = "IN")]
    pub(crate) input: PathBuf,
    /// Output: a GGUF file if the name ends in .gguf, the weights alone if it ends in .safetensors, else a
    /// Hugging Face folder; a slash after a name like x.bin makes it a folder
    #[arg(value_name = "OUT", required_unless_present = "adapter")]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) adapter: AdapterArguments,
    /// Type of the written weights: f32, f16, bf16, and for GGUF q8_0, q6_k, q5_k, q5_0, q4_k and q4_0
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub(crate) dtype: WrittenDType,
    /// Tokenizer to write: a tokenizer.json, spiece.model or vocab.txt, or a folder with one of them or
    /// with vocab.json and merges.txt [default: the input's]
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) common: CommonArguments,
    /// Print one JSON object: output, format, dtype, bytes, notes (settings that the output does not hold)
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(arguments: &ConvertArguments, hub: &HubOptions) -> Result<ExitCode> {
    let ConvertArguments { input, output, adapter, dtype, tokenizer, json, common } = arguments;
    let (input, output) = match output {
        Some(output) => (input.as_path(), output),
        None => (Path::new(ADAPTER_BASE), input),
    };
    let options = ConvertOptions { output: output.clone(), dtype: *dtype };
    let model = ModelOptions {
        tokenizer: tokenizer.clone(),
        adapter: adapter.adapter.clone(),
        ..common.checkpoint_options(input, hub)
    };
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
