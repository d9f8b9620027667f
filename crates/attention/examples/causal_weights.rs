//! What are attention weights, and what does the causal mask do to them?
#![expect(clippy::print_stdout, reason = "what the example shows")]

use candle_core::{D, Device, Result, Tensor};
use candle_gpt2_attention::steps::{mask_with_negative_infinity, simple_self_attention};
use candle_gpt2_kernels::softmax;

const WORDS: [&str; 4] = ["the", "cat", "sat", "down"];

fn main() -> Result<()> {
    // A vector of width 3 for each word; words that point the same way have a large dot product.
    let inputs = Tensor::new(&[[1f32, 0., 0.], [0., 2., 1.], [0., 1., 2.], [1., 0., 1.]], &Device::Cpu)?;
    let attention = simple_self_attention(&inputs)?;
    print("dot products of every word with every other", &attention.scores)?;
    print("softmax of each row: the attention weights", &attention.weights)?;

    let masked = mask_with_negative_infinity(&attention.scores)?;
    let causal = softmax(&masked, D::Minus1)?;
    print("the same with the future hidden", &causal)?;

    let context = causal.matmul(&inputs)?; // (T, d): each row is a weighted sum of the words it sees
    assert_eq!(
        context.get(0)?.to_vec1::<f32>()?,
        inputs.get(0)?.to_vec1::<f32>()?,
        "the first word sees itself"
    );
    Ok(())
}

fn print(title: &str, rows: &Tensor) -> Result<()> {
    println!("{title}\n       {}", WORDS.map(|word| format!("{word:>6}")).concat());
    for (word, row) in WORDS.iter().zip(rows.to_vec2::<f32>()?) {
        println!("{word:>6} {}", row.iter().map(|value| format!("{value:6.2}")).collect::<String>());
    }
    println!();
    Ok(())
}
