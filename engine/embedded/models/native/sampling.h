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

// The words of Philox 4x32-10 for the ids of one chunk; see engine/kit/noise.py. Of each lane the low half counts.
inline void philox(uint64_t key, uint32_t position, uint32_t chunk, uint32_t* words) {
  constexpr uint64_t kLow = 0xffffffff;
  for (int counter = 0; counter < kChunk / 4; counter += kLanes / 2) {
    Longs a, b = position + Longs{}, c = {}, d = {};
    for (int i = 0; i < kLanes / 2; i++) a[i] = chunk * (kChunk / 4) + counter + i;
    uint32_t first = (uint32_t)key, second = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++, first += 0x9E3779B9u, second += 0xBB67AE85u) {
      const Longs left = low_products(a, 0xD2511F53u), right = low_products(c, 0xCD9E8D57u);
      a = right >> 32 ^ b ^ first, b = right;
      c = left >> 32 ^ d ^ second, d = left;
    }
    const Longs pairs[2] = {(a & kLow) | b << 32, (c & kLow) | d << 32};
    uint64_t in_turns[kLanes];
    for (int i = 0; i < kLanes; i++) in_turns[i] = pairs[i % 2][i / 2];
    std::memcpy(words + 4 * counter, in_turns, sizeof in_turns);
  }
}

class Drawer {
 public:
  int64_t draw(const float* logits, long vocab, const Draw& draw) {
    if (draw.way == kLargest) return first_largest(logits, vocab);
    begin(logits, vocab, std::max(draw.temperature, 1e-30f));
    const bool limited = 0 < draw.top_k && draw.top_k < vocab;
    truncated_ = limited || draw.top_p < 1 || draw.min_p > 0;
    if (truncated_) {
      weigh_all();
      cut(limited || draw.top_p < 1 ? threshold(limited ? draw.top_k : 0, draw.top_p, vocab) : kNever, draw.min_p);
    }
    return draw.way == kRace ? race(draw.seed, draw.position) : quantile(draw.quantile);
  }
  // The log of the sum of exponentials, the chosen id's logit and rank, the largest logits and their ids.
  void report(const float* logits, long vocab, int64_t chosen, long listed, float* values) {
    begin(logits, vocab, 1);
    WeighedChunk some;
    double mass = 0;
    for (long chunk = 0; chunk < chunks_; chunk++) {
      peaks_[chunk] = weigh(chunk, some);
      mass += sum(some.weights);
    }
    values[0] = (float)(highest_ + std::log(mass));
    values[1] = logits[chosen];
    const auto above = [&](float logit) { return logit > logits[chosen]; };
    values[2] = 1 + (above(highest_) ? (float)std::count_if(logits, logits + vocab, above) : 0.0f);
    const float lowest = bound(listed);
    std::vector<int64_t> ids;
    for (long chunk = 0; chunk < chunks_; chunk++)
      if (peaks_[chunk] >= lowest) {
        weigh(chunk, some);
        for (long i = 0; i < std::min((long)kChunk, vocab - chunk * kChunk); i++)
          if (some.scaled[i] >= lowest) ids.push_back(chunk * kChunk + i);
      }
    std::partial_sort(ids.begin(), ids.begin() + listed, ids.end(), [&](int64_t a, int64_t b) {
      return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    });
    for (long i = 0; i < listed; i++) values[3 + i] = logits[ids[i]], values[3 + listed + i] = (float)ids[i];
  }

 private:
  struct Candidate {
    float scaled, weight;
  };

  static constexpr float kLeast = -87.0f;  // of scaled logits that have a weight

  struct WeighedChunk {
    float scaled[kChunk], weights[kChunk];
  };

  void begin(const float* logits, long vocab, float temperature) {
    logits_ = logits, vocab_ = vocab, chunks_ = (vocab + kChunk - 1) / kChunk;
    highest_ = highest_of(logits, vocab), inverse_ = 1 / temperature;
    sums_.resize(chunks_), peaks_.resize(chunks_);
  }
  // Scales the logits of a chunk, so that the largest of all is 0, and makes weights of them. Returns the largest.
  float weigh(long chunk, WeighedChunk& to) const {
    const float* from = logits_ + chunk * kChunk;
    float rest[kChunk];
    if ((chunk + 1) * kChunk > vocab_) {
      for (long i = 0; i < kChunk; i++) rest[i] = chunk * kChunk + i < vocab_ ? from[i] : kNever;
      from = rest;
    }
    Vec peak = all(kNever);
    for (int i = 0; i < kChunk; i += kLanes) {
      const Vec x = (load<Vec>(from + i) - highest_) * inverse_;
      save(to.scaled + i, x);
      save(to.weights + i, x < kLeast ? Vec{} : exponential(x));
      peak = larger(x, peak);
    }
    return largest(peak);
  }
  static float sum(const float* weights) {
    return total(weights, kChunk, [](auto weight) { return weight; });
  }
  // Truncation looks at all of them several times.
  void weigh_all() {
    all_.resize(chunks_);
    for (long chunk = 0; chunk < chunks_; chunk++) {
      peaks_[chunk] = weigh(chunk, all_[chunk]);
      sums_[chunk] = sum(all_[chunk].weights);
    }
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
    for (long chunk = 0; chunk < chunks_; chunk++)
      if (peaks_[chunk] > scaled) {
        const WeighedChunk& its = all_[chunk];
        Vec parts[2] = {};
        for (int i = 0; i < kChunk; i += 2 * kLanes)
          for (int j = 0; j < 2; j++) {
            const Vec weight = load<Vec>(its.weights + i + j * kLanes);
            parts[j] += load<Vec>(its.scaled + i + j * kLanes) > scaled ? weight : Vec{};
          }
        float sums[kLanes];
        save(sums, parts[0] + parts[1]);
        for (float part : sums) mass += part;
      }
    return mass;
  }
  // A scaled logit that at least `k` reach: so many chunks have one.
  float bound(long k) const { return k <= chunks_ ? kth(peaks_, k) : kNever; }
  static float kth(std::vector<float> values, long k) {
    std::nth_element(values.begin(), values.begin() + k - 1, values.end(), std::greater<>());
    return values[k - 1];
  }
  std::span<Candidate> candidates() { return {candidates_.data(), count_}; }
  void gather(float lowest, float highest = 0) {
    candidates_.resize(chunks_ * kChunk);
    count_ = 0;
    for (long chunk = 0; chunk < chunks_; chunk++) {
      if (peaks_[chunk] < lowest) continue;
      const WeighedChunk& its = all_[chunk];
      for (int first = 0; first < kChunk; first += kLanes) {
        const Vec scaled = load<Vec>(its.scaled + first);
        if (!any((scaled >= lowest) & (scaled <= highest))) continue;
        for (int i = first; i < first + kLanes; i++) {
          candidates_[count_] = {its.scaled[i], its.weights[i]};
          count_ += its.scaled[i] >= lowest && its.scaled[i] <= highest;
        }
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
    for (long chunk = 0; chunk < chunks_; chunk++) {
      sums_[chunk] = 0;
      if (peaks_[chunk] < lowest) continue;
      WeighedChunk& its = all_[chunk];
      for (int i = 0; i < kChunk; i += kLanes) {
        const Vec weight = load<Vec>(its.weights + i);
        save(its.weights + i, ((load<Vec>(its.scaled + i) >= lowest) & (weight >= min_p)) ? weight : Vec{});
      }
      sums_[chunk] = sum(its.weights);
    }
  }

  int64_t quantile(double part) {
    WeighedChunk room;
    if (!truncated_)
      for (long chunk = 0; chunk < chunks_; chunk++) weigh(chunk, room), sums_[chunk] = sum(room.weights);
    const long chunk = invert(sums_.data(), chunks_, part);
    if (!truncated_) weigh(chunk, room);
    return chunk * kChunk + invert(truncated_ ? all_[chunk].weights : room.weights, kChunk, part);
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
    WeighedChunk room;
    for (long chunk = 0; chunk < chunks_; chunk++) {
      if (truncated_ ? sums_[chunk] <= 0 : weigh(chunk, room) < kLeast) continue;
      const float* weights = truncated_ ? all_[chunk].weights : room.weights;
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
          if (score > best) best = score, winner = chunk * kChunk + i;
        }
    }
    return winner;
  }

  const float* logits_ = nullptr;
  long vocab_ = 0, chunks_ = 0;
  float highest_ = 0, inverse_ = 1;  // of logits; 1 / temperature
  bool truncated_ = false;
  std::vector<float> sums_, peaks_;  // of weights, and of scaled logits, in each chunk
  std::vector<WeighedChunk> all_;  // filled only where text is truncated
  std::vector<Candidate> candidates_;
  size_t count_ = 0;  // of candidates
};

// The thread's own, which keeps its memory.
inline Drawer& drawer() {
  thread_local Drawer drawer;
  return drawer;
}

}  // namespace
