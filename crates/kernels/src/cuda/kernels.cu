// Inference on NVIDIA GPUs: what would take several launches of candle's kernels, in one. `mod.rs` launches them.
//
// Values are f32, f16 or bf16 in memory and f32 in registers; each result is rounded once. What comes from a matrix product
// and goes on is f32. Letters in shapes: B batch, T queries, S keys, H heads, D width of a head.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

constexpr unsigned WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffff;
/// Warps that share the keys of one query.
constexpr unsigned ATTENTION_WARPS = 16;
/// Keys that a warp reads at once, so that it waits for memory once and not for each.
constexpr unsigned KEYS_AT_ONCE = 4;

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

/// Combines a value of every thread of the block; `shared` has room for one of each warp. Every thread gets the result.
template <float (*COMBINED)(float)> __device__ float over_block(float x, float neutral, float *shared) {
  const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  x = COMBINED(x);
  __syncthreads(); // an earlier result may still be read
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  return COMBINED(lane < blockDim.x / WARP ? shared[lane] : neutral);
}

/// The tanh form, as GPT-2 has it.
__device__ float gelu(float x) {
  const float SQRT_2_OVER_PI = 0.7978845608028654f;
  return 0.5f * x * (1.0f + tanhf(SQRT_2_OVER_PI * (x + 0.044715f * x * x * x)));
}

/// What follows the bias.
enum Finish { NOTHING, GELU, ADD };

/// y = sums + bias, its GELU, or its sum with `residual`. `sums`, `y` and `residual` `(rows, width)`, `bias` `(width)`; any
/// grid.
template <typename T, Finish FINISH>
__device__ void add_bias(const float *sums, const T *bias, const T *residual, T *y, size_t count, unsigned width) {
  const size_t step = size_t(gridDim.x) * blockDim.x;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    float sum = sums[i] + value_of(bias[i % width]);
    if (FINISH == ADD) sum += value_of(residual[i]);
    y[i] = rounded<T>(FINISH == GELU ? gelu(sum) : sum);
  }
}

/// Layer norm. A block for each row of `width` values.
template <typename T>
__device__ void layer_norm(const T *x, const T *weight, const T *bias, T *y, unsigned width, float epsilon) {
  __shared__ float shared[WARP];
  const size_t start = size_t(blockIdx.x) * width;
  x += start;
  y += start;
  float total = 0.0f;
  for (unsigned i = threadIdx.x; i < width; i += blockDim.x) total += value_of(x[i]);
  const float mean = over_block<warp_sum>(total, 0.0f, shared) / width;
  float squares = 0.0f;
  for (unsigned i = threadIdx.x; i < width; i += blockDim.x) {
    const float centered = value_of(x[i]) - mean;
    squares += centered * centered;
  }
  const float deviation = sqrtf(over_block<warp_sum>(squares, 0.0f, shared) / width + epsilon);
  for (unsigned i = threadIdx.x; i < width; i += blockDim.x) {
    const float normalized = (value_of(x[i]) - mean) / deviation;
    y[i] = rounded<T>(normalized * value_of(weight[i]) + value_of(bias[i]));
  }
}

/// The keys that a query sees: `more` than the list says for it, or than its number where there is no list; at most `keys`.
__device__ unsigned visible_keys(const unsigned *list, unsigned more, unsigned batch, unsigned queries, unsigned query,
                                 unsigned keys) {
  return min((list ? list[batch * queries + query] : query) + more, keys);
}

/// Softmax of `scores` over the visible keys, zero behind them. `(B, H, T, S)`; a block for each row of S.
template <typename T>
__device__ void prefix_softmax(const float *scores, T *weights, const unsigned *list, unsigned more, unsigned heads,
                               unsigned queries, unsigned keys) {
  __shared__ float shared[WARP];
  const unsigned query = blockIdx.x % queries, batch = blockIdx.x / queries / heads;
  const unsigned count = visible_keys(list, more, batch, queries, query, keys);
  scores += size_t(blockIdx.x) * keys;
  weights += size_t(blockIdx.x) * keys;
  float largest = -INFINITY;
  for (unsigned key = threadIdx.x; key < count; key += blockDim.x) largest = fmaxf(largest, scores[key]);
  largest = over_block<warp_max>(largest, -INFINITY, shared);
  float total = 0.0f;
  for (unsigned key = threadIdx.x; key < count; key += blockDim.x) total += expf(scores[key] - largest);
  total = over_block<warp_sum>(total, 0.0f, shared);
  for (unsigned key = threadIdx.x; key < keys; key += blockDim.x)
    weights[key] = rounded<T>(key < count ? expf(scores[key] - largest) / total : 0.0f);
}

/// Where the rows of a `(B, H, T, D)` tensor are.
struct Strides {
  size_t batch, head, token;
};

/// Writes the keys and values of new tokens into memory, those of each row from place `more` on behind what the list says
/// for it, or 0 where there is none. `keys` and `values` `(B, H, T, D)`, memory `(B, H, S, D)`, in one piece; blocks for each
/// head and batch row, and any number of them for the tokens.
template <typename T>
__device__ void write_tokens(const T *keys, const T *values, T *key_memory, T *value_memory, Strides ks, Strides vs,
                             const unsigned *list, unsigned more, unsigned tokens, unsigned capacity,
                             unsigned head_dim) {
  const unsigned head = blockIdx.x, batch = blockIdx.y, first = (list ? list[batch] : 0) + more;
  keys += batch * ks.batch + head * ks.head;
  values += batch * vs.batch + head * vs.head;
  const size_t memory = (size_t(batch) * gridDim.x + head) * capacity;
  for (unsigned token = blockIdx.z; token < tokens && first + token < capacity; token += gridDim.z) {
    const size_t place = (memory + first + token) * head_dim;
    for (unsigned d = threadIdx.x; d < head_dim; d += blockDim.x) {
      key_memory[place + d] = keys[token * ks.token + d];
      value_memory[place + d] = values[token * vs.token + d];
    }
  }
}

/// Attention of a query over the first `count` keys, reading each key and each value once. The warps of a block each have keys
/// of their own and a softmax of their own, which are joined at the end. `q` and `context` `(D)`, D at most `WARP * CHUNKS`;
/// keys and values are `key_step` and `value_step` apart.
template <unsigned CHUNKS, typename Q, typename T>
__device__ void attend_keys(const Q *q, const T *k, const T *v, T *context, size_t key_step, size_t value_step,
                            unsigned count, unsigned head_dim, float scale) {
  __shared__ float maxima[ATTENTION_WARPS], sums[ATTENTION_WARPS], contexts[ATTENTION_WARPS][WARP * CHUNKS];
  const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  float query[CHUNKS], total[CHUNKS], largest = -INFINITY, sum = 0.0f;
  for (unsigned chunk = 0; chunk < CHUNKS; chunk++) {
    const unsigned d = chunk * WARP + lane;
    query[chunk] = d < head_dim ? scale * value_of(q[d]) : 0.0f;
    total[chunk] = 0.0f;
  }
  for (unsigned start = warp * KEYS_AT_ONCE; start < count; start += ATTENTION_WARPS * KEYS_AT_ONCE) {
    float scores[KEYS_AT_ONCE], values[KEYS_AT_ONCE][CHUNKS];
#pragma unroll
    for (unsigned i = 0; i < KEYS_AT_ONCE; i++) {
      // Behind the last key the last one is read again, and weighs nothing.
      const size_t key = min(start + i, count - 1);
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
      scores[i] = start + i < count ? warp_sum(scores[i]) : -INFINITY;
      new_largest = fmaxf(new_largest, scores[i]);
    }
    const float kept = expf(largest - new_largest);
    largest = new_largest;
    sum *= kept;
    for (unsigned chunk = 0; chunk < CHUNKS; chunk++) total[chunk] *= kept;
#pragma unroll
    for (unsigned i = 0; i < KEYS_AT_ONCE; i++) {
      const float weight = expf(scores[i] - largest);
      sum += weight;
      for (unsigned chunk = 0; chunk < CHUNKS; chunk++) total[chunk] += weight * values[i][chunk];
    }
  }

  if (lane == 0) {
    maxima[warp] = largest;
    sums[warp] = sum;
  }
  for (unsigned chunk = 0; chunk < CHUNKS; chunk++) contexts[warp][chunk * WARP + lane] = total[chunk];
  __syncthreads();
  largest = -INFINITY;
  for (unsigned other = 0; other < ATTENTION_WARPS; other++) largest = fmaxf(largest, maxima[other]);
  for (unsigned d = threadIdx.x; d < head_dim; d += blockDim.x) {
    float numerator = 0.0f, denominator = 0.0f;
    for (unsigned other = 0; other < ATTENTION_WARPS; other++) {
      // A warp without keys has a maximum of -inf and counts as nothing.
      const float factor = expf(maxima[other] - largest);
      numerator += factor * contexts[other][d];
      denominator += factor * sums[other];
    }
    context[d] = rounded<T>(numerator / denominator);
  }
}

/// Attention of one query of each head and batch row: softmax(scale · q kᵀ) v over the visible keys. A block for each head
/// and batch row; `context` `(B, H, D)`.
template <typename T, unsigned CHUNKS>
__device__ void attend(const T *q, const T *k, const T *v, T *context, Strides qs, Strides ks, Strides vs,
                       const unsigned *list, unsigned more, unsigned keys, unsigned head_dim, float scale) {
  const unsigned head = blockIdx.x, batch = blockIdx.y, count = visible_keys(list, more, batch, 1, 0, keys);
  q += batch * qs.batch + head * qs.head;
  k += batch * ks.batch + head * ks.head;
  v += batch * vs.batch + head * vs.head;
  context += (size_t(batch) * gridDim.x + head) * head_dim;
  attend_keys<CHUNKS>(q, k, v, context, ks.token, vs.token, count, head_dim, scale);
}

/// Self-attention of a new token of each row: adds the bias to the sums of its queries, keys and values, writes keys and values
/// into memory behind the `lengths[row]` ones there, and attends to all of them. `sums` `(B, 3, H, D)`, `bias` `(3, H, D)`,
/// memory `(B, H, S, D)`, in one piece; `context` `(B, H, D)`; a block for each head and batch row.
template <typename T, unsigned CHUNKS>
__device__ void step_attention(const float *sums, const T *bias, T *key_memory, T *value_memory, T *context,
                               const unsigned *lengths, unsigned capacity, unsigned head_dim, float scale) {
  __shared__ float query[WARP * CHUNKS];
  const unsigned head = blockIdx.x, batch = blockIdx.y;
  const unsigned place = min(lengths[batch], capacity - 1); // a row without room spoils its own last token only
  const size_t width = size_t(gridDim.x) * head_dim, row = size_t(batch) * gridDim.x + head;
  sums += batch * 3 * width + head * head_dim;
  bias += head * head_dim;
  key_memory += row * capacity * head_dim;
  value_memory += row * capacity * head_dim;
  for (unsigned d = threadIdx.x; d < head_dim; d += blockDim.x) {
    // Rounded like the keys that it meets.
    query[d] = value_of(rounded<T>(sums[d] + value_of(bias[d])));
    key_memory[size_t(place) * head_dim + d] = rounded<T>(sums[width + d] + value_of(bias[width + d]));
    value_memory[size_t(place) * head_dim + d] = rounded<T>(sums[2 * width + d] + value_of(bias[2 * width + d]));
  }
  __syncthreads();
  attend_keys<CHUNKS>(query, key_memory, value_memory, context + row * head_dim, head_dim, head_dim, place + 1,
                      head_dim, scale);
}

} // namespace

#define ATTEND(NAME, T, WIDTH)                                                                                          \
  extern "C" __global__ void attend_##WIDTH##_##NAME(const T *q, const T *k, const T *v, T *context, Strides qs,        \
                                                     Strides ks, Strides vs, const unsigned *list, unsigned more,       \
                                                     unsigned keys, unsigned head_dim, float scale) {                   \
    attend<T, WIDTH / WARP>(q, k, v, context, qs, ks, vs, list, more, keys, head_dim, scale);                           \
  }                                                                                                                     \
  extern "C" __global__ void step_attention_##WIDTH##_##NAME(                                                           \
      const float *sums, const T *bias, T *key_memory, T *value_memory, T *context, const unsigned *lengths,            \
      unsigned capacity, unsigned head_dim, float scale) {                                                              \
    step_attention<T, WIDTH / WARP>(sums, bias, key_memory, value_memory, context, lengths, capacity, head_dim, scale); \
  }

#define KERNELS(NAME, T)                                                                                                \
  extern "C" __global__ void add_bias_##NAME(const float *sums, const T *bias, T *y, size_t count, unsigned width) {    \
    add_bias<T, NOTHING>(sums, bias, nullptr, y, count, width);                                                         \
  }                                                                                                                     \
  extern "C" __global__ void add_bias_gelu_##NAME(const float *sums, const T *bias, T *y, size_t count,                 \
                                                  unsigned width) {                                                     \
    add_bias<T, GELU>(sums, bias, nullptr, y, count, width);                                                            \
  }                                                                                                                     \
  extern "C" __global__ void add_bias_residual_##NAME(const float *sums, const T *bias, const T *residual, T *y,        \
                                                      size_t count, unsigned width) {                                   \
    add_bias<T, ADD>(sums, bias, residual, y, count, width);                                                            \
  }                                                                                                                     \
  extern "C" __global__ void layer_norm_##NAME(const T *x, const T *weight, const T *bias, T *y, unsigned width,        \
                                               float epsilon) {                                                         \
    layer_norm<T>(x, weight, bias, y, width, epsilon);                                                                  \
  }                                                                                                                     \
  extern "C" __global__ void prefix_softmax_##NAME(const float *scores, T *weights, const unsigned *list,               \
                                                   unsigned more, unsigned heads, unsigned queries, unsigned keys) {    \
    prefix_softmax<T>(scores, weights, list, more, heads, queries, keys);                                               \
  }                                                                                                                     \
  extern "C" __global__ void write_tokens_##NAME(const T *keys, const T *values, T *key_memory, T *value_memory,        \
                                                 Strides ks, Strides vs, const unsigned *list, unsigned more,           \
                                                 unsigned tokens, unsigned capacity, unsigned head_dim) {               \
    write_tokens<T>(keys, values, key_memory, value_memory, ks, vs, list, more, tokens, capacity, head_dim);            \
  }                                                                                                                     \
  ATTEND(NAME, T, 64)                                                                                                   \
  ATTEND(NAME, T, 128)                                                                                                  \
  ATTEND(NAME, T, 256)

KERNELS(f32, float)
KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)
