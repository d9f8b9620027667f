//! What rounding the weights, and the keys and values, does to a trained model, against the same model in f32 on text of its own domain.
//!
//! Run: `cargo bench -p gpt2-generation --bench quality [-- TEXT]`. For the built-in model, and with `GPT2_CHECKPOINTS` for
//! tarotble: the mean Kullback-Leibler divergence in nats a token, what one token in a hundred exceeds, the share of places with the same most probable token,
//! and the ratio of the perplexities; on texts that the f32 model draws itself, and for the built-in model on TEXT besides.

#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a bench prints, and ends where something is wrong"
)]

mod measure;

use std::path::Path;

use gpt2::KvDType;
use gpt2_testing::checkpoints;
use gpt2_weights::{Checkpoint, LoadOptions, WeightDType, encode};
use measure::{quality, texts_of};

/// Tokens that are drawn from each model.
const DRAWN_TOKENS: usize = 16_384;
/// The end-of-text token of both models, after which a new text begins.
const START: u32 = 0;

fn main() {
    let text = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    measure(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/shakespeare"), text.as_deref());
    if let Some(folder) = checkpoints() {
        measure(&folder.join("tarotble"), None);
    }
}

fn measure(folder: &Path, text: Option<&str>) {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let load = |dtype| {
        let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
        checkpoint.load(&options, &|_| ()).unwrap()
    };
    let reference = load(WeightDType::F32);
    let context = reference.config().n_positions;
    let mut sources = vec![("drawn", texts_of(&reference, START, DRAWN_TOKENS / context))];
    if let Some(path) = text {
        let tokenizer = checkpoint.tokenizer(None).unwrap();
        let ids = encode(&tokenizer, &std::fs::read_to_string(path).unwrap()).unwrap();
        sources.push(("given", ids.chunks(context).map(<[u32]>::to_vec).collect()));
    }
    let name = folder.file_name().unwrap().to_string_lossy();
    println!(
        "{:<14}{:<8}{:<8}{:<10}{:>12}{:>12}{:>10}{:>14}",
        name, "text", "weights", "keys, v.", "nats/token", "99% below", "top-1", "perplexity"
    );
    for (source, texts) in sources {
        for (format, kv_dtype) in [
            (WeightDType::F32, KvDType::F16),
            (WeightDType::F32, KvDType::Q8),
            (WeightDType::F16, KvDType::F16),
            (WeightDType::Q8, KvDType::F16),
            (WeightDType::Q8, KvDType::Q8),
            (WeightDType::Q6, KvDType::F16),
            (WeightDType::Q4, KvDType::F16),
            (WeightDType::Q4, KvDType::Q8),
        ] {
            let found = quality(&load(format).with_kv_dtype(kv_dtype), &reference, &texts);
            println!(
                "{:<14}{source:<8}{:<8}{:<10}{:>12.2e}{:>12.2e}{:>9.2}%{:>+13.3}%",
                "",
                format.name(),
                kv_dtype.name(),
                found.divergence,
                found.percentile_99,
                100.0 * found.top_1_agreement,
                100.0 * (found.perplexity_ratio - 1.0)
            );
        }
    }
}
