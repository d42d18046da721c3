#include "api.h"

#include <stdio.h>

#include <exception>
#include <memory>
#include <new>
#include <string>

#include "decoder.h"
#include "memory.h"
#include "variants.h"

struct KvnModel {
  kvn::Decoder decoder;
};

namespace {

constexpr int32_t kMaxThreads = 1024;

// Runs `body` and turns what it throws into a status and a sentence.
template <class Body>
int32_t guarded(char* error, size_t error_size, const Body& body) {
  const auto say = [&](const char* sentence) { snprintf(error, error_size, "%s", sentence); };
  try {
    return body();
  } catch (const kvn::InvalidCall& invalid) {
    say(invalid.what());
    return KVN_INVALID;
  } catch (const std::bad_alloc&) {
    say("out of memory");
  } catch (const std::exception& failure) {
    say(failure.what());
  }
  return KVN_FAILED;
}

}  // namespace

int32_t kvn_abi_version(void) { return KVN_ABI_VERSION; }

const char* kvn_variant(int32_t dtype, int32_t index) {
  const kvn::KernelSet* set = kvn::kernel_set_at(dtype, index);
  return set == nullptr ? nullptr : set->variant;
}

int32_t kvn_variant_runs_here(const char* variant) { return kvn::variant_runs_here(variant); }

int32_t kvn_create(const KvnSpec* spec, const char* variant, int32_t num_threads, KvnModel** model, char* error,
                   size_t error_size) {
  return guarded(error, error_size, [&]() -> int32_t {
    const kvn::KernelSet* set = kvn::kernel_set_named(variant, spec->dtype);
    if (set == nullptr) throw kvn::InvalidCall(std::string("there are no kernels ") + variant + " for this dtype");
    if (!kvn::variant_runs_here(variant)) {
      throw kvn::InvalidCall(std::string("this processor cannot run the kernels ") + variant);
    }
    if (num_threads < 1 || num_threads > kMaxThreads) {
      throw kvn::InvalidCall(std::to_string(num_threads) + " threads are not between 1 and " +
                             std::to_string(kMaxThreads));
    }
    *model = new KvnModel{kvn::Decoder(*spec, *set, num_threads)};
    return KVN_OK;
  });
}

void kvn_destroy(KvnModel* model) { delete model; }

int32_t kvn_set_matrix(KvnModel* model, int32_t matrix, int32_t layer, int64_t first_row, const void* data,
                       const float* scales, int64_t rows, int64_t cols, char* error, size_t error_size) {
  return guarded(error, error_size, [&]() -> int32_t {
    model->decoder.model.set_matrix(matrix, layer, first_row, data, scales, rows, cols);
    return KVN_OK;
  });
}

int32_t kvn_set_bias(KvnModel* model, int32_t matrix, int32_t layer, int64_t first_row, const float* data, int64_t rows,
                     char* error, size_t error_size) {
  return guarded(error, error_size, [&]() -> int32_t {
    model->decoder.model.set_bias(matrix, layer, first_row, data, rows);
    return KVN_OK;
  });
}

int32_t kvn_set_vector(KvnModel* model, int32_t vector, int32_t layer, const float* data, int64_t size, char* error,
                       size_t error_size) {
  return guarded(error, error_size, [&]() -> int32_t {
    model->decoder.model.set_vector(vector, layer, data, size);
    return KVN_OK;
  });
}

int32_t kvn_set_tables(KvnModel* model, const void* embedding, const float* cos, const float* sin, char* error,
                       size_t error_size) {
  return guarded(error, error_size, [&]() -> int32_t {
    model->decoder.model.set_tables(embedding, cos, sin);
    return KVN_OK;
  });
}

int32_t kvn_forward(KvnModel* model, const KvnStep* step, char* error, size_t error_size) {
  return guarded(error, error_size, [&]() -> int32_t {
    return model->decoder.forward(*step) ? KVN_OK : KVN_CANCELLED;
  });
}

int32_t kvn_advise_huge_pages(void* begin, int64_t bytes) {
  return kvn::advise_huge_pages(begin, static_cast<size_t>(bytes)) ? 0 : -1;
}
