//! Parameter changes made by adapters: replacements, low-rank products and added vectors.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2_kernels::{AdaptedMatrix, Matrix};

/// Parameter changes, keyed by the model's parameter name.
pub(crate) type Changes = HashMap<String, Change>;

/// Change to a single parameter.
#[derive(Debug, Clone, Default)]
pub(crate) struct Change {
    /// Value that replaces the parameter, `(out, in)`.
    pub(super) replacement: Option<Tensor>,
    pub(super) products: Vec<Product>,
    /// Vectors to add to the parameter.
    pub(super) offsets: Vec<Tensor>,
}

/// Low-rank product `scale · b a`, with `a` of shape `(rank, in)` and `b` of shape `(out, rank)`.
#[derive(Debug, Clone)]
pub(super) struct Product {
    pub(super) a: Tensor,
    pub(super) b: Tensor,
    pub(super) scale: f64,
}

impl Change {
    /// Applies the change to the parameter, on the CPU in f32.
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

    /// Whether the change replaces the parameter's own value.
    pub(super) fn is_replacement(&self) -> bool {
        self.replacement.is_some()
    }
}

/// Applies the adapters' change, if any, to a parameter.
pub(crate) fn changed(changes: &Changes, name: &str, base: Tensor) -> Result<Tensor> {
    match changes.get(name) {
        Some(change) => change.applied(base.to_device(&Device::Cpu)?.to_dtype(DType::F32)?),
        None => Ok(base),
    }
}
