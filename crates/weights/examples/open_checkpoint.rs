//! What is in a checkpoint, and is it whole? usage: open_checkpoint [FOLDER or FILE]
#![expect(clippy::print_stdout, reason = "what the example shows")]

use std::path::Path;

use candle_gpt2_weights::{Checkpoint, GivenFiles, OpenOptions, WeightsError};

fn main() -> Result<(), WeightsError> {
    let checkpoint = match std::env::args().nth(1) {
        Some(path) => Checkpoint::open(Path::new(&path))?,
        None => {
            let files = GivenFiles::new("stories")
                .with_bytes("config.json", candle_gpt2_stories::CONFIG)
                .with_bytes("model.safetensors", candle_gpt2_stories::WEIGHTS);
            Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?
        }
    };
    let config = checkpoint.config();
    println!("{} ({})", checkpoint.format().name(), checkpoint.evidence());
    println!("{} blocks, width {}, {} heads", config.n_layer, config.n_embd, config.n_head);
    println!("names of {}, linear layers as {:?}", checkpoint.naming_scheme(), checkpoint.orientation());
    for tensor in checkpoint.tensors().iter().take(8) {
        println!("{:28} {:?} {:?}", tensor.name, tensor.shape, tensor.dtype);
    }
    println!("… {} tensors in all, {} bytes", checkpoint.tensors().len(), checkpoint.parameter_bytes());

    // Reads every value: tensors that do not fit, and numbers that are not finite.
    let problems = checkpoint.verify(&|_| ())?;
    println!("{} problems {problems:?}", problems.len());
    Ok(())
}
