//! Layers and attention on a device and dtype, compared with candle operations in f32 on the CPU.
//!
//! The environment variables `GPT2_TEST_DEVICE` and `GPT2_TEST_DTYPE` select the device and the dtype. On a
//! GPU, these tests reach every kernel of `cuda`.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_gpt2_arithmetic::KvSlot;
use candle_gpt2_kernels::{Activation, KvMemory, LayerNorm, Linear, prefix_attention_on_gpu, step_attention};
use candle_gpt2_testing::{assert_parity, device, dtype, pattern, skipped, values};
use candle_nn::ops::softmax;

/// Tolerance for differences between two f32 sums of 20 products of values below 1.
const TIGHT: f64 = 2e-6;
/// Tolerance for sums of up to 1,100 products in different orders, with results up to 30.
const LONG_SUMS: f64 = 5e-5;

/// Values rounded to the tested dtype, so they are equal on the device and the CPU.
fn rounded(shape: &[usize], scale: f64, offset: u64) -> Result<Tensor> {
    pattern(shape, scale, offset).to_dtype(dtype())?.to_dtype(DType::F32)
}

fn on_device(x: &Tensor) -> Result<Tensor> {
    x.to_device(&device())?.to_dtype(dtype())
}

#[test]
fn linear_layers_with_epilogues() -> Result<()> {
    for (rows, input, output) in [
        (1, 5, 3),
        (1, 300, 1601),
        (1, 1100, 72),
        (1, 20, 1600),
        (1, 20, 2072),
        (1, 20, 4120),
        (1, 20, 8200),
        (2, 300, 1600),
        (3, 7, 24),
        (4, 1100, 72),
        (7, 64, 96),
        (33, 48, 50),
    ] {
        let x = rounded(&[1, rows, input], 2.0, 1)?;
        let (weight, bias) = (rounded(&[output, input], 0.2, 2)?, rounded(&[output], 1.0, 3)?);
        let product = x.squeeze(0)?.matmul(&weight.t()?)?.broadcast_add(&bias)?.unsqueeze(0)?;
        let residual = rounded(&[1, rows, output], 2.0, 4)?;
        let weight = on_device(&weight)?;
        // PyTorch stores the first layout, GPT-2 checkpoints the second.
        for (order, weight) in [("(out, in)", weight.clone()), ("(in, out)", weight.t()?.contiguous()?.t()?)]
        {
            let layer = Linear::new(weight, Some(on_device(&bias)?))?;
            let what = format!("({rows}, {input}) to {output}, weight {order}");
            assert_parity(&layer.forward(&on_device(&x)?)?, &product, LONG_SUMS, &what);
            let added = layer.forward_added(&on_device(&x)?, &on_device(&residual)?)?;
            assert_parity(&added, &(&product + &residual)?, LONG_SUMS, &what);
            let activated = layer.forward_activated(&on_device(&x)?, Activation::GeluTanh)?;
            assert_parity(&activated, &product.gelu()?, LONG_SUMS, &what);
            let activated = layer.forward_activated(&on_device(&x)?, Activation::Relu)?;
            assert_parity(&activated, &product.relu()?, LONG_SUMS, &what);
        }
    }
    Ok(())
}

#[test]
fn layer_norms() -> Result<()> {
    for (rows, width) in [(1, 1), (1, 20), (3, 256), (5, 768), (2, 1601)] {
        // Far from zero, computing the variance as E[x²] - E[x]² would lose its significant digits.
        let x = (rounded(&[2, rows, width], 4.0, 1)? + 8.0)?.to_dtype(dtype())?.to_dtype(DType::F32)?;
        let (weight, bias) = (rounded(&[width], 1.0, 3)?, rounded(&[width], 1.0, 4)?);
        let reference = |x: &Tensor| {
            let centered = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
            let variance = (centered.sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?;
            centered.broadcast_div(&variance.sqrt()?)?.broadcast_mul(&weight)?.broadcast_add(&bias)
        };
        let norm = LayerNorm::new(on_device(&weight)?, Some(on_device(&bias)?), 1e-5);
        let what = format!("{rows} rows of {width}");
        assert_parity(&norm.forward(&on_device(&x)?)?, &reference(&x)?, 3e-6, &what);
    }
    Ok(())
}

/// Tests steps whose positions are in device memory.
///
/// Keys and values of each row are written to their positions and nowhere else. Queries see the keys up to
/// their own position. The head widths cover every kernel, and the rows have different lengths.
#[test]
fn steps_at_positions_in_device_memory() -> Result<()> {
    const CAPACITY: usize = 130;
    const LENGTHS: [usize; 3] = [0, 125, 62];
    const INPUT: usize = 20;
    if device().is_cpu() && dtype() != DType::F32 {
        skipped("on the CPU, steps at positions in memory support only f32");
        return Ok(());
    }
    for (head_dim, tokens) in [(6, 1), (64, 1), (64, 5), (80, 3), (128, 2), (200, 1), (200, 4), (256, 5)] {
        let what = format!("{tokens} tokens, {head_dim} wide");
        let x = rounded(&[3, tokens, INPUT], 1.0, 1)?;
        let (weight, bias) = (rounded(&[6 * head_dim, INPUT], 0.5, 2)?, rounded(&[6 * head_dim], 1.0, 3)?);
        let projected = x.broadcast_matmul(&weight.t()?)?.broadcast_add(&bias)?;
        // Rounds to the dtype of the stored keys and values, and of the queries in the kernel.
        let projected = projected.to_dtype(dtype())?.to_dtype(DType::F32)?;
        let projected = projected.reshape((3, tokens, 6, head_dim))?.transpose(1, 2)?;
        let slots = KvSlot::side_by_side(3, CAPACITY);
        let before = [4, 5].map(|offset| rounded(&[3, 2, CAPACITY, head_dim], 2.0, offset));
        let before = [before[0].as_ref().unwrap(), before[1].as_ref().unwrap()];
        let filled_memory = |dtype: DType, device: &Device| -> Result<KvMemory> {
            let memory = KvMemory::new(2, head_dim, 3 * slots[0].room(), dtype, device)?;
            let [keys, values] = before.map(|x| x.to_device(device)?.to_dtype(dtype));
            memory.write(&slots, [&keys?, &values?], &[0; 3])?;
            Ok(memory)
        };
        let expected = filled_memory(DType::F32, &Device::Cpu)?;
        let new = [&projected.narrow(1, 2, 2)?, &projected.narrow(1, 4, 2)?];
        expected.write(&slots, new, &LENGTHS)?;
        let scale = 1.0 / (head_dim as f64).sqrt();
        let places = LENGTHS.iter().flat_map(|length| *length..length + tokens);
        let seen: Vec<_> = places.clone().map(|place| 0..place + 1).collect();
        let context = expected.attention(&projected.narrow(1, 0, 2)?, &slots, scale, &seen)?;
        let context = context.transpose(1, 2)?.reshape((3, tokens, 2 * head_dim))?;

        let layer = Linear::new(on_device(&weight)?, Some(on_device(&bias)?))?;
        let memory = filled_memory(dtype(), &device())?;
        let positions: Vec<u32> = places.map(|place| u32::try_from(place).unwrap()).collect();
        let positions = Tensor::from_vec(positions, (3, tokens), &device())?;
        let found = step_attention(&layer, &on_device(&x)?, &memory, &slots, scale, &positions)?;
        assert_parity(&found, &context, 3e-6, &what);
        for row in 0..3 {
            let all = 0..CAPACITY;
            let (found, expected) = (memory.read(slots[row], all.clone())?, expected.read(slots[row], all)?);
            for ((found, expected), before) in found.iter().zip(&expected).zip(before) {
                assert_parity(found, expected, TIGHT, &what);
                // The other tokens are unchanged.
                let others = |x: &Tensor| -> Result<Tensor> {
                    let (first, next) = (x.narrow(2, 0, LENGTHS[row])?, LENGTHS[row] + tokens);
                    Tensor::cat(&[first, x.narrow(2, next, CAPACITY - next)?], 2)
                };
                let before = before.narrow(0, row, 1)?;
                assert!(values(&others(found)?) == values(&others(&before)?), "{what}");
            }
        }
        let is_rejected = |positions: &Tensor| {
            let found = step_attention(&layer, &on_device(&x)?, &memory, &slots, scale, positions);
            Ok::<_, candle_core::Error>(found.is_err())
        };
        assert!(is_rejected(&positions.narrow(0, 0, 2)?)?, "two of three rows");
        assert!(is_rejected(&positions.narrow(1, 0, 1)?.squeeze(1)?.contiguous()?)?, "no axis of tokens");
        assert!(
            tokens == 1 || is_rejected(&positions.narrow(1, 0, tokens - 1)?.contiguous()?)?,
            "fewer positions than tokens"
        );
    }
    Ok(())
}

/// Computes attention with the GPU's kernels on a GPU, otherwise with the CPU's kernels.
fn attended(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, visible: &[usize]) -> Result<Tensor> {
    if let Some(context) = prefix_attention_on_gpu(q, k, v, scale, visible)? {
        return Ok(context);
    }
    assert!(!q.device().is_cuda(), "the GPU's kernels apply");
    let [q, k, v] = [q, k, v].map(|x| x.to_device(&Device::Cpu)?.to_dtype(DType::F32));
    let (k, v) = (k?, v?);
    let (batch, heads, key_len, head_dim) = k.dims4()?;
    let slots = KvSlot::side_by_side(batch, key_len);
    let tokens = slots.iter().map(|slot| slot.room()).sum();
    let memory = KvMemory::new(heads, head_dim, tokens, DType::F32, &Device::Cpu)?;
    memory.write(&slots, [&k, &v], &vec![0; batch])?;
    let visible: Vec<_> = visible.iter().map(|keys| 0..*keys).collect();
    memory.attention(&q?, &slots, scale, &visible)
}

/// Attention over a prefix of the keys, with cases for every kernel.
///
/// The cases cover one query and many, regular and ragged rows, few keys, and enough keys that GPU blocks
/// share them. Head widths cover every kernel and exceed the largest one. Keys and values are views into a
/// longer cache.
#[test]
fn attention_over_a_prefix_of_the_keys() -> Result<()> {
    const CAPACITY: usize = 1030;
    for (query_len, key_len, visible) in [
        (1, 1, vec![1, 1]),
        (1, 7, vec![7, 7]),
        (1, 130, vec![130, 65]),
        (1, 1024, vec![1024, 640]),
        (5, 9, vec![5, 6, 7, 8, 9, 5, 6, 7, 8, 9]),
        (4, 20, vec![17, 18, 19, 20, 3, 4, 5, 6]),
        (3, 4, vec![4; 6]),
    ] {
        for head_dim in [6, 64, 80, 128, 200, 300] {
            let q = rounded(&[2, query_len, 3, head_dim], 2.0, 1)?.transpose(1, 2)?;
            let cache = |offset| rounded(&[2, 3, CAPACITY, head_dim], 2.0, offset);
            let (k, v) = (cache(2)?.narrow(2, 0, key_len)?, cache(3)?.narrow(2, 0, key_len)?);
            let scale = 1.0 / (head_dim as f64).sqrt();
            let mask: Vec<f32> = visible
                .iter()
                .flat_map(|seen| {
                    (0..key_len).map(move |key| if key < *seen { 0.0 } else { f32::NEG_INFINITY })
                })
                .collect();
            let mask = Tensor::from_vec(mask, (2, 1, query_len, key_len), &Device::Cpu)?;
            let scores = (q.contiguous()?.matmul(&k.contiguous()?.t()?)? * scale)?.broadcast_add(&mask)?;
            let expected = softmax(&scores, D::Minus1)?.matmul(&v.contiguous()?)?;
            let what = format!("{query_len} queries of {key_len} keys, {head_dim} wide");
            let narrowed = |x: &Tensor| on_device(x)?.narrow(2, 0, key_len);
            let (mut q, k, v) = (on_device(&q)?, narrowed(&cache(2)?)?, narrowed(&cache(3)?)?);
            if query_len == 1 {
                q = q.squeeze(2)?.contiguous()?.unsqueeze(2)?; // an axis of length 1 may have any stride
            }
            let found = attended(&q, &k, &v, scale, &visible)?;
            assert_parity(&found, &expected, 3e-6, &what);
            let again = attended(&q, &k, &v, scale, &visible)?;
            assert!(values(&again) == values(&found), "{what}: the same bits each time");
        }
    }
    Ok(())
}

/// Covers three ranges of sequence sizes on a GPU.
///
/// A sequence with more than 2^20 scores has its own products, and smaller sequences share products. Batches
/// with more than 2^26 scores are split into chunks.
#[test]
fn attention_of_many_and_large_sequences() -> Result<()> {
    for (sequences, tokens, checked) in [(2, 730, vec![0, 1]), (69, 720, vec![0, 63, 64, 68])] {
        let part = |offset| rounded(&[sequences, tokens, 2, 8], 2.0, offset)?.transpose(1, 2);
        let (q, k, v) = (part(1)?, part(2)?, part(3)?);
        let visible: Vec<usize> = (0..sequences * tokens).map(|query| query % tokens + 1).collect();
        let on = |q: &Tensor, k: &Tensor, v: &Tensor| {
            let visible = &visible[..q.dim(0)? * tokens];
            attended(&on_device(q)?, &on_device(k)?, &on_device(v)?, 0.3, visible)
        };
        let found = on(&q, &k, &v)?;
        for sequence in checked {
            let select = |x: &Tensor| x.narrow(0, sequence, 1)?.contiguous();
            let alone = on(&select(&q)?, &select(&k)?, &select(&v)?)?;
            let alone = alone.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
            assert_parity(&select(&found)?, &alone, 3e-6, &format!("sequence {sequence} of {sequences}"));
        }
    }
    Ok(())
}

/// Keys whose scores are -inf get zero weight, even if a block or warp sees only such keys.
#[test]
fn keys_with_infinite_scores_have_zero_weight() -> Result<()> {
    const KEYS: usize = 600;
    const WIDTH: usize = 64;
    for finite in [0, 70, KEYS - 1] {
        let first = |key: usize| if key == finite { 1.0 } else { f32::NEG_INFINITY };
        let first = Tensor::from_iter((0..KEYS).map(first), &Device::Cpu)?.reshape((1, 1, KEYS, 1))?;
        let k = Tensor::cat(&[&first, &rounded(&[1, 1, KEYS, WIDTH - 1], 1.0, 1)?], D::Minus1)?;
        let (q, v) = (Tensor::ones((1, 1, 1, WIDTH), DType::F32, &Device::Cpu)?, rounded(k.dims(), 1.0, 2)?);
        let found = attended(&on_device(&q)?, &on_device(&k)?, &on_device(&v)?, 1.0, &[KEYS])?;
        assert_parity(&found, &v.narrow(2, finite, 1)?, TIGHT, &format!("key {finite} of {KEYS}"));
    }
    Ok(())
}
