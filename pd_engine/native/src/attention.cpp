#include "attention.h"

#include <algorithm>

namespace kvn {

namespace {

constexpr int kQueriesAnItem = 96;   // as many rows times heads as share one reading of a tile; no part of the bits
constexpr int kItemsAThread = 4;     // with fewer, long items are divided, so that no thread stands idle

int num_keys(const AttentionItem& item) { return item.start + item.num_rows; }

// What an item costs, in rows times keys times KV heads.
int64_t cost(const AttentionItem& item) {
  const int64_t keys = std::min(num_keys(item), item.end_split * kSplitKeys) - item.first_split * kSplitKeys;
  return keys * item.num_rows * item.num_kv_heads;
}

}  // namespace

Attention::Attention(const KernelSet& kernels, ThreadPool& threads, int group, int head_dim)
    : kernels_(kernels),
      threads_(threads),
      group_(group),
      rows_an_item_(std::max(1, kQueriesAnItem / group)),
      scratch_floats_(2 * std::max<int64_t>(kQueriesAnItem, rows_an_item_ * group) * state_floats(head_dim) + kLanes),
      scratch_(static_cast<size_t>(scratch_floats_) * sizeof(float) * threads.num_threads()) {}

void Attention::run(const AttentionCall& call, const std::vector<Segment>& segments) {
  plan(call, segments);
  std::stable_sort(items_.begin(), items_.end(), [](const auto& a, const auto& b) { return cost(a) > cost(b); });
  float* scratch = reinterpret_cast<float*>(scratch_.data());
  // costliest first, so that threads end together
  threads_.run(static_cast<int64_t>(items_.size()), Sharing::kOneByOne, [&](int64_t item, int thread) {
    kernels_.attend(call, items_[item], scratch + thread * scratch_floats_);
  });
  float* partials = reinterpret_cast<float*>(partials_.data());
  threads_.run(static_cast<int64_t>(divided_.size()), Sharing::kOneByOne, [&](int64_t i, int) {
    kernels_.merge(call, divided_[i].whole, partials + divided_[i].offset, divided_[i].count);
  });
}

void Attention::plan(const AttentionCall& call, const std::vector<Segment>& segments) {
  items_.clear();
  divided_.clear();
  const size_t enough = static_cast<size_t>(threads_.num_threads()) * kItemsAThread;
  const bool all_heads = threads_.num_threads() == 1 || segments.size() >= enough;
  for (const Segment& segment : segments) {
    for (int row = 0; row < segment.num_rows; row += rows_an_item_) {
      AttentionItem item{};
      item.table = segment.table;
      item.query_row = segment.query_row + row;
      item.out_row = segment.out_row + row;
      item.num_rows = std::min(rows_an_item_, segment.num_rows - row);
      item.start = segment.start + row;
      item.end_split = (num_keys(item) + kSplitKeys - 1) / kSplitKeys;
      // the KV of all heads of a block is one piece: with few rows, reading it as one is what counts
      const bool as_one = all_heads && item.num_rows * call.num_heads <= kQueriesAnItem;
      item.num_kv_heads = as_one ? call.num_kv_heads : 1;
      for (; item.first_kv_head < call.num_kv_heads; item.first_kv_head += item.num_kv_heads) items_.push_back(item);
    }
  }
  if (threads_.num_threads() > 1 && items_.size() < enough) divide(call);
}

void Attention::divide(const AttentionCall& call) {
  whole_.swap(items_);
  items_.clear();
  const int64_t floats = state_floats(call.head_dim);
  int64_t offset = 0;
  for (const AttentionItem& item : whole_) {
    if (item.end_split == 1) {
      items_.push_back(item);
      continue;
    }
    divided_.push_back({item, offset, item.end_split});
    offset += item.end_split * queries(item) * floats;
  }
  if (partials_.bytes() < static_cast<size_t>(offset) * sizeof(float)) {
    partials_ = HugeMemory(static_cast<size_t>(offset) * sizeof(float));
  }
  float* partials = reinterpret_cast<float*>(partials_.data());
  for (const Divided& divided : divided_) {
    AttentionItem part = divided.whole;
    for (int split = 0; split < divided.count; ++split) {
      part.first_split = split;
      part.end_split = split + 1;
      part.partial = partials + divided.offset + split * queries(part) * floats;
      items_.push_back(part);
    }
  }
}

}  // namespace kvn
