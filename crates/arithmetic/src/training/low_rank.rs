//! A product of low rank beside a fixed matrix: what an adapter adds to a linear layer.
//!
//! With `h = s x aᵀ` and `k = s g b` for a gradient `g` of the output, the output gets `h bᵀ`, the gradient of `a` is `kᵀ x`,
//! that of `b` is `gᵀ h`, and the input's gets `k a`: products with one narrow side each, no matrix of the layer's size.

use super::elementwise::scale;
use super::product::{MatrixView, product, product_to};
use crate::simd::Real;

/// An adapter: a linear layer with it computes `x (W + scale · b a)ᵀ`.
/// [`Float::add_low_rank`](crate::Float::add_low_rank) takes it.
#[derive(Debug, Clone, Copy)]
pub struct LowRank<'a, T> {
    /// `(rank, in)`.
    pub a: MatrixView<'a, T>,
    /// `(out, rank)`.
    pub b: MatrixView<'a, T>,
    /// What the product of both counts.
    pub scale: f64,
}

/// The gradients of an adapter. [`Float::low_rank_backward`](crate::Float::low_rank_backward) gives them.
#[derive(Debug, Clone, PartialEq)]
pub struct LowRankGradients<T> {
    /// Of `a`, `(rank, in)`.
    pub a: Vec<T>,
    /// Of `b`, `(out, rank)`.
    pub b: Vec<T>,
    /// The gradient of the output in terms of the rank, `scale · gradient · b`, `(rows, rank)`; its product with `a` belongs
    /// to the gradient of the input.
    pub inner: Vec<T>,
}

/// `scale · x aᵀ`, `(rows, rank)`.
fn inner<T: Real>(x: MatrixView<'_, T>, adapter: LowRank<'_, T>) -> Vec<T> {
    let mut inner = product(x, adapter.a.transposed(), None);
    scale(&mut inner, adapter.scale);
    inner
}

pub(super) fn add_low_rank<T: Real>(y: &mut [T], x: MatrixView<'_, T>, adapter: LowRank<'_, T>) {
    let inner = inner(x, adapter);
    let inner = MatrixView::new(&inner, x.rows(), adapter.a.rows());
    product_to(inner, adapter.b.transposed(), y, false);
}

pub(super) fn low_rank_backward<T: Real>(
    x: MatrixView<'_, T>,
    gradient: MatrixView<'_, T>,
    adapter: LowRank<'_, T>,
) -> LowRankGradients<T> {
    let of_input = inner(x, adapter);
    let mut of_output = product(gradient, adapter.b, None);
    scale(&mut of_output, adapter.scale);
    let rank = adapter.a.rows();
    let rows = |inner| MatrixView::new(inner, x.rows(), rank);
    LowRankGradients {
        a: product(rows(&of_output).transposed(), x, None),
        b: product(gradient.transposed(), rows(&of_input), None),
        inner: of_output,
    }
}
