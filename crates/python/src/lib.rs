//! Native half of the Python package `candle_gpt2`: thin classes over the engine, one per file.
//!
//! Every computation releases the GIL, and Ctrl-C ends it within a pass (see `process.rs`). Errors become
//! Python exceptions with the text that the program prints (see `errors.rs`). The only output is the progress
//! bars of long jobs at a terminal (see `reporting.rs`).

mod cache;
mod checkpoint;
mod classifier;
mod complete;
mod compression;
mod control_vector;
mod dictionary;
mod errors;
mod evaluate;
mod generate;
mod gradients;
mod hooks;
mod inside;
mod keywords;
mod look;
mod model;
mod options;
mod picture;
mod process;
mod raised;
mod reporting;
mod score;
mod signals;
mod steering;
mod stream;
mod task_data;
mod tokenize;
mod train;
mod trainer;
mod values;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::cache::Cache;
    #[pymodule_export]
    use super::checkpoint::{convert, inspect, verify};
    #[pymodule_export]
    use super::classifier::Classifier;
    #[pymodule_export]
    use super::compression::{compress, decompress};
    #[pymodule_export]
    use super::control_vector::ControlVector;
    #[pymodule_export]
    use super::dictionary::Dictionary;
    #[pymodule_export]
    use super::errors::Gpt2Error;
    #[pymodule_export]
    use super::evaluate::protocols;
    #[pymodule_export]
    use super::model::Model;
    #[pymodule_export]
    use super::options::number_options;
    #[pymodule_export]
    use super::picture::Picture;
    #[pymodule_export]
    use super::process::{set_threads, thread_count};
    #[pymodule_export]
    use super::steering::Steering;
    #[pymodule_export]
    use super::stream::{BatchStream, TextStream};
    #[pymodule_export]
    use super::tokenize::tokenize;
    #[pymodule_export]
    use super::train::train;
    #[pymodule_export]
    use super::trainer::Trainer;

    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        // Without this, numpy would be imported on first use, where an interrupt or an error would panic.
        module.py().import("numpy")?;
        numpy::dtype::<f32>(module.py());
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
