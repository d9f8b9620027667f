//! Attention on NVIDIA GPUs, and writes of keys and values to the KV cache.
//!
//! A single query, or a step of a few tokens, runs as one kernel. Its blocks share the keys of a query if
//! there are many keys and few heads. Many queries run as two cuBLAS products, with a kernel for mask and
//! softmax between them. Training has a backward pass for this form too. Queries, keys and values are read in
//! place, with any strides.

#![expect(unsafe_code, reason = "kernels are launched with arguments that the compiler cannot check")]

use std::ops::Range;

use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView};
use candle_core::{D, DType, Result, Shape, Tensor};
use candle_gpt2_arithmetic::Dropout;
use half::{bf16, f16};

use super::launch::{Element, Read, Shared, Strides, TensorMemory, applies, by_type, counted, tensor};
use super::products::{Factor, Matrices, Product, Sizes, Write, is_one_piece, product, sums};
use super::signatures::{
    ATTENTION_KEYS, Attend, PrefixSoftmax, ROW_THREADS, SPLIT_BLOCKS, SoftmaxBackward, StepAttention,
    WriteTokens,
};
use super::training::launch_drop;
use crate::on_gpu::{Draws, MAX_SCORES_ON_GPU};
use crate::widths::WIDEST_SINGLE_QUERY;

/// Maximum head widths that the single-query kernels are compiled for.
const HEAD_WIDTHS: [usize; 3] = [64, 128, WIDEST_SINGLE_QUERY];
/// Maximum number of blocks along the second and third axes of a grid.
const MAX_BLOCKS_ACROSS: usize = 65_535;
/// Axis of the tokens in a `(B, H, T, D)` tensor.
const TOKEN_DIM: usize = 2;

/// Attention where each query sees a prefix of the keys; see [`crate::prefix_attention_on_gpu`].
pub(crate) fn prefix_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    visible: &[usize],
) -> Result<Option<Tensor>> {
    if !applies(&[q, k, v]) {
        return Ok(None);
    }
    let (batch, heads, query_len, head_dim) = q.dims4()?;
    let (_, _, key_len, value_dim) = v.dims4()?;
    let fits = k.dims() == [batch, heads, key_len, head_dim]
        && v.dims() == [batch, heads, key_len, value_dim]
        && batch <= MAX_BLOCKS_ACROSS
        && visible.len() == batch * query_len
        && visible.iter().all(|keys| (1..=key_len).contains(keys));
    if !fits {
        return Ok(None);
    }
    let visible = &Counts::upload(visible, query_len, q.device().as_cuda_device()?)?;
    match compiled_width(head_dim, value_dim).filter(|_| query_len == 1) {
        Some(width) => by_type!(q.dtype(), attend(width, [q, k, v], scale, visible)),
        None => {
            let many = ManyQueries { visible, scale, dropout: None };
            by_type!(q.dtype(), attend_many(many, [q, k, v]))?.transpose(1, 2)
        }
    }
    .map(Some)
}

/// Self-attention like [`crate::step_attention`], given the tensors of the projection.
///
/// `x` is `(B, T, C)`, `weight` `(3 · H · D, C)` and `bias` `(3 · H · D)`.
pub(crate) fn step_attention(
    [x, weight, bias]: [&Tensor; 3],
    memories: [&Tensor; 2],
    scale: f64,
    positions: &Tensor,
) -> Result<Option<Tensor>> {
    let (batch, heads, capacity, head_dim) = memories[0].dims4()?;
    let tokens = positions.dim(D::Minus1)?;
    let fits = memories[1].dims() == memories[0].dims()
        && memories.iter().all(|memory| memory.is_contiguous())
        && bias.dims() == [3 * heads * head_dim]
        && weight.dim(0)? == 3 * heads * head_dim
        && x.dims() == [batch, tokens, weight.dim(1)?]
        && batch * tokens <= MAX_BLOCKS_ACROSS
        && tokens <= capacity
        && positions.dims() == [batch, tokens]
        && positions.dtype() == DType::U32
        && positions.is_contiguous()
        && positions.device().same_device(x.device())
        && is_one_piece(weight)?
        && applies(&[x, weight, bias, memories[0], memories[1]]);
    let Some(width) = compiled_width(head_dim, head_dim).filter(|_| fits) else { return Ok(None) };
    by_type!(x.dtype(), launch_step(width, [x, weight, bias], memories, scale, positions)).map(Some)
}

/// Writes keys and values into the cache's tensors and returns whether the kernel applies.
///
/// Callers must check positions and shapes.
pub(crate) fn write_tokens(
    memories: [&Tensor; 2],
    tokens: [&Tensor; 2],
    positions: &[usize],
) -> Result<bool> {
    let is_writable = positions.len() <= MAX_BLOCKS_ACROSS
        && memories[1].dims() == memories[0].dims()
        && tokens[1].dims() == tokens[0].dims()
        && memories.iter().all(|memory| memory.is_contiguous())
        && applies(&[memories[0], memories[1], tokens[0], tokens[1]]);
    if is_writable {
        let first_positions = Counts::upload(positions, 1, memories[0].device().as_cuda_device()?)?;
        by_type!(tokens[0].dtype(), launch_write_tokens(memories, tokens, &first_positions))?;
    }
    Ok(is_writable)
}

/// Width of the smallest compiled single-query kernel that supports this head width.
fn compiled_width(head_dim: usize, value_dim: usize) -> Option<usize> {
    HEAD_WIDTHS.into_iter().find(|width| head_dim <= *width && value_dim == head_dim)
}

/// Grid of a kernel for `queries` queries in each of `heads` heads, with up to `keys` keys.
///
/// One block per query and head could leave most of a large GPU idle. If there are few queries and heads,
/// several blocks share the keys of a query. The kernel may read the actual number of keys from memory, so a
/// recording uses the grid for the maximum number, and its blocks share the keys of every step.
fn query_grid(queries: usize, heads: usize, keys: usize) -> Result<(u32, u32, u32)> {
    // Blocks leave partial results in memory shared by all launches, which run in order on the device's one
    // stream.
    let most = SPLIT_BLOCKS as usize / (queries * heads);
    let blocks = keys.div_ceil(ATTENTION_KEYS as usize).min(most).max(1);
    Ok((counted(heads)?, counted(queries)?, counted(blocks)?))
}

/// Key counts (one per query) or positions (one per row), in the form that the kernels take.
///
/// A single number suffices if all rows start with the same number, and it grows by one from each query to
/// the next. Otherwise, the list is uploaded.
struct Counts {
    list: Option<CudaSlice<u32>>,
    first: u32,
}

impl Counts {
    fn upload(numbers: &[usize], query_len: usize, device: &CudaDevice) -> Result<Self> {
        let first = numbers.first().copied().unwrap_or_default();
        let is_regular = numbers.iter().enumerate().all(|(row, number)| *number == first + row % query_len);
        let list = if is_regular {
            None
        } else {
            let list = numbers.iter().map(|number| counted(*number)).collect::<Result<Vec<_>>>()?;
            Some(device.clone_htod(&list)?)
        };
        Ok(Self { list, first: counted(first)? })
    }

    fn list(&self) -> Option<Read<'_, u32>> {
        self.list.as_ref().map(CudaSlice::as_view)
    }
}

impl Strides {
    fn of(x: &Tensor) -> Result<Self> {
        match x.stride() {
            [batch, head, token, _] => Ok(Self { batch: *batch, head: *head, token: *token }),
            other => candle_core::bail!("attention: expected a 4-D tensor, found {} dimensions", other.len()),
        }
    }

    /// Whether the heads of all sequences are equally spaced in memory.
    fn are_even(&self, heads: usize) -> bool {
        self.batch == heads * self.head
    }

    /// Strides of a contiguous tensor.
    fn in_one_piece(heads: usize, tokens: usize, width: usize) -> Self {
        Self { batch: heads * tokens * width, head: tokens * width, token: width }
    }
}

/// Returns `x`, or a copy of it, with contiguous rows that do not overlap.
///
/// Kernels and products support any strides of the other axes.
fn with_whole_rows(x: &Tensor) -> Result<Tensor> {
    match x.stride() {
        [.., token, 1] if *token >= x.dim(D::Minus1)? || x.dim(TOKEN_DIM)? == 1 => Ok(x.clone()),
        _ => x.contiguous(),
    }
}

/// Like [`with_whole_rows`], but also spaces all heads of all sequences equally.
///
/// A single batched product can then serve all sequences.
fn with_even_heads(x: &Tensor) -> Result<Tensor> {
    let x = with_whole_rows(x)?;
    if Strides::of(&x)?.are_even(x.dim(1)?) { Ok(x) } else { x.contiguous() }
}

/// Attention of `q` `(B, H, 1, D)` over `k` and `v` `(B, H, S, D)`; returns `(B, H, 1, D)`.
fn attend<T: Element>(width: usize, [q, k, v]: [&Tensor; 3], scale: f64, visible: &Counts) -> Result<Tensor> {
    let (q, k, v) = (with_whole_rows(q)?, with_whole_rows(k)?, with_whole_rows(v)?);
    let device = q.device().as_cuda_device()?;
    let (batch, heads, _, head_dim) = q.dims4()?;
    let grid = query_grid(batch, heads, k.dim(TOKEN_DIM)?)?;
    let (held_q, held_k, held_v) = (TensorMemory::new(&q), TensorMemory::new(&k), TensorMemory::new(&v));
    // SAFETY: the kernel writes every element.
    let mut context = unsafe { device.alloc::<T>(batch * heads * head_dim)? };
    #[expect(clippy::cast_possible_truncation, reason = "the scores are f32 in the kernel")]
    let parameters = Attend::<T> {
        q: held_q.values()?,
        k: held_k.values()?,
        v: held_v.values()?,
        context: context.as_view_mut(),
        query_strides: Strides::of(&q)?,
        key_strides: Strides::of(&k)?,
        value_strides: Strides::of(&v)?,
        list: visible.list(),
        first: visible.first,
        head_dim: counted(head_dim)?,
        scale: scale as f32,
    };
    // SAFETY: the strides match the tensors, whose rows are contiguous and no wider than the kernel
    // supports. The list has a number for each batch row, from 1 to the number of keys.
    unsafe { parameters.launch(device, &format!("attend_{width}"), grid)? };
    Ok(tensor(context, device, &Shape::from((batch, heads, 1, head_dim))))
}

/// Launches a self-attention step and returns the contexts `(B, T, H · D)`.
fn launch_step<T: Product>(
    width: usize,
    [x, weight, bias]: [&Tensor; 3],
    memories: [&Tensor; 2],
    scale: f64,
    positions: &Tensor,
) -> Result<Tensor> {
    let (x, bias) = (x.contiguous()?, bias.contiguous()?);
    let device = x.device().as_cuda_device()?;
    let (batch, heads, capacity, head_dim) = memories[0].dims4()?;
    let tokens = x.dim(1)?;
    let queries = batch * tokens;
    let grid = query_grid(queries, heads, capacity)?;
    let sums = sums::<T>(&x, weight)?; // (B, T, 3, H, D)
    let (held_bias, held_positions) = (TensorMemory::new(&bias), TensorMemory::new(positions));
    let [held_keys, held_values] = memories.map(TensorMemory::new);
    // SAFETY: the kernel writes every element.
    let mut context = unsafe { device.alloc::<T>(queries * heads * head_dim)? };
    #[expect(clippy::cast_possible_truncation, reason = "the scores are f32 in the kernel")]
    let parameters = StepAttention::<T> {
        sums: sums.as_view(),
        bias: held_bias.values()?,
        key_memory: Shared(held_keys.values()?),
        value_memory: Shared(held_values.values()?),
        context: context.as_view_mut(),
        positions: held_positions.values()?,
        tokens: counted(tokens)?,
        capacity: counted(capacity)?,
        head_dim: counted(head_dim)?,
        scale: scale as f32,
    };
    // SAFETY: `sums`, `bias` and the memories are contiguous and hold all heads and rows. No head is wider
    // than the kernel supports, no row has more tokens than the memory's capacity, and each token has a
    // position. In the memories, the kernel writes only at the positions of a row's tokens in each head. All
    // work of this device runs in the order of one stream.
    unsafe { parameters.launch(device, &format!("step_attention_{width}"), grid)? };
    Ok(tensor(context, device, &Shape::from((batch, tokens, heads * head_dim))))
}

/// Number of score rows per block, one for each warp.
const ROW_WARPS: u32 = ROW_THREADS / 32;
/// Maximum number of scores in a small sequence.
///
/// For a small sequence, launching separate products takes longer than copying queries, keys and values for
/// one product of all sequences.
const FEW_SCORES: usize = 1 << 20;

/// Attention of many queries: two cuBLAS products, with a kernel for mask and softmax in between.
///
/// It processes the sequences in chunks that fit into the memory limit for scores.
#[derive(Clone, Copy)]
struct ManyQueries<'a> {
    visible: &'a Counts,
    scale: f64,
    dropout: Option<Dropout>,
}

/// Axis sizes for attention of many queries.
#[derive(Clone, Copy)]
struct AttentionSizes {
    batch: usize,
    heads: usize,
    queries: usize,
    keys: usize,
    head_dim: usize,
    value_dim: usize,
}

impl AttentionSizes {
    fn of([q, _, v]: [&Tensor; 3]) -> Result<Self> {
        let (batch, heads, queries, head_dim) = q.dims4()?;
        let (_, _, keys, value_dim) = v.dims4()?;
        Ok(Self { batch, heads, queries, keys, head_dim, value_dim })
    }

    /// Number of scores in one sequence.
    fn scores(self) -> usize {
        self.heads * self.queries * self.keys
    }

    /// Chunks of sequences that are processed together.
    fn sequences(self) -> impl Iterator<Item = Range<usize>> {
        let at_once = (MAX_SCORES_ON_GPU / self.scores()).min(MAX_BLOCKS_ACROSS / self.heads).max(1);
        (0..self.batch).step_by(at_once).map(move |first| first..self.batch.min(first + at_once))
    }

    /// Views the scores or weights of a chunk of sequences as rows.
    fn scores_of<'a, T>(self, values: CudaView<'a, T>) -> Rows<'a, T> {
        Rows { values, strides: Strides::in_one_piece(self.heads, self.queries, self.keys) }
    }

    /// Sizes of one product per head, `(queries, inner)` × `(inner, columns)`.
    fn product(self, inner: usize, columns: usize) -> Sizes {
        Sizes { count: self.heads, rows: self.queries, inner, columns }
    }

    /// Sizes of one product per head, `(keys, queries)` × `(queries, columns)`.
    fn transposed_product(self, columns: usize) -> Sizes {
        Sizes { count: self.heads, rows: self.keys, inner: self.queries, columns }
    }

    /// Whether there are several sequences and each one is small.
    fn are_small(self) -> bool {
        self.batch > 1 && self.scores() <= FEW_SCORES
    }

    /// Returns the function that lays out tensors for products.
    ///
    /// Small sequences get equally spaced heads, so that one product serves several of them.
    fn readable(self) -> fn(&Tensor) -> Result<Tensor> {
        if self.are_small() { with_even_heads } else { with_whole_rows }
    }
}

/// View of a `(B, H, T, D)` tensor with contiguous rows.
struct Rows<'a, T> {
    values: CudaView<'a, T>,
    strides: Strides,
}

impl<'a, T: Element> Rows<'a, T> {
    fn of(held: &'a TensorMemory<'_>, x: &Tensor) -> Result<Self> {
        Ok(Self { values: held.values()?, strides: Strides::of(x)? })
    }

    /// View of a range of sequences.
    fn sequences(&self, sequences: &Range<usize>) -> Rows<'_, T> {
        Rows { values: self.values.slice(sequences.start * self.strides.batch..), strides: self.strides }
    }

    /// Matrices of all heads, starting with the given sequence.
    fn from(&self, sequence: usize) -> Matrices<'_, T> {
        let Strides { batch, head, token } = self.strides;
        Matrices { values: self.values.slice(sequence * batch..), row: token, each: head }
    }
}

/// Computes `result = factor * left * right` for the heads of `sequences` sequences.
///
/// If all heads are equally spaced, this is one batched product. Otherwise, it is one product per sequence.
fn products<T: Product, R: Product>(
    device: &CudaDevice,
    (sequences, sizes): (usize, Sizes),
    factor: f32,
    left: Factor<&Rows<'_, T>>,
    right: Factor<&Rows<'_, T>>,
    result: &Rows<'_, R>,
) -> Result<()> {
    let heads = sizes.count;
    let is_even = |rows: &Rows<'_, T>| rows.strides.are_even(heads);
    let (Factor::AsItIs(left_rows) | Factor::Transposed(left_rows)) = left;
    let (Factor::AsItIs(right_rows) | Factor::Transposed(right_rows)) = right;
    let are_even = is_even(left_rows) && is_even(right_rows) && result.strides.are_even(heads);
    let (turns, at_once) = if are_even { (1, sequences) } else { (sequences, 1) };
    let sizes = Sizes { count: heads * at_once, ..sizes };
    for sequence in 0..turns {
        let (left, right) = (left.map(|rows| rows.from(sequence)), right.map(|rows| rows.from(sequence)));
        product(device, sizes, factor, left, right, (result.from(sequence), Write::Over))?;
    }
    Ok(())
}

impl ManyQueries<'_> {
    /// Attention weights for a range of sequences, the softmax of their scores: `(sequences, H, T, S)`.
    fn weights<T: Product>(
        self,
        [queries, keys]: [&Rows<'_, T>; 2],
        sizes: AttentionSizes,
        sequences: Range<usize>,
        device: &CudaDevice,
    ) -> Result<CudaSlice<T>> {
        #[expect(clippy::cast_possible_truncation, reason = "the products take an f32 factor")]
        let scale = self.scale as f32;
        // SAFETY: the products write every element.
        let scores = unsafe { device.alloc::<f32>(sequences.len() * sizes.scores())? };
        let of_sequences = (sequences.len(), sizes.product(sizes.head_dim, sizes.keys));
        let left = Factor::AsItIs(&queries.sequences(&sequences));
        let right = Factor::Transposed(&keys.sequences(&sequences));
        products(device, of_sequences, scale, left, right, &sizes.scores_of(scores.as_view()))?;
        // SAFETY: the kernel writes every element.
        let mut weights = unsafe { device.alloc::<T>(scores.len())? };
        let rows = counted(sequences.len() * sizes.heads * sizes.queries)?;
        let parameters = PrefixSoftmax::<T> {
            scores: scores.as_view(),
            weights: weights.as_view_mut(),
            list: self.list_of(&sequences, sizes),
            first: self.visible.first,
            heads: counted(sizes.heads)?,
            queries: counted(sizes.queries)?,
            keys: counted(sizes.keys)?,
            rows,
        };
        // SAFETY: scores and weights have `rows` rows of `keys` elements. The list has a number for each
        // query of each sequence, at most the number of keys.
        unsafe { parameters.launch(device, "prefix_softmax", (rows.div_ceil(ROW_WARPS), 1, 1))? };
        Ok(weights)
    }

    /// Number of visible keys for each query in a range of sequences.
    fn list_of(&self, sequences: &Range<usize>, sizes: AttentionSizes) -> Option<Read<'_, u32>> {
        let list = self.visible.list.as_ref()?;
        Some(list.slice(sequences.start * sizes.queries..sequences.end * sizes.queries))
    }

    /// Applies dropout to the weights, or their gradients, for a range of sequences.
    ///
    /// Returns `None` if there is no dropout.
    fn dropped<T: Element>(
        &self,
        weights: CudaView<'_, T>,
        sizes: AttentionSizes,
        sequences: &Range<usize>,
        device: &CudaDevice,
    ) -> Result<Option<CudaSlice<T>>> {
        let Some(dropout) = self.dropout else { return Ok(None) };
        let AttentionSizes { heads, queries, keys: width, .. } = sizes;
        let (rows, first_query) = (sequences.len() * heads * queries, sequences.start * heads * queries);
        let draws = Draws { rows, width, tokens: queries, queries, first_query, first: 0 };
        launch_drop(weights, dropout, &draws, device).map(Some)
    }

    /// Gradient of the scores for a range of sequences, from the gradient of their softmax.
    fn softmax_backward<T: Element>(
        &self,
        weights: &CudaSlice<T>,
        gradient: CudaView<'_, f32>,
        sizes: AttentionSizes,
        sequences: &Range<usize>,
        device: &CudaDevice,
    ) -> Result<CudaSlice<T>> {
        // SAFETY: the kernel writes every element.
        let mut result = unsafe { device.alloc::<T>(weights.len())? };
        let rows = counted(sequences.len() * sizes.heads * sizes.queries)?;
        let parameters = SoftmaxBackward::<T> {
            weights: weights.as_view(),
            gradient,
            result: result.as_view_mut(),
            list: self.list_of(sequences, sizes),
            first: self.visible.first,
            heads: counted(sizes.heads)?,
            queries: counted(sizes.queries)?,
            keys: counted(sizes.keys)?,
            rows,
        };
        // SAFETY: same as for the softmax.
        unsafe { parameters.launch(device, "softmax_backward", (rows.div_ceil(ROW_WARPS), 1, 1))? };
        Ok(result)
    }
}

/// Attention of `q` `(B, H, T, D)` over `k` `(B, H, S, D)` and `v` `(B, H, S, Dv)`.
///
/// Returns `(B, T, H, Dv)`, which is a view if the sequences are small.
fn attend_many<T: Product>(many: ManyQueries<'_>, [q, k, v]: [&Tensor; 3]) -> Result<Tensor> {
    let sizes = AttentionSizes::of([q, k, v])?;
    let readable = sizes.readable();
    let (q, k, v) = (readable(q)?, readable(k)?, readable(v)?);
    let device = q.device().as_cuda_device()?;
    let [held_q, held_k, held_v] = [&q, &k, &v].map(TensorMemory::new);
    let (queries, keys) = (Rows::<T>::of(&held_q, &q)?, Rows::of(&held_k, &k)?);
    let values = Rows::<T>::of(&held_v, &v)?;
    let AttentionSizes { batch, heads, queries: query_len, value_dim, .. } = sizes;
    // SAFETY: the products write every element.
    let context = unsafe { device.alloc::<T>(batch * query_len * heads * value_dim)? };
    let strides = match sizes.are_small() {
        true => Strides::in_one_piece(heads, query_len, value_dim),
        false => Strides { batch: query_len * heads * value_dim, head: value_dim, token: heads * value_dim },
    };
    let contexts = Rows { values: context.as_view(), strides };
    for sequences in sizes.sequences() {
        let weights = many.weights([&queries, &keys], sizes, sequences.clone(), device)?;
        let dropped = many.dropped(weights.as_view(), sizes, &sequences, device)?;
        let weights = sizes.scores_of(dropped.as_ref().unwrap_or(&weights).as_view());
        let of_sequences = (sequences.len(), sizes.product(sizes.keys, value_dim));
        let right = Factor::AsItIs(&values.sequences(&sequences));
        products(
            device,
            of_sequences,
            1.0,
            Factor::AsItIs(&weights),
            right,
            &contexts.sequences(&sequences),
        )?;
    }
    match sizes.are_small() {
        true => tensor(context, device, &Shape::from((batch, heads, query_len, value_dim))).transpose(1, 2),
        false => Ok(tensor(context, device, &Shape::from((batch, query_len, heads, value_dim)))),
    }
}

/// Writes the gradients of queries, keys and values into `results`.
///
/// `gradient` is the gradient of the result of [`attend_many`], in the shape `(B, H, T, Dv)`.
fn attend_many_backward<T: Product>(
    many: ManyQueries<'_>,
    [q, k, v]: [&Tensor; 3],
    gradient: &Tensor,
    results: [&Tensor; 3],
) -> Result<()> {
    let sizes = AttentionSizes::of([q, k, v])?;
    let readable = sizes.readable();
    let (q, k, v, gradient) = (readable(q)?, readable(k)?, readable(v)?, readable(gradient)?);
    let device = q.device().as_cuda_device()?;
    let [held_q, held_k, held_v, held_gradient] = [&q, &k, &v, &gradient].map(TensorMemory::new);
    let (queries, keys) = (Rows::<T>::of(&held_q, &q)?, Rows::of(&held_k, &k)?);
    let (values, gradients) = (Rows::<T>::of(&held_v, &v)?, Rows::<T>::of(&held_gradient, &gradient)?);
    let held_results = results.map(TensorMemory::new);
    let mut of_results = Vec::with_capacity(results.len());
    for (held, result) in held_results.iter().zip(results) {
        of_results.push(Rows::<T>::of(held, result)?);
    }
    let [of_queries, of_keys, of_values] = &of_results[..] else { return Ok(()) };
    let AttentionSizes { head_dim, value_dim, .. } = sizes;
    #[expect(clippy::cast_possible_truncation, reason = "the products take an f32 factor")]
    let scale = many.scale as f32;
    for sequences in sizes.sequences() {
        let weights = many.weights([&queries, &keys], sizes, sequences.clone(), device)?;
        let dropped = many.dropped(weights.as_view(), sizes, &sequences, device)?;
        let kept = sizes.scores_of(dropped.as_ref().unwrap_or(&weights).as_view());
        let gradients = Factor::AsItIs(&gradients.sequences(&sequences));
        let of_sequences = (sequences.len(), sizes.transposed_product(value_dim));
        products(
            device,
            of_sequences,
            1.0,
            Factor::Transposed(&kept),
            gradients,
            &of_values.sequences(&sequences),
        )?;
        // SAFETY: the products write every element.
        let of_kept = unsafe { device.alloc::<f32>(weights.len())? };
        let of_sequences = (sequences.len(), sizes.product(value_dim, sizes.keys));
        let right = Factor::Transposed(&values.sequences(&sequences));
        products(device, of_sequences, 1.0, gradients, right, &sizes.scores_of(of_kept.as_view()))?;
        let of_weights = many.dropped(of_kept.as_view(), sizes, &sequences, device)?;
        let of_weights = of_weights.as_ref().unwrap_or(&of_kept).as_view();
        let of_scores = many.softmax_backward(&weights, of_weights, sizes, &sequences, device)?;
        let of_scores = sizes.scores_of(of_scores.as_view());
        let of_sequences = (sequences.len(), sizes.product(sizes.keys, head_dim));
        let right = Factor::AsItIs(&keys.sequences(&sequences));
        products(
            device,
            of_sequences,
            scale,
            Factor::AsItIs(&of_scores),
            right,
            &of_queries.sequences(&sequences),
        )?;
        let of_sequences = (sequences.len(), sizes.transposed_product(head_dim));
        let right = Factor::AsItIs(&queries.sequences(&sequences));
        products(
            device,
            of_sequences,
            scale,
            Factor::Transposed(&of_scores),
            right,
            &of_keys.sequences(&sequences),
        )?;
    }
    Ok(())
}

/// Attention for training, in which each query sees its first `visible` keys.
///
/// `q` is `(B, H, T, D)`, `k` `(B, H, S, D)` and `v` `(B, H, S, Dv)`, all constants. Returns `(B, T, H ·
/// Dv)`.
pub(crate) fn heads_attention(
    qkv: [&Tensor; 3],
    scale: f64,
    visible: &[usize],
    dropout: Option<Dropout>,
) -> Result<Option<Tensor>> {
    if !applies(&qkv) {
        return Ok(None);
    }
    let queries = qkv[0].dim(TOKEN_DIM)?;
    let visible = &Counts::upload(visible, queries, qkv[0].device().as_cuda_device()?)?;
    let many = ManyQueries { visible, scale, dropout };
    by_type!(qkv[0].dtype(), attend_many(many, qkv))?.flatten_from(TOKEN_DIM).map(Some)
}

/// Backward pass of [`heads_attention`]; returns whether the kernels apply.
///
/// It writes the gradients of queries, keys and values into `results`, which have their shapes and must have
/// no other reader. `gradient` is `(B, H, T, Dv)`.
pub(crate) fn heads_attention_backward(
    qkv: [&Tensor; 3],
    gradient: &Tensor,
    results: [&Tensor; 3],
    scale: f64,
    visible: &[usize],
    dropout: Option<Dropout>,
) -> Result<bool> {
    if !applies(&[qkv[0], qkv[1], qkv[2], gradient, results[0], results[1], results[2]]) {
        return Ok(false);
    }
    let queries = qkv[0].dim(TOKEN_DIM)?;
    let visible = &Counts::upload(visible, queries, qkv[0].device().as_cuda_device()?)?;
    let many = ManyQueries { visible, scale, dropout };
    by_type!(gradient.dtype(), attend_many_backward(many, qkv, gradient, results))?;
    Ok(true)
}

/// Writes `keys` and `values` `(B, H, T, D)` into contiguous `memories` `(B, H, S, D)`.
fn launch_write_tokens<T: Element>(
    memories: [&Tensor; 2],
    [keys, values]: [&Tensor; 2],
    first_positions: &Counts,
) -> Result<()> {
    let (keys, values) = (with_whole_rows(keys)?, with_whole_rows(values)?);
    let device = keys.device().as_cuda_device()?;
    let (batch, heads, capacity, head_dim) = memories[0].dims4()?;
    let (_, _, added, _) = keys.dims4()?;
    let blocks = (counted(heads)?, counted(batch)?, counted(added.min(MAX_BLOCKS_ACROSS))?);
    let (held_keys, held_values) = (TensorMemory::new(&keys), TensorMemory::new(&values));
    let [held_key_memory, held_value_memory] = memories.map(TensorMemory::new);
    let parameters = WriteTokens::<T> {
        keys: held_keys.values()?,
        values: held_values.values()?,
        key_memory: Shared(held_key_memory.values()?),
        value_memory: Shared(held_value_memory.values()?),
        key_strides: Strides::of(&keys)?,
        value_strides: Strides::of(&values)?,
        list: first_positions.list(),
        first: first_positions.first,
        tokens: counted(added)?,
        capacity: counted(capacity)?,
        head_dim: counted(head_dim)?,
    };
    // SAFETY: the strides match the tensors, whose rows are contiguous. The memories hold `capacity`
    // rows of `head_dim` elements for each head and batch row. The list has a number for each batch row. The
    // kernel writes nowhere else, and all work of this device runs in the order of one stream.
    unsafe { parameters.launch(device, "write_tokens", blocks) }
}
