//! Training operations: values against candle compositions, gradients against finite differences.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_gpt2_arithmetic::{AdamWStep, Dropout, NumberType, RandomStream};
use candle_gpt2_kernels::{
    Activation, AdaptedMatrix, HeadsAttention, InitialGradients, KernelError, LayerNorm, Linear, Matrix,
    adamw_step, add, add_positions, dropout, gradients, head_loss, head_loss_reference, heads_attention,
    heads_attention_reference, interruptible, recomputed, runs_as_in_training, squared_norm,
    without_gradients,
};
use candle_gpt2_testing::{assert_close, pattern, values};

/// Step size of the central differences; in f64, their error is about 1e-9 for values near 1.
const STEP: f64 = 1e-5;
const DIFFERENCE_TOLERANCE: f64 = 1e-7;
/// Tolerance for f32 sums of up to a few hundred terms in a different order.
const F32_TOLERANCE: f64 = 2e-5;

/// Checks every gradient of `function` at `inputs`, in f64, against central differences.
///
/// The result is weighted so that no gradient cancels by symmetry.
fn assert_gradients(inputs: &[Tensor], function: impl Fn(&[Tensor]) -> Result<Tensor>) -> Result<()> {
    let weighted = |inputs: &[Tensor]| -> Result<Tensor> {
        let y = function(inputs)?;
        let weights = pattern(y.dims(), 2.0, 12_345).to_dtype(DType::F64)?;
        (y * weights)?.sum_all()
    };
    let inputs: Vec<Tensor> = inputs.iter().map(|input| input.to_dtype(DType::F64)).collect::<Result<_>>()?;
    let variables: Vec<Var> = inputs.iter().map(Var::from_tensor).collect::<Result<_>>()?;
    let tracked: Vec<Tensor> = variables.iter().map(|variable| variable.as_tensor().clone()).collect();
    let gradients = weighted(&tracked)?.backward()?;
    for (index, variable) in variables.iter().enumerate() {
        let gradient = gradients.get(variable).unwrap_or_else(|| panic!("input {index} has no gradient"));
        let original = values(&inputs[index]);
        let at = |element: usize, step: f64| -> Result<f64> {
            let mut moved = original.clone();
            moved[element] += step;
            let mut inputs = inputs.clone();
            // Uses a variable, so that the perturbed call also runs the differentiable operation.
            let moved = Tensor::from_vec(moved, inputs[index].shape(), &Device::Cpu)?;
            inputs[index] = Var::from_tensor(&moved)?.as_tensor().clone();
            weighted(&inputs)?.to_scalar()
        };
        let expected: Vec<f64> = (0..original.len())
            .map(|element| Ok((at(element, STEP)? - at(element, -STEP)?) / (2.0 * STEP)))
            .collect::<Result<_>>()?;
        let expected = Tensor::from_vec(expected, inputs[index].shape(), &Device::Cpu)?;
        assert_close(gradient, &expected, DIFFERENCE_TOLERANCE, &format!("gradient of input {index}"));
    }
    Ok(())
}

/// Computes the value and gradients of a function of variables.
fn with_gradients(inputs: &[Tensor], function: impl Fn(&[Tensor]) -> Result<Tensor>) -> Result<Vec<Tensor>> {
    let variables: Vec<Var> = inputs.iter().map(Var::from_tensor).collect::<Result<_>>()?;
    let tracked: Vec<Tensor> = variables.iter().map(|variable| variable.as_tensor().clone()).collect();
    let y = function(&tracked)?;
    let weights = pattern(y.dims(), 2.0, 12_345).to_dtype(y.dtype())?;
    let gradients = (&y * weights)?.sum_all()?.backward()?;
    let gradients = variables.iter().map(|variable| gradients.get(variable).expect("a gradient").clone());
    Ok(std::iter::once(y).chain(gradients).collect())
}

#[test]
fn linear_gradients_match_finite_differences() -> Result<()> {
    let inputs = [pattern(&[2, 3, 5], 2.0, 0), pattern(&[7, 5], 2.0, 9), pattern(&[7], 2.0, 99)];
    assert_gradients(&inputs, |inputs| {
        Linear::new(inputs[1].clone(), Some(inputs[2].clone()))?.forward(&inputs[0])
    })
}

#[test]
fn bias_gradient_sums_many_rows_and_columns() -> Result<()> {
    // More than one block of rows and of columns, with remainders.
    let (rows, bias) = (pattern(&[150, 3], 2.0, 0), pattern(&[133], 2.0, 9));
    let weight = pattern(&[133, 3], 2.0, 99);
    let value_and_gradients = with_gradients(&[rows, weight, bias], |inputs| {
        Linear::new(inputs[1].clone(), Some(inputs[2].clone()))?.forward(&inputs[0])
    })?;
    let expected = pattern(&[150, 133], 2.0, 12_345).sum(0)?;
    assert_close(&value_and_gradients[3], &expected, F32_TOLERANCE, "column sums");
    Ok(())
}

#[test]
fn layer_norm_gradients_match_finite_differences() -> Result<()> {
    let inputs = [pattern(&[2, 3, 11], 2.0, 0), pattern(&[11], 2.0, 9), pattern(&[11], 2.0, 99)];
    assert_gradients(&inputs, |inputs| {
        LayerNorm::new(inputs[1].clone(), Some(inputs[2].clone()), 1e-5).forward(&inputs[0])
    })
}

#[test]
fn layer_norm_sums_gradients_over_all_row_blocks() -> Result<()> {
    let x = pattern(&[150, 24], 2.0, 0);
    let (weight, bias) = (pattern(&[24], 2.0, 9), pattern(&[24], 2.0, 99));
    let fused = with_gradients(&[x.clone(), weight.clone(), bias.clone()], |inputs| {
        LayerNorm::new(inputs[1].clone(), Some(inputs[2].clone()), 1e-5).forward(&inputs[0])
    })?;
    let composed = with_gradients(&[x, weight, bias], |inputs| {
        candle_nn::ops::layer_norm_slow(&inputs[0], &inputs[1], &inputs[2], 1e-5)
    })?;
    for (index, (fused, composed)) in fused.iter().zip(&composed).enumerate() {
        assert_close(fused, composed, 5e-5, &format!("value or gradient {index}"));
    }
    Ok(())
}

#[test]
fn activation_gradients_match_finite_differences() -> Result<()> {
    for (_, activation) in Activation::NAMES.iter().filter(|(_, activation)| *activation != Activation::Relu)
    {
        assert_gradients(&[pattern(&[3, 41], 12.0, 0)], |inputs| activation.forward(&inputs[0]))?;
    }
    Ok(())
}

#[test]
fn dropout_masks_the_gradient_like_the_value() -> Result<()> {
    assert_gradients(&[pattern(&[3, 17], 2.0, 0)], |inputs| {
        dropout(&inputs[0], 0.4, &mut RandomStream::new(5))
    })
}

const ATTENTION_DROPOUT: Dropout = Dropout { rate: 0.3, seed: 11 };

/// Kinds of masks, each with the visible keys of its queries.
fn masks(queries: usize, keys: usize) -> [(&'static str, Vec<Range<usize>>); 3] {
    let causal = (0..queries).map(|query| 0..(query + 1).min(keys)).collect();
    let window =
        (0..queries).map(|query| query.saturating_sub(3).min(keys - 1)..(query + 2).min(keys)).collect();
    [("causal", causal), ("all", vec![0..keys; queries]), ("window", window)]
}

fn causal(heads: usize, tokens: usize, scale: f64, dropout: Option<Dropout>) -> HeadsAttention {
    HeadsAttention { heads, scale, visible: masks(tokens, tokens)[0].1.clone(), added: None, dropout }
}

/// Projections for two heads, in one, two and three tensors.
fn projections(batch: usize, queries: usize, keys: usize, head_dim: usize) -> Vec<Vec<Tensor>> {
    let tensor =
        |tokens: usize, parts: usize, index: u64| pattern(&[batch, tokens, parts * 2 * head_dim], 4.0, index);
    let mut layouts = vec![
        vec![tensor(queries, 1, 0), tensor(keys, 2, 1)],
        vec![tensor(queries, 1, 2), tensor(keys, 1, 3), tensor(keys, 1, 4)],
        // Values whose width differs from the width of the keys.
        vec![tensor(queries, 1, 5), tensor(keys, 1, 6), tensor(keys, 2, 7)],
    ];
    if queries == keys {
        layouts.push(vec![tensor(queries, 3, 8)]);
    }
    layouts
}

#[test]
fn attention_gradients_match_finite_differences() -> Result<()> {
    for (queries, keys) in [(5, 5), (4, 7)] {
        for inputs in projections(2, queries, keys, 3) {
            for (_, visible) in masks(queries, keys) {
                let added = Some(pattern(&[2, 1, 1, keys], 2.0, 9));
                for (added, dropout) in [(None, None), (added, Some(ATTENTION_DROPOUT))] {
                    let attention =
                        HeadsAttention { heads: 2, scale: 0.7, visible: visible.clone(), added, dropout };
                    assert_gradients(&inputs, |inputs| {
                        heads_attention(&inputs.iter().collect::<Vec<_>>(), attention.clone())
                    })?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn attention_equals_its_composition_at_every_size() -> Result<()> {
    // One token, a remainder after a block of queries, full tiles, odd head widths, windows that hide keys.
    for (batch, queries, keys, head_dim) in
        [(2, 1, 1, 8), (1, 1, 40, 8), (1, 33, 33, 5), (2, 64, 20, 16), (1, 70, 70, 20), (1, 150, 210, 64)]
    {
        for inputs in projections(batch, queries, keys, head_dim) {
            for (name, visible) in masks(queries, keys) {
                // Full shape, one row for each query, one value for each query, one value for each key.
                let shapes: [Option<&[usize]>; 5] = [
                    None,
                    Some(&[batch, 2, queries, keys]),
                    Some(&[queries, keys]),
                    Some(&[2, queries, 1]),
                    Some(&[batch, 1, 1, keys]),
                ];
                for (index, shape) in shapes.into_iter().enumerate() {
                    let dropout = (index % 2 == 1).then_some(ATTENTION_DROPOUT);
                    let added = shape.map(|shape| pattern(shape, 3.0, 9));
                    let attention =
                        HeadsAttention { heads: 2, scale: 0.3, visible: visible.clone(), added, dropout };
                    let fused = with_gradients(&inputs, |inputs| {
                        heads_attention(&inputs.iter().collect::<Vec<_>>(), attention.clone())
                    })?;
                    let composed = with_gradients(&inputs, |inputs| {
                        heads_attention_reference(&inputs.iter().collect::<Vec<_>>(), &attention)
                    })?;
                    for (which, (fused, composed)) in fused.iter().zip(&composed).enumerate() {
                        let what = format!(
                            "{name}: value or gradient {which} of {} tensors, {queries} queries of {head_dim}, {keys} keys, {shape:?}",
                            inputs.len()
                        );
                        assert_close(fused, composed, F32_TOLERANCE, &what);
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn mismatched_projections_are_rejected() {
    let tensor = |tokens: usize, width: usize| pattern(&[1, tokens, width], 1.0, 0);
    let unseen = HeadsAttention { visible: vec![0..1, 1..1], ..causal(2, 2, 1.0, None) };
    for (inputs, attention, expected) in [
        (vec![tensor(2, 20)], causal(3, 2, 1.0, None), "[[1, 2, 20]]"),
        (vec![tensor(2, 12), tensor(2, 12), tensor(3, 12)], causal(2, 2, 1.0, None), "[1, 3, 12]]"),
        (vec![tensor(2, 12), tensor(2, 6), tensor(2, 12)], causal(2, 2, 1.0, None), "[1, 2, 6]"),
        (vec![tensor(2, 12)], causal(2, 3, 1.0, None), "[[1, 2, 12]]"),
        (vec![tensor(2, 12)], unseen, "a visible key for each query"),
        (vec![], causal(2, 2, 1.0, None), "found shapes []"),
    ] {
        let error = heads_attention(&inputs.iter().collect::<Vec<_>>(), attention).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// Dropout at 0.5 zeroes half of the attention weights and doubles the others.
///
/// Source: "Build a Large Language Model (From Scratch)" (Raschka, 2024, section 3.5.2).
#[test]
fn attention_dropout_zeroes_its_fraction_and_scales_the_rest() -> Result<()> {
    const TOKENS: usize = 128;
    // Equal scores give weights of 1 / (i + 1). The values form an identity matrix, so the contexts equal the
    // weights.
    let zeros = Tensor::zeros((1, TOKENS, 2 * TOKENS), DType::F32, &Device::Cpu)?;
    let identity = Tensor::eye(TOKENS, DType::F32, &Device::Cpu)?.unsqueeze(0)?;
    let qkv = Tensor::cat(&[zeros, identity], 2)?;
    let half = Dropout { rate: 0.5, seed: 3 };
    let weights =
        heads_attention(&[&qkv], causal(1, TOKENS, 1.0, Some(half)))?.squeeze(0)?.to_vec2::<f32>()?;
    let mut dropped = 0;
    for (query, row) in weights.iter().enumerate() {
        let doubled = 2.0 / (query + 1) as f32;
        for weight in &row[..=query] {
            assert!(*weight == 0.0 || (weight / doubled - 1.0).abs() < 1e-6, "query {query}: {weight}");
            dropped += usize::from(*weight == 0.0);
        }
        assert!(row[query + 1..].iter().all(|weight| *weight == 0.0), "query {query} sees the future");
    }
    // The standard deviation of 8,256 samples at 0.5 is 45.
    assert!((3900..=4356).contains(&dropped), "{dropped} of 8256 weights dropped");
    Ok(())
}

#[test]
fn head_loss_gradients_match_finite_differences() -> Result<()> {
    let targets = [3, 0, 12, 3, 7];
    assert_gradients(&[pattern(&[5, 6], 4.0, 0), pattern(&[13, 6], 4.0, 9)], |inputs| {
        head_loss(&inputs[0], &inputs[1], &targets)
    })
}

#[test]
fn chunked_head_loss_equals_the_composition() -> Result<()> {
    // 150 rows of 70,001 logits need two chunks.
    let (hidden, weight) = (pattern(&[150, 4], 4.0, 0), pattern(&[70_001, 4], 4.0, 9));
    let targets: Vec<u32> = (0..150).map(|row| (row * 467) % 70_001).collect();
    let fused = with_gradients(&[hidden.clone(), weight.clone()], |inputs| {
        head_loss(&inputs[0], &inputs[1], &targets)
    })?;
    let composed = with_gradients(&[hidden.clone(), weight.clone()], |inputs| {
        head_loss_reference(&inputs[0], &inputs[1], &targets)
    })?;
    for (what, (fused, composed)) in
        ["loss", "gradient of hidden states", "gradient of the head"].iter().zip(fused.iter().zip(&composed))
    {
        assert_close(fused, composed, F32_TOLERANCE, what);
    }
    let without_gradients = head_loss(&hidden, &weight, &targets)?;
    assert_close(&without_gradients, &fused[0], F32_TOLERANCE, "loss of untracked tensors");
    for (targets, expected) in [(&[70_001; 150][..], "outside the vocabulary"), (&[1; 149], "150 rows")] {
        let error = head_loss(&hidden, &weight, targets).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    Ok(())
}

#[test]
fn adamw_step_follows_its_formula() -> Result<()> {
    let parameter = Var::from_tensor(&Tensor::new(&[1.0f64, -2.0], &Device::Cpu)?)?;
    let zeros = || Var::from_tensor(&Tensor::zeros(2, DType::F64, &Device::Cpu)?);
    let (mean, square) = (zeros()?, zeros()?);
    let mut settings = AdamWStep {
        learning_rate: 0.1,
        beta_1: 0.9,
        beta_2: 0.99,
        epsilon: 1e-8,
        weight_decay: 0.5,
        step: 0,
        gradient_factor: 0.5,
    };
    let (mut p, mut m, mut v) = ([1.0f64, -2.0], [0.0; 2], [0.0; 2]);
    for step in 1..=3i32 {
        settings.step = u64::from(step.unsigned_abs());
        let gradient = [f64::from(step), -0.25];
        adamw_step(&parameter, &Tensor::new(&gradient, &Device::Cpu)?, &mean, &square, &settings)?;
        for index in 0..2 {
            let g = gradient[index] * 0.5;
            m[index] = 0.9 * m[index] + 0.1 * g;
            v[index] = 0.99 * v[index] + 0.01 * g * g;
            p[index] *= 1.0 - 0.1 * 0.5;
            let denominator = (v[index] / (1.0 - 0.99f64.powi(step))).sqrt() + 1e-8;
            p[index] -= 0.1 * (m[index] / (1.0 - 0.9f64.powi(step))) / denominator;
        }
    }
    assert_close(&parameter, &Tensor::new(&p, &Device::Cpu)?, 1e-12, "parameter");
    Ok(())
}

#[test]
fn squared_norm_is_the_sum_of_squares() -> Result<()> {
    let x = pattern(&[3, 7001], 2.0, 0);
    let expected: f64 = values(&x).iter().map(|value| value * value).sum();
    assert!((squared_norm(&x)? / expected - 1.0).abs() < 1e-12);
    Ok(())
}

#[test]
fn embedding_gradients_match_finite_differences() -> Result<()> {
    // Row 1 is looked up twice and row 2 never. The positions are rows 1 to 3 of five.
    let ids = Tensor::new(&[[1u32, 0, 3], [1, 3, 0]], &Device::Cpu)?;
    assert_gradients(&[pattern(&[4, 5], 2.0, 0), pattern(&[5, 5], 2.0, 9)], |inputs| {
        let tokens = Linear::new(inputs[0].clone(), None)?.embedding(&ids)?;
        add_positions(&tokens, &inputs[1], 1)
    })?;
    let table = Var::from_tensor(&pattern(&[4, 5], 2.0, 0))?;
    let layer = Linear::new(table.as_tensor().clone(), None)?;
    let error = layer.embedding(&Tensor::new(&[4u32], &Device::Cpu)?).unwrap_err().to_string();
    assert!(error.contains('4'), "{error}");
    Ok(())
}

#[test]
fn residual_gradients_match_finite_differences() -> Result<()> {
    assert_gradients(&[pattern(&[2, 7], 2.0, 0), pattern(&[2, 7], 2.0, 9)], |inputs| {
        // The first input is used twice, so its gradients must accumulate.
        add(&inputs[0], &add(&inputs[0], &inputs[1])?)
    })
}

/// Layer of shape (7, 5) with an adapter of rank 2.
fn adapted(base: Matrix, a: &Tensor, b: &Tensor, bias: Option<Tensor>) -> Result<Linear> {
    let weight = AdaptedMatrix::new(base, a.clone(), b.clone(), 1.5)?;
    Linear::from_matrix(Matrix::Adapted(weight.into()), bias)
}

#[test]
fn adapter_gradients_match_and_the_base_stays_frozen() -> Result<()> {
    let weight = Var::from_tensor(&pattern(&[7, 5], 2.0, 99).to_dtype(DType::F64)?)?;
    let bias = pattern(&[7], 2.0, 5).to_dtype(DType::F64)?;
    let base = || Matrix::Dense(weight.as_tensor().clone());
    let (x, a, b) = (pattern(&[2, 3, 5], 2.0, 7), pattern(&[2, 5], 2.0, 0), pattern(&[7, 2], 2.0, 9));
    for bias in [None, Some(bias)] {
        assert_gradients(&[x.clone(), a.clone(), b.clone()], |inputs| {
            adapted(base(), &inputs[1], &inputs[2], bias.clone())?.forward(&inputs[0])
        })?;
    }
    let [x, a, b] = [x, a, b].map(|input| Var::from_tensor(&input.to_dtype(DType::F64).unwrap()).unwrap());
    let y = adapted(base(), &a, &b, None)?.forward(&x)?;
    assert!(y.sum_all()?.backward()?.get(&weight).is_none());
    Ok(())
}

/// Packed weights stay packed under an adapter, and the result matches their unpacked values.
#[test]
fn adapters_equal_merged_weights() -> Result<()> {
    let (weight, bias) = (pattern(&[48, 64], 2.0, 99), pattern(&[48], 2.0, 5));
    let inputs = [pattern(&[3, 21, 64], 2.0, 7), pattern(&[2, 64], 0.5, 0), pattern(&[48, 2], 0.5, 9)];
    for (base, tolerance) in [
        (Matrix::Dense(weight.clone()), F32_TOLERANCE),
        (Matrix::pack(&weight, NumberType::F32)?, F32_TOLERANCE),
        (Matrix::pack(&weight, NumberType::F16)?, F32_TOLERANCE),
        // Each of 64 activations up to 1 has an error up to 1 / 254 and is multiplied by a weight of 0.5 on
        // average.
        (Matrix::pack(&weight, NumberType::Q8)?, 0.13),
    ] {
        let weight = base.to_tensor()?;
        let merged = |a: &Tensor, b: &Tensor| &weight + (b.matmul(a)? * 1.5)?;
        let expected = with_gradients(&inputs, |inputs| {
            let x = inputs[0].reshape((63, 64))?;
            x.matmul(&merged(&inputs[1], &inputs[2])?.t()?)?.broadcast_add(&bias)?.reshape((3, 21, 48))
        })?;
        let found = with_gradients(&inputs, |inputs| {
            adapted(base.clone(), &inputs[1], &inputs[2], Some(bias.clone()))?.forward(&inputs[0])
        })?;
        assert_close(&found[0], &expected[0], tolerance, &format!("value with {base:?}"));
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate().skip(1) {
            assert_close(found, expected, F32_TOLERANCE, &format!("gradient {index} with {base:?}"));
        }
        let layer = adapted(base.clone(), &inputs[1], &inputs[2], None)?;
        let merged = merged(&inputs[1], &inputs[2])?;
        assert_close(&layer.weight().to_tensor()?, &merged, F32_TOLERANCE, &format!("{base:?} merged"));
        let without_gradients = layer.forward(&inputs[0])?.broadcast_add(&bias)?;
        assert_close(&without_gradients, &expected[0], tolerance, &format!("{base:?} without gradients"));
    }
    let wrong = AdaptedMatrix::new(Matrix::Dense(weight), inputs[2].clone(), inputs[1].clone(), 1.0);
    assert!(wrong.unwrap_err().to_string().contains("do not match"));
    Ok(())
}

/// Packed weights are not variables, but gradients pass through them to earlier operations.
#[test]
fn gradients_pass_through_packed_weights() -> Result<()> {
    let (weight, bias, x) =
        (pattern(&[48, 64], 2.0, 99), pattern(&[48], 2.0, 5), pattern(&[3, 21, 64], 2.0, 7));
    for format in [NumberType::F32, NumberType::F16, NumberType::Q8] {
        let packed = Matrix::pack(&weight, format)?;
        let dense = Linear::new(packed.to_tensor()?, Some(bias.clone()))?;
        let packed = Linear::from_matrix(packed, Some(bias.clone()))?;
        let of = |layer: &Linear| {
            with_gradients(std::slice::from_ref(&x), |inputs| {
                layer.forward_activated(&inputs[0], Activation::GeluTanh)
            })
        };
        let (found, expected) = (of(&packed)?, of(&dense)?);
        // In q8, products also round their activations, which changes the input of the activation function's
        // derivative.
        let tolerance = if format == NumberType::Q8 { 0.3 } else { F32_TOLERANCE };
        assert_close(&found[1], &expected[1], tolerance, &format!("{format:?}"));
    }
    Ok(())
}

#[test]
fn non_positive_scale_is_rejected() -> Result<()> {
    for scale in [0.0, -0.5, f64::NAN, f64::INFINITY] {
        let error = heads_attention(&[&pattern(&[1, 3, 12], 1.0, 0)], causal(2, 3, scale, None)).unwrap_err();
        assert!(error.to_string().contains("expected a finite scale greater than 0"), "{scale}: {error}");
    }
    Ok(())
}

#[test]
fn runs_as_in_training_if_tracked_or_without_gradients() -> Result<()> {
    let x = pattern(&[2], 1.0, 0);
    let is_tracked = runs_as_in_training(Var::from_tensor(&x)?.as_tensor());
    assert!(is_tracked && !runs_as_in_training(&x));
    without_gradients(|| {
        assert!(runs_as_in_training(&x) && !runs_as_in_training(&x.to_dtype(DType::F16)?));
        Ok(x.clone())
    })?;
    Ok(())
}

/// Covers candle's own operations, which always record a graph, and this crate's operations.
#[test]
fn results_without_gradients_are_constants() -> Result<()> {
    let x = Var::from_tensor(&pattern(&[2, 3], 1.0, 0))?;
    let layer = Linear::new(Var::from_tensor(&pattern(&[4, 3], 1.0, 9))?.into_inner(), None)?;
    for y in [without_gradients(|| x.sqr()), without_gradients(|| layer.forward(&x))] {
        let y = y?;
        assert!(!y.track_op());
        assert!(y.sum_all()?.backward()?.get(&x).is_none());
    }
    assert!(layer.forward(&x)?.track_op(), "the recording continues afterward");
    Ok(())
}

/// Variables of a small network.
fn variables() -> Result<Vec<Var>> {
    let shapes: [&[usize]; 8] = [&[11, 6], &[4, 6], &[6], &[6], &[18, 6], &[18], &[6, 6], &[6]];
    let tensors =
        shapes.iter().enumerate().map(|(index, shape)| Var::from_tensor(&pattern(shape, 1.0, index as u64)));
    tensors.collect()
}

/// Loss of a small network whose operations have their own backward pass.
fn loss(variables: &[Var], activation: Activation, recomputes: bool) -> Result<Tensor> {
    let [wte, wpe, weight, bias, c_attn, c_attn_bias, c_proj, c_proj_bias] = variables else {
        unreachable!()
    };
    let tensor = |variable: &Var| variable.as_tensor().clone();
    let ids = Tensor::new(&[[1u32, 0, 3], [7, 3, 0]], &Device::Cpu)?;
    let head = Linear::new(tensor(wte), None)?;
    let norm = LayerNorm::new(tensor(weight), Some(tensor(bias)), 1e-5);
    let qkv = Linear::new(tensor(c_attn), Some(tensor(c_attn_bias)))?;
    let projection = Linear::new(tensor(c_proj), Some(tensor(c_proj_bias)))?;
    let block = move |x: &Tensor| {
        let dropped = dropout(&norm.forward(x)?, 0.2, &mut RandomStream::new(7))?;
        let context = heads_attention(&[&qkv.forward(&dropped)?], causal(2, 3, 0.5, None))?;
        add(x, &activation.forward(&projection.forward(&context)?)?)
    };
    let mut x = add_positions(&head.embedding(&ids)?, wpe, 0)?;
    for _ in 0..2 {
        x = if recomputes { recomputed(&x, block.clone())? } else { block(&x)? };
    }
    head_loss(&x, wte, &[3, 1, 10, 0, 4, 4])
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

#[test]
fn gradients_equal_the_candle_backward_pass() -> Result<()> {
    let variables = variables()?;
    let tensors: Vec<&Tensor> = variables.iter().map(|variable| variable.as_tensor()).collect();
    for (_, activation) in Activation::NAMES {
        let expected = loss(&variables, activation, false)?.backward()?;
        let (value, found) =
            gradients(&tensors, InitialGradients::Nothing, 0.5, || loss(&variables, activation, false))?;
        assert!((value - f64::from(loss(&variables, activation, false)?.to_scalar::<f32>()?)).abs() < 1e-12);
        for (index, (variable, found)) in variables.iter().zip(found).enumerate() {
            let expected = (expected.get(variable).expect("a gradient") * 0.5)?;
            assert_close(&found.expect("a gradient"), &expected, F32_TOLERANCE, &format!("variable {index}"));
        }
    }
    Ok(())
}

#[test]
fn gradients_reuse_memory_and_accumulate() -> Result<()> {
    let variables = variables()?;
    let tensors: Vec<&Tensor> = variables.iter().map(|variable| variable.as_tensor()).collect();
    let run = |before| -> Result<Vec<Tensor>> {
        let (_, found) = gradients(&tensors, before, 1.0, || loss(&variables, Activation::GeluTanh, false))?;
        Ok(found.into_iter().map(|gradient| gradient.expect("a gradient")).collect())
    };
    let fresh = run(InitialGradients::Nothing)?;
    let expected: Vec<Vec<u32>> = fresh.iter().map(bits).collect();
    let again = run(InitialGradients::Memory(fresh))?;
    assert_eq!(again.iter().map(bits).collect::<Vec<_>>(), expected);
    let twice = run(InitialGradients::Gradients(again))?;
    for (twice, once) in twice.iter().zip(run(InitialGradients::Nothing)?) {
        assert_close(twice, &(once * 2.0)?, F32_TOLERANCE, "twice the gradient");
    }
    Ok(())
}

#[test]
fn recomputation_does_not_change_gradients() -> Result<()> {
    let variables = variables()?;
    let tensors: Vec<&Tensor> = variables.iter().map(|variable| variable.as_tensor()).collect();
    for activation in [Activation::GeluTanh, Activation::Silu] {
        let run = |recomputes| {
            gradients(&tensors, InitialGradients::Nothing, 1.0, || loss(&variables, activation, recomputes))
        };
        let ((kept_loss, kept), (again_loss, again)) = (run(false)?, run(true)?);
        assert_eq!(kept_loss, again_loss);
        for (kept, again) in kept.iter().zip(&again) {
            assert_eq!(bits(kept.as_ref().unwrap()), bits(again.as_ref().unwrap()));
        }
    }
    Ok(())
}

/// Includes a loss and steps that only candle computes, and a variable that candle also uses.
#[test]
fn gradients_pass_through_candle_operations() -> Result<()> {
    let variables =
        [Var::from_tensor(&pattern(&[4, 6], 1.0, 0))?, Var::from_tensor(&pattern(&[4, 4], 1.0, 9))?];
    let tensors: Vec<&Tensor> = variables.iter().map(|variable| variable.as_tensor()).collect();
    let loss = || -> Result<Tensor> {
        let weight = Linear::new(variables[0].as_tensor().clone(), None)?;
        let x = variables[0].matmul(&variables[0].t()?)?.mul(variables[1].as_tensor())?; // (4, 4), by candle
        let back = Linear::new(x.clone(), None)?.forward(&variables[0].t()?)?; // (6, 4), by this crate
        let y = weight.forward(&back.t()?)?.tanh()?; // (4, 4), by this crate, then candle
        (add(&y, &x)? * &y)?.sqr()?.mean_all()
    };
    let expected = loss()?.backward()?;
    let (value, found) = gradients(&tensors, InitialGradients::Nothing, 1.0, loss)?;
    assert!((value - f64::from(loss()?.to_scalar::<f32>()?)).abs() < 1e-12);
    for (index, (variable, found)) in variables.iter().zip(found).enumerate() {
        let expected = expected.get(variable).expect("a gradient");
        assert_close(&found.expect("a gradient"), expected, F32_TOLERANCE, &format!("variable {index}"));
    }
    Ok(())
}

fn square_loss(variables: &[Var]) -> Result<Tensor> {
    // A head loss over two tokens: a small function with gradients for all variables.
    let mut hidden = variables[0].as_tensor().clone();
    for variable in &variables[1..] {
        hidden = add(&hidden, variable.as_tensor())?;
    }
    head_loss(&hidden, &pattern(&[3, 2], 1.0, 4), &[1, 2])
}

/// With shared memory, each gradient would also receive the values added to the other.
#[test]
fn gradients_in_shared_memory_stay_separate() -> Result<()> {
    let variables =
        [Var::from_tensor(&pattern(&[2, 2], 1.0, 0))?, Var::from_tensor(&pattern(&[2, 2], 1.0, 9))?];
    let tensors: Vec<&Tensor> = variables.iter().map(|variable| variable.as_tensor()).collect();
    let run = |before| -> Result<Vec<Tensor>> {
        let (_, found) = gradients(&tensors, before, 1.0, || square_loss(&variables))?;
        Ok(found.into_iter().map(|gradient| gradient.expect("a gradient")).collect())
    };
    let once = run(InitialGradients::Nothing)?;
    let both = Tensor::ones((2, 2, 2), DType::F32, &Device::Cpu)?;
    let views = || -> Result<Vec<Tensor>> { Ok(vec![both.get(0)?, both.get(1)?]) };
    for before in [InitialGradients::Gradients(views()?), InitialGradients::Memory(views()?)] {
        let offset = if matches!(before, InitialGradients::Gradients(_)) { 1.0 } else { 0.0 };
        for (found, once) in run(before)?.iter().zip(&once) {
            assert_close(found, &(once + offset)?, F32_TOLERANCE, "a gradient in shared memory");
        }
    }
    // The same tensor for both variables, then the variables' own memory.
    let ones = Tensor::ones((2, 2), DType::F32, &Device::Cpu)?;
    for before in [vec![ones.clone(), ones], vec![tensors[0].detach(), tensors[1].detach()]] {
        let initial = before.iter().map(Tensor::force_contiguous).collect::<Result<Vec<_>>>()?;
        let kept: Vec<Tensor> =
            tensors.iter().map(|tensor| tensor.force_contiguous()).collect::<Result<_>>()?;
        for ((found, once), before) in
            run(InitialGradients::Gradients(before))?.iter().zip(&once).zip(&initial)
        {
            assert_close(found, &(once + before)?, F32_TOLERANCE, "a gradient in shared memory");
        }
        for (variable, kept) in tensors.iter().zip(&kept) {
            assert_eq!(values(variable), values(kept), "a variable has changed");
        }
    }
    Ok(())
}

#[test]
fn mismatched_initial_gradients_are_rejected() -> Result<()> {
    let variables =
        [Var::from_tensor(&pattern(&[2, 2], 1.0, 0))?, Var::from_tensor(&pattern(&[2, 2], 1.0, 9))?];
    let tensors: Vec<&Tensor> = variables.iter().map(|variable| variable.as_tensor()).collect();
    let of_shape = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu);
    let error = |before| {
        let result = gradients(&tensors, before, 1.0, || square_loss(&variables));
        result.unwrap_err().to_string()
    };
    let expected = KernelError::GradientCount { variables: 2, found: 1 }.to_string();
    assert!(error(InitialGradients::Gradients(vec![of_shape(&[2, 2])?])).contains(&expected));
    let expected = KernelError::GradientShape { expected: vec![2, 2], found: vec![4] }.to_string();
    assert!(error(InitialGradients::Memory(vec![of_shape(&[2, 2])?, of_shape(&[4])?])).contains(&expected));
    Ok(())
}

#[test]
fn adamw_rejects_shared_memory_and_other_shapes() -> Result<()> {
    let variable = || Var::from_tensor(&pattern(&[3], 1.0, 0));
    let (parameter, mean, square) = (variable()?, variable()?, variable()?);
    let step = AdamWStep {
        learning_rate: 0.1,
        beta_1: 0.9,
        beta_2: 0.99,
        epsilon: 1e-8,
        weight_decay: 0.0,
        step: 1,
        gradient_factor: 1.0,
    };
    let gradient = pattern(&[3], 1.0, 5);
    for (gradient, mean, square) in
        [(&gradient, &mean, &mean), (parameter.as_tensor(), &mean, &square), (&gradient, &parameter, &square)]
    {
        let error = adamw_step(&parameter, gradient, mean, square, &step).unwrap_err().to_string();
        assert!(error.contains("must not share memory"), "{error}");
    }
    let error =
        adamw_step(&parameter, &pattern(&[4], 1.0, 5), &mean, &square, &step).unwrap_err().to_string();
    assert!(error.contains("shape [4]"), "{error}");
    Ok(())
}

/// Interrupts at every check: forward pass, backward pass and recomputation.
#[test]
fn computation_stops_at_every_interrupt_check() {
    let variable = Var::from_tensor(&pattern(&[4, 8], 1.0, 0)).unwrap();
    let weight = pattern(&[8, 8], 1.0, 7);
    let [x, variables] = [variable.as_tensor().clone(), variable.as_tensor().clone()];
    let loss = || {
        let layer = Linear::new(weight.clone(), None)?;
        let y = recomputed(&x, move |x| Activation::GeluTanh.forward(&layer.forward(x)?))?;
        head_loss(&Activation::Relu.forward(&y)?, &weight, &[0, 1, 2, 3])
    };
    let whole = || gradients(&[&variables], InitialGradients::Nothing, 1.0, loss);
    let polls = Arc::new(AtomicUsize::new(0));
    let counting = Arc::clone(&polls);
    let never = Arc::new(move || counting.fetch_add(1, Ordering::Relaxed) == usize::MAX);
    let (expected, all) = interruptible(never, whole).unwrap();
    let gradient = values(all[0].as_ref().unwrap());
    let checks = polls.load(Ordering::Relaxed);
    assert!(checks >= 8, "{checks} checks");
    for at in 0..checks {
        let polls = AtomicUsize::new(0);
        let interrupt = Arc::new(move || polls.fetch_add(1, Ordering::Relaxed) >= at);
        let error = interruptible(interrupt, whole).unwrap_err();
        assert!(error.to_string().contains("the computation was interrupted"), "{error}");
        // No state of the interrupted computation remains.
        let (loss, again) = whole().unwrap();
        assert_eq!((loss, values(again[0].as_ref().unwrap())), (expected, gradient.clone()));
    }
}
