//! What rounding the weights does to the built-in model, in its own domain.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[path = "common/quality.rs"]
mod quality;

use std::path::Path;

use gpt2_weights::{Checkpoint, LoadOptions, WeightDType};
use quality::{quality, texts_of};

/// About twice what `cargo bench -p gpt2-generation --bench quality` measures: where other vector instructions round the
/// logits otherwise, other texts are drawn.
#[test]
fn rounded_weights_predict_what_f32_does() {
    let checkpoint =
        Checkpoint::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/shakespeare")).unwrap();
    let load = |dtype| {
        let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
        checkpoint.load(&options, &|_| ()).unwrap()
    };
    let reference = load(WeightDType::F32);
    let texts = texts_of(&reference, 0, 4);
    for (format, divergence, top_1_agreement, perplexity_change) in [
        (WeightDType::F32, 0.0, 1.0, 0.0),
        // The checkpoint is stored in f16.
        (WeightDType::F16, 0.0, 1.0, 0.0),
        (WeightDType::Q8, 2.5e-4, 0.975, 2e-3),
        (WeightDType::Q6, 1.5e-3, 0.95, 4e-3),
        (WeightDType::Q4, 6e-3, 0.92, 1e-2),
    ] {
        let found = quality(&load(format), &reference, &texts);
        assert!(found.divergence <= divergence, "{format:?}: {found:?}");
        assert!(found.top_1_agreement >= top_1_agreement, "{format:?}: {found:?}");
        assert!((found.perplexity_ratio - 1.0).abs() <= perplexity_change, "{format:?}: {found:?}");
    }
}
