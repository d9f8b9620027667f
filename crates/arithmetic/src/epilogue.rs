//! Epilogue of a matrix product: bias, GELU and residual, applied while the sums are in registers.

use std::sync::Arc;

use crate::simd::{LANES, Line, Number, Vectors, gelu_tanh};

/// Operations fused into a matrix product: `finish(x Wᵀ + bias)`.
///
/// Pass it to [`PackedMatrix::product`](crate::PackedMatrix::product).
#[derive(Debug, Clone, Copy, Default)]
pub struct Epilogue<'a, T = f32> {
    /// Bias to add.
    pub bias: Option<&'a PanelBias<T>>,
    /// Operation to apply after the bias.
    ///
    /// A residual must have the output's shape.
    pub finish: Finish<&'a [T]>,
}

/// Operation applied after a product and its bias.
///
/// `R` is the type of a residual. [`PackedMatrix::product`](crate::PackedMatrix::product) takes this enum as
/// part of its [`Epilogue`].
#[derive(Debug, Clone, Copy, Default)]
pub enum Finish<R> {
    /// No operation.
    #[default]
    Nothing,
    /// Tanh approximation of GELU.
    Gelu,
    /// Addition of a residual with the output's shape.
    Add(R),
}

/// Bias in lines of sixteen outputs, with the last line padded with zeros.
///
/// Clones share the memory. [`PackedMatrix::product`](crate::PackedMatrix::product) takes the bias as part of
/// its [`Epilogue`].
#[derive(Debug, Clone)]
pub struct PanelBias<T = f32>(Arc<[Line<[T; LANES]>]>);

impl<T: Number> PanelBias<T> {
    /// Creates a layer's bias from one value per output.
    pub fn new(bias: &[T]) -> Self {
        let line = |values: &[T]| {
            let mut line = [T::ZERO; LANES];
            line[..values.len()].copy_from_slice(values);
            Line(line)
        };
        Self(bias.chunks(LANES).map(line).collect())
    }
}

impl<T: Number> Epilogue<'_, T> {
    /// Applies the epilogue to the outputs of one panel.
    ///
    /// `first` is the index of the panel's first value in the whole output.
    #[inline(always)]
    pub(crate) fn apply<V: Vectors<Real = T>>(
        &self,
        v: V,
        mut values: V::Vector,
        panel: usize,
        first: usize,
    ) -> V::Vector {
        if let Some(bias) = self.bias {
            values = v.add(values, v.load(&bias.0[panel].0));
        }
        match self.finish {
            Finish::Nothing => values,
            Finish::Gelu => gelu_tanh(v, values),
            // Past the end of a row, lanes load values from the next row. Those lanes are not stored.
            Finish::Add(residual) => v.add(values, v.load_first(&residual[first..], V::Real::ZERO)),
        }
    }
}
