//! `gpt2 bench`: measures how fast the model loads, prefills and decodes on this machine.

use std::collections::BTreeMap;
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::Result;
use candle_core::{D, DType, Device, Tensor};
use candle_gpt2::{Gpt2Cache, Gpt2LMHeadModel, LogitsFor, Pass};
use candle_gpt2_arithmetic::region_count;
use candle_gpt2_engine::{HubOptions, LargePages, ModelOptions, device_name, process};
use candle_gpt2_generation::{GenerationConfig, History, Sampler};
use clap::{ArgMatches, Args, FromArgMatches};
use serde::Serialize;

use crate::exit::UsageError;
use crate::model_arguments::{ModelArguments, PositionalModel};
use crate::output;
use crate::progress::Terminal;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 bench MODEL
  gpt2 bench MODEL --dtype q8 --threads 2 --json
  gpt2 bench MODEL --dtype q8 --threads 1,2,4,8,16 --json    # a line each
  gpt2 bench MODEL --device cuda --dtype f16 --json
  GPT2_INSTRUCTION_SET=avx2 gpt2 bench MODEL --json    # or portable, avx512, neon …: what another processor would get

Prefill reads a prompt and computes the logits of its last position. Decode generates 128 tokens after 8, \
as far as they fit the context, and 64 after 896, by greedy search. pass_at_512 is the time of a forward pass over 2, 4 and 8 tokens, with \
the logits of each, relative to a pass over one, after 512 tokens. decode_batch generates 32 tokens after 8 \
at batch sizes 8 and 32, and counts the tokens of all sequences. regions_per_token is the number of \
parallel regions in a decode step, page_faults_per_token the number of page faults.")]
pub(crate) struct BenchArguments {
    #[command(flatten)]
    threads: ThreadCounts,
    #[command(flatten)]
    positional: PositionalModel,
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    /// Print one JSON object: device, dtype, kv_dtype, instruction_set, records_steps (NVIDIA GPUs only),
    /// threads, load_s, large_pages_mib, peak_rss_mib, prefill, decode, regions_per_token,
    /// page_faults_per_token, decode_at_896, pass_at_512, decode_batch
    #[arg(long)]
    pub(crate) json: bool,
}

/// All values of `--threads`; the model arguments hold only the first.
#[derive(Debug, Default)]
struct ThreadCounts(Vec<u16>);

impl ThreadCounts {
    const OPTION: &str = "threads";
}

impl FromArgMatches for ThreadCounts {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut counts = Self::default();
        counts.update_from_arg_matches(matches)?;
        Ok(counts)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0 = matches.get_many::<u16>(Self::OPTION).into_iter().flatten().copied().collect();
        Ok(())
    }
}

/// Reads all values of `--threads`, an option of the model arguments; see [`several_thread_counts`].
impl Args for ThreadCounts {
    fn augment_args(command: clap::Command) -> clap::Command {
        command
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        command
    }
}

/// Lets `--threads` accept several values.
pub(crate) fn several_thread_counts(option: clap::Arg) -> clap::Arg {
    option
        .value_delimiter(',')
        .value_name("N,…")
        .help("Number of threads [default: all that this process may use]; several values are measured one after another")
}

/// Prompt lengths for the prefill measurement, in tokens.
const PREFILL_TOKENS: [usize; 3] = [128, 512, 1024];
/// Number of prefill runs per prompt; the median is reported.
const PREFILL_RUNS: usize = 3;
/// Numbers of prompt tokens and new tokens for decoding early in the context.
///
/// `DECODE_AT_896` measures decoding late in the context.
const DECODE: (usize, usize) = (8, 128);
const DECODE_AT_896: (usize, usize) = (896, 64);
/// Number of cached tokens before the timed passes.
///
/// Passes over one and over several tokens alternate, and the median is reported.
const PASSES_AT: usize = 512;
const PASSES: [usize; 3] = [2, 4, 8];
const PASS_RUNS: usize = 25;
/// Numbers of prompt tokens and new tokens in the unmeasured warm-up run.
const WARM_UP: (usize, usize) = (8, 8);
/// Numbers of prompt tokens and new tokens for batched decoding, with the sizes in `BATCHES`.
const DECODE_BATCH: (usize, usize) = (8, 32);
const BATCHES: [usize; 2] = [8, 32];
/// Number of unmeasured warm-up steps on a GPU.
const WARM_UP_STEPS: usize = 6;

/// Output of `--json`.
///
/// Speeds are in tokens per second. A speed is absent if the context is too short to measure it.
#[derive(Serialize)]
struct Report {
    device: String,
    dtype: &'static str,
    kv_dtype: &'static str,
    /// Instruction set of the CPU; absent on GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    instruction_set: Option<&'static str>,
    /// Whether decoding and multi-token passes replayed recorded steps; absent except on NVIDIA GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    records_steps: Option<bool>,
    threads: usize,
    load_s: f64,
    /// Size of the memory in large pages; absent if the system does not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    large_pages_mib: Option<f64>,
    /// Peak memory of the process for one sequence; absent if the system does not report it.
    peak_rss_mib: Option<f64>,
    prefill: BTreeMap<usize, f64>,
    decode: Option<f64>,
    /// Number of parallel regions per `decode` step; absent on GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    regions_per_token: Option<f64>,
    /// Number of page faults per `decode` step; absent if the system does not report them.
    #[serde(skip_serializing_if = "Option::is_none")]
    page_faults_per_token: Option<f64>,
    decode_at_896: Option<f64>,
    /// Time for a pass over N tokens at position 512, relative to a one-token pass, keyed by N.
    pass_at_512: BTreeMap<usize, f64>,
    /// Combined decoding speed for all sequences in a batch, keyed by batch size.
    decode_batch: BTreeMap<usize, f64>,
}

pub(crate) fn run(arguments: &BenchArguments, hub: &HubOptions) -> Result<ExitCode> {
    if arguments.threads.0.len() > 1 {
        return each_thread_count(&arguments.threads.0);
    }
    // Do not load the tokenizer, because its memory would count toward the peak.
    let options = arguments.model.options(hub);
    let options = ModelOptions { model: arguments.positional.or(&options.model), ..options };
    let device = options.open_device(&Terminal)?;
    process::use_tf32(options.tf32);
    let checkpoint = options.open_checkpoint(&Terminal)?;
    options.unpacked_note(&checkpoint, &device).iter().for_each(|note| output::print_note(note));
    let start = Instant::now();
    let model = options.load(&checkpoint, &device, &Terminal)?;
    device.synchronize()?;
    let load_s = start.elapsed().as_secs_f64();
    let large_pages_mib = LargePages::now().bytes.map(|bytes| bytes as f64 / f64::from(1 << 20));
    let mut bench = Bench { model: &model, device: &device, records_steps: None };

    let n_positions = model.config().n_positions;
    let needed = WARM_UP.0 + WARM_UP.1;
    if n_positions < needed {
        let message = format!(
            "a context of {n_positions} tokens is too short to measure; choose a model with a context of at least {needed} tokens"
        );
        return Err(UsageError(message).into());
    }
    let new_tokens = DECODE.1.min(n_positions - DECODE.0);
    if new_tokens < DECODE.1 {
        let message = format!(
            "the context has {n_positions} tokens: decode generates {new_tokens} after {} instead of {}",
            DECODE.0, DECODE.1
        );
        output::print_note(&message);
    }
    // Warm up: the first tokens start the threads and allocate memory that later tokens reuse.
    bench.decode(WARM_UP, 1)?;
    let before = (region_count(), page_faults());
    let decode = bench.decode((DECODE.0, new_tokens), 1)?;
    // The prefill counts as one more step.
    let steps = (new_tokens + 1) as f64;
    let regions_per_token = device.is_cpu().then(|| (region_count() - before.0) as f64 / steps);
    let page_faults_per_token =
        page_faults().zip(before.1).map(|(now, before)| (now - before) as f64 / steps);
    let mut prefill = BTreeMap::new();
    for tokens in PREFILL_TOKENS.into_iter().filter(|tokens| *tokens <= n_positions) {
        prefill.insert(tokens, bench.prefill(tokens)?);
    }
    let decode_at_896 = bench.decode(DECODE_AT_896, 1)?;
    // Measure before the batches, which need more memory than a single sequence.
    let peak_rss_mib = peak_rss_mib();
    let pass_at_512 = bench.passes()?;
    let mut decode_batch = BTreeMap::new();
    for texts in BATCHES {
        decode_batch.extend(bench.decode(DECODE_BATCH, texts)?.map(|speed| (texts, speed)));
    }
    let report = Report {
        device: device_name(&device),
        dtype: options.weight_type(&checkpoint, &device),
        kv_dtype: model.kv_dtype().name(),
        instruction_set: device.is_cpu().then(process::instruction_set),
        records_steps: bench.records_steps,
        threads: process::thread_count(),
        load_s,
        large_pages_mib,
        peak_rss_mib,
        prefill,
        decode,
        regions_per_token,
        page_faults_per_token,
        decode_at_896,
        pass_at_512,
        decode_batch,
    };
    if arguments.json {
        output::write_json(&report)?;
    } else {
        print(&report)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print(report: &Report) -> Result<()> {
    let line =
        |name: &str, value: f64, unit: &str| output::write_line(&format!("{name:<16}{value:>10.1} {unit}"));
    let Report { device, dtype, kv_dtype, threads, .. } = report;
    let instructions = report.instruction_set.map_or(String::new(), |name| format!(" ({name})"));
    output::write_line(&format!(
        "{device}{instructions}, weights {dtype}, cache {kv_dtype}, {threads} threads"
    ))?;
    line("load", report.load_s * 1e3, "ms")?;
    if let Some(bytes) = report.large_pages_mib {
        line("in large pages", bytes, "MiB")?;
    }
    if let Some(peak) = report.peak_rss_mib {
        line("peak memory", peak, "MiB")?;
    }
    for (tokens, speed) in &report.prefill {
        line(&format!("prefill {tokens}"), *speed, "tokens/s")?;
    }
    for (name, speed) in [("decode", report.decode), ("decode at 896", report.decode_at_896)] {
        if let Some(speed) = speed {
            line(name, speed, "tokens/s")?;
        }
    }
    for (name, count) in
        [("parallel regions", report.regions_per_token), ("page faults", report.page_faults_per_token)]
    {
        if let Some(count) = count {
            line(name, count, "per token")?;
        }
    }
    for (tokens, times) in &report.pass_at_512 {
        output::write_line(&format!("{tokens}-token pass    {times:>10.2} times a one-token pass"))?;
    }
    for (texts, speed) in &report.decode_batch {
        line(&format!("decode batch {texts}"), *speed, "tokens/s")?;
    }
    Ok(())
}

struct Bench<'a> {
    model: &'a Gpt2LMHeadModel,
    device: &'a Device,
    /// Whether all decoding and multi-token passes so far replayed recorded steps.
    records_steps: Option<bool>,
}

impl Bench<'_> {
    /// Measures prefill speed in tokens per second, including the last position's logits.
    fn prefill(&self, tokens: usize) -> Result<f64> {
        let mut elapsed_s = Vec::new();
        for _ in 0..PREFILL_RUNS {
            let mut cache = self.model.new_cache(1, tokens)?;
            let prompt = self.prompt(1, tokens)?;
            self.device.synchronize()?;
            let start = Instant::now();
            self.next_tokens(&prompt, &mut cache)?;
            self.device.synchronize()?;
            elapsed_s.push(start.elapsed().as_secs_f64());
        }
        elapsed_s.sort_by(f64::total_cmp);
        Ok(tokens as f64 / elapsed_s[PREFILL_RUNS / 2])
    }

    /// Measures greedy decoding speed for a batch in tokens per second, excluding the prefill.
    ///
    /// Returns `None` if the tokens do not fit in the context.
    fn decode(&mut self, (prompt_tokens, new_tokens): (usize, usize), texts: usize) -> Result<Option<f64>> {
        if prompt_tokens + new_tokens > self.model.config().n_positions {
            return Ok(None);
        }
        let mut cache = self.model.new_cache(texts, prompt_tokens + new_tokens)?;
        let prompt = self.prompt(texts, prompt_tokens)?;
        let mut tokens = self.next_tokens(&prompt, &mut cache)?;
        if !self.device.is_cpu() {
            // Run untimed steps, because the first ones load kernels and record a step for replay.
            for _ in 0..WARM_UP_STEPS {
                self.next_tokens(&tokens, &mut cache)?;
            }
            (0..texts).try_for_each(|text| cache.truncate(text, prompt_tokens))?;
        }
        self.note_recording(&cache, 1);
        self.device.synchronize()?;
        let start = Instant::now();
        for _ in 0..new_tokens {
            tokens = self.next_tokens(&tokens, &mut cache)?;
        }
        self.device.synchronize()?;
        Ok(Some((texts * new_tokens) as f64 / start.elapsed().as_secs_f64()))
    }

    /// Updates `records_steps` after passes over `tokens` tokens.
    ///
    /// Prints the first reason for not recording.
    fn note_recording(&mut self, cache: &Gpt2Cache, tokens: usize) {
        if !self.device.is_cuda() {
            return;
        }
        let recording = cache.recording(tokens).unwrap_or(Err("recording took too long"));
        if let (Err(reason), None | Some(true)) = (recording, self.records_steps) {
            output::print_note(&format!("steps are not recorded (tokens per step: {tokens}): {reason}"));
        }
        *self.records_steps.get_or_insert(true) &= recording.is_ok();
    }

    /// Measures the time for multi-token passes after a long prefix, relative to a one-token pass.
    fn passes(&mut self) -> Result<BTreeMap<usize, f64>> {
        let longest = PASSES_AT + PASSES[PASSES.len() - 1];
        if longest > self.model.config().n_positions {
            return Ok(BTreeMap::new());
        }
        let mut cache = self.model.new_cache(1, longest)?;
        self.next_tokens(&self.prompt(1, PASSES_AT)?, &mut cache)?;
        let mut seconds: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        for _ in 0..PASS_RUNS {
            for tokens in [1].into_iter().chain(PASSES) {
                let ids = self.prompt(1, tokens)?;
                self.device.synchronize()?;
                let start = Instant::now();
                self.model.forward_with(
                    &ids,
                    LogitsFor::EveryToken,
                    Some(&mut cache),
                    &mut Pass::inference(),
                )?;
                self.device.synchronize()?;
                seconds.entry(tokens).or_default().push(start.elapsed().as_secs_f64());
                cache.truncate(0, PASSES_AT)?;
            }
        }
        PASSES.iter().for_each(|tokens| self.note_recording(&cache, *tokens));
        let mut medians = seconds.into_iter().map(|(tokens, mut seconds)| {
            seconds.sort_by(f64::total_cmp);
            (tokens, seconds[PASS_RUNS / 2])
        });
        let Some((_, one)) = medians.next() else { return Ok(BTreeMap::new()) };
        Ok(medians.map(|(tokens, seconds)| (tokens, seconds / one)).collect())
    }

    /// Returns the most probable next token of each sequence, `(B, 1)`, for `ids` `(B, T)`.
    ///
    /// On a GPU, the result stays on the device and decoding continues without synchronization.
    fn next_tokens(&self, ids: &Tensor, cache: &mut Gpt2Cache) -> Result<Tensor> {
        let logits =
            self.model.forward_with(ids, LogitsFor::LastToken, Some(cache), &mut Pass::inference())?;
        let (texts, _, _) = logits.dims3()?;
        let logits = logits.squeeze(1)?;
        if !self.device.is_cpu() {
            return Ok(logits.argmax_keepdim(D::Minus1)?);
        }
        let mut sampler = Sampler::new(&GenerationConfig::default(), Vec::new(), 0);
        let history = History { ids: &[], prompt_len: 0 };
        let rows = logits.to_dtype(DType::F32)?.to_vec2::<f32>()?;
        let ids = rows.into_iter().map(|mut logits| Ok(sampler.sample(history, &mut logits)?));
        Ok(Tensor::from_vec(ids.collect::<Result<Vec<_>>>()?, (texts, 1), self.device)?)
    }

    /// Creates token ids spread over the vocabulary, `(texts, tokens)`.
    fn prompt(&self, texts: usize, tokens: usize) -> Result<Tensor> {
        let id = |index: usize| u32::try_from((index * 7919 + 3) % self.model.config().vocab_size);
        let ids = (0..texts * tokens).map(id).collect::<Result<Vec<_>, _>>()?;
        Ok(Tensor::from_vec(ids, (texts, tokens), self.device)?)
    }
}

/// Runs this program once per thread count, because a process cannot change its thread count.
fn each_thread_count(counts: &[u16]) -> Result<ExitCode> {
    let option = format!("--{}", ThreadCounts::OPTION);
    let mut others = Vec::new();
    let mut given = std::env::args_os().skip(1);
    while let Some(argument) = given.next() {
        if argument.to_str() == Some(&option) {
            given.next();
        } else if !argument.to_str().is_some_and(|argument| argument.starts_with(&format!("{option}="))) {
            others.push(argument);
        }
    }
    for threads in counts {
        let one = Command::new(std::env::current_exe()?)
            .args(&others)
            .arg(format!("{option}={threads}"))
            .status()?;
        if !one.success() {
            return Ok(one
                .code()
                .and_then(|code| u8::try_from(code).ok())
                .map_or(ExitCode::FAILURE, ExitCode::from));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns Linux's count of minor page faults, which need no disk access.
fn page_faults() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is the program name in parentheses, which may contain spaces. The tenth is the number
    // of minor faults.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(7)?.parse().ok()
}

fn peak_rss_mib() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib / 1024.0)
}
