// Keys and values as the KV cache holds them, and products with them: float32 where products are (kFloats), bfloat16 elsewhere.
//
// The cache is read in words: of float32 one value, of bfloat16 two that are multiplied with two others at a time: in AMX's order
// where `in_tiles`, as add_pairs does elsewhere. Words of a block are keys [head_dim / kPerWord][block_size], then values
// [block_size / kPerWord][head_dim], divisions rounded up. Tiles of AMX read them as they are. What they are multiplied with is
// rounded to bfloat16 as well, and summed in float32.
#pragma once

#include "tiles.h"

namespace {

constexpr int kPerWord = kProducts == kFloats ? 1 : 2;  // values of a word
using Cached = std::conditional_t<kProducts == kFloats, float, uint16_t>;

inline Cached cached(float x) {
  if constexpr (kProducts == kFloats) return x;
  else return nearest_bfloat16(x);
}

inline long words_for(long values) { return (values + kPerWord - 1) / kPerWord; }

// What the cache is multiplied with.
using Factor = Cached;

// Returns what is saved.
inline Vec save_factors(Factor* to, Vec v) {
  if constexpr (kProducts == kFloats) {
    std::memcpy(to, &v, sizeof v);
    return v;
  } else {
    return save_rounded((uint16_t*)to, v);
  }
}

// Columns of words, kPanel of them at a time.
struct CachePanel {
  const Cached* data;
  long stride;         // values from a row of words to the next
  const Cached* next;  // what is read after all panels, and in the same way

  template <int M>
  void prefetch(long k) const {
    for (int i = 0; i < kPanel; i += 16) __builtin_prefetch(next + k * stride + i * kPerWord);
  }
  void columns(long k, Bits& low, Bits& high) const {
    low = load<Bits>(data + k * stride);
    high = load<Bits>(data + k * stride + kLanes * kPerWord);
  }
  static void add(Vec* sums, const Factor* factors, long k, Bits low, Bits high) {
    if constexpr (kProducts == kFloats) {
      const Vec x = all((float)factors[k]);
      sums[0] += x * (Vec)low, sums[1] += x * (Vec)high;
    } else {
      const Bits pair = load<uint32_t>(factors + 2 * k) - Bits{};
      sums[0] = add_pairs(sums[0], low, pair), sums[1] = add_pairs(sums[1], high, pair);
    }
  }
};

// Whether tiles multiply the cache: where head_dim and block_size are whole groups of inputs.
constexpr bool in_tiles(long head_dim, long block_size) {
  return kProducts == kTiles && head_dim % kGroup == 0 && block_size % kGroup == 0;
}

// Of a product by tiles: factors and words for kGroup inputs, and words that are read soon after.
struct CacheGroup {
  const Factor* factors;
  const Cached *words, *next;
};

// The same as `multiply` below to the bit, for few rows, by ordinary vectors: their sums stay in registers.
template <bool added, int M>
__attribute__((noinline)) void multiply_few(const std::vector<CacheGroup>& groups, long stride, long words_stride, long columns, float* out, long out_stride) {
  for (long column = 0; column < columns; column += kPanel) {
    Vec sums[M][2] = {};
    for (int m = 0; added && m < M; m++)
      for (int h = 0; h < 2; h++) sums[m][h] = load<Vec>(out + m * out_stride + column + h * kLanes);
    for (const CacheGroup& group : groups) {
      Vec even[M][2] = {}, odd[M][2] = {};
      for (int k = 0; k < kGroup / 2; k++) {
        const long at = k * words_stride + 2 * column;
        for (int i = 0; i < kPanel; i += 16) __builtin_prefetch(group.next + at + 2 * i);
        const Bits words[2] = {load<Bits>(group.words + at), load<Bits>(group.words + at + 2 * kLanes)};
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
          const Bits pair = load<uint32_t>(group.factors + m * stride + 2 * k) - Bits{};
          for (int h = 0; h < 2; h++) {
            even[m][h] += (Vec)(words[h] << 16) * (Vec)(pair << 16);
            odd[m][h] += (Vec)(words[h] & 0xffff0000u) * (Vec)(pair & 0xffff0000u);
          }
        }
      }
      for (int m = 0; m < M; m++)
        for (int h = 0; h < 2; h++) sums[m][h] += even[m][h] + odd[m][h];
    }
    for (int m = 0; m < M; m++)
      for (int h = 0; h < 2; h++) save(out + m * out_stride + column + h * kLanes, sums[m][h]);
  }
}

// Rows of factors, `stride` apart, times columns of words, `words_stride` values apart, as sums of all groups: in
// place of what is in `out`, or added to it. Whole tiles of rows are read and written, and whole panels of columns.
template <bool added>
void multiply(const std::vector<CacheGroup>& groups, long stride, int rows, long words_stride, long columns, float* out, long out_stride) {
  switch (rows) {
    case 1: return multiply_few<added, 1>(groups, stride, words_stride, columns, out, out_stride);
    case 2: return multiply_few<added, 2>(groups, stride, words_stride, columns, out, out_stride);
    case 3: return multiply_few<added, 3>(groups, stride, words_stride, columns, out, out_stride);
    case 4: return multiply_few<added, 4>(groups, stride, words_stride, columns, out, out_stride);
  }
  const long bytes = 2 * stride, words_bytes = 2 * words_stride;
  asm volatile("" : : : "memory");  // the intrinsics do not say that they read memory
  for (long column = 0; column < columns; column += 2 * kTileSide)
    for (int row = 0; row < rows; row += 2 * kTileSide) {
      const bool both = row + kTileSide < rows;
      float* sums = out + row * out_stride + column;
      added ? load_sums(sums, out_stride, both) : zero_sums();
      for (const CacheGroup& group : groups) {
        const Factor* factors = group.factors + row * stride;
        const Cached* words = group.words + 2 * column;
        if (row == 0)
          for (int i = 0; i < kTileSide; i++)
            for (int half = 0; half < 2; half++) __builtin_prefetch(group.next + i * words_stride + 2 * (column + half * kTileSide));
        multiply_upper((const uint16_t*)factors, bytes, words, words_bytes);
        if (both) multiply_lower((const uint16_t*)(factors + kTileSide * stride), bytes);
      }
      store_sums(sums, out_stride, both);
    }
}

}  // namespace
