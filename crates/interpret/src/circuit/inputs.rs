//! The inputs of destinations, each for itself: in a model all heads of a layer read one residual stream, in the graph every edge is one
//! term of the sum that one destination reads.

use std::collections::BTreeMap;

use candle_core::{DType, Result, Tensor};
use candle_gpt2::{Block, Gpt2LMHeadModel, MultiHeadAttention, Observer, QkvProjection, Site, SiteKind};
use candle_gpt2_kernels::LayerNorm;

use super::graph::{Circuit, Row};
use crate::Record;

/// The kinds of places at which heads read.
const PARTS: [SiteKind; 3] = [SiteKind::Q, SiteKind::K, SiteKind::V];

/// The places at which [`written`] looks.
pub(super) fn places_of_sources(n_layer: usize) -> impl Iterator<Item = Site> {
    let of_layer = |layer| [SiteKind::Z, SiteKind::MlpOut].map(|kind| Site::in_block(layer, kind));
    std::iter::once(Site::outside(SiteKind::Embed)).chain((0..n_layer).flat_map(of_layer))
}

/// What every source writes, `(sources, B, T, C)`, from a record of [`places_of_sources`].
pub(super) fn written(model: &Gpt2LMHeadModel, record: &Record) -> Result<Tensor> {
    let written =
        places_of_sources(model.config().n_layer).map(|site| of_source(model, site, record.get(site)?));
    Tensor::cat(&written.collect::<Result<Vec<_>>>()?, 0)
}

/// What the sources write that are seen at a place, `(k, B, T, C)`.
fn of_source(model: &Gpt2LMHeadModel, site: Site, value: &Tensor) -> Result<Tensor> {
    let value = match (site.kind, site.layer) {
        (SiteKind::Z, Some(layer)) => {
            let results = block(model, layer)?.attn().results(&value.flatten_from(2)?)?; // (B, T, H, C)
            results.permute((2, 0, 1, 3))?
        }
        _ => value.unsqueeze(0)?,
    };
    value.to_dtype(DType::F32)?.contiguous()
}

fn block(model: &Gpt2LMHeadModel, layer: usize) -> Result<&Block> {
    let no_block = || candle_core::Error::Msg(format!("the model has no block {layer}"));
    model.transformer().blocks().get(layer).ok_or_else(no_block)
}

/// Weights and biases of a layer's queries, keys and values, head by head: `(3 H, D, C)` and `(3 H, 1, D)`.
fn projections(attn: &MultiHeadAttention) -> Result<(Tensor, Option<Tensor>)> {
    let layers = match attn.projection() {
        QkvProjection::Fused(layer) => vec![layer],
        QkvProjection::Separate { query, key, value } => vec![query, key, value],
        QkvProjection::FusedMemory { query, key_value } => vec![query, key_value],
    };
    let (parts, width) = (PARTS.len() * attn.num_heads(), attn.head_dim());
    let weights = layers.iter().map(|layer| layer.weight().to_tensor()?.to_dtype(DType::F32));
    let weight = Tensor::cat(&weights.collect::<Result<Vec<_>>>()?, 0)?; // (3 H D, C)
    let weight = weight.reshape((parts, width, ()))?;
    let biases: Option<Vec<&Tensor>> = layers.iter().map(|layer| layer.bias()).collect();
    let bias = biases.map(|biases| Tensor::cat(&biases, 0)?.to_dtype(DType::F32)?.reshape((parts, 1, width)));
    Ok((weight, bias.transpose()?))
}

/// The way back through a norm of `x` `(B, T, C)`: from gradients of its output, `(k, B, T, C)`, to those of its input.
fn through_norm(norm: &LayerNorm, x: &Tensor, gradients: &Tensor) -> Result<Tensor> {
    let (centered, scale) = norm.centered(&x.to_dtype(DType::F32)?)?;
    let normalized = centered.broadcast_div(&scale)?;
    let gradients = gradients.broadcast_mul(&norm.weight().to_dtype(DType::F32)?)?;
    let along = gradients.broadcast_mul(&normalized)?.mean_keepdim(3)?;
    let gradients = gradients.broadcast_sub(&gradients.mean_keepdim(3)?)?;
    (gradients - along.broadcast_mul(&normalized)?)?.broadcast_div(&scale)
}

/// The gradients with regard to what the heads of a layer read, `(3 H, B, T, C)`, from those at their queries, keys and values.
pub(super) fn into_heads(
    model: &Gpt2LMHeadModel,
    layer: usize,
    residual: &Tensor,
    gradients: [&Tensor; 3],
) -> Result<Tensor> {
    let block = block(model, layer)?;
    let (batch, tokens, width) = residual.dims3()?;
    let (weight, _) = projections(block.attn())?;
    let by_head = gradients.map(|gradient| gradient.to_dtype(DType::F32)?.flatten(0, 1)?.transpose(0, 1)); // (H, B · T, D)
    let by_head = Tensor::cat(&by_head.into_iter().collect::<Result<Vec<_>>>()?, 0)?;
    let normed = by_head.matmul(&weight)?.reshape(((), batch, tokens, width))?;
    through_norm(block.ln_1(), residual, &normed)
}

/// The gradient with regard to what an MLP reads, `(1, B, T, C)`, from that at the input of its activation function.
pub(super) fn into_mlp(
    model: &Gpt2LMHeadModel,
    layer: usize,
    residual: &Tensor,
    gradient: &Tensor,
) -> Result<Tensor> {
    let block = block(model, layer)?;
    let weight = block.mlp().expand().weight().to_tensor()?.to_dtype(DType::F32)?; // (inner, C)
    let gradient = gradient.to_dtype(DType::F32)?;
    let normed = gradient.flatten(0, 1)?.matmul(&weight)?.reshape(residual.shape())?;
    through_norm(block.ln_2(), residual, &normed.unsqueeze(0)?)
}

/// Adds up the scores of the edges of some rows, which all begin at as many sources: products of gradients `(rows, B, T, C)` and what the
/// sources write in the corrupted run less what they write in the clean one, `(sources, B, T, C)`.
pub(super) fn add_scores(
    sums: &mut [f64],
    rows: &[Row],
    gradients: &Tensor,
    differences: &Tensor,
    indicators: &[Option<Tensor>],
) -> Result<()> {
    let Some(count) = rows.first().map(|row| row.edges.len()) else { return Ok(()) };
    let gradients = gradients.to_dtype(DType::F32)?.flatten_from(1)?;
    let of_each = sums.len() / indicators.len();
    for (indicator, sums) in indicators.iter().zip(sums.chunks_mut(of_each)) {
        let differences = at(indicator.as_ref(), &differences.narrow(0, 0, count)?)?;
        let products = gradients.matmul(&differences.flatten_from(1)?.t()?)?.to_vec2::<f32>()?;
        for (row, products) in rows.iter().zip(products) {
            for (sum, product) in sums[row.edges.clone()].iter_mut().zip(products) {
                *sum += f64::from(product);
            }
        }
    }
    Ok(())
}

/// The values at the positions of a span, and zeros elsewhere.
fn at(indicator: Option<&Tensor>, values: &Tensor) -> Result<Tensor> {
    indicator.map_or_else(|| Ok(values.clone()), |indicator| values.broadcast_mul(indicator))
}

/// Runs a circuit: each destination reads the residual stream of the pass, and for every edge that is left out what the source writes in
/// the corrupted run in place of what it writes in this one.
pub(super) struct Partial<'a> {
    pub(super) model: &'a Gpt2LMHeadModel,
    pub(super) circuit: &'a Circuit,
    /// Of each span 1 at its positions, `(T, 1)`; `None` if it is all of them.
    pub(super) indicators: &'a [Option<Tensor>],
    /// What the sources write in the corrupted run, `(sources, B, T, C)`.
    pub(super) corrupted: &'a Tensor,
    /// What they write there less what they write here, as far as the pass is.
    differences: Vec<Tensor>,
    seen: usize,
    /// What is put in the places that come next.
    waiting: BTreeMap<Site, Tensor>,
}

impl<'a> Partial<'a> {
    pub(super) fn new(
        model: &'a Gpt2LMHeadModel,
        circuit: &'a Circuit,
        indicators: &'a [Option<Tensor>],
        corrupted: &'a Tensor,
    ) -> Self {
        let (differences, waiting) = (Vec::new(), BTreeMap::new());
        Self { model, circuit, indicators, corrupted, differences, seen: 0, waiting }
    }

    /// What some destinations read, `(rows, B, T, C)`; `None` if it is what the model has there.
    fn inputs(&self, residual: &Tensor, rows: &[Row]) -> Result<Option<Tensor>> {
        let count = rows.first().map_or(0, |row| row.edges.len());
        let differences = Tensor::cat(&self.differences, 0)?.narrow(0, 0, count)?;
        let mut sum: Option<Tensor> = None;
        for (span, indicator) in self.indicators.iter().enumerate() {
            let Some(mask) = self.circuit.left_out(span, rows) else { continue };
            let mask = Tensor::from_vec(mask, (rows.len(), count), residual.device())?;
            let added = mask.matmul(&at(indicator.as_ref(), &differences)?.flatten_from(1)?)?;
            sum = Some(match sum {
                Some(sum) => (sum + added)?,
                None => added,
            });
        }
        let Some(sum) = sum else { return Ok(None) };
        let residual = residual.to_dtype(DType::F32)?.unsqueeze(0)?;
        let shape = [&[rows.len()], &residual.dims()[1..]].concat();
        sum.reshape(shape)?.broadcast_add(&residual).map(Some)
    }

    /// Computes queries, keys and values of a layer, each head's from its own input.
    fn await_heads(&mut self, layer: usize, residual: &Tensor) -> Result<()> {
        let Some(inputs) = self.inputs(residual, &self.circuit.graph().rows_of_heads(layer))? else {
            return Ok(());
        };
        let block = block(self.model, layer)?;
        let (weight, bias) = projections(block.attn())?;
        let dtype = residual.dtype();
        let (_, batch, tokens, _) = inputs.dims4()?;
        let normed = block.ln_1().forward(&inputs.to_dtype(dtype)?)?.to_dtype(DType::F32)?;
        let parts = normed.flatten(1, 2)?.matmul(&weight.transpose(1, 2)?)?; // (3 H, B · T, D)
        let parts = match bias {
            Some(bias) => parts.broadcast_add(&bias)?,
            None => parts,
        };
        let heads = block.attn().num_heads();
        for (place, kind) in PARTS.into_iter().enumerate() {
            let part = parts.narrow(0, place * heads, heads)?.transpose(0, 1)?.contiguous()?;
            let part = part.reshape((batch, tokens, heads, ()))?.to_dtype(dtype)?;
            self.waiting.insert(Site::in_block(layer, kind), part);
        }
        Ok(())
    }

    /// Computes the input of an MLP's activation function.
    fn await_mlp(&mut self, layer: usize, residual: &Tensor) -> Result<()> {
        let row = self.circuit.graph().row_of_mlp(layer);
        if let Some(inputs) = self.inputs(residual, &[row])? {
            let block = block(self.model, layer)?;
            let normed = block.ln_2().forward(&inputs.squeeze(0)?.to_dtype(residual.dtype())?)?;
            let expanded = block.mlp().expand().forward(&normed)?;
            self.waiting.insert(Site::in_block(layer, SiteKind::MlpPre), expanded);
        }
        Ok(())
    }
}

impl Observer for Partial<'_> {
    fn wants(&self, site: Site) -> bool {
        let last = self.model.config().n_layer.checked_sub(1);
        match site.kind {
            SiteKind::ResidPost => site.layer == last,
            SiteKind::Embed
            | SiteKind::ResidPre
            | SiteKind::Q
            | SiteKind::K
            | SiteKind::V
            | SiteKind::Z
            | SiteKind::ResidMid
            | SiteKind::MlpPre
            | SiteKind::MlpOut => true,
            _ => false,
        }
    }

    fn observe(&mut self, site: Site, value: Tensor) -> Result<Tensor> {
        match (site.kind, site.layer) {
            (SiteKind::Embed | SiteKind::Z | SiteKind::MlpOut, _) => {
                let here = of_source(self.model, site, &value)?;
                let there = self.corrupted.narrow(0, self.seen, here.dim(0)?)?;
                self.seen += here.dim(0)?;
                self.differences.push((there - here)?);
            }
            (SiteKind::ResidPre, Some(layer)) => self.await_heads(layer, &value)?,
            (SiteKind::ResidMid, Some(layer)) => self.await_mlp(layer, &value)?,
            (SiteKind::ResidPost, _) => {
                let inputs = self.inputs(&value, &[self.circuit.graph().row_of_logits()])?;
                if let Some(inputs) = inputs {
                    return inputs.squeeze(0)?.to_dtype(value.dtype());
                }
            }
            _ => return Ok(self.waiting.remove(&site).unwrap_or(value)),
        }
        Ok(value)
    }
}
