//! Attention patterns of chosen heads, as reports and programs take them.

use candle_core::{DType, Result};
use candle_gpt2::{Site, SiteKind};

use crate::{Head, Record};

/// The attention weights of some heads of a text.
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
    /// The layers that heads were chosen of.
    pub layers: Vec<usize>,
    /// The numbers of heads that were chosen in any layer.
    pub heads: Vec<usize>,
    /// Weights in the order layer, head, query, key, the last one fastest; `None` for keys after their query and for heads that
    /// were not chosen.
    pub values: Vec<Option<f32>>,
}

impl Patterns {
    /// The places that a record needs for these heads.
    pub fn sites(heads: &[Head]) -> Vec<Site> {
        sorted(heads, |head| head.layer).into_iter().map(site).collect()
    }

    /// The patterns of these heads in a record of [`Patterns::sites`], which is used up layer by layer.
    ///
    /// # Errors
    /// When a layer was not recorded, or has no such head.
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

/// The weights of a query over the keys that it sees.
fn seen((query, row): (usize, &Vec<f32>)) -> impl Iterator<Item = Option<f32>> {
    row.iter().enumerate().map(move |(key, weight)| (key <= query).then_some(*weight))
}
