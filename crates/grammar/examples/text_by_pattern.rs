//! Constrains generation to a regular expression and to a JSON schema.
//!
//! Run with `cargo run -p candle-gpt2-grammar --example text_by_pattern`.
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;

use candle_gpt2_engine::{LoadedModel, ModelOptions, Silent};
use candle_gpt2_generation::{BatchGenerator, GenerationConfig, Request};
use candle_gpt2_grammar::{Compiler, Grammar};
use serde_json::{Value, json};

/// Generates a continuation of `prompt` that conforms to the grammar.
fn write(model: &LoadedModel, prompt: &str, grammar: &Grammar) -> Result<String, Box<dyn Error>> {
    let config =
        GenerationConfig { max_new_tokens: 100, do_sample: true, seed: 7, ..GenerationConfig::default() };
    let constraint = Compiler::new(model.vocabulary())?.compile(grammar, &config.eos_token_id)?;
    let mut request = Request::new(model.vocabulary().encode(prompt)?, config);
    request.processors.push(constraint);
    let tokenizer = model.vocabulary().tokenizer().cloned();
    let tokens = BatchGenerator::new(model.model(), vec![request], 1, tokenizer)?;
    let pieces = tokens.map(|token| token.map(|token| token.text).map_err(|failed| failed.error));
    Ok(pieces.collect::<Result<_, _>>()?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;

    let scene = Grammar::Regex(r"[1-9] o'clock, in the (street|garden|forest)".into());
    println!("{}", write(&model, "They met at ", &scene)?);

    let schema = json!({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "mood": {"enum": ["happy", "sad"]}},
        "required": ["name", "mood"],
        "additionalProperties": false,
    });
    let text = write(&model, "Mia: ", &Grammar::JsonSchema(schema))?;
    let person: Value = serde_json::from_str(&text)?; // always parses
    println!("{text}\nthe mood of {} is {}", person["name"], person["mood"]);
    Ok(())
}
