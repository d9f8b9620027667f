//! Confusion matrix as a picture.

use candle_gpt2_pictures::{Axis, Report, Scale};
use candle_gpt2_training::ClassificationReport;

/// Converts a confusion matrix for [`candle_gpt2_pictures`]: labels as rows, predictions as columns.
///
/// ```
/// use candle_gpt2_jobs::confusion_picture;
/// use candle_gpt2_pictures::{Width, svg};
/// use candle_gpt2_training::Confusion;
///
/// let mut confusion = Confusion::new(2);
/// for (label, predicted) in [(0, 0), (0, 0), (0, 1), (1, 1)] {
///     confusion.add(label, predicted);
/// }
/// let report = confusion.report(&["ham".into(), "spam".into()]);
/// let picture = svg(&confusion_picture(&report), Width::OneColumn)?;
/// assert!(picture.contains(">ham<") && picture.contains("accuracy 0.7500"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn confusion_picture(report: &ClassificationReport) -> Report {
    let names = || report.labels.iter().map(|label| label.label.clone());
    let counts = || report.confusion.counts().iter().flatten();
    let title = format!(
        "{} held-out rows, accuracy {:.4}, macro F1 {:.4}",
        counts().sum::<u64>(),
        report.accuracy,
        report.macro_f1
    );
    // The values determine the colors. The texts show the counts.
    let values = counts().map(|count| Some(*count as f32)).collect();
    Report {
        schema: "gpt2.train.confusion/1".into(),
        axes: vec![Axis::new("label", names()), Axis::new("predicted", names())],
        values,
        texts: counts().map(u64::to_string).collect(),
        scale: Scale::Amount,
        ..Report::new("", title, String::new(), Vec::new(), false)
    }
}
