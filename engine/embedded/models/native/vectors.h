// Vectors of kLanes floats, with the vector extensions of GCC and Clang.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kLanes = LANES;
constexpr int kSums = 16;           // running sums of a reduction: as many at every width of vector
constexpr int kPanel = 2 * kLanes;  // outputs that one panel of a weight makes

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef uint64_t Longs __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

template <class V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline void save(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }
inline Vec all(float x) { return x - Vec{}; }

inline Vec exponential(Vec x) {
  x = x < -87.0f ? all(-87.0f) : x;
  x = x > 88.0f ? all(88.0f) : x;
  const Vec shifted = x * 1.44269504f + 12582912.0f;
  const Vec n = shifted - 12582912.0f;
  const Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vec y = all(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return y * (Vec)power;
}

inline float exponential(float x) { return exponential(all(x))[0]; }

inline long padded(long size) { return (size + kPanel - 1) / kPanel * kPanel; }

// The sum of a term of each value, in the same order at every width of vector.
template <class Term>
inline float total(const float* x, long size, Term term) {
  Vec parts[kSums / kLanes] = {};
  long i = 0;
  for (; i + kSums <= size; i += kSums)
    for (int p = 0; p < kSums / kLanes; p++) parts[p] += term(load<Vec>(x + i + p * kLanes));
  float sums[kSums], whole = 0;
  std::memcpy(sums, parts, sizeof sums);
  for (int lane = 0; i < size; i++, lane++) sums[lane] += term(x[i]);
  for (float part : sums) whole += part;
  return whole;
}
inline float largest(Vec v) {
  float best = v[0];
  for (int i = 1; i < kLanes; i++) best = std::max(best, v[i]);
  return best;
}

}  // namespace
