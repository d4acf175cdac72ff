// Products of weights in blocks: 32 weights of one output have a scale, and some a minimum, as GGUF files have them.
//
// Activations become whole numbers of 16 bits, also with a scale for each 32: finer than the weights, at no cost where
// processors multiply pairs of 16 bits (vpmaddwd, vpdpwssd). With VNNI, products of four times 8 bits (vpdpbusd) do twice
// as much at a time, so that only activations of fine products, which the caller names, have 16 bits there. Sums within a
// block are whole numbers and exact at every level; blocks are added up in float32, in their order, however many rows are
// computed together.
#pragma once

#include <array>
#include <cmath>
#include <vector>

#include "products.h"

namespace {

constexpr int kBlock = 32;
constexpr long kBytesAhead = kFarAhead ? 8192 : 2048;  // of blocks to prefetch before they are needed
#if (defined(__AVX512VNNI__) && LANES == 16) || (defined(__AVXVNNI__) && LANES == 8)
#define WITH_BYTES 1
#else
#define WITH_BYTES 0
#endif
#ifdef __AVX512F__
constexpr int kBlockRows = 8;  // activations that are multiplied with a panel at a time: as many as registers hold
#else
constexpr int kBlockRows = 4;
#endif

typedef uint16_t Codes __attribute__((vector_size(4 * kLanes)));
typedef int16_t Shorts __attribute__((vector_size(2 * kLanes)));

inline Ints all(int32_t x) { return x - Ints{}; }

// 16-bit floats; GGUF files have no infinite ones.
template <class Wide, class Float>
inline Float widened(Wide half) {
  const Float magnitude = (Float)((half & 0x7fff) << 13) * 0x1p112f;
  return (Float)((Wide)magnitude | (half & 0x8000) << 16);
}
inline Vec halves(const uint8_t* from) {
#if defined(__F16C__) && LANES == 8
  return (Vec)_mm256_cvtph_ps(load<__m128i>(from));
#elif defined(__AVX512F__) && LANES == 16
  return (Vec)_mm512_cvtph_ps(load<__m256i>(from));
#else
  return widened<Bits, Vec>(__builtin_convertvector(load<Halves>(from), Bits));
#endif
}
inline float half(const uint8_t* from) {
  const Bits bits = Bits{} + load<uint16_t>(from);
  return widened<Bits, Vec>(bits)[0];
}

// The nearest 16-bit float of a number from 0 to 65504.
inline uint16_t narrowed(float x) {
  const float magnitude = x * 0x1p-112f;  // a number that is not normal loses the same bits in both types
  uint32_t bits;
  std::memcpy(&bits, &magnitude, sizeof bits);
  return (bits + 0xfff + (bits >> 13 & 1)) >> 13;
}

// Adds a product of pairs, in each lane. The empty assembler code keeps the compiler from collecting many products
// before it adds any: it would run out of registers.
inline void add_dot(Ints& sum, Codes a, Codes b) {
#if defined(__AVX512VNNI__) && LANES == 16
  sum = (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__) && LANES == 16
  sum += (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__) && LANES == 8
  sum = (Ints)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__) && LANES == 8
  sum += (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && LANES == 4
  sum += (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const Ints x = (Ints)a, y = (Ints)b;
  sum += (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
#if defined(__AVX512F__) && LANES == 16
  asm volatile("" : "+v"(sum));
#elif defined(__SSE2__) && LANES <= 8
  asm volatile("" : "+x"(sum));
#endif
}

// The same of four weights without a sign and four activations of 8 bits.
inline void add_bytes(Ints& sum, Bits weights, Bits bytes) {
#if WITH_BYTES && LANES == 16
  sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)bytes);
  asm volatile("" : "+v"(sum));
#elif WITH_BYTES
  sum = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)bytes);
  asm volatile("" : "+x"(sum));
#endif
}

// ---- Activations.

// Rows of whole numbers in tiles of kBlockRows, [tiles][blocks][kBlockRows][32], the scales of the blocks, and the sums
// of their numbers times `factor`. Those of 8 bits are in the order of the codes of weights that have `bits` of them.
struct Activations {
  int16_t* codes;
  float* scales;
  int32_t* sums;
  long blocks;
  int32_t factor;
  int bits;
  bool narrow;

  const int8_t* bytes() const { return (const int8_t*)codes; }

  void set(long row, const float* x, long inputs) {
    for (long b = 0; b < blocks; b++, x += kBlock) {
      const long at = (row / kBlockRows * blocks + b) * kBlockRows + row % kBlockRows;
      if (inputs - b * kBlock >= kBlock) {
        set_block(at, x);
      } else {
        float padded[kBlock] = {};
        std::memcpy(padded, x, (inputs - b * kBlock) * sizeof(float));
        set_block(at, padded);
      }
    }
  }

 private:
  void set_block(long at, const float* x) {
    Vec most = {};
    for (int i = 0; i < kBlock; i += kLanes) {
      const Vec v = load<Vec>(x + i);
      most = larger(larger(v, -v), most);
    }
    const float range = narrow ? 127.0f : 32767.0f;
    const float highest = largest(most), inverse = highest > 1e-30f ? range / highest : 0.0f;
    int16_t wide[kBlock];
    int16_t* to = narrow ? wide : codes + at * kBlock;
    Ints sum = {};
    for (int i = 0; i < kBlock; i += kLanes) {
      const Vec rounded = load<Vec>(x + i) * inverse + 12582912.0f;  // 1.5 * 2^23: the low bits are the nearest integer
      const Ints code = (Ints)rounded - 0x4b400000;
      const Shorts numbers = __builtin_convertvector(code, Shorts);
      std::memcpy(to + i, &numbers, sizeof numbers);
      sum += code;
    }
    scales[at] = highest > 1e-30f ? highest / range : 0.0f;
    int32_t whole = 0;
    for (int i = 0; i < kLanes; i++) whole += sum[i];
    sums[at] = factor * whole;
#if WITH_BYTES
    if (narrow) in_order(wide, (int8_t*)codes + at * kBlock);
#endif
  }
#if WITH_BYTES
  // As Blocks::place has them: inputs of a pair are in different halves of a lane.
  void in_order(const int16_t* wide, int8_t* to) const {
    const __m128i four = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    const __m128i eight = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    const __m256i both = _mm256_packs_epi16(load<__m256i>(wide), load<__m256i>(wide + 16));
    const __m256i order = _mm256_broadcastsi128_si256(bits == 8 ? four : eight);
    const __m256i ordered = _mm256_shuffle_epi8(_mm256_permute4x64_epi64(both, 0xd8), order);
    std::memcpy(to, &ordered, sizeof ordered);
  }
#endif
};

// Room for activations; it only grows.
class ActivationBuffer {
 public:
  Activations rows(long count, long inputs, int32_t factor = 1, int bits = 8, bool narrow = false) {
    const long blocks = (inputs + kBlock - 1) / kBlock;
    const size_t size = (count + kBlockRows - 1) / kBlockRows * kBlockRows * blocks;
    if (scales_.size() < size) {
      codes_ = std::vector<int16_t>(size * kBlock);
      scales_ = std::vector<float>(size);
      sums_ = std::vector<int32_t>(size);
    }
    return {codes_.data(), scales_.data(), sums_.data(), blocks, factor, bits, narrow};
  }

 private:
  std::vector<int16_t> codes_;
  std::vector<float> scales_;
  std::vector<int32_t> sums_;
};

// ---- Weights.

// A weight is scale * (code - kOffset), plus the block's minimum if it has one. A panel's block: scales of its outputs,
// minima, then vectors for the low and the high half of the outputs in turns. A lane has the codes of one output: in
// each of its halves 16 / kBits codes, so that those of a pair of inputs lie side by side once the others are masked.
template <int kBits_, int kOffset_, bool kMinimum_>
struct Blocks {
  static constexpr int kBits = kBits_;
  static constexpr int kOffset = kOffset_;
  static constexpr bool kMinimum = kMinimum_;
  static constexpr int kSumFactor = kOffset ? -kOffset : 1;  // of the sums that multiply_blocks needs
  static constexpr int kParts = 16 / kBits, kMask = (1 << kBits) - 1;
  static constexpr long kScales = 2 * kPanel, kCodes = kScales * (1 + kMinimum), kBytes = kCodes + kPanel * 4 * kBits;
  static constexpr long kRaw = 2 * (1 + kMinimum) + 4 * kBits;  // of one output in GGUF

  // One output's block as in GGUF: 8 bits in order, 4 bits with input i + 16 in the high half of input i's byte.
  static void pack(const uint8_t* raw, uint8_t* block, int lane) {
    std::memcpy(block + 2 * lane, raw, 2);
    if (kMinimum) std::memcpy(block + kScales + 2 * lane, raw + 2, 2);
    raw += 2 * (1 + kMinimum);
    for (int i = 0; i < kBlock; i++) {
      const int code = kBits == 8 ? raw[i] ^ 0x80 : raw[i % 16] >> i / 16 * 4 & 15;
      block[place(lane, i)] |= code << shift(i);
    }
  }
  static float value(const uint8_t* block, int lane, int i) {
    const float scale = half(block + 2 * lane), minimum = kMinimum ? half(block + kScales + 2 * lane) : 0.0f;
    return scale * ((block[place(lane, i)] >> shift(i) & kMask) - kOffset) + minimum;
  }

 private:
  static long place(int lane, int i) {
    const int vector = i / 2 / kParts, bit = i / 2 % kParts * kBits;
    return kCodes + ((vector * 2 + lane / kLanes) * kLanes + lane % kLanes) * 4 + i % 2 * 2 + bit / 8;
  }
  static int shift(int i) { return i / 2 % kParts * kBits % 8; }
};
using Q8_0 = Blocks<8, 128, false>;
using Q4_0 = Blocks<4, 8, false>;
using Q4_1 = Blocks<4, 0, true>;

enum Kind : int64_t { kBfloat16, kQ8_0, kQ4_0, kQ4_1 };

// Calls use(format) with the format of a kind of blocks.
template <class Use>
inline auto with_format(int64_t kind, Use use) {
  return kind == kQ8_0 ? use(Q8_0{}) : kind == kQ4_0 ? use(Q4_0{}) : use(Q4_1{});
}

inline long block_bytes(int64_t kind) {
  return with_format(kind, [](auto format) { return decltype(format)::kBytes; });
}
inline int32_t sum_factor(int64_t kind) {
  return with_format(kind, [](auto format) { return decltype(format)::kSumFactor; });
}
inline int code_bits(int64_t kind) {
  return with_format(kind, [](auto format) { return decltype(format)::kBits; });
}

// One block of Q8_0 as in GGUF: the largest weight becomes 127 or -127.
inline bool quantize_block(const float* x, int count, uint8_t* raw) {
  float most = 0, sum = 0;
  for (int i = 0; i < count; i++) most = std::max(most, std::fabs(x[i])), sum += x[i] - x[i];
  const uint16_t scale = narrowed(most / 127);
  const float step = half((const uint8_t*)&scale);
  std::memcpy(raw, &scale, sizeof scale);
  for (int i = 0; i < kBlock; i++) {
    const float code = i < count && step > 0 ? std::nearbyint(x[i] / step) : 0.0f;
    raw[2 + i] = (int8_t)std::clamp(code, -127.0f, 127.0f);
  }
  return sum == 0 && most <= 127 * 65504.0f;
}

// The first M rows of a tile times P panels; out: [P][M].
template <class Format, int M, int P, bool narrow>
void multiply_blocks(const Activations& x, long tile, const uint8_t* const* panels, Outputs* out) {
  Vec sums[P][M][2] = {};
  long row = tile * x.blocks * kBlockRows;
  const int16_t* codes = x.codes + row * kBlock;
  const int8_t* bytes = x.bytes() + row * kBlock;
  for (long b = 0; b < x.blocks; b++, row += kBlockRows, codes += kBlockRows * kBlock, bytes += kBlockRows * kBlock) {
    const uint8_t* block[P];
    Ints dots[P][M][2];
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
      block[p] = panels[p] + b * Format::kBytes;
      if (P == 1 || (M == 1 && kFarAhead))
        for (long at = 0; at < Format::kBytes; at += 64)
          __builtin_prefetch(block[p] + (P == 1 ? kBytesAhead : 1024) + at, 0, kFarAhead ? 2 : 3);
      for (int m = 0; m < M; m++)
        dots[p][m][0] = dots[p][m][1] = Format::kOffset ? all(x.sums[row + m]) : Ints{};
    }
#pragma GCC unroll 8
    for (int v = 0; v < kBlock / 2 / Format::kParts; v++) {
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) {
        Codes low = load<Codes>(block[p] + Format::kCodes + 8 * v * kLanes);
        Codes high = load<Codes>(block[p] + Format::kCodes + (8 * v + 4) * kLanes);
        if constexpr (narrow) {
          constexpr int kWords = Format::kParts / 2;  // of activations that a lane's codes are multiplied with
          constexpr uint32_t kCode = 0x01010101u * Format::kMask;
#pragma GCC unroll 2
          for (int part = 0; part < kWords; part++) {
            const Bits low_part = (Bits)low >> part * Format::kBits & kCode, high_part = (Bits)high >> part * Format::kBits & kCode;
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
              const Bits four = load<uint32_t>(bytes + m * kBlock + 4 * (v * kWords + part)) - Bits{};
              add_bytes(dots[p][m][0], low_part, four);
              add_bytes(dots[p][m][1], high_part, four);
            }
          }
          continue;
        }
#pragma GCC unroll 4
        for (int part = 0; part < Format::kParts; part++) {
          const bool last = part + 1 == Format::kParts;
          const Codes low_part = last ? low : low & Format::kMask, high_part = last ? high : high & Format::kMask;
          low >>= Format::kBits, high >>= Format::kBits;
#pragma GCC unroll 16
          for (int m = 0; m < M; m++) {
            const Codes both = (Codes)all(load<int32_t>(codes + m * kBlock + 2 * (v * Format::kParts + part)));
            add_dot(dots[p][m][0], low_part, both);
            add_dot(dots[p][m][1], high_part, both);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int p = 0; p < P; p++)
      for (int h = 0; h < 2; h++) {
        const Vec scales = halves(block[p] + 2 * h * kLanes);
        const Vec minima = Format::kMinimum ? halves(block[p] + Format::kScales + 2 * h * kLanes) : Vec{};
        for (int m = 0; m < M; m++) {
          sums[p][m][h] += __builtin_convertvector(dots[p][m][h], Vec) * (scales * x.scales[row + m]);
          if (Format::kMinimum) sums[p][m][h] += minima * (x.scales[row + m] * x.sums[row + m]);
        }
      }
  }
  std::memcpy(out, sums, sizeof sums);
}

template <class Format, bool narrow, int... M>
constexpr auto block_products(std::integer_sequence<int, M...>) {
  return std::array{&multiply_blocks<Format, M + 1, 1, narrow>...};
}

// Whether so many rows are multiplied with kStreams panels at a time: with 4 bits, the processor has too much to compute for that.
inline bool streams(int64_t kind, int rows) {
  return rows == 1 ? kind == kBfloat16 || kind == kQ8_0 : rows == 2 && kind == kQ8_0 && kFarAhead;
}

template <class Format, bool narrow, class Store>
void multiply_panels(const Activations& x, int first, int rows, const uint8_t* const* panels, int count, Store& store) {
  static constexpr auto products = block_products<Format, narrow>(std::make_integer_sequence<int, kBlockRows>());
  Outputs out[std::max(kBlockRows, 2 * kStreams)];
  int p = 0;
  const auto side_by_side = [&](auto rows) {
    for (; p + kStreams <= count; p += kStreams) {
      multiply_blocks<Format, rows, kStreams, narrow>(x, first / kBlockRows, panels + p, out);
      for (int i = 0; i < kStreams * rows; i++) store(i % rows, p + i / rows, out[i][0], out[i][1]);
    }
  };
  if constexpr (Format::kBits == 8) {
    if (rows == 1) side_by_side(std::integral_constant<int, 1>());
    if (rows == 2 && streams(kQ8_0, 2)) side_by_side(std::integral_constant<int, 2>());
  }
  for (; p < count; p++) {
    for (int row = 0; row < rows; row += kBlockRows) {
      const int some = std::min(kBlockRows, rows - row);
      products[some - 1](x, (first + row) / kBlockRows, panels + p, out);
      for (int m = 0; m < some; m++) store(row + m, p, out[m][0], out[m][1]);
    }
  }
}

// store(row, panel, low, high) takes rows from `first` on, where a tile begins, times `count` panels.
template <class Store>
void multiply(const Activations& x, int first, int rows, int64_t kind, const uint8_t* const* panels, int count, Store store) {
  with_format(kind, [&](auto format) {
    using Format = decltype(format);
    if constexpr (WITH_BYTES)
      if (x.narrow) return multiply_panels<Format, true>(x, first, rows, panels, count, store);
    multiply_panels<Format, false>(x, first, rows, panels, count, store);
  });
}

}  // namespace
