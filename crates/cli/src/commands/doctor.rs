//! `gpt2 doctor`: describes this machine and measures its speed.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use candle_gpt2_engine::{
    CachedModel, Estimate, GpuSupport, Hub, HubOptions, LargePageUse, Machine, Memory, NvidiaDriver,
    Processor, Speeds, Terminal, process,
};
use candle_gpt2_generation::Clock;
use clap::Args;
use serde::Serialize;

use crate::model_arguments::ThreadArguments;
use crate::output::{grouped, write_json, write_line};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 doctor
  gpt2 doctor --json
  gpt2 doctor --threads 1    # the speed of one thread
  GPT2_INSTRUCTION_SET=avx2 gpt2 doctor    # what another processor would do
  GPT2_LARGE_PAGES=off gpt2 doctor    # what small pages cost

Measuring takes about two seconds; when other programs run, up to eight, and the report says so. `gpt2 bench` measures a model.")]
pub(crate) struct DoctorArguments {
    #[command(flatten)]
    pub(crate) threads: ThreadArguments,
    /// Print one JSON object: version, features, system, processor, memory, large_pages, gpu, hub,
    /// has_built_in_model, speeds (and whether the machine is busy), estimates (of GPT-2 124M)
    #[arg(long)]
    json: bool,
}

/// Output of `--json`.
#[derive(Serialize)]
struct Report {
    version: &'static str,
    /// Features that the program was built with.
    features: Vec<&'static str>,
    #[serde(flatten)]
    machine: Machine,
    speeds: Speeds,
    estimates: Vec<Estimate>,
}

pub(crate) fn run(arguments: &DoctorArguments, hub: &HubOptions) -> Result<ExitCode> {
    let machine = Machine::detect(hub);
    let start = Instant::now();
    let clock: Clock = Arc::new(move || start.elapsed());
    let speeds = Speeds::measured(&clock, &Terminal)?;
    let known = [
        ("built-in", machine.has_built_in_model),
        ("cuda", machine.gpu.cuda.is_built),
        ("grammar", cfg!(feature = "grammar")),
        ("hub", machine.hub.is_built),
        ("metal", machine.gpu.metal.is_built),
        ("parquet", cfg!(feature = "parquet")),
        ("serve", cfg!(feature = "serve")),
    ];
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        features: known.into_iter().filter(|(_, is_built)| *is_built).map(|(name, _)| name).collect(),
        machine,
        speeds,
        estimates: Estimate::of(&speeds),
    };
    if arguments.json {
        write_json(&report)?
    } else {
        print(&report)?
    }
    Ok(ExitCode::SUCCESS)
}

fn print(report: &Report) -> Result<()> {
    let Report { version, features, machine, speeds, estimates } = report;
    let line = |name: &str, text: &str| write_line(&format!("{name:<14}{text}"));
    let Machine { system, processor, memory, large_pages, gpu, hub, has_built_in_model } = machine;
    let Processor {
        name, architecture, instruction_set, instruction_sets, cache_bytes, cores, threads, ..
    } = processor;
    line("program", &format!("gpt2 {version}, features: {}", comma_separated(features)))?;
    line("system", &format!("{system}, {architecture}"))?;
    line("processor", name.as_deref().unwrap_or("unknown"))?;
    let others = instruction_sets.iter().filter(|set| *set != instruction_set).copied().collect::<Vec<_>>();
    line(
        "instructions",
        &format!(
            "{instruction_set}; also available: {} (select with GPT2_INSTRUCTION_SET){}",
            comma_separated(&others),
            if processor.is_amx_refused { "; the system refuses the processor's AMX" } else { "" }
        ),
    )?;
    let cache = cache_bytes.map_or(String::new(), |bytes| format!("; {} MiB of cache", bytes >> 20));
    line("cores", &format!("{cores}, {threads} used (--threads){cache}"))?;
    line("memory", &memory.map_or("unknown on this system".to_owned(), describe_memory))?;
    line("large pages", &describe_large_pages(large_pages))?;

    let driver = match &gpu.nvidia_driver {
        NvidiaDriver::Version(version) => format!("driver {version}"),
        NvidiaDriver::Present => "driver of unknown version".to_owned(),
        NvidiaDriver::Absent => "no driver found".to_owned(),
        NvidiaDriver::Unknown => "unknown on this system".to_owned(),
    };
    let gpus =
        if gpu.nvidia_gpus.is_empty() { String::new() } else { format!(", {}", gpu.nvidia_gpus.join(", ")) };
    line("NVIDIA GPU", &format!("{driver}{gpus}"))?;
    line("  in gpt2", &describe_gpu(&gpu.cuda))?;
    if *system == "macos" || gpu.metal.is_built {
        line("Apple's GPU", &describe_gpu(&gpu.metal))?;
    }

    line("models", if *has_built_in_model { "built-in" } else { "no built-in model" })?;
    print_hub(hub, &line)?;

    let billions = |count: f64| format!("{:.1}", count / 1e9);
    write_line("")?;
    line("reads", &format!("{} GB/s from memory", billions(speeds.read_bytes_per_s)))?;
    let in_large_pages = speeds.read_bytes_in_large_pages.map_or(String::new(), |bytes| {
        format!(", {}% of them in large pages", 100 * bytes.min(speeds.read_bytes) / speeds.read_bytes.max(1))
    });
    line(
        "",
        &format!(
            "(median of {} rounds over {} MiB{in_large_pages}; best {} GB/s)",
            speeds.read_rounds,
            speeds.read_bytes >> 20,
            billions(speeds.best_read_bytes_per_s)
        ),
    )?;
    line(
        "multiplies",
        &format!(
            "{} billion multiply-adds per second in f32, {} in q8, {} in q4",
            billions(speeds.f32_multiply_adds_per_s),
            billions(speeds.q8_multiply_adds_per_s),
            billions(speeds.q4_multiply_adds_per_s)
        ),
    )?;
    write_line(match speeds.is_busy {
        true => "The machine is busy and may be faster when idle. Estimated speed of GPT-2 124M:",
        false => "Estimated speed of GPT-2 124M (`gpt2 bench` measures a model):",
    })?;
    for Estimate { dtype, read_bytes, new_tokens_per_s, prompt_tokens_per_s } in estimates {
        line(
            &format!("  {dtype}"),
            &format!(
                "generates {new_tokens_per_s:>5.0} tokens/s ({:>3.0} MB of weights read per token), \
                 prefills {prompt_tokens_per_s:.0} tokens/s",
                *read_bytes as f64 / 1e6
            ),
        )?;
    }
    Ok(())
}

fn print_hub(hub: &Hub, line: &dyn Fn(&str, &str) -> Result<()>) -> Result<()> {
    let Hub { is_built, endpoint, is_offline, has_token, cache, models } = hub;
    if !is_built {
        return line("hub", "this program was built without the feature `hub`");
    }
    let network = match is_offline {
        true => "offline: only the cache is used (--offline or HF_HUB_OFFLINE)",
        false => "models are downloaded on first use (--offline prevents it)",
    };
    line("hub", &format!("{endpoint}; {network}"))?;
    line("  token", if *has_token { "set" } else { "not set (HF_TOKEN); public models need none" })?;
    line("  cache", &format!("{cache} (set with HF_HUB_CACHE or HF_HOME)"))?;
    for CachedModel { name, bytes, is_whole } in &models.gpt2 {
        let whole = if *is_whole { "" } else { ", incomplete" };
        line("", &format!("{name}, {} MB{whole}", grouped(usize::try_from(bytes / 1_000_000)?)))?;
    }
    match (models.gpt2.len(), models.others) {
        (0, 0) => line("", "no models"),
        (_, 0) => Ok(()),
        (_, others) => line("", &format!("{others} models other than GPT-2")),
    }
}

fn describe_memory(memory: Memory) -> String {
    let Memory { total_bytes, available_bytes, free_swap_bytes } = memory;
    let gibibytes = |bytes: u64| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30));
    let swap = if free_swap_bytes == 0 {
        "no swap".to_owned()
    } else {
        format!("{} of free swap", gibibytes(free_swap_bytes))
    };
    format!("{}, {} available, {swap}", gibibytes(total_bytes), gibibytes(available_bytes))
}

fn describe_large_pages(pages: &LargePageUse) -> String {
    let system = match pages.system.as_deref() {
        Some("always") => "the system uses them for all memory",
        Some("madvise") => "the system uses them for memory that requests them",
        Some("never") => "disabled by the system",
        Some(other) => other,
        None => "unknown on this system",
    };
    let requests = if pages.is_asked { "requests" } else { "does not request" };
    format!("{system}; the program {requests} them (set by {})", process::LARGE_PAGES)
}

fn describe_gpu(support: &GpuSupport) -> String {
    let GpuSupport { device, free_bytes, problem, .. } = support;
    match (device, problem) {
        (Some(device), _) => {
            let free = free_bytes.map(|bytes| format!(", {:.1} GiB free", bytes as f64 / f64::from(1 << 30)));
            format!("available as --device {device}{}", free.unwrap_or_default())
        }
        (None, problem) => problem.clone().unwrap_or_default(),
    }
}

fn comma_separated(names: &[&str]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}
