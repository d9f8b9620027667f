//! Attention patterns of selected heads, for reports and programs.

use candle_core::{DType, Result};
use candle_gpt2::{Site, SiteKind};

use crate::{Head, Record};

/// Attention weights of selected heads for one sequence.
///
/// ```
/// use candle_gpt2_interpret::{Head, Patterns, Run};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let heads = [Head { layer: 1, head: 2 }];
/// let record = Run::new(&model, &[1, 2, 3, 4])?.record(Patterns::sites(&heads))?;
/// let patterns = Patterns::of(record, &heads)?;
/// assert_eq!((patterns.layers, patterns.heads), (vec![1], vec![2]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Patterns {
    /// Layers with at least one selected head.
    pub layers: Vec<usize>,
    /// Head indices that are selected in at least one layer.
    pub heads: Vec<usize>,
    /// Weights in the order layer, head, query, key, with the key varying fastest.
    ///
    /// `None` marks keys after their query, and heads that are not selected.
    pub values: Vec<Option<f32>>,
}

impl Patterns {
    /// Returns the hook points that a record needs for these heads.
    pub fn sites(heads: &[Head]) -> Vec<Site> {
        sorted(heads, |head| head.layer).into_iter().map(site).collect()
    }

    /// Extracts the patterns of these heads, dropping each layer of the record after use.
    ///
    /// The record must contain [`Patterns::sites`].
    ///
    /// # Errors
    /// If a layer was not recorded, or if a head index is out of range.
    pub fn of(mut record: Record, heads: &[Head]) -> Result<Self> {
        let (layers, columns) = (sorted(heads, |head| head.layer), sorted(heads, |head| head.head));
        let mut values = Vec::new();
        for layer in &layers {
            let pattern = record.get(site(*layer))?.squeeze(0)?.to_dtype(DType::F32)?; // (H, T, T)
            record.values.remove(&site(*layer));
            let (_, tokens, _) = pattern.dims3()?;
            values.reserve(columns.len() * tokens * tokens);
            for head in &columns {
                if heads.contains(&Head { layer: *layer, head: *head }) {
                    let rows = pattern.get(*head)?.to_vec2::<f32>()?;
                    values.extend(rows.iter().enumerate().flat_map(seen));
                } else {
                    values.extend(std::iter::repeat_n(None, tokens * tokens));
                }
            }
        }
        Ok(Self { layers, heads: columns, values })
    }
}

fn site(layer: usize) -> Site {
    Site::in_block(layer, SiteKind::Pattern)
}

fn sorted(heads: &[Head], number: fn(&Head) -> usize) -> Vec<usize> {
    let mut numbers: Vec<usize> = heads.iter().map(number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// A query's weights, with `None` for the keys after the query.
fn seen((query, row): (usize, &Vec<f32>)) -> impl Iterator<Item = Option<f32>> {
    row.iter().enumerate().map(move |(key, weight)| (key <= query).then_some(*weight))
}
