//! Precomputed activations in a seeded order, for training a dictionary without running a model.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Device, Result, Tensor};
use candle_gpt2::{Gpt2Model, Pass};

use crate::streams::{Permutation, Stream};
use crate::{Data, Examples, TrainingError};

/// Random access to the activations of many tokens, at an input and an output hook point.
///
/// Several threads may read at the same time. [`ActivationRows`] uses it.
pub trait RowValues: Send + Sync {
    /// Number of tokens.
    fn len(&self) -> usize;

    /// Whether there are no tokens.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads the activations of the tokens with these indices, `(N, C)` and `(N, D)`.
    ///
    /// The indices are below [`RowValues::len`]. For a cross-layer transcoder, the activations of all blocks are
    /// concatenated, `(L · N, C)` each.
    ///
    /// # Errors
    /// If allocation fails.
    fn read(&self, rows: &[usize]) -> Result<[Tensor; 2]>;
}

/// All tokens of a [`RowValues`], shuffled anew in every epoch; an example is a fixed number of tokens.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_training::{ActivationRows, Data, RowValues};
///
/// struct Numbers;
///
/// impl RowValues for Numbers {
///     fn len(&self) -> usize {
///         10
///     }
///
///     fn read(&self, rows: &[usize]) -> candle_core::Result<[Tensor; 2]> {
///         let values: Vec<f32> = rows.iter().map(|row| *row as f32).collect();
///         let x = Tensor::from_vec(values, (rows.len(), 1), &Device::Cpu)?;
///         Ok([x.clone(), x])
///     }
/// }
///
/// let rows = ActivationRows::new(Numbers, 5, 1)?;
/// let [epoch, _] = rows.examples(0, 2).activations()?.unwrap();
/// assert_eq!(epoch.sum_all()?.to_scalar::<f32>()?, 45., "each token once per epoch");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ActivationRows {
    values: Arc<dyn RowValues>,
    per_example: usize,
    seed: u64,
    /// Order of the most recently used epoch.
    order: Mutex<Option<(u64, Permutation)>>,
}

impl ActivationRows {
    /// Creates a data set with `per_example` tokens per example, in an order determined by `seed`.
    ///
    /// # Errors
    /// If there are fewer tokens than one example needs, or fewer than two.
    pub fn new(
        values: impl RowValues + 'static,
        per_example: usize,
        seed: u64,
    ) -> std::result::Result<Self, TrainingError> {
        let (found, needed) = (values.len(), per_example.max(2));
        if found < needed {
            return Err(TrainingError::TooFewTokens { part: "training", found, needed });
        }
        Ok(Self { values: Arc::new(values), per_example, seed, order: Mutex::new(None) })
    }
}

impl Data for ActivationRows {
    fn examples(&self, first: u64, count: usize) -> Box<dyn Examples> {
        let tokens = self.values.len() as u64;
        let start = first * self.per_example as u64;
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rows = Vec::with_capacity(count * self.per_example);
        for index in start..start + (count * self.per_example) as u64 {
            let (epoch, place) = (index / tokens, index % tokens);
            let permutation = match order.take().filter(|(of, _)| *of == epoch) {
                Some((_, permutation)) => permutation,
                None => Permutation::new(tokens, &mut Stream::Epoch(epoch).generator(self.seed)),
            };
            // The result is less than the number of tokens.
            rows.push(usize::try_from(permutation.at(place)).unwrap_or_default());
            *order = Some((epoch, permutation));
        }
        Box::new(Rows { values: Arc::clone(&self.values), rows })
    }

    fn tokens(&self, _: u64, count: usize) -> usize {
        count * self.per_example
    }
}

/// Selected tokens.
struct Rows {
    values: Arc<dyn RowValues>,
    rows: Vec<usize>,
}

impl Examples for Rows {
    fn targets(&self) -> &[u32] {
        &[]
    }

    fn activations(&self) -> Result<Option<[Tensor; 2]>> {
        self.values.read(&self.rows).map(Some)
    }

    fn hidden_states(&self, _: &Gpt2Model, _: &Device, _: &mut Pass) -> Result<Tensor> {
        candle_core::bail!("precomputed activations have no tokens for the model to read")
    }
}
