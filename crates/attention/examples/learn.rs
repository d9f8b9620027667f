//! Runs the examples from the course's attention chapters, with values to experiment with.
//!
//! Run it with `cargo run -p candle-gpt2-attention --example learn`.
//!
//! Each step prints a table: the scores of "A dot product", then those of "Queries, keys and values" with
//! their weights and context vectors. Change a vector, a matrix, the mask or the temperature, run it again,
//! and observe the effect.
#![expect(clippy::print_stdout, reason = "what the example shows")]

use candle_core::{D, Device, Result, Tensor};
use candle_gpt2_attention::steps::mask_with_negative_infinity;
use candle_nn::ops::softmax;

const TOKENS: [&str; 6] = ["Your", "journey", "starts", "with", "one", "step"];
/// Vector of each token.
const VECTORS: [[f32; 3]; 6] = [
    [0.43, 0.15, 0.89],
    [0.55, 0.87, 0.66],
    [0.57, 0.85, 0.64],
    [0.22, 0.58, 0.33],
    [0.77, 0.25, 0.10],
    [0.05, 0.80, 0.55],
];
/// Query, key and value projections, from three dimensions to two.
///
/// A query states what a token looks for, a key what it is matched by, and a value what it contributes.
const W_QUERY: [[f32; 2]; 3] = [[0.296112, 0.516562], [0.251671, 0.688557], [0.073972, 0.866522]];
const W_KEY: [[f32; 2]; 3] = [[0.136580, 0.102479], [0.184056, 0.726447], [0.315254, 0.687107]];
const W_VALUE: [[f32; 2]; 3] = [[0.075635, 0.196638], [0.316412, 0.401740], [0.118568, 0.827395]];
/// Softmax temperature: values below 1 sharpen the weights, and values above 1 flatten them.
const TEMPERATURE: f64 = 1.0;
/// Whether a token sees only itself and earlier tokens.
///
/// The chapter "The causal mask" demonstrates this with other matrices.
const IS_CAUSAL: bool = false;

fn main() -> Result<()> {
    let matrix = |rows: &[[f32; 2]; 3]| Tensor::new(rows, &Device::Cpu);
    let x = Tensor::new(&VECTORS, &Device::Cpu)?;
    show("scores of the vectors themselves, X Xᵀ", &x.matmul(&x.t()?)?)?;

    let (q, k, v) =
        (x.matmul(&matrix(&W_QUERY)?)?, x.matmul(&matrix(&W_KEY)?)?, x.matmul(&matrix(&W_VALUE)?)?);
    let scores = q.matmul(&k.t()?)?;
    show("scores of queries and keys, Q Kᵀ", &scores)?;
    let scores = (scores / (2f64.sqrt() * TEMPERATURE))?;
    show("divided by sqrt(2), the root of the width of a key", &scores)?;

    let scores = if IS_CAUSAL { mask_with_negative_infinity(&scores)? } else { scores };
    let weights = softmax(&scores, D::Minus1)?;
    show("attention weights: each row adds up to 1", &weights)?;
    show("context vectors: mixtures of the values", &weights.matmul(&v)?)
}

/// Prints a table with a row for each token.
fn show(title: &str, values: &Tensor) -> Result<()> {
    println!("{title}");
    for (token, row) in TOKENS.iter().zip(values.to_vec2::<f32>()?) {
        let cells: String = row.iter().map(|value| format!("{value:9.4}")).collect();
        println!("{token:>8}{cells}");
    }
    println!();
    Ok(())
}
