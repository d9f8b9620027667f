//! The arguments that name a model: those of every command that runs one, and of those that look into a checkpoint.

use std::path::{Path, PathBuf};

use candle_gpt2::KvDType;
use candle_gpt2_engine::{
    BUILT_IN, DeviceChoice, EngineError, HubOptions, ModelOptions, Opened, WeightDType, process,
};
use clap::{Args, value_parser};

use crate::progress::Terminal;

/// Where the model is and where it runs.
#[derive(Debug, Args)]
pub(crate) struct ModelArguments {
    /// The model: a checkpoint folder or weights file (safetensors, PyTorch, TensorFlow, GGUF, llm.c), a name on the Hugging Face hub (gpt2, owner/name, owner/name@revision), or built-in, the small model inside the program
    #[arg(short, long, value_name = "DIR", default_value = BUILT_IN)]
    pub(crate) model: PathBuf,
    /// Tokenizer: a tokenizer.json, or a folder with one or with vocab.json and merges.txt [default: the model's folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Device to run on: cpu, cuda or cuda:N (NVIDIA), metal (Apple), or auto: cuda where this program was built with it and a GPU answers, else cpu
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: DeviceChoice,
    #[arg(long, value_name = "TYPE", help = dtype_help())]
    pub(crate) dtype: Option<WeightDType>,
    /// Precision of cached keys and values: f32, f16, or q8 on the CPU (8-bit integers) [default: f32, and f16 where --dtype rounds the weights to f16 or small integers; on GPUs that of the weights]
    #[arg(long, value_name = "TYPE")]
    pub(crate) kv_dtype: Option<KvDType>,
    /// On NVIDIA GPUs, round the inputs of f32 matrix products to TF32, which is faster and has 10 bits of fraction
    #[arg(long)]
    pub(crate) tf32: bool,
    #[command(flatten)]
    pub(crate) common: CommonArguments,
}

fn dtype_help() -> String {
    let integers = WeightDType::names_on_cpu_only();
    format!(
        "Precision of the weights in memory: f32 or f16, on the CPU also {integers} (blocks of integers of as many bits; q5 and q4 hold embedding and head in q6), on GPUs also bf16 [default: the stored numbers, on the CPU in f16 or f32]"
    )
}

impl ModelArguments {
    /// Opens the model, and sets the process as it is to be run.
    pub(crate) fn open(&self, hub: &HubOptions) -> Result<Opened, EngineError> {
        self.open_as(&self.options(hub))
    }

    /// As [`ModelArguments::open`], of a model with a head for classifying.
    pub(crate) fn open_classifier(&self, hub: &HubOptions) -> Result<Opened, EngineError> {
        let opened = self.options(hub).open_classifier(&Terminal)?;
        process::use_tf32(self.tf32);
        Ok(opened)
    }

    /// As [`ModelArguments::open`], of a model with any head.
    #[cfg(feature = "serve")]
    pub(crate) fn open_any(&self, hub: &HubOptions) -> Result<Opened, EngineError> {
        let opened = self.options(hub).open_any(&Terminal)?;
        process::use_tf32(self.tf32);
        Ok(opened)
    }

    /// As [`ModelArguments::open`], with [`ModelArguments::options`] to which others were added.
    pub(crate) fn open_as(&self, options: &ModelOptions) -> Result<Opened, EngineError> {
        let opened = options.open(&Terminal)?;
        process::use_tf32(self.tf32);
        Ok(opened)
    }

    /// What the arguments say, for the library.
    pub(crate) fn options(&self, hub: &HubOptions) -> ModelOptions {
        ModelOptions {
            model: self.model.clone(),
            assistant_model: None,
            tokenizer: self.tokenizer.clone(),
            device: self.device,
            dtype: self.dtype,
            kv_dtype: self.kv_dtype,
            tf32: self.tf32,
            encoder_states: None,
            n_head: self.common.n_head,
            hub: hub.clone(),
        }
    }
}

/// What a model may attend to besides its tokens.
#[derive(Debug, Args)]
pub(crate) struct EncoderArguments {
    /// States of an encoder that a model with cross-attention attends to: a safetensors file with the tensor encoder_hidden_states (1, S, width); without it the cross-attention is left out
    #[arg(long, value_name = "FILE")]
    pub(crate) encoder_states: Option<PathBuf>,
}

/// What every command takes.
#[derive(Debug, Args)]
pub(crate) struct CommonArguments {
    /// Number of attention heads, where the checkpoint does not tell it: weights without a config.json, as of the book "Build a Large Language Model (From Scratch)"
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) n_head: Option<usize>,
    /// Number of threads [default: as many as this process may use]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
}

impl CommonArguments {
    /// The checkpoint of this name, for the library.
    pub(crate) fn checkpoint_options(&self, model: &Path, hub: &HubOptions) -> ModelOptions {
        let (model, hub) = (model.to_owned(), hub.clone());
        ModelOptions { model, hub, n_head: self.n_head, ..ModelOptions::default() }
    }
}
