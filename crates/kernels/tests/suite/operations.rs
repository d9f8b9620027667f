//! Compares values and gradients of every operation with PyTorch.
//!
//! The reference values come from `scripts/reference/layers.py`, `export_operations`.

use candle_core::{Result, Tensor, Var};
use candle_gpt2_arithmetic::{NumberType, RandomStream};
use candle_gpt2_kernels::{Activation, LayerNorm, Linear, Matrix, dropout};
use candle_gpt2_testing::{Fixture, assert_close, pattern, values};

/// Tolerance for transcendental functions, which differ by a few f32 units in the last place.
const FORWARD_TOLERANCE: f64 = 2e-6;
/// Tolerance for candle's backward pass of tanh GELU, whose constants have only six digits.
const BACKWARD_TOLERANCE: f64 = 1e-5;

#[test]
fn activations_equal_transformers() -> Result<()> {
    let fixture = Fixture::open("operations");
    for (name, activation) in Activation::NAMES {
        let x = Var::from_tensor(&fixture.tensor("activation.x"))?;
        let y = activation.forward(&x)?;
        assert_close(&y, &fixture.tensor(&format!("activation.{name}")), FORWARD_TOLERANCE, name);
        let gradients = y.sum_all()?.backward()?;
        let gradient = gradients.get(&x).expect("a gradient");
        let mut expected = fixture.tensor(&format!("activation.{name}.grad"));
        if activation == Activation::Relu {
            // At zero, any value from 0 to 1 is a subgradient: PyTorch uses 0, candle uses 1.
            expected = x.eq(0f64)?.where_cond(gradient, &expected)?;
        }
        assert_close(gradient, &expected, BACKWARD_TOLERANCE, &format!("gradient of {name}"));
    }
    Ok(())
}

#[test]
fn unknown_activation_names_return_none() {
    assert_eq!(Activation::from_name("gelu_fast"), None);
    assert_eq!(Activation::from_name("GELU"), None);
}

#[test]
fn layer_norm_equals_pytorch_far_from_zero() -> Result<()> {
    // The input is near 100 with a standard deviation of 3. Rounding it to f32 alone changes the result by
    // about 3e-6.
    const TOLERANCE: f64 = 2e-5;
    let fixture = Fixture::open("operations");
    let parameter = |name: &str| Var::from_tensor(&fixture.tensor(&format!("layer_norm.{name}")));
    let (x, weight, bias) = (parameter("x")?, parameter("weight")?, parameter("bias")?);
    let norm = LayerNorm::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()), 1e-5);
    let y = norm.forward(&x)?;
    assert_close(&y, &fixture.tensor("layer_norm.y"), TOLERANCE, "layer norm");
    let gradients = (y * pattern(&[2, 5, 24], 1.0, 0))?.sum_all()?.backward()?;
    for (name, variable) in [("x", &x), ("weight", &weight), ("bias", &bias)] {
        let gradient = gradients.get(variable).unwrap_or_else(|| panic!("{name} has no gradient"));
        assert_close(gradient, &fixture.tensor(&format!("layer_norm.{name}.grad")), TOLERANCE, name);
    }
    Ok(())
}

#[test]
fn linear_converts_from_candle_with_its_variables() -> Result<()> {
    let weight = Var::from_tensor(&pattern(&[4, 3], 1.0, 1))?;
    let bias = Var::from_tensor(&pattern(&[4], 1.0, 2))?;
    let x = pattern(&[2, 5, 3], 1.0, 3);
    let candle = candle_nn::Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
    let layer = Linear::try_from(candle.clone())?;
    assert_eq!((layer.size().count, layer.size().trainable), (16, 16));
    let y = layer.forward(&x)?;
    assert_close(&y, &candle_nn::Module::forward(&candle, &x)?, FORWARD_TOLERANCE, "candle's layer");
    assert!(y.sum_all()?.backward()?.get(&weight).is_some());
    let short = candle_nn::Linear::new(weight.as_tensor().clone(), Some(bias.narrow(0, 0, 3)?));
    assert!(Linear::try_from(short).unwrap_err().to_string().contains("expected a bias of shape (4)"));
    Ok(())
}

#[test]
fn linear_is_correct_for_both_storage_orders() -> Result<()> {
    let (x, weight, bias) = (pattern(&[2, 3, 5], 2.0, 0), pattern(&[7, 5], 2.0, 9), pattern(&[7], 2.0, 99));
    let direct = Linear::new(weight.clone(), Some(bias.clone()))?.forward(&x)?;
    let transposed = weight.t()?.contiguous()?.t()?;
    let from_conv1d = Linear::new(transposed, Some(bias.clone()))?.forward(&x)?;
    let mut expected = Vec::new();
    let (x_values, weights, biases) = (values(&x), values(&weight), values(&bias));
    for row in x_values.chunks(5) {
        for (column, weight) in weights.chunks(5).enumerate() {
            expected.push(row.iter().zip(weight).map(|(a, b)| a * b).sum::<f64>() + biases[column]);
        }
    }
    let expected = Tensor::from_vec(expected, (2, 3, 7), x.device())?;
    assert_close(&direct, &expected, FORWARD_TOLERANCE, "(out, in) storage");
    assert_close(&from_conv1d, &expected, FORWARD_TOLERANCE, "(in, out) storage");
    Ok(())
}

#[test]
fn residual_is_added_for_dense_and_packed_weights() -> Result<()> {
    let (x, weight, bias) = (pattern(&[2, 3, 5], 2.0, 0), pattern(&[7, 5], 2.0, 9), pattern(&[7], 2.0, 99));
    let residual = pattern(&[2, 7, 3], 2.0, 5).transpose(1, 2)?;
    let packed = Matrix::pack(&weight, NumberType::F32)?;
    for matrix in [Matrix::Dense(weight), packed] {
        let layer = Linear::from_matrix(matrix, Some(bias.clone()))?;
        let expected = (layer.forward(&x)? + &residual)?;
        let added = layer.forward_added(&x, &residual)?;
        assert_close(&added, &expected, FORWARD_TOLERANCE, "the sum");
        let tracked = Var::from_tensor(&residual)?;
        let gradients = layer.forward_added(&x, &tracked)?.sum_all()?.backward()?;
        let gradient = gradients.get(&tracked).expect("a gradient");
        assert!(values(gradient).iter().all(|value| *value == 1.0), "the gradient of the residual");
        let error = layer.forward_added(&x, &residual.narrow(1, 0, 2)?).unwrap_err();
        assert!(error.to_string().contains("expected a residual of shape [2, 3, 7]"), "{error}");
    }
    Ok(())
}

#[test]
fn linear_rejects_mismatched_shapes() {
    let wrong_bias = Linear::new(pattern(&[7, 5], 1.0, 0), Some(pattern(&[5], 1.0, 0))).unwrap_err();
    assert!(wrong_bias.to_string().contains("expected a bias of shape (7)"), "{wrong_bias}");
    let layer = Linear::new(pattern(&[7, 5], 1.0, 0), None).unwrap();
    let wrong_input = layer.forward(&pattern(&[2, 7], 1.0, 0)).unwrap_err();
    assert!(wrong_input.to_string().contains("expected an input of width 5"), "{wrong_input}");
}

/// At a rate of 0.5, about half of the values become zero and the others double.
///
/// Source: "Build a Large Language Model (From Scratch)" (Raschka, 2024, section 3.5.2).
#[test]
fn dropout_zeroes_its_fraction_and_scales_the_rest() -> Result<()> {
    let ones = Tensor::ones((100, 100), candle_core::DType::F32, &candle_core::Device::Cpu)?;
    let dropped = values(&dropout(&ones, 0.5, &mut RandomStream::new(1))?);
    assert!(dropped.iter().all(|value| *value == 0.0 || *value == 2.0));
    let zeros = dropped.iter().filter(|value| **value == 0.0).count();
    // The standard deviation of 10,000 samples at 0.5 is 50.
    assert!((4750..=5250).contains(&zeros), "{zeros} zeros");
    assert_eq!(dropped, values(&dropout(&ones, 0.5, &mut RandomStream::new(1))?), "same seed, same mask");
    assert_ne!(
        dropped,
        values(&dropout(&ones, 0.5, &mut RandomStream::new(2))?),
        "another seed, another mask"
    );
    assert_eq!(values(&dropout(&ones, 0.0, &mut RandomStream::new(1))?), values(&ones));
    assert!(values(&dropout(&ones, 1.0, &mut RandomStream::new(1))?).iter().all(|value| *value == 0.0));
    assert!(dropout(&ones, 1.5, &mut RandomStream::new(1)).is_err());
    Ok(())
}
