//! Packed weights against the same checkpoint as plain tensors: the whole model, every precision, with a cache in f16 too.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use gpt2::{Gpt2Cache, Gpt2LMHead, LogitsFor, Parameter, Pass, expected_parameters};
use gpt2_testing::{CheckpointFolder, checkpoints};
use gpt2_weights::{Checkpoint, LoadOptions, WeightDType, WeightsError};

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
    let largest = b.iter().fold(0.0f32, |largest, b| largest.max(b.abs()));
    assert_eq!(a.len(), b.len());
    assert!(a.iter().all(|a| a.is_finite()));
    a.iter().zip(b).fold(0.0f32, |worst, (a, b)| worst.max((a - b).abs())) / largest
}

/// The model of plain f32 tensors: the reference of the packed products.
fn dense(checkpoint: &Checkpoint) -> Gpt2LMHead {
    let named = expected_parameters(checkpoint.config()).into_iter().map(|Parameter { name, .. }| {
        let tensor = checkpoint.parameter(&name, &Device::Cpu, &|_| ()).unwrap().unwrap();
        (name, tensor)
    });
    let vb = VarBuilder::from_tensors(named.collect(), DType::F32, &Device::Cpu);
    Gpt2LMHead::load(checkpoint.config(), &vb).unwrap()
}

fn load(checkpoint: &Checkpoint, dtype: WeightDType) -> Gpt2LMHead {
    let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
    checkpoint.load(&options, &|_| ()).unwrap()
}

fn assert_all_formats(path: &Path, tokens: usize) {
    let checkpoint = Checkpoint::open(path).unwrap();
    let dense = dense(&checkpoint);
    let expected = logits(&dense, tokens);
    // f32: other orders of the same sums through all layers. The others: the rounding of the weights, 2^-12, 1/254, 1/62 and
    // 1/16 of the largest of a group at most, averaged by the sums and carried through the layers; the figures are about twice
    // what the tiny model shows.
    for (dtype, tolerance) in [
        (WeightDType::F32, 1e-5),
        (WeightDType::F16, 1e-3),
        (WeightDType::Q8, 3e-2),
        (WeightDType::Q6, 2e-1),
        (WeightDType::Q4, 4e-1),
    ] {
        let packed = load(&checkpoint, dtype);
        assert_eq!(packed.parameter_count(), dense.parameter_count());
        let found = logits(&packed, tokens);
        let off = difference(&found, &expected);
        assert!(off <= tolerance, "{dtype}: logits differ by {off:e} of the largest");
        // Where activations are rounded to integers, the smallest difference can turn one of them, so nothing closer than
        // the type itself can be asked for.
        let is_float = matches!(dtype, WeightDType::F32 | WeightDType::F16);
        let (exact, half) = if is_float { (1e-5, 2e-3) } else { (tolerance, tolerance) };
        let off = difference(&cached_logits(&packed, tokens, DType::F32), &found);
        assert!(off <= exact, "{dtype}: with a cache the logits differ by {off:e} of the largest");
        let off = difference(&cached_logits(&packed, tokens, DType::F16), &found);
        assert!(off <= half, "{dtype}: with a cache in f16 the logits differ by {off:e} of the largest");
    }
}

#[test]
fn the_tiny_checkpoint_in_every_precision() {
    assert_all_formats(CheckpointFolder::tiny().path(), 24);
}

/// Keys and values are rounded where loading has rounded the weights as coarsely, and nowhere else.
#[test]
fn the_same_weights_have_the_same_caches() {
    let stored_in_f16 = CheckpointFolder::tiny().with_tensors(|tensors| {
        for tensor in tensors.values_mut() {
            *tensor = tensor.to_dtype(DType::F16).unwrap();
        }
    });
    let (full, half) = (CheckpointFolder::tiny(), stored_in_f16);
    let kv_dtype = |folder: &CheckpointFolder, dtype, kv_dtype| {
        let options = LoadOptions { dtype, kv_dtype, ..LoadOptions::default() };
        Checkpoint::open(folder.path()).unwrap().load(&options, &|_| ()).unwrap().kv_dtype()
    };
    for (dtype, of_full, of_half) in [
        (None, DType::F32, DType::F32),
        (Some(WeightDType::F32), DType::F32, DType::F32),
        (Some(WeightDType::F16), DType::F16, DType::F32),
        (Some(WeightDType::Q8), DType::F16, DType::F16),
        (Some(WeightDType::Q6), DType::F16, DType::F16),
        (Some(WeightDType::Q4), DType::F16, DType::F16),
    ] {
        assert_eq!(kv_dtype(&full, dtype, None), of_full, "{dtype:?} of f32");
        assert_eq!(kv_dtype(&half, dtype, None), of_half, "{dtype:?} of f16");
        for chosen in [DType::F32, DType::F16] {
            assert_eq!(kv_dtype(&full, dtype, Some(chosen)), chosen, "{dtype:?}");
        }
    }
}

/// A type that the device does not hold is refused, and named.
#[test]
fn weights_in_bf16_are_refused_on_the_cpu() {
    let options = LoadOptions { dtype: Some(WeightDType::BF16), ..LoadOptions::default() };
    let checkpoint = Checkpoint::open(CheckpointFolder::tiny().path()).unwrap();
    let error = checkpoint.load(&options, &|_| ()).unwrap_err();
    assert!(matches!(error, WeightsError::NotOnCpu { dtype: WeightDType::BF16 }), "{error}");
}

/// Four bits for the blocks, six for embedding and head, which are one matrix here.
#[test]
fn q4_holds_the_tables_in_q6() {
    let checkpoint = Checkpoint::open(CheckpointFolder::tiny().path()).unwrap();
    let model = load(&checkpoint, WeightDType::Q4);
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
