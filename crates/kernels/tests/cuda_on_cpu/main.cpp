// Compares the emulated kernels of src/cuda/kernels.cu with plain f64 loops. Run by
// `scripts/check_cuda_kernels.sh`.

#include "emulation.h"

#include "../../src/cuda/kernels.cu"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numbers>
#include <random>
#include <string>

namespace {

using Doubles = std::vector<double>;

std::mt19937 generator(1);
int failures = 0;

template <typename T> std::vector<T> random_values(size_t count, float scale, float offset = 0) {
  std::uniform_real_distribution<float> uniform(-scale, scale);
  std::vector<T> values(count);
  for (T &value : values) value = rounded<T>(uniform(generator) + offset);
  return values;
}

/// Compares the largest difference, relative to the largest expected value if that exceeds 1.
template <typename T>
void compare(const std::string &what, const std::vector<T> &found, const Doubles &expected, double tolerance) {
  double largest = 1, worst = 0;
  for (double value : expected) largest = std::max(largest, std::fabs(value));
  for (size_t i = 0; i < found.size(); i++) {
    const double difference = std::fabs(value_of(found[i]) - expected[i]) / largest;
    if (!(difference <= worst)) worst = difference; // keeps NaN
  }
  const bool is_close = worst <= tolerance;
  failures += !is_close;
  std::printf("%-32s %.1e %s\n", what.c_str(), worst, is_close ? "" : "TOO FAR");
}

void check(const std::string &what, bool holds) {
  failures += !holds;
  std::printf("%-32s %s\n", what.c_str(), holds ? "holds" : "FAILS");
}

/// Kernels for one element type.
template <typename T> struct Kernels;
#define KERNELS_OF(NAME, T)                                                                                             \
  template <> struct Kernels<T> {                                                                                       \
    static constexpr auto bias = add_bias_##NAME, bias_gelu = add_bias_gelu_##NAME;                                     \
    static constexpr auto row_sums = row_product_##NAME, row_residual = row_product_bias_residual_##NAME;               \
    static constexpr auto row_bias = row_product_bias_##NAME, row_gelu = row_product_bias_gelu_##NAME;                  \
    static constexpr auto norm = layer_norm_##NAME;                                                                     \
    static constexpr auto bias_residual = add_bias_residual_##NAME;                                                     \
    static constexpr auto softmax = prefix_softmax_##NAME;                                                              \
    static constexpr auto write = write_tokens_##NAME;                                                                  \
    static constexpr auto drop = drop_##NAME;                                                                           \
    static constexpr auto adamw = adamw_##NAME;                                                                         \
    static constexpr auto squares = squares_##NAME;                                                                     \
    static constexpr auto wide_norm = wide_norm_##NAME;                                                                 \
    static constexpr auto norm_backward = norm_backward_##NAME;                                                         \
    static constexpr auto gelu = gelu_##NAME;                                                                           \
    static constexpr auto gelu_backward = gelu_backward_##NAME;                                                         \
    static constexpr auto softmax_backward = softmax_backward_##NAME;                                                   \
    static constexpr auto losses = losses_##NAME;                                                                       \
    static constexpr auto add_rows = add_rows_##NAME;                                                                   \
    static constexpr auto attend(unsigned width) {                                                                      \
      return width <= 64 ? attend_64_##NAME : width <= 128 ? attend_128_##NAME : attend_256_##NAME;                     \
    }                                                                                                                   \
    static constexpr auto step(unsigned width) {                                                                        \
      return width <= 64    ? step_attention_64_##NAME                                                                  \
             : width <= 128 ? step_attention_128_##NAME                                                                 \
                            : step_attention_256_##NAME;                                                                \
    }                                                                                                                   \
  };
KERNELS_OF(f32, float)
KERNELS_OF(f16, __half)
KERNELS_OF(bf16, __nv_bfloat16)

double gelu_of(double z) {
  return 0.5 * z * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (z + 0.044715 * z * z * z)));
}

template <typename T> void biases(double tolerance) {
  for (auto [rows, width] : {std::pair(1u, 5u), std::pair(7u, 300u), std::pair(1u, 3072u)}) {
    const auto x = random_values<float>(rows * width, 3);
    const auto bias = random_values<T>(width, 1);
    const auto residual = random_values<T>(rows * width, 1);
    std::vector<T> y(x.size());
    Doubles sums(x.size()), activated(x.size()), added(x.size());
    for (size_t i = 0; i < x.size(); i++) {
      const double z = sums[i] = double(x[i]) + value_of(bias[i % width]);
      added[i] = z + value_of(residual[i]);
      activated[i] = gelu_of(z);
    }
    const std::string what = std::to_string(rows) + " x " + std::to_string(width);
    launch({2, 1, 1}, 256, [&] { Kernels<T>::bias(x.data(), bias.data(), nullptr, y.data(), x.size(), width); });
    compare("bias " + what, y, sums, tolerance);
    launch({1, 1, 1}, 256, [&] { Kernels<T>::bias_gelu(x.data(), bias.data(), nullptr, y.data(), x.size(), width); });
    compare("bias and gelu " + what, y, activated, tolerance);
    launch({1, 1, 1}, 256,
           [&] { Kernels<T>::bias_residual(x.data(), bias.data(), residual.data(), y.data(), x.size(), width); });
    compare("bias and residual " + what, y, added, tolerance);
  }
}

/// Products of a few rows with each epilogue, for one block and many, full and partial.
template <typename T> void few_rows(double tolerance) {
  const struct {
    unsigned rows, inner, columns;
  } cases[] = {{1, 1, 8}, {1, 7, 24}, {1, 300, 72}, {1, 5000, 16}, {2, 7, 24}, {3, 300, 72}, {4, 1, 8}, {4, 700, 136}};
  for (const auto &[rows, inner, columns] : cases) {
    if (rows > 1 && sizeof(T) < sizeof(float)) continue;
    const auto x = random_values<T>(rows * inner, 1), bias = random_values<T>(columns, 1);
    const auto residual = random_values<T>(rows * columns, 1);
    // Aligned to 16 bytes.
    std::vector<uint4> memory(size_t(inner) * columns * sizeof(T) / sizeof(uint4));
    T *weight = reinterpret_cast<T *>(memory.data());
    const auto values = random_values<T>(size_t(inner) * columns, 1 / std::sqrt(float(inner)));
    std::copy(values.begin(), values.end(), weight);
    Doubles sums(rows * columns), biased(sums.size()), activated(sums.size()), added(sums.size());
    for (unsigned at = 0; at < rows * columns; at++) {
      const unsigned row = at / columns, column = at % columns;
      for (unsigned i = 0; i < inner; i++)
        sums[at] += double(value_of(x[row * inner + i])) * value_of(weight[i * columns + column]);
      biased[at] = sums[at] + value_of(bias[column]);
      activated[at] = gelu_of(biased[at]);
      added[at] = biased[at] + value_of(residual[at]);
    }
    for (unsigned lanes = 2; lanes <= MAX_LANES; lanes *= 2) {
      const unsigned width = lanes * 16 / sizeof(T), blocks = (columns + width - 1) / width;
      const std::string what =
          std::to_string(rows) + " rows of " + std::to_string(inner) + " to " + std::to_string(columns);
      std::vector<float> y(sums.size());
      launch({blocks, 1, 1}, PRODUCT_THREADS,
             [&] { Kernels<T>::row_sums(x.data(), weight, y.data(), rows, inner, columns, lanes); });
      compare(what, y, sums, 1e-6);
      std::vector<T> z(sums.size());
      launch({blocks, 1, 1}, PRODUCT_THREADS, [&] {
        Kernels<T>::row_bias(x.data(), weight, bias.data(), nullptr, z.data(), rows, inner, columns, lanes);
      });
      compare(what + ", bias", z, biased, tolerance);
      launch({blocks, 1, 1}, PRODUCT_THREADS, [&] {
        Kernels<T>::row_gelu(x.data(), weight, bias.data(), nullptr, z.data(), rows, inner, columns, lanes);
      });
      compare(what + ", gelu", z, activated, tolerance);
      launch({blocks, 1, 1}, PRODUCT_THREADS, [&] {
        Kernels<T>::row_residual(x.data(), weight, bias.data(), residual.data(), z.data(), rows, inner, columns,
                                       lanes);
      });
      compare(what + ", residual", z, added, tolerance);
    }
  }
}

template <typename T> Doubles normed(const std::vector<T> &x, const std::vector<T> &weight, const std::vector<T> &bias) {
  const size_t width = weight.size();
  Doubles y(x.size());
  for (size_t start = 0; start < x.size(); start += width) {
    double mean = 0, variance = 0;
    for (size_t i = 0; i < width; i++) mean += value_of(x[start + i]) / width;
    for (size_t i = 0; i < width; i++) variance += std::pow(value_of(x[start + i]) - mean, 2) / width;
    for (size_t i = 0; i < width; i++)
      y[start + i] =
          (value_of(x[start + i]) - mean) / std::sqrt(variance + 1e-5) * value_of(weight[i]) + value_of(bias[i]);
  }
  return y;
}

template <typename T> void layer_norms(double tolerance) {
  for (auto [rows, width] : {std::pair(1u, 1u), std::pair(1u, 20u), std::pair(3u, 256u), std::pair(4u, 768u),
                             std::pair(2u, 1601u), std::pair(2u, 2500u)}) {
    // Values far from zero: a variance computed as E[x²] - E[x]² would lose its precision.
    const auto x = random_values<T>(rows * width, 2, 8);
    const auto weight = random_values<T>(width, 1), bias = random_values<T>(width, 1);
    std::vector<T> y(x.size());
    const std::string what = std::to_string(rows) + " x " + std::to_string(width);
    launch({rows, 1, 1}, 256,
           [&] { Kernels<T>::norm(x.data(), weight.data(), bias.data(), y.data(), width, 1e-5f); });
    compare("norm " + what, y, normed(x, weight, bias), tolerance);
  }
}

/// Computes attention in f64: softmax(scale · q kᵀ) v over the first `count` keys.
///
/// `query` is `(D)`, `keys` and `values` are `(count, D)`.
template <typename Q, typename T>
Doubles attended(const Q *query, const T *keys, const T *values, unsigned count, unsigned width, double scale) {
  Doubles context(width);
  double total = 0;
  for (unsigned key = 0; key < count; key++) {
    double score = 0;
    for (unsigned i = 0; i < width; i++) score += double(value_of(query[i])) * value_of(keys[key * width + i]);
    const double weight = std::exp(score * scale);
    total += weight;
    for (unsigned i = 0; i < width; i++) context[i] += weight * value_of(values[key * width + i]);
  }
  for (double &value : context) value /= total;
  return context;
}

template <typename T> Doubles doubles(const std::vector<T> &values) {
  Doubles result;
  for (T value : values) result.push_back(value_of(value));
  return result;
}

void append(Doubles &values, const Doubles &more) { values.insert(values.end(), more.begin(), more.end()); }

/// Queries of two batch rows, and the number of keys visible to each.
struct Rows {
  unsigned queries, keys;
  std::vector<unsigned> visible;
  /// Whether each query of a row sees one key more than the previous one, so that no list is needed.
  bool is_regular;
};

template <typename T> void attention(double tolerance) {
  constexpr unsigned BATCH = 2, HEADS = 3;
  const std::vector<Rows> cases = {{1, 1, {1, 1}, true},
                                   {1, 7, {7, 7}, true},
                                   {1, 130, {130, 65}, false},
                                   {1, 1024, {1024, 1}, false},
                                   {5, 9, {5, 6, 7, 8, 9, 5, 6, 7, 8, 9}, true},
                                   {4, 20, {17, 18, 19, 20, 3, 4, 5, 6}, false}};
  for (const auto &[queries, keys, visible, is_regular] : cases) {
    const unsigned *list = is_regular ? nullptr : visible.data();
    const std::string what = std::to_string(queries) + " of " + std::to_string(keys);
    const auto scores = random_values<float>(BATCH * HEADS * queries * keys, 5);
    std::vector<T> weights(scores.size());
    Doubles expected(scores.size());
    for (unsigned row = 0; row < BATCH * HEADS * queries; row++) {
      const unsigned seen = visible[row / (HEADS * queries) * queries + row % queries];
      double total = 0;
      for (unsigned key = 0; key < seen; key++) total += std::exp(double(scores[row * keys + key]));
      for (unsigned key = 0; key < seen; key++)
        expected[row * keys + key] = std::exp(double(scores[row * keys + key])) / total;
    }
    const unsigned rows = BATCH * HEADS * queries, warps = ROW_THREADS / WARP;
    launch({(rows + warps - 1) / warps, 1, 1}, ROW_THREADS, [&] {
      Kernels<T>::softmax(scores.data(), weights.data(), list, visible[0], HEADS, queries, keys, rows);
    });
    compare("softmax " + what, weights, expected, tolerance);
    if (queries > 1) continue;
    for (unsigned width : {6u, 64u, 80u, 128u, 200u, 256u}) {
      // Queries are part of a fused projection, keys and values of a longer cache.
      const size_t capacity = keys + 5;
      const auto q = random_values<T>(BATCH * 3 * HEADS * width, 2);
      const auto k = random_values<T>(BATCH * HEADS * capacity * width, 1);
      const auto v = random_values<T>(BATCH * HEADS * capacity * width, 1);
      const Strides query_strides{3 * HEADS * width, width, 3 * HEADS * width};
      const Strides cache_strides{HEADS * capacity * width, capacity * width, width};
      std::vector<T> context(BATCH * HEADS * width);
      Doubles contexts;
      const double scale = 1 / std::sqrt(width);
      for (unsigned row = 0; row < BATCH * HEADS; row++) {
        const T *query = &q[row / HEADS * query_strides.batch + row % HEADS * width];
        const size_t memory = row * capacity * width;
        append(contexts, attended(query, &k[memory], &v[memory], visible[row / HEADS], width, scale));
      }
      launch({HEADS, BATCH, 1}, ATTENTION_THREADS, [&] {
        Kernels<T>::attend(width)(q.data(), k.data(), v.data(), context.data(), query_strides, cache_strides,
                                  cache_strides, list, visible[0], width, float(scale));
      });
      compare("attention " + what + ", " + std::to_string(width) + " wide", context, contexts, tolerance);
    }
  }
}

/// Keys of a query split over several blocks; the order of the blocks must not change a bit.
///
/// Covers exactly one load per block, fewer and more keys, blocks without keys, and the last block first.
template <typename T> void split_keys(double tolerance) {
  constexpr unsigned BATCH = 2, HEADS = 2, CAPACITY = 705;
  for (unsigned width : {64u, 200u}) {
    const auto q = random_values<T>(BATCH * HEADS * width, 2);
    const auto k = random_values<T>(BATCH * HEADS * CAPACITY * width, 1);
    const auto v = random_values<T>(BATCH * HEADS * CAPACITY * width, 1);
    const Strides query_strides{HEADS * width, width, width};
    const Strides cache_strides{HEADS * CAPACITY * width, CAPACITY * width, width};
    const float scale = 1 / std::sqrt(float(width));
    for (const auto &visible : {std::vector<unsigned>{64, 65}, {1, 128}, {129, 127}, {192, 193}, {700, 3}}) {
      Doubles expected;
      for (unsigned row = 0; row < BATCH * HEADS; row++) {
        const size_t memory = size_t(row) * CAPACITY * width;
        append(expected, attended(&q[row * width], &k[memory], &v[memory], visible[row / HEADS], width, scale));
      }
      for (unsigned blocks : {2u, 3u, 16u}) {
        const auto context = [&] {
          std::vector<T> context(BATCH * HEADS * width);
          launch({HEADS, BATCH, blocks}, ATTENTION_THREADS, [&] {
            Kernels<T>::attend(width)(q.data(), k.data(), v.data(), context.data(), query_strides, cache_strides,
                                      cache_strides, visible.data(), 0, width, scale);
          });
          return context;
        };
        const auto found = context();
        is_reversed = true;
        const auto reversed = context();
        is_reversed = false;
        const std::string what = "attention to " + std::to_string(visible[0]) + " and " + std::to_string(visible[1]) +
                                 " in " + std::to_string(blocks) + " blocks, " + std::to_string(width) + " wide";
        compare(what, found, expected, tolerance);
        check(what + ", last first", std::memcmp(found.data(), reversed.data(), found.size() * sizeof(T)) == 0);
        check(what + ", none left", std::ranges::all_of(arrived_blocks, [](unsigned blocks) { return blocks == 0; }));
      }
    }
  }
}

/// Warps or blocks with only -inf scores must not contribute; the result is NaN if all scores are -inf.
template <typename T> void infinite_scores(double tolerance) {
  constexpr unsigned KEYS = 150, WIDTH = 64, NONE = KEYS;
  const Strides strides{KEYS * WIDTH, KEYS * WIDTH, WIDTH};
  for (unsigned finite : {0u, 70u, KEYS - 1, NONE}) {
    auto q = random_values<T>(WIDTH, 1), k = random_values<T>(KEYS * WIDTH, 1), v = random_values<T>(KEYS * WIDTH, 1);
    q[0] = rounded<T>(1);
    for (unsigned key = 0; key < KEYS; key++)
      if (key != finite) k[key * WIDTH] = rounded<T>(-INFINITY);
    for (unsigned blocks : {1u, 3u}) {
      std::vector<T> context(WIDTH);
      launch({1, 1, blocks}, ATTENTION_THREADS, [&] {
        Kernels<T>::attend(WIDTH)(q.data(), k.data(), v.data(), context.data(), strides, strides, strides, nullptr, KEYS,
                                  WIDTH, 1);
      });
      if (finite == NONE) {
        check("attention, no score finite", std::ranges::all_of(context, [](T x) { return std::isnan(value_of(x)); }));
        continue;
      }
      const std::vector<T> expected(&v[finite * WIDTH], &v[finite * WIDTH] + WIDTH);
      compare("attention, score " + std::to_string(finite) + " finite", context, doubles(expected), tolerance);
    }
  }
}

/// New keys and values must follow those of their row without other changes; excess tokens are dropped.
template <typename T> void new_tokens() {
  constexpr unsigned BATCH = 3, HEADS = 2, CAPACITY = 5, TOKENS = 2;
  for (unsigned width : {6u, 64u, 80u}) {
    for (const auto &lengths : {std::vector<unsigned>{3, 0, 4}, std::vector<unsigned>{2, 2, 2}}) {
      // Keys and values are part of a fused projection.
      const auto projected = random_values<T>(BATCH * TOKENS * 3 * HEADS * width, 2);
      const Strides strides{TOKENS * 3 * HEADS * width, width, 3 * HEADS * width};
      const T *keys = &projected[HEADS * width], *values = &projected[2 * HEADS * width];
      auto key_memory = random_values<T>(BATCH * HEADS * CAPACITY * width, 1), value_memory = key_memory;
      Doubles expected_keys(key_memory.size()), expected_values(key_memory.size());
      for (size_t i = 0; i < key_memory.size(); i++) {
        const size_t row = i / width / CAPACITY / HEADS, head = i / width / CAPACITY % HEADS;
        // For positions before the new tokens, `token` wraps around and exceeds `TOKENS`.
        const size_t token = i / width % CAPACITY - lengths[row];
        const size_t from = row * strides.batch + head * strides.head + token * strides.token + i % width;
        expected_keys[i] = value_of(token < TOKENS ? keys[from] : key_memory[i]);
        expected_values[i] = value_of(token < TOKENS ? values[from] : value_memory[i]);
      }
      const bool is_listed = lengths[0] != lengths[1];
      for (unsigned blocks = 1; blocks <= TOKENS; blocks++) {
        auto new_keys = key_memory, new_values = value_memory;
        launch({HEADS, BATCH, blocks}, 64, [&] {
          Kernels<T>::write(keys, values, new_keys.data(), new_values.data(), strides, strides,
                            is_listed ? lengths.data() : nullptr, lengths[0], TOKENS, CAPACITY, width);
        });
        compare("new keys, " + std::to_string(width) + " wide", new_keys, expected_keys, 0);
        compare("new values, " + std::to_string(width) + " wide", new_values, expected_values, 0);
      }
    }
  }
}

/// New tokens of each row, one of which exceeds the capacity, in any order of the blocks.
///
/// Keys and values must follow those of their row without other changes, and queries see them.
template <typename T> void steps(double tolerance) {
  constexpr unsigned BATCH = 5, HEADS = 2, CAPACITY = 130;
  for (auto [width, tokens] : {std::pair(6u, 1u), std::pair(64u, 1u), std::pair(64u, 5u), std::pair(80u, 2u),
                               std::pair(128u, 1u), std::pair(128u, 3u), std::pair(200u, 1u), std::pair(256u, 4u)}) {
    std::vector<unsigned> positions;
    for (unsigned length : {0u, CAPACITY - tokens, 64u - tokens / 2, 63u, CAPACITY - tokens + 1})
      for (unsigned token = 0; token < tokens; token++) positions.push_back(length + token);
    const auto sums = random_values<float>(BATCH * tokens * 3 * HEADS * width, 2);
    const auto bias = random_values<T>(3 * HEADS * width, 1);
    const auto memory = random_values<T>(BATCH * HEADS * CAPACITY * width, 1);
    auto expected_keys = memory, expected_values = memory;
    Doubles contexts(BATCH * tokens * HEADS * width);
    const double scale = 1 / std::sqrt(width);
    for (unsigned row = 0; row < BATCH * HEADS; row++) {
      const unsigned batch = row / HEADS, head = row % HEADS;
      const unsigned first = std::min(positions[batch * tokens], CAPACITY - tokens);
      const auto projected = [&](unsigned token, unsigned third, unsigned i) {
        const size_t at = (third * HEADS + head) * width + i;
        return rounded<T>(sums[(batch * tokens + token) * 3 * HEADS * width + at] + value_of(bias[at]));
      };
      for (unsigned token = 0; token < tokens; token++) {
        for (unsigned i = 0; i < width; i++) {
          const size_t at = (size_t(row) * CAPACITY + first + token) * width + i;
          expected_keys[at] = projected(token, 1, i);
          expected_values[at] = projected(token, 2, i);
        }
        std::vector<T> query;
        for (unsigned i = 0; i < width; i++) query.push_back(projected(token, 0, i));
        const size_t at = size_t(row) * CAPACITY * width;
        const auto context = attended(query.data(), &expected_keys[at], &expected_values[at], first + token + 1, width, scale);
        std::copy(context.begin(), context.end(), &contexts[((batch * tokens + token) * HEADS + head) * width]);
      }
    }
    for (unsigned blocks : {1u, 2u, 4u}) {
      for (bool last_first : {false, true}) {
        auto key_memory = memory, value_memory = memory;
        std::vector<T> context(contexts.size());
        is_reversed = last_first;
        launch({HEADS, BATCH * tokens, blocks}, ATTENTION_THREADS, [&] {
          Kernels<T>::step(width)(sums.data(), bias.data(), key_memory.data(), value_memory.data(), context.data(),
                                  positions.data(), tokens, CAPACITY, width, float(scale));
        });
        is_reversed = false;
        const std::string what = "step of " + std::to_string(tokens) + " in " + std::to_string(blocks) + " blocks, " +
                                 std::to_string(width) + " wide";
        compare(what, context, contexts, tolerance);
        compare(what + ", keys", key_memory, doubles(expected_keys), 0);
        compare(what + ", values", value_memory, doubles(expected_values), 0);
      }
    }
  }
}

/// Random123's published test vectors for philox4x32 with ten rounds.
void draws() {
  const struct {
    size_t seed, stream, counter;
    unsigned words[DRAW_WORDS];
  } cases[] = {{0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
               {~size_t(0), ~size_t(0), ~size_t(0), {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
               {0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
  for (const auto &expected : cases) {
    unsigned words[DRAW_WORDS];
    philox(expected.seed, expected.stream, expected.counter, words);
    check("draws", std::memcmp(words, expected.words, sizeof words) == 0);
  }
}

/// Attention rows with query and key offsets, and a whole tensor as one row; some blocks are idle.
template <typename T> void dropouts(double tolerance) {
  constexpr size_t SEED = 0x123456789abcdef0, LIMIT = size_t(3) << 30; // three quarters become zero
  const struct {
    unsigned rows, width, tokens, queries, first_query, first;
  } cases[] = {{1, 1, 1, 1, 0, 0}, {1, 1000, 1, 1, 0, 0}, {12, 70, 3, 7, 2, 61}, {6, 64, 2, 2, 0, 64}};
  for (const auto &[rows, width, tokens, queries, first_query, first] : cases) {
    const auto x = random_values<T>(size_t(rows) * width, 1);
    Doubles expected;
    for (unsigned row = 0; row < rows; row++)
      for (unsigned place = first; place < first + width; place++) {
        unsigned words[DRAW_WORDS];
        philox(SEED, row / tokens * queries + first_query + row % tokens, place / 64 * 16 + place % 16, words);
        expected.push_back(words[place % 64 / 16] >= LIMIT ? 4 * double(value_of(x[expected.size()])) : 0);
      }
    std::vector<T> y(x.size(), rounded<T>(NAN));
    launch({3, 1, 1}, ROW_THREADS, [&] {
      Kernels<T>::drop(x.data(), y.data(), rows, width, tokens, queries, first_query, first, SEED, LIMIT, 4);
    });
    compare("dropout " + std::to_string(rows) + " x " + std::to_string(width), y, expected, tolerance);
  }
}

/// AdamW step with more elements than threads in the launch.
template <typename T> void optimizer_steps(double tolerance) {
  constexpr size_t COUNT = 700;
  const double factor = 0.5, mean_rate = 0.9, square_rate = 0.99, keep = 0.995, rate = 0.125, root_factor = 2, epsilon = 1e-3;
  auto parameter = random_values<T>(COUNT, 1), mean = random_values<T>(COUNT, 1), square = random_values<T>(COUNT, 0.4f, 0.5f);
  const auto gradient = random_values<T>(COUNT, 1);
  Doubles parameters, means, squares;
  for (size_t i = 0; i < COUNT; i++) {
    const double change = factor * value_of(gradient[i]);
    means.push_back(mean_rate * value_of(mean[i]) + (1 - mean_rate) * change);
    squares.push_back(square_rate * value_of(square[i]) + (1 - square_rate) * change * change);
    parameters.push_back(keep * value_of(parameter[i]) - rate * means[i] / (root_factor * std::sqrt(squares[i]) + epsilon));
  }
  launch({2, 1, 1}, ROW_THREADS, [&] {
    Kernels<T>::adamw(parameter.data(), mean.data(), square.data(), gradient.data(), COUNT, factor, mean_rate, 1 - mean_rate,
                      square_rate, 1 - square_rate, keep, rate, root_factor, epsilon);
  });
  compare("adamw, parameters", parameter, parameters, tolerance);
  compare("adamw, means", mean, means, tolerance);
  compare("adamw, squares", square, squares, tolerance);
}

/// Partial sums of each block; the last block may have none.
template <typename T> void norms() {
  constexpr unsigned BLOCKS = 3;
  for (size_t count : {1, 300, 5000}) {
    const auto x = random_values<T>(count, 1);
    Doubles expected(BLOCKS);
    for (size_t i = 0; i < count; i++) expected[i / ROW_THREADS % BLOCKS] += std::pow(value_of(x[i]), 2);
    std::vector<float> sums(BLOCKS, NAN);
    launch({BLOCKS, 1, 1}, ROW_THREADS, [&] { Kernels<T>::squares(x.data(), sums.data(), count); });
    compare("squares of " + std::to_string(count), sums, expected, 1e-6);
  }
}

/// GELU and its derivative.
template <typename T> void activations(double tolerance) {
  constexpr size_t COUNT = 700;
  const auto x = random_values<T>(COUNT, 4), gradient = random_values<T>(COUNT, 1);
  Doubles activated, slopes;
  for (size_t i = 0; i < COUNT; i++) {
    const double z = value_of(x[i]), step = 1e-5;
    activated.push_back(gelu_of(z));
    slopes.push_back(value_of(gradient[i]) * (gelu_of(z + step) - gelu_of(z - step)) / (2 * step));
  }
  std::vector<T> y(COUNT), result(COUNT);
  launch({2, 1, 1}, ROW_THREADS, [&] { Kernels<T>::gelu(x.data(), y.data(), COUNT); });
  compare("gelu", y, activated, tolerance);
  launch({2, 1, 1}, ROW_THREADS, [&] { Kernels<T>::gelu_backward(x.data(), gradient.data(), result.data(), COUNT); });
  compare("gelu, gradient", result, slopes, tolerance);
}

/// Layer norm with f32 parameters and its gradients by formula, with more and fewer blocks than rows.
template <typename T> void training_norms(double tolerance) {
  for (auto [rows, width] : {std::pair(1u, 1u), std::pair(5u, 20u), std::pair(7u, 768u), std::pair(3u, 2048u)}) {
    const auto x = random_values<T>(rows * width, 2, 8), gradient = random_values<T>(rows * width, 1);
    const auto weight = random_values<float>(width, 1), bias = random_values<float>(width, 1);
    Doubles y, result, of_weight(width), of_bias(width);
    for (size_t start = 0; start < x.size(); start += width) {
      double mean = 0, variance = 0, sum = 0, product = 0;
      for (size_t i = 0; i < width; i++) mean += double(value_of(x[start + i])) / width;
      for (size_t i = 0; i < width; i++) variance += std::pow(value_of(x[start + i]) - mean, 2) / width;
      const auto normalized = [&](size_t i) { return (value_of(x[start + i]) - mean) / std::sqrt(variance + 1e-5); };
      for (size_t i = 0; i < width; i++) {
        const double given = double(value_of(gradient[start + i]));
        y.push_back(normalized(i) * weight[i] + bias[i]);
        of_weight[i] += given * normalized(i);
        of_bias[i] += given;
        sum += given * weight[i] / width;
        product += given * weight[i] * normalized(i) / width;
      }
      for (size_t i = 0; i < width; i++)
        result.push_back((double(value_of(gradient[start + i])) * weight[i] - sum - normalized(i) * product) /
                         std::sqrt(variance + 1e-5));
    }
    const std::string what = std::to_string(rows) + " x " + std::to_string(width);
    std::vector<T> found(x.size());
    launch({rows, 1, 1}, ROW_THREADS,
           [&] { Kernels<T>::wide_norm(x.data(), weight.data(), bias.data(), found.data(), width, 1e-5f); });
    compare("wide norm " + what, found, y, tolerance);
    for (unsigned blocks : {1u, 2u, 6u}) {
      std::vector<float> sums(blocks * 2 * width, NAN), total(2 * width);
      launch({blocks, 1, 1}, ROW_THREADS, [&] {
        Kernels<T>::norm_backward(x.data(), weight.data(), gradient.data(), found.data(), sums.data(), rows, width, 1e-5f);
      });
      for (size_t i = 0; i < sums.size(); i++) total[i % (2 * width)] += sums[i];
      Doubles parameters = of_weight;
      append(parameters, of_bias);
      compare("norm " + what + ", gradient", found, result, tolerance);
      compare("norm " + what + ", parameters", total, parameters, 2e-6);
    }
  }
}

/// Gradient of scores, from the derivative of the softmax.
template <typename T> void softmax_gradients(double tolerance) {
  constexpr unsigned BATCH = 2, HEADS = 2, QUERIES = 3, KEYS = 300;
  for (const auto &visible : {std::vector<unsigned>{298, 299, 300, 298, 299, 300}, {1, 7, 300, 64, 2, 65}}) {
    const bool is_regular = visible[1] == visible[0] + 1;
    const auto gradient = random_values<float>(BATCH * HEADS * QUERIES * KEYS, 1);
    std::vector<T> weights = random_values<T>(gradient.size(), 0.005f, 0.005f), result(gradient.size());
    Doubles expected(gradient.size());
    for (unsigned row = 0; row < BATCH * HEADS * QUERIES; row++) {
      const unsigned seen = visible[row / (HEADS * QUERIES) * QUERIES + row % QUERIES];
      double product = 0;
      for (unsigned key = 0; key < seen; key++) product += double(value_of(weights[row * KEYS + key])) * gradient[row * KEYS + key];
      for (unsigned key = 0; key < seen; key++)
        expected[row * KEYS + key] = value_of(weights[row * KEYS + key]) * (gradient[row * KEYS + key] - product);
    }
    constexpr unsigned ROWS = BATCH * HEADS * QUERIES, WARPS = ROW_THREADS / WARP;
    launch({(ROWS + WARPS - 1) / WARPS, 1, 1}, ROW_THREADS, [&] {
      Kernels<T>::softmax_backward(weights.data(), gradient.data(), result.data(), is_regular ? nullptr : visible.data(),
                                   visible[0], HEADS, QUERIES, KEYS, ROWS);
    });
    compare("softmax, gradient", result, expected, tolerance);
  }
}

/// Losses with and without gradients; logits far from zero, in contiguous and in padded rows.
template <typename T> void head_losses(double tolerance) {
  constexpr unsigned ROWS = 3;
  for (auto [width, distance] : {std::pair(1u, 1u), std::pair(5u, 8u), std::pair(700u, 700u), std::pair(701u, 704u)}) {
    auto logits = random_values<float>(ROWS * distance, 5, 40);
    const std::vector<unsigned> targets = {0, width - 1, width / 2};
    const T untouched = rounded<T>(7);
    std::vector<T> gradient(logits.size(), untouched);
    Doubles expected, slopes(logits.size(), 7);
    for (unsigned row = 0; row < ROWS; row++) {
      float *own = &logits[row * distance];
      for (unsigned i = width; i < distance; i++) own[i] = NAN;
      if (row == 1 && width > 2) own[0] = own[1] = -INFINITY;
      double total = 0;
      for (unsigned i = 0; i < width; i++) total += std::exp(double(own[i]));
      expected.push_back(std::log(total) - own[targets[row]]);
      for (unsigned i = 0; i < width; i++)
        slopes[row * distance + i] = std::exp(double(own[i])) / total - (i == targets[row]);
    }
    std::vector<float> loss(ROWS, NAN);
    launch({ROWS, 1, 1}, ROW_THREADS,
           [&] { Kernels<T>::losses(logits.data(), targets.data(), loss.data(), gradient.data(), width, distance); });
    // f32 logits up to 45 have an error of 2e-6.
    compare("losses of " + std::to_string(width), loss, expected, 4e-6);
    compare("losses, gradient", gradient, slopes, std::max(tolerance, 4e-6));
    loss.assign(ROWS, NAN);
    launch({ROWS, 1, 1}, ROW_THREADS, [&] {
      Kernels<T>::losses(logits.data(), targets.data(), loss.data(), static_cast<T *>(nullptr), width, distance);
    });
    compare("losses alone", loss, expected, 4e-6);
  }
}

/// Table rows that receive several rows, one, or none.
template <typename T> void row_gradient_sums(double tolerance) {
  constexpr unsigned WIDTH = 300;
  const std::vector<unsigned> places = {4, 0, 2}, starts = {0, 3, 4, 6}, order = {5, 0, 3, 1, 2, 4};
  const auto rows = random_values<T>(order.size() * WIDTH, 1);
  std::vector<T> sums(5 * WIDTH);
  Doubles expected(sums.size());
  for (size_t block = 0; block < places.size(); block++)
    for (unsigned i = starts[block]; i < starts[block + 1]; i++)
      for (unsigned column = 0; column < WIDTH; column++)
        expected[places[block] * WIDTH + column] += value_of(rows[order[i] * WIDTH + column]);
  launch({3, 1, 1}, ROW_THREADS,
         [&] { Kernels<T>::add_rows(rows.data(), places.data(), starts.data(), order.data(), sums.data(), WIDTH); });
  compare("sums of rows", sums, expected, tolerance);
}

/// Runs all tests. `tolerance` covers a few roundings of the type for values up to 1.
template <typename T> void all(const char *name, double tolerance) {
  std::printf("== %s\n", name);
  biases<T>(tolerance);
  few_rows<T>(tolerance);
  layer_norms<T>(tolerance);
  attention<T>(tolerance);
  split_keys<T>(tolerance);
  infinite_scores<T>(tolerance);
  new_tokens<T>();
  steps<T>(tolerance);
  dropouts<T>(tolerance);
  optimizer_steps<T>(tolerance);
  norms<T>();
  activations<T>(tolerance);
  training_norms<T>(tolerance);
  softmax_gradients<T>(tolerance);
  head_losses<T>(tolerance);
  row_gradient_sums<T>(tolerance);
}

} // namespace

int main() {
  draws();
  all<float>("f32", 1e-6);
  all<__half>("f16", 5e-4);
  all<__nv_bfloat16>("bf16", 4e-3);
  std::printf("%d failed\n", failures);
  return failures > 0;
}
