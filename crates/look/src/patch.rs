//! Activation patching and attribution patching.
//!
//! Activation patching finds the activations of the clean text's run that carry its prediction over to the
//! corrupted text. Attribution patching estimates the same from one gradient.

use candle_gpt2::SiteKind;
use candle_gpt2_engine::{Reporter, Unit};
use candle_gpt2_interpret::{Grid, GridAxis, estimated_grid, named_sites};
use candle_gpt2_pictures::{Axis, Report};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::compared::{CheckedTexts, Compared, ComparedTexts};
use crate::error::{Result, invalid_option};
#[cfg(feature = "clap")]
use crate::named::choices;
use crate::named::some_choice;
use crate::{Analysis, Look, LookSubject, MetricOptions, Reader};

/// Activations to copy from the clean run into the corrupted run.
///
/// ```
/// use candle_gpt2_interpret::GridAxis;
/// use candle_gpt2_look::Patched;
///
/// let heads = Patched { site: "z".into(), by: Some(GridAxis::Head) };
/// assert_ne!(heads.site, Patched::default().site);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct Patched {
    /// Activation to patch from the clean run into the corrupted one: resid_pre, resid_mid, attn_out,
    /// mlp_out, z, q, k, v, pattern, …, or its TransformerLens name
    #[cfg_attr(feature = "clap", arg(long, value_name = "SITE", default_value_t = Patched::default().site))]
    pub site: String,
    /// Parts of each layer to patch one at a time [default: head if the site has heads, or position]
    #[serde(deserialize_with = "some_choice")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "PARTS", value_parser = choices::<GridAxis>()))]
    pub by: Option<GridAxis>,
}

impl Default for Patched {
    fn default() -> Self {
        Self { site: "resid_pre".into(), by: None }
    }
}

impl Patched {
    fn read(&self, reader: &Reader) -> Result<(SiteKind, GridAxis)> {
        let n_layer = reader.config().n_layer;
        let sites =
            named_sites(&self.site, n_layer).map_err(|error| invalid_option(format!("`site`: {error}")))?;
        let one_kind = || {
            invalid_option(format!(
                "`site` {}: expected a single kind of hook point inside the blocks, such as resid_pre or z",
                self.site
            ))
        };
        let kind = sites.first().ok_or_else(one_kind)?.kind;
        if sites.iter().any(|site| site.kind != kind) || !kind.is_in_blocks() {
            return Err(one_kind());
        }
        if sites.len() != n_layer {
            return Err(invalid_option(format!(
                "`site` {}: the grid has a row for every layer; omit the layer and write {}",
                self.site,
                kind.name()
            )));
        }
        let has_heads = kind.head_axis().is_some();
        let by = self.by.unwrap_or(if has_heads { GridAxis::Head } else { GridAxis::Position });
        if matches!(by, GridAxis::Head | GridAxis::HeadAndPosition) && !has_heads {
            return Err(invalid_option(format!(
                "`by`: {} has no heads; use q, k, v, z, result, attn_scores or pattern",
                kind.name()
            )));
        }
        Ok((kind, by))
    }
}

/// Activation patching: runs the corrupted text with one part at a time taken from the clean run.
///
/// Values are fractions of the distance from the corrupted text's metric (0) to the clean text's (1).
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_look::{ComparedTexts, Look, MetricOptions, Patch, Patched, Reader, LookSubject, Text};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let texts = ComparedTexts {
///     clean: Text::Words("One day, Mia was".into()),
///     corrupt: Text::Words("One day, Tom was".into()),
/// };
/// let metric = MetricOptions { answer: Some(" in".into()), ..MetricOptions::default() };
/// let tokens = reader.text(&texts.clean)?.len();
/// let found = Patch { texts, metric, patched: Patched::default() }.at(&subject, &Silent)?;
/// assert_eq!(found.report.values.len(), 7 * tokens, "one value for each layer and position");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct Patch {
    /// Clean and corrupted text.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub texts: ComparedTexts,
    /// Prediction to measure.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten))]
    pub metric: MetricOptions,
    /// Activations to patch.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten))]
    pub patched: Patched,
}

/// Attribution patching: estimates the effect of activation patching from one gradient.
///
/// The estimate is the gradient at the corrupted text times the difference between the two runs.
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_look::{ComparedTexts, Estimate, Look, MetricOptions, Patched, Reader, LookSubject, Text};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let texts = ComparedTexts {
///     clean: Text::Words("One day, Mia was".into()),
///     corrupt: Text::Words("One day, Tom was".into()),
/// };
/// let metric = MetricOptions { answer: Some(" in".into()), ..MetricOptions::default() };
/// let tokens = reader.text(&texts.clean)?.len();
/// let found = Estimate { texts, metric, patched: Patched::default() }.at(&subject, &Silent)?;
/// assert_eq!(found.report.values.len(), 7 * tokens);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct Estimate {
    /// Clean and corrupted text.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub texts: ComparedTexts,
    /// Prediction to measure.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten))]
    pub metric: MetricOptions,
    /// Activations for which the effect of patching is estimated.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten))]
    pub patched: Patched,
}

/// Validated options of activation patching and attribution patching.
///
/// Returned by `check` of [`Patch`] and of [`Estimate`].
#[derive(Debug)]
pub struct CheckedPatch {
    texts: CheckedTexts,
    kind: SiteKind,
    by: GridAxis,
}

impl CheckedPatch {
    fn new(
        texts: &ComparedTexts,
        metric: &MetricOptions,
        patched: &Patched,
        reader: &Reader,
    ) -> Result<Self> {
        let (kind, by) = patched.read(reader)?;
        Ok(Self { texts: texts.read(metric, reader)?, kind, by })
    }

    fn grid_axes(&self, subject: &LookSubject, report: &mut Report) {
        report.axes = vec![subject.layer_axis()];
        for axis in self.by.axes() {
            report.axes.push(match *axis {
                "head" => subject.head_axis(),
                name => Axis::tokens(name, &report.tokens),
            });
        }
    }

    fn details(&self, subject: &LookSubject) -> Value {
        let corrupted = subject.tokens(&self.texts.corrupted);
        json!({ "site": self.kind.name(), "corrupted_tokens": corrupted })
    }
}

impl Look for Patch {
    type Checked = CheckedPatch;

    fn check(&self, reader: &Reader) -> Result<CheckedPatch> {
        CheckedPatch::new(&self.texts, &self.metric, &self.patched, reader)
    }

    fn look(
        &self,
        checked: CheckedPatch,
        subject: &LookSubject,
        reporter: &dyn Reporter,
    ) -> Result<Analysis> {
        let Compared { patching, mut report } = checked.texts.compare(subject, "patch")?;
        let bar = reporter.start("patching", subject.config().n_layer as u64, Unit::Items("layers"));
        let grid = patching.grid(checked.kind, checked.by, &|| bar.advance(1))?;
        drop(bar);
        report.title = format!("{} from the clean text: {}", checked.kind.name(), report.title);
        checked.grid_axes(subject, &mut report);
        report.values = grid.values.iter().flatten().copied().map(Some).collect();
        report.notes.push("values: 0 = corrupted, 1 = clean".into());
        warn_of_unchanged(&mut report, &grid);
        Ok(Analysis::new(report, checked.details(subject)))
    }
}

impl Look for Estimate {
    type Checked = CheckedPatch;

    fn check(&self, reader: &Reader) -> Result<CheckedPatch> {
        CheckedPatch::new(&self.texts, &self.metric, &self.patched, reader)
    }

    fn look(&self, checked: CheckedPatch, subject: &LookSubject, _: &dyn Reporter) -> Result<Analysis> {
        let kind = checked.kind;
        let Compared { patching, mut report } = checked.texts.compare(subject, "estimate")?;
        let values = estimated_grid(&patching, kind, checked.by)?;
        report.title = format!("{} from the clean text, estimated: {}", kind.name(), report.title);
        checked.grid_axes(subject, &mut report);
        report.values = values.into_iter().flatten().map(Some).collect();
        report.notes.push("values: estimated from one gradient; 0 = corrupted, 1 = clean".into());
        if matches!(kind, SiteKind::ResidPre | SiteKind::ResidMid | SiteKind::ResidPost | SiteKind::MlpOut) {
            report.notes.push(
                "warning: estimates at the early residual stream and the first MLP are known to be far off; check them by patching"
                    .into(),
            );
        }
        Ok(Analysis::new(report, checked.details(subject)))
    }
}

pub(crate) fn warn_of_unchanged(report: &mut Report, grid: &Grid) {
    if !grid.unchanged.is_empty() {
        let layers: Vec<String> = grid.unchanged.iter().map(usize::to_string).collect();
        let layers = layers.join(", ");
        report.notes.push(format!(
            "warning: in layers {layers} the replacement equals the original; nothing changed"
        ));
    }
}
