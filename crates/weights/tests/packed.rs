//! Packed weights against the same checkpoint as plain tensors: the whole model, every precision, with a cache in f16 too.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use gpt2::{Gpt2Cache, Gpt2LMHead, LogitsFor, Pass};
use gpt2_testing::{CheckpointFolder, checkpoints};
use gpt2_weights::{Checkpoint, WeightFormat};

/// Logits of a prompt in one piece.
fn logits(model: &Gpt2LMHead, tokens: usize) -> Vec<f32> {
    let ids = prompt(model, tokens);
    let ids = Tensor::from_slice(&ids, (1, tokens), &Device::Cpu).unwrap();
    let logits = model.forward(&ids, LogitsFor::EveryToken, None, &mut Pass::inference()).unwrap();
    logits.flatten_all().unwrap().to_vec1().unwrap()
}

/// The same with a cache: first half of the prompt, then token by token.
fn cached_logits(model: &Gpt2LMHead, tokens: usize, kv_dtype: DType) -> Vec<f32> {
    let ids = prompt(model, tokens);
    let mut cache = Gpt2Cache::new(model.config(), 1, tokens, kv_dtype, &Device::Cpu).unwrap();
    let (first, rest) = ids.split_at(tokens / 2);
    let mut logits = Vec::new();
    for chunk in std::iter::once(first).chain(rest.chunks(1)) {
        let ids = Tensor::from_slice(chunk, (1, chunk.len()), &Device::Cpu).unwrap();
        let pass = &mut Pass::inference();
        let step = model.forward(&ids, LogitsFor::EveryToken, Some(&mut cache), pass).unwrap();
        logits.extend(step.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    }
    logits
}

fn prompt(model: &Gpt2LMHead, tokens: usize) -> Vec<u32> {
    let vocab_size = u32::try_from(model.config().vocab_size).unwrap();
    (0..u32::try_from(tokens).unwrap()).map(|index| (index * 7919 + 3) % vocab_size).collect()
}

/// Largest difference, in shares of the largest logit.
fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    assert!(a.iter().chain(b).all(|logit| logit.is_finite()));
    let largest = b.iter().fold(0.0f32, |largest, b| largest.max(b.abs()));
    a.iter().zip(b).fold(0.0f32, |worst, (a, b)| worst.max((a - b).abs())) / largest
}

fn assert_all_formats(path: &Path, tokens: usize) {
    let checkpoint = Checkpoint::open(path).unwrap();
    let dense = checkpoint.load_dense(&Device::Cpu, DType::F32, &|_| ()).unwrap();
    let expected = logits(&dense, tokens);
    // f32: other orders of the same sums through all layers. The others: the rounding of the weights, 2^-12, 1/254, 1/62 and
    // 1/16 of the largest of a group at most, averaged by the sums and carried through the layers; the figures are about twice
    // what the tiny model shows.
    for (format, tolerance) in [
        (WeightFormat::F32, 1e-5),
        (WeightFormat::F16, 1e-3),
        (WeightFormat::Q8, 3e-2),
        (WeightFormat::Q6, 2e-1),
        (WeightFormat::Q4, 4e-1),
    ] {
        let packed = checkpoint.load_as(format, &|_| ()).unwrap();
        assert_eq!(packed.parameter_count(), dense.parameter_count());
        let found = logits(&packed, tokens);
        let off = difference(&found, &expected);
        assert!(off <= tolerance, "{format:?}: logits differ by {off:e} of the largest");
        // Where activations are rounded to integers, the smallest difference can turn one of them, so nothing closer than
        // the format itself can be asked for.
        let is_float = matches!(format, WeightFormat::F32 | WeightFormat::F16);
        let (exact, half) = if is_float { (1e-5, 2e-3) } else { (tolerance, tolerance) };
        let off = difference(&cached_logits(&packed, tokens, DType::F32), &found);
        assert!(off <= exact, "{format:?}: with a cache the logits differ by {off:e} of the largest");
        let off = difference(&cached_logits(&packed, tokens, DType::F16), &found);
        assert!(off <= half, "{format:?}: with a cache in f16 the logits differ by {off:e} of the largest");
    }
}

#[test]
fn the_tiny_checkpoint_in_every_precision() {
    assert_all_formats(CheckpointFolder::tiny().path(), 24);
}

/// Four bits for the blocks, six for embedding and head, which are one matrix here.
#[test]
fn q4_holds_the_tables_in_q6() {
    let checkpoint = Checkpoint::open(CheckpointFolder::tiny().path()).unwrap();
    let model = checkpoint.load_as(WeightFormat::Q4, &|_| ()).unwrap();
    let head = format!("PackedMatrix(q6 ({},", model.config().vocab_size);
    let shown = format!("{model:?}");
    assert_eq!((shown.matches(&head).count(), shown.matches("PackedMatrix(q6").count()), (2, 2), "{shown}");
    assert_eq!(shown.matches("PackedMatrix(q4").count(), 4 * model.config().n_layer);
}

#[test]
fn a_trained_checkpoint_in_every_precision() {
    if let Some(folder) = checkpoints() {
        assert_all_formats(&folder.join("tarotble"), 64);
    }
}
