//! `gpt2 convert`: write a checkpoint in another format.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use gpt2_weights::{WeightsError, WrittenDType, write_gguf, write_hugging_face};
use serde_json::json;

use crate::arguments::ConvertArguments;
use crate::hub::Network;
use crate::{UsageError, model, output, progress};

pub(crate) fn run(arguments: &ConvertArguments, network: Network) -> Result<ExitCode> {
    let ConvertArguments { input, output, dtype, tokenizer, json } = arguments;
    if !is_gguf(output) && matches!(dtype, WrittenDType::Q8_0 | WrittenDType::Q4_0) {
        let name = dtype.name();
        let message = format!(
            "--dtype {name}: a Hugging Face folder holds f32, f16 or bf16; name a .gguf file for {name}"
        );
        return Err(UsageError(message).into());
    }
    let checkpoint = model::open(input, network)?;
    checkpoint.check()?;
    let tokenizer = match checkpoint.tokenizer(tokenizer.as_deref()) {
        Err(error @ WeightsError::NoTokenizer { .. }) if is_gguf(output) => return Err(error.into()),
        // A folder without a tokenizer is still a checkpoint.
        Err(WeightsError::NoTokenizer { .. }) => None,
        loaded => Some(loaded?),
    };
    let bar = progress::bytes("converting", checkpoint.parameter_bytes());
    let count = |bytes| bar.inc(bytes);
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
    bar.finish_and_clear();
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
