//! Integration tests for the crate.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod damaged;
mod models;
mod round_trips;

use std::sync::LazyLock;

use candle_gpt2_compression::{Compressed, CompressionError, Compressor, Summary};
use candle_gpt2_engine::{LoadedModel, ModelOptions, Silent, WeightDType};

/// Sample texts from this project.
const README: &str = include_str!("../../../../README.md");
const MODEL_CARD: &str = include_str!("../../../../models/stories/README.md");

/// Options for the small test model with 48 positions and 300 tokens.
fn tiny_options() -> ModelOptions {
    let model = candle_gpt2_testing::fixture_path("tiny-checkpoint");
    ModelOptions { model, dtype: Some(WeightDType::Q8), ..ModelOptions::default() }
}

fn load(options: &ModelOptions) -> LoadedModel {
    options.open(&Silent).unwrap().load(&Silent).unwrap()
}

static TINY: LazyLock<LoadedModel> = LazyLock::new(|| load(&tiny_options()));
static BUILT_IN: LazyLock<LoadedModel> =
    LazyLock::new(|| load(&ModelOptions { dtype: Some(WeightDType::Q8), ..ModelOptions::default() }));

fn compressed(compressor: &Compressor, bytes: &[u8]) -> (Vec<u8>, Summary) {
    let mut file = Vec::new();
    let summary = compressor.compress(&mut &*bytes, None, &mut file, &Silent).unwrap();
    assert_eq!((summary.bytes, summary.compressed_bytes), (bytes.len() as u64, file.len() as u64));
    (file, summary)
}

fn decompressed(model: &LoadedModel, file: &[u8]) -> Result<Vec<u8>, CompressionError> {
    let mut restored = Vec::new();
    let length = Compressed::open(file)?.decompress(model, &mut restored, &Silent)?;
    assert_eq!(length, restored.len() as u64);
    Ok(restored)
}
