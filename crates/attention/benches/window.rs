//! Compares restricted attention, which costs O(rN), with full attention.
//!
//! At a fixed radius, the time of restricted attention grows linearly with the length; the time of full
//! attention grows quadratically.
//!
//! Run it with `cargo bench -p candle-gpt2-attention --bench window`. Throughput, in
//! query tokens, is constant for the window and decreases for full attention.

#![expect(missing_docs, reason = "criterion's macro makes an undocumented function")]

use candle_core::{DType, Device, Tensor};
use candle_gpt2_attention::{AttentionMask, Pass, ScaledDotProduct};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

const NUM_HEADS: usize = 12;
const HEAD_DIM: usize = 64;
const RADIUS: usize = 32;

fn window_against_full(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("attention");
    group.sample_size(10);
    let window = AttentionMask::Window { before: RADIUS, after: RADIUS };
    for tokens in [256, 512, 1024, 2048, 4096] {
        let heads =
            Tensor::ones((1, NUM_HEADS, tokens, HEAD_DIM), DType::F32, &Device::Cpu).expect("a tensor");
        group.throughput(Throughput::Elements(tokens as u64));
        for (name, mask) in [("window", &window), ("full", &AttentionMask::Bidirectional)] {
            group.bench_with_input(BenchmarkId::new(name, tokens), &heads, |bencher, heads| {
                let attention = ScaledDotProduct::new(HEAD_DIM);
                bencher.iter(|| attention.forward(heads, heads, heads, mask, &[], &mut Pass::inference()));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, window_against_full);
criterion_main!(benches);
