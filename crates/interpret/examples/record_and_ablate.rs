//! Shows what each attention head attends to, and how ablating a head changes a prediction.
#![expect(clippy::print_stdout, reason = "what the example shows")]

use candle_gpt2_interpret::{Ablate, Chain, Metric, Place, Run, named_site, named_sites};
use candle_gpt2_weights::{Checkpoint, GivenFiles, LoadOptions, OpenOptions, encode};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = GivenFiles::of_bytes("stories", candle_gpt2_stories::FILES);
    let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
    let (model, tokenizer) =
        (checkpoint.load(&LoadOptions::default(), &|_| ())?, checkpoint.tokenizer(None)?);
    let (ids, answers) =
        (encode(&tokenizer, "A red ball and a blue cup, a red")?, encode(&tokenizer, " ball cup")?);
    let run = Run::new(&model, &ids)?;
    let (n_layer, n_head) = (model.config().n_layer, model.config().n_head);

    // Record: attention weights of every head at the last token, from `(B, H, T, S)`.
    let record = run.record(named_sites("pattern", n_layer)?)?;
    let of_last = record.get(named_site("pattern1")?)?.get(0)?.narrow(1, ids.len() - 1, 1)?;
    println!("how much each head of block 1 looks back from the last ` red` at what followed the first one");
    for (head, weights) in of_last.squeeze(1)?.to_vec2::<f32>()?.iter().enumerate() {
        println!("  1.{head}: {:.2}", weights[2]);
    }

    // Ablate: the same prompt with one head's output set to zero.
    let metric = Metric::logit_difference(answers[0], answers[1], ids.len() - 1);
    let whole = metric.of_run(&run, &mut Chain(vec![]))?;
    println!("`ball` is {whole:.2} above `cup`; without one head it is");
    for layer in 0..n_layer {
        let values = (0..n_head).map(|head| {
            let mut edit = Ablate::zero(named_site(&format!("z{layer}"))?)?.at(Place::head(head));
            Ok(format!("{:7.2}", metric.of_run(&run, &mut edit)?))
        });
        println!("  layer {layer}: {}", values.collect::<Result<String, Box<dyn std::error::Error>>>()?);
    }
    Ok(())
}
