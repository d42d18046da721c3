// Shares a step's attention out over the threads.
#pragma once

#include <vector>

#include "kernels.h"
#include "memory.h"
#include "step_plan.h"
#include "thread_pool.h"

namespace kvn {

class Attention {
 public:
  Attention(const KernelSet& kernels, ThreadPool& threads, int group, int head_dim);

  void run(const AttentionCall& call, const std::vector<Segment>& segments);

 private:
  // One item's splits computed apart: items first .. first + count - 1; their states lie one after the other.
  struct Divided {
    AttentionItem whole;
    int64_t offset;  // of its states in partials_, in floats
    int count;
  };

  void plan(const AttentionCall& call, const std::vector<Segment>& segments);
  void divide(const AttentionCall& call);
  int64_t queries(const AttentionItem& item) const { return int64_t{item.num_kv_heads} * item.num_rows * group_; }

  const KernelSet& kernels_;
  ThreadPool& threads_;
  const int group_;
  const int rows_an_item_;
  const int64_t scratch_floats_;
  HugeMemory scratch_;
  HugeMemory partials_;
  std::vector<AttentionItem> items_;
  std::vector<AttentionItem> whole_;
  std::vector<Divided> divided_;
};

}  // namespace kvn
