//! Attention on NVIDIA GPUs, and writing the keys and values that it reads.
//!
//! One query, or a step of a few tokens, is one kernel, whose blocks share the keys if they are many and heads few. Many queries are two
//! matrix products, for which GPUs have units of their own, and a kernel for mask and softmax between them; training has their way back
//! too. Queries, keys and values are read where they lie, whatever their strides.

#![expect(unsafe_code, reason = "kernels are launched with arguments that the compiler cannot check")]

use std::ops::Range;

use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView};
use candle_core::{D, DType, Result, Shape, Tensor};
use candle_gpt2_arithmetic::Dropout;
use half::{bf16, f16};

use super::launch::{Element, Held, Read, Shared, Strides, applies, by_type, counted, tensor};
use super::products::{Factor, Matrices, Product, Sizes, Write, is_one_piece, product, sums};
use super::signatures::{
    ATTENTION_KEYS, Attend, PrefixSoftmax, ROW_THREADS, SPLIT_BLOCKS, SoftmaxBackward, StepAttention,
    WriteTokens,
};
use super::training::launch_drop;
use crate::on_gpu::{Draws, MOST_SCORES_ON_GPU};
use crate::widths::WIDEST_SINGLE_QUERY;

/// Widths of a head up to which a kernel for one query was compiled.
const HEAD_WIDTHS: [usize; 3] = [64, 128, WIDEST_SINGLE_QUERY];
/// Blocks along the second and the third axis of a grid.
const MAX_BLOCKS_ACROSS: usize = 65_535;
/// Axis of the tokens in a `(B, H, T, D)` tensor.
const TOKEN_DIM: usize = 2;

/// Attention over the first keys up to some number, as [`crate::prefix_attention`] computes it on the CPU.
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
    let visible = &Numbers::upload(visible, query_len, q.device().as_cuda_device()?)?;
    match compiled_width(head_dim, value_dim).filter(|_| query_len == 1) {
        Some(width) => by_type!(q.dtype(), attend(width, [q, k, v], scale, visible)),
        None => {
            let many = Many { visible, scale, dropout: None };
            by_type!(q.dtype(), attend_many(many, [q, k, v]))?.transpose(1, 2)
        }
    }
    .map(Some)
}

/// Self-attention as in [`crate::step_attention`], from the tensors of its projection: `x` `(B, T, C)`, `weight` `(3 · H · D, C)`
/// and `bias`.
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

/// Writes as [`crate::write_tokens`] does, which has checked places and shapes; says whether the kernel could.
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
        let places = Numbers::upload(positions, 1, memories[0].device().as_cuda_device()?)?;
        by_type!(tokens[0].dtype(), launch_write_tokens(memories, tokens, &places))?;
    }
    Ok(is_writable)
}

/// The width of a compiled kernel for one query that serves heads of this width.
fn compiled_width(head_dim: usize, value_dim: usize) -> Option<usize> {
    HEAD_WIDTHS.into_iter().find(|width| head_dim <= *width && value_dim == head_dim)
}

/// The grid of a kernel for so many queries of each head, which have up to `keys` keys. One block for each of them would
/// leave most of a large GPU idle, so if they are few, several share the keys of a query. How many keys there are, the kernel
/// may read from memory: a recording is made with the most of them, and its blocks share those of each step.
fn query_grid(queries: usize, heads: usize, keys: usize) -> Result<(u32, u32, u32)> {
    // Blocks leave their parts in memory that all launches share, which follow each other on the device's one stream.
    let most = SPLIT_BLOCKS as usize / (queries * heads);
    let blocks = keys.div_ceil(ATTENTION_KEYS as usize).min(most).max(1);
    Ok((counted(heads)?, counted(queries)?, counted(blocks)?))
}

/// Numbers of keys or places for each query or row, as the kernels take them: a list, or the first one if all rows have the
/// same and each next query of a row one more.
struct Numbers {
    list: Option<CudaSlice<u32>>,
    first: u32,
}

impl Numbers {
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
            other => candle_core::bail!("expected four axes, found {}", other.len()),
        }
    }

    /// Whether all heads of all texts are at one distance from each other.
    fn are_even(&self, heads: usize) -> bool {
        self.batch == heads * self.head
    }

    /// Of a tensor in one piece.
    fn in_one_piece(heads: usize, tokens: usize, width: usize) -> Self {
        Self { batch: heads * tokens * width, head: tokens * width, token: width }
    }
}

/// `x` with its rows in one piece and apart from each other; whatever else the strides are, kernels and products follow them.
fn with_whole_rows(x: &Tensor) -> Result<Tensor> {
    match x.stride() {
        [.., token, 1] if *token >= x.dim(D::Minus1)? || x.dim(TOKEN_DIM)? == 1 => Ok(x.clone()),
        _ => x.contiguous(),
    }
}

/// The same with the heads of all texts at one distance from each other, so that one product serves all of them.
fn with_even_heads(x: &Tensor) -> Result<Tensor> {
    let x = with_whole_rows(x)?;
    if Strides::of(&x)?.are_even(x.dim(1)?) { Ok(x) } else { x.contiguous() }
}

/// `q` `(B, H, 1, D)`, `k` and `v` `(B, H, S, D)`; returns `(B, H, 1, D)`.
fn attend<T: Element>(
    width: usize,
    [q, k, v]: [&Tensor; 3],
    scale: f64,
    visible: &Numbers,
) -> Result<Tensor> {
    let (q, k, v) = (with_whole_rows(q)?, with_whole_rows(k)?, with_whole_rows(v)?);
    let device = q.device().as_cuda_device()?;
    let (batch, heads, _, head_dim) = q.dims4()?;
    let grid = query_grid(batch, heads, k.dim(TOKEN_DIM)?)?;
    let (held_q, held_k, held_v) = (Held::new(&q), Held::new(&k), Held::new(&v));
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
    // SAFETY: the strides are those of the tensors, whose rows are in one piece and no wider than the kernel's, and the list has
    // a number for each batch row, from 1 to the number of keys.
    unsafe { parameters.launch(device, &format!("attend_{width}"), grid)? };
    Ok(tensor(context, device, &Shape::from((batch, heads, 1, head_dim))))
}

/// Returns `(B, T, H · D)`.
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
    let (held_bias, held_positions) = (Held::new(&bias), Held::new(positions));
    let [held_keys, held_values] = memories.map(Held::new);
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
    // SAFETY: sums, bias and memories are those of all heads and rows, each in one piece, no head is wider than the kernel's, no
    // row has more tokens than room, and there is a position for each. The kernel writes into the memories at the places of a row's
    // tokens in each head, and all work of this device is done in the order of one stream.
    unsafe { parameters.launch(device, &format!("step_attention_{width}"), grid)? };
    Ok(tensor(context, device, &Shape::from((batch, tokens, heads * head_dim))))
}

/// Rows of scores that a block works on, a warp each.
const ROW_WARPS: u32 = ROW_THREADS / 32;
/// Scores of a text up to which starting its products takes longer than copying its queries, keys and values for a product of all
/// texts.
const FEW_SCORES: usize = 1 << 20;

/// Attention of many queries: two matrix products, which GPUs have units for, with a kernel for mask and softmax between them, for as
/// many texts at once as there is room for.
#[derive(Clone, Copy)]
struct Many<'a> {
    visible: &'a Numbers,
    scale: f64,
    dropout: Option<Dropout>,
}

/// Sizes of an attention of many queries.
#[derive(Clone, Copy)]
struct ManySizes {
    batch: usize,
    heads: usize,
    queries: usize,
    keys: usize,
    head_dim: usize,
    value_dim: usize,
}

impl ManySizes {
    fn of([q, _, v]: [&Tensor; 3]) -> Result<Self> {
        let (batch, heads, queries, head_dim) = q.dims4()?;
        let (_, _, keys, value_dim) = v.dims4()?;
        Ok(Self { batch, heads, queries, keys, head_dim, value_dim })
    }

    /// Scores of a text.
    fn scores(self) -> usize {
        self.heads * self.queries * self.keys
    }

    /// The texts in turns.
    fn texts(self) -> impl Iterator<Item = Range<usize>> {
        let at_once = (MOST_SCORES_ON_GPU / self.scores()).min(MAX_BLOCKS_ACROSS / self.heads).max(1);
        (0..self.batch).step_by(at_once).map(move |first| first..self.batch.min(first + at_once))
    }

    /// Scores or weights of some texts.
    fn scores_of<'a, T>(self, values: CudaView<'a, T>) -> Rows<'a, T> {
        Rows { values, strides: Strides::in_one_piece(self.heads, self.queries, self.keys) }
    }

    /// `(queries, inner)` by `(inner, columns)` for each head.
    fn product(self, inner: usize, columns: usize) -> Sizes {
        Sizes { count: self.heads, rows: self.queries, inner, columns }
    }

    /// `(keys, queries)` by `(queries, columns)` for each head.
    fn transposed_product(self, columns: usize) -> Sizes {
        Sizes { count: self.heads, rows: self.keys, inner: self.queries, columns }
    }

    /// Whether there are several texts, of which each has little to do.
    fn are_small(self) -> bool {
        self.batch > 1 && self.scores() <= FEW_SCORES
    }

    /// Makes a tensor one that products can read, in few of them if texts are small.
    fn readable(self) -> fn(&Tensor) -> Result<Tensor> {
        if self.are_small() { with_even_heads } else { with_whole_rows }
    }
}

/// A `(B, H, T, D)` tensor whose rows are in one piece.
struct Rows<'a, T> {
    values: CudaView<'a, T>,
    strides: Strides,
}

impl<'a, T: Element> Rows<'a, T> {
    fn of(held: &'a Held<'_>, x: &Tensor) -> Result<Self> {
        Ok(Self { values: held.values()?, strides: Strides::of(x)? })
    }

    /// Those of some texts.
    fn texts(&self, texts: &Range<usize>) -> Rows<'_, T> {
        Rows { values: self.values.slice(texts.start * self.strides.batch..), strides: self.strides }
    }

    /// The matrices of all heads of a text and those after it.
    fn from(&self, text: usize) -> Matrices<'_, T> {
        let Strides { batch, head, token } = self.strides;
        Matrices { values: self.values.slice(text * batch..), row: token, each: head }
    }
}

/// `result = factor * left * right` for the heads of so many texts: one product if all heads are at even distances, else one for each
/// text.
fn products<T: Product, R: Product>(
    device: &CudaDevice,
    (texts, sizes): (usize, Sizes),
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
    let (turns, at_once) = if are_even { (1, texts) } else { (texts, 1) };
    let sizes = Sizes { count: heads * at_once, ..sizes };
    for text in 0..turns {
        let (left, right) = (left.map(|rows| rows.from(text)), right.map(|rows| rows.from(text)));
        product(device, sizes, factor, left, right, (result.from(text), Write::Over))?;
    }
    Ok(())
}

impl Many<'_> {
    /// The softmax of the scores of some texts, `(texts, H, T, S)`.
    fn weights<T: Product>(
        self,
        [queries, keys]: [&Rows<'_, T>; 2],
        sizes: ManySizes,
        texts: Range<usize>,
        device: &CudaDevice,
    ) -> Result<CudaSlice<T>> {
        #[expect(clippy::cast_possible_truncation, reason = "the products take an f32 factor")]
        let scale = self.scale as f32;
        // SAFETY: the products write every element.
        let scores = unsafe { device.alloc::<f32>(texts.len() * sizes.scores())? };
        let of_texts = (texts.len(), sizes.product(sizes.head_dim, sizes.keys));
        let left = Factor::AsItIs(&queries.texts(&texts));
        let right = Factor::Transposed(&keys.texts(&texts));
        products(device, of_texts, scale, left, right, &sizes.scores_of(scores.as_view()))?;
        // SAFETY: the kernel writes every element.
        let mut weights = unsafe { device.alloc::<T>(scores.len())? };
        let rows = counted(texts.len() * sizes.heads * sizes.queries)?;
        let parameters = PrefixSoftmax::<T> {
            scores: scores.as_view(),
            weights: weights.as_view_mut(),
            list: self.list_of(&texts, sizes),
            first: self.visible.first,
            heads: counted(sizes.heads)?,
            queries: counted(sizes.queries)?,
            keys: counted(sizes.keys)?,
            rows,
        };
        // SAFETY: scores and weights are `rows` rows of `keys` elements, and the list has a number for each query of each text,
        // none above that of the keys.
        unsafe { parameters.launch(device, "prefix_softmax", (rows.div_ceil(ROW_WARPS), 1, 1))? };
        Ok(weights)
    }

    /// What the queries of some texts see.
    fn list_of(&self, texts: &Range<usize>, sizes: ManySizes) -> Option<Read<'_, u32>> {
        let list = self.visible.list.as_ref()?;
        Some(list.slice(texts.start * sizes.queries..texts.end * sizes.queries))
    }

    /// What dropout leaves of weights, or of their gradients, of some texts.
    fn dropped<T: Element>(
        &self,
        weights: CudaView<'_, T>,
        sizes: ManySizes,
        texts: &Range<usize>,
        device: &CudaDevice,
    ) -> Result<Option<CudaSlice<T>>> {
        let Some(dropout) = self.dropout else { return Ok(None) };
        let ManySizes { heads, queries, keys: width, .. } = sizes;
        let (rows, first_query) = (texts.len() * heads * queries, texts.start * heads * queries);
        let draws = Draws { rows, width, tokens: queries, queries, first_query, first: 0 };
        launch_drop(weights, dropout, &draws, device).map(Some)
    }

    /// The gradient of the scores of some texts from that of their softmax.
    fn softmax_backward<T: Element>(
        &self,
        weights: &CudaSlice<T>,
        gradient: CudaView<'_, f32>,
        sizes: ManySizes,
        texts: &Range<usize>,
        device: &CudaDevice,
    ) -> Result<CudaSlice<T>> {
        // SAFETY: the kernel writes every element.
        let mut result = unsafe { device.alloc::<T>(weights.len())? };
        let rows = counted(texts.len() * sizes.heads * sizes.queries)?;
        let parameters = SoftmaxBackward::<T> {
            weights: weights.as_view(),
            gradient,
            result: result.as_view_mut(),
            list: self.list_of(texts, sizes),
            first: self.visible.first,
            heads: counted(sizes.heads)?,
            queries: counted(sizes.queries)?,
            keys: counted(sizes.keys)?,
            rows,
        };
        // SAFETY: as for the softmax.
        unsafe { parameters.launch(device, "softmax_backward", (rows.div_ceil(ROW_WARPS), 1, 1))? };
        Ok(result)
    }
}

/// `q` `(B, H, T, D)`, `k` `(B, H, S, D)`, `v` `(B, H, S, Dv)`; returns `(B, T, H, Dv)`, a view for small texts.
fn attend_many<T: Product>(many: Many<'_>, [q, k, v]: [&Tensor; 3]) -> Result<Tensor> {
    let sizes = ManySizes::of([q, k, v])?;
    let readable = sizes.readable();
    let (q, k, v) = (readable(q)?, readable(k)?, readable(v)?);
    let device = q.device().as_cuda_device()?;
    let [held_q, held_k, held_v] = [&q, &k, &v].map(Held::new);
    let (queries, keys) = (Rows::<T>::of(&held_q, &q)?, Rows::of(&held_k, &k)?);
    let values = Rows::<T>::of(&held_v, &v)?;
    let ManySizes { batch, heads, queries: query_len, value_dim, .. } = sizes;
    // SAFETY: the products write every element.
    let context = unsafe { device.alloc::<T>(batch * query_len * heads * value_dim)? };
    let strides = match sizes.are_small() {
        true => Strides::in_one_piece(heads, query_len, value_dim),
        false => Strides { batch: query_len * heads * value_dim, head: value_dim, token: heads * value_dim },
    };
    let contexts = Rows { values: context.as_view(), strides };
    for texts in sizes.texts() {
        let weights = many.weights([&queries, &keys], sizes, texts.clone(), device)?;
        let dropped = many.dropped(weights.as_view(), sizes, &texts, device)?;
        let weights = sizes.scores_of(dropped.as_ref().unwrap_or(&weights).as_view());
        let of_texts = (texts.len(), sizes.product(sizes.keys, value_dim));
        let right = Factor::AsItIs(&values.texts(&texts));
        products(device, of_texts, 1.0, Factor::AsItIs(&weights), right, &contexts.texts(&texts))?;
    }
    match sizes.are_small() {
        true => tensor(context, device, &Shape::from((batch, heads, query_len, value_dim))).transpose(1, 2),
        false => Ok(tensor(context, device, &Shape::from((batch, query_len, heads, value_dim)))),
    }
}

/// The gradients of queries, keys and values, written into `results`, from that of what [`attend_many`] returns, in the shape
/// `(B, H, T, Dv)`.
fn attend_many_backward<T: Product>(
    many: Many<'_>,
    [q, k, v]: [&Tensor; 3],
    gradient: &Tensor,
    results: [&Tensor; 3],
) -> Result<()> {
    let sizes = ManySizes::of([q, k, v])?;
    let readable = sizes.readable();
    let (q, k, v, gradient) = (readable(q)?, readable(k)?, readable(v)?, readable(gradient)?);
    let device = q.device().as_cuda_device()?;
    let [held_q, held_k, held_v, held_gradient] = [&q, &k, &v, &gradient].map(Held::new);
    let (queries, keys) = (Rows::<T>::of(&held_q, &q)?, Rows::of(&held_k, &k)?);
    let (values, gradients) = (Rows::<T>::of(&held_v, &v)?, Rows::<T>::of(&held_gradient, &gradient)?);
    let held_results = results.map(Held::new);
    let mut of_results = Vec::with_capacity(results.len());
    for (held, result) in held_results.iter().zip(results) {
        of_results.push(Rows::<T>::of(held, result)?);
    }
    let [of_queries, of_keys, of_values] = &of_results[..] else { return Ok(()) };
    let ManySizes { head_dim, value_dim, .. } = sizes;
    #[expect(clippy::cast_possible_truncation, reason = "the products take an f32 factor")]
    let scale = many.scale as f32;
    for texts in sizes.texts() {
        let weights = many.weights([&queries, &keys], sizes, texts.clone(), device)?;
        let dropped = many.dropped(weights.as_view(), sizes, &texts, device)?;
        let kept = sizes.scores_of(dropped.as_ref().unwrap_or(&weights).as_view());
        let gradients = Factor::AsItIs(&gradients.texts(&texts));
        let of_texts = (texts.len(), sizes.transposed_product(value_dim));
        products(device, of_texts, 1.0, Factor::Transposed(&kept), gradients, &of_values.texts(&texts))?;
        // SAFETY: the products write every element.
        let of_kept = unsafe { device.alloc::<f32>(weights.len())? };
        let of_texts = (texts.len(), sizes.product(value_dim, sizes.keys));
        let right = Factor::Transposed(&values.texts(&texts));
        products(device, of_texts, 1.0, gradients, right, &sizes.scores_of(of_kept.as_view()))?;
        let of_weights = many.dropped(of_kept.as_view(), sizes, &texts, device)?;
        let of_weights = of_weights.as_ref().unwrap_or(&of_kept).as_view();
        let of_scores = many.softmax_backward(&weights, of_weights, sizes, &texts, device)?;
        let of_scores = sizes.scores_of(of_scores.as_view());
        let of_texts = (texts.len(), sizes.product(sizes.keys, head_dim));
        let right = Factor::AsItIs(&keys.texts(&texts));
        products(device, of_texts, scale, Factor::AsItIs(&of_scores), right, &of_queries.texts(&texts))?;
        let of_texts = (texts.len(), sizes.transposed_product(head_dim));
        let right = Factor::AsItIs(&queries.texts(&texts));
        products(device, of_texts, scale, Factor::Transposed(&of_scores), right, &of_keys.texts(&texts))?;
    }
    Ok(())
}

/// Attention in training: `q` `(B, H, T, D)`, `k` `(B, H, S, D)`, `v` `(B, H, S, Dv)`, constants, of which each query sees the first
/// `visible` keys; returns `(B, T, H · Dv)`.
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
    let visible = &Numbers::upload(visible, queries, qkv[0].device().as_cuda_device()?)?;
    let many = Many { visible, scale, dropout };
    by_type!(qkv[0].dtype(), attend_many(many, qkv))?.flatten_from(TOKEN_DIM).map(Some)
}

/// The way back: writes the gradients of queries, keys and values into `results`, tensors in their shapes that nothing else reads.
/// `gradient` `(B, H, T, Dv)`. Says whether the kernels could.
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
    let visible = &Numbers::upload(visible, queries, qkv[0].device().as_cuda_device()?)?;
    let many = Many { visible, scale, dropout };
    by_type!(gradient.dtype(), attend_many_backward(many, qkv, gradient, results))?;
    Ok(true)
}

/// `memories` `(B, H, S, D)`, contiguous; `keys` and `values` `(B, H, T, D)`.
fn launch_write_tokens<T: Element>(
    memories: [&Tensor; 2],
    [keys, values]: [&Tensor; 2],
    places: &Numbers,
) -> Result<()> {
    let (keys, values) = (with_whole_rows(keys)?, with_whole_rows(values)?);
    let device = keys.device().as_cuda_device()?;
    let (batch, heads, capacity, head_dim) = memories[0].dims4()?;
    let (_, _, added, _) = keys.dims4()?;
    let blocks = (counted(heads)?, counted(batch)?, counted(added.min(MAX_BLOCKS_ACROSS))?);
    let (held_keys, held_values) = (Held::new(&keys), Held::new(&values));
    let [held_key_memory, held_value_memory] = memories.map(Held::new);
    let parameters = WriteTokens::<T> {
        keys: held_keys.values()?,
        values: held_values.values()?,
        key_memory: Shared(held_key_memory.values()?),
        value_memory: Shared(held_value_memory.values()?),
        key_strides: Strides::of(&keys)?,
        value_strides: Strides::of(&values)?,
        list: places.list(),
        first: places.first,
        tokens: counted(added)?,
        capacity: counted(capacity)?,
        head_dim: counted(head_dim)?,
    };
    // SAFETY: the strides are those of the tensors, whose rows are in one piece, the memories hold `capacity` rows of `head_dim`
    // for each head and batch row, and the list has a number for each batch row. The kernel writes nowhere else, and all work of
    // this device is done in the order of one stream.
    unsafe { parameters.launch(device, "write_tokens", blocks) }
}
