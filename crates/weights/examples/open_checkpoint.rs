//! Lists the tensors of a checkpoint and verifies them. Usage: `open_checkpoint [FOLDER or FILE]`
#![expect(clippy::print_stdout, reason = "what the example shows")]

use candle_gpt2_weights::{Checkpoint, GivenFiles, OpenOptions, WeightsError};

fn main() -> Result<(), WeightsError> {
    let checkpoint = match std::env::args().nth(1) {
        Some(path) => Checkpoint::open(path)?,
        None => {
            let files = GivenFiles::of_bytes("stories", candle_gpt2_stories::FILES);
            Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?
        }
    };
    let config = checkpoint.config();
    println!("{} ({})", checkpoint.format().name(), checkpoint.evidence());
    println!("{} blocks, hidden size {}, {} heads", config.n_layer, config.n_embd, config.n_head);
    println!(
        "naming scheme {}, linear layers stored as {:?}",
        checkpoint.naming_scheme(),
        checkpoint.orientation()
    );
    for tensor in checkpoint.tensors().iter().take(8) {
        println!("{:28} {:?} {:?}", tensor.name, tensor.shape, tensor.dtype);
    }
    println!(
        "… {} tensors, {} bytes of parameters",
        checkpoint.tensors().len(),
        checkpoint.parameter_bytes()
    );

    // Reads every value, and reports tensors that do not match the model and values that are not finite.
    let problems = checkpoint.verify(&|_| ())?;
    println!("{} problems {problems:?}", problems.len());
    Ok(())
}
