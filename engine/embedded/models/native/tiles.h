// AMX's tiles: eight of 16 rows with 16 words each.
#pragma once

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

// The sums of four products are in tiles 0 to 3: those of two tiles of columns for a tile of rows, then for the one below it. In
// memory their rows are `stride` floats apart; the lower tile has a place there if there are `both`.
inline void zero_sums() {
  tile_zero(0);
  tile_zero(1);
  tile_zero(2);
  tile_zero(3);
}
inline void load_sums(const float* from, long stride, bool both) {
  const float* lower = from + kTileSide * stride;
  tile_load(0, from, 4 * stride);
  tile_load(1, from + kTileSide, 4 * stride);
  if (!both) return;
  tile_load(2, lower, 4 * stride);
  tile_load(3, lower + kTileSide, 4 * stride);
}
inline void store_sums(float* to, long stride, bool both) {
  float* lower = to + kTileSide * stride;
  tile_store(0, to, 4 * stride);
  tile_store(1, to + kTileSide, 4 * stride);
  if (!both) return;
  tile_store(2, lower, 4 * stride);
  tile_store(3, lower + kTileSide, 4 * stride);
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

}  // namespace
