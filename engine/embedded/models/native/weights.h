// Products of bfloat16 weights with rounded activations: by tiles, or by ordinary vectors.
#pragma once

#include "tiles.h"

namespace {

constexpr int kScalarRows = kProducts == kTiles ? 4 : 12;  // rows that are computed at a time by ordinary vectors

// Panels that so many rows are multiplied with at a time, from places far apart where these are all rows of a product.
constexpr int side_by_side(int rows) {
  if (rows == 1) return kStreams;
  if (kProducts == kTiles) return rows == 2 ? 2 : 1;
  return rows <= 4 ? kStreams : 1;
}
// Words of weights to prefetch into the second cache.
constexpr int words_ahead(int rows) { return !kFarAhead ? 512 : side_by_side(rows) > 1 ? 256 : 2048; }

// M rows times P panels, by ordinary vectors.
template <int M, int P, class Store>
__attribute__((noinline)) void pairs(const Rounded& x, int first, int row, const uint32_t* const* panels, int panel, Store& store) {
  Vec sums[M][P][2] = {};
  const uint16_t* a = x.at(first + row);
  for (long g = 0; g < x.groups; g++, a += kRoundedRows * kGroup) {
    Vec even[M][P][2] = {}, odd[M][P][2] = {};
    for (int k = 0; k < kGroup / 2; k++) {
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) {
        const uint32_t* words = panels[panel + p] + g * kGroupWords + k * kPanel;
        for (int i = 0; i < kPanel; i += 16) __builtin_prefetch(words + words_ahead(M) + i, 0, 2);
        const Bits weights[2] = {load<Bits>(words), load<Bits>(words + kLanes)};
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
          const Bits inputs = load<uint32_t>(a + m * kGroup + 2 * k) - Bits{};
          for (int h = 0; h < 2; h++) {
            if constexpr (kProducts == kPairs) {
              sums[m][p][h] = add_pairs(sums[m][p][h], weights[h], inputs);
            } else {
              even[m][p][h] += (Vec)(weights[h] << 16) * (Vec)(inputs << 16);
              odd[m][p][h] += (Vec)(weights[h] & 0xffff0000u) * (Vec)(inputs & 0xffff0000u);
            }
          }
        }
      }
    }
    if constexpr (kProducts == kTiles)
      for (int m = 0; m < M; m++)
        for (int p = 0; p < P; p++)
          for (int h = 0; h < 2; h++) sums[m][p][h] += even[m][p][h] + odd[m][p][h];
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) store(row + m, panel + p, sums[m][p][0], sums[m][p][1]);
}

template <int M, class Store>
inline void some_rows(const Rounded& x, int first, int row, int rows, const uint32_t* const* panels, int count, Store& store) {
  if constexpr (M > 0) {
    if (rows != M) return some_rows<M - 1>(x, first, row, rows, panels, count, store);
    constexpr int P = side_by_side(M);
    int panel = 0;
    for (; panel + P <= count; panel += P) pairs<M, P>(x, first, row, panels, panel, store);
    for (; panel < count; panel++) pairs<M, 1>(x, first, row, panels, panel, store);
  }
}

// store(row, panel, low, high) takes rows from `first` on, where a tile begins, times `count` panels.
template <class Store>
void multiply(const Rounded& x, int first, int rows, const uint32_t* const* panels, int count, Store store) {
  if constexpr (kProducts == kTiles)
    if (rows >= kFewestTiled) return multiply_tiles(x, first, rows, panels, count, store);
  for (int row = 0; row < rows; row += kScalarRows)
    some_rows<kScalarRows>(x, first, row, std::min(kScalarRows, rows - row), panels, count, store);
}

}  // namespace
