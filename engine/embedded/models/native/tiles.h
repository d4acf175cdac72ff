// AMX's tiles: eight of 16 rows with 16 words each, and products of weights by them.
#pragma once

#include <array>

#include "bfloat16.h"

namespace {

constexpr int kTileSide = 16;

// tile_load_once: of what is not read again before it has left the first cache.
#if WITH_TILES
#define tile_zero _tile_zero
#define tile_load _tile_loadd
#define tile_load_once _tile_stream_loadd
#define tile_store _tile_stored
#define tile_multiply _tile_dpbf16ps
#else
// The same to the bit, for tests on processors without them.
inline thread_local uint32_t tile_words[8][kTileSide][kTileSide];
inline void tile_zero(int tile) { std::memset(tile_words[tile], 0, sizeof *tile_words); }
inline void tile_load(int tile, const void* from, long stride) {
  for (int row = 0; row < kTileSide; row++) std::memcpy(tile_words[tile][row], (const uint8_t*)from + row * stride, 64);
}
inline void tile_load_once(int tile, const void* from, long stride) { tile_load(tile, from, stride); }
inline void tile_store(int tile, void* to, long stride) {
  for (int row = 0; row < kTileSide; row++) std::memcpy((uint8_t*)to + row * stride, tile_words[tile][row], 64);
}
inline void tile_multiply(int sums, int rows, int columns) {
  for (int row = 0; row < kTileSide; row++)
    for (int at = 0; at < kTileSide; at += kLanes) {
      Vec even = {}, odd = {};
      for (int k = 0; k < kTileSide; k++) {
        const Bits inputs = tile_words[rows][row][k] - Bits{}, weights = load<Bits>(&tile_words[columns][k][at]);
        even += (Vec)(inputs << 16) * (Vec)(weights << 16);
        odd += (Vec)(inputs & 0xffff0000u) * (Vec)(weights & 0xffff0000u);
      }
      auto* to = (float*)&tile_words[sums][row][at];
      save(to, load<Vec>(to) + (even + odd));
    }
}
#endif

// The sums of four products are in tiles 0 to 3.
inline void zero_sums() {
  tile_zero(0);
  tile_zero(1);
  tile_zero(2);
  tile_zero(3);
}

// Adds a tile of rows times two tiles of columns, whose second is a tile's width further, to tiles 0 and 1.
template <bool once = false>
inline void multiply_upper(const uint16_t* rows, long rows_bytes, const void* columns, long columns_bytes) {
  tile_load(6, columns, columns_bytes);
  if constexpr (once) {
    tile_load_once(4, rows, rows_bytes);
  } else {
    tile_load(4, rows, rows_bytes);
  }
  tile_multiply(0, 4, 6);
  tile_load(7, (const uint8_t*)columns + 64, columns_bytes);
  tile_multiply(1, 4, 7);
}
// After that, another tile of rows times the same columns to tiles 2 and 3.
template <bool once = false>
inline void multiply_lower(const uint16_t* rows, long rows_bytes) {
  if constexpr (once) {
    tile_load_once(5, rows, rows_bytes);
  } else {
    tile_load(5, rows, rows_bytes);
  }
  tile_multiply(2, 5, 6);
  tile_multiply(3, 5, 7);
}

// ---- Products of weights.

constexpr int kFewestTiled = 3;      // rows for which tiles are faster than vectors
constexpr int kPassRows = 2 * kTileSide;
static_assert(kProducts != kTiles || (kLanes == kTileSide && kRoundedRows == kTileSide && kTaskRows % kPassRows == 0));
constexpr int kGroupsAhead = 2;      // of weights to prefetch before they are needed
constexpr long kCachedGroups = 20;   // of a panel, at most: they stay in the first cache while all rows are multiplied with them

// Sums of a tile of rows and a panel.
struct alignas(64) Sums {
  float low[kTileSide][kTileSide], high[kTileSide][kTileSide];
};

inline void load_sums(const Sums* from) {
  tile_load(0, from[0].low, 64);
  tile_load(1, from[0].high, 64);
  tile_load(2, from[1].low, 64);
  tile_load(3, from[1].high, 64);
}
inline void store_sums(Sums* to) {
  tile_store(0, to[0].low, 64);
  tile_store(1, to[0].high, 64);
  tile_store(2, to[1].low, 64);
  tile_store(3, to[1].high, 64);
}

// Two tiles of finished sums, whose rows `store` takes while the next ones are multiplied: vectors are computed beside tiles.
template <class Store>
class Finished {
 public:
  explicit Finished(Store& store) : store_(store) {}
  // All earlier ones must be stored. rows: how many of each tile there are.
  void set(const Sums* sums, std::array<int, 2> firsts, std::array<int, 2> panels, std::array<int, 2> rows) {
    sums_ = sums, firsts_ = firsts, panels_ = panels, rows_ = rows, tile_ = row_ = 0;
  }
  void store(int count) {
    for (; tile_ < 2; tile_++, row_ = 0)
      for (; row_ < rows_[tile_]; row_++) {
        if (!count--) return;
        store_(firsts_[tile_] + row_, panels_[tile_], load<Vec>(sums_[tile_].low[row_]), load<Vec>(sums_[tile_].high[row_]));
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

// One or two tiles of rows, the second one `below` the first, times some groups of a panel. first: nobody has read these groups
// before. Calls beside() for each group.
template <class Beside>
inline void multiply_panel(const uint16_t* rows, long below, bool both, const uint32_t* panel, long groups, bool first, Share share, Beside beside) {
  for (long g = 0; g < groups; g++, rows += kTileSide * kGroup, panel += kGroupWords) {
    if (first) ahead(panel);
    share.fetch(panel);
    multiply_upper<true>(rows, 2 * kGroup, panel, 4 * kPanel);
    if (both) multiply_lower<true>(rows + below, 2 * kGroup);
    beside();
  }
}

// A tile of rows times two panels.
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

// store(row, panel, low, high) takes rows from `first` on, at most kTaskRows, times `count` panels, which follow each other in memory.
template <class Store>
void multiply_tiles(const Rounded& x, int first, int rows, const uint32_t* const* panels, int count, Store& store) {
  const int passes = (rows + kPassRows - 1) / kPassRows, lines = passes > 1 ? kGroupWords / 16 : 0;
  const long spans = passes > 1 ? (x.groups + kCachedGroups - 1) / kCachedGroups : 1, span = (x.groups + spans - 1) / spans;
  Sums sums[kTaskRows / kTileSide];
  Finished finished(store);
  const auto beside = [&] { finished.store((kPassRows + span - 1) / span); };
  asm volatile("" : : : "memory");  // the intrinsics do not say that they read memory
  int p = 0;
  for (; rows <= kTileSide && p + 1 < count; p += 2) {
    zero_sums();
    multiply_panels(x.at(first), panels[p], panels[p + 1], x.groups, beside);
    finished.store_all();
    store_sums(sums);
    finished.set(sums, {0, 0}, {p, p + 1}, {rows, rows});
  }
  for (; p < count; p++)
    for (long begin = 0; begin < x.groups; begin += span)
      for (int pass = 0, row = 0; pass < passes; pass++, row += kPassRows) {
        const long groups = std::min(span, x.groups - begin), tile = x.groups * kTileSide * kGroup;
        const int upper = std::min(rows - row, kTileSide), lower = std::min(rows - row, kPassRows) - upper;
        // Of the panels that follow these, which are multiplied after all rows of these.
        const Share share{count * x.groups * kGroupWords, pass * lines / passes, (pass + 1) * lines / passes};
        Sums* of = spans > 1 ? sums + row / kTileSide : sums;
        begin ? load_sums(of) : zero_sums();
        multiply_panel(x.at(first + row) + begin * kTileSide * kGroup, tile, lower, panels[p] + begin * kGroupWords, groups, pass == 0, share, beside);
        finished.store_all();
        store_sums(of);
        if (begin + groups == x.groups) finished.set(of, {row, row + kTileSide}, {p, p}, {upper, lower});
      }
  finished.store_all();
}

}  // namespace
