//! Statistics of tensors, and how two checkpoints differ.

use candle_core::{Device, Tensor};
use candle_gpt2::expected_parameters;
use serde::Serialize;

use crate::checkpoint_file::CheckpointFile;
use crate::progress::{PIECE, check_interrupted};
use crate::stored::StoredTensor;
use crate::{Checkpoint, Problem, ReadProgress, WeightsError};

/// The values of one tensor in numbers. Minimum, maximum, mean and deviation are those of the finite values.
/// [`Checkpoint::statistics`] gives them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Statistics {
    /// Smallest value.
    pub min: f64,
    /// Largest value.
    pub max: f64,
    /// Mean.
    pub mean: f64,
    /// Standard deviation, over all values (not a sample's).
    pub standard_deviation: f64,
    /// Values that are exactly zero.
    pub zeros: usize,
    /// Values that are NaN.
    pub nan: usize,
    /// Values that are infinite.
    pub infinite: usize,
}

impl Statistics {
    /// Those of a tensor that is read in pieces, and twice: for the mean, and for the deviation from it.
    pub(crate) fn of(
        stored: &StoredTensor,
        files: &[CheckpointFile],
        progress: &dyn ReadProgress,
    ) -> Result<Self, WeightsError> {
        let [mut min, mut max] = [f64::INFINITY, f64::NEG_INFINITY];
        let [mut zeros, mut nan, mut infinite, mut count] = [0; 4];
        // The neutral element of addition is -0: tensors of nothing but -0 keep their sign.
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

/// How one parameter differs between two checkpoints. [`differences`] lists them.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// The parameter's name, as the model has it.
    pub name: String,
    /// What the difference is.
    pub kind: DifferenceKind,
}

/// The kinds of difference. [`differences`] lists them.
#[derive(Debug, Clone, PartialEq)]
pub enum DifferenceKind {
    /// Only the first checkpoint has the parameter.
    OnlyInFirst,
    /// Only the second checkpoint has the parameter.
    OnlyInSecond,
    /// The shapes differ, given `(out, in)`.
    Shape(Vec<usize>, Vec<usize>),
    /// The largest absolute difference of two values; NaN if one of them is.
    Values(f64),
}

/// Compares two checkpoints parameter by parameter, whatever their formats, in the order of the model; parameters that
/// are equal are left out. `progress` receives the number of bytes of both read, and may end it.
///
/// ```
/// use candle_gpt2_weights::{Checkpoint, GivenFiles, OpenOptions, differences};
///
/// let files = GivenFiles::new("stories")
///     .with_bytes("config.json", candle_gpt2_stories::CONFIG)
///     .with_bytes("model.safetensors", candle_gpt2_stories::WEIGHTS);
/// let first = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
/// assert!(differences(&first, &first, &|_| ())?.is_empty());
/// # Ok::<(), candle_gpt2_weights::WeightsError>(())
/// ```
///
/// # Errors
/// When a tensor cannot be read; [`WeightsError::Interrupted`] if `progress` says so.
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
        // Where both lie alike in their files no whole tensor is held: an embedding is large.
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

/// Tensors of one shape, a piece of each at a time.
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
            let piece = piece.ok_or_else(|| candle_core::Error::Msg("rows that cannot be cut".into()))?;
            progress.advance(piece.stored_bytes());
            piece.values(&checkpoint.source.files)
        };
        let [first, second] = tensors;
        largest = larger(largest, largest_difference(&read(first)?, &read(second)?));
    }
    Ok(largest)
}

/// The larger of two numbers; NaN if one of them is.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

fn largest_difference(first: &[f32], second: &[f32]) -> f64 {
    let differences = first.iter().zip(second).map(|(a, b)| {
        // Equal values include equal infinities, whose difference is not a number.
        if a == b { 0.0 } else { (f64::from(*a) - f64::from(*b)).abs() }
    });
    differences.fold(0.0, larger)
}

impl Checkpoint {
    /// Everything that is wrong with the checkpoint: tensors that do not fit, and values that are not finite.
    /// `progress` receives the number of bytes of the file read since the last call, and may end it.
    ///
    /// # Errors
    /// When a tensor cannot be read; [`WeightsError::Interrupted`] if `progress` says so.
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

    /// The values of the tensor with index `index` in [`Checkpoint::tensors`], in numbers; `None` if its type holds no
    /// weights. `progress` receives the number of the tensor's bytes, and may end it.
    ///
    /// # Errors
    /// When the tensor cannot be read; [`WeightsError::Interrupted`] if `progress` says so.
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
