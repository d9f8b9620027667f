//! Arguments for generation: options shared by all front ends, and options only for the program.

use std::path::PathBuf;

use anyhow::Result;
use candle_gpt2_engine::Opened;
use candle_gpt2_generation::{GenerationConfig, GenerationOptions};
use clap::Args;

use super::grammar::GrammarArguments;
use super::steering::SteeringArguments;
use crate::exit::UsageError;
use crate::output;

/// Generation options that do not depend on the prompts.
#[derive(Debug, Args)]
pub(crate) struct GenerationArguments {
    #[command(flatten)]
    options: GenerationOptions,
    /// Assistant for speculative decoding: a smaller model with the same vocabulary, named like --model;
    /// the completion stays the same
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
    /// Checks the arguments as far as possible without a checkpoint.
    pub(super) fn check(&self) -> Result<()> {
        let options = self.options();
        // A library may always set `do_sample`. On a command line, two contradictory flags are a mistake.
        if options.do_sample == Some(false)
            && let Some(option) = options.non_greedy_option()
        {
            let what = format!("`do_sample` cannot be used with `{option}`; pass only one of them");
            return Err(UsageError(what).into());
        }
        Ok(options.check()?)
    }

    /// Builds the configuration of a run and prints notes about it.
    ///
    /// The arguments override the checkpoint's defaults, and the result is validated.
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
