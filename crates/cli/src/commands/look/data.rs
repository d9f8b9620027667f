//! `gpt2 look data`: generates prompts for tasks with known circuits.

use std::path::PathBuf;

use anyhow::Result;
use candle_gpt2_engine::HubOptions;
use candle_gpt2_look::{Reader, TaskData};
use candle_gpt2_weights::expect_free;
use clap::Args;

use crate::model_arguments::ModelArguments;
use crate::output;

/// Task, model and output file.
#[derive(Debug, Args)]
pub(crate) struct DataArguments {
    #[command(flatten)]
    data: TaskData,
    #[command(flatten)]
    model: ModelArguments,
    /// Write the pairs to this file [default: standard output]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

impl DataArguments {
    /// Generates the pairs and writes one per line; the weights are not read.
    pub(crate) fn run(&self, hub: &HubOptions) -> Result<()> {
        self.out.as_deref().map(expect_free).transpose()?;
        let opened = self.model.open(hub)?;
        let mut lines = String::new();
        for pair in self.data.pairs(&Reader::without_bos(opened.vocabulary()))? {
            lines += &serde_json::to_string(&pair)?;
            lines.push('\n');
        }
        match &self.out {
            Some(out) => {
                output::write_file(out, &lines)?;
                output::write_line(&format!("written: {}", out.display()))
            }
            None => output::write_text(&lines),
        }
    }
}
