//! Loss curve as an SVG picture: training loss of every step, held-out loss of every evaluation.

use std::fs;
use std::path::Path;

use candle_gpt2_weights::replace_file;
use plotters::prelude::*;

use crate::{Entry, JobError};

/// Width and height of the picture in pixels.
const SIZE: (u32, u32) = (800, 450);
const TRAINING_COLOR: RGBColor = RGBColor(70, 130, 180);
const HELD_OUT_COLOR: RGBColor = RGBColor(200, 80, 40);

/// Draws a log's losses to the file `path`, replacing any existing file.
///
/// `unit` is the unit of the losses, such as `nats per token`.
///
/// ```
/// use candle_gpt2_jobs::{Entry, loss_curve};
///
/// let entry = |step: u64| Entry { step, loss: Some(1.0 / step as f64), ..Entry::default() };
/// let folder = tempfile::tempdir()?;
/// let file = folder.path().join("loss.svg");
/// loss_curve(&[entry(1), entry(2), entry(3)], "nats per token", &file)?;
/// assert!(std::fs::read_to_string(file)?.starts_with("<svg"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Fails if there is no loss to draw, or the file cannot be written.
pub fn loss_curve(entries: &[Entry], unit: &str, path: &Path) -> Result<(), JobError> {
    let failed = |what: String| JobError::Curve { path: path.to_owned(), what };
    let losses = |loss: fn(&Entry) -> Option<f64>| -> Vec<(f64, f64)> {
        let points = entries.iter().filter_map(|entry| Some((entry.step as f64, loss(entry)?)));
        points.filter(|(_, loss)| loss.is_finite()).collect()
    };
    let (training, held_out) = (losses(|entry| entry.loss), losses(|entry| entry.held_out_loss));
    let all = || training.iter().chain(&held_out);
    let last_step = all().map(|(step, _)| *step).fold(1.0, f64::max);
    let lowest = all().map(|(_, loss)| *loss).fold(f64::INFINITY, f64::min);
    let highest = all().map(|(_, loss)| *loss).fold(f64::NEG_INFINITY, f64::max);
    if lowest > highest {
        return Err(failed("the log contains no losses".into()));
    }
    let margin = ((highest - lowest) * 0.05).max(0.05);
    let draw = |picture: &mut String| -> Result<(), Box<dyn std::error::Error>> {
        let root = SVGBackend::with_string(picture, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .margin(15)
            .x_label_area_size(40)
            .y_label_area_size(50)
            .build_cartesian_2d(0.0..last_step, lowest - margin..highest + margin)?;
        chart
            .configure_mesh()
            .x_desc("step")
            .y_desc(format!("loss, {unit}"))
            .light_line_style(WHITE)
            .draw()?;
        for (points, color, name) in
            [(training, TRAINING_COLOR, "training"), (held_out, HELD_OUT_COLOR, "held out")]
        {
            if points.is_empty() {
                continue;
            }
            chart
                .draw_series(LineSeries::new(points, color.stroke_width(2)))?
                .label(name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(2)));
        }
        chart
            .configure_series_labels()
            .background_style(WHITE)
            .border_style(BLACK)
            .position(SeriesLabelPosition::UpperRight)
            .draw()?;
        Ok(root.present()?)
    };
    let mut picture = String::new();
    draw(&mut picture).map_err(|error| failed(error.to_string()))?;
    Ok(replace_file(path, |partial| Ok(fs::write(partial, picture)?))?)
}
