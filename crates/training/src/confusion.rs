//! How often rows of each label were taken for which: accuracy, precision, recall and F1 of what a classifier says.
//!
//! Precision is the share of the rows said to have a label that have it; recall the share of the rows with the label that were
//! said to have it; F1 their harmonic mean, `2 hits / (said + there)`, and 0 if there is nothing to divide by, as
//! scikit-learn takes it. Macro F1 is the mean over the labels.

use serde::{Deserialize, Serialize};

/// How often the rows of each label were taken for which.
///
/// ```
/// use candle_gpt2_training::Confusion;
///
/// let mut confusion = Confusion::new(2);
/// for (label, said) in [(0, 0), (0, 0), (0, 1), (1, 1)] {
///     confusion.add(label, said);
/// }
/// assert_eq!(confusion.counts(), [[2, 1], [0, 1]]);
/// assert_eq!(confusion.accuracy(), 0.75);
/// assert_eq!(confusion.report(&["ham".into(), "spam".into()]).labels[1].precision, 0.5);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Confusion {
    /// A row for each label, a column for each label that the model may have said.
    counts: Vec<Vec<u64>>,
}

/// A classifier's quality on held-out rows. [`Confusion::report`] makes it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClassificationReport {
    /// Share of the rows whose label was said.
    pub accuracy: f64,
    /// Mean of the labels' F1.
    pub macro_f1: f64,
    /// The labels, in their order.
    pub labels: Vec<LabelReport>,
    /// Rows of each label (one list each) by what was said of them (one number for each label).
    pub confusion: Confusion,
}

/// A classifier's quality on the rows of one label. [`Confusion::report`] makes them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LabelReport {
    /// Its name.
    pub label: String,
    /// Rows that have it.
    pub rows: u64,
    /// Share of the rows said to have it that have it.
    pub precision: f64,
    /// Share of the rows that have it that were said to.
    pub recall: f64,
    /// The harmonic mean of both.
    pub f1: f64,
}

impl Confusion {
    /// Of so many labels, without rows.
    pub fn new(labels: usize) -> Self {
        Self { counts: vec![vec![0; labels]; labels] }
    }

    /// Counts a row with the label `label` of which `said` was said; labels that are not there are not counted.
    pub fn add(&mut self, label: usize, said: usize) {
        if let Some(count) = self.counts.get_mut(label).and_then(|row| row.get_mut(said)) {
            *count += 1;
        }
    }

    /// Rows of each label by what was said of them.
    pub fn counts(&self) -> &[Vec<u64>] {
        &self.counts
    }

    /// Share of the rows whose label was said.
    pub fn accuracy(&self) -> f64 {
        let hits = (0..self.counts.len()).map(|label| self.hits(label)).sum();
        share(hits, self.counts.iter().flatten().sum())
    }

    /// Mean of the labels' F1.
    pub fn macro_f1(&self) -> f64 {
        let labels = self.counts.len();
        (0..labels).map(|label| self.f1(label)).sum::<f64>() / labels.max(1) as f64
    }

    /// All of it, by the names of the labels.
    pub fn report(&self, names: &[String]) -> ClassificationReport {
        let labels = names.iter().enumerate().map(|(label, name)| LabelReport {
            label: name.clone(),
            rows: self.there(label),
            precision: share(self.hits(label), self.said(label)),
            recall: share(self.hits(label), self.there(label)),
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
        share(2 * self.hits(label), self.said(label) + self.there(label))
    }

    /// Rows with the label of which it was said.
    fn hits(&self, label: usize) -> u64 {
        self.counts.get(label).and_then(|row| row.get(label)).copied().unwrap_or(0)
    }

    /// Rows with the label.
    fn there(&self, label: usize) -> u64 {
        self.counts.get(label).into_iter().flatten().sum()
    }

    /// Rows of which it was said.
    fn said(&self, label: usize) -> u64 {
        self.counts.iter().filter_map(|row| row.get(label)).sum()
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// scikit-learn 1.5, `classification_report` of the same rows: precision 2/3, 1, 0; recall 1, 1/2, 0; F1 0.8, 2/3, 0.
    #[test]
    fn shares_are_those_of_scikit_learn() {
        let mut confusion = Confusion::new(3);
        for (label, said) in [(0, 0), (0, 0), (1, 1), (1, 0)] {
            confusion.add(label, said);
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
