// Inference and training kernels for NVIDIA GPUs, which fuse several launches of candle's kernels into one.
// The Rust files in this folder launch them.
//
// Values are f32, f16 or bf16 in memory and f32 in registers; each result is rounded once. Intermediate
// results of matrix products stay in f32. Letters in shapes: B batch, T queries, S keys, H heads, D head
// size.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

constexpr unsigned WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffff;
// `signatures.rs` repeats these constants.
/// Threads and warps of a block that attends with one query.
constexpr unsigned ATTENTION_THREADS = 512, ATTENTION_WARPS = ATTENTION_THREADS / WARP;
/// Keys that such a block and each warp load together, to wait for memory once instead of per key.
constexpr unsigned ATTENTION_KEYS = 64, KEYS_AT_ONCE = ATTENTION_KEYS / ATTENTION_WARPS;
/// Maximum number of blocks in a launch that split the keys of their queries, and maximum head size.
constexpr unsigned SPLIT_BLOCKS = 256, WIDEST_HEAD = 256;
/// Threads of a block that processes a row, and of one that writes the rows of one head.
constexpr unsigned ROW_THREADS = 256, HEAD_THREADS = 64;
/// Columns of a row per thread in the backward pass of a layer norm.
constexpr unsigned NORM_COLUMNS = 8;
/// Threads of a block in a product of a few rows, and maximum number of lanes that share a row.
constexpr unsigned PRODUCT_THREADS = 512, MAX_LANES = 8;
/// Maximum number of rows of such a product in f32.
constexpr unsigned MAX_ROWS = 4;
/// Dropout samples four words per counter.
///
/// The words of sixteen consecutive counters are transposed: the first words of all, then the second words,
/// and so on.
constexpr unsigned DRAW_WORDS = 4, DRAW_LANES = 16, DRAW_GROUP = DRAW_WORDS * DRAW_LANES;

__device__ float value_of(float x) { return x; }
__device__ float value_of(__half x) { return __half2float(x); }
__device__ float value_of(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T> __device__ T rounded(float x);
template <> __device__ float rounded(float x) { return x; }
template <> __device__ __half rounded(float x) { return __float2half_rn(x); }
template <> __device__ __nv_bfloat16 rounded(float x) { return __float2bfloat16_rn(x); }

__device__ float warp_sum(float x) {
  for (unsigned distance = WARP / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
  return x;
}

__device__ float warp_max(float x) {
  for (unsigned distance = WARP / 2; distance > 0; distance /= 2)
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, distance));
  return x;
}

/// Combines a value of every thread of the block and returns the result to all of them.
///
/// `shared` holds one value per warp.
template <float (*COMBINED)(float)> __device__ float over_block(float x, float neutral, float *shared) {
  const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  x = COMBINED(x);
  __syncthreads(); // an earlier result may still be in use
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  return COMBINED(lane < blockDim.x / WARP ? shared[lane] : neutral);
}

constexpr float SQRT_2_OVER_PI = 0.7978845608028654f, GELU_CUBE = 0.044715f;

/// GELU in the tanh approximation of GPT-2.
__device__ float gelu(float x) { return 0.5f * x * (1.0f + tanhf(SQRT_2_OVER_PI * (x + GELU_CUBE * x * x * x))); }

/// Derivative of `gelu`.
__device__ float gelu_slope(float x) {
  const float bent = tanhf(SQRT_2_OVER_PI * (x + GELU_CUBE * x * x * x));
  return 0.5f * (1.0f + bent) + 0.5f * x * (1.0f - bent * bent) * SQRT_2_OVER_PI * (1.0f + 3.0f * GELU_CUBE * x * x);
}

/// Operation after the bias: none, GELU or residual addition.
enum Finish { NOTHING, GELU, ADD };

/// Returns the bias plus, for `ADD`, the residual at index `place`.
template <typename T, Finish FINISH> __device__ float added(T bias, const T *residual, size_t place) {
  return value_of(bias) + (FINISH == ADD ? value_of(residual[place]) : 0.0f);
}

/// Applies the activation, if any, and rounds the result.
template <typename T, Finish FINISH> __device__ T finished(float sum) {
  return rounded<T>(FINISH == GELU ? gelu(sum) : sum);
}

/// Computes y = sums + bias, followed by GELU or the addition of `residual`.
///
/// `sums`, `y` and `residual` are `(rows, width)`, `bias` is `(width)`. `residual` is null except for `ADD`.
/// Any grid.
template <typename T, Finish FINISH>
__device__ void add_bias(const float *sums, const T *bias, const T *residual, T *y, size_t count, unsigned width) {
  const size_t step = size_t(gridDim.x) * blockDim.x;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
    y[i] = finished<T, FINISH>(sums[i] + added<T, FINISH>(bias[i % width], residual, i));
}

/// Multiplies `x` by a matrix. Calls `finish(row, column, sum)` for each result.
///
/// Sums start at `start_of(row, column)`. `x` is `(rows, inner)` with up to `ROWS` rows. `weight` is
/// `(inner, columns)`, aligned to 16 bytes, and `columns` is a multiple of `16 / sizeof(T)`.
///
/// A thread loads 16 bytes of a matrix row at a time, and several rows before it waits for any. `lanes`
/// adjacent threads, a power of two up to `MAX_LANES`, cover `16 * lanes` bytes of a row for their block. The
/// other threads take other rows.
template <unsigned ROWS, typename T, typename S, typename F>
__device__ void row_product(const T *x, const T *weight, unsigned rows, unsigned inner, unsigned columns, unsigned lanes,
                            S start_of, F finish) {
  constexpr unsigned WIDTH = sizeof(uint4) / sizeof(T), AT_ONCE = ROWS > 1 ? 4 : 8, COUNT = ROWS * WIDTH;
  __shared__ float partial[PRODUCT_THREADS / WARP][ROWS * MAX_LANES * WIDTH];
  const unsigned lane = threadIdx.x % lanes, slice = threadIdx.x / lanes, slices = blockDim.x / lanes;
  const unsigned width = lanes * WIDTH, block_column = blockIdx.x * width, column = block_column + lane * WIDTH;
  const unsigned own_row = threadIdx.x / width, own = block_column + threadIdx.x % width;
  const bool has_own = own_row < rows && own < columns;
  // Loads the initial sum while the weight is loading.
  float sum = has_own ? start_of(own_row, own) : 0.0f;
  float sums[COUNT] = {};
  for (unsigned start = slice; start < inner && column < columns; start += AT_ONCE * slices) {
    uint4 loaded[AT_ONCE] = {};
    float factors[AT_ONCE][ROWS] = {};
#pragma unroll
    for (unsigned i = 0; i < AT_ONCE; i++) {
      const unsigned place = start + i * slices;
      if (place >= inner) continue;
      loaded[i] = *reinterpret_cast<const uint4 *>(weight + size_t(place) * columns + column);
#pragma unroll
      for (unsigned row = 0; row < ROWS; row++)
        if (row < rows) factors[i][row] = value_of(x[size_t(row) * inner + place]);
    }
#pragma unroll
    for (unsigned i = 0; i < AT_ONCE; i++) {
      const T *values = reinterpret_cast<const T *>(&loaded[i]);
#pragma unroll
      for (unsigned j = 0; j < WIDTH; j++) {
        const float value = value_of(values[j]);
#pragma unroll
        for (unsigned row = 0; row < ROWS; row++) sums[row * WIDTH + j] += factors[i][row] * value;
      }
    }
  }
  for (unsigned distance = WARP / 2; distance >= lanes; distance /= 2)
    for (unsigned i = 0; i < COUNT; i++) sums[i] += __shfl_xor_sync(ALL_LANES, sums[i], distance);
  if (threadIdx.x % WARP < lanes)
    for (unsigned i = 0; i < COUNT; i++)
      partial[threadIdx.x / WARP][i / WIDTH * width + lane * WIDTH + i % WIDTH] = sums[i];
  __syncthreads();
  if (!has_own) return;
  for (unsigned warp = 0; warp < blockDim.x / WARP; warp++) sum += partial[warp][threadIdx.x];
  finish(own_row, own, sum);
}

/// Calls `row_product` with the supported number of rows: up to `MAX_ROWS` in f32, otherwise one.
template <typename T, typename S, typename F>
__device__ void product_of_few_rows(const T *x, const T *weight, unsigned rows, unsigned inner, unsigned columns,
                                    unsigned lanes, S start_of, F finish) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (rows > 1) return row_product<MAX_ROWS>(x, weight, rows, inner, columns, lanes, start_of, finish);
  }
  row_product<1>(x, weight, rows, inner, columns, lanes, start_of, finish);
}

/// Layer norm with parameters of type `P`. One block for each row of `width` values.
template <typename T, typename P>
__device__ void layer_norm(const T *x, const P *weight, const P *bias, T *y, unsigned width, float epsilon) {
  __shared__ float shared[WARP];
  const size_t start = size_t(blockIdx.x) * width;
  x += start;
  y += start;
  // Loads a thread's first columns and their parameters into registers before any wait.
  float values[NORM_COLUMNS], weights[NORM_COLUMNS], biases[NORM_COLUMNS], total = 0.0f, squares = 0.0f;
#pragma unroll
  for (unsigned j = 0; j < NORM_COLUMNS; j++) {
    const unsigned i = j * ROW_THREADS + threadIdx.x;
    if (i >= width) continue;
    values[j] = value_of(x[i]);
    weights[j] = value_of(weight[i]);
    biases[j] = value_of(bias[i]);
    total += values[j];
  }
  const unsigned rest = NORM_COLUMNS * ROW_THREADS + threadIdx.x;
  for (unsigned i = rest; i < width; i += ROW_THREADS) total += value_of(x[i]);
  const float mean = over_block<warp_sum>(total, 0.0f, shared) / width;
#pragma unroll
  for (unsigned j = 0; j < NORM_COLUMNS; j++)
    if (j * ROW_THREADS + threadIdx.x < width) squares += (values[j] - mean) * (values[j] - mean);
  for (unsigned i = rest; i < width; i += ROW_THREADS) {
    const float centered = value_of(x[i]) - mean;
    squares += centered * centered;
  }
  const float deviation = sqrtf(over_block<warp_sum>(squares, 0.0f, shared) / width + epsilon);
#pragma unroll
  for (unsigned j = 0; j < NORM_COLUMNS; j++) {
    const unsigned i = j * ROW_THREADS + threadIdx.x;
    if (i < width) y[i] = rounded<T>((values[j] - mean) / deviation * weights[j] + biases[j]);
  }
  for (unsigned i = rest; i < width; i += ROW_THREADS) {
    const float normalized = (value_of(x[i]) - mean) / deviation;
    y[i] = rounded<T>(normalized * value_of(weight[i]) + value_of(bias[i]));
  }
}

/// Returns the number of keys visible to a query: from the list, or `first + query` without one.
__device__ unsigned visible_keys(const unsigned *list, unsigned first, unsigned batch, unsigned queries, unsigned query) {
  return list ? list[batch * queries + query] : first + query;
}

/// Returns the row of this warp, for kernels with one row per warp.
__device__ unsigned row_of_warp() { return blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP; }

/// Softmax of `scores` over the visible keys; zero for the others.
///
/// Shape `(B, H, T, S)`, with `rows` rows in all; one warp for each row of S.
template <typename T>
__device__ void prefix_softmax(const float *scores, T *weights, const unsigned *list, unsigned first, unsigned heads,
                               unsigned queries, unsigned keys, unsigned rows) {
  const unsigned row = row_of_warp(), lane = threadIdx.x % WARP;
  if (row >= rows) return;
  const unsigned count = visible_keys(list, first, row / queries / heads, queries, row % queries);
  scores += size_t(row) * keys;
  weights += size_t(row) * keys;
  float largest = -INFINITY, total = 0.0f;
#pragma unroll 4
  for (unsigned key = lane; key < count; key += WARP) largest = fmaxf(largest, scores[key]);
  largest = warp_max(largest);
#pragma unroll 4
  for (unsigned key = lane; key < count; key += WARP) total += expf(scores[key] - largest);
  const float factor = 1.0f / warp_sum(total);
#pragma unroll 4
  for (unsigned key = lane; key < count; key += WARP) weights[key] = rounded<T>(expf(scores[key] - largest) * factor);
  for (unsigned key = count + lane; key < keys; key += WARP) weights[key] = rounded<T>(0.0f);
}

/// Strides of a `(B, H, T, D)` tensor.
struct Strides {
  size_t batch, head, token;
};

/// Writes the keys and values of new tokens to the KV cache.
///
/// Each row starts at its position in the list, or at `first` without one. `keys` and `values` are
/// `(B, H, T, D)`. The cache is `(B, H, S, D)` and contiguous. Blocks for each head and batch row, and any
/// number of them for the tokens.
template <typename T>
__device__ void write_tokens(const T *keys, const T *values, T *key_memory, T *value_memory, Strides key_strides,
                             Strides value_strides, const unsigned *list, unsigned first, unsigned tokens,
                             unsigned capacity, unsigned head_dim) {
  const unsigned head = blockIdx.x, batch = blockIdx.y;
  if (list) first = list[batch];
  keys += batch * key_strides.batch + head * key_strides.head;
  values += batch * value_strides.batch + head * value_strides.head;
  const size_t memory = (size_t(batch) * gridDim.x + head) * capacity;
  for (unsigned token = blockIdx.z; token < tokens && first + token < capacity; token += gridDim.z) {
    const size_t place = (memory + first + token) * head_dim;
    for (unsigned d = threadIdx.x; d < head_dim; d += blockDim.x) {
      key_memory[place + d] = keys[token * key_strides.token + d];
      value_memory[place + d] = values[token * value_strides.token + d];
    }
  }
}

/// Partial softmax result: largest score, sum of exponentials relative to it, and weighted values.
template <unsigned WIDTH> struct Part {
  float largest, sum, context[WIDTH];
};

/// Returns the shift for exponentials of scores: the largest score, or 0 if it is -inf.
///
/// A shift of -inf would produce NaN, although another part may have finite scores.
__device__ float shift_of(float largest) { return largest == -INFINITY ? 0.0f : largest; }

/// Merges partial results, for element `d` of the context.
///
/// A part without scores has the maximum -inf and does not contribute.
template <unsigned WIDTH> __device__ Part<1> joined(const Part<WIDTH> *parts, unsigned count, unsigned d) {
  Part<1> all = {-INFINITY, 0.0f, {0.0f}};
  for (unsigned i = 0; i < count; i++) all.largest = fmaxf(all.largest, parts[i].largest);
  for (unsigned i = 0; i < count; i++) {
    const float factor = expf(parts[i].largest - shift_of(all.largest));
    all.sum += factor * parts[i].sum;
    all.context[0] += factor * parts[i].context[d];
  }
  return all;
}

/// Partial results of each block for the last block of its query.
///
/// The memory belongs to the module, so only one launch can use it at a time.
__device__ Part<WIDEST_HEAD> parts_of_blocks[SPLIT_BLOCKS];
/// Number of blocks of each query that have finished; zero between launches.
__device__ unsigned arrived_blocks[SPLIT_BLOCKS];

/// Reports whether this block is the last of the `blocks` of `query`; it then sees all their writes.
__device__ bool is_last_block(unsigned query, unsigned blocks) {
  __shared__ bool is_last;
  __syncthreads(); // all threads of the block have written
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(&arrived_blocks[query], 1) + 1 == blocks;
    __threadfence();
    if (is_last) arrived_blocks[query] = 0;
  }
  __syncthreads();
  return is_last;
}

/// Range of the `count` keys of a query that this block processes.
///
/// The z axis of the grid splits the keys as evenly as the block's load size allows. The first `blocks`
/// blocks have keys, the others none.
struct Split {
  unsigned start, end, blocks;

  __device__ explicit Split(unsigned count) {
    const unsigned reads = (count + ATTENTION_KEYS - 1) / ATTENTION_KEYS;
    const unsigned share = (reads + gridDim.z - 1) / gridDim.z * ATTENTION_KEYS;
    start = blockIdx.z * share;
    end = min(start + share, count);
    blocks = (count + share - 1) / share;
  }
};

/// Attention of one query over its keys, loading each key and value once.
///
/// Each warp of a block has its own keys and partial softmax, merged at the end. If several blocks split the
/// keys, the last one to finish merges their results, always in the same order. A separate kernel for the
/// merge would cost more. `q` and `context` are `(D)`, with D at most `WARP * CHUNKS`. `key_step` and
/// `value_step` are the distances between keys and values. `row` is the index of the query.
template <unsigned CHUNKS, typename Q, typename T>
__device__ void attend_keys(const Q *q, const T *k, const T *v, T *context, size_t key_step, size_t value_step,
                            const Split &split, unsigned row, unsigned head_dim, float scale) {
  __shared__ Part<WARP * CHUNKS> parts[ATTENTION_WARPS];
  static_assert(WARP * CHUNKS <= WIDEST_HEAD && WIDEST_HEAD <= ATTENTION_THREADS, "a thread for each element");
  const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  float query[CHUNKS], total[CHUNKS], largest = -INFINITY, sum = 0.0f;
  for (unsigned chunk = 0; chunk < CHUNKS; chunk++) {
    const unsigned d = chunk * WARP + lane;
    query[chunk] = d < head_dim ? scale * value_of(q[d]) : 0.0f;
    total[chunk] = 0.0f;
  }
  for (unsigned start = split.start + warp * KEYS_AT_ONCE; start < split.end; start += ATTENTION_KEYS) {
    float scores[KEYS_AT_ONCE], values[KEYS_AT_ONCE][CHUNKS];
#pragma unroll
    for (unsigned i = 0; i < KEYS_AT_ONCE; i++) {
      // Past the end, the last key is loaded again with weight zero.
      const size_t key = min(start + i, split.end - 1);
      scores[i] = 0.0f;
#pragma unroll
      for (unsigned chunk = 0; chunk < CHUNKS; chunk++) {
        const unsigned d = chunk * WARP + lane;
        scores[i] += d < head_dim ? query[chunk] * value_of(k[key * key_step + d]) : 0.0f;
        values[i][chunk] = d < head_dim ? value_of(v[key * value_step + d]) : 0.0f;
      }
    }
    float new_largest = largest;
#pragma unroll
    for (unsigned i = 0; i < KEYS_AT_ONCE; i++) {
      scores[i] = start + i < split.end ? warp_sum(scores[i]) : -INFINITY;
      new_largest = fmaxf(new_largest, scores[i]);
    }
    const float shift = shift_of(new_largest), kept = expf(largest - shift);
    largest = new_largest;
    sum *= kept;
    for (unsigned chunk = 0; chunk < CHUNKS; chunk++) total[chunk] *= kept;
#pragma unroll
    for (unsigned i = 0; i < KEYS_AT_ONCE; i++) {
      const float weight = expf(scores[i] - shift);
      sum += weight;
      for (unsigned chunk = 0; chunk < CHUNKS; chunk++) total[chunk] += weight * values[i][chunk];
    }
  }

  if (lane == 0) {
    parts[warp].largest = largest;
    parts[warp].sum = sum;
  }
  for (unsigned chunk = 0; chunk < CHUNKS; chunk++) parts[warp].context[chunk * WARP + lane] = total[chunk];
  __syncthreads();
  const unsigned d = min(threadIdx.x, head_dim - 1);
  Part<1> all = joined(parts, ATTENTION_WARPS, d);
  if (split.blocks > 1) {
    Part<WIDEST_HEAD> *blocks = parts_of_blocks + row * gridDim.z, &own = blocks[blockIdx.z];
    if (threadIdx.x == 0) {
      own.largest = all.largest;
      own.sum = all.sum;
    }
    if (threadIdx.x < head_dim) own.context[d] = all.context[0];
    if (!is_last_block(row, split.blocks)) return;
    all = joined(blocks, split.blocks, d);
  }
  if (threadIdx.x < head_dim) context[d] = rounded<T>(all.context[0] / all.sum);
}

/// Attention of one query per head and batch row: softmax(scale · q kᵀ) v over the visible keys.
///
/// Blocks for each head and batch row, and any number of them for the keys; if more than one, at most
/// `SPLIT_BLOCKS` in all. `context` is `(B, H, D)`.
template <typename T, unsigned CHUNKS>
__device__ void attend(const T *q, const T *k, const T *v, T *context, Strides query_strides, Strides key_strides,
                       Strides value_strides, const unsigned *list, unsigned first, unsigned head_dim, float scale) {
  const unsigned head = blockIdx.x, batch = blockIdx.y, row = batch * gridDim.x + head;
  const Split split(visible_keys(list, first, batch, 1, 0));
  if (split.start >= split.end) return;
  q += batch * query_strides.batch + head * query_strides.head;
  k += batch * key_strides.batch + head * key_strides.head;
  v += batch * value_strides.batch + head * value_strides.head;
  attend_keys<CHUNKS>(q, k, v, context + size_t(row) * head_dim, key_strides.token, value_strides.token, split, row,
                      head_dim, scale);
}

/// Self-attention of `tokens` new tokens per row, with a causal mask.
///
/// Adds the bias to the sums of queries, keys and values, and writes the keys and values to the KV cache at
/// `positions`, which are consecutive within a row. Each query attends to all keys up to its own. `sums` is
/// `(B, T, 3, H, D)`, `bias` is `(3, H, D)`. The cache is `(B, H, S, D)` and contiguous. `positions` is
/// `(B, T)`, `context` is `(B, T, H, D)`. Blocks as for `attend`, for each query.
template <typename T, unsigned CHUNKS>
__device__ void step_attention(const float *sums, const T *bias, T *key_memory, T *value_memory, T *context,
                               const unsigned *positions, unsigned tokens, unsigned capacity, unsigned head_dim,
                               float scale) {
  __shared__ float query[WARP * CHUNKS];
  const unsigned head = blockIdx.x, batch = blockIdx.y / tokens, token = blockIdx.y % tokens;
  // A row without capacity overwrites only its own last tokens.
  const unsigned first = min(positions[batch * tokens], capacity - tokens);
  const Split split(first + token + 1);
  if (split.start >= split.end) return;
  const unsigned row = blockIdx.y * gridDim.x + head;
  const size_t width = size_t(gridDim.x) * head_dim;
  const size_t memory = (size_t(batch) * gridDim.x + head) * capacity * head_dim;
  sums += size_t(batch) * tokens * 3 * width + head * head_dim;
  bias += head * head_dim;
  key_memory += memory;
  value_memory += memory;
  // Rounds the query like its keys.
  for (unsigned d = threadIdx.x; d < head_dim; d += blockDim.x)
    query[d] = value_of(rounded<T>(sums[token * 3 * width + d] + value_of(bias[d])));
  // Each block writes the new keys and values that it reads; other blocks of the row write the same values.
  const unsigned first_new = max(split.start, first);
  for (unsigned place = first_new + threadIdx.x / HEAD_THREADS; place < split.end; place += blockDim.x / HEAD_THREADS) {
    const float *projected = sums + (place - first) * 3 * width;
    for (unsigned d = threadIdx.x % HEAD_THREADS; d < head_dim; d += HEAD_THREADS) {
      key_memory[size_t(place) * head_dim + d] = rounded<T>(projected[width + d] + value_of(bias[width + d]));
      value_memory[size_t(place) * head_dim + d] = rounded<T>(projected[2 * width + d] + value_of(bias[2 * width + d]));
    }
  }
  __syncthreads();
  attend_keys<CHUNKS>(query, key_memory, value_memory, context + size_t(row) * head_dim, head_dim, head_dim, split, row,
                      head_dim, scale);
}

/// Computes the four words of Philox4x32-10 for a counter of a stream.
///
/// `dropout.rs` in the arithmetic crate samples the same words.
__device__ void philox(size_t seed, size_t stream, size_t counter, unsigned words[DRAW_WORDS]) {
  constexpr unsigned ROUNDS = 10, FACTORS[] = {0xD2511F53, 0xCD9E8D57}, STEPS[] = {0x9E3779B9, 0xBB67AE85};
  unsigned key[] = {unsigned(seed), unsigned(seed >> 32)};
  words[0] = unsigned(counter);
  words[1] = unsigned(counter >> 32);
  words[2] = unsigned(stream);
  words[3] = unsigned(stream >> 32);
#pragma unroll
  for (unsigned round = 0; round < ROUNDS; round++) {
    const size_t a = size_t(FACTORS[0]) * words[0], b = size_t(FACTORS[1]) * words[2];
    words[0] = unsigned(b >> 32) ^ words[1] ^ key[0];
    words[1] = unsigned(b);
    words[2] = unsigned(a >> 32) ^ words[3] ^ key[1];
    words[3] = unsigned(a);
    key[0] += STEPS[0];
    key[1] += STEPS[1];
  }
}

/// Dropout: zeroes elements with a random word below `limit` and multiplies the others by `factor`.
///
/// `x` and `y` are `(rows, width)`. Row `r` uses the words from index `first` on of the stream
/// `r / tokens * queries + first_query + r % tokens`. Any grid.
template <typename T>
__device__ void drop(const T *x, T *y, size_t rows, size_t width, unsigned tokens, unsigned queries, unsigned first_query,
                     unsigned first, size_t seed, size_t limit, float factor) {
  const size_t first_counter = first / DRAW_GROUP * DRAW_LANES, end = first + width;
  const size_t counters = (end + DRAW_GROUP - 1) / DRAW_GROUP * DRAW_LANES - first_counter;
  const size_t step = size_t(gridDim.x) * blockDim.x;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * counters; i += step) {
    const size_t row = i / counters, counter = first_counter + i % counters;
    unsigned draws[DRAW_WORDS];
    philox(seed, row / tokens * queries + first_query + row % tokens, counter, draws);
#pragma unroll
    for (unsigned word = 0; word < DRAW_WORDS; word++) {
      const size_t place = counter / DRAW_LANES * DRAW_GROUP + word * DRAW_LANES + counter % DRAW_LANES;
      if (place < first || place >= end) continue;
      const size_t at = row * width + place - first;
      y[at] = rounded<T>(draws[word] >= limit ? value_of(x[at]) * factor : 0.0f);
    }
  }
}

/// Performs an AdamW step in place.
///
/// `mean` and `square` are the running means of the gradient, multiplied by `factor`, and of its square. All
/// arrays have `count` elements. Any grid.
template <typename T>
__device__ void adamw(T *parameter, T *mean, T *square, const T *gradient, size_t count, float factor, float keep_mean,
                      float add_mean, float keep_square, float add_square, float keep, float rate, float root_factor,
                      float epsilon) {
  const size_t step = size_t(gridDim.x) * blockDim.x;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const float change = factor * value_of(gradient[i]);
    const float new_mean = keep_mean * value_of(mean[i]) + add_mean * change;
    const float new_square = keep_square * value_of(square[i]) + add_square * change * change;
    mean[i] = rounded<T>(new_mean);
    square[i] = rounded<T>(new_square);
    const float root = sqrtf(new_square) * root_factor + epsilon;
    parameter[i] = rounded<T>(keep * value_of(parameter[i]) - rate * (new_mean / root));
  }
}

/// GELU of each element. Any grid.
template <typename T> __device__ void activate(const T *x, T *y, size_t count) {
  const size_t step = size_t(gridDim.x) * blockDim.x;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
    y[i] = rounded<T>(gelu(value_of(x[i])));
}

/// Backward pass of `activate`. Any grid.
template <typename T> __device__ void activate_backward(const T *x, const T *gradient, T *result, size_t count) {
  const size_t step = size_t(gridDim.x) * blockDim.x;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
    result[i] = rounded<T>(value_of(gradient[i]) * gelu_slope(value_of(x[i])));
}

/// Backward pass of a layer norm.
///
/// Writes the gradient of the input, and to `sums` `(gridDim.x, 2, width)` each block's partial gradients of
/// weight and bias. Rows have up to `NORM_COLUMNS * ROW_THREADS` values, kept in registers. Any grid.
template <typename T>
__device__ void norm_backward(const T *x, const float *weight, const T *gradient, T *result, float *sums, unsigned rows,
                              unsigned width, float epsilon) {
  __shared__ float shared[WARP];
  float of_weight[NORM_COLUMNS] = {}, of_bias[NORM_COLUMNS] = {};
  for (unsigned row = blockIdx.x; row < rows; row += gridDim.x) {
    const size_t start = size_t(row) * width;
    float normalized[NORM_COLUMNS], given[NORM_COLUMNS], total = 0.0f, squares = 0.0f, sum = 0.0f, product = 0.0f;
#pragma unroll
    for (unsigned j = 0; j < NORM_COLUMNS; j++) {
      const unsigned i = j * ROW_THREADS + threadIdx.x;
      normalized[j] = i < width ? value_of(x[start + i]) : 0.0f;
      total += normalized[j];
    }
    const float mean = over_block<warp_sum>(total, 0.0f, shared) / width;
#pragma unroll
    for (unsigned j = 0; j < NORM_COLUMNS; j++) {
      normalized[j] = j * ROW_THREADS + threadIdx.x < width ? normalized[j] - mean : 0.0f;
      squares += normalized[j] * normalized[j];
    }
    const float inverse = 1.0f / sqrtf(over_block<warp_sum>(squares, 0.0f, shared) / width + epsilon);
#pragma unroll
    for (unsigned j = 0; j < NORM_COLUMNS; j++) {
      const unsigned i = j * ROW_THREADS + threadIdx.x;
      normalized[j] *= inverse;
      given[j] = i < width ? value_of(gradient[start + i]) : 0.0f;
      of_weight[j] += given[j] * normalized[j];
      of_bias[j] += given[j];
      given[j] *= i < width ? weight[i] : 0.0f;
      sum += given[j];
      product += given[j] * normalized[j];
    }
    sum = over_block<warp_sum>(sum, 0.0f, shared) / width;
    product = over_block<warp_sum>(product, 0.0f, shared) / width;
#pragma unroll
    for (unsigned j = 0; j < NORM_COLUMNS; j++) {
      const unsigned i = j * ROW_THREADS + threadIdx.x;
      if (i < width) result[start + i] = rounded<T>((given[j] - sum - normalized[j] * product) * inverse);
    }
  }
  sums += size_t(blockIdx.x) * 2 * width;
#pragma unroll
  for (unsigned j = 0; j < NORM_COLUMNS; j++) {
    const unsigned i = j * ROW_THREADS + threadIdx.x;
    if (i >= width) continue;
    sums[i] = of_weight[j];
    sums[width + i] = of_bias[j];
  }
}

/// Backward pass of the softmax over the visible keys; zero for the others.
///
/// Shapes and grid are those of `prefix_softmax`.
template <typename T>
__device__ void softmax_backward(const T *weights, const float *gradient, T *result, const unsigned *list, unsigned first,
                                 unsigned heads, unsigned queries, unsigned keys, unsigned rows) {
  const unsigned row = row_of_warp(), lane = threadIdx.x % WARP;
  if (row >= rows) return;
  const unsigned count = visible_keys(list, first, row / queries / heads, queries, row % queries);
  const size_t start = size_t(row) * keys;
  weights += start;
  gradient += start;
  result += start;
  float product = 0.0f;
#pragma unroll 4
  for (unsigned key = lane; key < count; key += WARP) product += value_of(weights[key]) * gradient[key];
  product = warp_sum(product);
#pragma unroll 4
  for (unsigned key = lane; key < count; key += WARP)
    result[key] = rounded<T>(value_of(weights[key]) * (gradient[key] - product));
  for (unsigned key = count + lane; key < keys; key += WARP) result[key] = rounded<T>(0.0f);
}

/// Cross-entropy loss of each row of logits, in nats, and optionally its gradient.
///
/// The gradient is the softmax minus one at the target; null skips it. `logits` and `gradient` are
/// `(rows, width)` with a row stride of `distance`. One block for each row.
template <typename T>
__device__ void losses(const float *logits, const unsigned *targets, float *loss, T *gradient, unsigned width,
                       unsigned distance) {
  __shared__ float shared[WARP];
  const size_t start = size_t(blockIdx.x) * distance;
  const unsigned target = targets[blockIdx.x];
  logits += start;
  // One pass with a running maximum and a sum relative to it.
  float own = -INFINITY, total = 0.0f;
#pragma unroll 4
  for (unsigned i = threadIdx.x; i < width; i += blockDim.x) {
    const float larger = fmaxf(own, logits[i]);
    total = total * expf(own - shift_of(larger)) + expf(logits[i] - shift_of(larger));
    own = larger;
  }
  const float largest = over_block<warp_max>(own, -INFINITY, shared);
  total = over_block<warp_sum>(total * expf(own - shift_of(largest)), 0.0f, shared);
  if (threadIdx.x == 0) loss[blockIdx.x] = logf(total) + largest - logits[target];
  if (gradient == nullptr) return;
  for (unsigned i = threadIdx.x; i < width; i += blockDim.x)
    gradient[start + i] = rounded<T>(expf(logits[i] - largest) / total - (i == target ? 1.0f : 0.0f));
}

/// Sums groups of rows.
///
/// Block `i` adds up the rows `order[starts[i]..starts[i + 1]]`, in this order, into row `table_rows[i]` of
/// `sums`. Rows have `width` values. One block for each sum.
template <typename T>
__device__ void add_rows(const T *rows, const unsigned *table_rows, const unsigned *starts, const unsigned *order,
                         T *sums, unsigned width) {
  for (unsigned column = threadIdx.x; column < width; column += blockDim.x) {
    float sum = 0.0f;
    for (unsigned i = starts[blockIdx.x]; i < starts[blockIdx.x + 1]; i++) sum += value_of(rows[size_t(order[i]) * width + column]);
    sums[size_t(table_rows[blockIdx.x]) * width + column] = rounded<T>(sum);
  }
}

/// Writes the sum of squares of each block's elements of `x` to `sums`.
template <typename T> __device__ void squares(const T *x, float *sums, size_t count) {
  __shared__ float shared[WARP];
  const size_t step = size_t(gridDim.x) * blockDim.x;
  float sum = 0.0f;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
    sum += value_of(x[i]) * value_of(x[i]);
  sum = over_block<warp_sum>(sum, 0.0f, shared);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

} // namespace

// Without launch bounds the compiler could assign more registers per thread than fit such a block.
// `signatures.rs` repeats each kernel's parameters.
#define KERNEL(THREADS) extern "C" __global__ void __launch_bounds__(THREADS)

#define FINISHED(NAME, T, FINISH)                                                                                       \
  KERNEL(ROW_THREADS) add_##NAME(const float *sums, const T *bias, const T *residual, T *y, size_t count,               \
                                 unsigned width) {                                                                      \
    add_bias<T, FINISH>(sums, bias, residual, y, count, width);                                                         \
  }                                                                                                                     \
  KERNEL(PRODUCT_THREADS) row_product_##NAME(const T *x, const T *weight, const T *bias, const T *residual, T *y,       \
                                             unsigned rows, unsigned inner, unsigned columns, unsigned lanes) {         \
    product_of_few_rows(                                                                                                \
        x, weight, rows, inner, columns, lanes,                                                                         \
        [=](unsigned row, unsigned column) {                                                                            \
          return added<T, FINISH>(bias[column], residual, size_t(row) * columns + column);                              \
        },                                                                                                              \
        [=](unsigned row, unsigned column, float sum) {                                                                 \
          y[size_t(row) * columns + column] = finished<T, FINISH>(sum);                                                 \
        });                                                                                                             \
  }

#define ATTENTION(NAME, T, WIDTH)                                                                                       \
  KERNEL(ATTENTION_THREADS) attend_##WIDTH##_##NAME(const T *q, const T *k, const T *v, T *context,                     \
                                                    Strides query_strides, Strides key_strides, Strides value_strides,  \
                                                    const unsigned *list, unsigned first, unsigned head_dim,            \
                                                    float scale) {                                                      \
    attend<T, WIDTH / WARP>(q, k, v, context, query_strides, key_strides, value_strides, list, first, head_dim, scale); \
  }                                                                                                                     \
  KERNEL(ATTENTION_THREADS) step_attention_##WIDTH##_##NAME(const float *sums, const T *bias, T *key_memory,            \
                                                            T *value_memory, T *context, const unsigned *positions,     \
                                                            unsigned tokens, unsigned capacity, unsigned head_dim,      \
                                                            float scale) {                                              \
    step_attention<T, WIDTH / WARP>(sums, bias, key_memory, value_memory, context, positions, tokens, capacity,         \
                                    head_dim, scale);                                                                   \
  }

#define KERNELS(NAME, T)                                                                                                \
  FINISHED(bias_##NAME, T, NOTHING)                                                                                     \
  FINISHED(bias_gelu_##NAME, T, GELU)                                                                                   \
  FINISHED(bias_residual_##NAME, T, ADD)                                                                                \
  KERNEL(PRODUCT_THREADS) row_product_##NAME(const T *x, const T *weight, float *y, unsigned rows, unsigned inner,      \
                                             unsigned columns, unsigned lanes) {                                        \
    product_of_few_rows(                                                                                                \
        x, weight, rows, inner, columns, lanes, [](unsigned, unsigned) { return 0.0f; },                                \
        [=](unsigned row, unsigned column, float sum) { y[size_t(row) * columns + column] = sum; });                    \
  }                                                                                                                     \
  KERNEL(ROW_THREADS) layer_norm_##NAME(const T *x, const T *weight, const T *bias, T *y, unsigned width,               \
                                        float epsilon) {                                                                \
    layer_norm(x, weight, bias, y, width, epsilon);                                                                     \
  }                                                                                                                     \
  KERNEL(ROW_THREADS) prefix_softmax_##NAME(const float *scores, T *weights, const unsigned *list, unsigned first,      \
                                            unsigned heads, unsigned queries, unsigned keys, unsigned rows) {           \
    prefix_softmax<T>(scores, weights, list, first, heads, queries, keys, rows);                                        \
  }                                                                                                                     \
  KERNEL(HEAD_THREADS) write_tokens_##NAME(const T *keys, const T *values, T *key_memory, T *value_memory,              \
                                           Strides key_strides, Strides value_strides, const unsigned *list,            \
                                           unsigned first, unsigned tokens, unsigned capacity, unsigned head_dim) {     \
    write_tokens<T>(keys, values, key_memory, value_memory, key_strides, value_strides, list, first, tokens, capacity,  \
                    head_dim);                                                                                          \
  }                                                                                                                     \
  KERNEL(ROW_THREADS) drop_##NAME(const T *x, T *y, size_t rows, size_t width, unsigned tokens, unsigned queries,       \
                                  unsigned first_query, unsigned first, size_t seed, size_t limit, float factor) {      \
    drop<T>(x, y, rows, width, tokens, queries, first_query, first, seed, limit, factor);                               \
  }                                                                                                                     \
  KERNEL(ROW_THREADS) adamw_##NAME(T *parameter, T *mean, T *square, const T *gradient, size_t count, float factor,     \
                                   float keep_mean, float add_mean, float keep_square, float add_square, float keep,    \
                                   float rate, float root_factor, float epsilon) {                                      \
    adamw<T>(parameter, mean, square, gradient, count, factor, keep_mean, add_mean, keep_square, add_square, keep, rate,\
             root_factor, epsilon);                                                                                     \
  }                                                                                                                     \
  KERNEL(ROW_THREADS) wide_norm_##NAME(const T *x, const float *weight, const float *bias, T *y, unsigned width,        \
                                       float epsilon) {                                                                 \
    layer_norm(x, weight, bias, y, width, epsilon);                                                                     \
  }                                                                                                                     \
  KERNEL(ROW_THREADS) norm_backward_##NAME(const T *x, const float *weight, const T *gradient, T *result, float *sums,  \
                                           unsigned rows, unsigned width, float epsilon) {                              \
    norm_backward<T>(x, weight, gradient, result, sums, rows, width, epsilon);                                          \
  }                                                                                                                     \
  KERNEL(ROW_THREADS) gelu_##NAME(const T *x, T *y, size_t count) { activate<T>(x, y, count); }                         \
  KERNEL(ROW_THREADS) gelu_backward_##NAME(const T *x, const T *gradient, T *result, size_t count) {                    \
    activate_backward<T>(x, gradient, result, count);                                                                   \
  }                                                                                                                     \
  KERNEL(ROW_THREADS) softmax_backward_##NAME(const T *weights, const float *gradient, T *result, const unsigned *list, \
                                              unsigned first, unsigned heads, unsigned queries, unsigned keys,          \
                                              unsigned rows) {                                                          \
    softmax_backward<T>(weights, gradient, result, list, first, heads, queries, keys, rows);                            \
  }                                                                                                                     \
  KERNEL(ROW_THREADS) losses_##NAME(const float *logits, const unsigned *targets, float *loss, T *gradient,             \
                                    unsigned width, unsigned distance) {                                                \
    losses<T>(logits, targets, loss, gradient, width, distance);                                                        \
  }                                                                                                                     \
  KERNEL(ROW_THREADS) add_rows_##NAME(const T *rows, const unsigned *table_rows, const unsigned *starts,                \
                                      const unsigned *order, T *sums, unsigned width) {                                 \
    add_rows<T>(rows, table_rows, starts, order, sums, width);                                                          \
  }                                                                                                                     \
  KERNEL(ROW_THREADS) squares_##NAME(const T *x, float *sums, size_t count) { squares<T>(x, sums, count); }             \
  ATTENTION(NAME, T, 64)                                                                                                \
  ATTENTION(NAME, T, 128)                                                                                               \
  ATTENTION(NAME, T, 256)

KERNELS(f32, float)
KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)
