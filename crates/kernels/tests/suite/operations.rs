//! Every operation against PyTorch, values and gradients (`scripts/reference/layers.py`, `export_operations`).

use candle_core::{Result, Tensor, Var};
use candle_gpt2_arithmetic::{RandomStream, WeightFormat};
use candle_gpt2_kernels::{Activation, LayerNorm, Linear, Matrix, dropout};
use candle_gpt2_testing::{Fixture, assert_close, pattern, values};

/// f32 with transcendental functions of different libraries: a few units in the last place.
const FORWARD_TOLERANCE: f64 = 2e-6;
/// candle's backward of the tanh GELU uses constants of six digits.
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
            // At the kink any value from 0 to 1 is a subgradient: PyTorch takes 0, candle 1.
            expected = x.eq(0f64)?.where_cond(gradient, &expected)?;
        }
        assert_close(gradient, &expected, BACKWARD_TOLERANCE, &format!("gradient of {name}"));
    }
    Ok(())
}

#[test]
fn unknown_activations_have_no_function() {
    assert_eq!(Activation::from_name("gelu_fast"), None);
    assert_eq!(Activation::from_name("GELU"), None);
}

#[test]
fn layer_norm_equals_pytorch_far_from_zero() -> Result<()> {
    // The input lies near 100 with deviation 3: rounding it in f32 alone moves the result by about 3e-6.
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
fn linear_multiplies_by_the_transpose_for_either_storage() -> Result<()> {
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
fn a_residual_is_added_by_every_form_of_the_weight() -> Result<()> {
    let (x, weight, bias) = (pattern(&[2, 3, 5], 2.0, 0), pattern(&[7, 5], 2.0, 9), pattern(&[7], 2.0, 99));
    let residual = pattern(&[2, 7, 3], 2.0, 5).transpose(1, 2)?;
    let packed = Matrix::pack(&weight, WeightFormat::F32)?;
    for matrix in [Matrix::Dense(weight), packed] {
        let layer = Linear::from_matrix(matrix, Some(bias.clone()))?;
        let expected = (layer.forward(&x)? + &residual)?;
        let added = layer.forward_added(&x, &residual)?;
        assert_close(&added, &expected, FORWARD_TOLERANCE, "the sum");
        let tracked = Var::from_tensor(&residual)?;
        let gradients = layer.forward_added(&x, &tracked)?.sum_all()?.backward()?;
        let gradient = gradients.get(&tracked).expect("a gradient");
        assert!(values(gradient).iter().all(|value| *value == 1.0), "the gradient of the residual");
        let refused = layer.forward_added(&x, &residual.narrow(1, 0, 2)?).unwrap_err();
        assert!(refused.to_string().contains("expected a residual of shape [2, 3, 7]"), "{refused}");
    }
    Ok(())
}

#[test]
fn linear_refuses_shapes_that_do_not_fit() {
    let wrong_bias = Linear::new(pattern(&[7, 5], 1.0, 0), Some(pattern(&[5], 1.0, 0))).unwrap_err();
    assert!(wrong_bias.to_string().contains("expected a bias of shape (7)"), "{wrong_bias}");
    let layer = Linear::new(pattern(&[7, 5], 1.0, 0), None).unwrap();
    let wrong_input = layer.forward(&pattern(&[2, 7], 1.0, 0)).unwrap_err();
    assert!(wrong_input.to_string().contains("expected an input of width 5"), "{wrong_input}");
}

/// "Build a Large Language Model (From Scratch)" (Raschka, 2024, section 3.5.2): at a rate of 0.5 about half of the values
/// become zero and the others double.
#[test]
fn dropout_zeroes_its_share_and_scales_the_rest() -> Result<()> {
    let ones = Tensor::ones((100, 100), candle_core::DType::F32, &candle_core::Device::Cpu)?;
    let dropped = values(&dropout(&ones, 0.5, &mut RandomStream::new(1))?);
    assert!(dropped.iter().all(|value| *value == 0.0 || *value == 2.0));
    let zeros = dropped.iter().filter(|value| **value == 0.0).count();
    // 10,000 draws at 0.5: the standard deviation is 50.
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
