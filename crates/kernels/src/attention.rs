//! `softmax(scale · Q Kᵀ) V` on the CPU where every query sees the first keys up to some number: causal and full attention,
//! with and without a cache.
//!
//! One query reads each key and each value once, in order: scores, softmax, weighted sum. Many queries go in tiles of as many
//! as fill the registers: keys are laid out once in panels of 16, input by input, as packed weights are, and a tile computes
//! its scores, their softmax and the weighted sum while they are in the nearest caches. What no query of a tile sees is not
//! computed.

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor};

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::parallel::{Part, Parts, for_each_part};
use crate::simd::{InstructionSet, Job, LANES, Line, Simd};
use crate::vector_math::exp;
use crate::{KernelError, cuda};

/// Queries of a part: few enough that there is work for many threads, many enough to use the keys while they are near.
const PART_QUERIES: usize = 48;
/// Vectors of a value row that are summed at once.
const SUM_VECTORS: usize = 4;
/// Panels of keys that are packed in one part.
const PACK_PANELS: usize = 8;
/// Panels of the widest tile.
const MAX_TILE_PANELS: usize = 2;

/// The same on an NVIDIA GPU, for tensors of one type: f32, f16 or bf16. `None` where it does not apply: on another device,
/// in a build without the feature `cuda`, or where a gradient is wanted.
///
/// # Shapes
/// As [`prefix_attention`].
///
/// # Errors
/// When the GPU fails.
pub fn prefix_attention_on_gpu(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    visible: &[usize],
) -> Result<Option<Tensor>> {
    cuda::prefix_attention(q, k, v, scale, visible)
}

/// Attention in f32 on the CPU, for inference: no gradient goes through it.
///
/// # Shapes
/// `q` `(B, H, T, D)` in f32; `k` `(B, H, S, D)` and `v` `(B, H, S, Dv)`, both in f32 or both in f16, as a cache may hold
/// them; with any strides. `visible` has, for each of the `B · T`
/// queries, the number of keys that it sees, from 1 to `S`. Returns `(B, H, T, Dv)`, laid out as `(B, T, H, Dv)`.
///
/// # Errors
/// When the shapes or types are not these, or the tensors are not on the CPU.
pub fn prefix_attention(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, visible: &[usize]) -> Result<Tensor> {
    let (batch, heads, query_len, head_dim) = q.dims4()?;
    let (_, _, key_len, value_dim) = v.dims4()?;
    let fits = k.dims() == [batch, heads, key_len, head_dim]
        && v.dims() == [batch, heads, key_len, value_dim]
        && visible.len() == batch * query_len
        && visible.iter().all(|keys| (1..=key_len).contains(keys));
    if !fits {
        return Err(KernelError::AttentionShapes {
            q: q.dims().to_vec(),
            k: k.dims().to_vec(),
            v: v.dims().to_vec(),
        }
        .into());
    }
    let held = if k.dtype() == DType::F16 { DType::F16 } else { DType::F32 };
    let is_other = |(x, dtype): &(&Tensor, DType)| x.dtype() != *dtype || !x.device().is_cpu();
    if let Some((other, _)) = [(q, DType::F32), (k, held), (v, held)].into_iter().find(is_other) {
        return Err(KernelError::NotCpuFloats { found: other.dtype() }.into());
    }
    let rows = |x: &Tensor| if x.stride().last() == Some(&1) { Ok(x.clone()) } else { x.contiguous() };
    #[expect(clippy::cast_possible_truncation, reason = "the scores are f32")]
    let op = PrefixAttention { scale: scale as f32, visible: visible.to_vec() };
    rows(q)?.apply_op3_no_bwd(&rows(k)?, &rows(v)?, &op)?.transpose(1, 2)
}

struct PrefixAttention {
    scale: f32,
    visible: Vec<usize>,
}

impl CustomOp3 for PrefixAttention {
    fn name(&self) -> &'static str {
        "prefix-attention"
    }

    /// Returns `(B, T, H, Dv)`.
    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let q = Heads::new(q.as_slice::<f32>()?, q_layout)?;
        let (scale, visible, instructions) = (self.scale, &self.visible, InstructionSet::detected());
        let (_, _, _, value_dim) = v_layout.shape().dims4()?;
        let output = match (k, v) {
            (CpuStorage::F16(k), CpuStorage::F16(v)) => {
                let k = Heads::new(k.as_slice().reinterpret_cast(), k_layout)?;
                let v = Heads::new(v.as_slice().reinterpret_cast(), v_layout)?;
                attention(&q, &k, &v, scale, visible, instructions)
            }
            _ => {
                let k = Heads::new(k.as_slice::<f32>()?, k_layout)?;
                let v = Heads::new(v.as_slice::<f32>()?, v_layout)?;
                attention(&q, &k, &v, scale, visible, instructions)
            }
        };
        Ok((CpuStorage::F32(output), (q.batch, q.tokens, q.heads, value_dim).into()))
    }
}

/// What keys and values are held in: f32, or the bits of f16.
trait Element: Copy + Sync {
    fn load<S: Simd>(simd: S, values: &[Self; LANES]) -> S::Floats;
    fn to_f32(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, values: &[Self; LANES]) -> S::Floats {
        simd.load(values)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for u16 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, values: &[Self; LANES]) -> S::Floats {
        simd.load_f16(values)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::from_bits(self).to_f32()
    }
}

/// A tensor `(B, H, T, D)` whose rows of `D` are in one piece.
struct Heads<'a, E = f32> {
    values: &'a [E],
    batch: usize,
    heads: usize,
    tokens: usize,
    head_dim: usize,
    /// Distances of neighbours along the first three axes.
    strides: [usize; 3],
}

impl<'a, E> Heads<'a, E> {
    fn new(values: &'a [E], layout: &Layout) -> Result<Self> {
        let (batch, heads, tokens, head_dim) = layout.shape().dims4()?;
        let strides = layout.stride();
        Ok(Self {
            values: &values[layout.start_offset()..],
            batch,
            heads,
            tokens,
            head_dim,
            strides: [strides[0], strides[1], strides[2]],
        })
    }

    #[inline(always)]
    fn row(&self, batch: usize, head: usize, token: usize) -> &'a [E] {
        let [batch_stride, head_stride, token_stride] = self.strides;
        let start = batch * batch_stride + head * head_stride + token * token_stride;
        &self.values[start..start + self.head_dim]
    }
}

/// Returns `(B, T, H, Dv)`.
fn attention<E: Element>(
    q: &Heads<'_>,
    k: &Heads<'_, E>,
    v: &Heads<'_, E>,
    scale: f32,
    visible: &[usize],
    instructions: InstructionSet,
) -> Vec<f32> {
    let row_len = q.heads * v.head_dim;
    let mut output = vec![0.0; q.batch * q.tokens * row_len];
    if output.is_empty() {
        return output;
    }
    if q.tokens == 1 {
        let parts = Parts { row_len, rows: 1, columns: v.head_dim };
        for_each_part(&mut output, parts, |mut part| {
            let (batch, head) = (part.first_row, part.first_column / v.head_dim);
            let context = part.row(0);
            instructions.run(OneQuery { q, k, v, batch, head, scale, visible: visible[batch], context });
        });
        return output;
    }
    let (key_panels, value_panels) = (pack_keys(k), pack_values(v));
    let parts = Parts { row_len, rows: PART_QUERIES, columns: v.head_dim };
    for_each_part(&mut output, parts, |part| {
        instructions.run(ManyQueries {
            q,
            key_len: k.tokens,
            value_dim: v.head_dim,
            key_panels: &key_panels,
            value_panels: &value_panels,
            scale,
            visible,
            part,
        });
    });
    output
}

/// Attention of one query in one head.
struct OneQuery<'a, E> {
    q: &'a Heads<'a>,
    k: &'a Heads<'a, E>,
    v: &'a Heads<'a, E>,
    batch: usize,
    head: usize,
    scale: f32,
    visible: usize,
    context: &'a mut [f32],
}

impl<E: Element> Job for OneQuery<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let query = self.q.row(self.batch, self.head, 0);
        let mut weights = vec![0.0; self.visible];
        for (key, weight) in weights.iter_mut().enumerate() {
            *weight = dot(simd, query, self.k.row(self.batch, self.head, key)) * self.scale;
        }
        let inverse_sum = exponentials(simd, &mut weights).recip();
        let rows = || (0..self.visible).map(|key| self.v.row(self.batch, self.head, key));
        let mut column = 0;
        for context in self.context.chunks_mut(SUM_VECTORS * LANES) {
            match context.as_chunks_mut::<LANES>() {
                (vectors, []) if vectors.len() == SUM_VECTORS => {
                    let mut sums = [simd.splat(0.0); SUM_VECTORS];
                    for (weight, row) in weights.iter().zip(rows()) {
                        let weight = simd.splat(*weight);
                        let (values, _) = row[column..].as_chunks::<LANES>();
                        for (sum, values) in sums.iter_mut().zip(values) {
                            *sum = simd.mul_add(weight, E::load(simd, values), *sum);
                        }
                    }
                    for (sum, vector) in sums.into_iter().zip(vectors) {
                        simd.store(simd.mul(sum, simd.splat(inverse_sum)), vector);
                    }
                }
                _ => {
                    for (weight, row) in weights.iter().zip(rows()) {
                        for (sum, value) in context.iter_mut().zip(&row[column..]) {
                            *sum += weight * inverse_sum * value.to_f32();
                        }
                    }
                }
            }
            column += SUM_VECTORS * LANES;
        }
    }
}

#[inline(always)]
fn dot<S: Simd, E: Element>(simd: S, a: &[f32], b: &[E]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sum = simd.splat(0.0);
    for (a, b) in a.iter().zip(b) {
        sum = simd.mul_add(simd.load(a), E::load(simd, b), sum);
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b.to_f32()).sum();
    simd.sum(sum) + rest
}

/// Replaces scores by `exp(score - largest)` and returns their sum.
#[inline(always)]
fn exponentials<S: Simd>(simd: S, scores: &mut [f32]) -> f32 {
    let (vectors, rest) = scores.as_chunks_mut::<LANES>();
    let mut largest = simd.splat(f32::NEG_INFINITY);
    for vector in &*vectors {
        largest = simd.max(largest, simd.load(vector));
    }
    let largest = rest.iter().copied().fold(simd.largest(largest), f32::max);
    let shift = simd.splat(largest);
    let mut sum = simd.splat(0.0);
    for vector in vectors {
        let weights = exp(simd, simd.sub(simd.load(vector), shift));
        sum = simd.add(sum, weights);
        simd.store(weights, vector);
    }
    let mut sum = simd.sum(sum);
    if !rest.is_empty() {
        let mut last = [f32::NEG_INFINITY; LANES];
        last[..rest.len()].copy_from_slice(rest);
        let weights = exp(simd, simd.sub(simd.load(&last), shift));
        simd.store(weights, &mut last);
        rest.copy_from_slice(&last[..rest.len()]);
        sum += rest.iter().sum::<f32>();
    }
    sum
}

/// For each batch row and head the keys in panels of 16: input by input the 16 keys.
fn pack_keys<E: Element>(k: &Heads<'_, E>) -> Vec<Line<[f32; LANES]>> {
    let panels = k.tokens.div_ceil(LANES);
    let row_len = panels * k.head_dim;
    let mut packed = vec![Line([0.0; LANES]); k.batch * k.heads * row_len];
    if row_len > 0 {
        let parts = Parts { row_len, rows: 1, columns: PACK_PANELS * k.head_dim };
        for_each_part(&mut packed, parts, |mut part| {
            let (batch, head) = (part.first_row / k.heads, part.first_row % k.heads);
            let first_panel = part.first_column / k.head_dim;
            for (index, panel) in part.row(0).chunks_mut(k.head_dim).enumerate() {
                let first_key = (first_panel + index) * LANES;
                for key in first_key..k.tokens.min(first_key + LANES) {
                    for (value, line) in k.row(batch, head, key).iter().zip(panel.iter_mut()) {
                        line.0[key - first_key] = value.to_f32();
                    }
                }
            }
        });
    }
    packed
}

/// For each batch row and head the values in panels of 16 columns: key by key.
fn pack_values<E: Element>(v: &Heads<'_, E>) -> Vec<Line<[f32; LANES]>> {
    let row_len = v.head_dim.div_ceil(LANES) * v.tokens;
    let mut packed = vec![Line([0.0; LANES]); v.batch * v.heads * row_len];
    if row_len > 0 {
        let parts = Parts { row_len, rows: 1, columns: v.tokens };
        for_each_part(&mut packed, parts, |mut part| {
            let (batch, head) = (part.first_row / v.heads, part.first_row % v.heads);
            let column = part.first_column / v.tokens * LANES;
            for (key, line) in part.row(0).iter_mut().enumerate() {
                let values = &v.row(batch, head, key)[column..];
                for (value, lane) in values.iter().zip(&mut line.0) {
                    *lane = value.to_f32();
                }
            }
        });
    }
    packed
}

/// Attention of some queries in one head.
struct ManyQueries<'a, 'b> {
    q: &'a Heads<'a>,
    key_len: usize,
    value_dim: usize,
    key_panels: &'a [Line<[f32; LANES]>],
    value_panels: &'a [Line<[f32; LANES]>],
    scale: f32,
    visible: &'a [usize],
    part: Part<'b, f32>,
}

impl Job for ManyQueries<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let Heads { heads, tokens, head_dim, .. } = *self.q;
        let head = self.part.first_column / self.value_dim;
        let (first, rows) = (self.part.first_row, self.part.rows());
        let score_len = self.key_len.next_multiple_of(MAX_TILE_PANELS * LANES);
        let mut scores = vec![0.0; S::TILE_ROWS * score_len];
        let mut row = 0;
        while row < rows {
            let (batch, token) = ((first + row) / tokens, (first + row) % tokens);
            // A tile does not reach into the next row of the batch.
            let queries = S::TILE_ROWS.min(rows - row).min(tokens - token);
            let visible = &self.visible[first + row..first + row + queries];
            let most_visible = visible.iter().copied().max().unwrap_or(0);
            let key_panels = self.key_len.div_ceil(LANES) * head_dim;
            let value_panels = self.value_dim.div_ceil(LANES) * self.key_len;
            let position = batch * heads + head;

            let panels = &self.key_panels[position * key_panels..(position + 1) * key_panels];
            for (index, panels) in panels.chunks(head_dim * S::TILE_PANELS).enumerate() {
                let first_key = index * S::TILE_PANELS * LANES;
                if first_key >= most_visible {
                    break;
                }
                let output = RowTile {
                    inputs: |query: usize| self.q.row(batch, head, token + query.min(queries - 1)),
                    panels,
                    depth: head_dim,
                    panel_len: head_dim,
                };
                simd.multiply(output, |query, panel, sums| {
                    let start = query * score_len + first_key + panel * LANES;
                    if let Some(scores) = scores[start..].first_chunk_mut() {
                        simd.store(simd.mul(sums, simd.splat(self.scale)), scores);
                    }
                });
            }

            let mut inverse_sums = [0.0; MAX_TILE_ROWS];
            for (query, keys) in visible.iter().enumerate() {
                let scores = &mut scores[query * score_len..][..most_visible];
                let (seen, hidden) = scores.split_at_mut(*keys);
                inverse_sums[query] = exponentials(simd, seen).recip();
                hidden.fill(0.0);
            }

            let panels = &self.value_panels[position * value_panels..(position + 1) * value_panels];
            for (index, panels) in panels.chunks(self.key_len * S::TILE_PANELS).enumerate() {
                let input = RowTile {
                    inputs: |query: usize| &scores[query.min(queries - 1) * score_len..][..most_visible],
                    panels,
                    depth: most_visible,
                    panel_len: self.key_len,
                };
                simd.multiply(input, |query, panel, sums| {
                    if query < queries {
                        let column = (index * S::TILE_PANELS + panel) * LANES;
                        let context = &mut self.part.row(row + query)[column..];
                        let sums = simd.mul(sums, simd.splat(inverse_sums[query]));
                        match context.first_chunk_mut() {
                            Some(context) => simd.store(sums, context),
                            None => {
                                let mut whole = [0.0; LANES];
                                simd.store(sums, &mut whole);
                                context.copy_from_slice(&whole[..context.len()]);
                            }
                        }
                    }
                });
            }
            row += queries;
        }
    }
}

/// Rows of the highest tile.
const MAX_TILE_ROWS: usize = 12;

/// A product of a tile of rows, each in one piece, with one panel or as many as the tile has.
pub(crate) struct RowTile<'a, I> {
    /// The inputs of row `index` of the tile.
    inputs: I,
    /// The panels, one after the other.
    panels: &'a [Line<[f32; LANES]>],
    /// Inputs to multiply.
    depth: usize,
    /// Lines of a panel, at least `depth`.
    panel_len: usize,
}

/// Computes a tile of `ROWS` rows and up to `PANELS` panels in registers and gives each row's and panel's sums to `store`.
#[inline(always)]
pub(crate) fn multiply_rows<'r, S, I, const ROWS: usize, const PANELS: usize>(
    simd: S,
    tile: RowTile<'_, I>,
    store: impl FnMut(usize, usize, S::Floats),
) where
    S: Simd,
    I: Fn(usize) -> &'r [f32],
{
    match tile.panels.len() / tile.panel_len {
        1 => multiply_whole_tile::<S, I, ROWS, 1>(simd, tile, store),
        _ => multiply_whole_tile::<S, I, ROWS, PANELS>(simd, tile, store),
    }
}

#[inline(always)]
fn multiply_whole_tile<'r, S, I, const ROWS: usize, const PANELS: usize>(
    simd: S,
    tile: RowTile<'_, I>,
    mut store: impl FnMut(usize, usize, S::Floats),
) where
    S: Simd,
    I: Fn(usize) -> &'r [f32],
{
    let depth = tile.depth;
    let rows: [&[f32]; ROWS] = std::array::from_fn(|row| &(tile.inputs)(row)[..depth]);
    let panels: [_; PANELS] = std::array::from_fn(|panel| &tile.panels[panel * tile.panel_len..][..depth]);
    let mut sums = [[simd.splat(0.0); PANELS]; ROWS];
    for index in 0..depth {
        let values: [_; PANELS] = std::array::from_fn(|panel| simd.load(&panels[panel][index].0));
        for row in 0..ROWS {
            let input = simd.splat(rows[row][index]);
            for panel in 0..PANELS {
                sums[row][panel] = simd.mul_add(input, values[panel], sums[row][panel]);
            }
        }
    }
    for (row, sums) in sums.into_iter().enumerate() {
        for (panel, sums) in sums.into_iter().enumerate() {
            store(row, panel, sums);
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{D, Device};

    use super::*;

    fn noise(shape: (usize, usize, usize, usize), seed: u64) -> Tensor {
        let values = crate::random::noise(shape.0 * shape.1 * shape.2 * shape.3, seed, 0.0, 4.0);
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }

    fn reference(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, visible: &[usize]) -> Vec<f32> {
        let (batch, _, query_len, _) = q.dims4().unwrap();
        let key_len = k.dim(2).unwrap();
        let mask: Vec<f32> = visible
            .iter()
            .flat_map(|keys| (0..key_len).map(|key| if key < *keys { 0.0 } else { f32::NEG_INFINITY }))
            .collect();
        let mask = Tensor::from_vec(mask, (batch, 1, query_len, key_len), &Device::Cpu).unwrap();
        let (q, k, v) = (q.contiguous().unwrap(), k.contiguous().unwrap(), v.contiguous().unwrap());
        let scores = (q.matmul(&k.t().unwrap()).unwrap() * scale).unwrap().broadcast_add(&mask).unwrap();
        let weights = candle_nn::ops::softmax(&scores, D::Minus1).unwrap();
        weights.matmul(&v).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    /// Head widths of GPT-2 and others, odd ones; context 1 and 1024; a step, a chunk behind a past, a whole prompt; rows of
    /// different lengths.
    #[test]
    fn attention_equals_the_reference() {
        let widths = [(64, 64), (32, 32), (80, 80), (96, 96), (128, 128), (7, 5), (1, 1), (20, 33)];
        let lengths = [(1, 1), (1, 1024), (1, 37), (2, 2), (13, 13), (5, 40), (50, 70), (100, 100)];
        for (head_dim, value_dim) in widths {
            for (query_len, key_len) in lengths {
                let (batch, heads) = (2, 3);
                let q = noise((batch, query_len, heads, head_dim), 1).transpose(1, 2).unwrap();
                let k = noise((batch, heads, key_len + 3, head_dim), 2).narrow(2, 0, key_len).unwrap();
                let v = noise((batch, heads, key_len + 3, value_dim), 3).narrow(2, 0, key_len).unwrap();
                let scale = 1.0 / (head_dim as f64).sqrt();
                let causal = |query: usize| key_len - query_len + query + 1;
                // The second row of the batch is shorter, where there is room for that.
                let shorter = (key_len - query_len).min(2);
                let visible: Vec<usize> = (0..batch)
                    .flat_map(|row| (0..query_len).map(move |query| causal(query) - row * shorter))
                    .collect();
                let expected = reference(&q, &k, &v, scale, &visible);
                for instructions in InstructionSet::available() {
                    let view = |x: &Tensor| {
                        let (storage, layout) = x.storage_and_layout();
                        let candle_core::Storage::Cpu(storage) = &*storage else { panic!("on the CPU") };
                        (storage.as_slice::<f32>().unwrap().to_vec(), layout.clone())
                    };
                    let (q, k, v) = (view(&q), view(&k), view(&v));
                    let [q, k, v] = [&q, &k, &v].map(|(values, layout)| Heads::new(values, layout).unwrap());
                    #[expect(clippy::cast_possible_truncation, reason = "the scores are f32")]
                    let y = attention(&q, &k, &v, scale as f32, &visible, instructions);
                    let y = Tensor::from_vec(y, (batch, query_len, heads, value_dim), &Device::Cpu).unwrap();
                    let y = y.transpose(1, 2).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
                    for (index, (y, expected)) in y.iter().zip(&expected).enumerate() {
                        // Values of about unit size, sums and exponentials in another order.
                        assert!(
                            (y - expected).abs() < 3e-6,
                            "{instructions:?} D {head_dim} Dv {value_dim} T {query_len} S {key_len}, value {index}: {y} \
                             for {expected}"
                        );
                    }
                }
            }
        }
    }

    /// Keys and values in f16 give what the same values in f32 give.
    #[test]
    fn a_cache_in_f16_is_read_as_it_is() {
        for (query_len, key_len, head_dim) in [(1, 37, 64), (20, 37, 64), (1, 9, 7), (5, 9, 33)] {
            let q = noise((2, 2, query_len, head_dim), 1);
            let half = |seed| noise((2, 2, key_len, head_dim), seed).to_dtype(DType::F16).unwrap();
            let (k, v) = (half(2), half(3));
            let visible: Vec<usize> =
                (0..2).flat_map(|_| (0..query_len).map(|query| key_len - query_len + query + 1)).collect();
            let wide = |x: &Tensor| x.to_dtype(DType::F32).unwrap();
            let expected = prefix_attention(&q, &wide(&k), &wide(&v), 0.3, &visible).unwrap();
            let y = prefix_attention(&q, &k, &v, 0.3, &visible).unwrap();
            let difference = (y - expected).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
            assert_eq!(difference.to_scalar::<f32>().unwrap(), 0.0, "{query_len} {key_len} {head_dim}");
        }
    }

    #[test]
    fn what_is_not_finite_reaches_its_queries_only() {
        for special in [f32::NAN, f32::INFINITY] {
            for (query_len, key_len) in [(1, 20), (20, 20)] {
                let q = noise((1, 1, query_len, 8), 1);
                let mut k = noise((1, 1, key_len, 8), 2).flatten_all().unwrap().to_vec1::<f32>().unwrap();
                k[(key_len - 1) * 8] = special;
                let k = Tensor::from_vec(k, (1, 1, key_len, 8), &Device::Cpu).unwrap();
                let v = noise((1, 1, key_len, 8), 3);
                let visible: Vec<usize> =
                    (0..query_len).map(|query| key_len - query_len + query + 1).collect();
                let y = prefix_attention(&q, &k, &v, 1.0, &visible).unwrap();
                let y = y.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let expected = reference(&q, &k, &v, 1.0, &visible);
                for (index, (y, expected)) in y.iter().zip(&expected).enumerate() {
                    // Adding -inf to the score of a hidden key leaves NaN, so there the reference says more than it knows.
                    let expects_nan = expected.is_nan() && visible[index / 8] == key_len;
                    assert_eq!(y.is_nan(), expects_nan, "{special}, value {index}: {y} for {expected}");
                }
            }
        }
    }
}
