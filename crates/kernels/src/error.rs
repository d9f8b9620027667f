//! Errors of the operations, carried inside candle's error type ([`carry`], [`carried`]).

use std::error::Error;
use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use candle_gpt2_arithmetic::KvSlot;
use thiserror::Error;

use crate::kv_dtype::KvDType;

/// Invalid input of an operation.
///
/// [`Linear`](crate::Linear) and the other operations return it inside candle's error type; [`carried`]
/// extracts it.
#[derive(Debug, Error, Clone, PartialEq)]
#[non_exhaustive]
pub enum KernelError {
    /// The bias of a linear layer does not match the layer's output width.
    #[error("linear layer: expected a bias of shape ({expected}), found shape {found:?}")]
    BiasShape {
        /// Width of the output.
        expected: usize,
        /// Shape of the bias.
        found: Vec<usize>,
    },
    /// The input of a linear layer does not match the weight's input width.
    #[error("linear layer: expected an input of width {expected}, found shape {found:?}")]
    InputWidth {
        /// Width of the input.
        expected: usize,
        /// Shape of the input.
        found: Vec<usize>,
    },
    /// The residual does not match the output shape of the linear layer.
    #[error("linear layer: expected a residual of shape {expected:?}, found shape {found:?}")]
    ResidualShape {
        /// Shape of the output.
        expected: Vec<usize>,
        /// Shape of the residual.
        found: Vec<usize>,
    },
    /// A CPU kernel received values that are not f32 or not on the CPU.
    #[error("expected an f32 tensor on the CPU, found {found:?} on {device}")]
    NotCpuFloats {
        /// Dtype of the values.
        found: DType,
        /// Kind of the device that holds them.
        device: &'static str,
    },
    /// The shapes of queries, keys and values do not match, or the visible keys of a query are invalid.
    #[error(
        "attention: the shapes of queries {q:?}, keys {k:?} and values {v:?} do not match, \
         or a query's visible keys are empty or out of range"
    )]
    AttentionShapes {
        /// Shape of the queries.
        q: Vec<usize>,
        /// Shape of the keys.
        k: Vec<usize>,
        /// Shape of the values.
        v: Vec<usize>,
    },
    /// The memory for keys and values could not be allocated.
    #[error(
        "not enough memory for the keys and values of {tokens} tokens \
         (width {width}, dtype {dtype}); request fewer tokens"
    )]
    NoMemory {
        /// Requested number of tokens.
        tokens: usize,
        /// Number of values per token, summed over all heads.
        width: usize,
        /// Storage type of the values.
        dtype: KvDType,
    },
    /// The device or the cache does not support this storage type for keys and values.
    ///
    /// `q8` is supported only on the CPU, and the CPU attention kernel reads only CPU memory in its own
    /// layout.
    #[error(
        "keys and values of dtype {dtype} are not supported on this device or in this cache; \
         use f32 or f16, or q8 on the CPU"
    )]
    OnlyOnCpu {
        /// The storage type.
        dtype: KvDType,
    },
    /// The slot is outside the memory, or the requested tokens are outside the slot.
    #[error("attention: tokens {tokens:?} of {slot:?} are out of range for a cache of {held} tokens")]
    NoSuchSlot {
        /// The slot.
        slot: KvSlot,
        /// Requested tokens.
        tokens: Range<usize>,
        /// Capacity of the memory in tokens.
        held: usize,
    },
    /// The slot overlaps a slot that is in use.
    #[error("attention: {slot:?} overlaps tokens {taken:?} of another row; use a separate slot for each row")]
    SlotTaken {
        /// The slot.
        slot: KvSlot,
        /// Token range of the slot in use.
        taken: Range<usize>,
    },
    /// New keys or values do not fit into their slots.
    #[error(
        "attention: keys and values of shapes {tokens:?} do not fit in their slots at positions {positions:?}; \
         the cache has shape {memory:?}"
    )]
    TokensDoNotFit {
        /// Shape of the memory.
        memory: Vec<usize>,
        /// Shapes of the keys and the values.
        tokens: [Vec<usize>; 2],
        /// Position of each row's first token.
        positions: Vec<usize>,
    },
    /// No kernel supports this step, whose positions are in device memory.
    #[error(
        "attention: no kernel for a step with tokens {tokens:?} (shape, dtype), positions of shape {positions:?} \
         and a cache {memory:?} (shape, dtype); \
         a GPU step needs tokens and cache in the same dtype (f32, f16 or bf16), heads up to 256 wide, \
         a projection with a bias, and no gradients"
    )]
    NotAStep {
        /// Shape and dtype of the new tokens.
        tokens: (Vec<usize>, DType),
        /// Shape of the tokens' positions.
        positions: Vec<usize>,
        /// Shape and storage type of the memory.
        memory: (Vec<usize>, KvDType),
    },
    /// An embedding index is out of range.
    #[error("embedding: row {row} is out of range; the table has {rows} rows")]
    NoSuchRow {
        /// Requested row, which may be negative.
        row: i64,
        /// Number of rows in the table.
        rows: usize,
    },
    /// The projections do not have valid shapes for the queries, keys and values of all heads.
    #[error(
        "attention: expected queries (B, T, {heads} heads) and keys and values (B, S, {heads} heads) in one to three tensors, with a visible key for each query; found shapes {found:?}"
    )]
    Projections {
        /// Number of heads.
        heads: usize,
        /// Shapes of the projections.
        found: Vec<Vec<usize>>,
    },
    /// The attention scale is not a finite number greater than 0.
    #[error("attention: expected a finite scale greater than 0, found {found}")]
    AttentionScale {
        /// The scale.
        found: f64,
    },
    /// The shapes or dtypes of an adapter do not match the weight of its layer.
    #[error(
        "adapter: the shapes or dtypes of `a` {a:?} and `b` {b:?} do not match a weight of shape {weight:?}"
    )]
    AdapterShapes {
        /// Shape of the weight, `(out, in)`.
        weight: (usize, usize),
        /// Shape of the inner matrix.
        a: Vec<usize>,
        /// Shape of the outer matrix.
        b: Vec<usize>,
    },
    /// The computation was interrupted; see [`interruptible`](crate::interruptible).
    #[error("the computation was interrupted")]
    Interrupted,
    /// The number of initial gradients differs from the number of variables.
    #[error("gradients: expected one initial gradient for each of {variables} variables, found {found}")]
    GradientCount {
        /// Number of variables.
        variables: usize,
        /// Number of gradients.
        found: usize,
    },
    /// A gradient does not match its variable in shape, dtype or device, or is not contiguous.
    #[error(
        "gradients: expected contiguous values with the variable's shape {expected:?}, dtype and device, \
         found values of shape {found:?}"
    )]
    GradientShape {
        /// Shape of the variable.
        expected: Vec<usize>,
        /// Shape of the gradient.
        found: Vec<usize>,
    },
    /// Tensors that are updated together share memory.
    #[error("a parameter, its gradient and its running means must not share memory")]
    SharedMemory,
    /// The number of targets differs from the number of rows, or there are no rows.
    #[error("loss: expected at least one row and one target per row, found {rows} rows and {found} targets")]
    TargetCount {
        /// Number of rows of hidden states.
        rows: usize,
        /// Number of targets.
        found: usize,
    },
    /// A target is outside the vocabulary.
    #[error("loss: target {found} is outside the vocabulary of {vocabulary} tokens")]
    TargetRange {
        /// Vocabulary size.
        vocabulary: usize,
        /// The invalid target.
        found: u32,
    },
    /// The last axis of a layer norm's input has the wrong width.
    #[error("layer norm: expected a last axis of {expected}, found shape {found:?}")]
    NormWidth {
        /// Width of the norm.
        expected: usize,
        /// Shape of the input.
        found: Vec<usize>,
    },
    /// A candle activation that GPT-2 does not support.
    #[error("unsupported activation `{found}`; expected one of NewGelu, Gelu, Relu, Silu")]
    Activation {
        /// Name of the activation in candle.
        found: String,
    },
    /// The dropout rate is not a probability.
    #[error("dropout: expected a rate from 0 to 1, found {found}")]
    DropoutRate {
        /// The rate.
        found: f64,
    },
}

impl KernelError {
    /// Creates the error for a tensor that is not f32 or not on the CPU.
    pub(crate) fn not_cpu_floats(tensor: &Tensor) -> Self {
        let device = match tensor.device() {
            Device::Cpu => "the CPU",
            Device::Cuda(_) => "an NVIDIA GPU",
            Device::Metal(_) => "an Apple GPU",
        };
        Self::NotCpuFloats { found: tensor.dtype(), device }
    }
}

impl From<KernelError> for candle_core::Error {
    fn from(error: KernelError) -> Self {
        carry(error)
    }
}

/// Wrapper that carries any error inside candle's error type.
///
/// It displays the error's message and returns the error as its source.
#[derive(Debug, Error)]
#[error("{0}")]
struct Carried(#[source] Box<dyn Error + Send + Sync>);

/// Wraps an error in candle's error type with the same message and the error as its `source()`.
///
/// [`carried`] extracts it, even through a context that candle has added.
pub fn carry(error: impl Error + Send + Sync + 'static) -> candle_core::Error {
    // candle's own `wrap` keeps only the message. Of the variants for any error, `Cuda` is the only one that
    // returns a source, and it exists on every device.
    candle_core::Error::Cuda(Box::new(Carried(Box::new(error))))
}

/// Returns the error that [`carry`] wrapped, even if candle has added context since.
///
/// Returns `None` for any other error. Without such a context, the error is also the `source()` of candle's
/// error, so that `downcast_ref` finds it in the chain of an `anyhow::Error`.
///
/// ```
/// use std::error::Error;
///
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_kernels::{KernelError, Linear, carried};
///
/// let layer = Linear::new(Tensor::ones((3, 2), DType::F32, &Device::Cpu)?, None)?;
/// let error = layer.forward(&Tensor::ones((1, 5), DType::F32, &Device::Cpu)?).expect_err("expected width 2");
/// assert!(matches!(carried(&error), Some(KernelError::InputWidth { expected: 2, .. })));
/// assert!(error.source().is_some_and(|source| source.is::<KernelError>()));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn carried<E: Error + 'static>(error: &candle_core::Error) -> Option<&E> {
    match error {
        candle_core::Error::Cuda(error) => error.downcast_ref::<Carried>()?.0.downcast_ref(),
        candle_core::Error::WrappedContext { wrapped, .. } => carried(wrapped.downcast_ref()?),
        candle_core::Error::Context { inner, .. }
        | candle_core::Error::WithPath { inner, .. }
        | candle_core::Error::WithBacktrace { inner, .. } => carried(inner),
        _ => None,
    }
}

/// Error message together with the messages of its causes.
///
/// candle's error repeats the message of the error that it wraps, so repetitions are left out.
///
/// ```
/// use candle_gpt2_kernels::{KernelError, message_with_causes};
///
/// let error = candle_core::Error::from(KernelError::SharedMemory);
/// assert_eq!(message_with_causes(&error), KernelError::SharedMemory.to_string());
/// ```
pub fn message_with_causes(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    let mut messages: Vec<String> = causes.map(ToString::to_string).collect();
    messages.dedup();
    messages.join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_is_found_inside_candle_context() {
        let error = candle_core::Error::from(KernelError::SharedMemory);
        assert_eq!(error.to_string(), KernelError::SharedMemory.to_string());
        let source = error.source().and_then(|source| source.downcast_ref());
        assert_eq!(source, Some(&KernelError::SharedMemory), "in the chain of an `anyhow::Error`");
        assert!(!matches!(error, candle_core::Error::Io(_)));
        let wrapped = error.with_path("a/file").context("while testing");
        assert_eq!(carried(&wrapped), Some(&KernelError::SharedMemory));
        let wrapped = candle_core::Context::context(Err::<(), _>(wrapped), "by candle's trait").unwrap_err();
        assert_eq!(carried(&wrapped), Some(&KernelError::SharedMemory));
        assert_eq!(carried::<KernelError>(&candle_core::Error::Msg("another".into())), None);
    }
}
