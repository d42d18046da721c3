// bfloat16 by the processor's own dot product of pairs.
#define KVN_SIMD "simd_avx512.h"

namespace {
constexpr int kLinearRows = 12;  // 24 sums, 2 weights and an input in 32 registers
constexpr int kWidenTiles = 0;
constexpr int kStreamingRows = 5;
constexpr int kAttentionRows = 6;  // 24 scores, or 24 columns of values
constexpr int kScoreBlocks = 4;
constexpr int kValueColumns = 4;
}  // namespace

#include "kernels.inc"

namespace kvn {
extern const KernelSet kAvx512PairDot;
const KernelSet kAvx512PairDot = kernel_set<PairDotBf16>("avx512-bf16", 1);
}  // namespace kvn
