// The same arithmetic as variant_avx512.cpp, in registers of half the width.
#define KVN_SIMD "simd_avx2.h"

namespace {
constexpr int kLinearRows = 3;  // 12 sums, and what is left of 16 registers
constexpr int kWidenTiles = 6;  // widening costs registers: so many tiles make up for writing a panel in float32 first
constexpr int kStreamingRows = 2;
constexpr int kAttentionRows = 3;
constexpr int kScoreBlocks = 2;
constexpr int kValueColumns = 2;
}  // namespace

#include "kernels.inc"

namespace kvn {
extern const KernelSet kAvx2Float32;
extern const KernelSet kAvx2Widened;
const KernelSet kAvx2Float32 = kernel_set<Float32>("avx2", 0);
const KernelSet kAvx2Widened = kernel_set<WidenedBf16>("avx2", 1);
}  // namespace kvn
