// One step of a model of the Llama kind on a CPU: flat tokens in, logits out, all layers in one call.
//
// Weights are bfloat16, which is what checkpoints hold, activations and sums float32. Every output is summed in the same order whatever
// else is in the step, so a sequence gets the same logits, to the bit, alone and in a batch, in one prefill or in chunks.
// Sizes need not be multiples of anything: the last panel of a matrix may be partly empty, and of keys and values partly another's.
// Plain C++ with the vector extensions of GCC and Clang; engine/embedded/models/native/build.py compiles it for one instruction set at a time
// (levels.py). LANES, the floats in a vector, is all that differs: layouts of the KV cache do not depend on it.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int kLanes = LANES, kTileRows = kLanes == 16 ? 12 : 6;  // AVX-512 has twice the registers
constexpr int kSums = 16;             // running sums of a reduction: as many at every width of vector
constexpr int kPanel = 2 * kLanes;    // outputs that one panel of a weight makes
constexpr int kTaskPanels = 6;        // panels in a task: even, as gate and up panels come in pairs
constexpr int kTaskRows = 16 * kTileRows;
constexpr int kAttentionRows = 8 * kTileRows;  // query rows that share a pass over keys and values
constexpr int kFewRows = 32;
constexpr int kSpins = 4000;          // at a barrier, before the thread sleeps

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

template <class V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline void save(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }
inline Vec all(float x) { return x - Vec{}; }

inline Vec exponential(Vec x) {
  x = x < -87.0f ? all(-87.0f) : x;
  x = x > 88.0f ? all(88.0f) : x;
  const Vec shifted = x * 1.44269504f + 12582912.0f;
  const Vec n = shifted - 12582912.0f;
  const Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vec y = all(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return y * (Vec)power;
}

inline long padded(long size) { return (size + kPanel - 1) / kPanel * kPanel; }

// The sum of a term of each value, in the same order at every width of vector.
template <class Term>
inline float total(const float* x, long size, Term term) {
  Vec parts[kSums / kLanes] = {};
  long i = 0;
  for (; i + kSums <= size; i += kSums)
    for (int p = 0; p < kSums / kLanes; p++) parts[p] += term(load<Vec>(x + i + p * kLanes));
  float sums[kSums], whole = 0;
  std::memcpy(sums, parts, sizeof sums);
  for (int lane = 0; i < size; i++, lane++) sums[lane] += term(x[i]);
  for (float part : sums) whole += part;
  return whole;
}
inline float largest(Vec v) {
  float best = v[0];
  for (int i = 1; i < kLanes; i++) best = std::max(best, v[i]);
  return best;
}

// ---- Matrix products: a tile of rows times panels of columns, kept in registers.

// Weights [outputs, inputs] as panels of [inputs][kLanes]: output i of a panel in the low half, output kLanes + i in the high half.
struct WeightPanel {
  const uint32_t* data;
  void columns(long k, Vec& low, Vec& high) const {
    const Bits both = load<Bits>(data + k * kLanes);
    low = (Vec)(both << 16);
    high = (Vec)(both & 0xffff0000u);
  }
};
struct FloatPanel {
  const float* data;
  long stride;
  void columns(long k, Vec& low, Vec& high) const {
    low = load<Vec>(data + k * stride);
    high = load<Vec>(data + k * stride + kLanes);
  }
};

template <int M, int P, class Panel, class Store>
inline void tile(const float* a, long stride, const Panel* panels, long depth, int row, int panel, Store& store) {
  Vec sums[M][P][2] = {};
  for (long k = 0; k < depth; k++) {
    for (int p = 0; p < P; p++) {
      Vec low, high;
      panels[p].columns(k, low, high);
      for (int m = 0; m < M; m++) {
        const Vec x = all(a[m * stride + k]);
        sums[m][p][0] += x * low;
        sums[m][p][1] += x * high;
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++) store(row + m, panel + p, sums[m][p][0], sums[m][p][1]);
}

template <int M, class Panel, class Store>
inline void tiles(const float* a, long stride, const Panel* panels, int count, long depth, int row, Store& store) {
  constexpr int P = M <= 2 ? 3 : M == 3 ? 2 : 1;
  int panel = 0;
  for (; panel + P <= count; panel += P) tile<M, P>(a, stride, panels + panel, depth, row, panel, store);
  for (; panel < count; panel++) tile<M, 1>(a, stride, panels + panel, depth, row, panel, store);
}

template <int M, class Panel, class Store>
inline void rest(const float* a, long stride, int rows, const Panel* panels, int count, long depth, int row, Store& store) {
  if constexpr (M > 0) {
    if (rows == M) return tiles<M>(a, stride, panels, count, depth, row, store);
    rest<M - 1>(a, stride, rows, panels, count, depth, row, store);
  }
}

// store(row, panel, low, high) takes a [rows, depth] times the panels.
template <class Panel, class Store>
inline void multiply(const float* a, long stride, int rows, const Panel* panels, int count, long depth, Store store) {
  int row = 0;
  for (; row + kTileRows <= rows; row += kTileRows) tiles<kTileRows>(a + row * stride, stride, panels, count, depth, row, store);
  rest<kTileRows - 1>(a + row * stride, stride, rows - row, panels, count, depth, row, store);
}

// ---- Threads: all run the same function, share out the tasks of each phase, and meet at its end.

inline int64_t nanoseconds(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

// A thread whose core is busy with other work delays every phase, and so the whole team. So the team tries out whether it
// works faster with one thread fewer, and later whether with one more.
class TeamSize {
 public:
  explicit TeamSize(int most) : most_(most), size_(most) {}
  int now() const { return size_; }
  // After each run: how long it took, and the processor time that all threads worked in it without waiting.
  void ran(int64_t elapsed, int64_t worked) {
    elapsed_ += elapsed;
    worked_ += worked;
    const float rate = (float)worked_ / elapsed_;  // threads that worked all the time would do as much
    const bool worse = trial_ && rate < rate_;
    if (++runs_ < kRuns && !worse) return;
    elapsed_ = worked_ = runs_ = 0;
    const int64_t time = nanoseconds(CLOCK_MONOTONIC);
    if (trial_) {
      const bool better = rate > kBetter * rate_;
      if (!better) size_ -= trial_;
      pause_ = better ? kPause : std::min(2 * pause_, kLongestPause);
      retry_ = time + pause_;
      trial_ = 0;
    } else if (time >= retry_) {
      rate_ = rate;
      trial_ = rate < kIdle * size_ ? -1 : 1;
      if (size_ + trial_ < 1 || size_ + trial_ > most_) trial_ = 0;
      size_ += trial_;
    }
  }

 private:
  static constexpr int kRuns = 4;           // that are compared
  static constexpr float kBetter = 1.05f;   // than before: the change stays
  static constexpr float kIdle = 0.5f;      // below this share of work in the threads' time, fewer are tried
  static constexpr int64_t kPause = 20'000'000, kLongestPause = 2'000'000'000;  // nanoseconds between trials

  const int most_;
  int size_, trial_ = 0, runs_ = 0;
  float rate_ = 0;
  int64_t elapsed_ = 0, worked_ = 0, pause_ = kPause, retry_ = 0;
};

class Team {
 public:
  explicit Team(int size) : starts_(size), size_(size) {
    for (int i = 1; i < size; i++) threads_.emplace_back([this, i] { serve(starts_[i]); });
  }
  ~Team() {
    stopping_ = true;
    wake((int)starts_.size());
    for (auto& thread : threads_) thread.join();
  }
  int size() const { return size_.now(); }
  template <class Work>
  void run(int phases, Work& work) {
    const int64_t began = nanoseconds(CLOCK_MONOTONIC);
    if ((int)next_.size() < phases) next_ = std::vector<std::atomic<int>>(phases);
    for (auto& next : next_) next.store(0, std::memory_order_relaxed);
    work_ = &work;
    call_ = [](void* work) { (*static_cast<Work*>(work))(); };
    worked_ = 0;
    running_ = size_.now();
    wake(running_);
    take_part();
    size_.ran(nanoseconds(CLOCK_MONOTONIC) - began, worked_);
  }
  template <class Task>
  void each(int& phase, int count, Task task) {
    std::atomic<int>& next = next_[phase++];
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(i);
    meet();
  }

 private:
  struct alignas(64) Start {
    std::atomic<uint32_t> runs{0};
  };

  void wake(int count) {
    for (int i = 1; i < count; i++) {
      starts_[i].runs.fetch_add(1);
      starts_[i].runs.notify_one();
    }
  }
  void serve(Start& start) {
    for (uint32_t seen = 0;; seen++) {
      start.runs.wait(seen);
      if (stopping_) return;
      take_part();
    }
  }
  void take_part() {
    spun_ = 0;
    const int64_t before = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    call_(work_);
    worked_ += nanoseconds(CLOCK_THREAD_CPUTIME_ID) - before - spun_;
    meet();
  }
  void meet() {
    const uint32_t met = met_.load();
    if (arrived_.fetch_add(1) + 1 == running_) {
      arrived_.store(0);
      met_.fetch_add(1);
      met_.notify_all();
      return;
    }
    const int64_t began = nanoseconds(CLOCK_MONOTONIC);
    for (int i = 0; i < kSpins && met_.load(std::memory_order_acquire) == met; i++) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    spun_ += nanoseconds(CLOCK_MONOTONIC) - began;
    while (met_.load() == met) met_.wait(met);
  }

  inline static thread_local int64_t spun_ = 0;
  std::vector<std::thread> threads_;
  std::vector<Start> starts_;
  std::vector<std::atomic<int>> next_;
  std::atomic<uint32_t> met_{0};
  std::atomic<int> arrived_{0};
  std::atomic<int64_t> worked_{0};
  std::atomic<bool> stopping_{false};
  TeamSize size_;
  int running_ = 0;
  void* work_ = nullptr;
  void (*call_)(void*) = nullptr;
};

}  // namespace

// ---- What Python passes: engine/embedded/models/native/structures.py has the same.

struct Matrix {
  const uint32_t* panels;
  const float* bias;  // or null
  int64_t outputs, inputs;
};
struct Layer {
  Matrix qkv, out, gate_up, down;  // gate_up: a panel of gate, one of up, and so on
  const float *attention_norm, *mlp_norm;
};
struct Model {
  const Layer* layers;
  Matrix embedding, head;
  const float* norm;
  float* cache;  // [blocks][layers][key as [kv_heads][head_dim][block_size], value as [kv_heads][block_size][head_dim]]
  int64_t num_layers, heads, kv_heads, head_dim, block_size;
  float epsilon, scale;
};
struct Chunk {
  int32_t row, length, start, table;  // first flat row, tokens, position of the first, where its blocks begin in `tables`
};
struct Step {
  const int32_t* tokens;
  const float* const* embeddings;  // null, or for each token null or what takes the place of its own, [hidden]
  const float *cos, *sin;  // [num_tokens][head_dim / 2]
  const Chunk* chunks;
  const int32_t* tables;
  const int32_t* rows;  // flat rows whose logits are wanted
  float* logits;        // [num_rows][vocabulary]
  int64_t num_tokens, num_chunks, num_rows;
};

namespace {

class Decoder {
 public:
  Decoder(const Model& model, int threads) : model_(model), team_(threads) {}

  int threads() const { return team_.size(); }

  void forward(const Step& step) {
    step_ = &step;
    const long tokens = step.num_tokens, hidden = model_.embedding.inputs;
    const long most_outputs = (model_.heads + 2 * model_.kv_heads) * model_.head_dim;
    for (auto [buffer, size] : {std::pair{&x_, tokens * hidden}, {&normed_, tokens * hidden}, {&qkv_, tokens * most_outputs},
                                {&attended_, tokens * model_.heads * model_.head_dim}, {&gated_, tokens * model_.layers[0].gate_up.outputs / 2}})
      if ((long)buffer->size() < size) *buffer = std::vector<float>(size);
    queries_.clear();
    const int most = std::max<int>(1, kAttentionRows / (model_.heads / model_.kv_heads));
    for (int c = 0; c < step.num_chunks; c++)
      for (int i = 0; i < step.chunks[c].length; i += most) queries_.push_back({c, i, std::min(most, step.chunks[c].length - i)});
    prompts_ = std::partition(queries_.begin(), queries_.end(), [&](auto& q) { return step.chunks[q.chunk].length > 1; }) - queries_.begin();
    auto work = [this] { layers(); };
    team_.run(8 * (int)model_.num_layers + 3, work);
  }

 private:
  struct Queries {
    int chunk, first, count;
  };

  void layers() {
    int phase = 0;
    const int tokens = step_->num_tokens;
    const long kv_heads = model_.kv_heads, hidden = model_.embedding.inputs;
    team_.each(phase, tokens, [&](int i) {
      if (step_->embeddings && step_->embeddings[i]) std::memcpy(&x_[i * hidden], step_->embeddings[i], hidden * sizeof(float));
      else embed(step_->tokens[i], x_.data() + i * hidden);
    });
    for (int l = 0; l < model_.num_layers; l++) {
      const Layer& layer = model_.layers[l];
      project(phase, layer.qkv, normalised(phase, layer.attention_norm), hidden, tokens, qkv_.data(), false);
      if (prompts_)
        team_.each(phase, prompts_ * kv_heads, [&](int i) { rotate_and_write(l, queries_[i / kv_heads], i % kv_heads); });
      team_.each(phase, queries_.size() * kv_heads, [&](int i) {
        if (i >= prompts_ * kv_heads) rotate_and_write(l, queries_[i / kv_heads], i % kv_heads);
        attend(l, queries_[i / kv_heads], i % kv_heads);
      });
      project(phase, layer.out, attended_.data(), layer.out.inputs, tokens, x_.data(), true);
      gate(phase, layer.gate_up, normalised(phase, layer.mlp_norm), tokens);
      project(phase, layer.down, gated_.data(), layer.gate_up.outputs / 2, tokens, x_.data(), true);
    }
    const int rows = step_->num_rows;
    team_.each(phase, rows, [&](int i) { normalise(&x_[step_->rows[i] * hidden], model_.norm, &normed_[i * hidden]); });
    project(phase, model_.head, normed_.data(), hidden, rows, step_->logits, false);
  }

  // All rows: shared work if they are many; few are sooner done by each thread for itself than waited for.
  const float* normalised(int& phase, const float* weight) {
    const long tokens = step_->num_tokens, hidden = model_.embedding.inputs;
    thread_local std::vector<float> own;
    if (tokens <= kFewRows) own.resize(tokens * hidden);
    float* to = tokens <= kFewRows ? own.data() : normed_.data();
    const auto row = [&](int i) { normalise(&x_[i * hidden], weight, to + i * hidden); };
    if (tokens > kFewRows) team_.each(phase, tokens, row);
    else for (int i = 0; i < tokens; i++) row(i);
    return to;
  }

  void embed(int token, float* x) const {
    const Matrix& m = model_.embedding;
    const int lane = token % kPanel;
    const uint32_t* from = m.panels + token / kPanel * m.inputs * kLanes + lane % kLanes;
    for (long k = 0; k < m.inputs; k++) {
      const uint32_t bits = lane < kLanes ? from[k * kLanes] << 16 : from[k * kLanes] & 0xffff0000u;
      std::memcpy(x + k, &bits, sizeof bits);
    }
  }

  void normalise(const float* x, const float* weight, float* out) const {
    const long size = model_.embedding.inputs;
    const float factor = 1.0f / std::sqrt(total(x, size, [](auto v) { return v * v; }) / size + model_.epsilon);
    long i = 0;
    for (; i + kLanes <= size; i += kLanes) save(out + i, load<Vec>(x + i) * factor * load<Vec>(weight + i));
    for (; i < size; i++) out[i] = x[i] * factor * weight[i];
  }

  // Calls task(first row, rows, panels, first panel, count) for every piece of a product.
  template <class Task>
  void pieces(int& phase, const Matrix& m, int rows, Task task) {
    const int panels = (m.outputs + kPanel - 1) / kPanel, row_blocks = (rows + kTaskRows - 1) / kTaskRows;
    team_.each(phase, (panels + kTaskPanels - 1) / kTaskPanels * row_blocks, [&](int i) {
      const int first = i / row_blocks * kTaskPanels, row = i % row_blocks * kTaskRows;
      WeightPanel group[kTaskPanels];
      for (int p = 0; p < kTaskPanels; p++) group[p].data = m.panels + (first + p) * m.inputs * kLanes;
      task(row, std::min(kTaskRows, rows - row), group, first, std::min(kTaskPanels, panels - first));
    });
  }

  // x: rows of m.inputs values, `stride` apart.
  void project(int& phase, const Matrix& m, const float* x, long stride, int rows, float* out, bool add) {
    pieces(phase, m, rows, [&](int first_row, int count_rows, const WeightPanel* group, int first, int count) {
      multiply(x + first_row * stride, stride, count_rows, group, count, m.inputs, [&](int row, int panel, Vec low, Vec high) {
        const long column = (long)(first + panel) * kPanel;
        float* to = out + (first_row + row) * m.outputs + column;
        if (m.bias) low += load<Vec>(m.bias + column), high += load<Vec>(m.bias + column + kLanes);
        if (column + kPanel > m.outputs) {  // the last panel, partly empty
          for (int i = 0; column + i < m.outputs; i++) to[i] = (add ? to[i] : 0.0f) + (i < kLanes ? low[i] : high[i - kLanes]);
          return;
        }
        save(to, add ? load<Vec>(to) + low : low);
        save(to + kLanes, add ? load<Vec>(to + kLanes) + high : high);
      });
    });
  }

  void gate(int& phase, const Matrix& m, const float* x, int rows) {
    const long width = m.outputs / 2;
    pieces(phase, m, rows, [&](int first_row, int count_rows, const WeightPanel* group, int first, int count) {
      multiply(x + first_row * m.inputs, m.inputs, count_rows, group, count, m.inputs, [&](int row, int panel, Vec low, Vec high) {
        float* to = gated_.data() + (first_row + row) * width + (first + panel) / 2 * kPanel;
        if (panel % 2 == 0) {
          save(to, low / (1.0f + exponential(-low)));
          save(to + kLanes, high / (1.0f + exponential(-high)));
        } else {
          save(to, load<Vec>(to) * low);
          save(to + kLanes, load<Vec>(to + kLanes) * high);
        }
      });
    });
  }

  float* keys(int layer, const Chunk& chunk, int block, long head) const {
    const long size = model_.block_size * model_.head_dim, index = step_->tables[chunk.table + block];
    return model_.cache + ((index * model_.num_layers + layer) * 2 * model_.kv_heads + head) * size;
  }
  float* values(int layer, const Chunk& chunk, int block, long head) const {
    return keys(layer, chunk, block, head + model_.kv_heads);
  }

  // One key head's part of some rows: the queries that share it turn in place, the key turns on its way into the cache.
  void rotate_and_write(int layer, const Queries& queries, long head) {
    const Chunk& chunk = step_->chunks[queries.chunk];
    const long dim = model_.head_dim, half = dim / 2, size = model_.block_size, group = model_.heads / model_.kv_heads;
    for (int i = queries.first; i < queries.first + queries.count; i++) {
      const long row = chunk.row + i;
      float* at = qkv_.data() + row * (model_.heads + 2 * model_.kv_heads) * dim;
      float *key = at + (model_.heads + head) * dim, *value = key + model_.kv_heads * dim;
      const float *cos = step_->cos + row * half, *sin = step_->sin + row * half;
      const auto turn = [&](float* of) {
        for (long d = 0; d < half; d++) {
          const float a = of[d], b = of[d + half];
          of[d] = a * cos[d] - b * sin[d];
          of[d + half] = b * cos[d] + a * sin[d];
        }
      };
      for (long g = 0; g < group; g++) turn(at + (head * group + g) * dim);
      turn(key);
      const int position = chunk.start + i, block = position / size, slot = position % size;
      float* to = keys(layer, chunk, block, head) + slot;
      for (long d = 0; d < dim; d++) to[d * size] = key[d];
      std::memcpy(values(layer, chunk, block, head) + slot * dim, value, dim * sizeof(float));
    }
  }

  // Softmax block by block, for the queries of a chunk that share a key head. Where a block or a head is no whole number of panels, the
  // last panel reaches into what follows in the cache: those columns are computed and never looked at (model.py adds a tail to the cache).
  void attend(int layer, const Queries& queries, long head) {
    const Chunk& chunk = step_->chunks[queries.chunk];
    const long dim = model_.head_dim, size = model_.block_size, group = model_.heads / model_.kv_heads;
    const long width = padded(size), out_width = padded(dim);
    const int rows = queries.count * group, first = chunk.start + queries.first, last = first + queries.count - 1;
    thread_local std::vector<float> query, scores, out, state;
    thread_local std::vector<FloatPanel> panels;
    query.resize(rows * dim), scores.resize(rows * width), out.assign(rows * out_width, 0.0f), state.resize(2 * rows);
    panels.resize(std::max(width, out_width) / kPanel);
    const auto at = [&](int r) { return (chunk.row + queries.first + r / group); };
    for (int r = 0; r < rows; r++) {
      const float* from = qkv_.data() + at(r) * (model_.heads + 2 * model_.kv_heads) * dim + (head * group + r % group) * dim;
      for (long d = 0; d < dim; d++) query[r * dim + d] = from[d] * model_.scale;
      state[2 * r] = -1e30f, state[2 * r + 1] = 0;
    }
    for (int block = 0; block <= last / size; block++) {
      const float *key = keys(layer, chunk, block, head), *value = values(layer, chunk, block, head);
      for (int p = 0; p < width / kPanel; p++) panels[p] = {key + p * kPanel, size};
      multiply(query.data(), dim, rows, panels.data(), width / kPanel, dim, [&](int row, int panel, Vec low, Vec high) {
        save(&scores[row * width + panel * kPanel], low);
        save(&scores[row * width + panel * kPanel + kLanes], high);
      });
      for (int r = 0; r < rows; r++) weigh(&scores[r * width], first + r / group - block * size + 1, &state[2 * r], &out[r * out_width]);
      for (int p = 0; p < out_width / kPanel; p++) panels[p] = {value + p * kPanel, dim};
      multiply(scores.data(), width, rows, panels.data(), out_width / kPanel, std::min(size, last - block * size + 1),
               [&](int row, int panel, Vec low, Vec high) {
                 float* to = &out[row * out_width + panel * kPanel];
                 save(to, load<Vec>(to) + low);
                 save(to + kLanes, load<Vec>(to + kLanes) + high);
               });
    }
    for (int r = 0; r < rows; r++) {
      float* to = attended_.data() + at(r) * model_.heads * dim + (head * group + r % group) * dim;
      for (long d = 0; d < dim; d++) to[d] = out[r * out_width + d] / state[2 * r + 1];
    }
  }

  // Scores of a block to weights: those from `seen` on are of later tokens. state: largest score so far, sum of weights; out follows.
  void weigh(float* scores, long seen, float* state, float* out) const {
    const long size = padded(model_.block_size);
    if (seen <= 0) return (void)std::memset(scores, 0, size * sizeof(float));
    seen = std::min<long>(seen, model_.block_size);
    for (long i = seen; i < size; i++) scores[i] = -1e30f;
    Vec best = all(state[0]);
    for (long i = 0; i < size; i += kLanes) {
      const Vec s = load<Vec>(scores + i);
      best = s > best ? s : best;
    }
    const float highest = largest(best);
    if (highest > state[0]) {
      const float shrink = std::exp(state[0] - highest);
      state[0] = highest, state[1] *= shrink;
      for (long d = 0; d < padded(model_.head_dim); d += kLanes) save(out + d, load<Vec>(out + d) * shrink);
    }
    for (long i = 0; i < size; i += kLanes) save(scores + i, exponential(load<Vec>(scores + i) - highest));
    for (long i = seen; i < size; i++) scores[i] = 0;
    state[1] += total(scores, size, [](auto v) { return v; });
  }

  const Model model_;
  const Step* step_ = nullptr;
  Team team_;
  std::vector<float> x_, normed_, qkv_, attended_, gated_;
  std::vector<Queries> queries_;  // of prompts first
  long prompts_ = 0;
};

}  // namespace

extern "C" {
int panel_size() { return kPanel; }

// Whether none of some bfloat16 values is infinite or NaN: those have the largest exponent.
int all_finite(const uint16_t* values, int64_t count) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < count; i++) largest = std::max<uint16_t>(largest, values[i] & 0x7f80);
  return largest != 0x7f80;
}

// Rows of a weight, bfloat16 [outputs, inputs], as panels: the first at index `first` of `panels`, the others `step` apart.
void pack(const uint16_t* weight, int64_t outputs, int64_t inputs, uint32_t* panels, int64_t first, int64_t step) {
  for (int64_t p = 0; p * kPanel < outputs; p++)
    for (int64_t k = 0; k < inputs; k++)
      for (int i = 0; i < kLanes; i++) {
        const int64_t low = p * kPanel + i, high = low + kLanes;
        panels[((first + p * step) * inputs + k) * kLanes + i] =
            (low < outputs ? weight[low * inputs + k] : 0u) | (high < outputs ? (uint32_t)weight[high * inputs + k] << 16 : 0u);
      }
}

void* decoder_new(const Model* model, int threads) { return new Decoder(*model, threads); }
void decoder_forward(void* decoder, const Step* step) { static_cast<Decoder*>(decoder)->forward(*step); }
int decoder_threads(void* decoder) { return static_cast<Decoder*>(decoder)->threads(); }
void decoder_delete(void* decoder) { delete static_cast<Decoder*>(decoder); }
}
