//! Computes how a head attends to a token: query, key, score and weight.
//!
//! `cargo run -p candle-gpt2-look --example one_head`
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;

use candle_gpt2_engine::{ModelOptions, Silent};
use candle_gpt2_interpret::Head;
use candle_gpt2_look::{LookSubject, OneHead, Reader, Text};

fn main() -> Result<(), Box<dyn Error>> {
    let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
    let reader = Reader::without_bos(model.vocabulary());
    let subject = LookSubject::new(&model, "built-in".into(), &reader);

    // In an induction head, the second " red" attends to " ball", the token after the first " red".
    let text = Text::Words("A red ball and a blue cup, a red".into());
    let question = OneHead { text, head: Head { layer: 1, head: 0 }, query: -1, key: 2 };
    let steps = question.check(&reader)?.look(&subject)?;

    let (query, key) = (&steps.tokens[steps.query], &steps.tokens[steps.key]);
    println!("{query:?} looks at {key:?} in head {}.{}", steps.layer, steps.head);
    println!("query   {:.3?} and {} more", &steps.q[..4], steps.head_dim - 4);
    println!("key     {:.3?} and {} more", &steps.k[..4], steps.head_dim - 4);
    println!("score   {:.4}, the sum of the products of both", steps.score);
    println!("scaled  {:.4}, times {:.4}", steps.scaled, steps.scale);
    println!("weight  {:.4}, after the softmax over all keys:", steps.weights[steps.key]);
    for (token, weight) in steps.tokens.iter().zip(&steps.weights) {
        let marks = (0..60).filter(|mark| (*mark as f32) < 60.0 * weight).map(|_| '#');
        println!("{token:>12} {weight:.4} {}", marks.collect::<String>());
    }
    Ok(())
}
