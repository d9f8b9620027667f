//! Multi-head attention over projections, with dropout on the weights, and its gradients.

use std::ops::Range;

use candle_core::{D, DType, Device, Result, Tensor};
use candle_gpt2_arithmetic::{AddedScores, Attention, Dropout};

use super::composed::{composed_dropout, on_its_gpu, wide};
use super::float::{CpuFloat, for_float, on_cpu, on_the_cpu, with_slices};
use super::operation::{recomputed, record, record_tensor};
use crate::cuda;
use crate::error::KernelError;
use crate::kv_dtype::KvDType;
use crate::on_gpu::Draws;
use crate::per_thread::{Operation, Sums, has_cpu_kernels};

/// Axis of the tokens in a `(B, H, T, D)` tensor.
const TOKEN_DIM: usize = 2;

/// Parameters of [`heads_attention`].
#[derive(Debug, Clone)]
pub struct HeadsAttention {
    /// Number of heads, `H`.
    pub heads: usize,
    /// Factor for the products of queries and keys; greater than 0.
    pub scale: f64,
    /// Range of visible keys for each of a sequence's `T` queries; at least one of the `S` keys.
    pub visible: Vec<Range<usize>>,
    /// Values added to the scaled products, in a shape that broadcasts to `(B, H, T, S)`.
    pub added: Option<Tensor>,
    /// Dropout on the weights.
    pub dropout: Option<Dropout>,
}

/// Computes `softmax(scale · Q Kᵀ + added) V` over the visible keys of each query, for every head.
///
/// In f32 on a CPU, without added scores and dropout, the result is bit-identical to
/// [`KvMemory::attention`](crate::KvMemory::attention) over f32 storage. It does not depend on the other
/// sequences in the batch.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_kernels::{HeadsAttention, heads_attention};
///
/// let causal = HeadsAttention { heads: 2, scale: 0.5, visible: vec![0..1, 0..2, 0..3], added: None, dropout: None };
/// let q = Tensor::zeros((1, 3, 4), DType::F32, &Device::Cpu)?; // zero scores: uniform weights
/// let v = Tensor::new(&[[[1f32, 2.], [3., 4.], [5., 6.]]], &Device::Cpu)?;
/// let context = heads_attention(&[&q, &q, &v], causal)?;
/// assert_eq!(context.to_vec3::<f32>()?, [[[1., 2.], [2., 3.], [3., 4.]]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Shapes
/// Queries are `(B, T, H · D)`, keys `(B, S, H · D)` and values `(B, S, H · Dv)`, with the heads
/// concatenated. `projections` has one of these forms:
///
/// - One tensor `(B, T, 3 · H · D)`: queries, keys and values concatenated.
/// - Two tensors: the queries, then keys and values concatenated.
/// - Three tensors. Only in this form, `Dv` may differ from `D`.
///
/// Returns `(B, T, H · Dv)`.
///
/// # Errors
/// If the shapes do not match, a query has no visible key, or the scale is not a finite number greater than
/// 0.
pub fn heads_attention(projections: &[&Tensor], attention: HeadsAttention) -> Result<Tensor> {
    fn forward<T: CpuFloat>(projections: &[&Tensor], attention: HeadsAttention) -> Result<Tensor> {
        let sizes = attention.sizes(projections)?;
        let width = attention.heads * sizes.head_dim;
        let no_memory = || KernelError::NoMemory { tokens: sizes.keys, width, dtype: KvDType::F32 };
        let output = attention.with_elements(projections, sizes, |slices, attention| {
            T::attention_of_sequences(slices, attention).ok_or_else(|| no_memory().into())
        })?;
        let shape = (sizes.batch, sizes.queries, attention.heads * sizes.value_dim);
        record(projections, on_cpu(output), shape, attention)
    }
    attention.sizes(projections)?;
    let dtype = projections[0].dtype();
    let is_plain = |x: &&Tensor| has_cpu_kernels(x) && x.dtype() == dtype;
    let is_constant = attention.added.as_ref().is_none_or(|added| !added.track_op());
    if !projections.iter().all(is_plain) || !is_constant {
        if let Some(context) = attention.on_gpu(projections)? {
            return record_tensor(projections, context, AttentionOnGpu(attention));
        }
        return match (projections, is_constant) {
            // Recomputes the attention weights, the largest tensors that training would save.
            ([side_by_side], true) => {
                recomputed(side_by_side, move |x| heads_attention_reference(&[x], &attention))
            }
            _ => heads_attention_reference(projections, &attention),
        };
    }
    for_float!(dtype, forward(projections, attention))
}

/// Reference for [`heads_attention`]: a composition of candle operations for any device and dtype.
///
/// It applies [`attention_reference`] to the heads. Tests compare the two functions.
///
/// # Errors
/// Same as [`heads_attention`].
pub fn heads_attention_reference(projections: &[&Tensor], attention: &HeadsAttention) -> Result<Tensor> {
    attention.sizes(projections)?;
    let [q, k, v] = heads_of(projections, attention.heads)?;
    attention_reference([&q, &k, &v], attention, None)?.transpose(1, 2)?.flatten_from(2) // (B, T, H · Dv)
}

/// Views of queries `(B, H, T, D)`, keys `(B, H, S, D)` and values `(B, H, S, Dv)` in projections.
///
/// [`heads_attention`] lists the accepted forms of `projections`.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_kernels::heads_of;
///
/// let side_by_side = Tensor::arange(0f32, 24., &Device::Cpu)?.reshape((1, 2, 12))?; // two tokens
/// let [_, keys, _] = heads_of(&[&side_by_side], 2)?;
/// assert_eq!(keys.get(0)?.to_vec3::<f32>()?, [[[4., 5.], [16., 17.]], [[6., 7.], [18., 19.]]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If the number of heads does not divide the widths.
pub fn heads_of(projections: &[&Tensor], heads: usize) -> Result<[Tensor; 3]> {
    let mut parts = Vec::new();
    for (index, projection) in projections.iter().enumerate() {
        let (batch, tokens, width) = projection.dims3()?;
        let count = parts_of(projections.len(), index);
        let split = projection.reshape((batch, tokens, count * heads, width / (count * heads).max(1)))?;
        parts.extend(split.transpose(1, 2)?.chunk(count, 1)?);
    }
    let shapes = || projections.iter().map(|tensor| tensor.dims().to_vec()).collect();
    parts.try_into().map_err(|_| KernelError::Projections { heads, found: shapes() }.into())
}

/// Intermediate value of attention that [`attention_reference`] passes to its callback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionStage {
    /// Scaled products of queries and keys plus the added scores, `-inf` for a hidden key.
    Scores,
    /// Softmax of the scores, in the dtype of the queries.
    Weights,
}

/// Attention `softmax(scale · Q Kᵀ + added) V` in candle operations, for any device and dtype.
///
/// Scores and their softmax are computed in f32 or f64. In f16 they could overflow, and in bf16 their
/// relative error would be 2^-9.
///
/// Queries are computed in blocks, with the keys that are visible to any query of the block. So a sliding
/// window of width `w` costs `T · w` instead of `T · S`, and packed sequences cost no more than separate
/// ones. `show` receives the values of all queries and keys, `(B, H, T, S)`, and returns the values to
/// continue with.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_kernels::{AttentionStage, HeadsAttention, attention_reference};
///
/// let causal = HeadsAttention { heads: 1, scale: 0.5, visible: vec![0..1, 0..2], added: None, dropout: None };
/// let q = Tensor::zeros((1, 1, 2, 3), DType::F32, &Device::Cpu)?; // (B, H, T, D)
/// let mut weights = None;
/// attention_reference([&q, &q, &q], &causal, Some(&mut |stage, value| {
///     if stage == AttentionStage::Weights {
///         weights = Some(value.flatten_all()?.to_vec1::<f32>()?);
///     }
///     Ok(value)
/// }))?;
/// assert_eq!(weights, Some(vec![1., 0., 0.5, 0.5]));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Shapes
/// `q` `(B, H, T, D)`, `k` `(B, H, S, D)`, `v` `(B, H, S, Dv)`; returns `(B, H, T, Dv)`. `visible` may have
/// one range for each of the `B · T` queries instead of the `T` queries. A range may be empty, which gives
/// NaN, as in PyTorch.
///
/// # Errors
/// If the shapes do not match or `show` fails.
pub fn attention_reference(
    [q, k, v]: [&Tensor; 3],
    attention: &HeadsAttention,
    mut show: Option<&mut dyn FnMut(AttentionStage, Tensor) -> Result<Tensor>>,
) -> Result<Tensor> {
    let HeadsAttention { scale, visible, added, dropout, .. } = attention;
    let (batch, _, queries, _) = q.dims4()?;
    let keys = k.dim(TOKEN_DIM)?;
    let is_seen = |seen: &Range<usize>| seen.is_empty() || seen.end <= keys;
    let is_for_each = [queries, batch * queries].contains(&visible.len());
    if visible.is_empty() || keys == 0 || !is_for_each || !visible.iter().all(is_seen) {
        let [q, k, v] = [q, k, v].map(|x| x.dims().to_vec());
        return Err(KernelError::AttentionShapes { q, k, v }.into());
    }
    let (dtype, score_dtype, device) = (q.dtype(), wide(q.dtype()), q.device());
    let (q, k, v) = (q.to_dtype(score_dtype)?, k.to_dtype(score_dtype)?, v.to_dtype(dtype)?);
    let blocks = if show.is_some() || added.is_some() || visible.len() != queries {
        vec![Block { queries: 0..queries, keys: 0..keys }]
    } else {
        blocks(visible)
    };
    let mut contexts = Vec::with_capacity(blocks.len());
    for block in &blocks {
        let tokens =
            |x: &Tensor, range: &Range<usize>| x.narrow(TOKEN_DIM, range.start, range.len())?.contiguous();
        let (q, k) = (tokens(&q, &block.queries)?, tokens(&k, &block.keys)?);
        let mut scores = (q.matmul(&k.t()?)? * *scale)?; // (B, H, T, S)
        if let Some(hidden) = attention.hidden(block, queries, device)? {
            scores = scores.broadcast_add(&hidden.to_dtype(score_dtype)?)?;
        }
        if let Some(added) = added {
            scores = scores.broadcast_add(&added.to_dtype(score_dtype)?)?;
        }
        if let Some(show) = &mut show {
            scores = show(AttentionStage::Scores, scores)?;
        }
        let mut weights = candle_nn::ops::softmax(&scores, D::Minus1)?;
        if let Some(show) = &mut show {
            weights = show(AttentionStage::Weights, weights.to_dtype(dtype)?)?;
        }
        if let Some(dropout) = dropout {
            let (tokens, width) = (block.queries.len(), block.keys.len());
            let rows = weights.elem_count() / width;
            let (first_query, first) = (block.queries.start, block.keys.start);
            let draws = Draws { rows, width, tokens, queries, first_query, first };
            weights = composed_dropout(&weights, *dropout, draws)?;
        }
        contexts.push(weights.to_dtype(dtype)?.matmul(&tokens(&v, &block.keys)?)?);
    }
    Tensor::cat(&contexts, TOKEN_DIM)
}

/// Minimum number of queries in a block.
///
/// Smaller blocks would cost more in function calls than they save in arithmetic.
const MIN_BLOCK: usize = 32;

/// Consecutive queries and all keys that any of them sees.
struct Block {
    queries: Range<usize>,
    keys: Range<usize>,
}

impl Block {
    /// Visible keys of a query, relative to the first key of the block.
    fn seen(&self, seen: &Range<usize>) -> Range<usize> {
        if seen.is_empty() { 0..0 } else { seen.start - self.keys.start..seen.end - self.keys.start }
    }
}

/// Splits the queries into blocks.
///
/// A block is at most as long as the widest range of visible keys, or as `MIN_BLOCK`. A longer block would
/// waste most products of a sliding window. A block never includes keys of another packed sequence.
fn blocks(visible: &[Range<usize>]) -> Vec<Block> {
    let longest = visible.iter().map(Range::len).max().unwrap_or(0).max(MIN_BLOCK);
    let mut blocks: Vec<Block> = Vec::new();
    for (query, seen) in visible.iter().enumerate() {
        match blocks.last_mut() {
            Some(Block { queries, keys }) if queries.len() < longest && seen.start < keys.end => {
                queries.end = query + 1;
                if !seen.is_empty() {
                    *keys = keys.start.min(seen.start)..keys.end.max(seen.end);
                }
            }
            // A block that starts with a query without visible keys gets one key, which the mask hides.
            _ => {
                let keys = if seen.is_empty() { 0..1 } else { seen.clone() };
                blocks.push(Block { queries: query..query + 1, keys });
            }
        }
    }
    blocks
}

impl HeadsAttention {
    /// Mask that hides a block's keys from its queries, or `None` if every query sees every key.
    ///
    /// The shape is `(1, 1, T, S)`, or `(B, 1, T, S)` if each sequence has its own visible keys.
    fn hidden(&self, block: &Block, queries: usize, device: &Device) -> Result<Option<Tensor>> {
        let of_texts = self.visible.chunks(queries).map(|of_text| &of_text[block.queries.clone()]);
        let seen: Vec<Range<usize>> = of_texts.flatten().map(|seen| block.seen(seen)).collect();
        let keys = block.keys.len();
        if seen.iter().all(|seen| seen.len() == keys) {
            return Ok(None);
        }
        let mut hidden = vec![f32::NEG_INFINITY; seen.len() * keys];
        for (row, seen) in hidden.chunks_mut(keys).zip(&seen) {
            row[seen.clone()].fill(0.0);
        }
        let sequences = seen.len() / block.queries.len();
        Tensor::from_vec(hidden, (sequences, 1, block.queries.len(), keys), device).map(Some)
    }
}

impl HeadsAttention {
    /// Number of visible keys for each query, if every range is a prefix and no scores are added.
    fn prefixes(&self, batch: usize) -> Option<Vec<usize>> {
        let is_prefix = |seen: &Range<usize>| seen.start == 0 && seen.end > 0;
        let is_plain = self.added.is_none() && self.visible.iter().all(is_prefix);
        is_plain.then(|| (0..batch).flat_map(|_| self.visible.iter().map(|seen| seen.end)).collect())
    }

    /// Attention on an NVIDIA GPU, or `None` if its kernels do not apply.
    fn on_gpu(&self, projections: &[&Tensor]) -> Result<Option<Tensor>> {
        if !projections[0].device().is_cuda() {
            return Ok(None);
        }
        let Some(prefixes) = self.prefixes(projections[0].dim(0)?) else { return Ok(None) };
        let [q, k, v] = self.constant_heads(projections)?;
        cuda::heads_attention([&q, &k, &v], self.scale, &prefixes, self.dropout)
    }

    /// Heads of the projections as constants.
    fn constant_heads(&self, projections: &[&Tensor]) -> Result<[Tensor; 3]> {
        let constants = projections.iter().map(|x| x.detach().contiguous()).collect::<Result<Vec<_>>>()?;
        heads_of(&constants.iter().collect::<Vec<_>>(), self.heads)
    }
}

/// Attention on an NVIDIA GPU; the backward pass recomputes the weights.
///
/// The weights are the largest tensors that training would save.
struct AttentionOnGpu(HeadsAttention);

impl Operation for AttentionOnGpu {
    fn name(&self) -> &'static str {
        "heads-attention"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let Self(attention) = self;
        let projections: Vec<&Tensor> = inputs.iter().collect();
        let [q, k, v] = attention.constant_heads(&projections)?;
        let (batch, tokens, _) = gradient.dims3()?;
        let gradient = gradient.detach().contiguous()?.reshape((batch, tokens, attention.heads, ()))?;
        let gradients = inputs.iter().map(|x| x.detach().zeros_like()).collect::<Result<Vec<_>>>()?;
        let results = attention.constant_heads(&gradients.iter().collect::<Vec<_>>())?;
        let prefixes = attention.prefixes(batch).unwrap_or_default();
        let is_computed = cuda::heads_attention_backward(
            [&q, &k, &v],
            &gradient.transpose(1, 2)?,
            results.each_ref(),
            attention.scale,
            &prefixes,
            attention.dropout,
        )?;
        on_its_gpu(is_computed.then_some(()), self)?;
        inputs.iter().zip(gradients).try_for_each(|(input, gradient)| sums.add(input, gradient))
    }
}

/// Number of parts (queries, keys, values) that the tensor at `index` of `tensors` concatenates.
fn parts_of(tensors: usize, index: usize) -> usize {
    match (tensors, index) {
        (1, _) => 3,
        (2, 1) => 2,
        _ => 1,
    }
}

/// Axis sizes of attention.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    queries: usize,
    keys: usize,
    head_dim: usize,
    value_dim: usize,
}

impl HeadsAttention {
    /// Checks the shapes and returns the sizes.
    fn sizes(&self, projections: &[&Tensor]) -> Result<Sizes> {
        let Self { heads, scale, visible, .. } = self;
        if !(*scale > 0.0 && scale.is_finite()) {
            return Err(KernelError::AttentionScale { found: *scale }.into());
        }
        let shapes: Vec<Vec<usize>> = projections.iter().map(|tensor| tensor.dims().to_vec()).collect();
        let unfit = || KernelError::Projections { heads: *heads, found: shapes.clone() };
        if projections.is_empty() || projections.len() > 3 {
            return Err(unfit().into());
        }
        let mut widths = Vec::new();
        for (index, shape) in shapes.iter().enumerate() {
            let parts = parts_of(shapes.len(), index);
            let [_, _, width] = shape[..] else { return Err(unfit().into()) };
            if *heads == 0 || width == 0 || !width.is_multiple_of(parts * heads) {
                return Err(unfit().into());
            }
            widths.extend(std::iter::repeat_n(width / (parts * heads), parts));
        }
        let (batch, queries) = (shapes[0][0], shapes[0][1]);
        let keys = shapes[shapes.len() - 1][1];
        let is_one_memory = shapes[1..].iter().all(|shape| shape[..2] == [batch, keys]);
        let is_seen =
            visible.len() == queries && visible.iter().all(|seen| !seen.is_empty() && seen.end <= keys);
        match widths[..] {
            [head_dim, key_dim, value_dim] if head_dim == key_dim && is_one_memory && is_seen => {
                Ok(Sizes { batch, queries, keys, head_dim, value_dim })
            }
            _ => Err(unfit().into()),
        }
    }

    /// Calls `work` with the elements of the tensors and the parameters of the attention kernel.
    fn with_elements<T: CpuFloat, R>(
        &self,
        tensors: &[&Tensor],
        sizes: Sizes,
        work: impl FnOnce(&[&[T]], Attention<'_, T>) -> Result<R>,
    ) -> Result<R> {
        let Sizes { batch, queries, keys, head_dim, value_dim } = sizes;
        let attention = Attention {
            batch,
            queries,
            keys,
            heads: self.heads,
            head_dim,
            value_dim,
            scale: self.scale,
            visible: &self.visible,
            added: None,
            dropout: self.dropout,
        };
        let Some(added) = &self.added else {
            return with_slices(tensors, |slices| work(slices, attention));
        };
        let added = added_rows(added, [batch, self.heads, queries, keys], T::DTYPE)?;
        let (storage, layout) = added.storage_and_layout();
        let values = &T::cpu_storage_as_slice(on_the_cpu(&storage)?)?[layout.start_offset()..];
        let stride = |axis: usize| layout.stride().get(axis).copied().unwrap_or(0);
        let added = Some(AddedScores { values, strides: [stride(0), stride(1), stride(2)] });
        with_slices(tensors, |slices| work(slices, Attention { added, ..attention }))
    }
}

/// Broadcasts added scores to `shape`; the values of each query are contiguous.
fn added_rows(added: &Tensor, shape: [usize; 4], dtype: DType) -> Result<Tensor> {
    let mut dims = added.dims().to_vec();
    while dims.len() < shape.len() {
        dims.insert(0, 1);
    }
    let mut rows = added.to_dtype(dtype)?.reshape(&dims[..])?;
    if let Some(last) = dims.last_mut() {
        *last = shape[3];
        rows = rows.broadcast_as(&dims[..])?.contiguous()?;
    }
    rows.broadcast_as(&shape[..])
}

impl Operation for HeadsAttention {
    fn name(&self) -> &'static str {
        "heads-attention"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        fn backward<T: CpuFloat>(
            attention: &HeadsAttention,
            inputs: &[&Tensor],
            gradient: &Tensor,
        ) -> Result<Vec<Tensor>> {
            let sizes = attention.sizes(inputs)?;
            let tensors = [inputs, &[gradient]].concat();
            let gradients = attention.with_elements(&tensors, sizes, |slices, attention| {
                let (qkv, gradient) = slices.split_at(inputs.len());
                Ok(T::attention_backward(qkv, gradient[0], attention))
            })?;
            let tensor =
                |(values, input): (Vec<T>, &&Tensor)| Tensor::from_vec(values, input.shape(), input.device());
            gradients.into_iter().zip(inputs).map(tensor).collect()
        }
        let tensors: Vec<&Tensor> = inputs.iter().collect();
        let gradients = for_float!(gradient.dtype(), backward(self, &tensors, gradient))?;
        inputs.iter().zip(gradients).try_for_each(|(input, gradient)| sums.add(input, gradient))
    }
}
