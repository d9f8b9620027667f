//! The numbers of the book's first chapters, to change and run: `cargo run -p candle-gpt2-attention --example learn`
//!
//! Each step prints a table. Change a vector, a matrix, the scale or the temperature, run it again, and see what moves.
#![expect(clippy::print_stdout, reason = "what the example shows")]

use candle_core::{D, Device, Result, Tensor};
use candle_gpt2_attention::steps::mask_with_negative_infinity;
use candle_gpt2_kernels::softmax;

const TOKENS: [&str; 6] = ["Your", "journey", "starts", "with", "one", "step"];
/// A vector for each token.
const VECTORS: [[f32; 3]; 6] = [
    [0.43, 0.15, 0.89],
    [0.55, 0.87, 0.66],
    [0.57, 0.85, 0.64],
    [0.22, 0.58, 0.33],
    [0.77, 0.25, 0.10],
    [0.05, 0.80, 0.55],
];
/// What a token asks, what it is matched by, and what it contributes: three matrices, from three numbers to two.
const W_QUERY: [[f32; 2]; 3] = [[0.2961, 0.5166], [0.2517, 0.6886], [0.0740, 0.8665]];
const W_KEY: [[f32; 2]; 3] = [[0.1366, 0.1025], [0.1841, 0.7264], [0.3153, 0.6871]];
const W_VALUE: [[f32; 2]; 3] = [[0.0756, 0.1966], [0.3164, 0.4017], [0.1186, 0.8274]];
/// Below 1 the largest weight takes more, above 1 all come closer.
const TEMPERATURE: f64 = 1.0;
/// Whether a token sees only itself and the tokens before it.
const IS_CAUSAL: bool = true;

fn main() -> Result<()> {
    let matrix = |rows: &[[f32; 2]; 3]| Tensor::new(rows, &Device::Cpu);
    let x = Tensor::new(&VECTORS, &Device::Cpu)?;
    show("scores of the vectors themselves, X Xᵀ", &x.matmul(&x.t()?)?)?;

    let (q, k, v) =
        (x.matmul(&matrix(&W_QUERY)?)?, x.matmul(&matrix(&W_KEY)?)?, x.matmul(&matrix(&W_VALUE)?)?);
    let scores = (q.matmul(&k.t()?)? / (2f64.sqrt() * TEMPERATURE))?;
    show("scores of queries and keys, Q Kᵀ / sqrt(2)", &scores)?;

    let scores = if IS_CAUSAL { mask_with_negative_infinity(&scores)? } else { scores };
    let weights = softmax(&scores, D::Minus1)?;
    show("attention weights: each row adds up to 1", &weights)?;
    show("context vectors: mixtures of the values", &weights.matmul(&v)?)
}

/// A table with a row for each token.
fn show(title: &str, values: &Tensor) -> Result<()> {
    println!("{title}");
    for (token, row) in TOKENS.iter().zip(values.to_vec2::<f32>()?) {
        let cells: String = row.iter().map(|value| format!("{value:9.4}")).collect();
        println!("{token:>8}{cells}");
    }
    println!();
    Ok(())
}
