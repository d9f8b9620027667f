//! Cross-entropy fused with the output head, in chunks of rows.
//!
//! Logits are the largest tensor of a training step. Each chunk exists only until its loss
//! and gradients are computed.

use super::matrix_view::MatrixView;
use super::product::{product, product_to};
use crate::simd::{LANES, Number, Real, Vectors, Work};
use crate::threads::map_items;

/// Maximum number of logits that [`Float::head_loss`](crate::Float::head_loss) holds at a time.
///
/// In f32, they take 64 MiB.
pub const MAX_CHUNK_LOGITS: usize = 1 << 24;

pub(super) fn head_loss<T: Real>(
    hidden: MatrixView<'_, T>,
    weight: MatrixView<'_, T>,
    targets: &[u32],
) -> f64 {
    in_chunks(hidden, weight, targets, |_, _| {})
}

pub(super) fn head_loss_with_gradients<T: Real>(
    hidden: MatrixView<'_, T>,
    weight: MatrixView<'_, T>,
    targets: &[u32],
    mut weight_gradient: Option<&mut [T]>,
) -> (f64, Vec<T>) {
    let width = hidden.columns();
    let mut hidden_gradient = vec![T::ZERO; hidden.rows() * width];
    let loss = in_chunks(hidden, weight, targets, |first, logits| {
        let gradient = &mut hidden_gradient[first * width..(first + logits.rows()) * width];
        product_to(logits, weight, gradient, true);
        if let Some(gradient) = &mut weight_gradient {
            let hidden = hidden.some_rows(first, logits.rows());
            product_to(logits.transposed(), hidden, gradient, first == 0);
        }
    });
    (loss, hidden_gradient)
}

/// Calls `each` for every chunk and returns the mean loss.
///
/// `each` receives the first row of the chunk and the gradients of its logits.
fn in_chunks<T: Real>(
    hidden: MatrixView<'_, T>,
    weight: MatrixView<'_, T>,
    targets: &[u32],
    mut each: impl FnMut(usize, MatrixView<'_, T>),
) -> f64 {
    let (rows, vocabulary) = (hidden.rows(), weight.rows());
    assert!(
        rows > 0 && targets.len() == rows,
        "expected one target for each of {rows} rows and at least one row, found {} targets",
        targets.len()
    );
    let rows_at_once = (MAX_CHUNK_LOGITS / vocabulary.max(1)).clamp(1, rows);
    let mut logits = Vec::new();
    let mut loss = 0.0;
    for first in (0..rows).step_by(rows_at_once) {
        let count = rows_at_once.min(rows - first);
        let (hidden, weight) = (hidden.some_rows(first, count), weight.transposed());
        if logits.is_empty() {
            logits = product(hidden, weight, None);
        } else {
            product_to(hidden, weight, &mut logits[..count * vocabulary], true);
        }
        let logits = &mut logits[..count * vocabulary];
        loss += softmax_gradients(logits, &targets[first..first + count], rows);
        each(first, MatrixView::new(logits, count, vocabulary));
    }
    loss / rows as f64
}

/// Turns logits into gradients of the mean loss over `rows` rows, and returns the summed loss.
///
/// The gradients are `(softmax - one_hot) / rows`.
fn softmax_gradients<T: Real>(logits: &mut [T], targets: &[u32], rows: usize) -> f64 {
    let vocabulary = logits.len() / targets.len();
    let pairs = logits.chunks_mut(vocabulary).zip(targets);
    let losses = map_items(pairs, |(logits, target)| {
        T::vectorized(RowGradient { logits, target: *target as usize, rows })
    });
    // The losses are added in row order, so that the sum does not depend on the number of threads.
    losses.into_iter().sum()
}

struct RowGradient<'a, T> {
    logits: &'a mut [T],
    target: usize,
    rows: usize,
}

impl<T: Number> Work<T> for RowGradient<'_, T> {
    /// Negative log-probability of the target.
    type Output = f64;

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) -> f64 {
        /// Number of values that are summed in their own number type before being added to the total.
        const PART: usize = 64 * LANES;
        let Self { logits, target, rows } = self;
        let (zero, lowest) = (T::ZERO, T::LOWEST);
        let mut largest = v.splat(lowest);
        for logits in logits.chunks(LANES) {
            largest = v.max(largest, v.load_first(logits, lowest));
        }
        let largest = v.largest(largest);
        let of_target = (logits[target] - largest).to_f64();
        let largest = v.splat(largest);
        let mut total = 0.0;
        for part in logits.chunks_mut(PART) {
            let mut sum = v.splat(zero);
            for logits in part.chunks_mut(LANES) {
                let exponentials = v.exp(v.sub(v.load_first(logits, lowest), largest));
                v.store_first(exponentials, logits);
                sum = v.add(sum, exponentials);
            }
            total += v.sum(sum).to_f64();
        }
        let factor = v.splat(T::of(1.0 / (total * rows as f64)));
        for logits in logits.chunks_mut(LANES) {
            v.store_first(v.mul(v.load_first(logits, zero), factor), logits);
        }
        logits[target] -= T::of(1.0 / rows as f64);
        libm::log(total) - of_target
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::noise;
    use crate::simd::{F32Job, InstructionSet};

    #[test]
    fn instruction_sets_compute_the_softmax_gradient() {
        for vocabulary in [1, 15, 16, 17, 2100] {
            let logits = noise(vocabulary, 1, 30.0, 20.0);
            let target = vocabulary / 2;
            let exponentials: Vec<f64> =
                logits.iter().map(|logit| (f64::from(*logit) - 30.0).exp()).collect();
            let total: f64 = exponentials.iter().sum();
            let expected_loss = total.ln() - (f64::from(logits[target]) - 30.0);
            for set in InstructionSet::available() {
                let mut gradients = logits.clone();
                let loss = set.run(F32Job(RowGradient { logits: &mut gradients, target, rows: 4 }));
                // The exponential function is within two units in the last place of
                // f32, and so are the means of its sums.
                assert!((loss - expected_loss).abs() < 1e-5, "{set:?} {vocabulary}: {loss}");
                for (index, (found, exponential)) in gradients.iter().zip(&exponentials).enumerate() {
                    let one_hot = if index == target { 1.0 } else { 0.0 };
                    let expected = (exponential / total - one_hot) / 4.0;
                    assert!((f64::from(*found) - expected).abs() < 1e-6, "{set:?} {vocabulary}: {found}");
                }
            }
        }
    }
}
