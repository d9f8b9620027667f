//! `gpt2 compress` and `gpt2 decompress`: compress any file with a model and an arithmetic coder.

use std::io::{BufReader, sink};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use candle_gpt2_compression::{Compressed, Compressor, SUFFIX, Summary};
use candle_gpt2_engine::{AdapterChoice, BUILT_IN, DeviceChoice, HubOptions, ModelOptions, WeightDType};
use clap::{Arg, Args};
use serde::Serialize;

use super::in_place::{InPlaceArguments, Target, check_terminal};
use super::train::InterruptedTerminal;
use crate::exit::UsageError;
use crate::model_arguments::{AdapterArguments, CommonArguments, ModelArguments};
use crate::progress::Terminal;
use crate::{interrupt, output};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 compress letters.txt                  # writes letters.txt.gpt2z
  gpt2 compress --rm letters.txt --model gpt2    # and removes letters.txt
  gpt2 compress < letters.txt > letters.gpt2z
  gpt2 compress --estimate letters.txt --json
  gpt2 decompress letters.txt.gpt2z

Any bytes can be compressed; text like the model's training data compresses best, and for other text gzip \
or a larger model (--model gpt2) does better. Decompressing needs the same model, which computes the same \
logits and restores every byte, with any number of threads. A megabyte takes minutes: the model reads every \
token.")]
pub(crate) struct CompressArguments {
    #[command(flatten)]
    pub(crate) place: InPlaceArguments,
    /// Only report bits per byte; write nothing
    #[arg(long, conflicts_with_all = ["rm", "keep", "force", "stdout", "out"])]
    pub(crate) estimate: bool,
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    /// Tokens per window: shorter windows are faster to decompress and compress less [default: the model's
    /// context]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) context: Option<usize>,
    /// Print one JSON object: output, bytes, compressed_bytes, bits_per_byte, tokens, model_bits
    #[arg(long, conflicts_with = "stdout")]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 decompress letters.txt.gpt2z          # writes letters.txt
  gpt2 decompress -c letters.txt.gpt2z | less
  gpt2 decompress letters.txt.gpt2z --model gpt2 -o copy.txt

The model must be the one that compressed the file; its precision is recorded in the file. A file that is \
damaged, or was compressed with another model, produces no output.")]
pub(crate) struct DecompressArguments {
    #[command(flatten)]
    pub(crate) place: InPlaceArguments,
    /// The model that compressed the file: a folder, a weights file, a name on the Hugging Face Hub, or
    /// built-in
    #[arg(short, long, value_name = "MODEL", default_value = BUILT_IN)]
    pub(crate) model: PathBuf,
    #[command(flatten)]
    pub(crate) adapter: AdapterArguments,
    /// Tokenizer: a tokenizer.json, spiece.model or vocab.txt, or a folder with one of them or with
    /// vocab.json and merges.txt [default: the model's folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) common: CommonArguments,
}

/// Output of `--json`.
#[derive(Serialize)]
struct Report {
    /// Path of the written file; `None` for an estimate.
    output: Option<PathBuf>,
    #[serde(flatten)]
    summary: Summary,
}

/// Sets the default precision of the weights to 8-bit integers.
pub(crate) fn dtype(argument: Arg) -> Arg {
    argument
        .default_value(WeightDType::Q8.name())
        .help("Precision of the weights: f32, f16, q8, q6, q5 or q4")
}

/// Hides the device option: the default is the CPU.
///
/// Only CPUs give the same results everywhere.
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
            return Err(UsageError("--json: standard output carries the data; use --out FILE".into()).into());
        }
    }
    let options = model.options(hub).with_base_model(&Terminal)?;
    let loaded = model.open_as(&options)?.load(&Terminal)?;
    let compressor = Compressor::new(&loaded, &name(&options), *context)?;
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
        return Ok(ExitCode::SUCCESS);
    }
    let Summary { bytes, compressed_bytes, bits_per_byte, .. } = summary;
    let bits = bits_per_byte.map_or("-".to_owned(), |bits| format!("{bits:.3}"));
    let grouped = |bytes| output::grouped(usize::try_from(bytes).unwrap_or(usize::MAX));
    let (before, after) = (grouped(bytes), grouped(compressed_bytes));
    match output {
        Some(path) => {
            let share = compressed_bytes as f64 * 100.0 / (bytes.max(1)) as f64;
            let path = path.display();
            output::write_line(&format!(
                "{path}: {after} bytes, {share:.1}% of {before}, {bits} bits per byte"
            ))?;
        }
        None if *estimate => {
            output::write_line(&format!("{bits} bits per byte: {before} bytes become {after}"))?
        }
        None => {}
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn run_decompress(arguments: &DecompressArguments, hub: &HubOptions) -> Result<ExitCode> {
    let DecompressArguments { place, model, adapter, tokenizer, common } = arguments;
    let source = place.source()?;
    let target = place.target(without_suffix)?;
    let compressed = Compressed::open(BufReader::new(source.reader))?;
    let header = compressed.header();
    let options = ModelOptions {
        device: DeviceChoice::Cpu,
        dtype: Some(header.dtype),
        kv_dtype: Some(header.kv_dtype),
        tokenizer: tokenizer.clone(),
        adapter: adapter.adapter.clone(),
        ..common.checkpoint_options(model, hub)
    };
    let loaded = options.open(&Terminal)?.load(&Terminal)?;
    interrupt::end_job_without_result()?;
    place.write(&target, |to| Ok(compressed.decompress(&loaded, to, &InterruptedTerminal)?))?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the names of the model and its adapters, without folders.
fn name(options: &ModelOptions) -> String {
    let last = |path: &Path| path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    let adapters = options.adapter.iter().map(|adapter| {
        let path = last(&adapter.path);
        AdapterChoice { path: path.into(), ..adapter.clone() }.to_string()
    });
    std::iter::once(last(&options.model)).chain(adapters).collect::<Vec<_>>().join(" + ")
}

fn with_suffix(path: &Path) -> Result<PathBuf> {
    if path.as_os_str().as_encoded_bytes().ends_with(SUFFIX.as_bytes()) {
        bail!("{}: already ends in {SUFFIX}; use --out FILE to compress it again", path.display());
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
        bail!("{}: does not end in {SUFFIX}; use --out FILE or --stdout", path.display());
    }
    Ok(path.with_extension(""))
}
