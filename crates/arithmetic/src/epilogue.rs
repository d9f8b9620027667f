//! What follows a matrix product while its sums are still at hand: bias, GELU, a residual.

use std::sync::Arc;

use crate::simd::{LANES, Line, Number, Vectors, gelu_tanh};

/// What follows a product: `finish(x Wᵀ + bias)`. [`PackedMatrix::product`](crate::PackedMatrix::product) takes it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Epilogue<'a, T = f32> {
    /// The bias.
    pub bias: Option<&'a PanelBias<T>>,
    /// What follows the bias; a residual has the shape of the output.
    pub finish: Finish<&'a [T]>,
}

/// What follows a product and its bias; `R` is how a residual is held.
/// Part of an [`Epilogue`] of [`PackedMatrix::product`](crate::PackedMatrix::product).
#[derive(Debug, Clone, Copy, Default)]
pub enum Finish<R> {
    /// None.
    #[default]
    Nothing,
    /// The tanh form of GELU.
    Gelu,
    /// Adding a residual of the output's shape.
    Add(R),
}

/// A bias in lines of sixteen outputs, the last one filled up with zeros. Clones share it.
/// Part of an [`Epilogue`] of [`PackedMatrix::product`](crate::PackedMatrix::product).
#[derive(Debug, Clone)]
pub struct PanelBias<T = f32>(Arc<[Line<[T; LANES]>]>);

impl<T: Number> PanelBias<T> {
    /// The bias of a layer, a value for each output.
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
    /// Applies it to the outputs of panel `panel`, the first of which has index `first` among all values of the output.
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
            // After the last output of a row, the values of the next one go into lanes that are not stored.
            Finish::Add(residual) => v.add(values, v.load_first(&residual[first..], V::Real::ZERO)),
        }
    }
}
