//! Low-rank product added to a frozen matrix: an adapter's contribution to a linear layer.
//!
//! Let `h = s x aᵀ` and `k = s g b` for a gradient `g` of the output. The adapter adds `h bᵀ` to the output.
//! The gradient of `a` is `kᵀ x`, and the gradient of `b` is `gᵀ h`. The adapter adds `k a` to the gradient
//! of the input. Every product has one narrow side, and no matrix is the size of the layer.

use super::elementwise::scale;
use super::matrix_view::MatrixView;
use super::product::{product, product_to};
use crate::simd::Real;

/// Adapter: the adapted linear layer computes `x (W + scale · b a)ᵀ`.
///
/// Pass it to [`Float::add_low_rank`](crate::Float::add_low_rank).
#[derive(Debug, Clone, Copy)]
pub struct LowRank<'a, T> {
    /// Matrix `a`, `(rank, in)`.
    pub a: MatrixView<'a, T>,
    /// Matrix `b`, `(out, rank)`.
    pub b: MatrixView<'a, T>,
    /// Factor applied to the product of the two matrices.
    pub scale: f64,
}

/// Adapter gradients from [`Float::low_rank_backward`](crate::Float::low_rank_backward).
#[derive(Debug, Clone, PartialEq)]
pub struct LowRankGradients<T> {
    /// Gradient of `a`, `(rank, in)`.
    pub a: Vec<T>,
    /// Gradient of `b`, `(out, rank)`.
    pub b: Vec<T>,
    /// Output gradient projected to the adapter's rank, `scale · gradient · b`, `(rows, rank)`.
    ///
    /// The product of this matrix and `a` is the adapter's contribution to the input gradient.
    pub inner: Vec<T>,
}

/// Computes `scale · x aᵀ`, `(rows, rank)`.
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
