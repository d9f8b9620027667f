//! `gpt2 look ablate`, `patch`, `path` and `estimate`.

use std::path::Path;

use anyhow::{Context, Result};
use candle_core::DType;
use clap::{Args, ValueEnum};
use gpt2::{Site, SiteKind};
use gpt2_engine::{HubOptions, Reporter, Unit};
use gpt2_interpret::{
    Ablation, By, Chain, Grid, Head, Metric, Patching, Receiver, ablated, ablation_grid, estimated_grid,
};
use gpt2_pictures::{Axis, Metric as Shown, Report};
use serde_json::{Value, json};

use super::view::{Asked, AskedArguments, LookArguments, Looked, MetricArguments, Reader};
use crate::exit::UsageError;
use crate::input::{Ids, read_file};
use crate::progress::Terminal;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look ablate \"When Mary and John went to the store, John gave a drink to\" --model gpt2 --answer \" Mary\" --against \" John\"
  gpt2 look ablate \"The capital of France is\" --model gpt2 --heads 9.9,9.6 --with mean:prompts.txt
  gpt2 look ablate \"The dog\" --svg ablation.svg
Without --heads each head is left out in turn, and the table has the metric without it. raw-zero sets its output (z) to zero;
transformer-lens-zero to what is zero in TransformerLens, which moves the values' biases elsewhere.")]
pub(crate) struct AblateArguments {
    #[command(flatten)]
    pub(crate) asked: AskedArguments,
    /// Leave out these heads together: LAYER.HEAD, separated by commas
    #[arg(long, value_name = "HEADS")]
    pub(crate) heads: Option<String>,
    /// Leave the heads out after this token alone
    #[arg(long, value_name = "N", requires = "heads", allow_negative_numbers = true)]
    pub(crate) at: Option<i64>,
    /// What takes the place of a head's output: raw-zero, transformer-lens-zero, mean:FILE (of the texts in its lines) or sample:FILE (of one text of as many tokens)
    #[arg(long, value_name = "WHAT", default_value = "raw-zero")]
    pub(crate) with: String,
}

pub(crate) fn ablate(arguments: &AblateArguments, hub: &HubOptions) -> Result<()> {
    let (looked, ids, asked, (heads, at, ablation)) = arguments.asked.open(hub, |reader, ids| {
        let heads = arguments.heads.as_ref().map(|heads| reader.heads(heads)).transpose()?;
        let at = arguments.at.map(|at| reader.position("--at", at, ids.len())).transpose()?;
        let ablation = ablation(reader, &arguments.with, ids.len())?;
        Ok((heads, at, ablation))
    })?;
    let run = looked.run(&ids)?;
    let metric = asked.metric(&run)?;
    let before = metric.of_run(&run, &mut Chain(Vec::new()))?;
    let name = looked.metric_name(&metric);
    let mut report = looked.report("ablate", format!("{name} without each head"), &ids);
    report.notes.push(format!("in the place of a head's output: {}", arguments.with));
    let mut shown = Shown { name: name.clone(), before: f64::from(before), after: None };
    if let Some(heads) = heads {
        let (logits, has_changed) = ablated(&run, &heads, at, &ablation)?;
        let after: f32 = metric.of(&logits.narrow(1, metric.position, 1)?)?.squeeze(0)?.to_scalar()?;
        shown.after = Some(f64::from(after));
        report.title = format!("{name} without {}", arguments.heads.as_deref().unwrap_or_default());
        if !has_changed {
            report.notes.push("warning: what was put there is what was there; nothing changed".into());
        }
        // How much each token of the text is less expected.
        let losses = |logits: &candle_core::Tensor| losses(logits, &ids);
        let plain = losses(&run.logits(gpt2::LogitsFor::EveryToken, &mut Chain(Vec::new()))?)?;
        let changed = losses(&logits)?;
        report.axes = vec![Axis::tokens("token", &report.tokens)];
        let change = changed.iter().zip(&plain).map(|(after, before)| Some(rounded(after - before)));
        report.values = std::iter::once(None).chain(change).collect();
        report.notes.push("values: change of each token's loss, in nats".into());
    } else {
        let bar = Terminal.start("ablating", looked.loaded.config().n_layer as u64, Unit::Items("layers"));
        let grid = ablation_grid(&run, &metric, &ablation, &|| bar.advance(1))?;
        drop(bar);
        report.axes = vec![looked.layer_axis(), looked.head_axis()];
        report.values = grid.values.iter().flatten().map(|value| Some(value - before)).collect();
        report.notes.push("values: the metric without the head less the metric with it".into());
        warn_of_unchanged(&mut report, &grid);
    }
    report.metric = Some(shown);
    arguments.asked.look.view.show(&report, Value::Null)
}

/// The loss of each token but the first, in nats, from logits `(1, T, V)`.
fn losses(logits: &candle_core::Tensor, ids: &[u32]) -> Result<Vec<f64>> {
    let rows = logits.squeeze(0)?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    let loss = |(id, row): (&u32, &Vec<f32>)| {
        // Not through probabilities: those of very unlikely tokens are 0 in f32.
        let largest = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let sum: f64 = row.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum();
        largest + sum.ln() - f64::from(row[*id as usize])
    };
    Ok(ids.iter().skip(1).zip(&rows).map(loss).collect())
}

#[expect(clippy::cast_possible_truncation, reason = "reports have their values in f32")]
fn rounded(value: f64) -> f32 {
    value as f32
}

fn ablation(reader: &Reader, text: &str, tokens: usize) -> Result<Ablation> {
    let lines = |path: &str| -> Result<Vec<Vec<u32>>> {
        let text = String::from_utf8(read_file(Path::new(path))?)
            .map_err(|_| UsageError(format!("{path}: expected text in UTF-8")))?;
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let texts = lines.map(|line| reader.text(line)).collect::<Result<Vec<_>>>();
        let texts = texts.with_context(|| path.to_owned())?;
        if texts.is_empty() {
            return Err(UsageError(format!("{path}: no text; expected one in each line")).into());
        }
        Ok(texts)
    };
    match (text, text.split_once(':')) {
        ("raw-zero", _) => Ok(Ablation::RawZero),
        ("transformer-lens-zero" | "tl-zero", _) => Ok(Ablation::TransformerLensZero),
        (_, Some(("mean", path))) => Ok(Ablation::Mean(lines(path)?)),
        (_, Some(("sample", path))) => {
            let mut texts = lines(path)?;
            let found = texts[0].len();
            if texts.len() != 1 || found != tokens {
                let count = texts.len();
                return Err(UsageError(format!(
                    "{path}: expected one text of {tokens} tokens, found {count} of {found} tokens (the first)"
                ))
                .into());
            }
            Ok(Ablation::Sample(texts.remove(0)))
        }
        _ => Err(UsageError(format!(
            "--with {text}: expected raw-zero, transformer-lens-zero, mean:FILE or sample:FILE"
        ))
        .into()),
    }
}

fn warn_of_unchanged(report: &mut Report, grid: &Grid) {
    if !grid.unchanged.is_empty() {
        let layers: Vec<String> = grid.unchanged.iter().map(usize::to_string).collect();
        let layers = layers.join(", ");
        report.notes.push(format!(
            "warning: in layers {layers} what was put there is what was there; nothing changed"
        ));
    }
}

/// Two texts of as many tokens, and what tells them apart.
#[derive(Debug, Args)]
pub(crate) struct TextsArguments {
    /// The text that the answer is right for
    #[arg(long, value_name = "TEXT", conflicts_with = "clean_ids")]
    pub(crate) clean: Option<String>,
    /// Its token ids
    #[arg(long, value_name = "ID,ID,…")]
    pub(crate) clean_ids: Option<Ids>,
    /// A text of as many tokens that it is wrong for
    #[arg(long, value_name = "TEXT", conflicts_with = "corrupt_ids")]
    pub(crate) corrupt: Option<String>,
    /// Its token ids
    #[arg(long, value_name = "ID,ID,…")]
    pub(crate) corrupt_ids: Option<Ids>,
    #[command(flatten)]
    pub(crate) metric: MetricArguments,
    #[command(flatten)]
    pub(crate) look: LookArguments,
}

/// Both texts as they were read.
struct Texts {
    clean: Vec<u32>,
    corrupted: Vec<u32>,
    asked: Asked,
}

impl TextsArguments {
    fn read(&self, reader: &Reader) -> Result<Texts> {
        let clean = reader.text_or_ids("clean", self.clean.as_ref(), self.clean_ids.as_ref())?;
        let corrupted = reader.text_or_ids("corrupt", self.corrupt.as_ref(), self.corrupt_ids.as_ref())?;
        if clean.len() != corrupted.len() {
            let row = |ids: &[u32]| {
                let tokens = ids.iter().enumerate();
                let shown = tokens.map(|(index, id)| {
                    format!("{} {index}", gpt2_pictures::shown(&reader.vocabulary.token_bytes(*id)))
                });
                shown.collect::<Vec<_>>().join(" | ")
            };
            return Err(UsageError(format!(
                "--clean has {} tokens and --corrupt {}; they are compared position by position, so make them as long:\n{}\n{}",
                clean.len(),
                corrupted.len(),
                row(&clean),
                row(&corrupted)
            ))
            .into());
        }
        let asked = self.metric.read(reader, clean.len())?;
        Ok(Texts { clean, corrupted, asked })
    }
}

/// Both runs, and a report that begins with what they say.
fn compared<'a>(looked: &'a Looked, texts: &'a Texts, what: &str) -> Result<(Patching<'a>, Metric, Report)> {
    let clean = looked.run(&texts.clean)?;
    let metric = texts.asked.metric(&clean)?;
    let patching = Patching::new(clean, looked.run(&texts.corrupted)?, metric)?;
    let name = looked.metric_name(&metric);
    let mut report = looked.report(what, name.clone(), &texts.clean);
    report.metric = Some(Shown {
        name,
        before: f64::from(patching.corrupted_value),
        after: Some(f64::from(patching.clean_value)),
    });
    report.notes.push("metric: of the corrupted text, then of the clean one".into());
    let differing: Vec<String> = texts
        .clean
        .iter()
        .zip(&texts.corrupted)
        .enumerate()
        .filter(|(_, (clean, corrupted))| clean != corrupted)
        .map(|(index, (clean, corrupted))| {
            format!("{index}: {:?} for {:?}", looked.shown(*corrupted), looked.shown(*clean))
        })
        .collect();
    report.notes.push(format!("the corrupted text differs at {}", differing.join(", ")));
    Ok((patching, metric, report))
}

/// What of a run is put into another.
#[derive(Debug, Args)]
pub(crate) struct SiteArguments {
    /// What is put from the clean run into the corrupted one: resid_pre, resid_mid, attn_out, mlp_out, z, q, k, v, pattern, … or TransformerLens' name of one
    #[arg(long, value_name = "SITE", default_value = "resid_pre")]
    pub(crate) site: String,
    /// The parts, besides the layer [default: position, and head where the site has heads]
    #[arg(long, value_name = "PARTS")]
    pub(crate) by: Option<ByName>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ByName {
    /// The whole layer at once
    Layer,
    /// Each position
    Position,
    /// Each head, at all positions
    Head,
    /// Each head at each position
    HeadAndPosition,
}

impl SiteArguments {
    fn read(&self, n_layer: usize) -> Result<(SiteKind, By)> {
        let sites =
            Site::matching(&self.site, n_layer).map_err(|error| UsageError(format!("--site: {error}")))?;
        let kind = sites[0].kind;
        if sites.iter().any(|site| site.kind != kind) || !kind.is_in_blocks() {
            return Err(UsageError(format!(
                "--site {}: expected one kind of place that every block has, such as resid_pre or z",
                self.site
            ))
            .into());
        }
        if sites.len() != n_layer {
            return Err(UsageError(format!(
                "--site {}: the grid has a row for every layer; write {}",
                self.site,
                kind.name()
            ))
            .into());
        }
        let has_heads = kind.head_axis().is_some();
        let by = match self.by {
            Some(ByName::Layer) => By::Layer,
            Some(ByName::Position) => By::Position,
            Some(ByName::Head) => By::Head,
            Some(ByName::HeadAndPosition) => By::HeadAndPosition,
            None if has_heads => By::Head,
            None => By::Position,
        };
        if matches!(by, By::Head | By::HeadAndPosition) && !has_heads {
            return Err(UsageError(format!(
                "--by: {} has no heads; q, k, v, z, result, attn_scores and pattern have",
                kind.name()
            ))
            .into());
        }
        Ok((kind, by))
    }
}

fn grid_axes(looked: &Looked, report: &mut Report, by: By) {
    report.axes = vec![looked.layer_axis()];
    for axis in by.axes() {
        report.axes.push(match *axis {
            "head" => looked.head_axis(),
            name => Axis::tokens(name, &report.tokens),
        });
    }
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look patch --model gpt2 --clean \"After John and Mary went to the store, Mary gave a bottle of milk to\" \\
    --corrupt \"After John and Mary went to the store, John gave a bottle of milk to\" --answer \" John\" --against \" Mary\"
  gpt2 look patch --model gpt2 --clean … --corrupt … --answer \" John\" --site z --by head --svg heads.svg
Values are shares of the way from the corrupted text's metric (0) to the clean one's (1).")]
pub(crate) struct PatchArguments {
    #[command(flatten)]
    pub(crate) texts: TextsArguments,
    #[command(flatten)]
    pub(crate) site: SiteArguments,
}

pub(crate) fn patch(arguments: &PatchArguments, hub: &HubOptions) -> Result<()> {
    let look = &arguments.texts.look;
    let (looked, (texts, (kind, by))) = look.open(hub, |reader: &Reader| {
        let site = arguments.site.read(reader.n_layer)?;
        Ok((arguments.texts.read(reader)?, site))
    })?;
    let (patching, _, mut report) = compared(&looked, &texts, "patch")?;
    let bar = Terminal.start("patching", looked.loaded.config().n_layer as u64, Unit::Items("layers"));
    let grid = patching.grid(kind, by, &|| bar.advance(1))?;
    drop(bar);
    report.title = format!("{} from the clean text: {}", kind.name(), report.title);
    grid_axes(&looked, &mut report, by);
    report.values = grid.values.iter().flatten().copied().map(Some).collect();
    report.notes.push("values: 0 is as corrupted, 1 as clean".into());
    warn_of_unchanged(&mut report, &grid);
    let corrupted = looked.tokens(&texts.corrupted);
    look.view.show(&report, json!({ "site": kind.name(), "corrupted_tokens": corrupted }))
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look estimate --model gpt2 --clean \"…\" --corrupt \"…\" --answer \" John\" --against \" Mary\" --site z
One gradient at the corrupted text, times the difference of both runs: `gpt2 look patch` without its runs. It is known to be wrong
where much is not linear: at the early residual stream and at the first MLP.")]
pub(crate) struct EstimateArguments {
    #[command(flatten)]
    pub(crate) texts: TextsArguments,
    #[command(flatten)]
    pub(crate) site: SiteArguments,
}

pub(crate) fn estimate(arguments: &EstimateArguments, hub: &HubOptions) -> Result<()> {
    let look = &arguments.texts.look;
    let (looked, (texts, (kind, by))) = look.open(hub, |reader: &Reader| {
        let site = arguments.site.read(reader.n_layer)?;
        Ok((arguments.texts.read(reader)?, site))
    })?;
    let (patching, _, mut report) = compared(&looked, &texts, "estimate")?;
    let values = estimated_grid(&patching, kind, by)?;
    report.title = format!("{} from the clean text, estimated: {}", kind.name(), report.title);
    grid_axes(&looked, &mut report, by);
    report.values = values.into_iter().flatten().map(Some).collect();
    report.notes.push("values: estimated from one gradient; 0 is as corrupted, 1 as clean".into());
    if matches!(kind, SiteKind::ResidPre | SiteKind::ResidMid | SiteKind::ResidPost | SiteKind::MlpOut) {
        report.notes.push(
            "warning: estimates at the early residual stream and the first MLP are known to be far off; check them with `gpt2 look patch`"
                .into(),
        );
    }
    let corrupted = looked.tokens(&texts.corrupted);
    look.view.show(&report, json!({ "site": kind.name(), "corrupted_tokens": corrupted }))
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look path --model gpt2 --clean \"…\" --corrupt \"…\" --answer \" John\" --against \" Mary\" --to final
  gpt2 look path --model gpt2 --clean \"…\" --corrupt \"…\" --answer \" John\" --from 8.6 --to 9.9.q
The clean text, where only the path from a head, as it is in the corrupted text, to the receiver is another: heads on the way are
frozen, norms and MLPs are computed. Without --from every head before the receiver is tried.")]
pub(crate) struct PathArguments {
    #[command(flatten)]
    pub(crate) texts: TextsArguments,
    /// The heads whose output is taken from the corrupted text, together: LAYER.HEAD, separated by commas
    #[arg(long, value_name = "HEADS")]
    pub(crate) from: Option<String>,
    /// Where the path ends: `final` (the last residual stream), or queries, keys or values of a head, such as 9.9.q
    #[arg(long, value_name = "RECEIVER", default_value = "final")]
    pub(crate) to: String,
}

pub(crate) fn path(arguments: &PathArguments, hub: &HubOptions) -> Result<()> {
    let look = &arguments.texts.look;
    let (looked, (texts, senders, receiver)) = look.open(hub, |reader: &Reader| {
        let senders = arguments.from.as_ref().map(|heads| reader.heads(heads)).transpose()?;
        let (receiver, end) = receiver(reader, &arguments.to)?;
        if let Some(late) = senders.iter().flatten().find(|head| head.layer >= end) {
            return Err(UsageError(format!(
                "--from {}.{}: it is not before --to {}",
                late.layer, late.head, arguments.to
            ))
            .into());
        }
        Ok((arguments.texts.read(reader)?, senders, (receiver, end)))
    })?;
    let (receiver, end) = receiver;
    let (patching, _, mut report) = compared(&looked, &texts, "path")?;
    let heads = looked.loaded.config().n_head;
    report
        .notes
        .push("values: how far the metric goes from the clean text's (0) to the corrupted one's (1)".into());
    let share = |value: f32| Some(1.0 - patching.share(value));
    if let Some(senders) = senders {
        let value = patching.path(&senders, receiver)?;
        report.axes = vec![Axis::new("from", [arguments.from.clone().unwrap_or_default()])];
        report.values = vec![share(value)];
    } else {
        let bar = Terminal.start("patching", (end * heads) as u64, Unit::Items("heads"));
        for layer in 0..end {
            for head in 0..heads {
                report.values.push(share(patching.path(&[Head { layer, head }], receiver)?));
                bar.advance(1);
            }
        }
        drop(bar);
        report.axes = vec![Axis::numbers("layer", 0..end), looked.head_axis()];
    }
    report.title = format!("paths to {}: {}", arguments.to, report.title);
    let corrupted = looked.tokens(&texts.corrupted);
    look.view.show(&report, json!({ "to": arguments.to, "corrupted_tokens": corrupted }))
}

/// A receiver, and the layer before which senders must lie.
fn receiver(reader: &Reader, text: &str) -> Result<(Receiver, usize)> {
    if text == "final" {
        return Ok((Receiver::Final, reader.n_layer));
    }
    let wrong =
        || UsageError(format!("--to {text}: expected final, or one LAYER.HEAD.q, .k or .v, such as 9.9.q"));
    let (head, part) = text.rsplit_once('.').ok_or_else(wrong)?;
    let [head] = reader.heads(head)?[..] else { return Err(wrong().into()) };
    if head.layer == 0 {
        return Err(UsageError(format!("--to {text}: no head is before layer 0")).into());
    }
    let receiver = match part {
        "q" => Receiver::Query(head),
        "k" => Receiver::Key(head),
        "v" => Receiver::Value(head),
        _ => return Err(wrong().into()),
    };
    Ok((receiver, head.layer))
}
