//! `gpt2 compress` and `gpt2 decompress`: any file by a model and an arithmetic coder, with gzip's manners.

use std::io::{BufReader, sink};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use candle_gpt2_compression::{Compressed, Compressor, SUFFIX, Summary};
use candle_gpt2_engine::{BUILT_IN, DeviceChoice, HubOptions, ModelOptions, WeightDType};
use clap::{Arg, Args};
use serde::Serialize;

use super::in_place::{InPlaceArguments, Target, check_terminal};
use super::train::InterruptedTerminal;
use crate::exit::UsageError;
use crate::model_arguments::{CommonArguments, ModelArguments};
use crate::progress::Terminal;
use crate::{interrupt, output};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 compress letters.txt                  # it becomes letters.txt.gpt2z
  gpt2 compress -k letters.txt --model gpt2      # keep letters.txt
  gpt2 compress < letters.txt > letters.gpt2z
  gpt2 compress --estimate letters.txt --json
  gpt2 decompress letters.txt.gpt2z

Any bytes can be compressed; text like the model's training data compresses best. Decompressing needs the \
same model, which computes the same logits and restores every byte, with any number of threads. A megabyte \
takes minutes: the model reads every token.")]
pub(crate) struct CompressArguments {
    #[command(flatten)]
    pub(crate) place: InPlaceArguments,
    /// Only report bits per byte; write and remove nothing
    #[arg(long, conflicts_with_all = ["keep", "force", "stdout", "out"])]
    pub(crate) estimate: bool,
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    /// Tokens per window: shorter windows are faster to decompress and compress less [default: the model's context]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) context: Option<usize>,
    /// Print one JSON object: output, bytes, compressed_bytes, bits_per_byte, tokens, model_bits
    #[arg(long, conflicts_with = "stdout")]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 decompress letters.txt.gpt2z          # it becomes letters.txt
  gpt2 decompress -c letters.txt.gpt2z | less
  gpt2 decompress letters.txt.gpt2z --model gpt2 -o copy.txt

The model must be the one that compressed the file; its precision is recorded in the file. A file that is \
damaged, or was compressed with another model, produces no output.")]
pub(crate) struct DecompressArguments {
    #[command(flatten)]
    pub(crate) place: InPlaceArguments,
    /// The model that compressed the file: a folder, a weights file, a name on the Hugging Face Hub, or built-in
    #[arg(short, long, value_name = "MODEL", default_value = BUILT_IN)]
    pub(crate) model: PathBuf,
    /// Tokenizer: a tokenizer.json, or a folder with one or with vocab.json and merges.txt [default: the model's folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) common: CommonArguments,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    /// The file that was written.
    output: Option<PathBuf>,
    #[serde(flatten)]
    summary: Summary,
}

/// The precision of the weights: 8-bit integers, if no other is asked for.
pub(crate) fn dtype(argument: Arg) -> Arg {
    argument
        .default_value(WeightDType::Q8.name())
        .help("Precision of the weights: f32, f16, q8, q6, q5 or q4")
}

/// Results are the same everywhere on CPUs alone.
pub(crate) fn device(argument: Arg) -> Arg {
    argument.default_value("cpu").hide(true)
}

pub(crate) fn run_compress(arguments: &CompressArguments, hub: &HubOptions) -> Result<ExitCode> {
    let CompressArguments { place, estimate, model, context, json } = arguments;
    let mut source = place.source()?;
    let target = match estimate {
        true => None,
        false => Some(place.target(with_suffix)?),
    };
    if let Some(target) = &target {
        check_terminal(target, place.force)?;
        if *json && matches!(target, Target::StandardOutput) {
            return Err(
                UsageError("--json: standard output is taken by the data; give --out FILE".into()).into()
            );
        }
    }
    let loaded = model.open(hub)?.load(&Terminal)?;
    let compressor = Compressor::new(&loaded, &name(&model.options.model), *context)?;
    interrupt::end_job_without_result()?;
    let length = source.length;
    let mut compress = |to: &mut dyn std::io::Write| {
        Ok(compressor.compress(&mut source.reader, length, to, &InterruptedTerminal)?)
    };
    let (output, summary) = match target {
        None => (None, compress(&mut sink())?),
        Some(target) => {
            let summary = place.write(&target, compress)?;
            (if let Target::File(path) = target { Some(path) } else { None }, summary)
        }
    };
    if *json {
        output::write_json(&Report { output, summary })?;
    } else if *estimate {
        let Summary { bytes, compressed_bytes, bits_per_byte, .. } = summary;
        let bits = bits_per_byte.map_or("-".to_owned(), |bits| format!("{bits:.3}"));
        let grouped = |bytes| output::grouped(usize::try_from(bytes).unwrap_or(usize::MAX));
        let (bytes, compressed) = (grouped(bytes), grouped(compressed_bytes));
        output::write_line(&format!("{bits} bits per byte: {bytes} bytes become {compressed}"))?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn run_decompress(arguments: &DecompressArguments, hub: &HubOptions) -> Result<ExitCode> {
    let DecompressArguments { place, model, tokenizer, common } = arguments;
    let source = place.source()?;
    let target = place.target(without_suffix)?;
    let compressed = Compressed::open(BufReader::new(source.reader))?;
    let header = compressed.header();
    let options = ModelOptions {
        device: DeviceChoice::Cpu,
        dtype: Some(header.dtype),
        kv_dtype: Some(header.kv_dtype),
        tokenizer: tokenizer.clone(),
        ..common.checkpoint_options(model, hub)
    };
    let loaded = options.open(&Terminal)?.load(&Terminal)?;
    interrupt::end_job_without_result()?;
    place.write(&target, |to| Ok(compressed.decompress(&loaded, to, &InterruptedTerminal)?))?;
    Ok(ExitCode::SUCCESS)
}

/// What a model is called in a file: the last part of its path.
fn name(model: &Path) -> String {
    model.file_name().unwrap_or(model.as_os_str()).to_string_lossy().into_owned()
}

fn with_suffix(path: &Path) -> Result<PathBuf> {
    if path.as_os_str().as_encoded_bytes().ends_with(SUFFIX.as_bytes()) {
        bail!("{}: it ends in {SUFFIX} already; compress it again with --out FILE", path.display());
    }
    let mut name = path.as_os_str().to_owned();
    name.push(SUFFIX);
    Ok(name.into())
}

fn without_suffix(path: &Path) -> Result<PathBuf> {
    let is_named = path
        .extension()
        .is_some_and(|extension| SUFFIX.strip_prefix('.').is_some_and(|suffix| extension == suffix));
    if !is_named {
        bail!(
            "{}: it does not end in {SUFFIX}; name the output with --out FILE, or --stdout",
            path.display()
        );
    }
    Ok(path.with_extension(""))
}
