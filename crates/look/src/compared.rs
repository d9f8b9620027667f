//! Two texts with the same number of tokens, and the prediction that differs between them.

use candle_gpt2_interpret::Patching;
use candle_gpt2_pictures::{Metric as ReportMetric, Report};
use serde::{Deserialize, Serialize};

use crate::error::{Result, invalid_option};
use crate::metric::Prediction;
use crate::{LookSubject, MetricOptions, Reader, Text};

/// Two texts with the same number of tokens.
///
/// ```
/// use candle_gpt2_look::{ComparedTexts, Text};
///
/// let texts = ComparedTexts {
///     clean: Text::Words("One day, Mia was".into()),
///     corrupt: Text::Words("My love, I will".into()),
/// };
/// assert_ne!(texts.clean, texts.corrupt);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComparedTexts {
    /// Text for which the answer is correct (`clean`).
    pub clean: Text,
    /// Text of the same length for which the answer is wrong (`corrupt`).
    pub corrupt: Text,
}

/// Token ids of both texts, and the prediction to measure.
#[derive(Debug)]
pub(crate) struct CheckedTexts {
    pub(crate) clean: Vec<u32>,
    pub(crate) corrupted: Vec<u32>,
    prediction: Prediction,
}

/// Clean and corrupted runs, and a report that starts with their metrics.
pub(crate) struct Compared<'a> {
    pub(crate) patching: Patching<'a>,
    pub(crate) report: Report,
}

impl ComparedTexts {
    /// Encodes both texts and checks that they have the same length.
    pub(crate) fn ids(&self, reader: &Reader) -> Result<(Vec<u32>, Vec<u32>)> {
        let (clean, corrupted) = (reader.text(&self.clean)?, reader.text(&self.corrupt)?);
        if clean.len() != corrupted.len() {
            let row = |ids: &[u32]| {
                let tokens = ids.iter().enumerate();
                let shown = tokens.map(|(index, id)| format!("{} {index}", reader.printable(*id)));
                shown.collect::<Vec<_>>().join(" | ")
            };
            return Err(invalid_option(format!(
                "`clean` has {} tokens and `corrupt` {}; both must have the same length:\n{}\n{}",
                clean.len(),
                corrupted.len(),
                row(&clean),
                row(&corrupted)
            )));
        }
        Ok((clean, corrupted))
    }

    pub(crate) fn read(&self, metric: &MetricOptions, reader: &Reader) -> Result<CheckedTexts> {
        let (clean, corrupted) = self.ids(reader)?;
        let prediction = metric.read(reader, clean.len())?;
        Ok(CheckedTexts { clean, corrupted, prediction })
    }
}

impl CheckedTexts {
    pub(crate) fn compare<'a>(&'a self, subject: &'a LookSubject, what: &str) -> Result<Compared<'a>> {
        let clean = subject.run(&self.clean)?;
        let metric = self.prediction.metric(&clean)?;
        let patching = Patching::new(clean, subject.run(&self.corrupted)?, metric)?;
        let name = subject.metric_name(&metric);
        let mut report = subject.report(what, name.clone(), &self.clean);
        report.metric = Some(ReportMetric {
            name,
            before: f64::from(patching.corrupted_value),
            after: Some(f64::from(patching.clean_value)),
        });
        report.notes.push("metric: corrupted text first, then clean text".into());
        let differing: Vec<String> = self
            .clean
            .iter()
            .zip(&self.corrupted)
            .enumerate()
            .filter(|(_, (clean, corrupted))| clean != corrupted)
            .map(|(index, (clean, corrupted))| {
                format!("{index}: {:?} for {:?}", subject.printable(*corrupted), subject.printable(*clean))
            })
            .collect();
        report.notes.push(format!("the corrupted text differs at {}", differing.join(", ")));
        Ok(Compared { patching, report })
    }
}
