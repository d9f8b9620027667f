//! What can be wrong with the input of an op, and how errors travel inside candle's error type: [`carry`], [`carried`].

use std::error::Error;
use std::io;
use std::ops::Range;

use candle_core::DType;
use candle_gpt2_arithmetic::KvSlot;
use thiserror::Error;

use crate::kv_dtype::KvDType;

/// An input that an op cannot work with. [`Linear`](crate::Linear) and the others return it inside candle's error type,
/// from which [`carried`] takes it.
#[derive(Debug, Error, Clone, PartialEq)]
#[non_exhaustive]
pub enum KernelError {
    /// The bias of a linear layer has another width than its output.
    #[error("linear layer: expected a bias of shape ({expected}), found {found:?}")]
    BiasShape {
        /// Width of the output.
        expected: usize,
        /// Shape of the bias.
        found: Vec<usize>,
    },
    /// The input of a linear layer has another width than its weight.
    #[error("linear layer: expected an input of width {expected}, found shape {found:?}")]
    InputWidth {
        /// Width of the input.
        expected: usize,
        /// Shape of the input.
        found: Vec<usize>,
    },
    /// What is to be added to the output of a linear layer has another shape.
    #[error("linear layer: expected a residual of shape {expected:?}, found {found:?}")]
    ResidualShape {
        /// Shape of the output.
        expected: Vec<usize>,
        /// Shape of the residual.
        found: Vec<usize>,
    },
    /// A fast kernel was given something else than f32 values on the CPU.
    #[error("expected f32 values on the CPU, found {found:?}, or another device")]
    NotCpuFloats {
        /// Their type.
        found: DType,
    },
    /// Queries, keys and values do not fit to each other.
    #[error(
        "attention: q {q:?}, k {k:?} and v {v:?} do not fit together, or a query sees no key or more than there are"
    )]
    AttentionShapes {
        /// Shape of the queries.
        q: Vec<usize>,
        /// Shape of the keys.
        k: Vec<usize>,
        /// Shape of the values.
        v: Vec<usize>,
    },
    /// There is no memory for keys and values.
    #[error(
        "no memory for the keys and values of {tokens} tokens, {width} wide in {dtype}; ask for fewer tokens"
    )]
    NoMemory {
        /// Tokens that there was to be room for.
        tokens: usize,
        /// Values of a token, of all heads.
        width: usize,
        /// Type of the values.
        dtype: KvDType,
    },
    /// A type of keys and values, or their memory, is the CPU's alone or not the CPU's.
    #[error(
        "keys and values in {dtype}: no such memory, or no kernel that reads it, on this device; q8 is the CPU's type, f32 and f16 \
         are there everywhere"
    )]
    OnlyOnCpu {
        /// The type.
        dtype: KvDType,
    },
    /// A slot is not one of a memory, or has fewer tokens than are asked for.
    #[error("attention: tokens {tokens:?} of {slot:?} in a memory for {held} tokens")]
    NoSuchSlot {
        /// The slot.
        slot: KvSlot,
        /// The tokens asked for.
        tokens: Range<usize>,
        /// Tokens that the memory has room for.
        held: usize,
    },
    /// A slot overlaps one that is in use.
    #[error(
        "attention: {slot:?} overlaps tokens {taken:?}, which another row has; give each row a slot of its own"
    )]
    SlotTaken {
        /// The slot.
        slot: KvSlot,
        /// First token of the other one, and the end of its room.
        taken: Range<usize>,
    },
    /// New keys or values have no room in the memory they are for.
    #[error(
        "attention: tokens {tokens:?} at positions {positions:?} do not fit into their slots of a memory {memory:?}"
    )]
    TokensDoNotFit {
        /// Shape of the memory.
        memory: Vec<usize>,
        /// Shapes of the keys and of the values.
        tokens: [Vec<usize>; 2],
        /// Place of the first token of each row.
        positions: Vec<usize>,
    },
    /// There is no kernel for a step that reads its positions from memory.
    #[error(
        "attention: no kernel for a step of {tokens:?} at positions {positions:?} into a cache of {memory:?}; on a GPU both are of one type, f32, f16 or \
         bf16, heads are up to 256 wide, the projection has a bias, and no gradient is wanted"
    )]
    NotAStep {
        /// Shape and type of the new tokens.
        tokens: (Vec<usize>, DType),
        /// Shape of their positions.
        positions: Vec<usize>,
        /// Shape and type of the memory.
        memory: (Vec<usize>, KvDType),
    },
    /// An embedding was asked for rows that its table does not have.
    #[error("embedding: row {row} of a table of {rows}")]
    NoSuchRow {
        /// The row asked for, which may be negative.
        row: i64,
        /// Number of rows.
        rows: usize,
    },
    /// Projections are not queries, keys and values of all heads.
    #[error(
        "attention: expected queries (B, T, {heads} heads) and keys and values (B, S, {heads} heads) in one to three tensors, with a visible key for each query; found {found:?}"
    )]
    Projections {
        /// Number of heads.
        heads: usize,
        /// Shapes of the projections.
        found: Vec<Vec<usize>>,
    },
    /// The scale of attention is not a number greater than 0.
    #[error("attention: expected a scale greater than 0, found {found}")]
    AttentionScale {
        /// The scale.
        found: f64,
    },
    /// A layer's adapter does not fit its weight.
    #[error("adapter: a {a:?} and b {b:?} do not fit a weight of shape {weight:?}, or are of other types")]
    AdapterShapes {
        /// Shape of the weight, `(out, in)`.
        weight: (usize, usize),
        /// Shape of the inner matrix.
        a: Vec<usize>,
        /// Shape of the outer matrix.
        b: Vec<usize>,
    },
    /// The computation was ended before its end, see [`interruptible`](crate::interruptible).
    #[error("the computation was interrupted")]
    Interrupted,
    /// There is not one gradient for each variable.
    #[error("gradients: {found} to start from for {variables} variables")]
    GradientCount {
        /// Number of variables.
        variables: usize,
        /// Number of gradients.
        found: usize,
    },
    /// A gradient is unlike its variable.
    #[error(
        "gradients: expected contiguous values of the variable's shape {expected:?}, type and device, found {found:?}"
    )]
    GradientShape {
        /// Shape of the variable.
        expected: Vec<usize>,
        /// Shape of the gradient.
        found: Vec<usize>,
    },
    /// Tensors that are changed together have memory in common.
    #[error("a parameter, its gradient and its running means must not share memory")]
    SharedMemory,
    /// There is not one target for each row.
    #[error("loss: expected one target for each of {rows} rows, and at least one row, found {found} targets")]
    TargetCount {
        /// Rows of hidden states.
        rows: usize,
        /// Number of targets.
        found: usize,
    },
    /// A target is no token.
    #[error("loss: the target {found} is outside the vocabulary of {vocabulary} tokens")]
    TargetRange {
        /// Tokens of the vocabulary.
        vocabulary: usize,
        /// The target.
        found: u32,
    },
    /// An activation of candle that no GPT-2 has.
    #[error("activation: {found} is none of GPT-2; take NewGelu, Gelu, Relu or Silu")]
    Activation {
        /// Its name in candle.
        found: String,
    },
    /// A dropout rate is no probability.
    #[error("dropout: expected a rate from 0 to 1, found {found}")]
    DropoutRate {
        /// The rate.
        found: f64,
    },
}

impl From<KernelError> for candle_core::Error {
    fn from(error: KernelError) -> Self {
        carry(error)
    }
}

/// An error inside candle's error type, which says the same and from which [`carried`] takes it again.
pub fn carry(error: impl Error + Send + Sync + 'static) -> candle_core::Error {
    // candle's own `wrap` keeps the text alone; of its variants that keep an error, this one serves every device.
    candle_core::Error::Io(io::Error::other(error))
}

/// The error that [`carry`] put into candle's, whatever candle put around it since; `None` if it is another one.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_kernels::{KernelError, Linear, carried};
///
/// let layer = Linear::new(Tensor::ones((3, 2), DType::F32, &Device::Cpu)?, None)?;
/// let error = layer.forward(&Tensor::ones((1, 5), DType::F32, &Device::Cpu)?).expect_err("not 2 wide");
/// assert!(matches!(carried(&error), Some(KernelError::InputWidth { expected: 2, .. })));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn carried<E: Error + 'static>(error: &candle_core::Error) -> Option<&E> {
    match error {
        candle_core::Error::Io(error) => error.get_ref()?.downcast_ref(),
        candle_core::Error::Context { inner, .. }
        | candle_core::Error::WithPath { inner, .. }
        | candle_core::Error::WithBacktrace { inner, .. } => carried(inner),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_found_below_what_candle_puts_around_it() {
        let error = candle_core::Error::from(KernelError::SharedMemory);
        assert_eq!(error.to_string(), KernelError::SharedMemory.to_string());
        let around = error.with_path("a/file").context("while testing");
        assert_eq!(carried(&around), Some(&KernelError::SharedMemory));
        assert_eq!(carried::<KernelError>(&candle_core::Error::Msg("another".into())), None);
    }
}
