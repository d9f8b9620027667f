//! Benchmarks token selection: its cost relative to the logits, and its growth in long sequences.
//!
//! Top-k 50 with top-p 0.95 over GPT-2's 50,257 logits is compared with a decode step of the 124M model
//! in q8.
//!
//! Run: `cargo bench -p candle-gpt2-generation --bench sampling`. The logits come from a model with
//! random weights. They are copied for each sample, and the time includes the copy.

#![expect(missing_docs, reason = "criterion's macro makes an undocumented function")]

use candle_core::{Device, Tensor};
use candle_gpt2::{LogitsFor, Pass};
use candle_gpt2_generation::{GenerationConfig, History, LogitsProcessor, Sampler};
use criterion::{Criterion, criterion_group, criterion_main};

mod models;

use models::gpt2_124m;

const DEVICE: Device = Device::Cpu;

fn sampling_against_a_decode_step(criterion: &mut Criterion) {
    let model = gpt2_124m();
    let mut group = criterion.benchmark_group("one token");
    group.sample_size(20);
    let mut cache = model.new_cache(1, 1024).expect("a cache");
    let id = Tensor::new(&[[464u32]], &DEVICE).expect("a tensor");
    let mut step = || {
        cache.truncate(0, 0).expect("a row");
        let pass = &mut Pass::inference();
        model.forward_with(&id, LogitsFor::LastToken, Some(&mut cache), pass).expect("logits")
    };
    let logits: Vec<f32> = step().flatten_all().and_then(|logits| logits.to_vec1()).expect("logits");
    group.bench_function("decode step, 124M, q8", |bencher| bencher.iter(&mut step));

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
        ("top-p 0.95 alone", GenerationConfig { top_p: 0.95, top_k: 0, ..random.clone() }),
        ("typical-p 0.9 alone", GenerationConfig { typical_p: 0.9, top_k: 0, ..random }),
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

/// Measures penalties and n-gram blocking late in a long sequence.
///
/// The sampler counts tokens incrementally, whereas the processors on their own recount all tokens.
fn counting_a_long_text(criterion: &mut Criterion) {
    let config = GenerationConfig {
        repetition_penalty: 1.1,
        frequency_penalty: 0.1,
        no_repeat_ngram_size: 3,
        ..GenerationConfig::default()
    };
    let processors = LogitsProcessor::of_config(&config);
    let mut group = criterion.benchmark_group("one token of a long text");
    group.sample_size(20);
    for tokens in [1_000u32, 100_000] {
        let ids: Vec<u32> = (0..tokens).map(|token| token.wrapping_mul(2_654_435_761) >> 22).collect();
        let history = History { ids: &ids, prompt_len: 10 };
        let mut logits = vec![0.0; 50_257];
        let mut sampler = Sampler::new(&config, processors.clone(), 0);
        group.bench_function(format!("{tokens} tokens, counted incrementally"), |bencher| {
            bencher.iter(|| {
                logits.fill(0.0);
                sampler.sample(history, &mut logits).expect("a token")
            });
        });
        group.bench_function(format!("{tokens} tokens, recounted for each sample"), |bencher| {
            bencher.iter(|| {
                logits.fill(0.0);
                let mut process = |processor: &LogitsProcessor| processor.process(history, &mut logits);
                processors.iter().try_for_each(&mut process).expect("logits");
            });
        });
    }
    group.finish();
}

criterion_group!(benches, sampling_against_a_decode_step, counting_a_long_text);
criterion_main!(benches);
