// The C interface of the library: what Python calls through ctypes. Everything else is internal.
//
// Every function that can fail returns a KvnStatus and, unless that is KVN_OK, writes a sentence into `error`
// (`error_size` bytes, always terminated). No exception leaves the library. Structs hold plain numbers and pointers;
// the caller keeps what they point to alive for the length of the call, or for longer where a comment says so.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define KVN_API __attribute__((visibility("default")))

extern "C" {

// Raised whenever a struct or a function below changes; Python refuses a library of another version.
enum { KVN_ABI_VERSION = 2 };

enum KvnStatus { KVN_OK = 0, KVN_CANCELLED = 1, KVN_INVALID = 2, KVN_FAILED = 3 };

enum KvnDType { KVN_FLOAT32 = 0, KVN_BFLOAT16 = 1 };

// What matrices are kept in. KVN_INT8: whole numbers from -127 to 127 and a scale for each row; activations, embedding
// and KV stay in the dtype.
enum KvnWeights { KVN_IN_DTYPE = 0, KVN_INT8 = 1 };

// Matrices of a layer, each [out, in]; the head belongs to no layer.
enum KvnMatrix {
  KVN_QKV = 0,      // q, k and v one below the other
  KVN_OUTPUT = 1,   // attention's output
  KVN_GATE_UP = 2,  // gate above up
  KVN_DOWN = 3,
  KVN_HEAD = 4,
};

// Vectors, float32. Norms are necessary; the others are optional.
enum KvnVector {
  KVN_ATTENTION_NORM = 0,  // [hidden]
  KVN_MLP_NORM = 1,        // [hidden]
  KVN_FINAL_NORM = 2,      // [hidden], belongs to no layer
  KVN_QUERY_NORM = 3,      // [head_dim]
  KVN_KEY_NORM = 4,        // [head_dim]
};

struct KvnSpec {
  int32_t num_layers;
  int32_t hidden_size;
  int32_t intermediate_size;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t vocab_size;
  int32_t context_tokens;
  int32_t dtype;    // KvnDType of matrices, embedding and KV
  int32_t weights;  // KvnWeights of the matrices
  float rms_norm_eps;
  float attention_scale;
};

// Asked between layers; anything but 0 stops the step.
typedef int32_t (*KvnShouldStop)(void);

// One step. Row r of sequence s, row_bounds[s] <= r < row_bounds[s + 1], stands at position
// starts[s] + r - row_bounds[s].
struct KvnStep {
  int32_t num_rows;
  int32_t num_sequences;
  int32_t num_selected;
  int32_t num_blocks;           // blocks of the pool
  const int32_t* ids;           // [num_rows]
  const int32_t* row_bounds;    // [num_sequences + 1], from 0 to num_rows
  const int32_t* starts;        // [num_sequences]
  const int32_t* tables;        // block tables, one after the other
  const int32_t* table_bounds;  // [num_sequences + 1] where each begins in `tables`
  const int32_t* selected;      // [num_selected] rows whose logits are wanted
  float* logits;                // [num_selected, vocab_size], written
  void* pool;                   // [num_blocks] blocks, read and written
  int64_t pool_bytes;
  KvnShouldStop should_stop;  // may be null
  int32_t stop_interval_us;   // least time between two questions; 0: before every layer
};

typedef struct KvnModel KvnModel;

KVN_API int32_t kvn_abi_version(void);

// Name of variant `index`, best first; null behind the last. `dtype` leaves out variants that have no kernels for it.
KVN_API const char* kvn_variant(int32_t dtype, int32_t index);
// Whether this processor and its operating system can run the variant.
KVN_API int32_t kvn_variant_runs_here(const char* variant);

KVN_API int32_t kvn_create(const KvnSpec* spec, const char* variant, int32_t num_threads, KvnModel** model, char* error,
                           size_t error_size);
KVN_API void kvn_destroy(KvnModel* model);

// Packs `rows` rows of a matrix, from row `first_row` on; copied.
// data: [rows, cols] in the model's dtype and `scales` null; or, with KVN_INT8, int8_t [rows, cols] and `scales` [rows]
KVN_API int32_t kvn_set_matrix(KvnModel* model, int32_t matrix, int32_t layer, int64_t first_row, const void* data,
                               const float* scales, int64_t rows, int64_t cols, char* error, size_t error_size);
// Optional bias of rows first_row .. first_row + rows - 1 of a matrix; copied.
KVN_API int32_t kvn_set_bias(KvnModel* model, int32_t matrix, int32_t layer, int64_t first_row, const float* data,
                             int64_t rows, char* error, size_t error_size);
KVN_API int32_t kvn_set_vector(KvnModel* model, int32_t vector, int32_t layer, const float* data, int64_t size,
                               char* error, size_t error_size);
// Tables that are not copied: they must live as long as the model.
// embedding: [vocab, hidden] in the model's dtype; cos, sin: [context_tokens, head_dim / 2]
KVN_API int32_t kvn_set_tables(KvnModel* model, const void* embedding, const float* cos, const float* sin, char* error,
                               size_t error_size);

// Runs a step: writes KV, then the logits. One caller at a time: a second one gets KVN_INVALID.
KVN_API int32_t kvn_forward(KvnModel* model, const KvnStep* step, char* error, size_t error_size);

// Asks the system for huge pages behind [begin, begin + bytes), best before its first use; 0 when it agreed.
KVN_API int32_t kvn_advise_huge_pages(void* begin, int64_t bytes);

}  // extern "C"
