//! Training operations without the CPU kernels, compared with the CPU kernels.
//!
//! They run on the device that `GPT2_TEST_DEVICE` names, or on the CPU with the kernels disabled. Inputs are
//! f32, or bf16 with f32 parameters. The tests compare values and gradients.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_gpt2_arithmetic::{AdamWStep, Dropout, RandomStream};
use candle_gpt2_kernels::{
    Activation, AdaptedMatrix, HeadsAttention, InitialGradients, LayerNorm, Linear, Matrix, adamw_step, add,
    add_positions, composed, dropout, gradient_norm, gradients, has_cpu_kernels, head_loss, heads_attention,
    recomputed, squared_norm,
};
use candle_gpt2_testing::{assert_close_absolute, device, pattern, skipped, values};

/// Tolerance for reordered f32 sums of a few thousand products, relative to the largest value.
const F32_TOLERANCE: f64 = 5e-5;
/// Tolerance for bf16: norm of the differences divided by the norm of the values.
///
/// bf16 has 8 significant bits, so a value has a relative error of 2^-9. After a few operations, the error is
/// a few times as large.
const BF16_NORM_TOLERANCE: f64 = 2e-2;

/// Arguments of an operation: inputs in the tested dtype, and parameters in f32.
struct Arguments {
    inputs: Vec<Tensor>,
    parameters: Vec<Tensor>,
}

type Function<'a> = &'a dyn Fn(&[Tensor], &[Tensor]) -> Result<Tensor>;

/// Value and gradients of all inputs and parameters, each in f32 on the CPU.
fn computed(arguments: &Arguments, device: &Device, dtype: DType, function: Function) -> Result<Vec<Tensor>> {
    let variables = |tensors: &[Tensor], dtype: DType| -> Result<Vec<Var>> {
        tensors.iter().map(|x| Var::from_tensor(&x.to_device(device)?.to_dtype(dtype)?)).collect()
    };
    let (inputs, parameters) =
        (variables(&arguments.inputs, dtype)?, variables(&arguments.parameters, DType::F32)?);
    let all: Vec<&Tensor> = inputs.iter().chain(&parameters).map(Var::as_tensor).collect();
    let tensors = |variables: &[Var]| variables.iter().map(|x| x.as_tensor().clone()).collect::<Vec<_>>();
    let mut value = None;
    let (_, gradients) = gradients(&all, InitialGradients::Nothing, 1.0, || {
        let y = function(&tensors(&inputs), &tensors(&parameters))?;
        value = Some(y.detach());
        // Weights prevent gradients from canceling by symmetry.
        let weights = pattern(y.dims(), 2.0, 12_345).to_device(device)?;
        (y.to_dtype(DType::F32)? * weights)?.sum_all()
    })?;
    for (variable, gradient) in all.iter().zip(&gradients) {
        let gradient = gradient.as_ref().expect("a gradient");
        assert_eq!(gradient.dtype(), variable.dtype(), "a gradient has its variable's dtype");
    }
    let found = value.into_iter().chain(gradients.into_iter().flatten());
    found.map(|x| x.to_device(&Device::Cpu)?.to_dtype(DType::F32)).collect()
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|value| value * value).sum::<f64>().sqrt()
}

#[track_caller]
fn assert_alike(what: &str, found: &[Tensor], expected: &[Tensor], dtype: DType) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let what = format!("{what} in {dtype:?}: {}", if index == 0 { "value" } else { "gradient" });
        let largest = values(expected).into_iter().map(f64::abs).fold(0.0, f64::max);
        assert!(largest > 0.0, "{what} {index} is all zeros");
        if dtype == DType::F32 {
            assert_close_absolute(found, expected, F32_TOLERANCE * largest, &format!("{what} {index}"));
            continue;
        }
        let differences = values(found).into_iter().zip(values(expected)).map(|(a, b)| a - b);
        let off = norm(differences) / norm(values(expected).into_iter());
        assert!(off <= BF16_NORM_TOLERANCE, "{what} {index} is off by {off:.1e} of its norm");
    }
}

/// Compares `function` without CPU kernels, on the test device, with the CPU kernels.
#[track_caller]
fn assert_matches_kernels(what: &str, arguments: &Arguments, function: Function) -> Result<()> {
    let expected = computed(arguments, &Device::Cpu, DType::F32, function)?;
    for dtype in [DType::F32, DType::BF16] {
        let found = composed(|| computed(arguments, &device(), dtype, function))?;
        assert_alike(what, &found, &expected, dtype);
    }
    Ok(())
}

#[test]
fn composed_disables_kernels_only_inside() -> Result<()> {
    let x = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
    assert!(has_cpu_kernels(&x) && !has_cpu_kernels(&x.to_dtype(DType::BF16)?));
    composed(|| {
        assert!(!has_cpu_kernels(&x));
        composed(|| assert!(!has_cpu_kernels(&x)));
        assert!(!has_cpu_kernels(&x), "after an inner call");
        let elsewhere = std::thread::scope(|scope| scope.spawn(|| has_cpu_kernels(&x)).join().unwrap());
        assert!(elsewhere, "another thread is unaffected");
    });
    assert!(has_cpu_kernels(&x));
    let panicked = std::panic::catch_unwind(|| composed(|| panic!("within")));
    assert!(panicked.is_err() && has_cpu_kernels(&x), "after a panic");
    Ok(())
}

#[test]
fn linear_layers() -> Result<()> {
    let arguments = Arguments {
        inputs: vec![pattern(&[2, 9, 20], 2.0, 1), pattern(&[2, 9, 31], 2.0, 2)],
        parameters: vec![pattern(&[31, 20], 0.5, 3), pattern(&[31], 1.0, 4)],
    };
    assert_matches_kernels("a layer and a residual", &arguments, &|inputs, parameters| {
        let layer = Linear::new(parameters[0].clone(), Some(parameters[1].clone()))?;
        layer.forward_added(&inputs[0], &inputs[1])
    })?;
    let stored = Arguments {
        inputs: vec![pattern(&[1, 9, 20], 2.0, 1)],
        parameters: vec![pattern(&[20, 32], 0.5, 3), pattern(&[32], 1.0, 4)],
    };
    assert_matches_kernels("some outputs of a layer stored as (in, out)", &stored, &|inputs, parameters| {
        let layer = Linear::new(parameters[0].t()?, Some(parameters[1].clone()))?;
        layer.forward_outputs(&inputs[0], 8..24)
    })?;
    let adapter = Arguments {
        inputs: vec![pattern(&[2, 9, 20], 2.0, 1)],
        parameters: vec![pattern(&[3, 20], 1.0, 3), pattern(&[31, 3], 1.0, 4)],
    };
    assert_matches_kernels("an adapter", &adapter, &|inputs, parameters| {
        let on = |x: Tensor| x.to_device(inputs[0].device());
        let base = Matrix::Dense(on(pattern(&[31, 20], 0.5, 5))?);
        let matrix = AdaptedMatrix::new(base, parameters[0].clone(), parameters[1].clone(), 2.0)?;
        let bias = on(pattern(&[31], 1.0, 6))?;
        Linear::from_matrix(Matrix::Adapted(matrix.into()), Some(bias))?.forward(&inputs[0])
    })
}

/// Checks that sums accumulate in f32: in bf16, 3,000 ones would add up to only 256.
#[test]
fn bias_gradient_is_summed_in_f32() -> Result<()> {
    let variable = |shape: &[usize]| Var::from_tensor(&Tensor::zeros(shape, DType::F32, &device())?);
    let (weight, bias) = (variable(&[4, 2])?, variable(&[4])?);
    let x = Tensor::ones((3000, 2), DType::BF16, &device())?;
    let variables = [weight.as_tensor(), bias.as_tensor()];
    let (_, found) = composed(|| {
        gradients(&variables, InitialGradients::Nothing, 1.0, || {
            let layer = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()))?;
            layer.forward(&x)?.to_dtype(DType::F32)?.sum_all()
        })
    })?;
    for gradient in found.into_iter().flatten() {
        let rounded = f64::from(half::bf16::from_f32(3000.0));
        assert!(values(&gradient).iter().all(|value| *value == rounded), "{gradient}");
    }
    Ok(())
}

#[test]
fn norms_and_activations() -> Result<()> {
    let arguments = Arguments {
        inputs: vec![(pattern(&[3, 7, 24], 4.0, 1) + 2.0)?],
        parameters: vec![pattern(&[24], 1.0, 2), pattern(&[24], 1.0, 3)],
    };
    assert_matches_kernels("a norm", &arguments, &|inputs, parameters| {
        LayerNorm::new(parameters[0].clone(), Some(parameters[1].clone()), 1e-5).forward(&inputs[0])
    })?;
    let arguments = Arguments { inputs: vec![pattern(&[3, 41], 8.0, 0)], parameters: Vec::new() };
    for (name, activation) in Activation::NAMES {
        assert_matches_kernels(name, &arguments, &|inputs, _| activation.forward(&inputs[0]))?;
    }
    Ok(())
}

/// Whether the test device samples the same dropout masks as the CPU.
fn samples_like_the_cpu() -> bool {
    if device().is_metal() {
        skipped("an Apple GPU samples different masks");
    }
    !device().is_metal()
}

#[test]
fn dropout_drops_its_fraction_and_is_reproducible() -> Result<()> {
    let x = Tensor::ones((300, 200), DType::F32, &device())?;
    let dropped = |seed: u64| composed(|| dropout(&x, 0.3, &mut RandomStream::new(seed)));
    let found = values(&dropped(4)?);
    let zeros = found.iter().filter(|value| **value == 0.0).count();
    // 60,000 samples have a standard deviation of 112; the bound is five standard deviations.
    assert!(zeros.abs_diff(18_000) < 560, "{zeros} of 60,000 are dropped at 0.3");
    assert!(found.iter().all(|value| *value == 0.0 || (value * 0.7 - 1.0).abs() < 1e-6));
    assert_eq!(values(&dropped(4)?), found);
    assert_ne!(values(&dropped(5)?), found);
    Ok(())
}

#[test]
fn dropout_and_sums() -> Result<()> {
    if !samples_like_the_cpu() {
        return Ok(());
    }
    let arguments =
        Arguments { inputs: vec![pattern(&[3, 40], 2.0, 0), pattern(&[3, 40], 2.0, 7)], parameters: vec![] };
    assert_matches_kernels("dropout and a sum", &arguments, &|inputs, _| {
        add(&dropout(&inputs[0], 0.4, &mut RandomStream::new(5))?, &inputs[1])
    })
}

#[test]
fn embeddings_and_positions() -> Result<()> {
    let arguments =
        Arguments { inputs: vec![], parameters: vec![pattern(&[11, 6], 2.0, 0), pattern(&[8, 6], 2.0, 7)] };
    // The lookup is in f32, independent of the dtype that follows.
    assert_matches_kernels("embeddings", &arguments, &|_, parameters| {
        let ids = Tensor::new(&[[1u32, 5, 5], [10, 0, 5]], parameters[0].device())?;
        let tokens = Linear::new(parameters[0].clone(), None)?.embedding(&ids)?;
        add_positions(&tokens, &parameters[1], 2)
    })
}

#[test]
fn attention_with_and_without_dropout() -> Result<()> {
    let (heads, tokens) = (3, 10);
    for rate in [0.0, 0.3, 1.0] {
        let dropout = (rate > 0.0).then_some(Dropout { rate, seed: 11 });
        if rate == 1.0 {
            // All values are dropped, so there is nothing to compare.
            let x = pattern(&[1, 4, 9], 1.0, 1).to_device(&device())?;
            let all = HeadsAttention { heads: 1, scale: 1.0, visible: vec![0..4; 4], added: None, dropout };
            let found = composed(|| heads_attention(&[&x], all))?;
            assert!(values(&found).iter().all(|value| *value == 0.0), "{found}");
            continue;
        }
        if dropout.is_some() && !samples_like_the_cpu() {
            continue;
        }
        let seen_in_four = |query: usize| query / 4 * 4..query + 1;
        let attention = |added: Option<Tensor>| HeadsAttention {
            heads,
            scale: 0.4,
            visible: (0..tokens).map(seen_in_four).collect(),
            added,
            dropout,
        };
        // Causal, full, and half of the causal range. NVIDIA GPUs have kernels only for ranges that start at
        // the first key.
        let seen: [fn(usize) -> Range<usize>; 3] =
            [|query| 0..query + 1, |_| 0..10, |query| 0..1 + query / 2];
        for seen in seen.into_iter().chain([seen_in_four as fn(usize) -> Range<usize>]) {
            let attention = || HeadsAttention { visible: (0..tokens).map(seen).collect(), ..attention(None) };
            for widths in [vec![3], vec![1, 2], vec![1, 1, 1]] {
                let input = |(index, parts): (usize, usize)| {
                    pattern(&[2, tokens, parts * heads * 5], 3.0, index as u64 + 1)
                };
                let inputs = widths.into_iter().enumerate().map(input).collect();
                let arguments = Arguments { inputs, parameters: vec![] };
                assert_matches_kernels("attention", &arguments, &|inputs, _| {
                    heads_attention(&inputs.iter().collect::<Vec<_>>(), attention())
                })?;
            }
        }
        let width = heads * 5;
        let inputs = vec![pattern(&[2, tokens, width], 3.0, 1), pattern(&[2, tokens, 2 * width], 3.0, 2)];
        assert_matches_kernels(
            "attention over a memory",
            &Arguments { inputs, parameters: vec![] },
            &|inputs, _| {
                let added = pattern(&[heads, tokens, tokens], 1.0, 9).to_device(inputs[0].device())?;
                heads_attention(&[&inputs[0], &inputs[1]], attention(Some(added)))
            },
        )?;
    }
    Ok(())
}

/// Runs the loss in one chunk and in several chunks of rows.
#[test]
fn head_loss_in_one_or_several_chunks() -> Result<()> {
    for rows in [5, 2500] {
        let arguments = Arguments {
            inputs: vec![pattern(&[rows, 12], 4.0, 1)],
            parameters: vec![pattern(&[17, 12], 4.0, 2)],
        };
        let targets: Vec<u32> = (0..17u32).cycle().step_by(5).take(rows).collect();
        assert_matches_kernels("a head loss", &arguments, &|inputs, parameters| {
            head_loss(&inputs[0], &parameters[0], &targets)
        })?;
    }
    Ok(())
}

#[test]
fn recomputed_blocks() -> Result<()> {
    let arguments = Arguments {
        inputs: vec![pattern(&[2, 9, 20], 2.0, 1)],
        parameters: vec![pattern(&[20, 20], 0.5, 3), pattern(&[20], 1.0, 4), pattern(&[20], 1.0, 5)],
    };
    assert_matches_kernels("a recomputed block", &arguments, &|inputs, parameters| {
        let layer = Linear::new(parameters[0].clone(), Some(parameters[1].clone()))?;
        let norm = LayerNorm::new(parameters[2].clone(), Some(parameters[1].clone()), 1e-5);
        recomputed(&inputs[0], move |x| {
            add(x, &Activation::GeluTanh.forward(&layer.forward(&norm.forward(x)?)?)?)
        })
    })
}

#[test]
fn adamw_steps_and_gradient_norms() -> Result<()> {
    let run = |device: &Device| -> Result<Vec<f64>> {
        let on = |x: Tensor| x.to_device(device);
        let parameter = Var::from_tensor(&on(pattern(&[7, 5], 2.0, 1))?)?;
        let zeros = || Var::from_tensor(&parameter.as_tensor().zeros_like()?);
        let (mean, square) = (zeros()?, zeros()?);
        for step in 1..=3 {
            let settings = AdamWStep {
                learning_rate: 0.1,
                beta_1: 0.9,
                beta_2: 0.95,
                epsilon: 1e-8,
                weight_decay: 0.1,
                step,
                gradient_factor: 0.7,
            };
            adamw_step(&parameter, &on(pattern(&[7, 5], 2.0, 10 * step))?, &mean, &square, &settings)?;
        }
        let gradients = [on(pattern(&[7, 5], 2.0, 3))?, on(pattern(&[13], 2.0, 4))?];
        let norms = [gradient_norm(&gradients)?, squared_norm(&gradients[0])?];
        let means = [parameter, mean, square].into_iter().flat_map(|x| values(x.as_tensor()));
        Ok(means.chain(norms).collect())
    };
    let expected = run(&Device::Cpu)?;
    let found = composed(|| run(&device()))?;
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() < 2e-6 * expected.abs().max(1.0), "{found} for {expected}");
    }
    Ok(())
}
