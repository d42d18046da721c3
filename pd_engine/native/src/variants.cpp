#include "variants.h"

#include <string.h>

namespace kvn {

extern const KernelSet kAvx512PairDot;
extern const KernelSet kAvx512Float32;
extern const KernelSet kAvx512Widened;
extern const KernelSet kAvx2Float32;
extern const KernelSet kAvx2Widened;

namespace {

const KernelSet* const kAll[] = {&kAvx512PairDot, &kAvx512Float32, &kAvx512Widened, &kAvx2Float32, &kAvx2Widened};

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// Table look-ups of bytes too: they make 8-bit weights into bfloat16 as fast as memory gives them. All but one old kind
// of processor have both.
bool has_avx512bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}

}  // namespace

const KernelSet* kernel_set_at(int32_t dtype, int32_t index) {
  for (const KernelSet* set : kAll) {
    if (set->dtype == dtype && index-- == 0) return set;
  }
  return nullptr;
}

const KernelSet* kernel_set_named(const char* variant, int32_t dtype) {
  for (const KernelSet* set : kAll) {
    if (set->dtype == dtype && strcmp(set->variant, variant) == 0) return set;
  }
  return nullptr;
}

bool variant_runs_here(const char* variant) {
  __builtin_cpu_init();  // also looks whether the system saves the wide registers
  if (strcmp(variant, "avx512-bf16") == 0) return has_avx512bf16();
  if (strcmp(variant, "avx512") == 0) return has_avx512();
  if (strcmp(variant, "avx2") == 0) return has_avx2();
  return false;
}

}  // namespace kvn
