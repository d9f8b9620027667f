//! Values of hook points that are at hand, in an order that the seed decides: what a dictionary learns from without a model.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Device, Result, Tensor};
use candle_gpt2::{Gpt2Model, Pass};

use crate::streams::{Permutation, Stream};
use crate::{Data, Examples, TrainingError};

/// Values of two hook points, one read and one written, for many tokens, by several threads at once. [`ActivationRows`] are made of it.
pub trait RowValues: Send + Sync {
    /// How many tokens there are.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values of these tokens, which are below [`RowValues::len`], `(N, C)` and `(N, D)`; of a cross-layer transcoder block after
    /// block, `(L · N, C)` each.
    ///
    /// # Errors
    /// When there is no memory for them.
    fn read(&self, rows: &[usize]) -> Result<[Tensor; 2]>;
}

/// All tokens of such values, epoch after epoch, each epoch in an order of its own. An example is so many of them.
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
/// assert_eq!(epoch.sum_all()?.to_scalar::<f32>()?, 45., "every token once");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ActivationRows {
    values: Arc<dyn RowValues>,
    per_example: usize,
    seed: u64,
    /// The order of the epoch that was asked for last.
    order: Mutex<Option<(u64, Permutation)>>,
}

impl ActivationRows {
    /// The tokens of `values` in examples of so many, in the orders of `seed`.
    ///
    /// # Errors
    /// When there are fewer than one example has.
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
            let made = match order.take().filter(|(of, _)| *of == epoch) {
                Some((_, made)) => made,
                None => Permutation::new(tokens, &mut Stream::Epoch(epoch).generator(self.seed)),
            };
            // Below the number of tokens.
            rows.push(usize::try_from(made.at(place)).unwrap_or_default());
            *order = Some((epoch, made));
        }
        Box::new(Rows { values: Arc::clone(&self.values), rows })
    }

    fn tokens(&self, _: u64, count: usize) -> usize {
        count * self.per_example
    }
}

/// Some tokens.
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
        candle_core::bail!("values of hook points have no tokens that a model could read")
    }
}
