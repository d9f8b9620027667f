//! Ranks continuations of a prompt: `cargo run -p candle-gpt2-engine --example choose_continuation`.
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;

use candle_gpt2_engine::{Choices, ModelOptions, Silent};

fn main() -> Result<(), Box<dyn Error>> {
    let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
    let texts = [" lord", " lady", " potato"].map(String::from);
    let choices = Choices::new(model.vocabulary(), "Good night, my good", &texts)?;
    choices.check(model.config())?;
    let scored = choices.score(&model, &Silent)?;

    println!("{:10}{:>10}{:>12}{:>12}", "choice", "sum", "per token", "per byte");
    for choice in &scored.choices {
        println!("{:10}{:10.3}{:12.3}{:12.3}", choice.text, choice.sum, choice.per_token, choice.per_byte);
    }
    println!("best by the sum: {:?}", scored.choices[scored.best.sum].text);
    println!("best by the sum per byte: {:?}", scored.choices[scored.best.per_byte].text);
    Ok(())
}
