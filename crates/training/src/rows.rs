//! Rows of different lengths as training data, packed without padding and independent of each other.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Device, Result, Tensor};
use candle_gpt2::{Gpt2Model, Pass};

use crate::streams::{Stream, shuffle};
use crate::{Data, Examples};

/// Input tokens, with targets for the last ones. A [`RowSet`] contains rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Token IDs, at least one.
    pub inputs: Arc<[u32]>,
    /// Targets for the last tokens: IDs of next tokens, or a label.
    ///
    /// There is at least one, and at most one per input token.
    pub targets: Arc<[u32]>,
}

/// Rows that are computed in one pass, returned by [`RowSet::batches`].
#[derive(Debug, Clone, PartialEq)]
pub struct Rows {
    inputs: Vec<Arc<[u32]>>,
    targets: Vec<u32>,
    /// Index of each target's token among the tokens of all rows.
    places: Vec<u32>,
    weights: Option<Vec<f32>>,
}

/// All training rows, shuffled anew in every epoch, in an order determined by the seed.
///
/// ```
/// use candle_gpt2_training::{Data, Row, RowSet};
///
/// let row = |inputs: &[u32], label: u32| Row { inputs: inputs.into(), targets: [label].into() };
/// let rows = RowSet::new(vec![row(&[1, 2, 3], 0), row(&[4, 5], 1)], None, 7);
/// assert_eq!(rows.token_count(), 5);
/// assert_eq!(rows.examples(0, 2).targets().len(), 2, "an epoch contains each row once");
/// ```
pub struct RowSet {
    rows: Vec<Row>,
    label_weights: Option<Vec<f32>>,
    seed: u64,
    /// Most recently used epoch and its order; all batches of the epoch share it.
    order: Mutex<(Option<u64>, Vec<usize>)>,
}

impl Rows {
    /// Packs rows; `label_weights`, if present, has the loss weight of each label.
    pub fn new<'a>(rows: impl IntoIterator<Item = &'a Row>, label_weights: Option<&[f32]>) -> Self {
        let (mut inputs, mut targets, mut places) = (Vec::new(), Vec::new(), Vec::new());
        let mut tokens: u32 = 0;
        for row in rows {
            // A pass has far fewer tokens than 2^32.
            let count = |ids: &[u32]| u32::try_from(ids.len()).unwrap_or(u32::MAX);
            tokens += count(&row.inputs);
            places.extend(tokens - count(&row.targets)..tokens);
            targets.extend_from_slice(&row.targets);
            inputs.push(Arc::clone(&row.inputs));
        }
        let weights = label_weights.map(|weights| {
            let weight = |target: &u32| usize::try_from(*target).ok().and_then(|target| weights.get(target));
            targets.iter().map(|target| weight(target).copied().unwrap_or(1.0)).collect()
        });
        Self { inputs, targets, places, weights }
    }
}

impl Examples for Rows {
    fn targets(&self) -> &[u32] {
        &self.targets
    }

    fn weights(&self) -> Option<&[f32]> {
        self.weights.as_deref()
    }

    fn hidden_states(&self, model: &Gpt2Model, device: &Device, pass: &mut Pass) -> Result<Tensor> {
        let hidden = model.forward_rows(&self.inputs, pass)?.squeeze(0)?; // (T_1 + … + T_R, C)
        let places = Tensor::from_slice(&self.places, self.places.len(), device)?;
        hidden.index_select(&places, 0) // (N, C)
    }
}

impl RowSet {
    /// Creates a set of at least one row; `label_weights`, if present, has the loss weight of each label.
    pub fn new(rows: Vec<Row>, label_weights: Option<Vec<f32>>, seed: u64) -> Self {
        Self { rows, label_weights, seed, order: Mutex::default() }
    }

    /// Rows in their original order.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Returns the rows in batches of `batch_size`, in their original order.
    pub fn batches(&self, batch_size: usize) -> impl Iterator<Item = Rows> {
        self.rows.chunks(batch_size.max(1)).map(|rows| Rows::new(rows, self.label_weights.as_deref()))
    }

    /// Number of tokens in all rows.
    pub fn token_count(&self) -> usize {
        self.rows.iter().map(|row| row.inputs.len()).sum()
    }

    /// Returns the rows `first..first + count`, numbered consecutively over all epochs.
    fn ordered(&self, first: u64, count: usize) -> Vec<&Row> {
        let per_epoch = self.rows.len().max(1) as u64;
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let row = |index: u64| {
            let (epoch, place) = (index / per_epoch, index % per_epoch);
            if order.0 != Some(epoch) {
                let mut rows: Vec<usize> = (0..self.rows.len()).collect();
                shuffle(&mut rows, &mut Stream::Epoch(epoch).generator(self.seed));
                *order = (Some(epoch), rows);
            }
            let place = usize::try_from(place).ok()?;
            self.rows.get(*order.1.get(place)?)
        };
        (first..first + count as u64).filter_map(row).collect()
    }
}

impl Data for RowSet {
    fn examples(&self, first: u64, count: usize) -> Box<dyn Examples> {
        Box::new(Rows::new(self.ordered(first, count), self.label_weights.as_deref()))
    }

    fn tokens(&self, first: u64, count: usize) -> usize {
        self.ordered(first, count).into_iter().map(|row| row.inputs.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(inputs: &[u32], targets: &[u32]) -> Row {
        Row { inputs: inputs.into(), targets: targets.into() }
    }

    #[test]
    fn rows_are_packed_with_targets_of_their_last_tokens() {
        let rows = [row(&[5, 6, 7], &[7, 8]), row(&[9], &[1]), row(&[2, 3], &[0])];
        let batch = Rows::new(&rows, None);
        assert_eq!(batch.places, [1, 2, 3, 5]);
        assert_eq!((batch.targets(), batch.weights(), batch.weight()), (&[7, 8, 1, 0][..], None, 4.0));
        let weighted = Rows::new(&rows[1..], Some(&[0.5, 3.0]));
        assert_eq!((weighted.weights(), weighted.weight()), (Some(&[3.0, 0.5][..]), 3.5));
    }

    #[test]
    fn epoch_contains_every_row_once_in_a_new_order() {
        let rows: Vec<Row> = (0..9).map(|id| row(&[id], &[id])).collect();
        let set = RowSet::new(rows, None, 3);
        let targets = |first, count| set.examples(first, count).targets().to_vec();
        let (mut first, mut second) = (targets(0, 9), targets(9, 9));
        assert_ne!(first, second);
        assert_eq!(
            [&first[7..], &second[..2]].concat(),
            targets(7, 4),
            "a batch crosses into the next epoch"
        );
        first.sort_unstable();
        second.sort_unstable();
        assert_eq!((first, second), ((0..9).collect(), (0..9).collect()));
        let again = RowSet::new(set.rows().to_vec(), None, 3);
        assert_eq!(again.examples(5, 6).targets(), targets(5, 6));
        assert_ne!(RowSet::new(set.rows().to_vec(), None, 4).examples(0, 9).targets(), targets(0, 9));
        assert_eq!(set.tokens(0, 12), 12);
    }
}
