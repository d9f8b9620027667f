//! Changes the logits with a custom function.
#![expect(clippy::print_stdout, reason = "what the example shows")]

use candle_gpt2_generation::{
    GenerationConfig, LogitsFunction, LogitsProcessor, Request, TextStream, TokenGenerator,
};
use candle_gpt2_weights::{Checkpoint, GivenFiles, LoadOptions, OpenOptions, encode, token_bytes};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = GivenFiles::of_bytes("stories", candle_gpt2_stories::FILES);
    let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
    let (model, tokenizer) =
        (checkpoint.load(&LoadOptions::default(), &|_| ())?, checkpoint.tokenizer(None)?);

    // Forbid every token that contains the letter e.
    let ids = 0..u32::try_from(model.config().vocab_size)?;
    let has_e = |id: u32| token_bytes(&tokenizer, id).is_some_and(|bytes| bytes.contains(&b'e'));
    let forbidden: Vec<usize> = ids.filter(|id| has_e(*id)).map(|id| id as usize).collect();
    println!("{} of {} tokens contain an e", forbidden.len(), model.config().vocab_size);
    let without_e = LogitsFunction::new(move |_history, logits| {
        for id in &forbidden {
            logits[*id] = f32::NEG_INFINITY;
        }
        Ok(())
    });

    let config = GenerationConfig {
        max_new_tokens: 40,
        do_sample: true,
        top_k: 40,
        seed: 7,
        ..GenerationConfig::default()
    };
    for processors in [vec![], vec![LogitsProcessor::Function(without_e)]] {
        let request =
            Request { processors, ..Request::new(encode(&tokenizer, "Once there was")?, config.clone()) };
        let mut stream = TextStream::new(&tokenizer);
        let mut text = String::from("Once there was");
        for id in TokenGenerator::of_request(&model, request, Some(&tokenizer))? {
            text += &stream.push(id?)?;
        }
        println!("\n{text}{}", stream.finish()?);
    }
    Ok(())
}
