// Draws of tokens from logits, as engine/embedded/sampling/truncation.py defines them, without passes over what cannot
// matter: chunks of ids below a threshold are skipped, and of the race's noise only what may win is made in full.
#pragma once

#include <cmath>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "vectors.h"

namespace {

constexpr int kChunk = 256;  // ids summed together, as truncation.py does
constexpr float kNever = -std::numeric_limits<float>::infinity();

constexpr int kHalvings = 6;  // of the range of logits in which top-p ends

enum Way : int32_t { kQuantile, kRace, kLargest };

// What a row's request asks for.
struct Draw {
  int64_t seed, position, top_k;  // the first two: of a race
  double quantile;  // at which kQuantile draws
  float temperature, top_p, min_p;
  Way way;
};

inline bool any(Ints mask) {
  int found = 0;
  for (int i = 0; i < kLanes; i++) found |= mask[i];
  return found;
}

constexpr int kAtOnce = 4 * kLanes;  // logits that are looked at together

inline float highest_of(const float* logits, long vocab) {
  Vec best[4] = {all(kNever), all(kNever), all(kNever), all(kNever)};
  long i = 0;
  for (; i + kAtOnce <= vocab; i += kAtOnce)
    for (int j = 0; j < 4; j++) {
      const Vec x = load<Vec>(logits + i + j * kLanes);
      best[j] = larger(x, best[j]);
    }
  float highest = kNever;
  for (Vec part : best) highest = std::max(highest, largest(part));
  for (; i < vocab; i++) highest = std::max(highest, logits[i]);
  return highest;
}

// The first id with the largest logit, in two passes: the second one stops at it.
inline int64_t first_largest(const float* logits, long vocab) {
  const float highest = highest_of(logits, vocab);
  long i = 0;
  for (; i + kAtOnce <= vocab; i += kAtOnce) {
    Ints found = {};
    for (int j = 0; j < 4; j++) found |= load<Vec>(logits + i + j * kLanes) == highest;
    if (any(found)) break;
  }
  while (i < vocab && logits[i] != highest) i++;
  return i < vocab ? i : 0;  // all may be NaN
}

// Products of the low halves of each 64 bits with a number.
inline Longs low_products(Longs x, uint32_t by) {
#if defined(__AVX512F__) && LANES == 16
  return (Longs)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(by));
#elif defined(__AVX2__) && LANES == 8
  return (Longs)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(by));
#else
  return (x & 0xffffffffu) * by;
#endif
}
inline void multiply(Bits x, uint32_t by, Bits& high, Bits& low) {
  const Longs even = low_products((Longs)x, by), odd = low_products((Longs)x >> 32, by);
  high = (Bits)(even >> 32 | odd >> 32 << 32);
  low = (Bits)((even & 0xffffffffu) | odd << 32);
}

// The words of Philox 4x32-10 for the ids of one chunk; see engine/kit/noise.py.
inline void philox(uint64_t key, uint32_t position, uint32_t chunk, uint32_t* words) {
  for (int group = 0; group < kChunk / 4; group += kLanes) {
    Bits a, b = position + Bits{}, c = {}, d = {};
    for (int i = 0; i < kLanes; i++) a[i] = chunk * (kChunk / 4) + group + i;
    uint32_t first = (uint32_t)key, second = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++, first += 0x9E3779B9u, second += 0xBB67AE85u) {
      Bits left, left_low, right, right_low;
      multiply(a, 0xD2511F53u, left, left_low);
      multiply(c, 0xCD9E8D57u, right, right_low);
      a = right ^ b ^ first, b = right_low;
      c = left ^ d ^ second, d = left_low;
    }
    for (int i = 0; i < kLanes; i++, words += 4) words[0] = a[i], words[1] = b[i], words[2] = c[i], words[3] = d[i];
  }
}

class Drawer {
 public:
  int64_t draw(const float* logits, long vocab, const Draw& draw) {
    if (draw.way == kLargest) return first_largest(logits, vocab);
    weigh(logits, vocab, std::max(draw.temperature, 1e-30f));
    const bool limited = 0 < draw.top_k && draw.top_k < vocab;
    if (limited || draw.top_p < 1 || draw.min_p > 0)
      cut(limited || draw.top_p < 1 ? threshold(limited ? draw.top_k : 0, draw.top_p, vocab) : kNever, draw.min_p);
    return draw.way == kRace ? race(draw.seed, draw.position) : quantile(draw.quantile);
  }
  // The log of the sum of exponentials, the chosen id's logit and rank, the largest logits and their ids.
  void report(const float* logits, long vocab, int64_t chosen, long listed, float* values) {
    weigh(logits, vocab, 1);
    double mass = 0;
    for (float part : sums_) mass += part;
    values[0] = (float)(highest_ + std::log(mass));
    values[1] = logits[chosen];
    values[2] = 1 + (float)std::count_if(logits, logits + vocab, [&](float logit) { return logit > logits[chosen]; });
    const float lowest = bound(listed);
    std::vector<int64_t> ids;
    for (long chunk = 0; chunk < (long)peaks_.size(); chunk++)
      if (peaks_[chunk] >= lowest)
        for (long i = chunk * kChunk; i < std::min(vocab, (chunk + 1) * kChunk); i++)
          if (scaled_[i] >= lowest) ids.push_back(i);
    std::partial_sort(ids.begin(), ids.begin() + listed, ids.end(), [&](int64_t a, int64_t b) {
      return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    });
    for (long i = 0; i < listed; i++) values[3 + i] = logits[ids[i]], values[3 + listed + i] = (float)ids[i];
  }

 private:
  struct Candidate {
    float scaled, weight;
  };

  // Scales logits, so that the largest is 0, and makes weights of them; sums these and finds the best in each chunk.
  void weigh(const float* logits, long vocab, float temperature) {
    const long chunks = (vocab + kChunk - 1) / kChunk, whole = vocab / kChunk * kChunk;
    scaled_.resize(chunks * kChunk), weights_.resize(chunks * kChunk), sums_.resize(chunks), peaks_.resize(chunks);
    highest_ = highest_of(logits, vocab);
    float rest[kChunk];
    for (long i = 0; i < kChunk; i++) rest[i] = whole + i < vocab ? logits[whole + i] : kNever;
    for (long chunk = 0; chunk < chunks; chunk++) {
      const float* from = chunk * kChunk < whole ? logits + chunk * kChunk : rest;
      float *scaled = &scaled_[chunk * kChunk], *weights = &weights_[chunk * kChunk];
      Vec peak = all(kNever);
      for (int i = 0; i < kChunk; i += kLanes) {
        const Vec x = (load<Vec>(from + i) - highest_) / temperature;
        save(scaled + i, x);
        save(weights + i, x < -87.0f ? Vec{} : exponential(x));
        peak = larger(x, peak);
      }
      peaks_[chunk] = largest(peak);
      sums_[chunk] = sum(chunk);
    }
  }
  float sum(long chunk) const {
    return total(&weights_[chunk * kChunk], kChunk, [](auto weight) { return weight; });
  }

  // The smallest scaled logit kept: that of top-k, then that of top-p among what top-k keeps.
  float threshold(long top_k, float top_p, long vocab) {
    double mass = 0;
    float lowest = kNever;
    if (top_k) {
      gather(bound(top_k));
      std::vector<float> values;
      for (const auto& candidate : candidates()) values.push_back(candidate.scaled);
      lowest = kth(std::move(values), top_k);
      for (const auto& candidate : candidates()) mass += candidate.scaled >= lowest ? candidate.weight : 0;
    }
    if (top_p >= 1) return lowest;
    if (top_k) return std::max(lowest, reach(mass * top_p));
    for (float part : sums_) mass += part;
    // All those smaller together have less than what top-p cuts; a bit more is kept, for rounding.
    lowest = (float)std::log((1 - top_p) * mass / vocab) - 0.01f;
    float highest = 0;
    double above = 0;
    for (int halving = 0; halving < kHalvings; halving++) {
      const float middle = (lowest + highest) / 2;
      const double found = mass_above(middle);
      if (found >= mass * top_p)
        lowest = middle;
      else
        highest = middle, above = found;
    }
    gather(lowest, highest);
    return reach(mass * top_p - above);
  }
  double mass_above(float scaled) const {
    double mass = 0;
    for (size_t chunk = 0; chunk < peaks_.size(); chunk++)
      if (peaks_[chunk] > scaled) {
        Vec parts[2] = {};
        for (size_t i = chunk * kChunk; i < (chunk + 1) * kChunk; i += 2 * kLanes)
          for (size_t j = 0; j < 2; j++) {
            const Vec weight = load<Vec>(&weights_[i + j * kLanes]);
            parts[j] += load<Vec>(&scaled_[i + j * kLanes]) > scaled ? weight : Vec{};
          }
        float sums[kLanes];
        save(sums, parts[0] + parts[1]);
        for (float part : sums) mass += part;
      }
    return mass;
  }
  // A scaled logit that at least `k` reach: so many chunks have one.
  float bound(long k) const { return k <= (long)peaks_.size() ? kth(peaks_, k) : kNever; }
  static float kth(std::vector<float> values, long k) {
    std::nth_element(values.begin(), values.begin() + k - 1, values.end(), std::greater<>());
    return values[k - 1];
  }
  std::span<Candidate> candidates() { return {candidates_.data(), count_}; }
  void gather(float lowest, float highest = 0) {
    candidates_.resize(scaled_.size());
    count_ = 0;
    for (size_t first = 0; first < scaled_.size(); first += kLanes) {
      if (peaks_[first / kChunk] < lowest) continue;
      const Vec scaled = load<Vec>(&scaled_[first]);
      if (!any((scaled >= lowest) & (scaled <= highest))) continue;
      for (size_t i = first; i < first + kLanes; i++) {
        candidates_[count_] = {scaled_[i], weights_[i]};
        count_ += scaled_[i] >= lowest && scaled_[i] <= highest;
      }
    }
  }
  // The largest scaled logit such that candidates at or above it have the mass: a search by halves, as of a median.
  float reach(double mass) {
    Candidate *first = candidates_.data(), *last = first + count_;
    float reached = kNever;
    while (first != last) {
      reached = first[(last - first) / 2].scaled;
      double above = 0, equal = 0;
      Candidate* const rest = parted(first, last, above, [&](float scaled) { return scaled > reached; });
      if (rest != first && above >= mass) {
        last = rest;
        continue;
      }
      first = parted(rest, last, equal, [&](float scaled) { return scaled == reached; });
      mass -= above + equal;
      if (mass <= 0) break;
    }
    return reached;
  }
  // std::partition, but without branches, of which a processor would guess half wrongly; adds up what comes first.
  template <class Belongs>
  static Candidate* parted(Candidate* first, Candidate* last, double& mass, Belongs belongs) {
    for (Candidate* next = first; next != last; next++) {
      const Candidate candidate = *next;
      const bool belonging = belongs(candidate.scaled);
      *next = *first;
      *first = candidate;
      first += belonging;
      mass += belonging ? candidate.weight : 0;
    }
    return first;
  }
  void cut(float lowest, float min_p) {
    for (size_t chunk = 0; chunk < sums_.size(); chunk++) {
      sums_[chunk] = 0;
      if (peaks_[chunk] < lowest) continue;
      const float* scaled = &scaled_[chunk * kChunk];
      float* weights = &weights_[chunk * kChunk];
      for (int i = 0; i < kChunk; i += kLanes) {
        const Vec weight = load<Vec>(weights + i);
        save(weights + i, ((load<Vec>(scaled + i) >= lowest) & (weight >= min_p)) ? weight : Vec{});
      }
      sums_[chunk] = sum(chunk);
    }
  }

  int64_t quantile(double part) const {
    const long chunk = invert(sums_.data(), (long)sums_.size(), part);
    return chunk * kChunk + invert(&weights_[chunk * kChunk], kChunk, part);
  }
  // The index at the quantile, which becomes that of what is left within the index.
  static long invert(const float* weights, long count, double& quantile) {
    double all = 0, sum = 0;
    for (long i = 0; i < count; i++) all += weights[i];
    const double target = std::min(quantile * all, std::nextafter(all, 0.0));
    long index = 0;
    while (index < count - 1 && sum + weights[index] <= target) sum += weights[index++];
    quantile = std::clamp((target - sum) / weights[index], 0.0, 1.0);
    return index;
  }

  // The id with the largest weight / noise. Noise is -log(1 - u), at least u: few ids have a weight / u that may win.
  int64_t race(int64_t seed, int64_t position) const {
    float best = 0;
    int64_t winner = 0;
    for (size_t chunk = 0; chunk < sums_.size(); chunk++) {
      if (sums_[chunk] <= 0) continue;
      const float* weights = &weights_[chunk * kChunk];
      uint32_t words[kChunk];
      float uniforms[kChunk];
      philox((uint64_t)seed, (uint32_t)position, (uint32_t)chunk, words);
      Ints may_win = {};
      for (int i = 0; i < kChunk; i += kLanes) {
        const Vec uniform = (__builtin_convertvector(load<Bits>(words + i), Vec) + 0.5f) * 0x1p-32f;
        save(uniforms + i, uniform);
        may_win |= load<Vec>(weights + i) > uniform * (best * 0.999999f);
      }
      if (!any(may_win)) continue;
      for (int i = 0; i < kChunk; i++)
        if (weights[i] > uniforms[i] * (best * 0.999999f)) {
          const float score = weights[i] / -std::log1p(-std::min(uniforms[i], 1 - 0x1p-24f));
          if (score > best) best = score, winner = (int64_t)chunk * kChunk + i;
        }
    }
    return winner;
  }

  std::vector<float> scaled_, weights_, sums_, peaks_;
  std::vector<Candidate> candidates_;
  size_t count_ = 0;  // of candidates
  float highest_ = 0;  // logit
};

// The thread's own, which keeps its memory.
inline Drawer& drawer() {
  thread_local Drawer drawer;
  return drawer;
}

}  // namespace
