//! Compares this crate's layers with the equivalent candle operations.
#![expect(clippy::print_stdout, reason = "what the example shows")]

use candle_core::{D, DType, Device, Result, Tensor};
use candle_gpt2_arithmetic::{NumberType, uses};
use candle_gpt2_kernels::{Activation, LayerNorm, Linear, Matrix};

const EPSILON: f64 = 1e-5;

fn main() -> Result<()> {
    let device = Device::Cpu;
    let x = Tensor::randn(0f32, 1., (2, 5, 48), &device)?; // (B, T, C)
    let weight = Tensor::randn(0f32, 0.1, (64, 48), &device)?; // (out, in)
    let bias = Tensor::randn(0f32, 0.1, 64, &device)?;

    let norm = LayerNorm::new(Tensor::ones(48, DType::F32, &device)?, None, EPSILON);
    let normed = norm.forward(&x)?;
    let centered = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let variance = centered.sqr()?.mean_keepdim(D::Minus1)?;
    let expected = centered.broadcast_div(&(variance + EPSILON)?.sqrt()?)?;
    println!("layer norm: largest difference {:.1e}", difference(&normed, &expected)?);

    let expected = normed.broadcast_matmul(&weight.t()?)?.broadcast_add(&bias)?.gelu()?;
    for dtype in NumberType::all(uses::CPU_WEIGHTS) {
        let layer = Linear::from_matrix(Matrix::pack(&weight, dtype)?, Some(bias.clone()))?;
        let found = layer.forward_activated(&normed, Activation::GeluTanh)?; // fused bias and GELU
        let bytes = layer.size().bytes;
        println!(
            "linear and GELU, {dtype}: {bytes} bytes, largest difference {:.1e}",
            difference(&found, &expected)?
        );
    }
    Ok(())
}

fn difference(left: &Tensor, right: &Tensor) -> Result<f32> {
    (left - right)?.abs()?.flatten_all()?.max(0)?.to_scalar()
}
