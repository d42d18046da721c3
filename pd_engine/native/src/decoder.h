// Runs steps: all layers of a model over a paged KV pool.
#pragma once

#include <mutex>

#include "attention.h"
#include "memory.h"
#include "model.h"
#include "step_plan.h"
#include "thread_pool.h"

namespace kvn {

class Decoder {
 public:
  Decoder(const KvnSpec& spec, const KernelSet& kernels, int num_threads);

  // Throws InvalidCall (nothing was written) or std::bad_alloc; false when it was stopped between two layers.
  bool forward(const KvnStep& step);

  Model model;

 private:
  // What a step works on; rows are the step's, or, behind the last layer's KV, the selected ones.
  struct Workspace {
    float* hidden = nullptr;    // [rows, hidden_size]
    float* selected = nullptr;  // [selected rows, hidden_size]
    float* qkv = nullptr;       // [rows, qkv_size]
    char* normed = nullptr;     // activations [rows, hidden_size]
    char* queries = nullptr;    // activations [rows, heads_size]
    char* attended = nullptr;   // activations [rows, heads_size]
    char* inner = nullptr;      // activations [rows, intermediate_size]
  };

  void make_room(int64_t rows);
  template <class Visit>
  void for_each_piece(int64_t rows, const Visit& visit);
  bool run_layers(const KvnStep& step);
  void write_kv(const KvnStep& step, int layer);
  void attend(const KvnStep& step, int layer, const std::vector<Segment>& segments, float* hidden, int64_t rows);
  void run_mlp(const Layer& layer, float* hidden, int64_t rows);
  void pick_selected(const KvnStep& step);
  void write_logits(const KvnStep& step);

  void norm(const float* x, const float* weight, int64_t rows);
  void multiply(const void* x, const PackedMatrix& weights, Epilogue epilogue, void* out, int64_t rows);

  ThreadPool threads_;
  Attention attention_;
  const int64_t panel_room_;  // bytes of each thread's part of panels_
  HugeMemory panels_;
  StepPlan plan_;
  HugeMemory memory_;
  int64_t room_rows_ = 0;
  Workspace work_;
  std::mutex busy_;
  bool complete_ = false;
};

}  // namespace kvn
