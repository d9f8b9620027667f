//! Counts the parameters of the published GPT-2 sizes by each definition in use.
#![expect(clippy::print_stdout, reason = "what the example shows")]

use candle_gpt2::{ConfigError, Gpt2Config, ParameterCounts, paper_size, parameter_ledger};

fn main() -> Result<(), ConfigError> {
    for name in ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] {
        let config = Gpt2Config::preset(name)?;
        let counts = ParameterCounts::new(&config);
        println!(
            "{name:12} {:>4} layers, width {:>4}: {:>13} parameters, {:>10} per block; the paper says {}",
            config.n_layer,
            config.n_embd,
            counts.unique,
            counts.per_block,
            paper_size(&config).unwrap_or("nothing"),
        );
    }

    println!("\nThe smallest, by each definition in use:");
    for row in parameter_ledger(&Gpt2Config::gpt2()) {
        println!("{:>12}  {:18} {}", row.count, row.name, row.definition);
    }
    Ok(())
}
