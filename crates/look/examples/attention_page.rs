//! Draws the attention patterns for a text: `cargo run -p candle-gpt2-look --example attention_page`.
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::fs;

use candle_gpt2_engine::{ModelOptions, Silent};
use candle_gpt2_look::{Attention, Look, LookSubject, Reader, Text};
use candle_gpt2_pictures::{Width, page, svg, table};

fn main() -> Result<(), Box<dyn Error>> {
    let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
    let reader = Reader::without_bos(model.vocabulary());
    let subject = LookSubject::new(&model, "built-in".into(), &reader);

    let text = Text::Words("A red ball and a blue cup, a red".into());
    let all_heads = Attention { text: text.clone(), layers: None, heads: None };
    let found = all_heads.at(&subject, &Silent)?;
    print!("{}", table(&found.report)); // one line for each head

    let one_head = Attention { text, layers: None, heads: Some("1.0".parse()?) };
    let picture = svg(&one_head.at(&subject, &Silent)?.report, Width::OneColumn)?;

    let folder = std::env::temp_dir();
    let (html, drawing) = (folder.join("attention.html"), folder.join("attention.svg"));
    fs::write(&html, page(&found.report))?;
    fs::write(&drawing, picture)?;
    println!("all heads: {}\nhead 1.0: {}", html.display(), drawing.display());
    Ok(())
}
