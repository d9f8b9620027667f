//! Operations of training where the CPU's kernels are not: on the device that `GPT2_TEST_DEVICE` names, and on the CPU without
//! them, in f32, and in bf16 with parameters in f32; values and gradients against those of the kernels.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_gpt2_arithmetic::{AdamWStep, Dropout, RandomStream};
use candle_gpt2_kernels::{
    Activation, AdaptedMatrix, Before, HeadsAttention, LayerNorm, Linear, Matrix, adamw_step, add,
    add_positions, composed, dropout, gradient_norm, gradients, has_cpu_kernels, head_loss, heads_attention,
    recomputed, squared_norm,
};
use candle_gpt2_testing::{assert_close_absolute, device, pattern, skipped, values};

/// f32, sums of up to a few thousand products in another order, relative to the largest value.
const F32_TOLERANCE: f64 = 5e-5;
/// bf16 has 8 bits: a value is 2^-9 of itself off, and what a few operations make of it a few of these; the norm of the
/// differences over that of the values.
const BF16_NORM_TOLERANCE: f64 = 2e-2;

/// What an operation is given: inputs, which are in the type that is computed in, and parameters, which stay f32.
struct Given {
    inputs: Vec<Tensor>,
    parameters: Vec<Tensor>,
}

type Function<'a> = &'a dyn Fn(&[Tensor], &[Tensor]) -> Result<Tensor>;

/// The value, and the gradients of all inputs and parameters, each in f32 on the CPU.
fn computed(given: &Given, device: &Device, dtype: DType, function: Function) -> Result<Vec<Tensor>> {
    let variables = |tensors: &[Tensor], dtype: DType| -> Result<Vec<Var>> {
        tensors.iter().map(|x| Var::from_tensor(&x.to_device(device)?.to_dtype(dtype)?)).collect()
    };
    let (inputs, parameters) = (variables(&given.inputs, dtype)?, variables(&given.parameters, DType::F32)?);
    let all: Vec<&Tensor> = inputs.iter().chain(&parameters).map(Var::as_tensor).collect();
    let tensors = |variables: &[Var]| variables.iter().map(|x| x.as_tensor().clone()).collect::<Vec<_>>();
    let mut value = None;
    let (_, gradients) = gradients(&all, Before::Nothing, 1.0, || {
        let y = function(&tensors(&inputs), &tensors(&parameters))?;
        value = Some(y.detach());
        // Weighted, so that no gradient cancels by symmetry.
        let weights = pattern(y.dims(), 2.0, 12_345).to_device(device)?;
        (y.to_dtype(DType::F32)? * weights)?.sum_all()
    })?;
    for (variable, gradient) in all.iter().zip(&gradients) {
        let gradient = gradient.as_ref().expect("a gradient");
        assert_eq!(gradient.dtype(), variable.dtype(), "a gradient is of its variable's type");
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
        assert!(largest > 0.0, "{what} {index} says nothing");
        if dtype == DType::F32 {
            assert_close_absolute(found, expected, F32_TOLERANCE * largest, &format!("{what} {index}"));
            continue;
        }
        let differences = values(found).into_iter().zip(values(expected)).map(|(a, b)| a - b);
        let off = norm(differences) / norm(values(expected).into_iter());
        assert!(off <= BF16_NORM_TOLERANCE, "{what} {index} is off by {off:.1e} of its norm");
    }
}

/// Compares `function` on the device, or on the CPU without kernels, with the kernels.
#[track_caller]
fn assert_as_kernels(what: &str, given: &Given, function: Function) -> Result<()> {
    let expected = computed(given, &Device::Cpu, DType::F32, function)?;
    for dtype in [DType::F32, DType::BF16] {
        let found = composed(|| computed(given, &device(), dtype, function))?;
        assert_alike(what, &found, &expected, dtype);
    }
    Ok(())
}

#[test]
fn the_kernels_are_left_out_within_composed_alone() -> Result<()> {
    let x = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
    assert!(has_cpu_kernels(&x) && !has_cpu_kernels(&x.to_dtype(DType::BF16)?));
    composed(|| {
        assert!(!has_cpu_kernels(&x));
        composed(|| assert!(!has_cpu_kernels(&x)));
        assert!(!has_cpu_kernels(&x), "after an inner one");
        let elsewhere = std::thread::scope(|scope| scope.spawn(|| has_cpu_kernels(&x)).join().unwrap());
        assert!(elsewhere, "another thread is not concerned");
    });
    assert!(has_cpu_kernels(&x));
    let panicked = std::panic::catch_unwind(|| composed(|| panic!("within")));
    assert!(panicked.is_err() && has_cpu_kernels(&x), "after a panic");
    Ok(())
}

#[test]
fn linear_layers() -> Result<()> {
    let given = Given {
        inputs: vec![pattern(&[2, 9, 20], 2.0, 1), pattern(&[2, 9, 31], 2.0, 2)],
        parameters: vec![pattern(&[31, 20], 0.5, 3), pattern(&[31], 1.0, 4)],
    };
    assert_as_kernels("a layer and a residual", &given, &|inputs, parameters| {
        let layer = Linear::new(parameters[0].clone(), Some(parameters[1].clone()))?;
        layer.forward_added(&inputs[0], &inputs[1])
    })?;
    let stored = Given {
        inputs: vec![pattern(&[1, 9, 20], 2.0, 1)],
        parameters: vec![pattern(&[20, 32], 0.5, 3), pattern(&[32], 1.0, 4)],
    };
    assert_as_kernels(
        "some outputs of a layer that is stored as (in, out)",
        &stored,
        &|inputs, parameters| {
            let layer = Linear::new(parameters[0].t()?, Some(parameters[1].clone()))?;
            layer.forward_outputs(&inputs[0], 8..24)
        },
    )?;
    let adapter = Given {
        inputs: vec![pattern(&[2, 9, 20], 2.0, 1)],
        parameters: vec![pattern(&[3, 20], 1.0, 3), pattern(&[31, 3], 1.0, 4)],
    };
    assert_as_kernels("an adapter", &adapter, &|inputs, parameters| {
        let on = |x: Tensor| x.to_device(inputs[0].device());
        let base = Matrix::Dense(on(pattern(&[31, 20], 0.5, 5))?);
        let matrix = AdaptedMatrix::new(base, parameters[0].clone(), parameters[1].clone(), 2.0)?;
        let bias = on(pattern(&[31], 1.0, 6))?;
        Linear::from_matrix(Matrix::Adapted(matrix.into()), Some(bias))?.forward(&inputs[0])
    })
}

/// Added up in bf16, the sum of 3,000 ones would end at 256.
#[test]
fn the_gradient_of_a_bias_is_summed_in_f32() -> Result<()> {
    let variable = |shape: &[usize]| Var::from_tensor(&Tensor::zeros(shape, DType::F32, &device())?);
    let (weight, bias) = (variable(&[4, 2])?, variable(&[4])?);
    let x = Tensor::ones((3000, 2), DType::BF16, &device())?;
    let variables = [weight.as_tensor(), bias.as_tensor()];
    let (_, found) = composed(|| {
        gradients(&variables, Before::Nothing, 1.0, || {
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
    let given = Given {
        inputs: vec![(pattern(&[3, 7, 24], 4.0, 1) + 2.0)?],
        parameters: vec![pattern(&[24], 1.0, 2), pattern(&[24], 1.0, 3)],
    };
    assert_as_kernels("a norm", &given, &|inputs, parameters| {
        LayerNorm::new(parameters[0].clone(), Some(parameters[1].clone()), 1e-5).forward(&inputs[0])
    })?;
    let given = Given { inputs: vec![pattern(&[3, 41], 8.0, 0)], parameters: Vec::new() };
    for (name, activation) in Activation::NAMES {
        assert_as_kernels(name, &given, &|inputs, _| activation.forward(&inputs[0]))?;
    }
    Ok(())
}

/// Whether the draws are those of the CPU.
fn draws_as_the_cpu() -> bool {
    if device().is_metal() {
        skipped("an Apple GPU draws masks of its own");
    }
    !device().is_metal()
}

#[test]
fn dropout_drops_its_share_and_repeats() -> Result<()> {
    let x = Tensor::ones((300, 200), DType::F32, &device())?;
    let dropped = |seed: u64| composed(|| dropout(&x, 0.3, &mut RandomStream::new(seed)));
    let found = values(&dropped(4)?);
    let zeros = found.iter().filter(|value| **value == 0.0).count();
    // 60,000 draws have a standard deviation of 112; the bound is five of them.
    assert!(zeros.abs_diff(18_000) < 560, "{zeros} of 60,000 are dropped at 0.3");
    assert!(found.iter().all(|value| *value == 0.0 || (value * 0.7 - 1.0).abs() < 1e-6));
    assert_eq!(values(&dropped(4)?), found);
    assert_ne!(values(&dropped(5)?), found);
    Ok(())
}

#[test]
fn dropout_and_sums() -> Result<()> {
    if !draws_as_the_cpu() {
        return Ok(());
    }
    let given =
        Given { inputs: vec![pattern(&[3, 40], 2.0, 0), pattern(&[3, 40], 2.0, 7)], parameters: vec![] };
    assert_as_kernels("dropout and a sum", &given, &|inputs, _| {
        add(&dropout(&inputs[0], 0.4, &mut RandomStream::new(5))?, &inputs[1])
    })
}

#[test]
fn embeddings_and_positions() -> Result<()> {
    let given =
        Given { inputs: vec![], parameters: vec![pattern(&[11, 6], 2.0, 0), pattern(&[8, 6], 2.0, 7)] };
    // They are looked up in f32, whatever follows.
    assert_as_kernels("embeddings", &given, &|_, parameters| {
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
            // Nothing is left to compare.
            let x = pattern(&[1, 4, 9], 1.0, 1).to_device(&device())?;
            let all = HeadsAttention { heads: 1, scale: 1.0, visible: vec![0..4; 4], added: None, dropout };
            let found = composed(|| heads_attention(&[&x], all))?;
            assert!(values(&found).iter().all(|value| *value == 0.0), "{found}");
            continue;
        }
        if dropout.is_some() && !draws_as_the_cpu() {
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
        // What is before a query, everything, some of it: those that start at the first key have kernels on NVIDIA GPUs.
        let seen: [fn(usize) -> Range<usize>; 3] =
            [|query| 0..query + 1, |_| 0..10, |query| 0..1 + query / 2];
        for seen in seen.into_iter().chain([seen_in_four as fn(usize) -> Range<usize>]) {
            let attention = || HeadsAttention { visible: (0..tokens).map(seen).collect(), ..attention(None) };
            for widths in [vec![3], vec![1, 2], vec![1, 1, 1]] {
                let input = |(index, parts): (usize, usize)| {
                    pattern(&[2, tokens, parts * heads * 5], 3.0, index as u64 + 1)
                };
                let inputs = widths.into_iter().enumerate().map(input).collect();
                let given = Given { inputs, parameters: vec![] };
                assert_as_kernels("attention", &given, &|inputs, _| {
                    heads_attention(&inputs.iter().collect::<Vec<_>>(), attention())
                })?;
            }
        }
        let width = heads * 5;
        let inputs = vec![pattern(&[2, tokens, width], 3.0, 1), pattern(&[2, tokens, 2 * width], 3.0, 2)];
        assert_as_kernels("attention over a memory", &Given { inputs, parameters: vec![] }, &|inputs, _| {
            let added = pattern(&[heads, tokens, tokens], 1.0, 9).to_device(inputs[0].device())?;
            heads_attention(&[&inputs[0], &inputs[1]], attention(Some(added)))
        })?;
    }
    Ok(())
}

/// In several chunks of rows, and in one.
#[test]
fn the_head_loss() -> Result<()> {
    for rows in [5, 2500] {
        let given = Given {
            inputs: vec![pattern(&[rows, 12], 4.0, 1)],
            parameters: vec![pattern(&[17, 12], 4.0, 2)],
        };
        let targets: Vec<u32> = (0..17u32).cycle().step_by(5).take(rows).collect();
        assert_as_kernels("a head loss", &given, &|inputs, parameters| {
            head_loss(&inputs[0], &parameters[0], &targets)
        })?;
    }
    Ok(())
}

#[test]
fn what_is_computed_again() -> Result<()> {
    let given = Given {
        inputs: vec![pattern(&[2, 9, 20], 2.0, 1)],
        parameters: vec![pattern(&[20, 20], 0.5, 3), pattern(&[20], 1.0, 4), pattern(&[20], 1.0, 5)],
    };
    assert_as_kernels("a part that is computed again", &given, &|inputs, parameters| {
        let layer = Linear::new(parameters[0].clone(), Some(parameters[1].clone()))?;
        let norm = LayerNorm::new(parameters[2].clone(), Some(parameters[1].clone()), 1e-5);
        recomputed(&inputs[0], move |x| {
            add(x, &Activation::GeluTanh.forward(&layer.forward(&norm.forward(x)?)?)?)
        })
    })
}

#[test]
fn steps_of_adamw_and_the_norm() -> Result<()> {
    let after = |device: &Device| -> Result<Vec<f64>> {
        let on = |x: Tensor| x.to_device(device);
        let parameter = Var::from_tensor(&on(pattern(&[7, 5], 2.0, 1))?)?;
        let zeros = || Var::from_tensor(&parameter.as_tensor().zeros_like()?);
        let (mean, square) = (zeros()?, zeros()?);
        for step in 1..=3 {
            let numbers = AdamWStep {
                learning_rate: 0.1,
                beta_1: 0.9,
                beta_2: 0.95,
                epsilon: 1e-8,
                weight_decay: 0.1,
                step,
                gradient_factor: 0.7,
            };
            adamw_step(&parameter, &on(pattern(&[7, 5], 2.0, 10 * step))?, &mean, &square, &numbers)?;
        }
        let gradients = [on(pattern(&[7, 5], 2.0, 3))?, on(pattern(&[13], 2.0, 4))?];
        let norms = [gradient_norm(&gradients)?, squared_norm(&gradients[0])?];
        let means = [parameter, mean, square].into_iter().flat_map(|x| values(x.as_tensor()));
        Ok(means.chain(norms).collect())
    };
    let expected = after(&Device::Cpu)?;
    let found = composed(|| after(&device()))?;
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() < 2e-6 * expected.abs().max(1.0), "{found} for {expected}");
    }
    Ok(())
}
