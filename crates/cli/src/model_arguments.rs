//! Arguments that select a model.
//!
//! Some commands run the model, others only examine its checkpoint.

use std::path::{Path, PathBuf};

use candle_gpt2_engine::{AdapterChoice, EngineError, HubOptions, ModelOptions, Opened, process};
use clap::builder::StyledStr;
use clap::{Args, Command, value_parser};

use crate::output;
use crate::progress::Terminal;

/// Model to run, and the number of threads.
#[derive(Debug, Args)]
pub(crate) struct ModelArguments {
    #[command(flatten)]
    pub(crate) options: ModelOptions,
    #[command(flatten)]
    pub(crate) threads: ThreadArguments,
}

impl ModelArguments {
    /// Opens the model and applies its process-wide settings.
    pub(crate) fn open(&self, hub: &HubOptions) -> Result<Opened, EngineError> {
        self.open_as(&self.options(hub))
    }

    /// Same as [`ModelArguments::open`], for a model with a classification head.
    pub(crate) fn open_classifier(&self, hub: &HubOptions) -> Result<Opened, EngineError> {
        self.options(hub).open_classifier(&Terminal).map(|opened| self.apply_settings(opened))
    }

    /// Same as [`ModelArguments::open`], for a model with any head.
    #[cfg(feature = "serve")]
    pub(crate) fn open_any(&self, hub: &HubOptions) -> Result<Opened, EngineError> {
        self.options(hub).open_any(&Terminal).map(|opened| self.apply_settings(opened))
    }

    /// Same as [`ModelArguments::open`], with options derived from [`ModelArguments::options`].
    pub(crate) fn open_as(&self, options: &ModelOptions) -> Result<Opened, EngineError> {
        options.open(&Terminal).map(|opened| self.apply_settings(opened))
    }

    /// Applies the process-wide settings of an opened model and prints its notes.
    fn apply_settings(&self, opened: Opened) -> Opened {
        process::use_tf32(self.options.tf32);
        opened.unpacked_note().iter().for_each(|note| output::print_note(note));
        opened
    }

    /// Returns the arguments as library options.
    pub(crate) fn options(&self, hub: &HubOptions) -> ModelOptions {
        ModelOptions { hub: hub.clone(), ..self.options.clone() }
    }
}

/// Encoder input for models with cross-attention.
#[derive(Debug, Args)]
pub(crate) struct EncoderArguments {
    /// Encoder hidden states for a model with cross-attention: a safetensors file with the tensor
    /// encoder_hidden_states (1, S, width); without it the cross-attention is skipped
    #[arg(long, value_name = "FILE")]
    pub(crate) encoder_states: Option<PathBuf>,
}

/// Model as a positional argument in place of `--model`.
#[derive(Debug, Args)]
pub(crate) struct PositionalModel {
    /// The model, as with --model
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    positional: Option<PathBuf>,
}

impl PositionalModel {
    /// Returns the positional argument, or `--model` if it is missing.
    pub(crate) fn or(&self, model: &Path) -> PathBuf {
        self.positional.as_deref().unwrap_or(model).to_owned()
    }
}

/// Arguments for commands that examine a checkpoint.
#[derive(Debug, Args)]
pub(crate) struct CommonArguments {
    #[arg(long, value_name = "N", allow_negative_numbers = true, help = help_of("n_head"))]
    pub(crate) n_head: Option<usize>,
    #[command(flatten)]
    pub(crate) threads: ThreadArguments,
}

/// Adapters for a checkpoint.
#[derive(Debug, Args)]
pub(crate) struct AdapterArguments {
    #[arg(long, visible_alias = "lora", value_name = "DIR[=WEIGHT]", help = help_of("adapter"))]
    pub(crate) adapter: Vec<AdapterChoice>,
}

/// Thread count, an option of every command.
#[derive(Debug, Args)]
pub(crate) struct ThreadArguments {
    /// Number of threads [default: all that this process may use]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = value_parser!(u16).range(1..=1024))]
    #[allow(dead_code, reason = "`parse.rs` reads it for every command")]
    threads: Option<u16>,
}

/// Returns the help text of a [`ModelOptions`] option.
fn help_of(name: &str) -> StyledStr {
    let options = ModelOptions::augment_args(Command::new("model"));
    let option = options.get_arguments().find(|argument| argument.get_id() == name);
    option.and_then(|argument| argument.get_help().cloned()).unwrap_or_default()
}

impl CommonArguments {
    /// Returns library options for this checkpoint.
    pub(crate) fn checkpoint_options(&self, model: &Path, hub: &HubOptions) -> ModelOptions {
        let (model, hub) = (model.to_owned(), hub.clone());
        ModelOptions { model, hub, n_head: self.n_head, ..ModelOptions::default() }
    }
}
