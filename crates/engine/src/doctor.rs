//! Hardware resources of this machine, and its memory and compute speed.
//!
//! [`Machine`] holds facts that are read without starting or changing anything; a value that the system does
//! not report is `None`. Most facts are available only on Linux. [`Speeds`] holds measurements, which take
//! several seconds, and [`Estimate`] converts them to token rates of GPT-2.

use std::fs;
use std::path::Path;
use std::thread::available_parallelism;
use std::time::Duration;

use crate::{LargePages, ProcessMemory, free_memory};
use candle_core::Device;
use candle_gpt2::Gpt2Config;
use candle_gpt2_arithmetic::{Epilogue, NumberType, PackError, PackedMatrix, Strided, limits};
use candle_gpt2_generation::Clock;
use candle_gpt2_kernels::{open_cuda, open_metal};
use serde::Serialize;

use crate::{CachedModels, DeviceChoice, HubOptions, Network, Reporter, Unit, process};

/// Machine resources that this process can use.
///
/// ```
/// use candle_gpt2_engine::{HubOptions, Machine};
///
/// let machine = Machine::detect(&HubOptions::default());
/// assert_eq!(machine.system, std::env::consts::OS);
/// assert!(machine.processor.instruction_sets.contains(&machine.processor.instruction_set));
/// assert!(machine.processor.cores >= 1 && machine.hub.is_offline);
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    /// Operating system, such as `linux`.
    pub system: &'static str,
    /// Processor of the machine.
    pub processor: Processor,
    /// Memory of the machine, if the system reports it.
    pub memory: Option<Memory>,
    /// Use of 2 MiB pages, which speed up memory access.
    pub large_pages: LargePageUse,
    /// GPUs of the machine.
    pub gpu: Gpu,
    /// Access to the Hub, and the contents of its cache.
    pub hub: Hub,
    /// Whether the program contains the built-in model, [`BUILT_IN`](crate::BUILT_IN).
    pub has_built_in_model: bool,
}

/// A processor and the features in use.
///
/// Part of a [`Machine`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Processor {
    /// Model name, if the system reports it.
    pub name: Option<String>,
    /// Architecture, such as `x86_64`.
    pub architecture: &'static str,
    /// Instruction set that the kernels use.
    pub instruction_set: &'static str,
    /// Instruction sets that both the processor and the kernels support, slowest first.
    pub instruction_sets: Vec<&'static str>,
    /// Whether the processor has AMX, but the system does not let this process use it.
    pub is_amx_refused: bool,
    /// Size of the largest cache in bytes, if the system reports it (Linux).
    pub cache_bytes: Option<u64>,
    /// Number of cores that this process can use.
    pub cores: usize,
    /// Number of compute threads.
    pub threads: usize,
}

/// Memory of the machine or of the process's control group, whichever is smaller.
///
/// Part of a [`Machine`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Total memory in bytes.
    pub total_bytes: u64,
    /// Memory available to a model, in bytes.
    pub available_bytes: u64,
    /// Free swap space in bytes.
    pub free_swap_bytes: u64,
}

/// Use of large pages for weights and KV caches.
///
/// Part of a [`Machine`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LargePageUse {
    /// System-wide mode; `None` if the system does not report it (Linux does).
    ///
    /// `always` uses large pages for all memory, `madvise` only for memory that a process marks, and `never`
    /// for none.
    pub system: Option<String>,
    /// Whether this process requests large pages; see [`process::use_large_pages`].
    pub is_asked: bool,
}

/// GPUs, and this program's support for them.
///
/// Part of a [`Machine`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// NVIDIA driver, detected even if this program was built without CUDA.
    pub nvidia_driver: NvidiaDriver,
    /// Names of the NVIDIA GPUs, if the driver reports them.
    pub nvidia_gpus: Vec<String>,
    /// Support for NVIDIA GPUs in this program.
    pub cuda: GpuSupport,
    /// Support for Apple GPUs in this program.
    pub metal: GpuSupport,
}

/// Presence of the NVIDIA driver.
///
/// Part of a [`Machine`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NvidiaDriver {
    /// The driver is installed, with this version.
    Version(String),
    /// The driver is installed, but reports no version.
    Present,
    /// The driver is not installed.
    Absent,
    /// The system does not report whether the driver is installed.
    Unknown,
}

/// Support for one kind of GPU.
///
/// Part of a [`Machine`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuSupport {
    /// Whether the program was built with support for this kind of GPU.
    pub is_built: bool,
    /// Device name for `--device`, if the device can be used.
    pub device: Option<String>,
    /// Free memory of the device in bytes, if the driver reports it.
    pub free_bytes: Option<u64>,
    /// Reason why the device cannot be used.
    pub problem: Option<String>,
}

/// Access to the Hub, and the models that are already cached.
///
/// Part of a [`Machine`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Hub {
    /// Whether this program was built with the feature `hub`.
    pub is_built: bool,
    /// Address of the Hub.
    pub endpoint: String,
    /// Whether network access is disabled.
    pub is_offline: bool,
    /// Whether there is a token for gated and private models.
    pub has_token: bool,
    /// Path of the cache folder.
    pub cache: String,
    /// Models in the cache.
    pub models: CachedModels,
}

impl Machine {
    /// Collects the resources of this machine.
    ///
    /// If the program was built for a GPU, this opens the device as loading a model would.
    pub fn detect(hub: &HubOptions) -> Self {
        let read = |path: &str| fs::read_to_string(path).ok();
        let pages = LargePages::now();
        let memory = ProcessMemory::now().map(|memory| Memory {
            total_bytes: memory.total as u64,
            available_bytes: memory.available as u64,
            free_swap_bytes: memory.swap as u64,
        });
        Self {
            system: std::env::consts::OS,
            processor: Processor {
                name: read("/proc/cpuinfo").as_deref().and_then(processor_name),
                architecture: std::env::consts::ARCH,
                instruction_set: process::instruction_set(),
                instruction_sets: limits::instruction_sets(),
                is_amx_refused: limits::are_tiles_refused(),
                cache_bytes: largest_cache(),
                cores: available_parallelism().map_or(1, usize::from),
                threads: process::thread_count(),
            },
            memory,
            large_pages: LargePageUse { system: pages.system, is_asked: pages.is_asked },
            gpu: Gpu {
                nvidia_driver: nvidia_driver(),
                nvidia_gpus: nvidia_gpus(),
                cuda: GpuSupport::of(cfg!(feature = "cuda"), DeviceChoice::Cuda(0)),
                metal: GpuSupport::of(cfg!(feature = "metal"), DeviceChoice::Metal),
            },
            hub: Hub {
                is_built: cfg!(feature = "hub"),
                endpoint: hub.endpoint.clone(),
                is_offline: hub.network == Network::Offline,
                has_token: hub.token.is_some(),
                cache: hub.cache.display().to_string(),
                models: CachedModels::of(hub),
            },
            has_built_in_model: cfg!(feature = "built-in"),
        }
    }
}

impl GpuSupport {
    fn of(is_built: bool, choice: DeviceChoice) -> Self {
        let opened = match choice {
            DeviceChoice::Metal => open_metal(0),
            DeviceChoice::Cuda(index) => open_cuda(index),
            DeviceChoice::Auto | DeviceChoice::Cpu => Ok(Device::Cpu),
        };
        match opened {
            Ok(device) => Self {
                is_built,
                device: Some(choice.to_string()),
                free_bytes: free_memory(&device).map(|bytes| bytes as u64),
                problem: None,
            },
            Err(error) => {
                let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
                let problem = format!("{error}{}", cause.unwrap_or_default());
                Self { is_built, device: None, free_bytes: None, problem: Some(problem) }
            }
        }
    }
}

/// Reads the first processor's name from `/proc/cpuinfo` (Linux), which omits it on Arm.
fn processor_name(cpuinfo: &str) -> Option<String> {
    let (_, name) = cpuinfo.lines().find(|line| line.starts_with("model name"))?.split_once(':')?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty() && name != "unknown")
}

/// Size of the first processor's largest cache in bytes, as reported by Linux.
fn largest_cache() -> Option<u64> {
    let caches = fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?.flatten();
    caches.filter_map(|cache| cache_bytes(&fs::read_to_string(cache.path().join("size")).ok()?)).max()
}

/// Parses a size such as `32768K`.
fn cache_bytes(size: &str) -> Option<u64> {
    let size = size.trim();
    let (number, unit) =
        size.split_at(size.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(size.len()));
    let unit = match unit {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

/// Detects the driver on Linux by its files, its device node or its library under WSL.
///
/// The device node is visible even in containers that hide the driver's files.
fn nvidia_driver() -> NvidiaDriver {
    if std::env::consts::OS != "linux" {
        return NvidiaDriver::Unknown;
    }
    if let Ok(report) = fs::read_to_string("/proc/driver/nvidia/version") {
        return driver_version(&report).map_or(NvidiaDriver::Present, NvidiaDriver::Version);
    }
    let is_present =
        ["/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1"].iter().any(|path| Path::new(path).exists());
    if is_present { NvidiaDriver::Present } else { NvidiaDriver::Absent }
}

/// Finds the version in the first line: the first word made up of numbers separated by periods.
fn driver_version(report: &str) -> Option<String> {
    let is_version =
        |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    report.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

fn nvidia_gpus() -> Vec<String> {
    let folders = fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
    let reports = folders.filter_map(|folder| fs::read_to_string(folder.path().join("information")).ok());
    let mut names: Vec<String> = reports.filter_map(|report| gpu_name(&report)).collect();
    names.sort();
    names
}

fn gpu_name(report: &str) -> Option<String> {
    report.lines().find_map(|line| Some(line.strip_prefix("Model:")?.trim().to_owned()))
}

/// Speed of this processor, measured with the project's own kernels on all threads.
///
/// Each round reads a buffer many times the size of the caches. The result is the median of the rounds,
/// because a model cannot rely on bandwidth that other programs leave free only briefly. Multiplication
/// depends on the processor alone, so its result is the best of many short rounds.
///
/// See [`Estimate`] for an example.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Speeds {
    /// Memory bandwidth in bytes per second, the median of all rounds.
    pub read_bytes_per_s: f64,
    /// Memory bandwidth in bytes per second, the best of all rounds.
    pub best_read_bytes_per_s: f64,
    /// Bytes read in each round.
    ///
    /// If the processor's caches are of similar size, they supply part of the data.
    pub read_bytes: u64,
    /// Number of rounds in which the buffer was read.
    pub read_rounds: usize,
    /// Portion of `read_bytes` in large pages, if the system reports it.
    pub read_bytes_in_large_pages: Option<u64>,
    /// Multiply-adds per second in a matrix product with f32 weights.
    pub f32_multiply_adds_per_s: f64,
    /// Multiply-adds per second in a matrix product with q8 weights.
    pub q8_multiply_adds_per_s: f64,
    /// Multiply-adds per second in a matrix product with 4-bit weights.
    ///
    /// They need fewer instructions than q8 on processors that cannot multiply bytes directly.
    pub q4_multiply_adds_per_s: f64,
    /// Whether round times varied widely because of other load; an idle machine may be faster.
    pub is_busy: bool,
}

/// Minimum duration of a measurement.
const MIN_TIME: Duration = Duration::from_millis(500);
/// Duration after which a measurement starts no new round.
///
/// The four measurements together take about eight seconds at most.
const MAX_TIME: Duration = Duration::from_secs(2);
/// Number of rounds that must come within a factor of `AGREEMENT` of the best time to confirm it.
const AGREEING_ROUNDS: usize = 3;
const AGREEMENT: f64 = 1.03;
/// Ratio of median to best time above which the machine is considered busy.
const MAX_CALM_RATIO: f64 = 1.2;
/// Default size of the buffer to read, in bytes.
///
/// The buffer is at least `READ_CACHES` times the largest cache, but at most an eighth of the free memory.
const READ_BYTES: usize = 512 << 20;
const READ_CACHES: usize = 8;
/// Granularity of the buffer size.
const READ_STEP: usize = 32 << 20;
/// Shape of the weight matrix in the measured product: a layer with GPT-2's width.
///
/// The input is a prompt of `PRODUCT_ROWS` tokens. A product this short leaves some rounds undisturbed even
/// on a busy machine.
const PRODUCT: (usize, usize) = (768, 768);
const PRODUCT_ROWS: usize = 128;

impl Speeds {
    /// Measures the speeds, using the caller's clock.
    ///
    /// # Errors
    /// Never in practice: the matrices have valid sizes.
    pub fn measured(clock: &Clock, reporter: &dyn Reporter) -> Result<Self, PackError> {
        let progress = reporter.start("measuring", 4, Unit::Items("speeds"));
        let free = ProcessMemory::now().map_or(usize::MAX, |memory| memory.available);
        let caches = largest_cache().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(0);
        let wanted = READ_BYTES.max(caches.saturating_mul(READ_CACHES));
        let read_bytes = (wanted.min(free / 8) / READ_STEP).max(1) * READ_STEP;
        let pages_before = LargePages::now().bytes;
        let values = limits::values_to_read(read_bytes / size_of::<f32>());
        let in_large_pages =
            LargePages::now().bytes.zip(pages_before).map(|(now, before)| now.saturating_sub(before));
        let read = Rounds::measured(clock, || {
            std::hint::black_box(limits::read(&values));
        });
        drop(values);
        progress.advance(1);
        let f32 = multiplied(clock, NumberType::F32)?;
        progress.advance(1);
        let q8 = multiplied(clock, NumberType::Q8)?;
        progress.advance(1);
        let q4 = multiplied(clock, NumberType::Q4)?;
        progress.advance(1);
        let (outputs, inputs) = PRODUCT;
        let multiply_adds = (PRODUCT_ROWS * outputs * inputs) as f64;
        Ok(Self {
            read_bytes_per_s: read_bytes as f64 / read.median_s,
            best_read_bytes_per_s: read_bytes as f64 / read.best_s,
            read_bytes: read_bytes as u64,
            read_rounds: read.count,
            read_bytes_in_large_pages: in_large_pages,
            f32_multiply_adds_per_s: multiply_adds / f32.best_s,
            q8_multiply_adds_per_s: multiply_adds / q8.best_s,
            q4_multiply_adds_per_s: multiply_adds / q4.best_s,
            is_busy: [read, f32, q8, q4].iter().any(|rounds| rounds.is_busy),
        })
    }
}

/// Times rounds of the matrix product with weights in the given format.
fn multiplied(clock: &Clock, format: NumberType) -> Result<Rounds, PackError> {
    let (_, in_features) = PRODUCT;
    // All outputs share the same weights, because only the time matters.
    let weights: Vec<f32> = (0..in_features).map(|index| (index % 7) as f32 - 3.0).collect();
    let weights = Strided { values: &weights, strides: (0, 1), shape: PRODUCT };
    let matrix = PackedMatrix::from_values(weights, format)?;
    let x: Vec<f32> = (0..PRODUCT_ROWS * in_features).map(|index| (index % 11) as f32 - 5.0).collect();
    Ok(Rounds::measured(clock, || {
        std::hint::black_box(matrix.product(&x, PRODUCT_ROWS, Epilogue::default()));
    }))
}

/// Timing statistics for repeated work.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Rounds {
    /// Duration of the fastest round, in seconds.
    best_s: f64,
    /// Median duration of a round, in seconds.
    median_s: f64,
    count: usize,
    is_busy: bool,
}

impl Rounds {
    /// Repeats the work until the best time is stable or the time limit is reached.
    fn measured(clock: &Clock, mut work: impl FnMut()) -> Self {
        let start = clock();
        let mut times: Vec<f64> = Vec::new();
        loop {
            let round = clock();
            work();
            // A clock too coarse for the work must not report infinite speed.
            let time = clock().saturating_sub(round).max(Duration::from_nanos(1)).as_secs_f64();
            times.insert(times.partition_point(|other| *other < time), time);
            let (best_s, median_s, count) = (times[0], times[times.len() / 2], times.len());
            let agreeing = times.partition_point(|time| *time <= best_s * AGREEMENT);
            let is_busy = agreeing < AGREEING_ROUNDS || median_s > best_s * MAX_CALM_RATIO;
            let elapsed = clock().saturating_sub(start);
            if elapsed >= MAX_TIME || (elapsed >= MIN_TIME && !is_busy) {
                return Self { best_s, median_s, count, is_busy };
            }
        }
    }
}

/// Upper bounds on the token rates of GPT-2 124M on a processor with the given speeds.
///
/// Attention, norms and other operations reduce the actual rates.
///
/// ```
/// use candle_gpt2_engine::{Estimate, Speeds};
///
/// // A program calls `Speeds::measured(&clock, &Silent)?`, which takes several seconds.
/// let speeds = Speeds {
///     read_bytes_per_s: 20e9,
///     best_read_bytes_per_s: 22e9,
///     read_bytes: 1 << 29,
///     read_rounds: 20,
///     read_bytes_in_large_pages: Some(1 << 29),
///     f32_multiply_adds_per_s: 200e9,
///     q8_multiply_adds_per_s: 400e9,
///     q4_multiply_adds_per_s: 500e9,
///     is_busy: false,
/// };
/// let estimates = Estimate::of(&speeds);
/// assert_eq!(estimates[0].dtype, "f32");
/// assert!((estimates[0].new_tokens_per_s - 20e9 / estimates[0].read_bytes as f64).abs() < 1e-6);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// Type of the weights.
    pub dtype: &'static str,
    /// Weight bytes read for each new token.
    pub read_bytes: u64,
    /// New tokens per second in a single sequence; each token requires reading all weights.
    pub new_tokens_per_s: f64,
    /// Prompt tokens per second.
    ///
    /// All tokens share one read of the weights. Each is multiplied by all weights except the head's.
    pub prompt_tokens_per_s: f64,
}

impl Estimate {
    /// Estimates the rates for f32, f16, q8 and q4 weights.
    pub fn of(speeds: &Speeds) -> Vec<Self> {
        let formats = [NumberType::F32, NumberType::F16, NumberType::Q8, NumberType::Q4];
        formats.into_iter().map(|format| Self::in_format(format, speeds)).collect()
    }

    fn in_format(format: NumberType, speeds: &Speeds) -> Self {
        let config = Gpt2Config::gpt2();
        let (width, inner) = (config.n_embd, config.inner_width());
        let layers = [(3 * width, width), (width, width), (inner, width), (width, inner)];
        let head = (config.vocab_size, width);
        let layer_bytes: u64 =
            layers.iter().map(|(outputs, inputs)| format.packed_bytes(*outputs, *inputs)).sum();
        let read_bytes =
            config.n_layer as u64 * layer_bytes + format.of_tables().packed_bytes(head.0, head.1);
        let blocks = (config.n_layer * layers.iter().map(|(out, into)| out * into).sum::<usize>()) as f64;
        let multiply_adds_per_s = match format {
            // Products with f16 weights are computed in f32.
            NumberType::F32 | NumberType::F16 => speeds.f32_multiply_adds_per_s,
            NumberType::Q4 => speeds.q4_multiply_adds_per_s,
            _ => speeds.q8_multiply_adds_per_s,
        };
        let multiplied = blocks + (head.0 * head.1) as f64;
        Self {
            dtype: format.name(),
            read_bytes,
            new_tokens_per_s: (speeds.read_bytes_per_s / read_bytes as f64)
                .min(multiply_adds_per_s / multiplied),
            prompt_tokens_per_s: multiply_adds_per_s / blocks,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn proc_and_sysfs_files_are_parsed() {
        let cpuinfo = "processor\t: 0\nmodel name\t: AMD EPYC 9V74\nflags\t: fpu\nmodel name\t: other\n";
        assert_eq!(processor_name(cpuinfo).as_deref(), Some("AMD EPYC 9V74"));
        assert_eq!(processor_name("processor\t: 0\nBogoMIPS\t: 50.00\n"), None);
        assert_eq!(
            [" 32768K\n", "1M", "512", "x"].map(cache_bytes),
            [Some(32 << 20), Some(1 << 20), Some(512), None]
        );
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Wed Jan  8 16:01:21 UTC 2025\nGCC version: 12.2.0\n";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)\n";
        assert_eq!(driver_version(closed).as_deref(), Some("570.86.10"));
        assert_eq!(driver_version(open).as_deref(), Some("580.65.06"));
        assert_eq!(driver_version("something else"), None);
        assert_eq!(gpu_name("Model: \t\t NVIDIA H200\nIRQ:   \t\t 1\n").as_deref(), Some("NVIDIA H200"));
    }

    /// GPT-2 124M has 84,934,656 weights in the blocks' matrices and 38,597,376 in the head.
    ///
    /// Panels are 16 outputs wide, so the 50,257 outputs of the head are padded to 50,272.
    #[test]
    fn estimates_divide_speed_by_size() {
        let speeds = Speeds {
            read_bytes_per_s: 50e9,
            best_read_bytes_per_s: 55e9,
            read_bytes: 1,
            read_rounds: 3,
            read_bytes_in_large_pages: None,
            f32_multiply_adds_per_s: 100e9,
            q8_multiply_adds_per_s: 400e9,
            q4_multiply_adds_per_s: 500e9,
            is_busy: false,
        };
        let weights = 84_934_656 + 50_272 * 768;
        let [f32, f16, q8, q4] = Estimate::of(&speeds).try_into().unwrap();
        assert_eq!((f32.dtype, f32.read_bytes), ("f32", 4 * weights));
        assert_eq!((f16.dtype, f16.read_bytes), ("f16", 2 * weights));
        assert_eq!(
            (q8.dtype, q8.read_bytes),
            ("q8", weights * 34 / 32),
            "with a scale of two bytes for 32 weights"
        );
        // Every 32 weights share a two-byte scale. The blocks have 4 bits per weight, and the head has 6.
        assert_eq!((q4.dtype, q4.read_bytes), ("q4", 84_934_656 * 18 / 32 + 50_272 * 768 * 26 / 32));
        assert_eq!(q4.prompt_tokens_per_s, 500e9 / 84_934_656.0);
        assert_eq!(f32.new_tokens_per_s, 50e9 / f32.read_bytes as f64);
        assert_eq!(f32.prompt_tokens_per_s, 100e9 / 84_934_656.0);
        assert_eq!(f16.prompt_tokens_per_s, f32.prompt_tokens_per_s);
        assert_eq!(q8.prompt_tokens_per_s, 400e9 / 84_934_656.0);
        let slow = Speeds { q8_multiply_adds_per_s: 1e9, ..speeds };
        assert_eq!(
            Estimate::of(&slow)[2].new_tokens_per_s,
            1e9 / 123_532_032.0,
            "multiplying takes longer than reading"
        );
    }

    /// Measures and counts simulated rounds, each of which takes `time(index)` milliseconds.
    fn rounds(time: impl Fn(u64) -> u64) -> (Rounds, u64) {
        let elapsed = Arc::new(Mutex::new(Duration::ZERO));
        let seen = elapsed.clone();
        let clock: Clock = Arc::new(move || *seen.lock().unwrap());
        let mut count = 0;
        let rounds = Rounds::measured(&clock, || {
            *elapsed.lock().unwrap() += Duration::from_millis(time(count));
            count += 1;
        });
        (rounds, count)
    }

    #[test]
    fn idle_machine_is_measured_quickly() {
        let idle = |count: usize| Rounds { best_s: 0.01, median_s: 0.01, count, is_busy: false };
        assert_eq!(rounds(|_| 10), (idle(50), 50));
        // The first rounds are slower because they wake the threads.
        assert_eq!(rounds(|round| if round < 5 { 40 } else { 10 }), (idle(35), 35));
    }

    /// Simulates twenty rounds slowed by other work, followed by only a few undisturbed ones.
    ///
    /// The estimate must not exceed what a benchmark reaches in the undisturbed rounds.
    #[test]
    fn busy_machine_is_measured_longer_and_flagged() {
        let (found, count) =
            rounds(|round| if round > 20 && round % 5 == 0 { 5 } else { 12 + round % 3 * 7 });
        assert_eq!((found.best_s, found.median_s, found.is_busy), (0.005, 0.019, true));
        assert!((100..=200).contains(&count), "{count}");
        let never_twice = rounds(|round| 100 + round * 10);
        assert_eq!((never_twice.0.best_s, never_twice.0.is_busy), (0.1, true));
        assert_eq!(
            rounds(|_| 3000),
            (Rounds { best_s: 3.0, median_s: 3.0, count: 1, is_busy: true }, 1),
            "no round starts after the time limit"
        );
    }
}
