//! The arguments that name a model: those of every command that runs one, and of those that look into a checkpoint.

use std::path::{Path, PathBuf};

use candle_gpt2_engine::{AdapterChoice, EngineError, HubOptions, ModelOptions, Opened, process};
use clap::builder::StyledStr;
use clap::{Args, Command, value_parser};

use crate::output;
use crate::progress::Terminal;

/// Where the model is and where it runs.
#[derive(Debug, Args)]
pub(crate) struct ModelArguments {
    #[command(flatten)]
    pub(crate) options: ModelOptions,
    #[command(flatten)]
    pub(crate) threads: ThreadArguments,
}

impl ModelArguments {
    /// Opens the model, and sets the process as it is to be run.
    pub(crate) fn open(&self, hub: &HubOptions) -> Result<Opened, EngineError> {
        self.open_as(&self.options(hub))
    }

    /// As [`ModelArguments::open`], of a model with a head for classifying.
    pub(crate) fn open_classifier(&self, hub: &HubOptions) -> Result<Opened, EngineError> {
        self.options(hub).open_classifier(&Terminal).map(|opened| self.begun(opened))
    }

    /// As [`ModelArguments::open`], of a model with any head.
    #[cfg(feature = "serve")]
    pub(crate) fn open_any(&self, hub: &HubOptions) -> Result<Opened, EngineError> {
        self.options(hub).open_any(&Terminal).map(|opened| self.begun(opened))
    }

    /// As [`ModelArguments::open`], with [`ModelArguments::options`] to which others were added.
    pub(crate) fn open_as(&self, options: &ModelOptions) -> Result<Opened, EngineError> {
        options.open(&Terminal).map(|opened| self.begun(opened))
    }

    /// Sets the process as the model is to be run, and prints what a user should know of it.
    fn begun(&self, opened: Opened) -> Opened {
        process::use_tf32(self.options.tf32);
        opened.unpacked_note().iter().for_each(|note| output::print_note(note));
        opened
    }

    /// What the arguments say, for the library.
    pub(crate) fn options(&self, hub: &HubOptions) -> ModelOptions {
        ModelOptions { hub: hub.clone(), ..self.options.clone() }
    }
}

/// What a model may attend to besides its tokens.
#[derive(Debug, Args)]
pub(crate) struct EncoderArguments {
    /// Encoder hidden states for a model with cross-attention: a safetensors file with the tensor encoder_hidden_states (1, S, width); without it the cross-attention is skipped
    #[arg(long, value_name = "FILE")]
    pub(crate) encoder_states: Option<PathBuf>,
}

/// The model as an argument in place of `--model`.
#[derive(Debug, Args)]
pub(crate) struct PositionalModel {
    /// The model, as with --model
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    positional: Option<PathBuf>,
}

impl PositionalModel {
    /// The argument, or what `--model` says.
    pub(crate) fn or(&self, model: &Path) -> PathBuf {
        self.positional.as_deref().unwrap_or(model).to_owned()
    }
}

/// What commands take that look into a checkpoint.
#[derive(Debug, Args)]
pub(crate) struct CommonArguments {
    #[arg(long, value_name = "N", allow_negative_numbers = true, help = help_of("n_head"))]
    pub(crate) n_head: Option<usize>,
    #[command(flatten)]
    pub(crate) threads: ThreadArguments,
}

/// The adapters of a checkpoint.
#[derive(Debug, Args)]
pub(crate) struct AdapterArguments {
    #[arg(long, visible_alias = "lora", value_name = "DIR[=WEIGHT]", help = help_of("adapter"))]
    pub(crate) adapter: Vec<AdapterChoice>,
}

/// What every command takes.
#[derive(Debug, Args)]
pub(crate) struct ThreadArguments {
    /// Number of threads [default: all that this process may use]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = value_parser!(u16).range(1..=1024))]
    #[allow(dead_code, reason = "`parse.rs` reads it, whatever the command")]
    threads: Option<u16>,
}

/// The help of an option of [`ModelOptions`].
fn help_of(name: &str) -> StyledStr {
    let options = ModelOptions::augment_args(Command::new("model"));
    let option = options.get_arguments().find(|argument| argument.get_id() == name);
    option.and_then(|argument| argument.get_help().cloned()).unwrap_or_default()
}

impl CommonArguments {
    /// The checkpoint of this name, for the library.
    pub(crate) fn checkpoint_options(&self, model: &Path, hub: &HubOptions) -> ModelOptions {
        let (model, hub) = (model.to_owned(), hub.clone());
        ModelOptions { model, hub, n_head: self.n_head, ..ModelOptions::default() }
    }
}
