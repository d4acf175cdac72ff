// Keys and values as the KV cache holds them, and products with them: float32 where products are (kFloats), bfloat16 elsewhere.
//
// The cache is read in words: of float32 one value, of bfloat16 two that are multiplied with two others at a time, as
// add_pairs does. Words of a block are keys [head_dim / kPerWord][block_size], then values [block_size / kPerWord][head_dim],
// divisions rounded up. What they are multiplied with is rounded to bfloat16 as well, and summed in float32.
#pragma once

#include "bfloat16.h"

namespace {

constexpr int kPerWord = kProducts == kFloats ? 1 : 2;  // values of a word
using Cached = std::conditional_t<kProducts == kFloats, float, uint16_t>;

inline Cached cached(float x) {
  if constexpr (kProducts == kFloats) return x;
  else return nearest_bfloat16(x);
}

inline long words_for(long values) { return (values + kPerWord - 1) / kPerWord; }

// What the cache is multiplied with. Where no instruction takes pairs of bfloat16, rounded values stay in float32.
#if defined(__AVX512BF16__) && LANES == 16
constexpr bool kPairInstruction = kProducts != kFloats;
#else
constexpr bool kPairInstruction = false;
#endif
using Factor = std::conditional_t<kPairInstruction, uint16_t, float>;

inline void save_factors(Factor* to, Vec v) {
  if constexpr (kProducts == kFloats) return std::memcpy(to, &v, sizeof v), void();
#if defined(__AVX512BF16__) && LANES == 16
  const __m256bh narrow = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(to, &narrow, sizeof narrow);
#else
  v = nearest_bfloat16(v);
  std::memcpy(to, &v, sizeof v);
#endif
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
    } else if constexpr (kPairInstruction) {
      const Bits pair = load<uint32_t>(factors + 2 * k) - Bits{};
      sums[0] = add_pairs(sums[0], low, pair), sums[1] = add_pairs(sums[1], high, pair);
    } else {
      const Vec even = all((float)factors[2 * k]), odd = all((float)factors[2 * k + 1]);
      sums[0] += odd * (Vec)(low & 0xffff0000u), sums[1] += odd * (Vec)(high & 0xffff0000u);
      sums[0] += even * (Vec)(low << 16), sums[1] += even * (Vec)(high << 16);
    }
  }
};

}  // namespace
