// Matrix products in float32: a tile of rows times panels of columns, kept in registers.
#pragma once

#include "vectors.h"

namespace {

constexpr int kTileRows = kLanes == 16 ? 12 : 6;  // AVX-512 has twice the registers
constexpr int kTaskRows = 16 * kTileRows;         // rows of a task, at most
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
  void columns(long k, Bits& low, Bits& high) const {
    const Bits both = load<Bits>(data + k * kLanes);
    low = both << 16;
    high = both & 0xffff0000u;
  }
  static void add(Vec* sums, const float* factors, long k, Bits low, Bits high) {
    const Vec x = all(factors[k]);
    sums[0] += x * (Vec)low;
    sums[1] += x * (Vec)high;
  }
};

template <int M, int P, class Factor, class Panel, class Store>
__attribute__((noinline)) void tile(const Factor* a, long stride, const Panel* panels, long depth, int row, int panel, Store& store) {
  Vec sums[M][P][2] = {};
  for (long k = 0; k < depth; k++) {
    for (int p = 0; p < P; p++) {
      Bits low, high;
      panels[p].template prefetch<M>(k);
      panels[p].columns(k, low, high);
      for (int m = 0; m < M; m++) Panel::add(sums[m][p], a + m * stride, k, low, high);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) store(row + m, panel + p, sums[m][p][0], sums[m][p][1]);
}

template <int M, class Factor, class Panel, class Store>
inline void tiles(const Factor* a, long stride, const Panel* panels, int count, long depth, int row, Store& store) {
  // As many panels as leave all sums in registers: GCC loads the columns of every panel first.
  constexpr int P = M == 1 ? kStreams : M == 2 ? (kLanes == 16 ? 3 : 2) : M == 3 && kLanes == 16 ? 2 : 1;
  int panel = 0;
  for (; panel + P <= count; panel += P) tile<M, P>(a, stride, panels + panel, depth, row, panel, store);
  for (; panel < count; panel++) tile<M, 1>(a, stride, panels + panel, depth, row, panel, store);
}

template <int M, class Factor, class Panel, class Store>
inline void rest(const Factor* a, long stride, int rows, const Panel* panels, int count, long depth, int row, Store& store) {
  if constexpr (M > 0) {
    if (rows == M) return tiles<M>(a, stride, panels, count, depth, row, store);
    rest<M - 1>(a, stride, rows, panels, count, depth, row, store);
  }
}

// store(row, panel, low, high) takes `rows` of a, `stride` apart, times the panels, of which each adds `depth` times to a sum.
template <class Factor, class Panel, class Store>
inline void multiply(const Factor* a, long stride, int rows, const Panel* panels, int count, long depth, Store store) {
  int row = 0;
  for (; row + kTileRows <= rows; row += kTileRows) tiles<kTileRows>(a + row * stride, stride, panels, count, depth, row, store);
  rest<kTileRows - 1>(a + row * stride, stride, rows - row, panels, count, depth, row, store);
}

}  // namespace
