//! The passes of training, forward and back, over slices of f32 or of f64, in which gradients are checked.
//!
//! Layer norm and activations serve inference too. Every sum is added in one order, whatever the number of threads.

mod adamw;
mod attention;
mod dropout;
mod elementwise;
mod embedding;
mod head_loss;
mod layer_norm;
mod low_rank;
mod product;
mod sparse;

pub use adamw::AdamWStep;
pub use attention::{AddedScores, Attention};
pub use dropout::Dropout;
pub use elementwise::{ElementFunction, Elementwise};
pub use head_loss::LOGITS_AT_ONCE;
pub use layer_norm::LayerNormGradients;
pub use low_rank::{LowRank, LowRankGradients};
pub use product::MatrixView;
pub use sparse::SparseRows;

use crate::simd::Number;

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// Declares [`Float`] with functions that are compiled in this crate for f32 and f64, and nowhere again.
macro_rules! floats {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $(-> $output:ty)? = $path:path;)+) => {
        /// A number that training computes with: f32, or f64 if gradients are checked against finite differences.
        ///
        /// Matrices are in row-major order. All functions use all threads.
        ///
        /// ```
        /// use candle_gpt2_arithmetic::{Float, MatrixView};
        ///
        /// let (left, right) = ([1f32, 2., 3., 4., 5., 6.], [1f32, 0., 2.]);
        /// let product = Float::product(MatrixView::new(&left, 2, 3), MatrixView::new(&right, 3, 1), None);
        /// assert_eq!(product, [7., 16.]);
        /// assert_eq!(Float::sum(&[1f64, 2.], &[10., 20.]), [11., 22.]);
        /// ```
        pub trait Float: Number + sealed::Sealed {
            $($(#[$doc])* fn $name($($argument: $kind),*) $(-> $output)?;)+
        }

        impl Float for f32 {
            $(fn $name($($argument: $kind),*) $(-> $output)? {
                $path($($argument),*)
            })+
        }

        impl Float for f64 {
            $(fn $name($($argument: $kind),*) $(-> $output)? {
                $path($($argument),*)
            })+
        }
    };
}

floats! {
    /// `left · right`, with a bias, a value for each column, added to each row.
    ///
    /// # Panics
    /// When the sizes do not fit.
    fn product(
        left: MatrixView<'_, Self>,
        right: MatrixView<'_, Self>,
        bias: Option<&[Self]>,
    ) -> Vec<Self> = product::product;

    /// Writes `left · right` over the output if that is fresh, and adds it to the output otherwise.
    ///
    /// # Panics
    /// When the sizes do not fit.
    fn product_to(
        left: MatrixView<'_, Self>,
        right: MatrixView<'_, Self>,
        output: &mut [Self],
        is_fresh: bool,
    ) = product::product_to;

    /// Writes the sum of each column of a matrix, of which each total is one, over totals that are fresh, and adds it to them
    /// otherwise.
    ///
    /// # Panics
    /// When the values are no whole rows.
    fn sum_columns(values: &[Self], totals: &mut [Self], is_fresh: bool) = elementwise::sum_columns;

    /// `x + y`.
    ///
    /// # Panics
    /// When their lengths differ.
    fn sum(x: &[Self], y: &[Self]) -> Vec<Self> = elementwise::add;

    /// `x` with `addend` added to each of its pieces of that length.
    ///
    /// # Panics
    /// When `x` is no whole number of such pieces.
    fn add_to_each(x: &[Self], addend: &[Self]) -> Vec<Self> = elementwise::add_to_each;

    /// Adds `values` to `sums`.
    ///
    /// # Panics
    /// When their lengths differ.
    fn add_to(sums: &mut [Self], values: &[Self]) = elementwise::add_to;

    /// Multiplies each value.
    fn scale(values: &mut [Self], factor: f64) = elementwise::scale;

    /// What dropout leaves of `x`, and of its gradient: the draws are the first of stream 0.
    fn dropout(x: &[Self], dropout: Dropout) -> Vec<Self> = dropout::dropout;

    /// An activation function and its backward pass.
    fn elementwise(function: ElementFunction) -> Elementwise<Self> = elementwise::elementwise;

    /// The layer norm of each row: mean 0, variance 1 after `epsilon` was added to it, then scaled and shifted.
    ///
    /// # Shapes
    /// `x` `(rows, width)`, `weight` and `bias` `(width)`; returns the shape of `x`.
    ///
    /// # Panics
    /// When the sizes do not fit, or the width is 0.
    fn layer_norm(x: &[Self], weight: &[Self], bias: &[Self], epsilon: f64) -> Vec<Self> = layer_norm::forward;

    /// The gradients of a layer norm from its input, its scale and the gradient of its output.
    ///
    /// # Panics
    /// When the sizes do not fit, or the width is 0.
    fn layer_norm_backward(
        x: &[Self],
        weight: &[Self],
        gradient: &[Self],
        epsilon: f64,
    ) -> LayerNormGradients<Self> = layer_norm::backward;

    /// `softmax(scale · Q Kᵀ + added) V` over the keys that each query sees, for every head.
    ///
    /// # Shapes
    /// Queries `(B, T, H · D)`, keys `(B, S, H · D)` and values `(B, S, H · Dv)`, the heads side by side, in one array, in two or
    /// in three: the first holds queries, the last values, and what shares an array lies side by side for each token. Returns
    /// `(B, T, H · Dv)`.
    ///
    /// # Panics
    /// When the sizes do not fit, or the scale is not greater than 0.
    fn attention(qkv: &[&[Self]], attention: Attention<'_, Self>) -> Vec<Self> = attention::forward;

    /// The gradients of these arrays from them and the gradient of the output.
    ///
    /// # Panics
    /// As [`Float::attention`].
    fn attention_backward(
        qkv: &[&[Self]],
        gradient: &[Self],
        attention: Attention<'_, Self>,
    ) -> Vec<Vec<Self>> = attention::backward;

    /// The rows `places` of a table of rows of `width`, one after the other.
    ///
    /// # Panics
    /// When the table has no such row.
    fn rows(table: &[Self], width: usize, places: &[usize]) -> Vec<Self> = embedding::rows;

    /// Adds each row of `values` to the row of the table at its place.
    ///
    /// # Panics
    /// When the table has no such row, or there is not one row for each place.
    fn add_rows(table: &mut [Self], width: usize, places: &[usize], values: &[Self]) = embedding::add_rows;

    /// The mean negative log-probability of the targets under `softmax(hidden · weightᵀ)`, in nats.
    ///
    /// # Shapes
    /// `hidden` `(rows, C)`, at least one row; `weight` `(V, C)`; a target, which is below `V`, for each row.
    ///
    /// # Panics
    /// When the sizes do not fit.
    fn head_loss(
        hidden: MatrixView<'_, Self>,
        weight: MatrixView<'_, Self>,
        targets: &[u32],
    ) -> f64 = head_loss::head_loss;

    /// The same, with the gradient of `hidden`. That of `weight` is written over `weight_gradient`, if there is one.
    ///
    /// # Panics
    /// As [`Float::head_loss`].
    fn head_loss_with_gradients(
        hidden: MatrixView<'_, Self>,
        weight: MatrixView<'_, Self>,
        targets: &[u32],
        weight_gradient: Option<&mut [Self]>,
    ) -> (f64, Vec<Self>) = head_loss::head_loss_with_gradients;

    /// Adds `entries · table` to the output.
    ///
    /// # Panics
    /// When the sizes do not fit.
    fn add_sparse_product(
        entries: &SparseRows<Self>,
        table: MatrixView<'_, Self>,
        output: &mut [Self],
    ) = sparse::add_sparse_product;

    /// For each entry the product of its row of `left` and its column's row of the table: the gradient of the entry, where `left` is
    /// that of the output.
    ///
    /// # Panics
    /// When the sizes do not fit.
    fn sparse_products(
        entries: &SparseRows<Self>,
        left: MatrixView<'_, Self>,
        table: MatrixView<'_, Self>,
    ) -> Vec<Self> = sparse::sparse_products;

    /// Adds the transpose of `entries` times `gradient` to the gradient of the table.
    ///
    /// # Panics
    /// When the sizes do not fit.
    fn add_sparse_gradient(
        entries: &SparseRows<Self>,
        gradient: MatrixView<'_, Self>,
        table_gradient: &mut [Self],
    ) = sparse::add_sparse_gradient;

    /// Adds what an adapter adds to the output of a linear layer.
    ///
    /// # Shapes
    /// `y` `(rows, out)`, `x` `(rows, in)`.
    ///
    /// # Panics
    /// When the sizes do not fit.
    fn add_low_rank(y: &mut [Self], x: MatrixView<'_, Self>, adapter: LowRank<'_, Self>) = low_rank::add_low_rank;

    /// The gradients of an adapter from the input of its layer, `(rows, in)`, and the gradient of the output, `(rows, out)`.
    ///
    /// # Panics
    /// When the sizes do not fit.
    fn low_rank_backward(
        x: MatrixView<'_, Self>,
        gradient: MatrixView<'_, Self>,
        adapter: LowRank<'_, Self>,
    ) -> LowRankGradients<Self> = low_rank::low_rank_backward;

    /// Takes a step of AdamW: changes a parameter and the running means of its gradient and of that squared.
    ///
    /// # Panics
    /// When the lengths differ.
    fn adamw(
        parameter: &mut [Self],
        gradient: &[Self],
        means: [&mut [Self]; 2],
        step: &AdamWStep,
    ) = adamw::adamw;

    /// The sum of the squares of all values.
    fn squared_norm(x: &[Self]) -> f64 = adamw::squared_norm;
}
