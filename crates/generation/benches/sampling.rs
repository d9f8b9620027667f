//! What picking a token costs beside computing its logits: top-k 50 with top-p 0.95 over GPT-2's 50,257 logits, and a
//! decode step of the 124M model.
//!
//! Run: `cargo bench -p gpt2-generation --bench sampling`. The logits are those of a model with random weights, copied
//! anew for each draw, which is counted too.

#![expect(missing_docs, reason = "criterion's macro makes an undocumented function")]

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use criterion::{Criterion, criterion_group, criterion_main};
use gpt2::{Gpt2Cache, Gpt2Config, Gpt2LMHead, LogitsFor, Pass, expected_parameters};
use gpt2_generation::{GenerationConfig, History, LogitsProcessor, Sampler};
use gpt2_testing::pattern;

/// Spread of the weights, near that of a trained model.
const WEIGHT_SCALE: f64 = 0.1;
const DEVICE: Device = Device::Cpu;

fn model() -> Gpt2LMHead {
    let config = Gpt2Config::preset("gpt2").expect("a published model");
    let tensor = |(offset, parameter): (usize, gpt2::Parameter)| {
        (parameter.name, pattern(&parameter.shape, WEIGHT_SCALE, offset as u64 * 1000))
    };
    let tensors: HashMap<String, Tensor> =
        expected_parameters(&config).into_iter().enumerate().map(tensor).collect();
    Gpt2LMHead::load(&config, &VarBuilder::from_tensors(tensors, DType::F32, &DEVICE)).expect("a model")
}

fn sampling_against_a_decode_step(criterion: &mut Criterion) {
    let model = model();
    let mut group = criterion.benchmark_group("one token");
    group.sample_size(20);
    let mut cache = Gpt2Cache::new(model.config(), 1, 1024, DType::F32, &DEVICE).expect("a cache");
    let id = Tensor::new(&[[464u32]], &DEVICE).expect("a tensor");
    let mut step = || {
        cache.truncate(0, 0).expect("a row");
        let pass = &mut Pass::inference();
        model.forward(&id, LogitsFor::LastToken, Some(&mut cache), pass).expect("logits")
    };
    let logits: Vec<f32> = step().flatten_all().and_then(|logits| logits.to_vec1()).expect("logits");
    group.bench_function("decode step, 124M, f32", |bencher| bencher.iter(&mut step));

    let history: Vec<u32> = (0..200).collect();
    let history = History { ids: &history, prompt_len: 100 };
    let random = GenerationConfig { do_sample: true, ..GenerationConfig::default() };
    for (name, config) in [
        ("greedy", GenerationConfig::default()),
        ("top-k 50, top-p 0.95", GenerationConfig { top_p: 0.95, ..random.clone() }),
        (
            "temperature, top-k 50, top-p 0.95, repetition penalty",
            GenerationConfig { top_p: 0.95, temperature: 0.8, repetition_penalty: 1.1, ..random.clone() },
        ),
        ("top-p 0.95 alone", GenerationConfig { top_p: 0.95, top_k: 0, ..random }),
    ] {
        let mut sampler = Sampler::new(&config, LogitsProcessor::of_config(&config), 0);
        let mut copy = logits.clone();
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                copy.copy_from_slice(&logits);
                sampler.sample(history, &mut copy).expect("a token")
            });
        });
    }
    group.finish();
}

criterion_group!(benches, sampling_against_a_decode_step);
criterion_main!(benches);
