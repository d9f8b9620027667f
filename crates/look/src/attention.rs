//! Attention patterns of heads.

use candle_gpt2_engine::Reporter;
use candle_gpt2_interpret::{Head, Patterns, Record};
use candle_gpt2_pictures::Report;
use serde::Deserialize;
use serde_json::Value;

use crate::error::{Result, invalid_option};
use crate::{Analysis, Heads, Look, LookSubject, Ranges, Reader, Text};

/// Maximum number of attention weights in a report; 144 heads over 1,024 tokens have 151 million.
const MOST_VALUES: usize = 160_000_000;

/// Attention patterns of all heads, of the heads in selected layers, or of selected heads.
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_look::{Attention, Look, Reader, LookSubject, Text};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let heads = Some("2.2,0.1".parse()?);
/// let attention = Attention { text: Text::Ids(vec![5, 6, 7]), layers: None, heads };
/// let found = attention.at(&subject, &Silent)?;
/// let names: Vec<_> = found.report.axes.iter().map(|axis| axis.name.as_str()).collect();
/// assert_eq!(names, ["layer", "head", "query", "key"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct Attention {
    /// Text to analyze.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub text: Text,
    /// Only these layers: 3, 0-5 or 0,4,8-11
    #[cfg_attr(feature = "clap", arg(long, value_name = "LAYERS", conflicts_with = "heads"))]
    pub layers: Option<Ranges>,
    /// Only these heads: LAYER.HEAD, separated by commas
    #[cfg_attr(feature = "clap", arg(long, value_name = "HEADS"))]
    pub heads: Option<Heads>,
}

impl Look for Attention {
    /// Tokens of the text, and the selected heads.
    type Checked = (Vec<u32>, Vec<Head>);

    fn check(&self, reader: &Reader) -> Result<Self::Checked> {
        let all = |layers: Vec<usize>| {
            let n_head = reader.config().n_head;
            let heads =
                layers.into_iter().flat_map(|layer| (0..n_head).map(move |head| Head { layer, head }));
            heads.collect()
        };
        let chosen: Vec<Head> = match (&self.layers, &self.heads) {
            (Some(_), Some(_)) => {
                return Err(invalid_option("`layers` and `heads` are mutually exclusive; pass one of them"));
            }
            (Some(layers), None) => all(reader.layers(layers)?),
            (None, Some(heads)) => reader.heads(heads)?.0,
            (None, None) => all((0..reader.config().n_layer).collect()),
        };
        let ids = reader.text(&self.text)?;
        let count = chosen.len().saturating_mul(ids.len()).saturating_mul(ids.len());
        if count > MOST_VALUES {
            return Err(invalid_option(format!(
                "{} heads over {} tokens have {count} attention values, more than {MOST_VALUES}; choose `layers` or `heads`, or a shorter text",
                chosen.len(),
                ids.len()
            )));
        }
        Ok((ids, chosen))
    }

    fn look(&self, (ids, heads): Self::Checked, subject: &LookSubject, _: &dyn Reporter) -> Result<Analysis> {
        let record = subject.run(&ids)?.record(Patterns::sites(&heads))?;
        let report = Self::report(record, &ids, &heads, subject.name(), subject.reader())?;
        Ok(Analysis::new(report, Value::Null))
    }
}

impl Attention {
    /// Creates a report on these heads from a record of [`Patterns::sites`], which is consumed.
    ///
    /// `model` is the model's display name.
    ///
    /// # Errors
    /// Errors from [`Patterns::of`].
    pub fn report(
        record: Record,
        ids: &[u32],
        heads: &[Head],
        model: &str,
        reader: &Reader,
    ) -> candle_core::Result<Report> {
        let Patterns { layers, heads, values } = Patterns::of(record, heads)?;
        let report = reader.report("attention", "attention patterns".into(), model, ids);
        Ok(report.with_patterns(layers, heads, values))
    }
}
