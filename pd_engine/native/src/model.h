// Sizes and weights of a model, packed for its kernels.
#pragma once

#include <stdint.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "api.h"
#include "kernels.h"
#include "memory.h"

namespace kvn {

// What the caller got wrong; the message is for whoever made the call.
struct InvalidCall : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A weight matrix [outputs, depth] in panels; see LinearCall.
struct PackedMatrix {
  char* panels = nullptr;
  float* scales = nullptr;  // of 8-bit weights; else null
  float* bias = nullptr;  // room for one; used when `has_bias`
  int64_t outputs = 0;
  int64_t depth = 0;
  bool has_bias = false;
  std::vector<bool> rows_set;

  int64_t num_panels() const { return (outputs + kPanelOutputs - 1) / kPanelOutputs; }
};

struct Layer {
  PackedMatrix qkv, output, gate_up, down;
  float* attention_norm = nullptr;
  float* mlp_norm = nullptr;
  float* query_norm = nullptr;
  float* key_norm = nullptr;
  bool vectors_set[5] = {};  // by KvnVector
};

class Model {
 public:
  // Throws InvalidCall for sizes that the kernels cannot do, naming the size and its limit.
  Model(const KvnSpec& spec, const KernelSet& kernels);

  void set_matrix(int32_t matrix, int32_t layer, int64_t first_row, const void* data, const float* scales,
                  int64_t rows, int64_t cols);
  void set_bias(int32_t matrix, int32_t layer, int64_t first_row, const float* data, int64_t rows);
  void set_vector(int32_t vector, int32_t layer, const float* data, int64_t size);
  void set_tables(const void* embedding, const float* cos, const float* sin);
  // Throws InvalidCall naming what has not been set.
  void check_complete() const;

  int64_t stored_bytes() const { return spec.dtype == KVN_BFLOAT16 ? 2 : 4; }
  int64_t weight_bytes() const { return int8_weights() ? 1 : stored_bytes(); }
  bool int8_weights() const { return spec.weights == KVN_INT8; }
  int64_t most_depth() const;  // of any matrix
  int64_t qkv_size() const { return static_cast<int64_t>(spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim; }
  int64_t heads_size() const { return static_cast<int64_t>(spec.num_heads) * spec.head_dim; }
  int64_t layer_bytes() const;  // of one block
  int64_t block_bytes() const { return layer_bytes() * spec.num_layers; }

  const KvnSpec spec;
  const KernelSet& kernels;
  std::vector<Layer> layers;
  PackedMatrix head;
  float* final_norm = nullptr;
  const void* embedding = nullptr;
  const float* cos = nullptr;
  const float* sin = nullptr;

 private:
  void pack_row(const void* row, PackedMatrix& packed, int64_t place);
  PackedMatrix& matrix_at(int32_t matrix, int32_t layer);
  Layer& layer_at(int32_t layer);
  template <class Visit>
  void for_each_piece(const Visit& visit);

  HugeMemory memory_;
  bool final_norm_set_ = false;
};

}  // namespace kvn
