//! Which model, and how it is to be held: everything that is said before a checkpoint is opened.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Device;
use candle_gpt2::{Gpt2LMHeadModel, KvDType};
use candle_gpt2_weights::{Checkpoint, GivenFiles, LoadOptions, OpenOptions, WeightDType};

use crate::{
    BUILT_IN, Classifier, DeviceChoice, EncoderStates, EngineError, HubOptions, MemoryNeeded, Opened,
    Reporter, Vocabulary, Watched, built_in, device, device_name, hub, memory::check_room,
};

/// A model's name and how it is to be held. By default it is the model inside the program, on the device that
/// [`DeviceChoice::Auto`] finds, in the numbers that are stored, and the network is not used.
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
#[derive(Debug, Clone)]
pub struct ModelOptions {
    /// Checkpoint folder or weights file, a model of the hub (`gpt2`, `owner/name`, `owner/name@revision`), or [`BUILT_IN`].
    pub model: PathBuf,
    /// A smaller model with the same vocabulary that drafts tokens, named like the model: the texts stay the same, see
    /// [`Scheduler::set_assistant`](candle_gpt2_generation::Scheduler::set_assistant).
    pub assistant_model: Option<PathBuf>,
    /// A `tokenizer.json`, or a folder with one or with a vocabulary and merges; by default the checkpoint's.
    pub tokenizer: Option<PathBuf>,
    /// The device to run on.
    pub device: DeviceChoice,
    /// Type of the weights; by default the stored one, on the CPU in f16 or f32.
    pub dtype: Option<WeightDType>,
    /// Type of cached keys and values; by default that which goes with the weights, see [`LoadOptions::kv_dtype`].
    pub kv_dtype: Option<KvDType>,
    /// Whether products of f32 matrices may round to TF32: refused elsewhere than on an NVIDIA GPU. It is a setting of the
    /// whole process, so whoever sets this also calls [`use_tf32`](crate::process::use_tf32).
    pub tf32: bool,
    /// A file with states of an encoder that a model with cross-attention attends to, see [`EncoderStates::read`]; without one
    /// its cross-attention is left out.
    pub encoder_states: Option<PathBuf>,
    /// The number of attention heads, for files that do not tell it, see [`OpenOptions::n_head`].
    pub n_head: Option<usize>,
    /// Where models of the hub come from.
    pub hub: HubOptions,
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self {
            model: BUILT_IN.into(),
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
    /// Opens device and checkpoint of a language model, checks that the checkpoint holds every tensor of its model, and reads the
    /// tokenizer where there is one. No weights are read yet.
    ///
    /// # Errors
    /// When one of them cannot be used, they do not go together, or the model is a classifier.
    pub fn open(&self, reporter: &dyn Reporter) -> Result<Opened, EngineError> {
        self.open_any(reporter)?.language_model()
    }

    /// As [`ModelOptions::open`], of a model with a head for classifying, see [`Classifier`].
    ///
    /// # Errors
    /// As [`ModelOptions::open`], where the model has no such head.
    pub fn open_classifier(&self, reporter: &dyn Reporter) -> Result<Opened, EngineError> {
        self.open_any(reporter)?.classifier()
    }

    /// As [`ModelOptions::open`], of a model with any head: what it is, its configuration says.
    ///
    /// # Errors
    /// As [`ModelOptions::open`].
    pub fn open_any(&self, reporter: &dyn Reporter) -> Result<Opened, EngineError> {
        let device = self.open_device(reporter)?;
        let checkpoint = self.open_checkpoint(reporter)?;
        self.opened(device, checkpoint, reporter)
    }

    /// As [`ModelOptions::open`], with a checkpoint whose files are given. `model` is not looked at.
    ///
    /// # Errors
    /// As [`ModelOptions::open`].
    pub fn open_given(&self, files: GivenFiles, reporter: &dyn Reporter) -> Result<Opened, EngineError> {
        let checkpoint = Checkpoint::open_given(files, &self.open_options(), &Watched::unseen(reporter))?;
        self.open_with(told_of(checkpoint, reporter)?, reporter)
    }

    /// As [`ModelOptions::open`], with a checkpoint that is open already. `model` and `n_head` are not looked at.
    ///
    /// # Errors
    /// As [`ModelOptions::open`].
    pub fn open_with(&self, checkpoint: Checkpoint, reporter: &dyn Reporter) -> Result<Opened, EngineError> {
        self.opened(self.open_device(reporter)?, checkpoint, reporter)?.language_model()
    }

    fn opened(
        &self,
        device: Device,
        checkpoint: Checkpoint,
        reporter: &dyn Reporter,
    ) -> Result<Opened, EngineError> {
        let named = |model: &PathBuf| Self { model: model.clone(), n_head: None, ..self.clone() };
        let assistant = self.assistant_model.as_ref().map(named);
        let assistant = assistant.map(|options| options.open_checkpoint(reporter)).transpose()?;
        let states = self.encoder_states.as_deref();
        let states = states.map(|path| EncoderStates::read(path, checkpoint.config())).transpose()?;
        Opened::new(self.clone(), device, checkpoint, assistant, states)
    }

    /// The device alone.
    ///
    /// # Errors
    /// When it cannot be opened, or lacks what the other options ask for.
    pub fn open_device(&self, reporter: &dyn Reporter) -> Result<Device, EngineError> {
        let device = device::open(self.device, self.dtype, reporter)?;
        if self.tf32 && !device.is_cuda() {
            return Err(EngineError::NoTf32 { device: device_name(&device) });
        }
        Ok(device)
    }

    /// The checkpoint alone, with whatever tensors it has: for those who look into it.
    ///
    /// # Errors
    /// When there is none of this name, it cannot be read, or it has another number of heads.
    pub fn open_checkpoint(&self, reporter: &dyn Reporter) -> Result<Checkpoint, EngineError> {
        let options = self.open_options();
        let checkpoint = if self.model == Path::new(BUILT_IN) {
            built_in::open(&options)?
        } else {
            Checkpoint::open_watched(
                &hub::local_path(&self.model, &self.hub, reporter)?,
                &options,
                &Watched::unseen(reporter),
            )?
        };
        told_of(checkpoint, reporter)
    }

    /// The memory that a checkpoint's model needs on the CPU, in the types of these options.
    ///
    /// # Errors
    /// As [`MemoryNeeded::of`].
    pub fn memory_of(&self, checkpoint: &Checkpoint) -> Result<MemoryNeeded, EngineError> {
        MemoryNeeded::of(checkpoint, self.dtype, self.kv_dtype)
    }

    fn open_options(&self) -> OpenOptions {
        OpenOptions { n_head: self.n_head }
    }

    /// The model of a checkpoint alone, in the types of these options. On a GPU its steps are recorded while no other thread uses
    /// that device, see [`Gpt2LMHeadModel::with_recorded_steps`].
    ///
    /// # Errors
    /// When the tensors are not those of the model, or the device has no room; when `reporter` wants no more of it, see
    /// [`EngineError::is_interrupted`].
    pub fn load(
        &self,
        checkpoint: &Checkpoint,
        device: &Device,
        reporter: &dyn Reporter,
    ) -> Result<Gpt2LMHeadModel, EngineError> {
        let options = self.load_options(checkpoint, device)?;
        let progress = Watched::new(reporter, "loading", checkpoint.parameter_bytes());
        let model = checkpoint.load(&options, &progress)?;
        Ok(if device.is_cpu() { model } else { model.with_recorded_steps() })
    }

    /// The classifier of a checkpoint, in the types of these options.
    pub(crate) fn load_classifier(
        &self,
        checkpoint: &Checkpoint,
        device: &Device,
        vocabulary: Arc<Vocabulary>,
        weights: &'static str,
        reporter: &dyn Reporter,
    ) -> Result<Classifier, EngineError> {
        let options = self.load_options(checkpoint, device)?;
        let progress = Watched::new(reporter, "loading", checkpoint.parameter_bytes());
        Classifier::load(checkpoint, vocabulary, weights, &options, &progress)
    }

    /// How a checkpoint is loaded on a device that has room for it.
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

/// A checkpoint that was opened, with what a user should know of it told.
fn told_of(checkpoint: Checkpoint, reporter: &dyn Reporter) -> Result<Checkpoint, EngineError> {
    if reporter.is_interrupted() {
        return Err(EngineError::Interrupted);
    }
    if let Some(note) = checkpoint.guessed_heads_note() {
        reporter.note(&note);
    }
    Ok(checkpoint)
}
