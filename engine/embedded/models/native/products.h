// Matrix products in float32: a tile of rows times panels of columns, kept in registers.
#pragma once

#include "vectors.h"

namespace {

constexpr int kTileRows = kLanes == 16 ? 12 : 6;  // AVX-512 has twice the registers
constexpr int kColumnsAhead = 64;                 // columns of weights to prefetch before they are needed
constexpr bool kFarAhead = PRODUCTS == 1;         // the level that AMD's processors take: what is read is asked for earlier there
constexpr int kStreams = 3;                       // panels side by side for one row; processors fetch ahead by themselves then

// Weights [outputs, inputs] as panels of [inputs][kLanes]: output i of a panel in the low half, output kLanes + i in the high half.
struct WeightPanel {
  const uint32_t* data;
  template <int M>
  void prefetch(long k) const {
    if (M > 1) __builtin_prefetch(data + (k + kColumnsAhead) * kLanes);
  }
  void columns(long k, Vec& low, Vec& high) const {
    const Bits both = load<Bits>(data + k * kLanes);
    low = (Vec)(both << 16);
    high = (Vec)(both & 0xffff0000u);
  }
};
struct FloatPanel {
  const float* data;
  long stride;
  const float* next;  // what is read after all panels, and in the same way
  template <int M>
  void prefetch(long k) const {
    for (int i = 0; i < kPanel; i += 16) __builtin_prefetch(next + k * stride + i);
  }
  void columns(long k, Vec& low, Vec& high) const {
    low = load<Vec>(data + k * stride);
    high = load<Vec>(data + k * stride + kLanes);
  }
};

template <int M, int P, class Panel, class Store>
__attribute__((noinline)) void tile(const float* a, long stride, const Panel* panels, long depth, int row, int panel, Store& store) {
  Vec sums[M][P][2] = {};
  for (long k = 0; k < depth; k++) {
    for (int p = 0; p < P; p++) {
      Vec low, high;
      panels[p].template prefetch<M>(k);
      panels[p].columns(k, low, high);
      for (int m = 0; m < M; m++) {
        const Vec x = all(a[m * stride + k]);
        sums[m][p][0] += x * low;
        sums[m][p][1] += x * high;
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++) store(row + m, panel + p, sums[m][p][0], sums[m][p][1]);
}

template <int M, class Panel, class Store>
inline void tiles(const float* a, long stride, const Panel* panels, int count, long depth, int row, Store& store) {
  // As many panels as leave all sums in registers: GCC loads the columns of every panel first.
  constexpr int P = M == 1 ? kStreams : M == 2 ? (kLanes == 16 ? 3 : 2) : M == 3 && kLanes == 16 ? 2 : 1;
  int panel = 0;
  for (; panel + P <= count; panel += P) tile<M, P>(a, stride, panels + panel, depth, row, panel, store);
  for (; panel < count; panel++) tile<M, 1>(a, stride, panels + panel, depth, row, panel, store);
}

template <int M, class Panel, class Store>
inline void rest(const float* a, long stride, int rows, const Panel* panels, int count, long depth, int row, Store& store) {
  if constexpr (M > 0) {
    if (rows == M) return tiles<M>(a, stride, panels, count, depth, row, store);
    rest<M - 1>(a, stride, rows, panels, count, depth, row, store);
  }
}

// store(row, panel, low, high) takes a [rows, depth] times the panels.
template <class Panel, class Store>
inline void multiply(const float* a, long stride, int rows, const Panel* panels, int count, long depth, Store store) {
  int row = 0;
  for (; row + kTileRows <= rows; row += kTileRows) tiles<kTileRows>(a + row * stride, stride, panels, count, depth, row, store);
  rest<kTileRows - 1>(a + row * stride, stride, rows - row, panels, count, depth, row, store);
}

}  // namespace
