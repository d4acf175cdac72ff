// Vectors of kLanes floats, with the vector extensions of GCC and Clang.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = LANES;
constexpr int kSums = 16;           // running sums of a reduction: as many at every width of vector
constexpr int kPanel = 2 * kLanes;  // outputs that one panel of a weight makes

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef Vec Outputs[2];  // of a row and a panel
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef uint64_t Longs __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

template <class V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline void save(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }
inline Vec all(float x) { return x - Vec{}; }

// The larger or smaller one in each lane, and the second one where either is no number.
inline Vec larger(Vec a, Vec b) {
#if defined(__AVX512F__) && LANES == 16
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__) && LANES == 8
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
inline Vec smaller(Vec a, Vec b) {
#if defined(__AVX512F__) && LANES == 16
  return (Vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX__) && LANES == 8
  return (Vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}
inline float largest(Vec v) {
#if defined(__AVX512F__) && LANES == 16
  return _mm512_reduce_max_ps((__m512)v);
#else
  float highest = v[0];
  for (int lane = 1; lane < kLanes; lane++) highest = std::max(highest, v[lane]);
  return highest;
#endif
}

// The lanes from `first` to before `last`, and `otherwise` in the others.
inline Vec within(Vec v, long first, long last, Vec otherwise) {
  Ints lanes;
  for (int lane = 0; lane < kLanes; lane++) lanes[lane] = lane;
  return ((lanes >= (int)first) & (lanes < (int)last)) ? v : otherwise;
}

// 2 to the power n + t, n the nearest integer: a polynomial of t with the least relative error (1e-7), then n is added to the exponent.
// What is added to find n leaves it in the lowest bits of `shifted`. What is no number stays so, unless its lowest nine bits
// are set.
inline Vec exponential(Vec x) {
  x = smaller(all(88.0f), larger(all(-87.0f), x));
  const Vec shifted = x * 1.44269504f + 12582912.0f;
  const Vec t = x * 1.44269504f - (shifted - 12582912.0f);
  Vec y = all(1.3264727e-3f);
  y = y * t + 9.6715127e-3f;
  y = y * t + 5.5507337e-2f;
  y = y * t + 2.4022242e-1f;
  y = y * t + 6.9314698e-1f;
  y = y * t + 1.0f;
  return (Vec)((Bits)y + ((Bits)shifted << 23));
}

inline float exponential(float x) { return exponential(all(x))[0]; }

inline Vec silu(Vec x) { return x / (1.0f + exponential(-x)); }
// By its approximation with a hyperbolic tangent, 0.5 x (1 + tanh(y / 2)) = x / (1 + exp(-y)).
inline Vec gelu(Vec x) { return x / (1.0f + exponential(-1.5957691216f * (x + 0.044715f * x * x * x))); }

inline long padded(long size) { return (size + kPanel - 1) / kPanel * kPanel; }

// All of `count` values: one half with the other, then the halves of what that gives.
template <int count, class Join>
inline float reduced(const float* values, Join join) {
  float halves[std::max(count / 2, 1)];
  if constexpr (count == 1) return *values;
  for (int i = 0; i < count / 2; i++) halves[i] = join(values[i], values[i + count / 2]);
  return reduced<std::max(count / 2, 1)>(halves, join);
}

// The sum of a term of each value, in the same order at every width of vector.
template <class Term>
inline float total(const float* x, long size, Term term) {
  Vec parts[kSums / kLanes] = {};
  long i = 0;
  for (; i + kSums <= size; i += kSums)
    for (int p = 0; p < kSums / kLanes; p++) parts[p] += term(load<Vec>(x + i + p * kLanes));
  float sums[kSums];
  std::memcpy(sums, parts, sizeof sums);
  for (int lane = 0; i < size; i++, lane++) sums[lane] += term(x[i]);
  return reduced<kSums>(sums, [](float a, float b) { return a + b; });
}

}  // namespace
