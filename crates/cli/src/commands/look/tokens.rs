//! `gpt2 look saliency`.

use anyhow::Result;
use clap::{Args, ValueEnum};
use gpt2_engine::HubOptions;
use gpt2_interpret::{Saliency, token_weights};
use gpt2_pictures::{Axis, Metric as Shown, Scale};
use serde_json::json;

use super::view::AskedArguments;
use crate::exit::UsageError;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look saliency \"The capital of France is\" --model gpt2 --answer \" Paris\" --measure probability
  gpt2 look saliency \"The capital of France is\" --model gpt2 --method input-x-gradient --html saliency.html
Gradients are with regard to the token embeddings. Values are lengths of each token's vector as shares of all; the JSON has the signed
sums too, which with --method integrated add up to the metric's difference from a text of baseline tokens.")]
pub(crate) struct SaliencyArguments {
    #[command(flatten)]
    pub(crate) asked: AskedArguments,
    /// How the weight of a token is found
    #[arg(long, value_name = "METHOD", default_value = "integrated")]
    pub(crate) method: Method,
    /// Steps of --method integrated
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) steps: u16,
    /// The token that stands for nothing in --method integrated: a text of one token, or #ID [default: the configuration's bos_token_id]
    #[arg(long, value_name = "TEXT")]
    pub(crate) baseline: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Method {
    /// Integrated gradients
    Integrated,
    /// The gradient times the embedding
    #[value(name = "input-x-gradient")]
    InputTimesGradient,
    /// The gradient
    Gradient,
}

pub(crate) fn run(arguments: &SaliencyArguments, hub: &HubOptions) -> Result<()> {
    let (looked, ids, asked, baseline) = arguments.asked.open(hub, |reader, _| {
        arguments.baseline.as_ref().map(|text| reader.token("--baseline", text)).transpose()
    })?;
    let run = looked.run(&ids)?;
    let metric = asked.metric(&run)?;
    let saliency = match arguments.method {
        Method::Gradient => Saliency::Gradient,
        Method::InputTimesGradient => Saliency::InputTimesGradient,
        Method::Integrated => {
            let Some(baseline) = baseline.or_else(|| looked.loaded.config().start_token()) else {
                let message = "this model's configuration names no bos_token_id that its vocabulary has; give --baseline TEXT";
                return Err(UsageError(message.into()).into());
            };
            Saliency::Integrated { steps: arguments.steps.into(), baseline }
        }
    };
    let found = token_weights(&run, &metric, saliency)?;
    let name = looked.metric_name(&metric);
    let mut report = looked.report("saliency", format!("how much each token matters for the {name}"), &ids);
    report.axes = vec![Axis::tokens("token", &report.tokens)];
    let total: f32 = found.norms.iter().sum();
    report.values =
        found.norms.iter().map(|norm| Some(if total > 0.0 { norm / total } else { 0.0 })).collect();
    report.scale = Scale::Amount;
    report.metric = Some(Shown { name, before: f64::from(found.values.0), after: None });
    if let Saliency::Integrated { steps, baseline } = saliency {
        let sum: f32 = found.sums.iter().sum();
        let difference = found.values.0 - found.values.1.unwrap_or_default();
        report.notes.push(format!(
            "{steps} steps from {:?}; the signed sums make {sum:.4} of the metric's difference {difference:.4}",
            looked.shown(baseline)
        ));
    }
    arguments.asked.look.view.show(&report, json!({ "sums": found.sums, "norms": found.norms }))
}
