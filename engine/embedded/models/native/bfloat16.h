// Arithmetic of bfloat16 with bfloat16, summed in float32: activations are rounded to bfloat16 once for each product.
//
// What a sum is does not depend on how many rows are computed together, nor on the instructions that compute it:
// kTiles: products of 32 inputs are added up one after the other, those with even and those with odd inputs apart; then
//   both sums to each other, and to the output. So does AMX's TDPBF16PS.
// kPairs: to an output, the product with the odd input is added, then that with the even one. So does VDPBF16PS.
// A product of two bfloat16 is exact in float32, so ordinary multiplications and additions give the same bits.
#pragma once

#include <vector>

#include "products.h"

namespace {

#define WITH_TILES (defined(__AMX_BF16__) && PRODUCTS == 2 && LANES == 16)

enum Arithmetic { kFloats, kPairs, kTiles };  // kFloats: weights times activations as they are (products.h)
constexpr Arithmetic kProducts = (Arithmetic)PRODUCTS;

constexpr int kGroup = 32;                                    // inputs that are added up apart from others
constexpr int kRoundedRows = kProducts == kTiles ? 16 : 12;   // rows of a tile of activations
constexpr int kScalarRows = kProducts == kTiles ? 4 : 12;     // rows that are computed at a time by ordinary vectors
constexpr int kGroupWords = kGroup / 2 * kPanel;              // words of a panel's group

// Panels that so many rows are multiplied with at a time, from places far apart where these are all rows of a product.
constexpr int side_by_side(int rows) {
  if (rows == 1) return kStreams;
  if (kProducts == kTiles) return rows == 2 ? 2 : 1;
  return rows <= 4 ? kStreams : 1;
}
// Words of weights to prefetch into the second cache.
constexpr int words_ahead(int rows) { return !kFarAhead ? 512 : side_by_side(rows) > 1 ? 256 : 2048; }

// The nearest bfloat16, an even one of two.
inline uint16_t nearest_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
// The same of each lane, saved with 16 bits. Returns what is saved.
inline Vec save_rounded(uint16_t* to, Vec v) {
#if defined(__AVX512BF16__) && LANES == 16
  const Halves narrow = (Halves)_mm512_cvtneps_pbh((__m512)v);
#else
  const Bits bits = (Bits)v;
  const Halves narrow = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, Halves);
#endif
  std::memcpy(to, &narrow, sizeof narrow);
  return (Vec)(__builtin_convertvector(narrow, Bits) << 16);
}

// Activations: [tiles][groups][kRoundedRows][kGroup] bfloat16; beyond a row's inputs are zeros.
struct Rounded {
  uint16_t* values;
  long groups, inputs;

  const uint16_t* at(long row) const {
    return values + (row / kRoundedRows * groups * kRoundedRows + row % kRoundedRows) * kGroup;
  }
  // Values of a row from `first` on, as many as are left at most. Zeros follow the last.
  void set(long row, long first, const float* x, long count) const {
    auto* to = (uint16_t*)at(row);
    count = std::min(count, inputs - first);
    long i = 0;
    const auto place = [&](long k) { return to + k / kGroup * kRoundedRows * kGroup + k % kGroup; };
    if (first % kGroup == 0)
      for (; i + kGroup <= count; i += kGroup) {
        uint16_t* group = place(first + i);
        for (int k = 0; k < kGroup; k += kLanes) save_rounded(group + k, load<Vec>(x + i + k));
      }
    for (; i < count; i++) *place(first + i) = nearest_bfloat16(x[i]);
    if (first + count == inputs)
      for (long k = inputs; k < groups * kGroup; k++) *place(k) = 0;
  }
};

// Room for activations; it only grows.
class RoundedBuffer {
 public:
  Rounded rows(long count, long inputs) {
    const long groups = (inputs + kGroup - 1) / kGroup;
    const size_t size = (count + kRoundedRows - 1) / kRoundedRows * kRoundedRows * groups * kGroup + 64;
    if (values_.size() < size) values_ = std::vector<uint16_t>(size);
    return {(uint16_t*)(((uintptr_t)values_.data() + 63) & ~(uintptr_t)63), groups, inputs};
  }

 private:
  std::vector<uint16_t> values_;
};

// While it lives, this thread can compute with tiles, and takes subnormal numbers for zeros as all these instructions do.
class ProductState {
 public:
  ProductState() {
#if defined(__SSE2__)
    if (kProducts != kFloats) _mm_setcsr(before_ | 0x8040);
#endif
#if WITH_TILES
    struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
    asm volatile("" : : "r"(&shape) : "memory");
    _tile_loadconfig(&shape);
#endif
  }
  ~ProductState() {
#if WITH_TILES
    _tile_release();
#endif
#if defined(__SSE2__)
    _mm_setcsr(before_);
#endif
  }
  ProductState(const ProductState&) = delete;

 private:
#if defined(__SSE2__)
  const unsigned before_ = _mm_getcsr();
#endif
};

// sum += weights * inputs, in each lane those of a pair. Intel's processors, which have AMX, take long for VDPBF16PS.
inline Vec add_pairs(Vec sum, Bits weights, Bits inputs) {
#if defined(__AVX512BF16__) && LANES == 16 && PRODUCTS == 1
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)inputs);
#else
  sum += (Vec)(weights & 0xffff0000u) * (Vec)(inputs & 0xffff0000u);
  return sum + (Vec)(weights << 16) * (Vec)(inputs << 16);
#endif
}

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

// AMX's tiles: eight of 16 rows with 16 words each.
#if WITH_TILES
#define tile_zero _tile_zero
#define tile_load _tile_loadd
#define tile_store _tile_stored
#define tile_multiply _tile_dpbf16ps
#else
// The same to the bit, for tests on processors without them.
inline thread_local uint32_t tile_words[8][16][16];
inline void tile_zero(int tile) { std::memset(tile_words[tile], 0, sizeof *tile_words); }
inline void tile_load(int tile, const void* from, long stride) {
  for (int row = 0; row < 16; row++) std::memcpy(tile_words[tile][row], (const uint8_t*)from + row * stride, 64);
}
inline void tile_store(int tile, void* to, long stride) {
  for (int row = 0; row < 16; row++) std::memcpy((uint8_t*)to + row * stride, tile_words[tile][row], 64);
}
inline void tile_multiply(int sums, int rows, int columns) {
  for (int row = 0; row < 16; row++)
    for (int at = 0; at < 16; at += kLanes) {
      Vec even = {}, odd = {};
      for (int k = 0; k < 16; k++) {
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
inline void multiply_upper(const uint16_t* rows, long rows_bytes, const void* columns, long columns_bytes) {
  tile_load(6, columns, columns_bytes);
  tile_load(4, rows, rows_bytes);
  tile_multiply(0, 4, 6);
  tile_load(7, (const uint8_t*)columns + 64, columns_bytes);
  tile_multiply(1, 4, 7);
}
// After that, another tile of rows times the same columns to tiles 2 and 3.
inline void multiply_lower(const uint16_t* rows, long rows_bytes) {
  tile_load(5, rows, rows_bytes);
  tile_multiply(2, 5, 6);
  tile_multiply(3, 5, 7);
}

#if WITH_TILES
constexpr int kFewestTiled = 3;  // rows for which tiles are faster than vectors
constexpr int kGroupsAhead = 2;  // of weights to prefetch before they are needed

// Results of a tile of rows and a panel.
struct alignas(64) Sums {
  float low[16][16], high[16][16];
};

inline void ahead(const uint32_t* words) {
  for (int i = 0; i < kGroupWords; i += 16) __builtin_prefetch(words + kGroupsAhead * kGroupWords + i);
}

inline void store_sums(Sums* to) {
  tile_store(0, to[0].low, 64);
  tile_store(1, to[0].high, 64);
  tile_store(2, to[1].low, 64);
  tile_store(3, to[1].high, 64);
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

// Two tiles of rows times a panel.
inline void tiles_2x1(const uint16_t* a, const uint16_t* b, const uint32_t* panel, long groups, bool first, Share share, Sums* to) {
  constexpr long kStep = kRoundedRows * kGroup;
  zero_sums();
  for (long g = 0; g < groups; g++, a += kStep, b += kStep, panel += kGroupWords) {
    if (first) ahead(panel);
    share.fetch(panel);
    multiply_upper(a, 2 * kGroup, panel, 4 * kPanel);
    multiply_lower(b, 2 * kGroup);
  }
  store_sums(to);
}

// A tile of rows times two panels.
inline void tiles_1x2(const uint16_t* a, const uint32_t* panel, const uint32_t* other, long groups, Sums* to) {
  zero_sums();
  for (long g = 0; g < groups; g++, a += kRoundedRows * kGroup, panel += kGroupWords, other += kGroupWords) {
    ahead(panel), ahead(other);
    tile_load(4, a, 2 * kGroup);
    tile_load(6, panel, 4 * kPanel);
    tile_multiply(0, 4, 6);
    tile_load(7, panel + kLanes, 4 * kPanel);
    tile_multiply(1, 4, 7);
    tile_load(5, other, 4 * kPanel);
    tile_multiply(2, 4, 5);
    tile_load(6, other + kLanes, 4 * kPanel);
    tile_multiply(3, 4, 6);
  }
  store_sums(to);
}

// A tile of rows times a panel.
inline void tiles_1x1(const uint16_t* a, const uint32_t* panel, long groups, Share share, Sums* to) {
  tile_zero(0);
  tile_zero(1);
  for (long g = 0; g < groups; g++, a += kRoundedRows * kGroup, panel += kGroupWords) {
    ahead(panel);
    share.fetch(panel);
    multiply_upper(a, 2 * kGroup, panel, 4 * kPanel);
  }
  tile_store(0, to[0].low, 64);
  tile_store(1, to[0].high, 64);
}

template <class Store>
void tiled(const Rounded& x, int first, int rows, const uint32_t* const* panels, int count, Store& store) {
  Sums sums[2];
  asm volatile("" : : : "memory");  // the intrinsics do not say that they read memory
  const auto give = [&](const Sums& from, int row, int panel) {
    for (int m = 0; m < std::min(kRoundedRows, rows - row); m++)
      store(row + m, panel, load<Vec>(from.low[m]), load<Vec>(from.high[m]));
  };
  int p = 0;
  for (; rows <= kRoundedRows && p + 1 < count; p += 2) {
    tiles_1x2(x.at(first), panels[p], panels[p + 1], x.groups, sums);
    give(sums[0], 0, p), give(sums[1], 0, p + 1);
  }
  const int passes = (rows + 2 * kRoundedRows - 1) / (2 * kRoundedRows), lines = passes > 1 ? kGroupWords / 16 : 0;
  for (; p < count; p++) {
    int row = 0;
    const auto share = [&] {  // of the panels that follow these in memory, which are multiplied after all rows of these
      const int pass = row / (2 * kRoundedRows);
      return Share{count * x.groups * kGroupWords, pass * lines / passes, (pass + 1) * lines / passes};
    };
    for (; row + kRoundedRows < rows; row += 2 * kRoundedRows) {
      tiles_2x1(x.at(first + row), x.at(first + row + kRoundedRows), panels[p], x.groups, row == 0, share(), sums);
      give(sums[0], row, p), give(sums[1], row + kRoundedRows, p);
    }
    if (row < rows) tiles_1x1(x.at(first + row), panels[p], x.groups, share(), sums), give(sums[0], row, p);
  }
}
#endif

// store(row, panel, low, high) takes rows from `first` on, where a tile begins, times `count` panels.
template <class Store>
void multiply(const Rounded& x, int first, int rows, const uint32_t* const* panels, int count, Store store) {
#if WITH_TILES
  if (kProducts == kTiles && rows >= kFewestTiled) return tiled(x, first, rows, panels, count, store);
#endif
  for (int row = 0; row < rows; row += kScalarRows)
    some_rows<kScalarRows>(x, first, row, std::min(kScalarRows, rows - row), panels, count, store);
}

}  // namespace
