//! `gpt2 look lens`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use gpt2_engine::HubOptions;
use gpt2_interpret::{LensCell, LensOptions, LensValue, TunedLens, logit_lens};
use gpt2_pictures::Scale;
use serde_json::json;

use super::view::{LookArguments, Reader};
use crate::input::{InputArguments, read_file};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look lens \"The capital of France is\" --model gpt2
  gpt2 look lens \"The capital of France is\" --model gpt2 --watch \" Paris\" --show rank --html lens.html
  gpt2 look lens \"The capital of France is\" --model gpt2 --tuned params.pt --json
The residual stream before each block, and after the last, goes through the final norm and the output head. Logarithms are natural.")]
pub(crate) struct LensArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) look: LookArguments,
    /// The N most probable tokens of each cell, in the JSON
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) top: u16,
    /// A token whose rank and probability are wanted too; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub(crate) watch: Vec<String>,
    /// The value of a cell; rank and watched-probability are those of the first --watch
    #[arg(long, value_name = "VALUE", default_value = "probability")]
    pub(crate) show: Shown,
    /// A tuned lens: its file (params.pt or safetensors) or folder
    #[arg(long, value_name = "PATH")]
    pub(crate) tuned: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shown {
    /// Probability of the most probable token
    Probability,
    /// Entropy of the prediction, in nats
    Entropy,
    /// Kullback-Leibler divergence from the last layer's prediction, in nats
    Divergence,
    /// Logarithm of the probability of the token that follows in the text
    Next,
    /// How many tokens are more probable than the watched one
    Rank,
    /// Probability of the watched token
    WatchedProbability,
}

pub(crate) fn run(arguments: &LensArguments, hub: &HubOptions) -> Result<()> {
    let needs_watch = matches!(arguments.show, Shown::Rank | Shown::WatchedProbability);
    if needs_watch && arguments.watch.is_empty() {
        return Err(crate::exit::UsageError(
            "--show rank and watched-probability are of a token: --watch TEXT".into(),
        )
        .into());
    }
    let (looked, (ids, watch)) = arguments.look.open(hub, |reader: &Reader| {
        let watch =
            arguments.watch.iter().map(|text| reader.token("--watch", text)).collect::<Result<Vec<_>>>()?;
        Ok((reader.input(&arguments.input)?, watch))
    })?;
    let config = looked.loaded.config();
    let tuned = match &arguments.tuned {
        Some(path) => {
            let config_file = path.join("config.json");
            if config_file.is_file() {
                let text = String::from_utf8_lossy(&read_file(&config_file)?).into_owned();
                TunedLens::check_config(&text, config.n_layer, config.n_embd)
                    .with_context(|| config_file.display().to_string())?;
            }
            let path = if path.is_dir() { path.join("params.pt") } else { path.clone() };
            let tensors = gpt2_weights::TensorFile::read(&path)?.tensors;
            let lens = TunedLens::from_tensors(&tensors, config.n_layer, config.n_embd)
                .with_context(|| path.display().to_string())?;
            Some(lens.to_device(looked.loaded.device())?)
        }
        None => None,
    };
    let options = LensOptions {
        top: usize::from(if arguments.look.view.json { arguments.top } else { 1 }),
        watch: watch.clone(),
    };
    let layers = logit_lens(&looked.run(&ids)?, &options, &|layer, x| match &tuned {
        Some(lens) => lens.translate(layer, &x),
        None => Ok(x),
    })?;
    let value = LensValue::from(arguments.show);
    let cells = || layers.iter().flat_map(|layer| &layer.cells);
    let what = if tuned.is_some() { "tuned lens" } else { "logit lens" };
    let scale = match value {
        LensValue::Probability | LensValue::WatchedProbability => Scale::Share,
        LensValue::Next => Scale::Signed,
        _ => Scale::Amount,
    };
    let most_probable = |cell: &LensCell| cell.top.first().map_or(String::new(), |(id, _)| looked.shown(*id));
    let report = looked.report("lens", format!("{what}: {}", value.title()), &ids).with_lens(
        layers.iter().map(|layer| layer.label.clone()).collect(),
        cells().map(|cell| value.of(cell)).collect(),
        cells().map(most_probable).collect(),
        scale,
    );
    let token = |id: u32| json!({ "id": id, "text": looked.shown(id) });
    let watched = |(id, (rank, logprob)): (&u32, &(usize, f32))| json!({ "token": token(*id), "rank": rank, "logprob": logprob });
    let detail = |cell: &LensCell| {
        let top = cell.top.iter().map(|(id, logprob)| json!({ "token": token(*id), "logprob": logprob }));
        json!({
            "top": top.collect::<Vec<_>>(), "entropy": cell.entropy, "divergence": cell.divergence, "next_logprob": cell.next,
            "watched": watch.iter().zip(&cell.watched).map(watched).collect::<Vec<_>>(),
        })
    };
    let layers: Vec<_> = layers
        .iter()
        .map(|layer| json!({ "layer": layer.label, "cells": layer.cells.iter().map(detail).collect::<Vec<_>>() }))
        .collect();
    arguments.look.view.show(&report, json!({ "show": value.title(), "layers": layers }))
}

impl From<Shown> for LensValue {
    fn from(shown: Shown) -> Self {
        match shown {
            Shown::Probability => Self::Probability,
            Shown::Entropy => Self::Entropy,
            Shown::Divergence => Self::Divergence,
            Shown::Next => Self::Next,
            Shown::Rank => Self::Rank,
            Shown::WatchedProbability => Self::WatchedProbability,
        }
    }
}
