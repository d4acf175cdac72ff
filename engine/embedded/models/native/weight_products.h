// Products of bfloat16 weights with rounded activations: by tiles, or by ordinary vectors.
#pragma once

#include <array>

#include "tiles.h"

namespace {

constexpr int kFewestTiled = 3;                                           // rows for which tiles are faster than vectors
constexpr int kScalarRows = kProducts == kTiles ? kFewestTiled - 1 : 12;  // rows that vectors compute at a time

// Panels that so many rows are multiplied with at a time, from places far apart where these are all rows of a product.
constexpr int side_by_side(int rows) {
  if (rows == 1) return kStreams;
  if (kProducts == kTiles) return rows == 2 ? 2 : 1;
  return rows <= 4 ? kStreams : 1;
}
// Words of weights to prefetch into the second cache.
constexpr int words_ahead(int rows) { return !kFarAhead ? 512 : side_by_side(rows) > 1 ? 256 : 2048; }

// ---- By ordinary vectors.

// M rows times P panels.
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

// ---- By tiles.

constexpr int kPassRows = 2 * kTileSide;
constexpr int kGroupsAhead = 2;     // of weights to prefetch before they are needed
constexpr long kCachedGroups = 20;  // of a panel, that stay in the first cache for all rows: 40 KiB of 48
static_assert(kProducts != kTiles || (kLanes == kTileSide && kRoundedRows == kTileSide && kTaskRows % kPassRows == 0));

// Sums of rows and a panel.
typedef float Sums[kPanel];

// Two tiles of finished sums, whose rows `store` takes while the next ones are multiplied: vectors are computed beside tiles.
template <class Store>
class Finished {
 public:
  explicit Finished(Store& store) : store_(store) {}
  // All earlier ones must be stored. sums: [2][kTileSide]. rows: how many of each tile there are.
  void set(const Sums* sums, std::array<int, 2> firsts, std::array<int, 2> panels, std::array<int, 2> rows) {
    sums_ = sums, firsts_ = firsts, panels_ = panels, rows_ = rows, tile_ = row_ = 0;
  }
  void store(int count) {
    for (; tile_ < 2; tile_++, row_ = 0)
      for (; row_ < rows_[tile_]; row_++) {
        if (!count--) return;
        const float* sums = sums_[tile_ * kTileSide + row_];
        store_(firsts_[tile_] + row_, panels_[tile_], load<Vec>(sums), load<Vec>(sums + kLanes));
      }
  }
  void store_all() { store(kPassRows); }

 private:
  Store& store_;
  const Sums* sums_ = nullptr;
  std::array<int, 2> firsts_{}, panels_{}, rows_{};
  int tile_ = 2, row_ = 0;
};

inline void ahead(const uint32_t* words) {
  for (int i = 0; i < kGroupWords; i += 16) __builtin_prefetch(words + kGroupsAhead * kGroupWords + i);
}

// Lines of a group of weights that one of several passes over a panel asks for in the second cache, so that memory brings what
// is multiplied next during all of them. `to` is where that is, from the panel on, in words.
struct Share {
  long to;
  int begin, end;

  void fetch(const uint32_t* words) const {
    for (int line = begin; line < end; line++) __builtin_prefetch(words + to + line * 16, 0, 2);
  }
};

// A tile of rows and, if `both`, the one `below` it, times some groups of a panel. first: these groups are asked for ahead.
// once: rows are not read again soon. Calls beside() for each group.
template <bool once, class Beside>
inline void multiply_panel(const uint16_t* rows, long below, bool both, const uint32_t* panel, long groups, bool first, Share share,
                           Beside beside) {
  for (long g = 0; g < groups; g++, rows += kTileSide * kGroup, panel += kGroupWords) {
    if (first) ahead(panel);
    share.fetch(panel);
    multiply_upper<once>(rows, 2 * kGroup, panel, 4 * kPanel);
    if (both) multiply_lower<once>(rows + below, 2 * kGroup);
    beside();
  }
}

// A tile of rows times two panels. Calls beside() for each group.
template <class Beside>
inline void multiply_panels(const uint16_t* rows, const uint32_t* panel, const uint32_t* other, long groups, Beside beside) {
  for (long g = 0; g < groups; g++, rows += kTileSide * kGroup, panel += kGroupWords, other += kGroupWords) {
    ahead(panel), ahead(other);
    multiply_upper(rows, 2 * kGroup, panel, 4 * kPanel);
    tile_load(5, other, 4 * kPanel);
    tile_multiply(2, 4, 5);
    tile_load(6, other + kTileSide, 4 * kPanel);
    tile_multiply(3, 4, 6);
    beside();
  }
}

// As `multiply` below, of panels that follow each other in memory. A panel is multiplied with two tiles of rows in each pass.
// Where there are several, rows are loaded past the first cache, so that the panel stays there, in spans if it is too large.
template <class Store>
void multiply_tiles(const Rounded& x, int first, int rows, const uint32_t* const* panels, int count, Store& store) {
  const int passes = (rows + kPassRows - 1) / kPassRows, lines = passes > 1 ? kGroupWords / 16 : 0;
  const long spans = passes > 1 ? (x.groups + kCachedGroups - 1) / kCachedGroups : 1, span = (x.groups + spans - 1) / spans;
  const int some = (kPassRows + span - 1) / span;
  alignas(64) Sums sums[kTaskRows];
  Finished finished(store);
  const auto beside = [&] { finished.store(some); };
  asm volatile("" : : : "memory");  // the intrinsics do not say that they read memory
  int p = 0;
  for (; rows <= kTileSide && p + 1 < count; p += 2) {
    zero_sums();
    multiply_panels(x.at(first), panels[p], panels[p + 1], x.groups, beside);
    finished.store_all();
    store_sums(*sums, kPanel, true);
    finished.set(sums, {0, 0}, {p, p + 1}, {rows, rows});
  }
  for (; p < count; p++)
    for (long begin = 0; begin < x.groups; begin += span)
      for (int pass = 0, row = 0; pass < passes; pass++, row += kPassRows) {
        const int upper = std::min(rows - row, kTileSide), lower = std::min(rows - row, kPassRows) - upper;
        const bool both = lower > 0;
        const long groups = std::min(span, x.groups - begin), tile = x.groups * kTileSide * kGroup;
        const uint16_t* from = x.at(first + row) + begin * kTileSide * kGroup;
        const uint32_t* panel = panels[p] + begin * kGroupWords;
        // Of the next task's panels, which follow these `count` in memory.
        const Share share{count * x.groups * kGroupWords, pass * lines / passes, (pass + 1) * lines / passes};
        Sums* of = spans > 1 ? sums + row : sums;  // the same ones if they need not be kept: they stay in the cache
        begin ? load_sums(*of, kPanel, both) : zero_sums();
        if (passes > 1) multiply_panel<true>(from, tile, both, panel, groups, pass == 0, share, beside);
        else multiply_panel<false>(from, tile, both, panel, groups, true, share, beside);
        finished.store_all();
        store_sums(*of, kPanel, both);
        if (begin + groups == x.groups) finished.set(of, {row, row + kTileSide}, {p, p}, {upper, lower});
      }
  finished.store_all();
}

// store(row, panel, low, high) takes rows from `first` on, where a tile begins, times `count` panels; at most kTaskRows.
template <class Store>
void multiply(const Rounded& x, int first, int rows, const uint32_t* const* panels, int count, Store store) {
  if constexpr (kProducts == kTiles)
    if (rows >= kFewestTiled) return multiply_tiles(x, first, rows, panels, count, store);
  for (int row = 0; row < rows; row += kScalarRows)
    some_rows<kScalarRows>(x, first, row, std::min(kScalarRows, rows - row), panels, count, store);
}

}  // namespace
