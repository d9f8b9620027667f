//! Encoder hidden states, read from a file for a model with cross-attention.

use std::path::Path;

use candle_core::Tensor;
use candle_gpt2::{Gpt2Config, ModelError, check_encoder_states};
use candle_gpt2_weights::{TensorFile, WeightsError};

use crate::EngineError;

/// Name of the tensor in the file, which is also the argument's name in transformers.
const NAME: &str = "encoder_hidden_states";

/// Encoder hidden states that have been checked against a model's configuration.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2::Gpt2Config;
/// use candle_gpt2_engine::EncoderStates;
///
/// let config = Gpt2Config { add_cross_attention: true, ..Gpt2Config::preset("gpt2")? };
/// let of_width = |width| Tensor::zeros((1, 5, width), DType::F32, &Device::Cpu);
/// assert_eq!(EncoderStates::new(of_width(768)?, &config)?.tensor().dims(), [1, 5, 768]);
/// assert!(EncoderStates::new(of_width(512)?, &config).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct EncoderStates(Tensor);

impl EncoderStates {
    /// Reads the tensor `encoder_hidden_states` of shape `(1, S, n_embd)` from a file.
    ///
    /// # Errors
    /// If the file cannot be read or lacks the tensor, or the tensor does not fit the model.
    pub fn read(path: &Path, config: &Gpt2Config) -> Result<Self, EngineError> {
        if !config.add_cross_attention {
            return Err(refused(&ModelError::NoCrossAttention));
        }
        let refuse = |what: String| WeightsError::NotWeights { path: path.to_owned(), what };
        let mut tensors = TensorFile::read(path)?.tensors;
        let Some(states) = tensors.remove(NAME) else {
            let found: Vec<&str> = tensors.keys().map(String::as_str).take(8).collect();
            let what = format!(
                "expected a tensor `{NAME}`, found {found:?} among the F32, F16, BF16 and F64 tensors"
            );
            return Err(refuse(what).into());
        };
        Self::new(states, config).map_err(|error| match error {
            EngineError::Options { what } => refuse(format!("tensor `{NAME}`: {what}")).into(),
            other => other,
        })
    }

    /// Checks a floating-point tensor of shape `(1, S, n_embd)` and wraps it.
    ///
    /// # Errors
    /// If the states do not fit the model, or an element is not finite.
    pub fn new(states: Tensor, config: &Gpt2Config) -> Result<Self, EngineError> {
        check_encoder_states(config, &states, 1).map_err(|error| refused(&error))?;
        // The sum is finite only if every element is finite.
        let sum = states
            .abs()
            .and_then(|sizes| sizes.to_dtype(candle_core::DType::F64)?.sum_all()?.to_scalar::<f64>());
        match sum {
            Ok(sum) if sum.is_finite() => Ok(Self(states)),
            Ok(_) => {
                Err(EngineError::Options { what: "encoder hidden states: all values must be finite".into() })
            }
            Err(error) => Err(EngineError::Options { what: error.to_string() }),
        }
    }

    /// Tensor of the states, `(1, S, n_embd)`.
    pub fn tensor(&self) -> &Tensor {
        &self.0
    }
}

fn refused(error: &ModelError) -> EngineError {
    EngineError::Options { what: error.to_string() }
}
