// What a variant provides: a table of kernels. The rest of the library is built for any x86-64 and calls through it.
#pragma once

#include <stdint.h>

namespace kvn {

constexpr int kLanes = 16;         // floats a kernel handles at once, in one register or in two
constexpr int kBlockTokens = 16;   // tokens of a KV block
constexpr int kStepBytes = 64;     // 16 lanes of 4 bytes
constexpr int kPanelOutputs = 32;  // outputs that stand side by side in packed weights
constexpr int kTileKeys = 64;      // keys that share one softmax update; tiles stand at multiples of it
constexpr int kTileBlocks = kTileKeys / kBlockTokens;
constexpr int kSplitKeys = 512;  // keys after which partial results are merged, at multiples of it
constexpr int kMaxHeadDim = 256;
constexpr int kMaxItemQueries = 256;  // rows times heads in one attention item

enum class Epilogue { kStore, kAdd, kSiluMultiply };

// out = x * panels^T (* scales) (+ bias); x: [rows, depth] activations
//   kStore:        out float  [rows, outputs] = result
//   kAdd:          out float  [rows, outputs] += result
//   kSiluMultiply: out activations [rows, outputs / 2] = silu(first 16 of a panel) * (last 16 of it)
// panels: [outputs / 32, rounded up][depth / pack][32][pack], zero behind the last output; or, of 8-bit weights, as
//         `pack_int8` makes them. scales, bias: [outputs, rounded up]
struct LinearCall {
  const void* x;
  const char* panels;
  const float* scales;  // of 8-bit weights; null: the panels are in the model's dtype
  const float* bias;  // or null
  void* out;
  int64_t rows;
  int64_t depth;
  int64_t outputs;
  Epilogue epilogue;
};

struct RopeCall {
  const float* qkv;         // [rows, num_heads + 2 * num_kv_heads, head_dim]
  void* queries;            // [rows, num_heads, head_dim] activations, written
  char* layer;              // the layer's part of block 0
  const int32_t* blocks;    // [rows] the block of each row
  const int32_t* positions; // [rows]
  const float* cos;         // [positions, head_dim / 2]
  const float* sin;
  const float* query_norm;  // [head_dim] or null
  const float* key_norm;
  int64_t block_bytes;
  int num_heads;
  int num_kv_heads;
  int head_dim;
  float eps;
};

// KV of a head in a block, all in steps of 64 bytes:  K [head_dim / pack][16 tokens][pack]
//                                                     V [16 tokens / pack][head_dim][pack]
struct AttentionCall {
  const void* queries;  // [rows, num_heads, head_dim] activations
  void* out;            // [rows, num_heads, head_dim] activations
  const char* layer;    // the layer's part of block 0
  int64_t block_bytes;
  int num_heads;
  int num_kv_heads;
  int head_dim;
  float scale_log2e;  // scale of the scores, times log2(e)
};

// Some rows of one sequence, with one KV head or several neighbouring ones, whose KV lies side by side in a block.
// Its queries, and their states, are numbered [KV head][row][head of the group].
struct AttentionItem {
  const int32_t* table;
  int64_t query_row;  // rows query_row .. query_row + num_rows - 1 of queries
  int64_t out_row;    // and where their results go
  int num_rows;
  int start;  // position of the first row; row i sees keys 0 .. start + i
  int first_kv_head;
  int num_kv_heads;
  int first_split;  // splits first_split .. end_split - 1
  int end_split;
  float* partial;  // null, or where the softmax states go instead of results: one split, to be merged later
};

// A softmax on its way, for one row and one head: highest score, 16 sums of weights, weighted sum of V.
constexpr int kStateHighest = 0;
constexpr int kStateSums = 16;
constexpr int kStateValues = 32;
static constexpr int64_t state_floats(int head_dim) { return kStateValues + head_dim; }

struct KernelSet {
  const char* variant;
  int32_t dtype;  // KvnDType
  int act_bytes;
  int pack;


  // scratch: room for one panel in float32, [depth, 32]
  void (*linear)(const LinearCall& call, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end,
                 char* scratch);
  // Writes one output's 8-bit weights, -127 .. 127, to their places in a panel.
  void (*pack_int8)(const int8_t* row, int64_t depth, int output_in_panel, char* panel);
  // out[r] = x[r] / rms(x[r]) * weight, as activations; x float [rows, size]
  void (*rms_norm)(const float* x, const float* weight, void* out, int64_t rows, int64_t size, float eps);
  void (*embed)(const void* stored, float* out, int64_t size);
  // rotates queries and keys, writes K and V into the pool
  void (*rope)(const RopeCall& call, int64_t row_begin, int64_t row_end);
  // scratch: 2 softmax states for each query of the item
  void (*attend)(const AttentionCall& call, const AttentionItem& item, float* scratch);
  // partials: those of the item's splits, one after the other; merged in order into the results
  void (*merge)(const AttentionCall& call, const AttentionItem& item, float* partials, int num_splits);
};

}  // namespace kvn
