//! Loads models from opened checkpoints.

use candle_core::{DType, Device};
use candle_gpt2::{
    Gpt2Config, Gpt2DoubleHeads, Gpt2ForSequenceClassification, Gpt2ForTokenClassification, Gpt2LMHeadModel,
    HeadKind, KvDType,
};
use candle_gpt2_arithmetic::NumberType;
use candle_gpt2_kernels::{ByOutput, ParameterSource};
use candle_nn::VarBuilder;

use crate::progress::of_candle;
use crate::readers::{LoadMemory, PackParameters, ReadParameters};
use crate::stored::StoredDType;
use crate::{Checkpoint, ReadProgress, WeightDType, WeightsError};

/// Options for loading a model. The default is the CPU, with weights in their stored precision.
///
/// ```
/// use candle_gpt2_weights::{Checkpoint, GivenFiles, LoadOptions, OpenOptions, WeightDType};
///
/// let files = GivenFiles::of_bytes("stories", candle_gpt2_stories::FILES);
/// let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
/// let options = LoadOptions { dtype: Some(WeightDType::Q8), ..LoadOptions::default() };
/// let model = checkpoint.load(&options, &|_| ())?;
/// assert_eq!(model.parameter_count(), 6_708_480);
/// assert!(model.weight_bytes() < 6_708_480 * 5 / 4, "8 bits per weight, plus scales");
/// # Ok::<(), candle_gpt2_weights::WeightsError>(())
/// ```
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Device that holds the model and runs the computation.
    pub device: Device,
    /// Dtype of the weights; `None` keeps the stored precision.
    ///
    /// On the CPU, `None` means f16 for f16, and integers for GGUF's Q8_0, Q5_0 and Q4_0. Everything else
    /// is f32, including weights changed by adapters. On a GPU, it means [`Checkpoint::stored_dtype`].
    pub dtype: Option<WeightDType>,
    /// Dtype of the KV cache; `None` chooses it from the weights.
    ///
    /// On the CPU, `None` means f16 if the weights are computed as integers or rounded to f16 on loading,
    /// because that rounding is equally coarse. Otherwise it means f32. On a GPU, it means the dtype of the
    /// weights.
    pub kv_dtype: Option<KvDType>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { device: Device::Cpu, dtype: None, kv_dtype: None }
    }
}

/// Model type with a specific head, for [`Checkpoint::load_head`].
pub trait Head: Sized {
    /// Whether models with a head of this kind can be loaded as this type.
    fn is_of(kind: HeadKind) -> bool;

    /// Builds the model from its parameters.
    ///
    /// # Errors
    /// If a parameter is missing or has the wrong shape.
    fn load(config: &Gpt2Config, parameters: impl ParameterSource) -> candle_core::Result<Self>;
}

/// Language model. Also loads the language-model part of a double-heads checkpoint.
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
    /// Loads the language model.
    ///
    /// On the CPU, matrices are packed for fast multiplication; on a GPU, they are tensors. `progress`
    /// receives the number of bytes read since its last call, and can interrupt loading before each tensor.
    ///
    /// # Errors
    /// If the tensors do not match the model, or the device does not support the dtype or runs out of
    /// memory. [`WeightsError::Interrupted`] if `progress` requests it.
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

    /// Loads a model with the requested head, like [`Checkpoint::load`]. Ignores `kv_dtype`.
    ///
    /// # Errors
    /// Fails like [`Checkpoint::load`]. Also fails if the model has a different head.
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
            let dtype = dtype.map(WeightDType::on_cpu).transpose()?;
            H::load(self.config(), PackParameters::new(&reader, dtype))
        } else {
            let dtype = dtype.map_or(Ok(self.stored_dtype()), WeightDType::on_gpu)?;
            let vb = VarBuilder::from_backend(Box::new(reader), dtype, device.clone());
            H::load(self.config(), ByOutput(vb))
        };
        model.map_err(|error| of_candle(progress, error))
    }

    /// Checks that the model has a language-model head and can generate and score text.
    ///
    /// # Errors
    /// If the model has no language-model head.
    pub fn check_language_model(&self) -> Result<(), WeightsError> {
        self.check_head(self.config().head.has_language_model())
    }

    /// Checks that the model has a classification or multiple-choice head.
    ///
    /// # Errors
    /// If it has only a language-model head.
    pub fn check_classifier(&self) -> Result<(), WeightsError> {
        self.check_head(self.config().head != HeadKind::LanguageModel)
    }

    fn check_head(&self, is_right: bool) -> Result<(), WeightsError> {
        let (path, found) = (self.weights_path().to_owned(), self.config().head);
        if is_right { Ok(()) } else { Err(WeightsError::UnsupportedHead { path, found }) }
    }

    /// Returns the memory that the model requires on the CPU.
    ///
    /// `dtype` has the same meaning as [`LoadOptions::dtype`].
    ///
    /// # Errors
    /// If the tensors do not match the model, or the CPU does not support the dtype.
    pub fn load_memory(&self, dtype: Option<WeightDType>) -> Result<LoadMemory, WeightsError> {
        self.check()?;
        let dtype = dtype.map(WeightDType::on_cpu).transpose()?;
        let reader = ReadParameters { checkpoint: self, progress: &|_| () };
        Ok(PackParameters::new(&reader, dtype).memory())
    }

    /// Returns the default KV cache dtype on the CPU; see [`LoadOptions::kv_dtype`].
    pub fn kv_dtype_on_cpu(&self, dtype: Option<WeightDType>) -> KvDType {
        if self.is_rounded_to(dtype) { KvDType::F16 } else { KvDType::F32 }
    }

    /// Returns the integer dtype in which a quantized file loads without further rounding.
    ///
    /// It is q8 for Q8_0, q5 for Q5_0 and q4 for Q4_0.
    pub fn quantized_dtype(&self) -> Option<WeightDType> {
        self.stored_matrix("h.0.attn.c_attn.weight")?.dtype.quantized_dtype()
    }

    /// Whether quantized linear layers are computed in f32 by default.
    ///
    /// This is the case if no integer dtype can represent the stored blocks.
    pub fn is_unpacked(&self) -> bool {
        let layers = self.naming.parameters.keys().filter(|name| self.naming.is_linear(name));
        let mut stored = layers.filter_map(|name| self.stored_matrix(name));
        stored.any(|stored| stored.dtype.is_blocks() && stored.dtype.quantized_dtype().is_none())
    }

    /// Returns the tensor dtype closest to the stored token embedding: f16, bf16 or else f32.
    pub fn stored_dtype(&self) -> DType {
        match self.stored_matrix("wte.weight").map(|stored| stored.dtype) {
            Some(StoredDType::Weights(NumberType::F16)) => DType::F16,
            Some(StoredDType::Weights(NumberType::BF16)) => DType::BF16,
            _ => DType::F32,
        }
    }

    /// Whether converting weights to `dtype` changes their values.
    fn is_rounded_to(&self, dtype: Option<WeightDType>) -> bool {
        match dtype {
            None => self.quantized_dtype().is_some(),
            Some(WeightDType::F32) => false,
            Some(WeightDType::F16) => self.stored_dtype() != DType::F16,
            Some(_) => true,
        }
    }
}
