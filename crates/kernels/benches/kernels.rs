//! Throughput of every kernel, compared with the machine's limits measured in the same run.
//!
//! Reports GB/s of weights for one row and GFLOP/s for many rows, for this crate's products and candle's.
//!
//! Run it with `cargo bench -p candle-gpt2-kernels`. The argument `-- 1` computes on one thread (set
//! `RAYON_NUM_THREADS=1` for candle's products). The name of an instruction set, such as `-- avx2`, replaces
//! the fastest one.
//!
//! The result of a measurement is the fastest of many short runs, because other load on the machine can only
//! add time. Criterion supports neither this nor the fraction of the limit in each line.

#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark prints, and stops at an error")]

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_gpt2_arithmetic::{KvSlot, NumberType, limits, set_thread_count, thread_count, uses};
use candle_gpt2_kernels::{Activation, KvDType, KvMemory, LayerNorm, Linear, Matrix};

/// Number of runs for each measurement.
const RUNS: usize = 40;
/// Matrix products in GPT-2 124M, `(out, in)`.
const SHAPES: [(&str, usize, usize); 5] = [
    ("c_attn", 2304, 768),
    ("c_proj", 768, 768),
    ("c_fc", 3072, 768),
    ("mlp c_proj", 768, 3072),
    ("head", 50257, 768),
];
/// Total size of the weight copies that few-row products cycle through, larger than the caches.
const READ_BYTES: usize = 128 << 20;
/// Number of rows in the many-row products.
const ROWS: usize = 512;
/// Row counts of the few-row products, typical of drafts and small batches.
const FEW_ROWS: [usize; 3] = [2, 4, 8];
const HEADS: usize = 12;
const HEAD_DIM: usize = 64;
const LAYERS: usize = 12;

fn main() {
    // Ignores the arguments that Cargo adds.
    if let Some(threads) = std::env::args().find_map(|argument| argument.parse().ok()) {
        set_thread_count(threads);
    }
    let chosen = std::env::args().find(|argument| limits::choose_instruction_set(argument));
    let sets = limits::instruction_sets();
    let instructions = chosen.as_deref().or(sets.last().copied()).unwrap_or_default();
    let values = limits::values_to_read(64 << 20);
    let bytes = size_of_val(&*values) as f64;
    let bandwidth = bytes / 1e9 / fastest(RUNS / 4, || assert!(limits::read(&values) > 0.0));
    let mut flops = 0;
    let elapsed_s = fastest(RUNS, || flops = limits::multiply_adds(400_000_000));
    let arithmetic = flops as f64 / 1e9 / elapsed_s;
    println!("{} threads, {instructions} of {}", thread_count(), sets.join(", "));
    println!("limits: reading {bandwidth:.1} GB/s, multiply-adds {arithmetic:.0} GFLOP/s\n");
    drop(values);

    for (name, out_features, in_features) in SHAPES {
        let weight = pattern((out_features, in_features));
        let (one, many) = (pattern((1, in_features)), pattern((ROWS, in_features)));
        let many_flops = 2.0 * (ROWS * out_features * in_features) as f64 / 1e9;
        let copies = (READ_BYTES / (4 * out_features * in_features)).max(1);
        let dense: Vec<Linear> =
            (0..copies).map(|_| Linear::new(weight.force_contiguous().unwrap(), None).unwrap()).collect();
        let bytes = (4 * out_features * in_features * copies) as f64 / 1e9;
        let one_s = fastest(RUNS, || dense.iter().for_each(|layer| drop(layer.forward(&one).unwrap())));
        let many_s = fastest(RUNS / 4, || drop(dense[0].forward(&many).unwrap()));
        report(name, "candle", bytes / one_s, bandwidth, many_flops / many_s, arithmetic);
        for dtype in NumberType::all(uses::CPU_WEIGHTS) {
            let packed = || Matrix::pack(&weight, dtype).unwrap();
            let pack_s = fastest(2, || drop(packed()));
            let Matrix::Packed(matrix) = packed() else { continue };
            let copies = (READ_BYTES / matrix.bytes()).max(1);
            let layers: Vec<Linear> =
                (0..copies).map(|_| Linear::from_matrix(packed(), None).unwrap()).collect();
            let bytes = matrix.bytes() as f64 / 1e9;
            let one_s = fastest(RUNS, || layers.iter().for_each(|layer| drop(layer.forward(&one).unwrap())));
            let many_s = fastest(RUNS / 4, || drop(layers[0].forward(&many).unwrap()));
            let read = bytes * copies as f64 / one_s;
            report(name, dtype.name(), read, bandwidth, many_flops / many_s, arithmetic);
            let few = FEW_ROWS.map(|rows| {
                let x = pattern((rows, in_features));
                fastest(RUNS, || layers.iter().for_each(|layer| drop(layer.forward(&x).unwrap()))) / one_s
            });
            println!(
                "{:<18} {FEW_ROWS:?} rows in {few:.2?} times the time of one; packed at {:.2} million/s",
                "",
                (out_features * in_features) as f64 / 1e6 / pack_s
            );
        }
    }

    let x = pattern((ROWS, 3072));
    let million = x.elem_count() as f64 / 1e6;
    let zeros =
        Linear::from_matrix(Matrix::pack(&pattern((3072, 64)), NumberType::F32).unwrap(), None).unwrap();
    let narrow = pattern((ROWS, 64));
    let plain_s = fastest(RUNS, || drop(zeros.forward(&narrow).unwrap()));
    let gelu_s = fastest(RUNS, || drop(zeros.forward_activated(&narrow, Activation::GeluTanh).unwrap()));
    let candle_s = fastest(RUNS, || drop(x.gelu().unwrap()));
    println!(
        "\nGELU of 512 x 3072 after a product: {:.0} million/s more; candle's {:.0} million/s",
        million / (gelu_s - plain_s),
        million / candle_s
    );

    let x = pattern((ROWS, 768));
    let one = Tensor::ones(768, DType::F32, &Device::Cpu).unwrap();
    let norm = LayerNorm::new(one.clone(), Some(one.clone()), 1e-5);
    let bytes = 8.0 * x.elem_count() as f64 / 1e9;
    let norm_s = fastest(RUNS, || drop(norm.forward(&x).unwrap()));
    println!("layer norm of 512 x 768: {:.1} GB/s read and written", bytes / norm_s);

    for keys in [128, 512, 1024] {
        let q = pattern((keys, HEADS * HEAD_DIM)).reshape((1, keys, HEADS, HEAD_DIM)).unwrap();
        let q = q.transpose(1, 2).unwrap();
        let causal: Vec<_> = (1..=keys).map(|keys| 0..keys).collect();
        let slots = KvSlot::side_by_side(1, keys);
        let cache = |dtype: KvDType| {
            let memory = KvMemory::new(HEADS, HEAD_DIM, slots[0].room(), dtype, &Device::Cpu).unwrap();
            memory.write(&slots, [&q, &q], &[0]).unwrap();
            memory
        };
        let memory = cache(KvDType::F32);
        let prefill_s = fastest(RUNS / 2, || drop(memory.attention(&q, &slots, 0.125, &causal).unwrap()));
        // On average, a query sees half of the keys.
        let flops = 2.0 * (HEADS * HEAD_DIM * keys * (keys + 1)) as f64 / 1e9;
        println!(
            "attention over {keys:>4} keys: all queries {:6.0} GFLOP/s ({:3.0}%)",
            flops / prefill_s,
            100.0 * flops / prefill_s / arithmetic
        );
        let last = q.narrow(2, keys - 1, 1).unwrap();
        for dtype in [KvDType::F32, KvDType::F16, KvDType::Q8] {
            // One cache per layer, so that keys and values come from main memory, as in a model.
            let caches: Vec<KvMemory> = (0..LAYERS).map(|_| cache(dtype)).collect();
            let decode_s = fastest(RUNS, || {
                for cache in &caches {
                    drop(cache.attention(&last, &slots, 0.125, &causal[keys - 1..]).unwrap());
                }
            });
            let bytes = (LAYERS * keys * dtype.bytes_per_token(HEADS, HEAD_DIM)) as f64 / 1e9;
            println!(
                "  one query over keys in {}: {:6.1} GB/s ({:3.0}%)",
                dtype.name(),
                bytes / decode_s,
                100.0 * bytes / decode_s / bandwidth
            );
        }
    }
}

fn report(name: &str, format: &str, read: f64, bandwidth: f64, speed: f64, arithmetic: f64) {
    println!(
        "{name:<11}{format:<7} one row {read:6.1} GB/s ({:3.0}%)   512 rows {speed:6.0} GFLOP/s ({:3.0}%)",
        100.0 * read / bandwidth,
        100.0 * speed / arithmetic
    );
}

/// Returns the duration of the fastest run in seconds.
fn fastest(runs: usize, mut work: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..runs.max(2) {
        let start = Instant::now();
        work();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

/// Returns a tensor of values with magnitudes up to about 1.
fn pattern(shape: (usize, usize)) -> Tensor {
    let values: Vec<f32> =
        (0..shape.0 * shape.1).map(|index| (index * 7919 % 2003) as f32 / 1001.5 - 1.0).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}
