//! Tensor statistics, and differences between two checkpoints.

use candle_core::{Device, Tensor};
use candle_gpt2::expected_parameters;
use serde::Serialize;

use crate::checkpoint_file::CheckpointFile;
use crate::progress::{PIECE, check_interrupted};
use crate::stored::StoredTensor;
use crate::{Checkpoint, Problem, ReadProgress, WeightsError};

/// Statistics of a tensor's values, as returned by [`Checkpoint::statistics`].
///
/// Minimum, maximum, mean and standard deviation cover only the finite values.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Statistics {
    /// Smallest value.
    pub min: f64,
    /// Largest value.
    pub max: f64,
    /// Mean.
    pub mean: f64,
    /// Population standard deviation.
    pub standard_deviation: f64,
    /// Number of values that are exactly zero.
    pub zeros: usize,
    /// Number of NaN values.
    pub nan: usize,
    /// Number of infinite values.
    pub infinite: usize,
}

impl Statistics {
    /// Computes the statistics in two passes over the tensor: one for the mean, one for the deviation.
    pub(crate) fn of(
        stored: &StoredTensor,
        files: &[CheckpointFile],
        progress: &dyn ReadProgress,
    ) -> Result<Self, WeightsError> {
        let [mut min, mut max] = [f64::INFINITY, f64::NEG_INFINITY];
        let [mut zeros, mut nan, mut infinite, mut count] = [0; 4];
        // The additive identity is -0, so that tensors containing only -0 keep their sign.
        let mut sum = -0.0;
        stored.check_bytes(files)?;
        stored.for_each_piece(PIECE, &mut |piece| {
            check_interrupted(progress)?;
            for value in piece.values(files)? {
                if value.is_finite() {
                    let finite = f64::from(value);
                    (min, max) = (min.min(finite), max.max(finite));
                    sum += finite;
                    count += 1;
                    zeros += usize::from(value == 0.0);
                } else if value.is_nan() {
                    nan += 1;
                } else {
                    infinite += 1;
                }
            }
            Ok::<_, WeightsError>(())
        })?;
        let count = count as f64;
        let mean = sum / count;
        let mut squares = -0.0;
        stored.for_each_piece(PIECE, &mut |piece| {
            check_interrupted(progress)?;
            let finite = piece.values(files)?.into_iter().filter(|value| value.is_finite());
            finite.for_each(|value| squares += (f64::from(value) - mean).powi(2));
            progress.advance(piece.stored_bytes());
            Ok::<_, WeightsError>(())
        })?;
        let standard_deviation = (squares / count).sqrt();
        Ok(Self { min, max, mean, standard_deviation, zeros, nan, infinite })
    }
}

/// Difference in a parameter between two checkpoints, as listed by [`differences`].
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// Name of the parameter in the model.
    pub name: String,
    /// Kind of difference.
    pub kind: DifferenceKind,
}

/// Kinds of difference, as listed by [`differences`].
#[derive(Debug, Clone, PartialEq)]
pub enum DifferenceKind {
    /// Only the first checkpoint contains the parameter.
    OnlyInFirst,
    /// Only the second checkpoint contains the parameter.
    OnlyInSecond,
    /// The shapes differ; both are `(out, in)`.
    Shape(Vec<usize>, Vec<usize>),
    /// Largest absolute difference between values; NaN if any value is NaN.
    Values(f64),
}

/// Compares the parameters of two checkpoints in model order. The file formats may differ.
///
/// Equal parameters are omitted. `progress` receives the number of bytes read from both checkpoints, and
/// can interrupt the comparison.
///
/// ```
/// use candle_gpt2_weights::{Checkpoint, GivenFiles, OpenOptions, differences};
///
/// let files = GivenFiles::of_bytes("stories", candle_gpt2_stories::FILES);
/// let first = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
/// assert!(differences(&first, &first, &|_| ())?.is_empty());
/// # Ok::<(), candle_gpt2_weights::WeightsError>(())
/// ```
///
/// # Errors
/// If a tensor cannot be read; [`WeightsError::Interrupted`] if `progress` requests it.
pub fn differences(
    first: &Checkpoint,
    second: &Checkpoint,
    progress: &dyn ReadProgress,
) -> Result<Vec<Difference>, WeightsError> {
    let names = |checkpoint: &Checkpoint| -> Vec<String> {
        expected_parameters(checkpoint.config()).into_iter().map(|parameter| parameter.name).collect()
    };
    let mut in_order = names(first);
    let after: Vec<String> = names(second).into_iter().filter(|name| !in_order.contains(name)).collect();
    in_order.extend(after);
    let mut differences = Vec::new();
    for name in in_order {
        // If both files use the same layout, the tensors are compared in chunks, because an embedding is
        // large.
        if let (Some(a), Some(b)) = (first.stored_rows(&name), second.stored_rows(&name))
            && (&a.0.shape, a.1) == (&b.0.shape, b.1)
        {
            let largest = largest_difference_of_rows([(first, &a.0), (second, &b.0)], progress)?;
            if largest != 0.0 {
                differences.push(Difference { name, kind: DifferenceKind::Values(largest) });
            }
            continue;
        }
        let read = |checkpoint: &Checkpoint| checkpoint.parameter(&name, &Device::Cpu, progress);
        let kind = match (read(first)?, read(second)?) {
            (None, None) => continue,
            (Some(_), None) => DifferenceKind::OnlyInFirst,
            (None, Some(_)) => DifferenceKind::OnlyInSecond,
            (Some(a), Some(b)) if a.dims() != b.dims() => {
                DifferenceKind::Shape(a.dims().to_vec(), b.dims().to_vec())
            }
            (Some(a), Some(b)) => {
                let values = |tensor: &Tensor| -> Result<Vec<f32>, WeightsError> {
                    check_interrupted(progress)?;
                    Ok(tensor.flatten_all()?.to_vec1()?)
                };
                let (a, b, mut largest) = (values(&a)?, values(&b)?, 0.0);
                for (a, b) in a.chunks(PIECE).zip(b.chunks(PIECE)) {
                    check_interrupted(progress)?;
                    largest = larger(largest, largest_difference(a, b));
                }
                if largest == 0.0 {
                    continue;
                }
                DifferenceKind::Values(largest)
            }
        };
        differences.push(Difference { name, kind });
    }
    Ok(differences)
}

/// Compares two tensors of equal shape in chunks of rows.
fn largest_difference_of_rows(
    tensors: [(&Checkpoint, &StoredTensor); 2],
    progress: &dyn ReadProgress,
) -> Result<f64, WeightsError> {
    let shape = &tensors[0].1.shape;
    let step = (PIECE / shape.iter().skip(1).product::<usize>().max(1)).max(1);
    let rows = shape.first().copied().unwrap_or_default();
    let mut largest = 0.0;
    for start in (0..rows).step_by(step) {
        check_interrupted(progress)?;
        let read = |(checkpoint, tensor): (&Checkpoint, &StoredTensor)| {
            let piece = tensor.rows(start..rows.min(start + step));
            let piece = piece.ok_or_else(|| candle_core::Error::Msg("the rows cannot be split".into()))?;
            progress.advance(piece.stored_bytes());
            piece.values(&checkpoint.source.files)
        };
        let [first, second] = tensors;
        largest = larger(largest, largest_difference(&read(first)?, &read(second)?));
    }
    Ok(largest)
}

/// Returns the larger of two numbers; NaN if either is NaN.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

fn largest_difference(first: &[f32], second: &[f32]) -> f64 {
    let differences = first.iter().zip(second).map(|(a, b)| {
        // Equal values may be infinities, whose difference is NaN.
        if a == b { 0.0 } else { (f64::from(*a) - f64::from(*b)).abs() }
    });
    differences.fold(0.0, larger)
}

impl Checkpoint {
    /// Lists all problems in the checkpoint: tensors that do not match, and NaN or infinite values.
    ///
    /// `progress` receives the number of bytes read since its last call, and can interrupt the check.
    ///
    /// # Errors
    /// If a tensor cannot be read; [`WeightsError::Interrupted`] if `progress` requests it.
    pub fn verify(&self, progress: &dyn ReadProgress) -> Result<Vec<Problem>, WeightsError> {
        let mut problems: Vec<_> = self.naming.mismatches.iter().cloned().map(Problem::Mismatch).collect();
        for (index, stored) in self.parameter_tensors() {
            if let Some(Statistics { nan, infinite, .. }) = self.statistics(index, progress)?
                && nan + infinite > 0
            {
                let (name, elements) = (stored.name.clone(), stored.element_count());
                problems.push(Problem::NotFinite { name, nan, infinite, elements });
            }
        }
        Ok(problems)
    }

    /// Computes statistics for the tensor at `index` in [`Checkpoint::tensors`].
    ///
    /// Returns `None` if its dtype cannot hold weights. `progress` receives the number of bytes read, and can
    /// interrupt the computation.
    ///
    /// # Errors
    /// If the tensor cannot be read; [`WeightsError::Interrupted`] if `progress` requests it.
    pub fn statistics(
        &self,
        index: usize,
        progress: &dyn ReadProgress,
    ) -> Result<Option<Statistics>, WeightsError> {
        let Some(stored) = self.source.tensors.get(index) else { return Ok(None) };
        check_interrupted(progress)?;
        if !stored.dtype.holds_weights() {
            progress.advance(stored.stored_bytes());
            return Ok(None);
        }
        Statistics::of(stored, &self.source.files, progress).map(Some)
    }
}
