// One step of a model of the Llama kind on a CPU: flat tokens in, logits out, all layers in one call.
//
// Weights are bfloat16 (products.h, weight_products.h) or blocks of 8 or 4 bits (blocks.h), activations and sums float32, keys
// and values one of the two types (cache.h). Every output is summed in the same order whatever else is in the step, so a sequence
// gets the same logits, to the bit, alone and in a batch, in one prefill or in chunks. Sizes need not be multiples of anything: the
// last panel of a matrix may be partly empty, and of keys and values partly another's.
// Plain C++ with the vector extensions of GCC and Clang; engine/embedded/models/native/build.py compiles it for one
// instruction set at a time (levels.py). LANES, the floats in a vector, is nearly all that differs: layouts of the KV
// cache do not depend on it.

#include <cmath>
#include <utility>

#include "blocks.h"
#include "cache.h"
#include "products.h"
#include "sampling.h"
#include "team.h"
#include "weight_products.h"

namespace {

constexpr int kMostPanels = 8;                 // panels in a task
constexpr int kPanelsOfFew = 6;                // the same for fewer than kFewestSplit rows, where several panels may be multiplied at a time
constexpr int kFewestSplit = 5;
static_assert(kTaskRows % kBlockRows == 0 && kTaskRows % kRoundedRows == 0, "tasks begin where tiles of activations begin");
static_assert(2 * kStreams <= kMostPanels && kPanelsOfFew % 2 == 0, "a gate and what it gates are in one task");
constexpr int kAttentionRows = 8 * kTileRows;  // query rows that share a pass over keys and values
constexpr long kSpan = 128;                    // keys that are weighed together, if that many blocks are whole panels
constexpr int kFewRows = 32;

// Where a panel has the weight of an input and an output, counted in bfloat16: a word has those of two outputs
// (products.h), or of two inputs (weight_products.h).
inline int64_t index_in_panel(int64_t input, int lane) {
  if (kProducts != kFloats) return (input / 2 * kPanel + lane) * 2 + input % 2;
  return (input * kLanes + lane % kLanes) * 2 + lane / kLanes;
}

}  // namespace

// ---- What Python passes: engine/embedded/models/native/structures.py has the same.

struct Matrix {
  const uint8_t* panels;
  const float* bias;  // or null
  int64_t outputs, inputs, kind;  // Kind

  // Bytes of a panel.
  long stride() const {
    if (kind == kBfloat16) return (kProducts == kFloats ? inputs : (inputs + kGroup - 1) / kGroup * kGroup) * kLanes * 4;
    return (inputs + kBlock - 1) / kBlock * block_bytes(kind);
  }
};
struct Layer {
  Matrix qkv, out, gate_up, down;  // gate_up: a panel of gate, one of up, and so on
  const float *attention_norm, *mlp_norm, *query_norm, *key_norm;  // the last two, of each head, may be null
  const float *attended_norm, *computed_norm;  // of what attention and the MLP add, or null
  Cached* cache;     // this layer's part of its group's: [blocks][layers][keys, then values, of each of kv_heads] (cache.h)
  int64_t stride;    // values from a block to the next
  int64_t group;     // number of its block tables
  int64_t window;    // tokens that are attended to; 0 for all
  int64_t rotation;  // number of its cosines and sines
};
struct Model {
  const Layer* layers;
  Matrix embedding, head;
  const float* norm;
  int64_t num_layers, heads, kv_heads, head_dim, block_size, gelu;  // gelu: in the place of SiLU
  float epsilon, scale, embedding_scale;
  // Of an EAGLE-3 head alone: its layer reads embeddings beside hidden states, which `fc` makes of another model's.
  const float* hidden_norm;  // or null
  int64_t norm_before_residual;
  Matrix fc;
};
struct Chunk {
  int32_t row, length, start;  // first flat row, tokens, position of the first
  int32_t table, blocks;       // where its blocks begin in `tables`, and how many there are for each group of layers
};
struct Step {
  const int32_t* tokens;
  const float* const* embeddings;  // null, or for each token null or what takes the place of its own, [hidden]
  const float *cos, *sin;  // [rotations][num_turns][head_dim / 2]
  const int32_t* turns;    // of each token: the index of its cosines and sines
  const Chunk* chunks;
  const int32_t* tables;
  const int32_t* rows;  // flat rows whose logits are wanted
  float* logits;        // [num_rows][vocabulary]
  const float* features;  // a head's, in the place of embeddings: [num_tokens][fc.inputs], or null
  float* hidden;          // null, or what enters the layers of `take`: [num_tokens][layers][hidden]
  int64_t num_tokens, num_chunks, num_rows, num_turns;
};
// Of a head: the tokens that it drafts behind the chunks of a step, whose last rows are its `rows`.
struct Drafting {
  const int32_t* names;  // ids of the tokens that the head knows
  const int32_t* turns;  // [chunks][most]: of the positions behind each chunk, the indices of cosines and sines
  int32_t* limits;       // tokens of each chunk at most, then how many there are
  int32_t* tokens;       // [chunks][most]
  float* probabilities;  // [chunks][most]
  int64_t most;
  float least;  // no token follows those that are all right with this probability or a lower one
};

namespace {

class Decoder {
 public:
  Decoder(const Model& model, int threads) : model_(model), team_(threads) {}

  int threads() const { return team_.size(); }
  // Layers whose input is written to `hidden`; their number stands for the last one's output.
  void take(const int64_t* layers, int64_t count) { taken_.assign(layers, layers + count); }

  void forward(const Step& step) {
    step_ = &step;
    const long tokens = step.num_tokens, hidden = model_.embedding.inputs;
    const long most_outputs = (model_.heads + 2 * model_.kv_heads) * model_.head_dim;
    for (auto [buffer, size] : {std::pair{&x_, tokens * hidden}, {&normed_, tokens * (model_.hidden_norm ? 2 : 1) * hidden}, {&qkv_, tokens * most_outputs},
                                {&attended_, tokens * model_.heads * model_.head_dim}, {&gated_, tokens * model_.layers[0].gate_up.outputs / 2}})
      if ((long)buffer->size() < size) *buffer = std::vector<float>(size);
    if (rounds_outputs_) outputs_.rows(tokens, widest_);  // before threads share them
    if (tokens > kFewRows) coded_.rows(tokens, widest_);
    if (tokens > kFewRows && kProducts != kFloats) rounded_.rows(tokens, widest_);
    queries_.clear();
    const int most = std::max<int>(1, kAttentionRows / (model_.heads / model_.kv_heads));
    for (int c = 0; c < step.num_chunks; c++)
      for (int i = 0; i < step.chunks[c].length; i += most) queries_.push_back({c, i, std::min(most, step.chunks[c].length - i)});
    prompts_ = std::partition(queries_.begin(), queries_.end(), [&](auto& q) { return step.chunks[q.chunk].length > 1; }) - queries_.begin();
    auto work = [this] {
      const ProductState state;
      layers();
    };
    team_.run(14 * (int)model_.num_layers + 6 + (int)taken_.size(), work);
  }

  // Further positions take the head's own output in the place of hidden states.
  void draft(const Step& first, const Drafting& drafting) {
    const long hidden = model_.embedding.inputs, size = model_.head.outputs;
    Step step = first;
    std::vector<Chunk> chunks(first.chunks, first.chunks + first.num_chunks);
    std::vector<int> owners(chunks.size());  // of chunks: those of the first step
    for (size_t i = 0; i < owners.size(); i++) owners[i] = i;
    std::vector<float> sure(chunks.size(), 1.0f), states(chunks.size() * hidden);
    std::vector<int32_t> tokens(chunks.size()), turns(chunks.size()), rows(chunks.size());
    std::vector<const float*> embeddings(chunks.size());
    for (int place = 0;; place++) {
      forward(step);
      int going = 0;
      for (int i = 0; i < (int)step.num_chunks; i++) {
        const int owner = owners[i];
        if (place >= drafting.limits[owner]) continue;
        const float* logits = step.logits + i * size;
        const long best = first_largest(logits, size);
        const float highest = logits[best];
        const float probability = 1.0f / total(logits, size, [&](auto v) { return exponential(v - highest); });
        drafting.tokens[owner * drafting.most + place] = drafting.names[best];
        drafting.probabilities[owner * drafting.most + place] = probability;
        sure[owner] *= probability;
        if (place + 1 >= drafting.limits[owner] || sure[owner] <= drafting.least) {
          drafting.limits[owner] = place + 1;
          continue;
        }
        const Chunk chunk = chunks[i];
        std::memmove(&states[going * hidden], step.hidden + step.rows[i] * hidden, hidden * sizeof(float));
        chunks[going] = {going, 1, chunk.start + chunk.length, chunk.table, chunk.blocks};
        owners[going] = owner, tokens[going] = drafting.names[best], embeddings[going] = &states[going * hidden];
        turns[going] = drafting.turns[owner * drafting.most + place];
        going++;
      }
      if (!going) return;
      for (int i = 0; i < going; i++) rows[i] = i;
      step = {tokens.data(), embeddings.data(), first.cos, first.sin, turns.data(), chunks.data(), first.tables, rows.data(),
              first.logits, nullptr, first.hidden, going, going, going, first.num_turns};
    }
  }

 private:
  struct Queries {
    int chunk, first, count;
  };
  // Rows that a product reads, `stride` apart; if they are rounded already, only so.
  struct Input {
    const float* x;
    long stride;
    Rounded rounded{};
  };
  static bool rounds(const Matrix& m) { return kProducts != kFloats && m.kind == kBfloat16; }

  void layers() {
    int phase = 0;
    const int tokens = step_->num_tokens;
    const long kv_heads = model_.kv_heads, hidden = model_.embedding.inputs;
    if (step_->features) project(phase, model_.fc, {step_->features, model_.fc.inputs}, tokens, x_.data(), false);
    else team_.each(phase, tokens, [&](int i) {
      if (step_->embeddings && step_->embeddings[i]) std::memcpy(&x_[i * hidden], step_->embeddings[i], hidden * sizeof(float));
      else embed(step_->tokens[i], x_.data() + i * hidden);
    });
    for (int l = 0; l < model_.num_layers; l++) {
      const Layer& layer = model_.layers[l];
      keep(phase, l);
      const Input normed = model_.hidden_norm ? joined(phase, layer) : normalised(phase, layer.attention_norm, layer.qkv);
      project(phase, layer.qkv, normed, tokens, qkv_.data(), false, true);
      if (prompts_)
        team_.each(phase, prompts_ * kv_heads, [&](int i) { rotate_and_write(l, queries_[i / kv_heads], i % kv_heads); });
      team_.each(phase, queries_.size() * kv_heads, [&](int i) {
        if (i >= prompts_ * kv_heads) rotate_and_write(l, queries_[i / kv_heads], i % kv_heads);
        const long next = i + 1;  // mostly this thread's next task
        const bool last = next == (long)queries_.size() * kv_heads;
        const Cached* after = last ? nullptr : first_keys(l, queries_[next / kv_heads], next % kv_heads);
        attend(l, queries_[i / kv_heads], i % kv_heads, after);
      });
      add(phase, layer.out, outputs(layer.out, attended_, layer.out.inputs), layer.attended_norm);
      gate(phase, layer, normalised(phase, layer.mlp_norm, layer.gate_up), tokens);
      add(phase, layer.down, outputs(layer.down, gated_, layer.gate_up.outputs / 2), layer.computed_norm);
    }
    keep(phase, model_.num_layers);
    const int rows = step_->num_rows;
    team_.each(phase, rows, [&](int i) { normalise(&x_[step_->rows[i] * hidden], model_.norm, &normed_[i * hidden]); });
    project(phase, model_.head, {normed_.data(), hidden}, rows, step_->logits, false, true);
  }

  // Add a product to what goes through all layers, normalised if it has a norm.
  void add(int& phase, const Matrix& m, const Input& input, const float* norm) {
    const int tokens = step_->num_tokens;
    const long hidden = model_.embedding.inputs;
    if (!norm) return project(phase, m, input, tokens, x_.data(), true);
    project(phase, m, input, tokens, normed_.data(), false);
    team_.each(phase, tokens, [&](int i) {
      float *of = &normed_[i * hidden], *to = &x_[i * hidden];
      normalise(of, norm, of);
      for (long d = 0; d < hidden; d++) to[d] += of[d];
    });
  }

  // Write what enters a layer to `hidden`, if it is one of those taken.
  void keep(int& phase, int layer) {
    const long hidden = model_.embedding.inputs, count = taken_.size();
    for (long place = 0; place < count; place++)
      if (step_->hidden && taken_[place] == layer)
        team_.each(phase, step_->num_tokens, [&](int i) {
          std::memcpy(step_->hidden + (i * count + place) * hidden, &x_[i * hidden], hidden * sizeof(float));
        });
  }

  // What the layer of a head reads: embeddings of tokens, then hidden states, each normalised.
  Input joined(int& phase, const Layer& layer) {
    const long hidden = model_.embedding.inputs;
    team_.each(phase, step_->num_tokens, [&](int i) {
      float *x = &x_[i * hidden], *to = &normed_[2 * i * hidden];
      embed(step_->tokens[i], to);
      normalise(to, layer.attention_norm, to);
      normalise(x, model_.hidden_norm, to + hidden);
      if (model_.norm_before_residual) std::memcpy(x, to + hidden, hidden * sizeof(float));
    });
    return {normed_.data(), layer.qkv.inputs};
  }

  // All rows, as a product with `m` reads them: shared work if they are many; few are sooner done by each thread for itself than
  // waited for.
  Input normalised(int& phase, const float* weight, const Matrix& m) {
    const long tokens = step_->num_tokens, hidden = model_.embedding.inputs;
    const bool few = tokens <= kFewRows;
    thread_local std::vector<float> own;
    thread_local RoundedBuffer own_rounded;
    own.resize((few && !rounds(m) ? tokens : 1) * hidden);
    float* floats = few ? own.data() : normed_.data();
    Input input{floats, hidden};
    if (rounds(m)) input.rounded = (few ? own_rounded : rounded_).rows(tokens, hidden);
    const auto row = [&](int i) {
      float* to = input.rounded.values ? own.data() : floats + i * hidden;
      normalise(&x_[i * hidden], weight, to);
      if (input.rounded.values) input.rounded.set(i, 0, to, hidden);
    };
    if (!few) team_.each(phase, tokens, row);
    else for (int i = 0; i < tokens; i++) row(i);
    return input;
  }

  // Outputs of tasks that a product with `m` reads: they are rounded where it reads them so, in the place of floats.
  Input outputs(const Matrix& m, const std::vector<float>& floats, long stride) {
    return {floats.data(), stride, rounds(m) ? outputs_.rows(step_->num_tokens, m.inputs) : Rounded{}};
  }

  void embed(int token, float* x) const {
    const Matrix& m = model_.embedding;
    const int lane = token % kPanel;
    const uint8_t* panel = m.panels + token / kPanel * m.stride();
    if (m.kind != kBfloat16)
      with_format(m.kind, [&](auto format) {
        using Format = decltype(format);
        for (long k = 0; k < m.inputs; k++) x[k] = Format::value(panel + k / kBlock * Format::kBytes, lane, k % kBlock);
      });
    else
      for (long k = 0; k < m.inputs; k++) {
        const uint32_t bits = (uint32_t)((const uint16_t*)panel)[index_in_panel(k, lane)] << 16;
        std::memcpy(x + k, &bits, sizeof bits);
      }
    if (model_.embedding_scale != 1.0f)
      for (long k = 0; k < m.inputs; k++) x[k] *= model_.embedding_scale;
  }

  void normalise(const float* x, const float* weight, float* out) const { normalise(x, weight, out, model_.embedding.inputs); }
  void normalise(const float* x, const float* weight, float* out, long size) const {
    const float factor = 1.0f / std::sqrt(total(x, size, [](auto v) { return v * v; }) / size + model_.epsilon);
    long i = 0;
    for (; i + kLanes <= size; i += kLanes) save(out + i, load<Vec>(x + i) * factor * load<Vec>(weight + i));
    for (; i < size; i++) out[i] = x[i] * factor * weight[i];
  }

  // How many panels of weights are read side by side for so many rows.
  static int streams_of(int64_t kind, int rows) {
    if (streams(kind, rows)) return kStreams;
    if (kind != kBfloat16) return 1;
    if (kProducts != kFloats) return side_by_side(rows);  // as many as are multiplied at a time
    return rows == 2 && kLanes < 16 ? 2 : 1;
  }

  // Panels of a task in each of its streams: few, so that all threads have equally much to do, but as many as are multiplied
  // at a time, and `together` at least.
  static int width_of(int sides, int rows, int together) {
    if (sides == 2) return kMostPanels / 2;
    if (sides == 1 && rows < kFewestSplit) return kPanelsOfFew;
    return sides == 1 && kProducts == kTiles ? 2 : together;
  }

  // store(row, panel, low, high, kept) takes all of a product. fine: where weights are blocks, activations have 16 bits at every
  // level (blocks.h). together: neighbouring panels that one thread has to store. kept: two vectors that a panel's row may leave for
  // the same row of the next panel.
  template <class Store>
  void product(int& phase, const Matrix& m, const Input& input, int rows, bool fine, int together, Store store) {
    const float* x = input.x;
    const long stride = input.stride;
    const bool blocks = m.kind != kBfloat16;
    const Activations codes = blocks ? coded(phase, m, x, stride, rows, fine) : Activations{};
    const Rounded narrow = input.rounded.values || !rounds(m) ? input.rounded : rounded(phase, m, x, stride, rows);
    const int sides = streams_of(m.kind, rows), width = width_of(sides, rows, together);
    const int panels = (m.outputs + kPanel - 1) / kPanel, tasks = (panels + sides * width - 1) / (sides * width);
    const int row_blocks = (rows + kTaskRows - 1) / kTaskRows;
    team_.each(phase, tasks * row_blocks, [&](int i) {
      Outputs kept[kTaskRows];  // enough for several panels side by side too: rows are few then
      // Panels side by side are `tasks` times `width` apart, so that each goes on where it ended in the task before.
      const int first_row = i % row_blocks * kTaskRows, count_rows = std::min(kTaskRows, rows - first_row);
      int numbers[kMostPanels], side[kMostPanels], count = 0;
      for (int place = 0; place < sides * width; place++) {
        const int number = (place % sides * tasks + i / row_blocks) * width + place / sides;
        if (number < panels) numbers[count] = number, side[count++] = place % sides;
      }
      const uint8_t* group[kMostPanels];
      for (int p = 0; p < count; p++) group[p] = m.panels + numbers[p] * m.stride();
      const auto give = [&](int row, int panel, Vec low, Vec high) {
        store(first_row + row, numbers[panel], low, high, kept[side[panel] * count_rows + row]);
      };
      if (blocks) return multiply(codes, first_row, count_rows, m.kind, group, count, give);
      if (kProducts != kFloats) return multiply(narrow, first_row, count_rows, (const uint32_t* const*)group, count, give);
      WeightPanel weights[kMostPanels];
      for (int p = 0; p < count; p++) weights[p].data = (const uint32_t*)group[p];
      multiply(x + first_row * stride, stride, count_rows, weights, count, m.inputs, give);
    });
  }

  // Activations for a product of blocks, shared out or not as in `normalised`.
  Activations coded(int& phase, const Matrix& m, const float* x, long stride, int rows, bool fine) {
    thread_local ActivationBuffer own;
    Activations coded = (rows <= kFewRows ? own : coded_).rows(rows, m.inputs, sum_factor(m.kind), code_bits(m.kind), WITH_BYTES && !fine);
    const auto row = [&](int i) { coded.set(i, x + i * stride, m.inputs); };
    if (rows > kFewRows) team_.each(phase, rows, row);
    else for (int i = 0; i < rows; i++) row(i);
    return coded;
  }

  // The same for a product of bfloat16.
  Rounded rounded(int& phase, const Matrix& m, const float* x, long stride, int rows) {
    thread_local RoundedBuffer own;
    Rounded rounded = (rows <= kFewRows ? own : rounded_).rows(rows, m.inputs);
    const auto row = [&](int i) { rounded.set(i, 0, x + i * stride, m.inputs); };
    if (rows > kFewRows) team_.each(phase, rows, row);
    else for (int i = 0; i < rows; i++) row(i);
    return rounded;
  }

  void project(int& phase, const Matrix& m, const Input& input, int rows, float* out, bool add, bool fine = false) {
    product(phase, m, input, rows, fine, 1, [&](int row, int panel, Vec low, Vec high, Outputs&) {
      const long column = (long)panel * kPanel;
      float* to = out + row * m.outputs + column;
      if (m.bias) low += load<Vec>(m.bias + column), high += load<Vec>(m.bias + column + kLanes);
      if (column + kPanel > m.outputs) {  // the last panel, partly empty
        for (int i = 0; column + i < m.outputs; i++)
          to[i] = (add ? to[i] : 0.0f) + (i < kLanes ? low[i] : high[i - kLanes]);
        return;
      }
      save(to, add ? load<Vec>(to) + low : low);
      save(to + kLanes, add ? load<Vec>(to + kLanes) + high : high);
    });
  }

  void gate(int& phase, const Layer& layer, const Input& input, int rows) {
    const long width = layer.gate_up.outputs / 2;
    const Rounded rounded = outputs(layer.down, gated_, width).rounded;
    product(phase, layer.gate_up, input, rows, false, 2, [&](int row, int panel, Vec low, Vec high, Outputs& gate) {
      if (panel % 2 == 0) {
        gate[0] = model_.gelu ? gelu(low) : silu(low);
        gate[1] = model_.gelu ? gelu(high) : silu(high);
        return;
      }
      const long column = panel / 2 * kPanel;
      float few[kPanel], *to = rounded.values ? few : gated_.data() + row * width + column;
      save(to, gate[0] * low);
      save(to + kLanes, gate[1] * high);
      if (rounded.values) rounded.set(row, column, few, kPanel);
    });
  }

  Cached* keys(int layer, const Chunk& chunk, int block, long head) const {
    const Layer& its = model_.layers[layer];
    const long size = words_for(model_.block_size) * model_.head_dim * kPerWord;
    return its.cache + step_->tables[chunk.table + its.group * chunk.blocks + block] * its.stride + head * size;
  }
  Cached* values(int layer, const Chunk& chunk, int block, long head) const {
    return keys(layer, chunk, block, head + model_.kv_heads);
  }

  // The first block that a layer attends to from a position: those before it may be gone.
  long first_block(int layer, long position) const {
    const long window = model_.layers[layer].window;
    return window ? std::max(0L, position - window + 1) / model_.block_size : 0;
  }
  const Cached* first_keys(int layer, const Queries& queries, long head) const {
    const Chunk& chunk = step_->chunks[queries.chunk];
    return keys(layer, chunk, first_block(layer, chunk.start + queries.first), head);
  }

  // One key head and its query heads, of some rows: they are normalised if the layer has norms for heads, then turned in place.
  // Keys and values are written to the cache.
  void rotate_and_write(int layer, const Queries& queries, long head) {
    const Chunk& chunk = step_->chunks[queries.chunk];
    const Layer& its = model_.layers[layer];
    const long dim = model_.head_dim, half = dim / 2, size = model_.block_size, group = model_.heads / model_.kv_heads;
    for (int i = queries.first; i < queries.first + queries.count; i++) {
      const long row = chunk.row + i;
      float* at = qkv_.data() + row * (model_.heads + 2 * model_.kv_heads) * dim;
      float *key = at + (model_.heads + head) * dim, *value = key + model_.kv_heads * dim;
      const long turns = (its.rotation * step_->num_turns + step_->turns[row]) * half;
      const float *cos = step_->cos + turns, *sin = step_->sin + turns;
      const auto turn = [&](float* of, const float* norm) {
        if (norm) normalise(of, norm, of, dim);
        long d = 0;
        for (; d + kLanes <= half; d += kLanes) {
          const Vec a = load<Vec>(of + d), b = load<Vec>(of + d + half), c = load<Vec>(cos + d), s = load<Vec>(sin + d);
          save(of + d, a * c - b * s);
          save(of + d + half, b * c + a * s);
        }
        for (; d < half; d++) {
          const float a = of[d], b = of[d + half];
          of[d] = a * cos[d] - b * sin[d];
          of[d + half] = b * cos[d] + a * sin[d];
        }
      };
      for (long g = 0; g < group; g++) turn(at + (head * group + g) * dim, its.query_norm);
      turn(key, its.key_norm);
      const int position = chunk.start + i, block = position / size, slot = position % size;
      Cached* to = keys(layer, chunk, block, head) + slot * kPerWord;
      for (long d = 0; d < dim; d += kPerWord)
        for (long p = 0; p < kPerWord; p++) to[d * size + p] = cached(key[d + p]);
      to = values(layer, chunk, block, head) + slot / kPerWord * dim * kPerWord;
      for (long d = 0; d < dim; d++) to[d * kPerWord + slot % kPerWord] = cached(value[d]);
      if (i == chunk.length - 1)  // its words end with what an earlier sequence left, which could be no number
        for (long p = slot % kPerWord + 1; p < kPerWord; p++)
          for (long d = 0; d < dim; d++) to[d * kPerWord + p] = 0;
    }
  }

  // Of queries: the largest score so far, what multiplies sums when a larger one is found, and sums of weights, each in as
  // many parts at every width of vector.
  struct Weighed {
    std::vector<float> highest, shrinks, sums;

    void reset(int rows) {
      highest.assign(padded(rows), -1e30f), shrinks.assign(padded(rows), 0.0f), sums.assign(rows * kSums, 0.0f);
    }
  };

  // The queries of a chunk that share a key head, and what they have attended to so far, in whole tiles of rows. Where a block or
  // a head is no whole number of panels, the last panel reaches into what follows in the cache: those columns are computed and
  // never looked at, even while another thread writes them (runner.py adds a tail to the cache).
  struct Attention {
    int layer, first_block, blocks;
    const Chunk* chunk;
    long head, dim, size, width, out_width, span;  // width: of a block in `scores` and `weights`; span: blocks of a row of them
    int rows, first, last;                         // first, last: positions of queries
    const Cached* after;                           // keys that are read next, or null
    std::vector<Factor> query, weights;
    std::vector<float> scores, out;
    Weighed state;
    std::vector<CachePanel> panels;  // and others that one product needs
    std::vector<CacheGroup> groups;
    std::vector<Cached> partial;  // values of a block that is not full

    bool tiled() const { return in_tiles(dim, size); }
    long stride() const { return span * width; }
  };

  // Attends to a span of blocks after the other.
  void attend(int layer, const Queries& queries, long head, const Cached* after) {
    thread_local Attention a;
    thread_local std::vector<float> row;
    const Chunk& chunk = step_->chunks[queries.chunk];
    const long dim = model_.head_dim, size = model_.block_size, group = model_.heads / model_.kv_heads;
    a.layer = layer, a.chunk = &chunk, a.head = head, a.dim = dim, a.size = size, a.after = after;
    a.width = padded(size), a.out_width = padded(dim), a.span = a.width == size ? std::max(1L, kSpan / size) : 1;
    a.rows = queries.count * group, a.first = chunk.start + queries.first, a.last = a.first + queries.count - 1;
    a.first_block = first_block(layer, a.first), a.blocks = a.last / size + 1;
    const long room = a.tiled() ? (a.rows + kTileSide - 1) / kTileSide * kTileSide : a.rows;
    a.query.resize(room * a.out_width), a.weights.resize(room * a.stride()), a.scores.resize(room * a.stride());
    a.out.assign(room * a.out_width, 0.0f), a.state.reset(a.rows), row.resize(a.out_width);
    const auto at = [&](int r) { return chunk.row + queries.first + r / group; };
    for (int r = 0; r < a.rows; r++) {
      const float* from = qkv_.data() + at(r) * (model_.heads + 2 * model_.kv_heads) * dim + (head * group + r % group) * dim;
      if (dim % kLanes) std::copy_n(from, dim, row.data()), from = row.data();  // the last vector would reach into the next head
      for (long d = 0; d < dim; d += kLanes) save_factors(&a.query[r * a.out_width + d], load<Vec>(from + d) * model_.scale);
    }
    for (int begin = a.first_block / a.span * a.span; begin < a.blocks; begin += a.span) {
      const int end = std::min<int>(begin + a.span, a.blocks);
      a.tiled() ? score_tiles(a, begin, end) : score_panels(a, begin, end);
      weigh(a, begin, end);
      a.tiled() ? add_tiles(a, begin, end) : add_panels(a, begin, end);
    }
    const Matrix& reader = model_.layers[layer].out;
    const Rounded rounded = outputs(reader, attended_, reader.inputs).rounded;
    for (int r = 0; r < a.rows; r++) {
      const long column = (head * group + r % group) * dim;
      float* out = &a.out[r * a.out_width];
      const float sum = reduced<kSums>(&a.state.sums[r * kSums], [](float x, float y) { return x + y; });
      for (long d = 0; d < dim; d += kLanes) save(out + d, load<Vec>(out + d) / sum);
      if (rounded.values) rounded.set(at(r), column, out, dim);
      else std::copy_n(out, dim, attended_.data() + at(r) * model_.heads * dim + column);
    }
  }

  // Scores of the keys of some blocks.
  void score_panels(Attention& a, int begin, int end) const {
    a.panels.resize(a.width / kPanel);
    for (int block = std::max(begin, a.first_block); block < end; block++) {
      const Cached *key = keys(a.layer, *a.chunk, block, a.head), *value = values(a.layer, *a.chunk, block, a.head);
      for (int p = 0; p < a.width / kPanel; p++)
        a.panels[p] = {key + p * kPanel * kPerWord, a.size * kPerWord, value + p * kPanel * kPerWord};
      float* to = &a.scores[(block - begin) * a.width];
      multiply(a.query.data(), a.out_width, a.rows, a.panels.data(), a.width / kPanel, words_for(a.dim), [&](int row, int panel, Vec low, Vec high) {
        save(to + row * a.stride() + panel * kPanel, low);
        save(to + row * a.stride() + panel * kPanel + kLanes, high);
      });
    }
  }
  void score_tiles(Attention& a, int begin, int end) const {
    for (int block = std::max(begin, a.first_block); block < end; block++) {
      const Cached *key = keys(a.layer, *a.chunk, block, a.head), *value = values(a.layer, *a.chunk, block, a.head);
      a.groups.clear();
      for (long d = 0; d < a.dim; d += kGroup) a.groups.push_back({&a.query[d], key + d * a.size, value + d * a.size});
      multiply<false>(a.groups, a.out_width, a.rows, 2 * a.size, a.size, &a.scores[(block - begin) * a.width], a.stride());
    }
  }

  // Adds the values of some blocks, weighed, to `out`.
  void add_panels(Attention& a, int begin, int end) const {
    a.panels.resize(a.out_width / kPanel);
    for (int block = std::max(begin, a.first_block); block < end; block++) {
      const Cached* value = values(a.layer, *a.chunk, block, a.head);
      const Cached* next = block + 1 < a.blocks ? keys(a.layer, *a.chunk, block + 1, a.head) : a.after ? a.after : value;
      for (int p = 0; p < a.out_width / kPanel; p++)
        a.panels[p] = {value + p * kPanel * kPerWord, a.dim * kPerWord, next + p * kPanel * kPerWord};
      multiply(&a.weights[(block - begin) * a.width], a.stride(), a.rows, a.panels.data(), a.out_width / kPanel,
               words_for(std::min(a.size, a.last - block * a.size + 1)), [&](int row, int panel, Vec low, Vec high) {
                 float* to = &a.out[row * a.out_width + panel * kPanel];
                 save(to, load<Vec>(to) + low);
                 save(to + kLanes, load<Vec>(to + kLanes) + high);
               });
    }
  }
  void add_tiles(Attention& a, int begin, int end) const {
    a.groups.clear();
    for (int block = std::max(begin, a.first_block); block < end; block++) {
      const Cached *value = values(a.layer, *a.chunk, block, a.head), *next = value;
      if (block + a.span < a.blocks) next = keys(a.layer, *a.chunk, block + a.span, a.head);
      else if (a.after && block + 1 == a.blocks) next = a.after;
      const long count = std::min(a.size, a.last - block * a.size + 1);
      if (count < a.size) {  // behind these is what an earlier sequence left, which could be no number
        a.partial.assign(a.size * a.dim, 0);
        std::copy_n(value, words_for(count) * a.dim * kPerWord, a.partial.begin());
        value = a.partial.data();
      }
      for (long slot = 0; slot < count; slot += kGroup)
        a.groups.push_back({&a.weights[(block - begin) * a.width + slot], value + slot * a.dim, next + slot * a.dim});
    }
    multiply<true>(a.groups, a.stride(), a.rows, 2 * a.dim, a.dim, a.out.data(), a.out_width);
  }

  // Scores of some blocks to weights; `out` follows. All queries pass each of the loops before the next: within one query, each
  // would wait for the one before.
  void weigh(Attention& a, int begin, int end) const {
    const long stride = a.stride(), count = (end - begin) * a.size, group = model_.heads / model_.kv_heads;
    const long window = model_.layers[a.layer].window;
    // Calls of(row, first, last) for each query, which sees the scores from `first` to before `last`.
    const auto each = [&](auto of) {
      for (long r = 0, seen = a.first - begin * a.size + 1; r < a.rows; seen++) {
        const long first = window ? std::clamp(seen - window, 0L, count) : 0, last = std::clamp(seen, 0L, count);
        for (const long next = r + group; r < next; r++) of(r, first, last);
      }
    };
    Weighed& state = a.state;
    each([&](long r, long first, long last) {
      const float* scores = &a.scores[r * stride];
      Vec best = all(state.highest[r]);
      for (long i = first / kLanes * kLanes; i < last; i += kLanes) {
        const Vec some = load<Vec>(scores + i);
        best = larger(i < first || i + kLanes > last ? within(some, first - i, last - i, best) : some, best);
      }
      const float highest = largest(best);
      state.shrinks[r] = state.highest[r] - highest;
      state.highest[r] = highest;
    });
    for (long r = 0; r < a.rows; r += kLanes) save(&state.shrinks[r], exponential(load<Vec>(&state.shrinks[r])));
    each([&](long r, long first, long last) {
      const float *scores = &a.scores[r * stride], highest = state.highest[r], shrink = state.shrinks[r];
      float *out = &a.out[r * a.out_width], *parts = &state.sums[r * kSums];
      Factor* weights = &a.weights[r * stride];
      if (shrink != 1.0f) {
        for (long d = 0; d < a.out_width; d += kLanes) save(out + d, load<Vec>(out + d) * shrink);
        for (long p = 0; p < kSums; p += kLanes) save(parts + p, load<Vec>(parts + p) * shrink);
      }
      Vec sums[kSums / kLanes];
      for (int p = 0; p < kSums / kLanes; p++) sums[p] = load<Vec>(parts + p * kLanes);
      const auto weight = [&](long i) { return exponential(load<Vec>(scores + i) - highest); };
      const auto keep = [&](long i, Vec w) { return save_factors(weights + i, w); };
      const auto keep_seen = [&](long i) { sums[i % kSums / kLanes] += keep(i, within(weight(i), first - i, last - i, Vec{})); };
      long i = first / kLanes * kLanes;
      std::fill(weights, weights + i, 0);
      for (; i < last && (i < first || i % kSums); i += kLanes) keep_seen(i);
      for (; i + kSums <= last; i += kSums)
        for (int p = 0; p < kSums / kLanes; p++) sums[p] += keep(i + p * kLanes, weight(i + p * kLanes));
      for (; i < last; i += kLanes) keep_seen(i);
      for (int p = 0; p < kSums / kLanes; p++) save(parts + p * kLanes, sums[p]);
      if (i < count) std::fill(weights + i, weights + padded(count), 0);
    });
  }

  const Model model_;
  const long widest_ =  // inputs of a product
      std::max({model_.embedding.inputs, model_.layers[0].qkv.inputs, model_.heads * model_.head_dim,
                model_.layers[0].gate_up.outputs / 2, model_.fc.inputs});
  const bool rounds_outputs_ = std::any_of(model_.layers, model_.layers + model_.num_layers, [](const Layer& layer) {
    return rounds(layer.out) || rounds(layer.down);
  });
  const Step* step_ = nullptr;
  Team team_;
  std::vector<float> x_, normed_, qkv_, attended_, gated_;
  ActivationBuffer coded_;
  RoundedBuffer rounded_, outputs_;
  std::vector<Queries> queries_;  // of prompts first
  std::vector<int64_t> taken_;
  long prompts_ = 0;
};

// Threads that share out rows of logits. They are not the decoder's: tokens are drawn between its runs, and by samplers alone.
class DrawTeam {
 public:
  explicit DrawTeam(int threads) : team_(threads) {}
  template <class Of>
  void each(int rows, Of of) {
    if (rows == 1) return of(0);
    auto work = [&] {
      int phase = 0;
      team_.each(phase, rows, of);
    };
    team_.run(1, work, rows);
  }

 private:
  Team team_;
};

}  // namespace

extern "C" {
int panel_size() { return kPanel; }
int64_t panel_bytes(int64_t kind, int64_t inputs) { return Matrix{.inputs = inputs, .kind = kind}.stride(); }

// Whether none of some bfloat16 values is infinite or NaN: those have the largest exponent.
int all_finite(const uint16_t* values, int64_t count) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < count; i++) largest = std::max<uint16_t>(largest, values[i] & 0x7f80);
  return largest != 0x7f80;
}

// Rows of a weight, bfloat16 [outputs, inputs], as panels: the first at index `first` of `panels`, the others `step` apart.
// The panels are zero before.
void pack(const uint16_t* weight, int64_t outputs, int64_t inputs, uint8_t* panels, int64_t first, int64_t step) {
  const int64_t stride = panel_bytes(kBfloat16, inputs);
  for (int64_t output = 0; output < outputs; output++) {
    auto* panel = (uint16_t*)(panels + (first + output / kPanel * step) * stride);
    for (int64_t k = 0; k < inputs; k++) panel[index_in_panel(k, output % kPanel)] = weight[output * inputs + k];
  }
}

// The same of rows of blocks as GGUF has them, into panels that are zero.
void pack_blocks(int64_t kind, const uint8_t* raw, int64_t outputs, int64_t blocks, uint8_t* panels, int64_t first,
                 int64_t step) {
  with_format(kind, [&](auto format) {
    using Format = decltype(format);
    for (int64_t output = 0; output < outputs; output++)
      for (int64_t b = 0; b < blocks; b++, raw += Format::kRaw)
        Format::pack(raw, panels + ((first + output / kPanel * step) * blocks + b) * Format::kBytes, output % kPanel);
  });
}

// Rows of float32 as blocks of Q8_0, the last of a row filled with zeros. Returns whether all values are finite.
int quantize(const float* weight, int64_t outputs, int64_t inputs, uint8_t* raw) {
  bool finite = true;
  for (int64_t output = 0; output < outputs; output++, weight += inputs)
    for (int64_t first = 0; first < inputs; first += kBlock, raw += Q8_0::kRaw)
      finite &= quantize_block(weight + first, std::min<int64_t>(kBlock, inputs - first), raw);
  return finite;
}

void* draw_team_new(int threads) { return new DrawTeam(threads); }
void draw_team_delete(void* team) { delete static_cast<DrawTeam*>(team); }

// A token for each row of logits [rows][vocab].
void draw(void* team, const float* logits, int64_t rows, int64_t vocab, const Draw* draws, int64_t* tokens) {
  static_cast<DrawTeam*>(team)->each(rows, [=](int row) { tokens[row] = drawer().draw(logits + row * vocab, vocab, draws[row]); });
}
// The same of rows that are all greedy.
void largest_ids(const float* logits, int64_t rows, int64_t vocab, int64_t* tokens) {
  for (int64_t row = 0; row < rows; row++) tokens[row] = first_largest(logits + row * vocab, vocab);
}
// Log-probabilities of the chosen ids, values [rows][3 + 2 * listed]; see Report in engine/embedded/sampling/sampler.py.
void report(void* team, const float* logits, int64_t rows, int64_t vocab, const int64_t* chosen, int64_t listed, float* values) {
  static_cast<DrawTeam*>(team)->each(rows, [=](int row) {
    drawer().report(logits + row * vocab, vocab, chosen[row], listed, values + row * (3 + 2 * listed));
  });
}

void* decoder_new(const Model* model, int threads) { return new Decoder(*model, threads); }
void decoder_forward(void* decoder, const Step* step) { static_cast<Decoder*>(decoder)->forward(*step); }
void decoder_draft(void* decoder, const Step* step, const Drafting* drafting) { static_cast<Decoder*>(decoder)->draft(*step, *drafting); }
void decoder_take(void* decoder, const int64_t* layers, int64_t count) { static_cast<Decoder*>(decoder)->take(layers, count); }
int decoder_threads(void* decoder) { return static_cast<Decoder*>(decoder)->threads(); }
void decoder_delete(void* decoder) { delete static_cast<Decoder*>(decoder); }
}
