//! Path patching: the paths by which a head's output reaches later heads.

use candle_gpt2_engine::{Reporter, Unit};
use candle_gpt2_interpret::{Head, Receiver};
use candle_gpt2_pictures::Axis;
use serde::Deserialize;
use serde_json::json;

use crate::compared::{CheckedTexts, Compared, ComparedTexts};
use crate::error::{Result, invalid_option};
use crate::{Analysis, Heads, Look, LookSubject, MetricOptions, Reader};

/// Path patching: runs the clean text with one path taken from the corrupted text.
///
/// The path leads from the output of a head to the receiver.
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_look::{ComparedTexts, Look, MetricOptions, PathPatching, Reader, LookSubject, Text};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let texts = ComparedTexts {
///     clean: Text::Words("One day, Mia was".into()),
///     corrupt: Text::Words("My love, I will".into()),
/// };
/// let metric = MetricOptions { answer: Some(" not".into()), ..MetricOptions::default() };
/// let path = PathPatching { texts, metric, from: Some("1.2".parse()?), to: "3.0.q".into() };
/// let found = path.at(&subject, &Silent)?;
/// assert!(found.report.metric.is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct PathPatching {
    /// Clean and corrupted text.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub texts: ComparedTexts,
    /// Prediction to measure.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten))]
    pub metric: MetricOptions,
    /// Heads whose outputs all come from the corrupted text: LAYER.HEAD, separated by commas
    #[cfg_attr(feature = "clap", arg(long, value_name = "HEADS"))]
    pub from: Option<Heads>,
    /// End of the path: `final` (the last residual stream), or queries, keys or values of a head,
    /// such as 9.9.q
    #[serde(default = "last_stream")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "RECEIVER", default_value_t = last_stream()))]
    pub to: String,
}

fn last_stream() -> String {
    "final".into()
}

/// Validated options of path patching.
///
/// Returned by [`PathPatching`]'s `check`.
#[derive(Debug)]
pub struct CheckedPath {
    texts: CheckedTexts,
    senders: Option<Heads>,
    receiver: Receiver,
    /// Exclusive upper bound on the senders' layers.
    end: usize,
}

impl PathPatching {
    /// Parses the receiver, and returns it with an exclusive upper bound on the senders' layers.
    fn receiver(&self, reader: &Reader) -> Result<(Receiver, usize)> {
        let text = &self.to;
        if text == "final" {
            return Ok((Receiver::Final, reader.config().n_layer));
        }
        let other = || {
            invalid_option(format!(
                "`to` {text}: expected final, or one LAYER.HEAD.q, .k or .v, such as 9.9.q"
            ))
        };
        let (head, part) = text.rsplit_once('.').ok_or_else(other)?;
        let [head] = reader.heads(&head.parse()?)?.0[..] else { return Err(other()) };
        if head.layer == 0 {
            return Err(invalid_option(format!(
                "`to` {text}: layer 0 has no earlier heads; choose a later layer"
            )));
        }
        let receiver = match part {
            "q" => Receiver::Query(head),
            "k" => Receiver::Key(head),
            "v" => Receiver::Value(head),
            _ => return Err(other()),
        };
        Ok((receiver, head.layer))
    }
}

impl Look for PathPatching {
    type Checked = CheckedPath;

    fn check(&self, reader: &Reader) -> Result<CheckedPath> {
        let senders = self.from.as_ref().map(|heads| reader.heads(heads)).transpose()?;
        let (receiver, end) = self.receiver(reader)?;
        if let Some(late) = senders.iter().flat_map(|heads| &heads.0).find(|head| head.layer >= end) {
            return Err(invalid_option(format!(
                "`from` {}.{}: expected a head in an earlier layer than `to` {}",
                late.layer, late.head, self.to
            )));
        }
        Ok(CheckedPath { texts: self.texts.read(&self.metric, reader)?, senders, receiver, end })
    }

    fn look(&self, checked: CheckedPath, subject: &LookSubject, reporter: &dyn Reporter) -> Result<Analysis> {
        let CheckedPath { texts, senders, receiver, end } = checked;
        let Compared { patching, mut report } = texts.compare(subject, "path")?;
        let heads = subject.config().n_head;
        report
            .notes
            .push("values: the metric, scaled from the clean text (0) to the corrupted text (1)".into());
        let share = |value: f32| Some(1.0 - patching.share(value));
        if let Some(senders) = senders {
            let value = patching.path(&senders.0, receiver)?;
            report.axes = vec![Axis::new("from", [senders.to_string()])];
            report.values = vec![share(value)];
        } else {
            let bar = reporter.start("patching", (end * heads) as u64, Unit::Items("heads"));
            for layer in 0..end {
                for head in 0..heads {
                    report.values.push(share(patching.path(&[Head { layer, head }], receiver)?));
                    bar.advance(1);
                }
            }
            drop(bar);
            report.axes = vec![Axis::numbers("layer", 0..end), subject.head_axis()];
        }
        report.title = format!("paths to {}: {}", self.to, report.title);
        let corrupted = subject.tokens(&texts.corrupted);
        Ok(Analysis::new(report, json!({ "to": self.to, "corrupted_tokens": corrupted })))
    }
}
