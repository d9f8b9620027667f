//! Benchmarks loading GPT-2 124M for every combination of file dtype and loaded dtype.
//!
//! The loading time is compared with a plain read of the file, and the peak memory with the loaded weights.
//!
//! Run `cargo bench -p candle-gpt2-weights --bench load` on Linux. The benchmark writes up to 500 MB to the
//! temporary folder. Each measurement is a separate process with its own memory peak. Every file is read once
//! in advance, so that no measurement reads from disk.

#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark prints, and stops at an error")]

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{Gpt2Config, Parameter, expected_parameters};
use candle_gpt2_weights::{Checkpoint, LoadOptions, Orientation, checkpoint_shape};

/// Number of loads per measurement; the fastest counts, since other work only adds time.
const ROUNDS: usize = 3;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.as_slice() {
        [_, command, folder, dtype] if command == "load" => load(folder.as_ref(), dtype),
        [_, command, file] if command == "read" => read(file.as_ref()),
        _ => measure(),
    }
}

/// Writes a checkpoint in each dtype and measures how fast it loads.
fn measure() {
    println!(
        "{:<6}{:<8}{:>12}{:>12}{:>12}{:>24}",
        "file", "loaded", "read s", "load s", "load/read", "peak/loaded weights"
    );
    for (name, dtype) in [("f32", DType::F32), ("f16", DType::F16), ("bf16", DType::BF16)] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), dtype);
        let file = folder.path().join("model.safetensors");
        let fastest = |arguments: &[&str]| -> (f64, f64) {
            let runs = (0..ROUNDS).map(|_| run(arguments));
            runs.reduce(|best, run| (f64::min(best.0, run.0), f64::min(best.1, run.1))).unwrap()
        };
        let (read_s, _) = fastest(&["read", file.to_str().unwrap()]);
        for (loaded, bits) in
            [("f32", 32.0), ("f16", 16.0), ("q8", 8.5), ("q6", 6.5), ("q5", 5.5), ("q4", 4.5)]
        {
            let (load_s, peak) = fastest(&["load", folder.path().to_str().unwrap(), loaded]);
            println!(
                "{name:<6}{loaded:<8}{read_s:>12.3}{load_s:>12.3}{:>12.2}{:>24.3}",
                load_s / read_s,
                peak / loaded_bytes(bits)
            );
        }
    }
}

/// Returns the size of the loaded weights in bytes.
///
/// Matrices use `matrix_bits` bits per weight. Positions, norms and biases are in f32.
fn loaded_bytes(matrix_bits: f64) -> f64 {
    let bits = |parameter: &Parameter| match parameter.shape.len() {
        2 if parameter.name != "wpe.weight" => matrix_bits,
        _ => 32.0,
    };
    let bytes =
        |parameter: &Parameter| parameter.shape.iter().product::<usize>() as f64 * bits(parameter) / 8.0;
    expected_parameters(&Gpt2Config::gpt2()).iter().map(bytes).sum()
}

/// Runs one measurement in a separate process, and returns its duration and its peak memory.
///
/// The duration is in seconds, the memory in bytes.
fn run(arguments: &[&str]) -> (f64, f64) {
    let program = std::env::current_exe().unwrap();
    let output = Command::new(program).args(arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut numbers = text.split_whitespace().map(|number| number.parse::<f64>().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

fn load(folder: &Path, dtype: &str) {
    let start = Instant::now();
    let checkpoint = Checkpoint::open(folder).unwrap();
    let options = LoadOptions { dtype: Some(dtype.parse().unwrap()), ..LoadOptions::default() };
    let model = checkpoint.load(&options, &|_| ()).unwrap();
    let elapsed_s = start.elapsed().as_secs_f64();
    assert_eq!(model.parameter_count(), 124_439_808);
    println!("{elapsed_s} {}", peak_bytes());
}

fn read(file: &Path) {
    let start = Instant::now();
    let mut bytes = Vec::new();
    std::fs::File::open(file).unwrap().read_to_end(&mut bytes).unwrap();
    println!("{} {}", start.elapsed().as_secs_f64(), peak_bytes());
}

/// Returns the peak resident memory of this process so far, in bytes.
fn peak_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<usize>().unwrap() * 1024
}

/// Writes a checkpoint of the 124M model; its values do not matter.
fn write(folder: &Path, dtype: DType) {
    let config = Gpt2Config::gpt2();
    let tensor = |shape: Vec<usize>| Tensor::ones(shape, dtype, &Device::Cpu).unwrap();
    let tensors: HashMap<String, Tensor> = expected_parameters(&config)
        .into_iter()
        .map(|parameter| (parameter.name.clone(), tensor(checkpoint_shape(&parameter, Orientation::Conv1D))))
        .collect();
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
    std::fs::write(folder.join("config.json"), config.to_json().to_string()).unwrap();
}
