#include "memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace kvn {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;

uintptr_t round_up(uintptr_t address) { return (address + kHugePage - 1) & ~(kHugePage - 1); }

}  // namespace

bool advise_huge_pages(void* begin, size_t bytes) {
  const uintptr_t first = round_up(reinterpret_cast<uintptr_t>(begin));
  const uintptr_t end = (reinterpret_cast<uintptr_t>(begin) + bytes) & ~(kHugePage - 1);
  if (first >= end) return true;  // smaller than a huge page: nothing to ask for
  return madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE) == 0;
}

HugeMemory::HugeMemory(size_t bytes) : mapped_bytes_(bytes + kHugePage), bytes_(bytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* mapped = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  mapped_ = static_cast<char*>(mapped);
  data_ = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(mapped_)));
  advise_huge_pages(data_, bytes_ / kHugePage * kHugePage);
}

HugeMemory::~HugeMemory() {
  if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
}

HugeMemory::HugeMemory(HugeMemory&& other) noexcept { *this = std::move(other); }

HugeMemory& HugeMemory::operator=(HugeMemory&& other) noexcept {
  std::swap(mapped_, other.mapped_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace kvn
