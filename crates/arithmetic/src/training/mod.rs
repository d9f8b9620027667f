//! Forward and backward passes for training, over slices of f32, or of f64 to check gradients.
//!
//! Inference also uses layer norm and activations. Every sum is added in the same
//! order, whatever the number of threads.

mod adamw;
mod attention;
mod dropout;
mod elementwise;
mod embedding;
mod head_loss;
mod layer_norm;
mod low_rank;
mod matrix_view;
mod product;
mod row;
mod sparse;

pub use adamw::AdamWStep;
pub use attention::{AddedScores, Attention};
pub use dropout::Dropout;
pub use elementwise::{ElementFunction, Elementwise, QUICK_GELU_FACTOR};
pub use head_loss::MAX_CHUNK_LOGITS;
pub use layer_norm::LayerNormGradients;
pub use low_rank::{LowRank, LowRankGradients};
pub use matrix_view::MatrixView;
pub use sparse::SparseRows;

use crate::simd::Number;

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// Declares [`Float`], whose functions are compiled for f32 and f64 only in this crate.
macro_rules! floats {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $(-> $output:ty)? = $path:path;)+) => {
        /// Number type of training: f32, or f64 to check gradients against finite differences.
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
    /// Computes `left · right` plus an optional bias.
    ///
    /// The bias has a value for each column and is added to each row.
    ///
    /// # Panics
    /// Panics if the sizes do not match.
    fn product(
        left: MatrixView<'_, Self>,
        right: MatrixView<'_, Self>,
        bias: Option<&[Self]>,
    ) -> Vec<Self> = product::product;

    /// Writes `left · right` over the output if `is_fresh`, or else adds it to the output.
    ///
    /// # Panics
    /// Panics if the sizes do not match.
    fn product_to(
        left: MatrixView<'_, Self>,
        right: MatrixView<'_, Self>,
        output: &mut [Self],
        is_fresh: bool,
    ) = product::product_to;

    /// Sums each column of a matrix into `totals`.
    ///
    /// The matrix has one column for each total. The sums overwrite the totals if
    /// `is_fresh`, or else are added to them.
    ///
    /// # Panics
    /// Panics if the values do not form whole rows.
    fn sum_columns(values: &[Self], totals: &mut [Self], is_fresh: bool) = elementwise::sum_columns;

    /// Returns `x + y`.
    ///
    /// # Panics
    /// Panics if their lengths differ.
    fn sum(x: &[Self], y: &[Self]) -> Vec<Self> = elementwise::add;

    /// Splits `x` into chunks as long as `addend` and returns them with `addend` added to each.
    ///
    /// # Panics
    /// Panics if `x` does not consist of whole chunks.
    fn add_to_each(x: &[Self], addend: &[Self]) -> Vec<Self> = elementwise::add_to_each;

    /// Adds `values` to `sums`, element by element.
    ///
    /// # Panics
    /// Panics if their lengths differ.
    fn add_to(sums: &mut [Self], values: &[Self]) = elementwise::add_to;

    /// Multiplies each value by `factor`.
    fn scale(values: &mut [Self], factor: f64) = elementwise::scale;

    /// Applies dropout to `x`, or to a gradient, with the first samples of stream 0.
    fn dropout(x: &[Self], dropout: Dropout) -> Vec<Self> = dropout::dropout;

    /// Returns an activation function and its backward pass.
    fn elementwise(function: ElementFunction) -> Elementwise<Self> = elementwise::elementwise;

    /// Normalizes each row to mean 0 and variance 1, then scales and shifts it.
    ///
    /// `epsilon` is added to the variance before the division.
    ///
    /// # Shapes
    /// `x` is `(rows, width)`, and `weight` and `bias` are `(width)`. Returns the shape of `x`.
    ///
    /// # Panics
    /// Panics if the sizes do not match, or if the width is 0.
    fn layer_norm(x: &[Self], weight: &[Self], bias: &[Self], epsilon: f64) -> Vec<Self> = layer_norm::forward;

    /// Returns the gradients of a layer norm from its input, its scale and the output gradient.
    ///
    /// # Panics
    /// Panics if the sizes do not match, or if the width is 0.
    fn layer_norm_backward(
        x: &[Self],
        weight: &[Self],
        gradient: &[Self],
        epsilon: f64,
    ) -> LayerNormGradients<Self> = layer_norm::backward;

    /// Computes `softmax(scale · Q Kᵀ + added) V` over the visible keys of each query, for every head.
    ///
    /// # Shapes
    /// Queries are `(B, T, H · D)`, keys `(B, S, H · D)` and values `(B, S, H · Dv)`, with contiguous heads.
    /// They are stored in one, two or three arrays. The first array holds the queries, and the last one holds
    /// the values. Within a shared array, a token's parts are adjacent. Returns `(B, T, H · Dv)`.
    ///
    /// # Panics
    /// Panics if the sizes do not match, or if the scale is not greater than 0.
    fn attention(qkv: &[&[Self]], attention: Attention<'_, Self>) -> Vec<Self> = attention::forward;

    /// Returns the gradient of each array in `qkv`, computed from the output gradient.
    ///
    /// # Panics
    /// Panics in the same cases as [`Float::attention`].
    fn attention_backward(
        qkv: &[&[Self]],
        gradient: &[Self],
        attention: Attention<'_, Self>,
    ) -> Vec<Vec<Self>> = attention::backward;

    /// Gathers the table rows at the indices `places`; each row has `width` values.
    ///
    /// # Panics
    /// Panics if a row is outside the table.
    fn rows(table: &[Self], width: usize, places: &[usize]) -> Vec<Self> = embedding::rows;

    /// Adds each row of `values` to the table row at the matching index in `places`.
    ///
    /// # Panics
    /// Panics if a row is outside the table, or if `values` does not have one row for each index.
    fn add_rows(table: &mut [Self], width: usize, places: &[usize], values: &[Self]) = embedding::add_rows;

    /// Returns the mean negative log-probability of the targets, in nats.
    ///
    /// The probabilities are `softmax(hidden · weightᵀ)`.
    ///
    /// # Shapes
    /// `hidden` is `(rows, C)` with at least one row, and `weight` is `(V, C)`.
    /// Each row has one target below `V`.
    ///
    /// # Panics
    /// Panics if the sizes do not match.
    fn head_loss(
        hidden: MatrixView<'_, Self>,
        weight: MatrixView<'_, Self>,
        targets: &[u32],
    ) -> f64 = head_loss::head_loss;

    /// Returns the loss from [`Float::head_loss`] and the gradient of `hidden`.
    ///
    /// The gradient of `weight` is written to `weight_gradient`, if present.
    ///
    /// # Panics
    /// Panics in the same cases as [`Float::head_loss`].
    fn head_loss_with_gradients(
        hidden: MatrixView<'_, Self>,
        weight: MatrixView<'_, Self>,
        targets: &[u32],
        weight_gradient: Option<&mut [Self]>,
    ) -> (f64, Vec<Self>) = head_loss::head_loss_with_gradients;

    /// Adds `entries · table` to the output.
    ///
    /// # Panics
    /// Panics if the sizes do not match.
    fn add_sparse_product(
        entries: &SparseRows<Self>,
        table: MatrixView<'_, Self>,
        output: &mut [Self],
    ) = sparse::add_sparse_product;

    /// Returns the dot product of a `left` row and a table row for each entry.
    ///
    /// The entry's row selects the row of `left`, and its column selects the row of the table. If `left` is
    /// the output gradient, the results are the gradients of the entries.
    ///
    /// # Panics
    /// Panics if the sizes do not match.
    fn sparse_products(
        entries: &SparseRows<Self>,
        left: MatrixView<'_, Self>,
        table: MatrixView<'_, Self>,
    ) -> Vec<Self> = sparse::sparse_products;

    /// Adds `entriesᵀ · gradient` to the gradient of the table.
    ///
    /// # Panics
    /// Panics if the sizes do not match.
    fn add_sparse_gradient(
        entries: &SparseRows<Self>,
        gradient: MatrixView<'_, Self>,
        table_gradient: &mut [Self],
    ) = sparse::add_sparse_gradient;

    /// Adds the contribution of a low-rank adapter to the output of a linear layer.
    ///
    /// # Shapes
    /// `y` is `(rows, out)`, and `x` is `(rows, in)`.
    ///
    /// # Panics
    /// Panics if the sizes do not match.
    fn add_low_rank(y: &mut [Self], x: MatrixView<'_, Self>, adapter: LowRank<'_, Self>) = low_rank::add_low_rank;

    /// Returns the gradients of a low-rank adapter.
    ///
    /// `x` is the layer's input, `(rows, in)`, and `gradient` is the output gradient, `(rows, out)`.
    ///
    /// # Panics
    /// Panics if the sizes do not match.
    fn low_rank_backward(
        x: MatrixView<'_, Self>,
        gradient: MatrixView<'_, Self>,
        adapter: LowRank<'_, Self>,
    ) -> LowRankGradients<Self> = low_rank::low_rank_backward;

    /// Performs one AdamW step.
    ///
    /// Updates a parameter and the running means of its gradient and of its squared gradient.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    fn adamw(
        parameter: &mut [Self],
        gradient: &[Self],
        means: [&mut [Self]; 2],
        step: &AdamWStep,
    ) = adamw::adamw;

    /// Returns the sum of the squares of all values.
    fn squared_norm(x: &[Self]) -> f64 = adamw::squared_norm;
}
