//! How do I continue several prompts at once, and how probable does the model find a text?
#![expect(clippy::print_stdout, reason = "what the example shows")]

use candle_gpt2_generation::{BatchGenerator, GenerationConfig, Request, default_stride, score};
use candle_gpt2_weights::{Checkpoint, GivenFiles, LoadOptions, OpenOptions, encode};

const PROMPTS: [&str; 3] = ["One day", "Once there was", "Mia and Tom"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = GivenFiles::new("stories")
        .with_bytes("config.json", candle_gpt2_stories::CONFIG)
        .with_bytes("tokenizer.json", candle_gpt2_stories::TOKENIZER)
        .with_bytes("model.safetensors", candle_gpt2_stories::WEIGHTS);
    let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
    let (model, tokenizer) =
        (checkpoint.load(&LoadOptions::default(), &|_| ())?, checkpoint.tokenizer(None)?);

    let prompts = PROMPTS.iter().map(|prompt| encode(&tokenizer, prompt)).collect::<Result<Vec<_>, _>>()?;
    let config = GenerationConfig {
        max_new_tokens: 16,
        do_sample: true,
        top_k: 40,
        seed: 7,
        ..GenerationConfig::default()
    };
    let mut texts = PROMPTS.map(str::to_owned);
    // Two texts at a time; where one ends, the next prompt begins. Each text is the one that its prompt gives alone.
    for token in BatchGenerator::new(&model, Request::each(&prompts, &config), 2, Some(&tokenizer))? {
        let token = token.map_err(|failed| failed.error)?;
        texts[token.prompt] += &token.text;
    }
    for text in &texts {
        let ids = encode(&tokenizer, text)?;
        let score = score(&model, &ids, default_stride(model.config()), 0, &|_| ())?;
        println!("perplexity {:6.2} of {text:?}", score.perplexity());
    }
    Ok(())
}
