//! What the values of tensors look like, and how two checkpoints differ.

use candle_core::{Device, Tensor};
use gpt2::expected_parameters;
use serde::Serialize;

use crate::{Checkpoint, WeightsError};

/// The values of one tensor in numbers. Minimum, maximum, mean and deviation are those of the finite values.
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
    pub(crate) fn of(values: &[f32]) -> Self {
        let finite = || values.iter().filter(|value| value.is_finite()).map(|value| f64::from(*value));
        let count = finite().count() as f64;
        let mean = finite().sum::<f64>() / count;
        let variance = finite().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
        Self {
            min: finite().fold(f64::INFINITY, f64::min),
            max: finite().fold(f64::NEG_INFINITY, f64::max),
            mean,
            standard_deviation: variance.sqrt(),
            zeros: values.iter().filter(|value| **value == 0.0).count(),
            nan: values.iter().filter(|value| value.is_nan()).count(),
            infinite: values.iter().filter(|value| value.is_infinite()).count(),
        }
    }
}

/// How one parameter differs between two checkpoints.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// The parameter's name, as the model has it.
    pub name: String,
    /// What the difference is.
    pub kind: DifferenceKind,
}

/// The kinds of difference.
#[derive(Debug, Clone, PartialEq)]
pub enum DifferenceKind {
    /// Only the first checkpoint has the parameter.
    OnlyInFirst,
    /// Only the second checkpoint has the parameter.
    OnlyInSecond,
    /// The shapes differ, given `(out, in)`.
    Shape(Vec<usize>, Vec<usize>),
    /// The largest absolute difference of two values; NaN where one of them is.
    Values(f64),
}

/// Compares two checkpoints parameter by parameter, whatever their formats, in the order of the model; parameters that
/// are equal are left out.
///
/// # Errors
/// When a tensor cannot be read.
pub fn differences(
    first: &Checkpoint,
    second: &Checkpoint,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Vec<Difference>, WeightsError> {
    let names = |checkpoint: &Checkpoint| -> Vec<String> {
        expected_parameters(checkpoint.config()).into_iter().map(|parameter| parameter.name).collect()
    };
    let mut in_order = names(first);
    let after: Vec<String> = names(second).into_iter().filter(|name| !in_order.contains(name)).collect();
    in_order.extend(after);
    let mut differences = Vec::new();
    for name in in_order {
        let read = |checkpoint: &Checkpoint| checkpoint.parameter(&name, &Device::Cpu, progress);
        let kind = match (read(first)?, read(second)?) {
            (None, None) => continue,
            (Some(_), None) => DifferenceKind::OnlyInFirst,
            (None, Some(_)) => DifferenceKind::OnlyInSecond,
            (Some(a), Some(b)) if a.dims() != b.dims() => {
                DifferenceKind::Shape(a.dims().to_vec(), b.dims().to_vec())
            }
            (Some(a), Some(b)) => match largest_difference(&a, &b)? {
                0.0 => continue,
                largest => DifferenceKind::Values(largest),
            },
        };
        differences.push(Difference { name, kind });
    }
    Ok(differences)
}

fn largest_difference(first: &Tensor, second: &Tensor) -> Result<f64, WeightsError> {
    let (first, second) = (first.flatten_all()?.to_vec1::<f32>()?, second.flatten_all()?.to_vec1::<f32>()?);
    let mut largest = 0.0;
    for (a, b) in first.iter().zip(&second) {
        // Equal values include equal infinities, whose difference is not a number.
        let difference = if a == b { 0.0 } else { (f64::from(*a) - f64::from(*b)).abs() };
        if difference.is_nan() {
            return Ok(f64::NAN);
        }
        largest = f64::max(largest, difference);
    }
    Ok(largest)
}
