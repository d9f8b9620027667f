//! Confusion matrix for a classifier, with accuracy, precision, recall and F1.
//!
//! Precision is the fraction of rows predicted as a label that actually have it. Recall is the fraction of rows
//! with a label that are predicted as it. F1 is their harmonic mean, `2 hits / (predicted + actual)`. A fraction
//! with a zero denominator is 0, as in scikit-learn. Macro F1 is the mean over the labels.

use serde::{Deserialize, Serialize};

/// Confusion matrix: number of rows by actual and predicted label.
///
/// ```
/// use candle_gpt2_training::Confusion;
///
/// let mut confusion = Confusion::new(2);
/// for (label, predicted) in [(0, 0), (0, 0), (0, 1), (1, 1)] {
///     confusion.add(label, predicted);
/// }
/// assert_eq!(confusion.counts(), [[2, 1], [0, 1]]);
/// assert_eq!(confusion.accuracy(), 0.75);
/// assert_eq!(confusion.report(&["ham".into(), "spam".into()]).labels[1].precision, 0.5);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Confusion {
    /// One row per actual label, one column per predicted label.
    counts: Vec<Vec<u64>>,
}

/// Quality of a classifier on held-out rows, returned by [`Confusion::report`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClassificationReport {
    /// Fraction of rows with a correct prediction.
    pub accuracy: f64,
    /// Mean F1 over the labels.
    pub macro_f1: f64,
    /// Quality for each label, in label order.
    pub labels: Vec<LabelReport>,
    /// Number of rows by actual label (outer list) and predicted label (inner list).
    pub confusion: Confusion,
}

/// Quality of a classifier for one label, returned by [`Confusion::report`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LabelReport {
    /// Name of the label.
    pub label: String,
    /// Number of rows with the label.
    pub rows: u64,
    /// Fraction of rows predicted as the label that actually have it.
    pub precision: f64,
    /// Fraction of rows with the label that are predicted correctly.
    pub recall: f64,
    /// Harmonic mean of precision and recall.
    pub f1: f64,
}

impl Confusion {
    /// Creates a matrix for `labels` labels without any rows.
    pub fn new(labels: usize) -> Self {
        Self { counts: vec![vec![0; labels]; labels] }
    }

    /// Counts a row with label `label` that was predicted as `predicted`; ignores invalid labels.
    pub fn add(&mut self, label: usize, predicted: usize) {
        if let Some(count) = self.counts.get_mut(label).and_then(|row| row.get_mut(predicted)) {
            *count += 1;
        }
    }

    /// Number of rows by actual and predicted label.
    pub fn counts(&self) -> &[Vec<u64>] {
        &self.counts
    }

    /// Fraction of rows with a correct prediction.
    pub fn accuracy(&self) -> f64 {
        let hits = (0..self.counts.len()).map(|label| self.hits(label)).sum();
        share(hits, self.counts.iter().flatten().sum())
    }

    /// Mean F1 over the labels.
    pub fn macro_f1(&self) -> f64 {
        let labels = self.counts.len();
        (0..labels).map(|label| self.f1(label)).sum::<f64>() / labels.max(1) as f64
    }

    /// Creates a report with these label names.
    pub fn report(&self, names: &[String]) -> ClassificationReport {
        let labels = names.iter().enumerate().map(|(label, name)| LabelReport {
            label: name.clone(),
            rows: self.actual(label),
            precision: share(self.hits(label), self.predicted(label)),
            recall: share(self.hits(label), self.actual(label)),
            f1: self.f1(label),
        });
        ClassificationReport {
            accuracy: self.accuracy(),
            macro_f1: self.macro_f1(),
            labels: labels.collect(),
            confusion: self.clone(),
        }
    }

    fn f1(&self, label: usize) -> f64 {
        share(2 * self.hits(label), self.predicted(label) + self.actual(label))
    }

    /// Number of rows with the label that are predicted correctly.
    fn hits(&self, label: usize) -> u64 {
        self.counts.get(label).and_then(|row| row.get(label)).copied().unwrap_or(0)
    }

    /// Number of rows with the label.
    fn actual(&self, label: usize) -> u64 {
        self.counts.get(label).into_iter().flatten().sum()
    }

    /// Number of rows predicted as the label.
    fn predicted(&self, label: usize) -> u64 {
        self.counts.iter().filter_map(|row| row.get(label)).sum()
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expects the results of scikit-learn 1.5's `classification_report` on the same rows.
    ///
    /// Precision 2/3, 1, 0; recall 1, 1/2, 0; F1 0.8, 2/3, 0.
    #[test]
    fn metrics_match_scikit_learn() {
        let mut confusion = Confusion::new(3);
        for (label, predicted) in [(0, 0), (0, 0), (1, 1), (1, 0)] {
            confusion.add(label, predicted);
        }
        confusion.add(3, 0);
        let report = confusion.report(&["ham", "spam", "none"].map(str::to_owned));
        assert_eq!(confusion.counts(), [[2, 0, 0], [1, 1, 0], [0, 0, 0]]);
        assert_eq!(report.accuracy, 0.75);
        let found: Vec<_> =
            report.labels.iter().map(|label| (label.rows, label.precision, label.recall, label.f1)).collect();
        assert_eq!(found, [(2, 2.0 / 3.0, 1.0, 0.8), (2, 1.0, 0.5, 2.0 / 3.0), (0, 0.0, 0.0, 0.0)]);
        assert!((report.macro_f1 - (0.8 + 2.0 / 3.0) / 3.0).abs() < 1e-12);
    }
}
