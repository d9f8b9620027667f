//! Options that select a model and control how it is loaded.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use candle_core::Device;
use candle_gpt2::{Gpt2LMHeadModel, KvDType};
use candle_gpt2_kernels::using;
use candle_gpt2_weights::{Checkpoint, LoadOptions, OpenOptions, WeightDType};
#[cfg(feature = "clap")]
use clap::builder::ArgPredicate;
use serde::de::Error;
use serde::{Deserialize, Deserializer};

use crate::adapters::deserialize_adapters;
use crate::memory::check_room;
use crate::{
    ADAPTER_BASE, AdapterChoice, BUILT_IN, Classifier, DeviceChoice, EngineError, HubOptions, MemoryNeeded,
    ReadJob, Reporter, Vocabulary, built_in, device, device_name, hub, is_nearly_built_in,
};

/// Options that select a model and control how it is loaded.
///
/// The default is the built-in model on the device that [`DeviceChoice::Auto`] finds, in the stored types,
/// without network access.
///
/// ```
/// use candle_gpt2_engine::{DeviceChoice, ModelOptions, Silent, WeightDType};
///
/// let options = ModelOptions {
///     device: DeviceChoice::Cpu,
///     dtype: Some(WeightDType::Q8),
///     ..ModelOptions::default() // the model inside the program
/// };
/// let opened = options.open(&Silent)?;
/// assert_eq!(opened.weight_type(), "q8");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
#[doc(alias("from_pretrained", "AutoModelForCausalLM"))]
pub struct ModelOptions {
    /// The model: a checkpoint folder or weights file (safetensors, PyTorch, TensorFlow, GGUF, llm.c),
    /// a name on the Hugging Face Hub (gpt2, owner/name, owner/name@revision),
    /// or built-in, the small model inside the program
    #[cfg_attr(feature = "clap", arg(short, long, value_name = "MODEL", default_value = BUILT_IN,
        default_value_if("adapter", ArgPredicate::IsPresent, ADAPTER_BASE)))]
    pub model: PathBuf,
    /// LoRA adapter to apply: a folder in PEFT's format, or a name on the Hub;
    /// append =WEIGHT to scale it, as in DIR=0.5; may be given more than once;
    /// without --model, the model is the base model that the first adapter names
    #[serde(deserialize_with = "deserialize_adapters")]
    #[cfg_attr(feature = "clap", arg(long, visible_alias = "lora", value_name = "DIR[=WEIGHT]"))]
    pub adapter: Vec<AdapterChoice>,
    /// Smaller model that drafts tokens for the same vocabulary, specified like `model`.
    ///
    /// The completions stay the same; see
    /// [`Scheduler::set_assistant`](candle_gpt2_generation::Scheduler::set_assistant).
    #[cfg_attr(feature = "clap", arg(skip))]
    pub assistant_model: Option<PathBuf>,
    /// Tokenizer: a tokenizer.json, spiece.model or vocab.txt, or a folder with one of them
    /// or with vocab.json and merges.txt [default: the model's folder]
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub tokenizer: Option<PathBuf>,
    /// Device to run on: cpu, cuda or cuda:N (NVIDIA), metal (Apple), or auto:
    /// cuda if this program was built with it and a GPU is available, else cpu
    #[serde(deserialize_with = "deserialize_from_str")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "DEVICE", default_value = "auto"))]
    pub device: DeviceChoice,
    /// Precision of the weights in memory [default: the checkpoint's dtype]
    #[serde(deserialize_with = "deserialize_option_from_str")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "TYPE", help = dtype_help()))]
    pub dtype: Option<WeightDType>,
    /// Precision of the KV cache: f32, f16, or q8 on the CPU (8-bit integers)
    /// [default: f32, or f16 if the weights are rounded to f16 or integers; on GPUs, the weights' dtype]
    #[serde(deserialize_with = "deserialize_option_from_str")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "TYPE"))]
    pub kv_dtype: Option<KvDType>,
    // This is a process-wide setting: front ends that set it also call `process::use_tf32`.
    /// On NVIDIA GPUs, round the inputs of f32 matrix products to TF32,
    /// which is faster and has a 10-bit mantissa
    #[cfg_attr(feature = "clap", arg(long))]
    pub tf32: bool,
    /// File with encoder hidden states for a model with cross-attention.
    ///
    /// See [`EncoderStates::read`](crate::EncoderStates::read). Without a file, cross-attention is skipped.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub encoder_states: Option<PathBuf>,
    /// Number of attention heads, if the checkpoint does not record it:
    /// weights with the names from the book "Build a Large Language Model (From Scratch)"
    /// without a config.json;
    /// weights with other names need a config.json
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", allow_negative_numbers = true))]
    pub n_head: Option<usize>,
    /// Access to the Hub.
    #[serde(skip)]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub hub: HubOptions,
}

#[cfg(feature = "clap")]
fn dtype_help() -> String {
    let integers = WeightDType::names_on_cpu_only();
    format!(
        "Precision of the weights in memory: f32 or f16, on the CPU also {integers} (block-quantized integers of that many bits; q5 and q4 keep embedding and head in q6), on GPUs also bf16 [default: the checkpoint's dtype; on the CPU f16 or f32, and its own type for GGUF in q8_0, q5_0 or q4_0]"
    )
}

/// Parses a value in command-line syntax.
fn deserialize_from_str<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(
    deserializer: D,
) -> Result<T, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
}

fn deserialize_option_from_str<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self {
            model: BUILT_IN.into(),
            adapter: Vec::new(),
            assistant_model: None,
            tokenizer: None,
            device: DeviceChoice::default(),
            dtype: None,
            kv_dtype: None,
            tf32: false,
            encoder_states: None,
            n_head: None,
            hub: HubOptions::default(),
        }
    }
}

impl ModelOptions {
    /// Opens only the device.
    ///
    /// # Errors
    /// If the device cannot be opened, or does not support the other options.
    pub fn open_device(&self, reporter: &dyn Reporter) -> Result<Device, EngineError> {
        let device = device::open(self.device, self.dtype, reporter)?;
        if self.tf32 && !device.is_cuda() {
            return Err(EngineError::NoTf32 { device: device_name(&device) });
        }
        Ok(device)
    }

    /// Opens only the checkpoint, even one with unexpected tensors, for example to inspect it.
    ///
    /// # Errors
    /// If the checkpoint does not exist, cannot be read, or has a different number of heads.
    pub fn open_checkpoint(&self, reporter: &dyn Reporter) -> Result<Checkpoint, EngineError> {
        if self.model == Path::new(ADAPTER_BASE) {
            return self.with_base_model(reporter)?.open_checkpoint(reporter);
        }
        let options = self.open_options();
        let checkpoint = if self.model == Path::new(BUILT_IN) {
            built_in::open(&options)?
        } else if is_nearly_built_in(&self.model) {
            let what = format!("{}: no such file or folder; did you mean {BUILT_IN}?", self.model.display());
            return Err(EngineError::Options { what });
        } else {
            Checkpoint::open_watched(
                &hub::local_path(&self.model, &self.hub, reporter)?,
                &options,
                &ReadJob::without_progress(reporter),
            )?
        };
        with_notes_reported(self.adapted(checkpoint, reporter)?, reporter)
    }

    /// Applies the adapters to the checkpoint.
    fn adapted(&self, checkpoint: Checkpoint, reporter: &dyn Reporter) -> Result<Checkpoint, EngineError> {
        if self.adapter.is_empty() {
            return Ok(checkpoint);
        }
        let open = |choice: &AdapterChoice| Ok((choice.open(&self.hub, reporter)?, choice.weight));
        let adapters = self.adapter.iter().map(open).collect::<Result<Vec<_>, EngineError>>()?;
        Ok(checkpoint.with_adapters(&adapters)?)
    }

    /// Memory that a checkpoint's model needs on the CPU in the selected types.
    ///
    /// # Errors
    /// Same as [`MemoryNeeded::of`].
    pub fn memory_of(&self, checkpoint: &Checkpoint) -> Result<MemoryNeeded, EngineError> {
        MemoryNeeded::of(checkpoint, self.dtype, self.kv_dtype)
    }

    /// Note for users if a CPU will expand quantized weights to f32 because no type was requested.
    pub fn unpacked_note(&self, checkpoint: &Checkpoint, device: &Device) -> Option<String> {
        let note = "the quantized weights are expanded to f32; `dtype` q8 is faster and needs about a quarter of the memory";
        let is_unpacked = self.dtype.is_none() && device.is_cpu() && checkpoint.is_unpacked();
        is_unpacked.then(|| note.to_owned())
    }

    /// Weight type on a device, such as `q8`: the requested type, otherwise the stored one.
    pub fn weight_type(&self, checkpoint: &Checkpoint, device: &Device) -> &'static str {
        let quantized = checkpoint.quantized_dtype().filter(|_| device.is_cpu());
        self.dtype.or(quantized).map_or(checkpoint.stored_dtype().as_str(), WeightDType::name)
    }

    pub(crate) fn open_options(&self) -> OpenOptions {
        OpenOptions { n_head: self.n_head }
    }

    /// Loads only the model of a checkpoint, in the selected types.
    ///
    /// On a GPU it records decoding steps if the program has called
    /// [`process::allow_recorded_steps`](crate::process::allow_recorded_steps).
    ///
    /// # Errors
    /// If the tensors do not fit the model, the device lacks memory, or `reporter` interrupts the job
    /// ([`EngineError::is_interrupted`]).
    pub fn load(
        &self,
        checkpoint: &Checkpoint,
        device: &Device,
        reporter: &dyn Reporter,
    ) -> Result<Gpt2LMHeadModel, EngineError> {
        let options = self.load_options(checkpoint, device)?;
        let progress = ReadJob::new(reporter, "loading", checkpoint.parameter_bytes());
        let model = using(device, || checkpoint.load(&options, &progress))?;
        Ok(crate::process::with_recorded_steps(model))
    }

    /// Loads the classifier of a checkpoint, in the selected types.
    pub(crate) fn load_classifier(
        &self,
        checkpoint: &Checkpoint,
        device: &Device,
        vocabulary: Arc<Vocabulary>,
        weights: &'static str,
        reporter: &dyn Reporter,
    ) -> Result<Classifier, EngineError> {
        let options = self.load_options(checkpoint, device)?;
        let progress = ReadJob::new(reporter, "loading", checkpoint.parameter_bytes());
        using(device, || Classifier::load(checkpoint, vocabulary, weights, &options, &progress))
    }

    /// Creates the load options, after checking that the device has enough memory.
    fn load_options(&self, checkpoint: &Checkpoint, device: &Device) -> Result<LoadOptions, EngineError> {
        if device.is_cpu() {
            check_room(checkpoint, self.dtype)?;
        } else {
            let held = self.dtype.map_or(Ok(checkpoint.stored_dtype()), WeightDType::on_gpu)?;
            device::check_gpu_room(checkpoint.config(), held, device)?;
        }
        Ok(LoadOptions { device: device.clone(), dtype: self.dtype, kv_dtype: self.kv_dtype })
    }
}

/// Reports the notes of an opened checkpoint.
pub(crate) fn with_notes_reported(
    checkpoint: Checkpoint,
    reporter: &dyn Reporter,
) -> Result<Checkpoint, EngineError> {
    if reporter.is_interrupted() {
        return Err(EngineError::Interrupted);
    }
    checkpoint.notes().iter().for_each(|note| reporter.note(note));
    if let Some(note) = checkpoint.guessed_heads_note() {
        reporter.note(&note);
    }
    Ok(checkpoint)
}
