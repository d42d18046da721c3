// The variants there are, and which of them this processor can run.
#pragma once

#include <stdint.h>

#include "kernels.h"

namespace kvn {

// Kernel sets for a dtype, best first; null behind the last.
const KernelSet* kernel_set_at(int32_t dtype, int32_t index);
// Null when there is none of this name for the dtype.
const KernelSet* kernel_set_named(const char* variant, int32_t dtype);
bool variant_runs_here(const char* variant);

}  // namespace kvn
