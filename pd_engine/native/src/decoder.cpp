#include "decoder.h"

#include <string.h>

#include <algorithm>
#include <chrono>

namespace kvn {

namespace {

constexpr int64_t kRowBlock = 96;      // rows that meet a panel while it is near: a multiple of every tile's height
constexpr int64_t kRowsARun = 8;       // rows of one item of a row-wise kernel
constexpr int64_t kPanelShares = 8;    // items a thread, at least, when a matrix has as many panels
constexpr int64_t kMinRoomRows = 64;

using Clock = std::chrono::steady_clock;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Asks whether to stop, no more often than the caller wants: an answer may cost a wait for Python's lock.
class StopQuestion {
 public:
  explicit StopQuestion(const KvnStep& step)
      : ask_(step.should_stop), interval_(std::chrono::microseconds(step.stop_interval_us)), asked_(Clock::now()) {}

  bool answer() {
    if (ask_ == nullptr) return false;
    const Clock::time_point now = Clock::now();
    if (now - asked_ < interval_) return false;
    asked_ = now;
    return ask_() != 0;
  }

 private:
  KvnShouldStop ask_;
  Clock::duration interval_;
  Clock::time_point asked_;
};

}  // namespace

Decoder::Decoder(const KvnSpec& spec, const KernelSet& kernels, int num_threads)
    : model(spec, kernels),
      threads_(num_threads),
      attention_(kernels, threads_, spec.num_heads / spec.num_kv_heads, spec.head_dim),
      panel_room_(model.most_depth() * kPanelOutputs * static_cast<int64_t>(sizeof(float))),
      panels_(static_cast<size_t>(panel_room_) * num_threads) {}

bool Decoder::forward(const KvnStep& step) {
  const std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
  if (!lock.owns_lock()) throw InvalidCall("another step is running on this model");
  if (!complete_) {
    model.check_complete();
    complete_ = true;
  }
  plan_step(model, step, plan_);
  make_room(std::max(step.num_rows, step.num_selected));
  const int64_t block_bytes = model.block_bytes();
  for (const int32_t block : plan_.to_zero) memset(static_cast<char*>(step.pool) + block * block_bytes, 0, block_bytes);
  if (!run_layers(step)) return false;
  write_logits(step);
  return true;
}

void Decoder::make_room(int64_t rows) {
  if (rows <= room_rows_) return;
  rows = std::max(rows, kMinRoomRows);
  size_t bytes = 0;
  for_each_piece(rows, [&](auto*& piece, int64_t count) { bytes += Pieces::size_of(piece, count); });
  memory_ = HugeMemory(bytes);
  Pieces pieces(memory_.data());
  for_each_piece(rows, [&](auto*& piece, int64_t count) { pieces.take(piece, count); });
  room_rows_ = rows;
}

template <class Visit>
void Decoder::for_each_piece(int64_t rows, const Visit& visit) {
  const int64_t act = model.kernels.act_bytes, hidden = model.spec.hidden_size;
  visit(work_.hidden, rows * hidden);
  visit(work_.selected, rows * hidden);
  visit(work_.qkv, rows * model.qkv_size());
  visit(work_.normed, rows * hidden * act);
  visit(work_.queries, rows * model.heads_size() * act);
  visit(work_.attended, rows * model.heads_size() * act);
  visit(work_.inner, rows * model.spec.intermediate_size * act);
}

bool Decoder::run_layers(const KvnStep& step) {
  const int64_t hidden = model.spec.hidden_size, row_bytes = hidden * model.stored_bytes();
  const char* embedding = static_cast<const char*>(model.embedding);
  for (int64_t row = 0; row < step.num_rows; ++row) {
    model.kernels.embed(embedding + step.ids[row] * row_bytes, work_.hidden + row * hidden, hidden);
  }
  StopQuestion stop(step);
  const int num_layers = model.spec.num_layers;
  for (int layer = 0; layer < num_layers; ++layer) {
    if (stop.answer()) return false;
    write_kv(step, layer);
    if (layer + 1 < num_layers) {
      attend(step, layer, plan_.segments, work_.hidden, step.num_rows);
      run_mlp(model.layers[layer], work_.hidden, step.num_rows);
    } else if (step.num_selected > 0) {
      // behind the last KV, only rows whose logits are wanted matter
      pick_selected(step);
      attend(step, layer, plan_.last, work_.selected, step.num_selected);
      run_mlp(model.layers[layer], work_.selected, step.num_selected);
    }
  }
  return true;
}

void Decoder::write_kv(const KvnStep& step, int number) {
  const Layer& layer = model.layers[number];
  norm(work_.hidden, layer.attention_norm, step.num_rows);
  multiply(work_.normed, layer.qkv, Epilogue::kStore, work_.qkv, step.num_rows);
  const bool normed = layer.vectors_set[KVN_QUERY_NORM];
  RopeCall call{};
  call.qkv = work_.qkv;
  call.queries = work_.queries;
  call.layer = static_cast<char*>(step.pool) + number * model.layer_bytes();
  call.blocks = plan_.blocks.data();
  call.positions = plan_.positions.data();
  call.cos = model.cos;
  call.sin = model.sin;
  call.query_norm = normed ? layer.query_norm : nullptr;
  call.key_norm = normed ? layer.key_norm : nullptr;
  call.block_bytes = model.block_bytes();
  call.num_heads = model.spec.num_heads;
  call.num_kv_heads = model.spec.num_kv_heads;
  call.head_dim = model.spec.head_dim;
  call.eps = model.spec.rms_norm_eps;
  threads_.run(ceil_div(step.num_rows, kRowsARun), Sharing::kContiguous, [&](int64_t item, int) {
    model.kernels.rope(call, item * kRowsARun, std::min<int64_t>(step.num_rows, (item + 1) * kRowsARun));
  });
}

void Decoder::attend(const KvnStep& step, int number, const std::vector<Segment>& segments, float* hidden,
                     int64_t rows) {
  AttentionCall call{};
  call.queries = work_.queries;
  call.out = work_.attended;
  call.layer = static_cast<const char*>(step.pool) + number * model.layer_bytes();
  call.block_bytes = model.block_bytes();
  call.num_heads = model.spec.num_heads;
  call.num_kv_heads = model.spec.num_kv_heads;
  call.head_dim = model.spec.head_dim;
  call.scale_log2e = model.spec.attention_scale * 0x1.715476p+0f;
  attention_.run(call, segments);
  multiply(work_.attended, model.layers[number].output, Epilogue::kAdd, hidden, rows);
}

void Decoder::run_mlp(const Layer& layer, float* hidden, int64_t rows) {
  norm(hidden, layer.mlp_norm, rows);
  multiply(work_.normed, layer.gate_up, Epilogue::kSiluMultiply, work_.inner, rows);
  multiply(work_.inner, layer.down, Epilogue::kAdd, hidden, rows);
}

void Decoder::pick_selected(const KvnStep& step) {
  const int64_t hidden = model.spec.hidden_size;
  for (int64_t i = 0; i < step.num_selected; ++i) {
    memcpy(work_.selected + i * hidden, work_.hidden + step.selected[i] * hidden, hidden * sizeof(float));
  }
}

void Decoder::write_logits(const KvnStep& step) {
  if (step.num_selected == 0) return;
  norm(work_.selected, model.final_norm, step.num_selected);
  multiply(work_.normed, model.head, Epilogue::kStore, step.logits, step.num_selected);
}

void Decoder::norm(const float* x, const float* weight, int64_t rows) {
  const int64_t size = model.spec.hidden_size, row_bytes = size * model.kernels.act_bytes;
  threads_.run(ceil_div(rows, kRowsARun), Sharing::kContiguous, [&](int64_t item, int) {
    const int64_t row = item * kRowsARun, count = std::min(kRowsARun, rows - row);
    char* out = work_.normed + row * row_bytes;
    model.kernels.rms_norm(x + row * size, weight, out, count, size, model.spec.rms_norm_eps);
  });
}

void Decoder::multiply(const void* x, const PackedMatrix& weights, Epilogue epilogue, void* out, int64_t rows) {
  LinearCall call{};
  call.x = x;
  call.panels = weights.panels;
  call.scales = weights.scales;
  call.bias = weights.has_bias ? weights.bias : nullptr;
  call.out = out;
  call.rows = rows;
  call.depth = weights.depth;
  call.outputs = weights.outputs;
  call.epilogue = epilogue;
  const int64_t num_panels = weights.num_panels(), num_row_blocks = ceil_div(rows, kRowBlock);
  const int64_t panels_an_item = std::max<int64_t>(1, num_panels / (kPanelShares * threads_.num_threads()));
  const int64_t num_shares = ceil_div(num_panels, panels_an_item);
  // row blocks outermost: a thread keeps its rows near and walks the panels, which all threads read
  threads_.run(num_row_blocks * num_shares, Sharing::kContiguous, [&](int64_t item, int thread) {
    const int64_t row = item / num_shares * kRowBlock, row_end = std::min(rows, row + kRowBlock);
    const int64_t panel = item % num_shares * panels_an_item, panel_end = std::min(num_panels, panel + panels_an_item);
    model.kernels.linear(call, row, row_end, panel, panel_end, panels_.data() + thread * panel_room_);
  });
}

}  // namespace kvn
