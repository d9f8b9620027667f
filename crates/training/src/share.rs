//! Data-parallel shares: the rows of every batch that each process computes.

use std::ops::Range;

use candle_core::{Device, Result, Tensor};

use crate::{Parameters, TrainingError};

/// One process's equal share of every batch.
///
/// ```
/// use candle_gpt2_training::Share;
///
/// let shares: Vec<_> = (0..3).map(|index| Share { index, count: 3 }.of(7)).collect();
/// assert_eq!(shares.iter().map(|rows| rows.len()).sum::<usize>(), 7);
/// assert_eq!(Share::WHOLE.of(7), 0..7);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Index of the share (rank).
    pub index: usize,
    /// Number of shares (world size), at least 1.
    pub count: usize,
}

impl Share {
    /// Share that contains all rows.
    pub const WHOLE: Self = Self { index: 0, count: 1 };

    /// Validates both numbers.
    ///
    /// # Errors
    /// If `count` is 0, or `index` is not below `count`.
    pub fn check(self) -> std::result::Result<(), TrainingError> {
        let refuse = |option, expected: String, found: usize| {
            Err(TrainingError::OptionOutOfRange { option, expected, found: found.to_string() })
        };
        if self.count == 0 {
            return refuse("world_size", "at least 1".into(), 0);
        }
        if self.index >= self.count {
            return refuse("rank", format!("below the world_size of {}", self.count), self.index);
        }
        Ok(())
    }

    /// Returns the rows of this share in a batch of `rows` rows, possibly none.
    pub fn of(self, rows: usize) -> Range<usize> {
        let count = self.count.max(1);
        rows * self.index / count..rows * (self.index + 1) / count
    }
}

/// Concatenates the values of all gradients.
pub fn flatten(gradients: &[Tensor]) -> Result<Vec<f32>> {
    let mut values = Vec::with_capacity(gradients.iter().map(Tensor::elem_count).sum());
    for gradient in gradients {
        let gradient = gradient.detach().to_device(&Device::Cpu)?.flatten_all()?;
        values.extend(gradient.to_vec1::<f32>()?);
    }
    Ok(values)
}

/// Splits concatenated values into one gradient per parameter.
pub fn split(values: &[f32], parameters: &Parameters) -> std::result::Result<Vec<Tensor>, TrainingError> {
    if values.len() != parameters.count() {
        let expected = format!("{} values, one for each trained weight", parameters.count());
        let found = values.len().to_string();
        return Err(TrainingError::OptionOutOfRange { option: "gradients", expected, found });
    }
    let mut rest = values;
    let mut gradients = Vec::new();
    for (_, parameter) in parameters.iter() {
        let (values, after) = rest.split_at(parameter.elem_count());
        gradients.push(Tensor::from_slice(values, parameter.shape(), parameter.device())?);
        rest = after;
    }
    Ok(gradients)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_partition_the_rows() {
        for (rows, count, expected) in [
            (8, 1, vec![(0, 8)]),
            (8, 3, vec![(0, 2), (2, 5), (5, 8)]),
            (2, 4, vec![(0, 0), (0, 1), (1, 1), (1, 2)]),
            (0, 2, vec![(0, 0), (0, 0)]),
        ] {
            let share = |index| Share { index, count }.of(rows);
            let found: Vec<_> = (0..count).map(share).map(|rows| (rows.start, rows.end)).collect();
            assert_eq!(found, expected, "{rows} rows in {count}");
        }
        assert!(Share::WHOLE.check().is_ok());
        for (index, count, expected) in
            [(0, 0, "world_size"), (3, 3, "`rank`: expected below the world_size of 3")]
        {
            let error = Share { index, count }.check().unwrap_err();
            assert!(error.is_usage() && error.to_string().contains(expected), "{error}");
        }
    }
}
