//! This machine's resources for the models of this project, and how fast its processor reads memory and multiplies.
//!
//! [`Machine`] holds facts: they are read, nothing is started or changed for them, and what a system does not tell is `None`. Most of
//! them are known on Linux alone. [`Speeds`] are measured, in some seconds, and [`Estimate`] says what they mean for GPT-2.

use std::fs;
use std::path::Path;
use std::thread::available_parallelism;
use std::time::Duration;

use crate::{LargePages, ProcessMemory, free_memory};
use candle_core::Device;
use candle_gpt2::Gpt2Config;
use candle_gpt2_arithmetic::{Epilogue, PackError, PackedMatrix, Strided, WeightFormat, limits};
use candle_gpt2_generation::Clock;
use candle_gpt2_kernels::{open_cuda, open_metal};
use serde::Serialize;

use crate::{CachedModels, DeviceChoice, HubOptions, Network, Reporter, Unit, process};

/// A machine's resources, as far as this process may use them.
///
/// ```
/// use candle_gpt2_engine::{HubOptions, Machine};
///
/// let machine = Machine::seen(&HubOptions::default());
/// assert_eq!(machine.system, std::env::consts::OS);
/// assert!(machine.processor.instruction_sets.contains(&machine.processor.instruction_set));
/// assert!(machine.processor.cores >= 1 && machine.hub.is_offline);
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    /// The operating system, as `linux`.
    pub system: &'static str,
    /// Its processor.
    pub processor: Processor,
    /// Its memory, if the system says.
    pub memory: Option<Memory>,
    /// Pages of 2 MiB, which make reading memory faster.
    pub large_pages: LargePageUse,
    /// Its GPUs.
    pub gpu: Gpu,
    /// Where models on the Hub come from.
    pub hub: Hub,
    /// Whether there is a model inside the program, [`BUILT_IN`](crate::BUILT_IN).
    pub has_built_in_model: bool,
}

/// A processor, and what of it is used.
///
/// Part of a [`Machine`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Processor {
    /// Its name, if the system says.
    pub name: Option<String>,
    /// Its architecture, as `x86_64`.
    pub architecture: &'static str,
    /// The instruction set that the kernels take.
    pub instruction_set: &'static str,
    /// Those that it has and the kernels know, slowest first.
    pub instruction_sets: Vec<&'static str>,
    /// Bytes of its largest cache, if the system tells (Linux).
    pub cache_bytes: Option<u64>,
    /// Cores that this process may use.
    pub cores: usize,
    /// Threads that compute.
    pub threads: usize,
}

/// The memory of a machine or, if that is less, of the control group that the process is in.
///
/// Part of a [`Machine`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// All of it, in bytes.
    pub total_bytes: u64,
    /// What a model can take, in bytes.
    pub available_bytes: u64,
    /// Room on the disk to which memory can be moved, in bytes.
    pub free_swap_bytes: u64,
}

/// Whether weights, keys and values are in large pages.
///
/// Part of a [`Machine`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LargePageUse {
    /// Which memory the system gives them to: `always` to all, `madvise` to memory that asks, `never` to none; `None` if it does not
    /// tell (Linux does).
    pub system: Option<String>,
    /// Whether this process asks: see [`process::use_large_pages`].
    pub is_asked: bool,
}

/// GPUs, and whether this program can use them.
///
/// Part of a [`Machine`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// The driver of NVIDIA's GPUs, whatever this program was built with.
    pub nvidia_driver: NvidiaDriver,
    /// The names of NVIDIA's GPUs, if the driver tells them.
    pub nvidia_gpus: Vec<String>,
    /// NVIDIA's GPUs in this program.
    pub cuda: GpuSupport,
    /// Apple's GPU in this program.
    pub metal: GpuSupport,
}

/// Whether NVIDIA's driver is there.
///
/// Part of a [`Machine`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NvidiaDriver {
    /// It is, in this version.
    Version(String),
    /// It is, and does not tell its version.
    Present,
    /// It is not.
    Absent,
    /// The system does not tell.
    Unknown,
}

/// Whether this program can use a kind of GPU.
///
/// Part of a [`Machine`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuSupport {
    /// Whether the program was built for it.
    pub is_built: bool,
    /// The device's name for `--device` if it can be used.
    pub device: Option<String>,
    /// Bytes of its memory that are free, if the driver says.
    pub free_bytes: Option<u64>,
    /// Why it cannot be used.
    pub problem: Option<String>,
}

/// Where models on the Hub come from, and which are here already.
///
/// Part of a [`Machine`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Hub {
    /// Whether this program was built with the feature `hub`.
    pub is_built: bool,
    /// The Hub's address.
    pub endpoint: String,
    /// Whether the network may not be used.
    pub is_offline: bool,
    /// Whether there is a token for models that are not open to everyone.
    pub has_token: bool,
    /// Folder of the cache.
    pub cache: String,
    /// What it holds.
    pub models: CachedModels,
}

impl Machine {
    /// This machine's resources. A GPU is opened if the program was built for it, as loading a model on it would.
    pub fn seen(hub: &HubOptions) -> Self {
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

/// The first processor's name in Linux' `/proc/cpuinfo`. (Processors of ARM have none there.)
fn processor_name(cpuinfo: &str) -> Option<String> {
    let (_, name) = cpuinfo.lines().find(|line| line.starts_with("model name"))?.split_once(':')?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty() && name != "unknown")
}

/// Bytes of the largest cache of the first processor, as Linux tells them.
fn largest_cache() -> Option<u64> {
    let caches = fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?.flatten();
    caches.filter_map(|cache| cache_bytes(&fs::read_to_string(cache.path().join("size")).ok()?)).max()
}

/// A size such as `32768K`.
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

/// The driver as Linux shows it: its own files, its device in a container that hides those, or that of Windows' Linux.
fn nvidia_driver() -> NvidiaDriver {
    if std::env::consts::OS != "linux" {
        return NvidiaDriver::Unknown;
    }
    if let Ok(told) = fs::read_to_string("/proc/driver/nvidia/version") {
        return driver_version(&told).map_or(NvidiaDriver::Present, NvidiaDriver::Version);
    }
    let is_present =
        ["/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1"].iter().any(|path| Path::new(path).exists());
    if is_present { NvidiaDriver::Present } else { NvidiaDriver::Absent }
}

/// The version in the driver's first line, the first word of numbers with points between them.
fn driver_version(told: &str) -> Option<String> {
    let is_version =
        |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    told.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

fn nvidia_gpus() -> Vec<String> {
    let folders = fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
    let told = folders.filter_map(|folder| fs::read_to_string(folder.path().join("information")).ok());
    let mut names: Vec<String> = told.filter_map(|told| gpu_name(&told)).collect();
    names.sort();
    names
}

fn gpu_name(told: &str) -> Option<String> {
    told.lines().find_map(|line| Some(line.strip_prefix("Model:")?.trim().to_owned()))
}

/// How fast this processor is, with the project's own kernels on all threads at once.
///
/// Each round of reading reads all of some memory that is many times as large as the caches; the median counts, since memory
/// that other programs leave for a moment is nothing that a model gets. Multiplying depends on the processor alone, so that the best
/// of many short rounds counts.
///
/// See [`Estimate`] for an example.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Speeds {
    /// Bytes a second that are read from memory: the median of the rounds,
    pub read_bytes_per_s: f64,
    /// and the best of them.
    pub best_read_bytes_per_s: f64,
    /// Bytes that each round read. If a processor's caches hold as much, part of them came from there.
    pub read_bytes: u64,
    /// Rounds of reading.
    pub read_rounds: usize,
    /// How many of these bytes were in large pages, if the system tells.
    pub read_bytes_in_large_pages: Option<u64>,
    /// Multiply-adds a second of a product with weights in f32.
    pub f32_multiply_adds_per_s: f64,
    /// Multiply-adds a second of a product with weights in q8.
    pub q8_multiply_adds_per_s: f64,
    /// The same with weights of 4 bits, which take fewer instructions where bytes have no instruction of their own.
    pub q4_multiply_adds_per_s: f64,
    /// Whether the rounds of a measurement took very different times, since other work ran: an idle machine may be faster.
    pub is_busy: bool,
}

/// Least time of each measurement,
const LEAST_TIME: Duration = Duration::from_millis(500);
/// and the time after which no round begins: three of these, and what is prepared for them, take less than eight seconds.
const MOST_TIME: Duration = Duration::from_secs(2);
/// The best time counts as reached when so many rounds were as fast, up to this factor,
const AGREEING_ROUNDS: usize = 3;
const AGREEMENT: f64 = 1.03;
/// and the machine as busy when half of the rounds took longer than this times the best.
const CALM: f64 = 1.2;
/// Memory that is read: this much or so many times the largest cache, and an eighth of what is free at most.
const READ_BYTES: usize = 512 << 20;
const READ_CACHES: usize = 8;
/// It is a multiple of this.
const READ_STEP: usize = 32 << 20;
/// The product: a layer of GPT-2's width, for a prompt of so many tokens. It takes so little time that some rounds pass
/// undisturbed on a machine that does other things too.
const PRODUCT: (usize, usize) = (768, 768);
const PRODUCT_ROWS: usize = 128;

impl Speeds {
    /// Measures them by a clock of the caller's.
    ///
    /// # Errors
    /// None that can happen: the matrices are of the right size.
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
        let f32 = multiplied(clock, WeightFormat::F32)?;
        progress.advance(1);
        let q8 = multiplied(clock, WeightFormat::Q8)?;
        progress.advance(1);
        let q4 = multiplied(clock, WeightFormat::Q4)?;
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

/// Rounds of the product with weights of this format.
fn multiplied(clock: &Clock, format: WeightFormat) -> Result<Rounds, PackError> {
    let (_, in_features) = PRODUCT;
    // Every output has the same weights, since only the time counts.
    let weights: Vec<f32> = (0..in_features).map(|index| (index % 7) as f32 - 3.0).collect();
    let weights = Strided { values: &weights, strides: (0, 1), shape: PRODUCT };
    let matrix = PackedMatrix::from_values(weights, format)?;
    let x: Vec<f32> = (0..PRODUCT_ROWS * in_features).map(|index| (index % 11) as f32 - 5.0).collect();
    Ok(Rounds::measured(clock, || {
        std::hint::black_box(matrix.product(&x, PRODUCT_ROWS, Epilogue::default()));
    }))
}

/// Rounds of some work that were timed.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Rounds {
    /// The shortest time of one,
    best_s: f64,
    /// and the median.
    median_s: f64,
    count: usize,
    is_busy: bool,
}

impl Rounds {
    /// Repeats the work until its best time is a stable one; on a busy machine, until the time is over.
    fn measured(clock: &Clock, mut work: impl FnMut()) -> Self {
        let start = clock();
        let mut times: Vec<f64> = Vec::new();
        loop {
            let round = clock();
            work();
            // A clock that is too coarse to see the work must not make it infinitely fast.
            let time = clock().saturating_sub(round).max(Duration::from_nanos(1)).as_secs_f64();
            times.insert(times.partition_point(|other| *other < time), time);
            let (best_s, median_s, count) = (times[0], times[times.len() / 2], times.len());
            let agreeing = times.partition_point(|time| *time <= best_s * AGREEMENT);
            let is_busy = agreeing < AGREEING_ROUNDS || median_s > best_s * CALM;
            let elapsed = clock().saturating_sub(start);
            if elapsed >= MOST_TIME || (elapsed >= LEAST_TIME && !is_busy) {
                return Self { best_s, median_s, count, is_busy };
            }
        }
    }
}

/// The upper bound for GPT-2 124M on a processor with these speeds. Attention, norms and whatever else runs take more.
///
/// ```
/// use candle_gpt2_engine::{Estimate, Speeds};
///
/// // In a program: `Speeds::measured(&clock, &Silent)?`, which takes some seconds.
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
    /// The type of the weights.
    pub dtype: &'static str,
    /// Bytes of the weights that each new token reads.
    pub read_bytes: u64,
    /// New tokens a second of one text: all weights are read for each of them.
    pub new_tokens_per_s: f64,
    /// Tokens of a prompt a second: its tokens share what is read, and each is multiplied with all weights but the head's.
    pub prompt_tokens_per_s: f64,
}

impl Estimate {
    /// One for each of these types of weights.
    pub fn of(speeds: &Speeds) -> Vec<Self> {
        let formats = [WeightFormat::F32, WeightFormat::F16, WeightFormat::Q8, WeightFormat::Q4];
        formats.into_iter().map(|format| Self::in_format(format, speeds)).collect()
    }

    fn in_format(format: WeightFormat, speeds: &Speeds) -> Self {
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
            // Weights in f16 are multiplied in f32.
            WeightFormat::F32 | WeightFormat::F16 => speeds.f32_multiply_adds_per_s,
            WeightFormat::Q4 => speeds.q4_multiply_adds_per_s,
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
    fn what_the_system_tells_is_read() {
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

    /// 84,934,656 weights in the blocks' matrices and 38,597,376 in the head; panels are 16 outputs wide, which 50,257 does not fill.
    #[test]
    fn estimates_are_speeds_over_sizes() {
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
        // Two bytes for 32 weights here too; the head has six bits a weight.
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

    /// Rounds whose times, in milliseconds, follow from their numbers; and how many they were.
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
    fn a_calm_machine_is_measured_in_little_time() {
        let calm = |count: usize| Rounds { best_s: 0.01, median_s: 0.01, count, is_busy: false };
        assert_eq!(rounds(|_| 10), (calm(50), 50));
        // The first rounds wake the threads.
        assert_eq!(rounds(|round| if round < 5 { 40 } else { 10 }), (calm(35), 35));
    }

    /// Twenty rounds beside other work, and few without: what bench reaches in those is not more than what is promised.
    #[test]
    fn on_a_busy_machine_the_best_is_waited_for_and_said_to_be_doubtful() {
        let (found, count) =
            rounds(|round| if round > 20 && round % 5 == 0 { 5 } else { 12 + round % 3 * 7 });
        assert_eq!((found.best_s, found.median_s, found.is_busy), (0.005, 0.019, true));
        assert!((100..=200).contains(&count), "{count}");
        let never_twice = rounds(|round| 100 + round * 10);
        assert_eq!((never_twice.0.best_s, never_twice.0.is_busy), (0.1, true));
        assert_eq!(
            rounds(|_| 3000),
            (Rounds { best_s: 3.0, median_s: 3.0, count: 1, is_busy: true }, 1),
            "none begins when the time is over"
        );
    }
}
