//! `gpt2 look neurons`.

use anyhow::Result;
use candle_core::DType;
use clap::Args;
use gpt2::{Site, SiteKind};
use gpt2_engine::{HubOptions, Reporter, Unit};
use gpt2_interpret::Run;
use gpt2_pictures::Axis;
use serde_json::json;

use super::view::{LookArguments, Reader};
use crate::exit::UsageError;
use crate::input::InputArguments;
use crate::progress::Terminal;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look neurons --prompt-file book.txt --model gpt2 --neuron 11.611
  gpt2 look neurons \"The dog sat on the mat.\" --neuron 3.17 --top 5 --json
Values are outputs of the activation function (mlp_post). A long text is read in windows of the context.")]
pub(crate) struct NeuronsArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) look: LookArguments,
    /// The neuron: LAYER.NEURON
    #[arg(long, value_name = "NEURON")]
    pub(crate) neuron: String,
    /// How many places
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub(crate) top: usize,
}

/// Tokens that are shown on each side of a place.
const CONTEXT: usize = 8;

pub(crate) fn run(arguments: &NeuronsArguments, hub: &HubOptions) -> Result<()> {
    let numbers =
        arguments.neuron.split_once('.').map(|(layer, neuron)| (layer.parse(), neuron.parse::<usize>()));
    let Some((Ok(layer), Ok(neuron))) = numbers else {
        return Err(
            UsageError(format!("--neuron {}: write LAYER.NEURON, such as 11.611", arguments.neuron)).into()
        );
    };
    let (looked, ids) =
        arguments.look.open(hub, |reader: &Reader| Ok(arguments.input.tokenized(reader.vocabulary)?.ids))?;
    let config = looked.loaded.config();
    if layer >= config.n_layer || neuron >= config.inner_width() {
        return Err(UsageError(format!(
            "--neuron {layer}.{neuron}: this model has {} layers of {} neurons, counted from 0",
            config.n_layer,
            config.inner_width()
        ))
        .into());
    }
    let bos = looked.has_bos.then(|| config.start_token()).flatten();
    let window = config.n_positions.saturating_sub(usize::from(bos.is_some()));
    let site = Site::in_block(layer, SiteKind::MlpPost);
    let bar = Terminal.start("reading", ids.len() as u64, Unit::Items("tokens"));
    let mut values: Vec<f32> = Vec::with_capacity(ids.len());
    for part in ids.chunks(window.max(1)) {
        let read: Vec<u32> = bos.into_iter().chain(part.iter().copied()).collect();
        let run = Run::new(looked.loaded.model(), &read).map_err(|error| UsageError(error.to_string()))?;
        let post = run.record([site])?.get(site)?.squeeze(0)?.narrow(1, neuron, 1)?;
        let post: Vec<f32> = post.squeeze(1)?.to_dtype(DType::F32)?.to_vec1()?;
        values.extend(&post[read.len() - part.len()..]);
        bar.advance(part.len() as u64);
    }
    drop(bar);
    if values.is_empty() {
        return Err(UsageError("the text is empty".into()).into());
    }
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]).then(a.cmp(b)));
    order.truncate(arguments.top.max(1));
    let around = |place: usize| -> (String, String) {
        let text =
            |range: std::ops::Range<usize>| ids[range].iter().map(|id| looked.shown(*id)).collect::<String>();
        (text(place.saturating_sub(CONTEXT)..place), text(place + 1..(place + 1 + CONTEXT).min(ids.len())))
    };
    // Tokens are counted with the one in front, as by every look.
    let index = |place: usize| place + usize::from(bos.is_some());
    let label = |place: &usize| {
        let (before, after) = around(*place);
        format!("{}: {before}[{}]{after}", index(*place), looked.shown(ids[*place]))
    };
    let whole: Vec<u32> = bos.into_iter().chain(ids.iter().copied()).collect();
    // A book's tokens would be longer than all else.
    let listed = if whole.len() <= config.n_positions { &whole[..] } else { &[] };
    let mut report =
        looked.report("neurons", format!("where neuron {layer}.{neuron} is most active"), listed);
    report.axes = vec![Axis::new("place", order.iter().map(label))];
    report.values = order.iter().map(|place| Some(values[*place])).collect();
    let active = values.iter().filter(|value| **value > 0.0).count();
    report.notes.push(format!(
        "{} tokens read, with {} in front of each window; above 0 at {active}",
        values.len(),
        looked.in_front()
    ));
    let places: Vec<_> = order
        .iter()
        .map(|place| {
            let (before, after) = around(*place);
            json!({
                "index": index(*place), "id": ids[*place], "text": looked.shown(ids[*place]), "before": before, "after": after,
                "value": values[*place],
            })
        })
        .collect();
    arguments.look.view.show(&report, json!({ "places": places }))
}
