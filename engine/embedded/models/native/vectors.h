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
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

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
inline float largest(Vec v) {
  return reduced<kLanes>((const float*)&v, [](float a, float b) { return a > b ? a : b; });
}

}  // namespace
