//! Changes of a parameter by adapters: a replacement, products of low rank, and added vectors.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2_kernels::{AdaptedMatrix, Matrix};

/// The changes of parameters, by the model's names.
pub(crate) type Changes = HashMap<String, Change>;

/// The change of one parameter.
#[derive(Debug, Clone, Default)]
pub(crate) struct Change {
    /// The value that takes the parameter's place, `(out, in)`.
    pub(super) replacement: Option<Tensor>,
    pub(super) products: Vec<Product>,
    /// Vectors that are added.
    pub(super) offsets: Vec<Tensor>,
}

/// `scale · b a`, with `a` `(rank, in)` and `b` `(out, rank)`.
#[derive(Debug, Clone)]
pub(super) struct Product {
    pub(super) a: Tensor,
    pub(super) b: Tensor,
    pub(super) scale: f64,
}

impl Change {
    /// The parameter with the change, on the CPU in f32.
    fn applied(&self, base: Tensor) -> Result<Tensor> {
        let mut value = match &self.replacement {
            Some(replacement) => replacement.clone(),
            None => base,
        };
        for Product { a, b, scale } in &self.products {
            let adapted = AdaptedMatrix::new(Matrix::Dense(value), a.clone(), b.clone(), *scale)?;
            value = Matrix::Adapted(Arc::new(adapted)).to_tensor()?;
        }
        for offset in &self.offsets {
            value = (value + offset)?;
        }
        Ok(value)
    }

    /// Whether the parameter's own value is not needed.
    pub(super) fn is_replacement(&self) -> bool {
        self.replacement.is_some()
    }
}

/// A parameter with the change that adapters make to it.
pub(crate) fn changed(changes: &Changes, name: &str, base: Tensor) -> Result<Tensor> {
    match changes.get(name) {
        Some(change) => change.applied(base.to_device(&Device::Cpu)?.to_dtype(DType::F32)?),
        None => Ok(base),
    }
}
