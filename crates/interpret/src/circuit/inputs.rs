//! Separate inputs for each edge destination.
//!
//! In a model, all heads of a layer read one residual stream. In the edge graph, each destination reads its
//! own sum, and every edge is one term of it.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2::{Block, Gpt2LMHeadModel, MultiHeadAttention, Observer, QkvProjection, Site, SiteKind};
use candle_gpt2_kernels::{HeadsAttention, LayerNorm, attention_reference};

use super::graph::{Circuit, EdgeGraph, EdgeSpans, Row};
use crate::Record;

/// Number of projections: queries, keys and values.
const PARTS: usize = 3;
/// Token axis in `(k, B, T, C)` and in `(B, H, T, D)`.
const TOKEN_DIM: usize = 2;

/// Hook points that [`written`] needs.
pub(super) fn places_of_sources(n_layer: usize) -> impl Iterator<Item = Site> {
    let of_layer = |layer| [SiteKind::Z, SiteKind::MlpOut].map(|kind| Site::in_block(layer, kind));
    std::iter::once(Site::outside(SiteKind::Embed)).chain((0..n_layer).flat_map(of_layer))
}

/// Outputs of all sources, `(sources, B, T, C)`; `record` must contain [`places_of_sources`].
pub(super) fn written(model: &Gpt2LMHeadModel, record: &Record) -> Result<Tensor> {
    let written =
        places_of_sources(model.config().n_layer).map(|site| of_source(model, site, record.get(site)?));
    Tensor::cat(&written.collect::<Result<Vec<_>>>()?, 0)
}

/// Outputs of the sources at one hook point, `(k, B, T, C)`.
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

/// Query, key and value weights and biases of a layer, by head: `(3 H, D, C)` and `(3 H, 1, D)`.
fn projections(attn: &MultiHeadAttention) -> Result<(Tensor, Option<Tensor>)> {
    let layers = match attn.projection() {
        QkvProjection::Fused(layer) => vec![layer],
        QkvProjection::Separate { query, key, value } => vec![query, key, value],
        QkvProjection::FusedMemory { query, key_value } => vec![query, key_value],
    };
    let (parts, width) = (PARTS * attn.num_heads(), attn.head_dim());
    let weights = layers.iter().map(|layer| layer.weight().to_tensor()?.to_dtype(DType::F32));
    let weight = Tensor::cat(&weights.collect::<Result<Vec<_>>>()?, 0)?; // (3 H D, C)
    let weight = weight.reshape((parts, width, ()))?;
    let biases: Option<Vec<&Tensor>> = layers.iter().map(|layer| layer.bias()).collect();
    let bias = biases.map(|biases| Tensor::cat(&biases, 0)?.to_dtype(DType::F32)?.reshape((parts, 1, width)));
    Ok((weight, bias.transpose()?))
}

/// Backward pass through a norm of `x` `(B, T, C)`, for output gradients `(k, B, T, C)`.
fn through_norm(norm: &LayerNorm, x: &Tensor, gradients: &Tensor) -> Result<Tensor> {
    let (centered, scale) = norm.centered(&x.to_dtype(DType::F32)?)?;
    let normalized = centered.broadcast_div(&scale)?;
    let gradients = gradients.broadcast_mul(&norm.weight().to_dtype(DType::F32)?)?;
    let along = gradients.broadcast_mul(&normalized)?.mean_keepdim(3)?;
    let gradients = gradients.broadcast_sub(&gradients.mean_keepdim(3)?)?;
    (gradients - along.broadcast_mul(&normalized)?)?.broadcast_div(&scale)
}

/// Maps gradients at a layer's queries, keys and values to gradients at head inputs, `(3 H, B, T, C)`.
pub(super) fn into_heads(
    model: &Gpt2LMHeadModel,
    layer: usize,
    residual: &Tensor,
    gradients: [&Tensor; 3],
) -> Result<Tensor> {
    let block = block(model, layer)?;
    let (batch, tokens, width) = residual.dims3()?;
    let (weight, _) = projections(block.attn())?;
    // (H, B · T, D)
    let by_head = gradients.map(|gradient| gradient.to_dtype(DType::F32)?.flatten(0, 1)?.transpose(0, 1));
    let by_head = Tensor::cat(&by_head.into_iter().collect::<Result<Vec<_>>>()?, 0)?;
    let normed = by_head.matmul(&weight)?.reshape(((), batch, tokens, width))?;
    through_norm(block.ln_1(), residual, &normed)
}

/// Maps the gradient at an MLP's activation to the gradient at the MLP's input, `(1, B, T, C)`.
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

/// Token positions grouped by span.
pub(super) struct Positions {
    spans: Vec<Span>,
    /// Index of each position in the concatenation of all spans; `None` if this is the identity.
    back: Option<Tensor>,
}

/// A span and its positions.
pub(super) struct Span {
    pub(super) span: usize,
    /// Positions in ascending order.
    positions: Vec<usize>,
    /// The positions as a tensor; `None` if the span contains all positions.
    index: Option<Tensor>,
}

impl Positions {
    /// Puts all positions into a single span.
    pub(super) fn whole(tokens: usize) -> Self {
        Self { spans: vec![Span { span: 0, positions: (0..tokens).collect(), index: None }], back: None }
    }

    /// Groups positions by their span indices.
    pub(super) fn of(spans: &[usize], device: &Device) -> Result<Self> {
        let mut by_span: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        spans
            .iter()
            .enumerate()
            .for_each(|(position, span)| by_span.entry(*span).or_default().push(position));
        let index = |positions: &[usize]| {
            let positions: Vec<u32> =
                positions.iter().map(|position| u32::try_from(*position).unwrap_or_default()).collect();
            let count = positions.len();
            Tensor::from_vec(positions, count, device)
        };
        let mut back = vec![0; spans.len()];
        by_span.values().flatten().enumerate().for_each(|(place, position)| back[*position] = place);
        let span = |(span, positions): (usize, Vec<usize>)| -> Result<Span> {
            Ok(Span { span, index: Some(index(&positions)?), positions })
        };
        Ok(Self { back: Some(index(&back)?), spans: by_span.into_iter().map(span).collect::<Result<_>>()? })
    }

    pub(super) fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Concatenates the results of all spans and restores the order of the positions.
    fn joined(&self, parts: &[Tensor]) -> Result<Tensor> {
        let joined = Tensor::cat(parts, TOKEN_DIM)?;
        self.back.as_ref().map_or(Ok(joined.clone()), |back| joined.index_select(back, TOKEN_DIM))
    }
}

impl Span {
    /// Selects the span's positions along the token axis.
    pub(super) fn of(&self, values: &Tensor) -> Result<Tensor> {
        let whole = || Ok(values.clone());
        self.index.as_ref().map_or_else(whole, |index| values.contiguous()?.index_select(index, TOKEN_DIM))
    }
}

/// Gradients and activations of a layer's heads, for attributing keys and values to query spans.
pub(super) struct HeadGradients<'a> {
    /// Gradients at scores, `(B, H, T, S)`.
    pub(super) scores: &'a Tensor,
    /// Gradients at the heads' outputs, `(B, T, H, D)`.
    pub(super) z: &'a Tensor,
    /// Queries, `(B, T, H, D)`.
    pub(super) queries: &'a Tensor,
    /// Attention pattern, `(B, H, T, S)`.
    pub(super) pattern: &'a Tensor,
    /// Scale of the query-key dot products.
    pub(super) scale: f64,
}

impl HeadGradients<'_> {
    /// Computes gradients at keys and values, `(B, T, H, D)`, through queries in this span only.
    pub(super) fn of_queries_in(&self, span: &Span) -> Result<[Tensor; 2]> {
        let by_key = |weights: &Tensor, queries: &Tensor| {
            // (B, H, S, T')
            let weights = span.of(&weights.to_dtype(DType::F32)?)?.transpose(2, 3)?.contiguous()?;
            let queries = span.of(&queries.to_dtype(DType::F32)?.transpose(1, 2)?)?; // (B, H, T', D)
            weights.matmul(&queries)?.transpose(1, 2)?.contiguous()
        };
        Ok([(by_key(self.scores, self.queries)? * self.scale)?, by_key(self.pattern, self.z)?])
    }
}

/// Accumulates the scores of the given rows' edges between two spans.
///
/// A score is the product of a gradient `(rows, B, T, C)` and a difference `(sources, B, T, C)`: a source's
/// output in the corrupted run minus its output in the clean run. Both outputs are at the positions of the
/// source's span. All rows have the same number of sources.
pub(super) fn add_scores(
    sums: &mut [f64],
    graph: &EdgeGraph,
    (rows, spans): (&[Row], EdgeSpans),
    gradients: &Tensor,
    differences: &Tensor,
) -> Result<()> {
    let first = rows.first().filter(|row| graph.edges_of(row, spans).is_some());
    let Some(count) = first.map(|row| row.sources) else { return Ok(()) };
    let gradients = gradients.to_dtype(DType::F32)?.flatten_from(1)?;
    let differences = differences.narrow(0, 0, count)?.flatten_from(1)?;
    let products = gradients.matmul(&differences.t()?)?.to_vec2::<f32>()?;
    for (row, products) in rows.iter().zip(products) {
        let Some(edges) = graph.edges_of(row, spans) else { continue };
        for (sum, product) in sums[edges].iter_mut().zip(products) {
            *sum += f64::from(product);
        }
    }
    Ok(())
}

/// Runs a circuit on the clean prompts, with separate inputs for each destination.
///
/// Each destination reads the residual stream of the pass. For every omitted edge, the source's output in
/// this run is replaced with its output in the corrupted run.
pub(super) struct CircuitRun<'a> {
    model: &'a Gpt2LMHeadModel,
    circuit: &'a Circuit,
    positions: &'a Positions,
    /// Outputs of the sources in the corrupted run, `(sources, B, T, C)`.
    corrupted: &'a Tensor,
    /// Corrupted minus current outputs, for the sources computed so far.
    differences: Option<Tensor>,
    seen: usize,
    /// Values to substitute at upcoming hook points.
    waiting: BTreeMap<Site, Tensor>,
}

impl<'a> CircuitRun<'a> {
    pub(super) fn new(
        model: &'a Gpt2LMHeadModel,
        circuit: &'a Circuit,
        positions: &'a Positions,
        corrupted: &'a Tensor,
    ) -> Self {
        Self { model, circuit, positions, corrupted, differences: None, seen: 0, waiting: BTreeMap::new() }
    }

    /// Returns the destinations' inputs, `(rows, B, T, C)`, or `None` if they equal the model's.
    ///
    /// `destination` is the destinations' span; `None` means that each source's own span is used.
    fn inputs(&self, residual: &Tensor, rows: &[Row], destination: Option<usize>) -> Result<Option<Tensor>> {
        let spans = self.positions.spans();
        let masks: Vec<_> = spans.iter().map(|span| self.omitted_mask(span, rows, destination)).collect();
        let (Some(differences), true) = (&self.differences, masks.iter().any(Option::is_some)) else {
            return Ok(None);
        };
        let count = rows.first().map_or(0, |row| row.sources);
        let differences = differences.narrow(0, 0, count)?;
        let (_, batch, _, width) = differences.dims4()?;
        let mut added = Vec::new();
        for (span, mask) in spans.iter().zip(masks) {
            let shape = (rows.len(), batch, span.positions.len(), width);
            added.push(match mask {
                None => Tensor::zeros(shape, DType::F32, residual.device())?,
                Some(mask) => {
                    let mask = Tensor::from_vec(mask, (rows.len(), count), residual.device())?;
                    mask.matmul(&span.of(&differences)?.flatten_from(1)?)?.reshape(shape)?
                }
            });
        }
        let residual = residual.to_dtype(DType::F32)?.unsqueeze(0)?;
        self.positions.joined(&added)?.broadcast_add(&residual).map(Some)
    }

    /// Calls [`Circuit::omitted_mask`] for the edges from a span to the given destinations.
    ///
    /// Without a destination span, the edges are within the source's span.
    fn omitted_mask(&self, source: &Span, rows: &[Row], destination: Option<usize>) -> Option<Vec<f32>> {
        let spans = EdgeSpans { source: source.span, destination: destination.unwrap_or(source.span) };
        self.circuit.omitted_mask(spans, rows)
    }

    /// Computes the output of a layer's heads from their separate inputs.
    fn await_heads(&mut self, layer: usize, residual: &Tensor) -> Result<()> {
        let graph = self.circuit.graph();
        let (of_queries, of_others) = (graph.rows_of_queries(layer), graph.rows_of_keys_and_values(layer));
        let queries = self.inputs(residual, &of_queries, None)?;
        let spans = self.positions.spans();
        let is_changed = |destination: &Span| {
            spans.iter().any(|source| self.omitted_mask(source, &of_others, Some(destination.span)).is_some())
        };
        if queries.is_none() && !spans.iter().any(is_changed) {
            return Ok(());
        }
        let block = block(self.model, layer)?;
        let (heads, dtype) = (block.attn().num_heads(), residual.dtype());
        let (weight, bias) = projections(block.attn())?;
        // Projects the rows, starting at `first`, to `(B, H, T, D)`, one tensor each for queries,
        // keys and values.
        let projected = |inputs: Option<Tensor>, first: usize, rows: usize| {
            let inputs = inputs.map_or_else(|| residual.unsqueeze(0), Ok)?;
            let (_, batch, tokens, width) = inputs.dims4()?;
            let normed = block.ln_1().forward(&inputs.to_dtype(dtype)?)?.to_dtype(DType::F32)?;
            let normed = normed.broadcast_as((rows, batch, tokens, width))?.contiguous()?;
            let weight = weight.narrow(0, first, rows)?.transpose(1, 2)?;
            let mut parts = normed.flatten(1, 2)?.matmul(&weight)?; // (rows, B · T, D)
            if let Some(bias) = &bias {
                parts = parts.broadcast_add(&bias.narrow(0, first, rows)?)?;
            }
            let parts = parts.reshape((rows, batch, tokens, ()))?.to_dtype(dtype)?;
            let parts = parts.transpose(0, 1)?.chunk(rows / heads, 1)?;
            parts.iter().map(Tensor::contiguous).collect::<Result<Vec<_>>>()
        };
        let queries = projected(queries, 0, heads)?;
        let mut attended = Vec::new();
        for span in spans {
            // Processes one span at a time. All spans at once would multiply the memory use.
            let others = projected(self.inputs(residual, &of_others, Some(span.span))?, heads, 2 * heads)?;
            let attention = HeadsAttention {
                heads,
                scale: self.model.config().attention_scale(layer),
                visible: span.positions.iter().map(|position| 0..position + 1).collect(),
                added: None,
                dropout: None,
            };
            attended.push(attention_reference(
                [&span.of(&queries[0])?, &others[0], &others[1]],
                &attention,
                None,
            )?);
        }
        let z = self.positions.joined(&attended)?.transpose(1, 2)?.contiguous()?;
        self.waiting.insert(Site::in_block(layer, SiteKind::Z), z);
        Ok(())
    }

    /// Computes the input of an MLP's activation function.
    fn await_mlp(&mut self, layer: usize, residual: &Tensor) -> Result<()> {
        let row = self.circuit.graph().row_of_mlp(layer);
        if let Some(inputs) = self.inputs(residual, &[row], None)? {
            let block = block(self.model, layer)?;
            let normed = block.ln_2().forward(&inputs.squeeze(0)?.to_dtype(residual.dtype())?)?;
            let expanded = block.mlp().expand().forward(&normed)?;
            self.waiting.insert(Site::in_block(layer, SiteKind::MlpPre), expanded);
        }
        Ok(())
    }
}

impl Observer for CircuitRun<'_> {
    fn wants(&self, site: Site) -> bool {
        let last = self.model.config().n_layer.checked_sub(1);
        match site.kind {
            SiteKind::ResidPost => site.layer == last,
            SiteKind::Embed
            | SiteKind::ResidPre
            | SiteKind::Z
            | SiteKind::ResidMid
            | SiteKind::MlpPre
            | SiteKind::MlpOut => true,
            _ => false,
        }
    }

    fn observe(&mut self, site: Site, value: Tensor) -> Result<Tensor> {
        let value = self.waiting.remove(&site).unwrap_or(value);
        match (site.kind, site.layer) {
            (SiteKind::Embed | SiteKind::Z | SiteKind::MlpOut, _) => {
                let here = of_source(self.model, site, &value)?;
                let there = self.corrupted.narrow(0, self.seen, here.dim(0)?)?;
                self.seen += here.dim(0)?;
                let difference = (there - here)?;
                self.differences = Some(match self.differences.take() {
                    Some(before) => Tensor::cat(&[before, difference], 0)?,
                    None => difference,
                });
            }
            (SiteKind::ResidPre, Some(layer)) => self.await_heads(layer, &value)?,
            (SiteKind::ResidMid, Some(layer)) => self.await_mlp(layer, &value)?,
            (SiteKind::ResidPost, _) => {
                let inputs = self.inputs(&value, &[self.circuit.graph().row_of_logits()], None)?;
                if let Some(inputs) = inputs {
                    return inputs.squeeze(0)?.to_dtype(value.dtype());
                }
            }
            _ => {}
        }
        Ok(value)
    }
}
