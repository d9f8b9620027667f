//! Continues several prompts in a batch and scores the results.
#![expect(clippy::print_stdout, reason = "what the example shows")]

use candle_gpt2_generation::{BatchGenerator, GenerationConfig, Request, default_stride, score};
use candle_gpt2_weights::{Checkpoint, GivenFiles, LoadOptions, OpenOptions, encode};

const PROMPTS: [&str; 3] = ["One day", "Once there was", "Mia and Tom"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = GivenFiles::of_bytes("stories", candle_gpt2_stories::FILES);
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
    // Two completions run at a time, and the next prompt begins when one ends. Each completion is the same
    // as if it ran alone.
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
