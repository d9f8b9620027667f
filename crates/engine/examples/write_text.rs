//! Generates text and shows progress: `cargo run -p candle-gpt2-engine --example write_text`.
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::io::{Write, stdout};

use candle_gpt2_engine::{ModelOptions, Progress, Reporter, Unit};
use candle_gpt2_generation::GenerationOptions;

/// Prints a line when a job begins and a dot for each step.
struct Dots;

impl Reporter for Dots {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        println!("{what}, {total} {unit:?} in all:");
        Box::new(Self)
    }

    fn note(&self, note: &str) {
        println!("note: {note}");
    }
}

impl Progress for Dots {
    fn advance(&self, _: u64) {
        print!(".");
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let opened = ModelOptions::default().open(&Dots)?; // the built-in model
    println!("{} bytes of memory are needed", opened.memory_needed()?.total());
    // Invalid options are reported before the weights are read.
    let options = GenerationOptions { max_new_tokens: Some(40), seed: Some(7), ..Default::default() };
    let config = opened.defaults()?.changed_by(&options)?;
    let model = opened.load(&Dots)?;

    print!("\n\nOne day");
    let prompt = model.vocabulary().encode("One day")?;
    for piece in model.text_generator(&prompt, &config)? {
        print!("{}", piece?);
        stdout().flush()?;
    }
    println!();
    Ok(())
}
