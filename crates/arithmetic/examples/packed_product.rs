//! Compares the size and the relative error of packed weights for every number type.
#![expect(
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    reason = "what the example shows, of numbers drawn in f64"
)]

use candle_gpt2_arithmetic::{Epilogue, NumberType, PackError, PackedMatrix, RandomStream, Strided, uses};

const ROWS: usize = 3;
const INPUTS: usize = 768;
const OUTPUTS: usize = 1024;

fn main() -> Result<(), PackError> {
    let mut random = RandomStream::new(7);
    let weights: Vec<f32> = (0..OUTPUTS * INPUTS).map(|_| random.normal() as f32).collect();
    let x: Vec<f32> = (0..ROWS * INPUTS).map(|_| random.normal() as f32).collect();

    // Nearly exact reference, computed in f64.
    let exact = x.chunks(INPUTS).flat_map(|row| weights.chunks(INPUTS).map(move |weight| dot(row, weight)));
    let exact: Vec<f64> = exact.collect();
    let norm = |values: &[f64]| values.iter().map(|value| value * value).sum::<f64>().sqrt();

    println!("dtype       bytes  relative error");
    for dtype in NumberType::all(uses::CPU_WEIGHTS) {
        let weight = Strided { values: &weights, strides: (INPUTS, 1), shape: (OUTPUTS, INPUTS) };
        let packed = PackedMatrix::from_values(weight, dtype)?;
        let product = packed.product(&x, ROWS, Epilogue::default());
        let off: Vec<f64> =
            product.iter().zip(&exact).map(|(value, exact)| f64::from(*value) - exact).collect();
        println!("{:6} {:10}  {:.1e}", dtype.name(), packed.bytes(), norm(&off) / norm(&exact));
    }
    Ok(())
}

fn dot(left: &[f32], right: &[f32]) -> f64 {
    left.iter().zip(right).map(|(left, right)| f64::from(*left) * f64::from(*right)).sum()
}
