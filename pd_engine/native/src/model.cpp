#include "model.h"

#include <string.h>

#include <algorithm>

namespace kvn {

namespace {

const char* const kMatrixNames[] = {"qkv", "output", "gate_up", "down", "head"};
const char* const kVectorNames[] = {"attention_norm", "mlp_norm", "final_norm", "query_norm", "key_norm"};

void require(bool met, const std::string& sentence) {
  if (!met) throw InvalidCall(sentence);
}

void require_multiple(const char* name, int32_t value, int32_t of, int32_t most) {
  require(value >= of && value <= most && value % of == 0,
          std::string(name) + " is " + std::to_string(value) + "; it must be a multiple of " + std::to_string(of) +
              " from " + std::to_string(of) + " to " + std::to_string(most));
}

void check_spec(const KvnSpec& spec) {
  constexpr int32_t kMost = 1 << 24;
  const bool known_dtype = spec.dtype == KVN_FLOAT32 || spec.dtype == KVN_BFLOAT16;
  require(known_dtype, "dtype " + std::to_string(spec.dtype) + " is unknown");
  const bool known_weights = spec.weights == KVN_IN_DTYPE || spec.weights == KVN_INT8;
  require(known_weights, "weights " + std::to_string(spec.weights) + " are unknown");
  require_multiple("num_layers", spec.num_layers, 1, 4096);
  require_multiple("hidden_size", spec.hidden_size, kLanes, kMost);
  require_multiple("intermediate_size", spec.intermediate_size, kLanes, kMost);
  require_multiple("head_dim", spec.head_dim, kLanes, kMaxHeadDim);
  require_multiple("num_heads", spec.num_heads, 1, 4096);
  require_multiple("num_kv_heads", spec.num_kv_heads, 1, 4096);
  require_multiple("vocab_size", spec.vocab_size, 1, kMost);
  require_multiple("context_tokens", spec.context_tokens, 1, kMost);
  require(spec.num_heads % spec.num_kv_heads == 0, "num_heads is no multiple of num_kv_heads");
  require(spec.num_heads / spec.num_kv_heads <= kMaxItemQueries,
          "more than " + std::to_string(kMaxItemQueries) + " heads share a KV head");
  require(spec.rms_norm_eps >= 0.0f, "rms_norm_eps is negative");
  require(spec.attention_scale > 0.0f, "attention_scale is not above 0");
}

// Where output `row` of a matrix stands: its panel and its place in it. Gate and up alternate, 16 by 16.
int64_t packed_row(const PackedMatrix& matrix, bool interleaved, int64_t row) {
  if (!interleaved) return row;
  const int64_t half = matrix.outputs / 2, in_half = row % half;
  return in_half / kLanes * kPanelOutputs + row / half * kLanes + in_half % kLanes;
}

template <class T>
void pack_steps(const T* row, int64_t depth, int pack, int in_panel, char* panel) {
  T* to = reinterpret_cast<T*>(panel) + in_panel * pack;
  for (int64_t step = 0; step < depth / pack; ++step) {
    memcpy(to + step * kPanelOutputs * pack, row + step * pack, pack * sizeof(T));
  }
}

std::string of_layer(const char* name, int64_t layer) {
  return std::string(name) + " of layer " + std::to_string(layer);
}

}  // namespace

Model::Model(const KvnSpec& given, const KernelSet& set) : spec(given), kernels(set) {
  check_spec(spec);
  layers.resize(spec.num_layers);
  size_t bytes = 0;
  for_each_piece([&](auto*& piece, int64_t count) { bytes += Pieces::size_of(piece, count); });
  memory_ = HugeMemory(bytes);
  Pieces pieces(memory_.data());
  for_each_piece([&](auto*& piece, int64_t count) { pieces.take(piece, count); });
}

// In the order in which a step reads them.
template <class Visit>
void Model::for_each_piece(const Visit& visit) {
  const auto matrix = [&](PackedMatrix& packed, int64_t outputs, int64_t depth) {
    packed.outputs = outputs;
    packed.depth = depth;
    packed.rows_set.resize(outputs);
    visit(packed.panels, packed.num_panels() * kPanelOutputs * depth * weight_bytes());
    if (int8_weights()) visit(packed.scales, packed.num_panels() * kPanelOutputs);
    visit(packed.bias, packed.num_panels() * kPanelOutputs);
  };
  for (Layer& layer : layers) {
    visit(layer.attention_norm, spec.hidden_size);
    matrix(layer.qkv, qkv_size(), spec.hidden_size);
    visit(layer.query_norm, spec.head_dim);
    visit(layer.key_norm, spec.head_dim);
    matrix(layer.output, spec.hidden_size, heads_size());
    visit(layer.mlp_norm, spec.hidden_size);
    matrix(layer.gate_up, int64_t{2} * spec.intermediate_size, spec.hidden_size);
    matrix(layer.down, spec.hidden_size, spec.intermediate_size);
  }
  visit(final_norm, spec.hidden_size);
  matrix(head, spec.vocab_size, spec.hidden_size);
}

int64_t Model::most_depth() const {
  return std::max({int64_t{spec.hidden_size}, int64_t{spec.intermediate_size}, heads_size()});
}

int64_t Model::layer_bytes() const {
  return int64_t{2} * spec.num_kv_heads * kBlockTokens * spec.head_dim * stored_bytes();
}

Layer& Model::layer_at(int32_t layer) {
  require(layer >= 0 && layer < spec.num_layers, "there is no layer " + std::to_string(layer));
  return layers[layer];
}

PackedMatrix& Model::matrix_at(int32_t matrix, int32_t layer) {
  switch (matrix) {
    case KVN_QKV: return layer_at(layer).qkv;
    case KVN_OUTPUT: return layer_at(layer).output;
    case KVN_GATE_UP: return layer_at(layer).gate_up;
    case KVN_DOWN: return layer_at(layer).down;
    case KVN_HEAD: return head;
    default: throw InvalidCall("there is no matrix " + std::to_string(matrix));
  }
}

void Model::set_matrix(int32_t matrix, int32_t layer, int64_t first_row, const void* data, const float* scales,
                       int64_t rows, int64_t cols) {
  PackedMatrix& packed = matrix_at(matrix, layer);
  require(data != nullptr && cols == packed.depth && first_row >= 0 && rows >= 1 && rows <= packed.outputs - first_row,
          std::string(kMatrixNames[matrix]) + " is [" + std::to_string(packed.outputs) + ", " +
              std::to_string(packed.depth) + "]; rows " + std::to_string(first_row) + " to " +
              std::to_string(first_row + rows) + " of " + std::to_string(cols) + " columns do not fit");
  require((scales != nullptr) == int8_weights(),
          std::string(kMatrixNames[matrix]) + (int8_weights() ? " has no scales" : " has scales and is not of 8 bits"));
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t place = packed_row(packed, matrix == KVN_GATE_UP, first_row + i);
    pack_row(static_cast<const char*>(data) + i * cols * weight_bytes(), packed, place);
    if (scales != nullptr) packed.scales[place] = scales[i];
    packed.rows_set[first_row + i] = true;
  }
}

void Model::pack_row(const void* row, PackedMatrix& packed, int64_t place) {
  const int in_panel = static_cast<int>(place % kPanelOutputs);
  char* panel = packed.panels + place / kPanelOutputs * kPanelOutputs * packed.depth * weight_bytes();
  if (int8_weights()) {
    kernels.pack_int8(static_cast<const int8_t*>(row), packed.depth, in_panel, panel);
  } else if (spec.dtype == KVN_BFLOAT16) {
    pack_steps(static_cast<const uint16_t*>(row), packed.depth, kernels.pack, in_panel, panel);
  } else {
    pack_steps(static_cast<const float*>(row), packed.depth, kernels.pack, in_panel, panel);
  }
}

void Model::set_bias(int32_t matrix, int32_t layer, int64_t first_row, const float* data, int64_t rows) {
  PackedMatrix& packed = matrix_at(matrix, layer);
  require(data != nullptr && first_row >= 0 && rows >= 1 && rows <= packed.outputs - first_row,
          std::string("a bias does not fit ") + kMatrixNames[matrix]);
  for (int64_t i = 0; i < rows; ++i) packed.bias[packed_row(packed, matrix == KVN_GATE_UP, first_row + i)] = data[i];
  packed.has_bias = true;  // rows without one have 0
}

void Model::set_vector(int32_t vector, int32_t layer, const float* data, int64_t size) {
  float* to = nullptr;
  int64_t expected = spec.hidden_size;
  switch (vector) {
    case KVN_ATTENTION_NORM: to = layer_at(layer).attention_norm; break;
    case KVN_MLP_NORM: to = layer_at(layer).mlp_norm; break;
    case KVN_FINAL_NORM: to = final_norm; break;
    case KVN_QUERY_NORM: to = layer_at(layer).query_norm; expected = spec.head_dim; break;
    case KVN_KEY_NORM: to = layer_at(layer).key_norm; expected = spec.head_dim; break;
    default: throw InvalidCall("there is no vector " + std::to_string(vector));
  }
  require(data != nullptr && size == expected,
          std::string(kVectorNames[vector]) + " has " + std::to_string(expected) + " numbers, not " +
              std::to_string(size));
  memcpy(to, data, static_cast<size_t>(size) * sizeof(float));
  if (vector == KVN_FINAL_NORM) {
    final_norm_set_ = true;
  } else {
    layer_at(layer).vectors_set[vector] = true;
  }
}

void Model::set_tables(const void* given_embedding, const float* given_cos, const float* given_sin) {
  require(given_embedding != nullptr && given_cos != nullptr && given_sin != nullptr, "a table is null");
  embedding = given_embedding;
  cos = given_cos;
  sin = given_sin;
}

void Model::check_complete() const {
  const auto all_set = [](const PackedMatrix& packed) {
    for (const bool set : packed.rows_set) {
      if (!set) return false;
    }
    return true;
  };
  for (size_t i = 0; i < layers.size(); ++i) {
    const Layer& layer = layers[i];
    const PackedMatrix* const matrices[] = {&layer.qkv, &layer.output, &layer.gate_up, &layer.down};
    for (int matrix = KVN_QKV; matrix <= KVN_DOWN; ++matrix) {
      require(all_set(*matrices[matrix]), of_layer(kMatrixNames[matrix], i) + " lacks rows");
    }
    for (const int vector : {KVN_ATTENTION_NORM, KVN_MLP_NORM}) {
      require(layer.vectors_set[vector], of_layer(kVectorNames[vector], i) + " is missing");
    }
    require(layer.vectors_set[KVN_QUERY_NORM] == layer.vectors_set[KVN_KEY_NORM],
            "layer " + std::to_string(i) + " has only one of query_norm and key_norm");
  }
  require(all_set(head), "head lacks rows");
  require(final_norm_set_, "final_norm is missing");
  require(embedding != nullptr, "the tables are missing");
}

}  // namespace kvn
