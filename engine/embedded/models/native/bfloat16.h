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

constexpr int kGroup = 32;                                   // inputs that are added up apart from others
constexpr int kRoundedRows = kProducts == kTiles ? 16 : 12;  // rows of a tile of activations
constexpr int kGroupWords = kGroup / 2 * kPanel;             // words of a panel's group

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

}  // namespace
