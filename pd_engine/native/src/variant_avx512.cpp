// All arithmetic in float32; bfloat16 is a way to store.
#define KVN_SIMD "simd_avx512.h"

namespace {
constexpr int kLinearRows = 12;
constexpr int kWidenTiles = 0;  // never: widening a step hides behind the products of 12 rows
constexpr int kStreamingRows = 2;
constexpr int kAttentionRows = 6;
constexpr int kScoreBlocks = 4;
constexpr int kValueColumns = 4;
}  // namespace

#include "kernels.inc"

namespace kvn {
extern const KernelSet kAvx512Float32;
extern const KernelSet kAvx512Widened;
const KernelSet kAvx512Float32 = kernel_set<Float32>("avx512", 0);
const KernelSet kAvx512Widened = kernel_set<WidenedBf16>("avx512", 1);
}  // namespace kvn
