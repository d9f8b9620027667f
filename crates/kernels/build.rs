//! Compiles the CUDA kernels if the feature `cuda` is on.
//!
//! It uses nvcc, which candle's own kernels also need.

use std::env;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

const SOURCE: &str = "src/cuda/kernels.cu";
/// Oldest architecture that CUDA 13 supports; its PTX runs on every later GPU.
const OLDEST_ARCHITECTURE: &str = "75";

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={SOURCE}");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return ExitCode::SUCCESS;
    }
    for name in ["NVCC", "CUDA_HOME", "CUDA_PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    match compile() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            println!("cargo::error={message}");
            ExitCode::FAILURE
        }
    }
}

fn compile() -> Result<(), String> {
    let toolkit = env::var_os("CUDA_HOME").or_else(|| env::var_os("CUDA_PATH"));
    let in_toolkit = || toolkit.map(|toolkit| PathBuf::from(toolkit).join("bin/nvcc"));
    let compiler = env::var_os("NVCC").map(PathBuf::from).or_else(in_toolkit);
    let compiler = compiler.unwrap_or_else(|| "nvcc".into());
    let output = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join("kernels.ptx");
    let status = Command::new(&compiler)
        .args(["-ptx", "-O3", "-std=c++17"])
        .arg(format!("-arch=compute_{OLDEST_ARCHITECTURE}"))
        .args([SOURCE.as_ref(), "-o".as_ref(), output.as_os_str()])
        .status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{} could not compile {SOURCE}: {status}", compiler.display())),
        Err(error) => Err(format!(
            "the feature `cuda` needs nvcc, and {} cannot be run: {error}; install the CUDA toolkit, or see scripts/cuda_toolchain.sh",
            compiler.display()
        )),
    }
}
