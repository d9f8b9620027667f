//! From an opened checkpoint to a model in memory.

use candle_core::{DType, Device};
use candle_gpt2::{
    Gpt2Config, Gpt2DoubleHeads, Gpt2ForSequenceClassification, Gpt2ForTokenClassification, Gpt2LMHeadModel,
    HeadKind, KvDType,
};
use candle_gpt2_kernels::{ByOutput, ParameterSource};
use candle_nn::VarBuilder;

use crate::progress::of_candle;
use crate::readers::{LoadMemory, PackParameters, ReadParameters};
use crate::stored::StoredDType;
use crate::{Checkpoint, ReadProgress, WeightDType, WeightsError};

/// How a model is held in memory. The default is the CPU, with weights as they are stored.
///
/// ```
/// use candle_gpt2_weights::{Checkpoint, GivenFiles, LoadOptions, OpenOptions, WeightDType};
///
/// let files = GivenFiles::new("stories")
///     .with_bytes("config.json", candle_gpt2_stories::CONFIG)
///     .with_bytes("model.safetensors", candle_gpt2_stories::WEIGHTS);
/// let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
/// let options = LoadOptions { dtype: Some(WeightDType::Q8), ..LoadOptions::default() };
/// let model = checkpoint.load(&options, &|_| ())?;
/// assert_eq!(model.parameter_count(), 3_161_088);
/// assert!(model.weight_bytes() < 3_161_088 * 5 / 4, "8 bits a weight, and scales");
/// # Ok::<(), candle_gpt2_weights::WeightsError>(())
/// ```
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// The device that holds the model and computes.
    pub device: Device,
    /// The type of the weights; `None` is the precision in which they are stored. On the CPU that is f16 for f16, integers for
    /// GGUF's Q8_0, Q5_0 and Q4_0, and f32 for everything else and for weights that adapters change; on a GPU it is
    /// [`Checkpoint::stored_dtype`].
    pub dtype: Option<WeightDType>,
    /// The type of the keys and values in the model's caches. `None` is f32 on the CPU, and f16 if the weights are computed
    /// as integers or rounded to f16 as they are loaded: that rounding is as coarse. On a GPU it is the type of the weights.
    pub kv_dtype: Option<KvDType>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { device: Device::Cpu, dtype: None, kv_dtype: None }
    }
}

/// A model with a head that checkpoints have. [`Checkpoint::load_head`] asks for one.
pub trait Head: Sized {
    /// Whether a model with this head can be loaded as this type.
    fn is_of(kind: HeadKind) -> bool;

    /// Builds it from its parameters.
    ///
    /// # Errors
    /// When a parameter is missing or has another shape.
    fn load(config: &Gpt2Config, parameters: impl ParameterSource) -> candle_core::Result<Self>;
}

/// The language model of double heads too.
impl Head for Gpt2LMHeadModel {
    fn is_of(kind: HeadKind) -> bool {
        kind.has_language_model()
    }

    fn load(config: &Gpt2Config, parameters: impl ParameterSource) -> candle_core::Result<Self> {
        Self::load(config, parameters)
    }
}

impl Head for Gpt2ForSequenceClassification {
    fn is_of(kind: HeadKind) -> bool {
        kind == HeadKind::SequenceClassification
    }

    fn load(config: &Gpt2Config, parameters: impl ParameterSource) -> candle_core::Result<Self> {
        Self::load(config, parameters)
    }
}

impl Head for Gpt2ForTokenClassification {
    fn is_of(kind: HeadKind) -> bool {
        kind == HeadKind::TokenClassification
    }

    fn load(config: &Gpt2Config, parameters: impl ParameterSource) -> candle_core::Result<Self> {
        Self::load(config, parameters)
    }
}

impl Head for Gpt2DoubleHeads {
    fn is_of(kind: HeadKind) -> bool {
        kind == HeadKind::DoubleHeads
    }

    fn load(config: &Gpt2Config, parameters: impl ParameterSource) -> candle_core::Result<Self> {
        Self::load(config, parameters)
    }
}

impl Checkpoint {
    /// Builds the model: on the CPU with its matrices packed for its fast products, on a GPU as tensors. `progress`
    /// receives the number of bytes of the file read since the last call, and may end it before each tensor.
    ///
    /// # Errors
    /// When the tensors are not those of the model, or the device has not the type of weights or no room;
    /// [`WeightsError::Interrupted`] if `progress` says so.
    pub fn load(
        &self,
        options: &LoadOptions,
        progress: &dyn ReadProgress,
    ) -> Result<Gpt2LMHeadModel, WeightsError> {
        let model: Gpt2LMHeadModel = self.load_head(options, progress)?;
        Ok(match options.kv_dtype {
            Some(kv_dtype) => model.with_kv_dtype(kv_dtype),
            None if options.device.is_cpu() => model.with_kv_dtype(self.kv_dtype_on_cpu(options.dtype)),
            None => model,
        })
    }

    /// As [`Checkpoint::load`], with the head that is asked for. `kv_dtype` is not looked at.
    ///
    /// # Errors
    /// As [`Checkpoint::load`], and when the model has another head.
    pub fn load_head<H: Head>(
        &self,
        options: &LoadOptions,
        progress: &dyn ReadProgress,
    ) -> Result<H, WeightsError> {
        self.check_head(H::is_of(self.config().head))?;
        self.check()?;
        let LoadOptions { device, dtype, .. } = options;
        let reader = ReadParameters { checkpoint: self, progress };
        let model = if device.is_cpu() {
            let format = dtype.map(WeightDType::on_cpu).transpose()?;
            H::load(self.config(), PackParameters::new(&reader, format))
        } else {
            let dtype = dtype.map_or(Ok(self.stored_dtype()), WeightDType::on_gpu)?;
            let vb = VarBuilder::from_backend(Box::new(reader), dtype, device.clone());
            H::load(self.config(), ByOutput(vb))
        };
        model.map_err(|error| of_candle(progress, error))
    }

    /// Checks that the model gives logits over its vocabulary: what everything but classifying needs.
    ///
    /// # Errors
    /// When it does not.
    pub fn check_language_model(&self) -> Result<(), WeightsError> {
        self.check_head(self.config().head.has_language_model())
    }

    /// Checks that the model has a head beside or in place of the one over its vocabulary.
    ///
    /// # Errors
    /// When it has not.
    pub fn check_classifier(&self) -> Result<(), WeightsError> {
        self.check_head(self.config().head != HeadKind::LanguageModel)
    }

    fn check_head(&self, is_right: bool) -> Result<(), WeightsError> {
        let (path, found) = (self.weights_path().to_owned(), self.config().head);
        if is_right { Ok(()) } else { Err(WeightsError::OtherHead { path, found }) }
    }

    /// The memory that the model takes on the CPU, with weights held as `dtype`, or as [`LoadOptions::dtype`] says for `None`.
    ///
    /// # Errors
    /// When the tensors are not those of the model, or the CPU has not the type.
    pub fn load_memory(&self, dtype: Option<WeightDType>) -> Result<LoadMemory, WeightsError> {
        self.check()?;
        let format = dtype.map(WeightDType::on_cpu).transpose()?;
        let reader = ReadParameters { checkpoint: self, progress: &|_| () };
        Ok(PackParameters::new(&reader, format).memory())
    }

    /// The type of keys and values on the CPU if none is asked for, see [`LoadOptions::kv_dtype`].
    pub fn kv_dtype_on_cpu(&self, dtype: Option<WeightDType>) -> KvDType {
        if self.is_rounded_to(dtype) { KvDType::F16 } else { KvDType::F32 }
    }

    /// The type of a file whose quantized blocks the CPU computes as they are stored: q8 for Q8_0, q5 for Q5_0, q4 for Q4_0.
    pub fn quantized_dtype(&self) -> Option<WeightDType> {
        self.stored_matrix("h.0.attn.c_attn.weight")?.dtype.quantized_dtype()
    }

    /// Whether quantized linear layers are computed in f32 unless a type is chosen: no integer type holds what they store.
    pub fn is_unpacked(&self) -> bool {
        let layers = self.naming.parameters.keys().filter(|name| self.naming.is_linear(name));
        let mut stored = layers.filter_map(|name| self.stored_matrix(name));
        stored.any(|stored| {
            matches!(stored.dtype, StoredDType::Quantized(_)) && stored.dtype.quantized_dtype().is_none()
        })
    }

    /// The type of tensors that comes closest to the stored token embedding: f16, bf16, else f32.
    pub fn stored_dtype(&self) -> DType {
        match self.stored_matrix("wte.weight").map(|stored| stored.dtype) {
            Some(StoredDType::F16) => DType::F16,
            Some(StoredDType::BF16) => DType::BF16,
            _ => DType::F32,
        }
    }

    /// Whether weights held as `dtype` are other numbers than the stored ones.
    fn is_rounded_to(&self, dtype: Option<WeightDType>) -> bool {
        match dtype {
            None => self.quantized_dtype().is_some(),
            Some(WeightDType::F32) => false,
            Some(WeightDType::F16) => self.stored_dtype() != DType::F16,
            Some(_) => true,
        }
    }
}
