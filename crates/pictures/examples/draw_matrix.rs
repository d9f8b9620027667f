//! Draws a custom matrix as a table, an SVG picture and a page.
//!
//! `cargo run -p candle-gpt2-pictures --example draw_matrix`
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::fs;

use candle_gpt2_pictures::{Axis, Report, Scale, Width, page, svg, table};

fn main() -> Result<(), Box<dyn Error>> {
    // Cosine of the angle between each pair of eight positions: values from -1 to 1.
    let cosine = |row: usize, column: usize| (0.4 * (row as f32 - column as f32)).cos();
    let values = (0..64).map(|place| Some(cosine(place / 8, place % 8)));

    let title = "likeness of two positions".to_owned();
    let mut report = Report::new("example", title, "none".into(), Vec::new(), false);
    report.axes = vec![Axis::numbers("position", 0..8), Axis::numbers("other position", 0..8)];
    report.values = values.collect(); // row by row
    report.values[7] = None; // a cell without a value is gray
    report.scale = Scale::Signed; // white at 0, blue above, red below
    report.check()?;

    print!("{}", table(&report));
    let folder = std::env::temp_dir();
    let (picture, html) = (folder.join("matrix.svg"), folder.join("matrix.html"));
    fs::write(&picture, svg(&report, Width::OneColumn)?)?;
    fs::write(&html, page(&report))?;
    println!("drawn in {} and {}", picture.display(), html.display());
    Ok(())
}
