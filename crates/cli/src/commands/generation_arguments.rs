//! The arguments that say how to generate: the options of every front end, and the program's own.

use std::path::PathBuf;

use anyhow::Result;
use candle_gpt2_engine::Opened;
use candle_gpt2_generation::{GenerationConfig, GenerationOptions};
use clap::Args;

use super::grammar::GrammarArguments;
use super::steering::SteeringArguments;
use crate::exit::UsageError;
use crate::output;

/// How to generate, whatever the prompts.
#[derive(Debug, Args)]
pub(crate) struct GenerationArguments {
    #[command(flatten)]
    options: GenerationOptions,
    /// Assistant for speculative decoding: a smaller model with the same vocabulary, named like --model; the completion stays the same
    #[arg(
        long,
        value_name = "MODEL",
        conflicts_with = "prompt_lookup_num_tokens",
        help_heading = "Speculative decoding"
    )]
    pub(crate) assistant_model: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) grammar: GrammarArguments,
    #[command(flatten)]
    pub(crate) steering: SteeringArguments,
}

impl GenerationArguments {
    /// Checks what can be checked of the arguments before a checkpoint is opened.
    pub(super) fn check(&self) -> Result<()> {
        let options = self.options();
        // A library may always say whether to sample; at a command line two flags that contradict each other are a mistake.
        if options.do_sample == Some(false)
            && let Some(option) = options.chooses_otherwise()
        {
            let what = format!("`do_sample` cannot be used with `{option}`; give one of them");
            return Err(UsageError(what).into());
        }
        Ok(options.check()?)
    }

    /// The configuration of a request: that of the checkpoint, changed by the arguments and checked. Notes on it are printed.
    pub(super) fn config(&self, opened: &Opened) -> Result<GenerationConfig> {
        let defaults = opened.defaults()?;
        let options = self.options();
        let config = defaults.changed_by(&options)?;
        let notes = options.notes().into_iter().chain(defaults.notes(&config));
        notes.for_each(|note| output::print_note(&note));
        Ok(config)
    }

    fn options(&self) -> GenerationOptions {
        GenerationOptions { has_assistant: self.assistant_model.is_some(), ..self.options.clone() }
    }
}
