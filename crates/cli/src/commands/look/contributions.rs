//! `gpt2 look attribute`.

use anyhow::Result;
use clap::{Args, ValueEnum};
use gpt2_engine::HubOptions;
use gpt2_interpret::{Unit, attribute};
use gpt2_pictures::{Axis, Metric as Shown};
use serde_json::json;

use super::view::{AskedArguments, MeasureName, Numbers};
use crate::exit::UsageError;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look attribute \"The capital of France is\" --model gpt2 --answer \" Paris\" --against \" London\"
  gpt2 look attribute \"The capital of France is\" --model gpt2 --answer \" Paris\" --unit head --svg heads.svg
  gpt2 look attribute \"The capital of France is\" --model gpt2 --unit neuron --top 30 --json
Each part of the residual stream is divided by the final norm's scale of the whole run. The parts and the bias add up to the
difference of the two logits, or, without --against, to the answer's logit less the mean of all; with --unit layer they do not.")]
pub(crate) struct AttributeArguments {
    #[command(flatten)]
    pub(crate) asked: AskedArguments,
    /// The parts
    #[arg(long, value_name = "UNIT", default_value = "component")]
    pub(crate) unit: UnitName,
    /// With --unit head: the heads of the checkpoint as it is, or of TransformerLens' compatibility mode, which counts what constant values write with the remainder
    #[arg(long = "as", value_name = "NUMBERS", default_value = "raw")]
    pub(crate) numbers: Numbers,
    /// Only the N strongest parts of --unit neuron
    #[arg(long, value_name = "N", default_value_t = 40)]
    pub(crate) top: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum UnitName {
    /// Both embeddings, and attention and MLP of each layer
    Component,
    /// The residual stream on its way: what it would say at each place
    Layer,
    /// Each head, and all else
    Head,
    /// Each neuron, and all else
    Neuron,
}

pub(crate) fn run(arguments: &AttributeArguments, hub: &HubOptions) -> Result<()> {
    if arguments.asked.metric.measure != MeasureName::Logit {
        let message = "--measure: parts of the residual stream add up to logits, not to probabilities; leave it out, or give --measure logit";
        return Err(UsageError(message.into()).into());
    }
    let (looked, ids, asked, ()) = arguments.asked.open(hub, |_, _| Ok(()))?;
    let run = looked.run(&ids)?;
    let metric = asked.metric(&run)?;
    let unit = match arguments.unit {
        UnitName::Component => Unit::Component,
        UnitName::Layer => Unit::Layer,
        UnitName::Head if arguments.numbers == Numbers::TransformerLens => Unit::TransformerLensHead,
        UnitName::Head => Unit::Head,
        UnitName::Neuron => Unit::Neuron,
    };
    let found = attribute(&run, &metric, unit)?;
    let mut report = looked.report(
        "attribute",
        format!("what each part adds to the {}", looked.metric_name(&metric)),
        &ids,
    );
    report.metric =
        Some(Shown { name: looked.metric_name(&metric), before: f64::from(found.total), after: None });
    let sum: f32 = found.values.iter().sum();
    report.notes.push(format!(
        "norm statistics of the whole run; parts {sum:.4} and the final norm's bias {:.4} make {:.4}",
        found.bias, found.total
    ));
    if unit == Unit::Layer {
        report.notes[0] =
            format!("norm statistics of the whole run; the final norm's bias adds {:.4}", found.bias);
    }
    if metric.against.is_none() {
        report.notes.push("without --against, the answer's logit is taken less the mean of all".into());
    }
    let (heads, layers) = (looked.loaded.config().n_head, looked.loaded.config().n_layer);
    match unit {
        Unit::Head | Unit::TransformerLensHead => {
            report.axes = vec![looked.layer_axis(), looked.head_axis()];
            report.values = found.values[..layers * heads].iter().copied().map(Some).collect();
            report.notes.push(format!("all that is no head: {:.4}", found.values[layers * heads]));
        }
        Unit::Neuron => {
            let mut order: Vec<usize> = (0..found.values.len()).collect();
            order.sort_by(|a, b| found.values[*b].abs().total_cmp(&found.values[*a].abs()));
            order.truncate(arguments.top.max(1));
            report.axes = vec![Axis::new("part", order.iter().map(|index| found.labels[*index].clone()))];
            report.values = order.iter().map(|index| Some(found.values[*index])).collect();
            report.notes.push(format!("the {} strongest of {} parts", order.len(), found.values.len()));
        }
        Unit::Component | Unit::Layer => {
            report.axes = vec![Axis::new("part", found.labels.clone())];
            report.values = found.values.iter().copied().map(Some).collect();
        }
    }
    arguments.asked.look.view.show(&report, json!({ "bias": found.bias, "total": found.total }))
}
