//! Computes the bits per byte that a model needs to encode a text.
//!
//! Run it with `cargo run -p candle-gpt2-evaluation --example bits_of_a_text`.
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::fs;

use candle_gpt2_engine::{ModelOptions, Silent};
use candle_gpt2_evaluation::{EvaluationOptions, ModelFacts};

const LINES: &str = "What is the city but the people?\nTrue, the people are the city.\n";

fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("lines.txt");
    fs::write(&path, LINES.repeat(4))?;

    // `text:bits` is a protocol of this crate. It scores every token once, in windows that overlap by
    // half of the context.
    let options = EvaluationOptions { data: vec![path], ..EvaluationOptions::new(["text:bits"]) };
    let plan = options.check()?;
    let options = ModelOptions::default();
    let model = options.open(&Silent)?.load(&Silent)?;
    let evaluation = plan.prepare(&ModelFacts::of_loaded(&options, &model), None, &Silent)?;
    for report in evaluation.run(&model, None, &Silent) {
        println!("{}", report?);
    }
    println!("\nall protocols:");
    for protocol in candle_gpt2_evaluation::protocols() {
        println!("{:24} {}", protocol.name, protocol.about);
    }
    Ok(())
}
