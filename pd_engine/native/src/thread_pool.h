// A fixed number of threads that share the items of one run after another.
//
// A forward pass is some two hundred short runs, so threads spin for the next one, a few tens of microseconds, before
// they sleep. A run never waits for a thread that has not come to it: the caller does that thread's items itself, so
// a thread that lost its core to another process costs its share and not the whole step.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace kvn {

// kContiguous: each thread begins with a share of neighbouring items, and then helps with what is left of the others'.
// kOneByOne:   threads take items as they come, in rising order: for items of unequal size, costliest first.
enum class Sharing { kContiguous, kOneByOne };

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);  // the caller is one of them
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls fn(item, thread) once for every item 0 .. num_items - 1, 0 <= thread < num_threads; returns when all are
  // done. fn must not throw.
  template <class Fn>
  void run(int64_t num_items, Sharing sharing, const Fn& fn) {
    if (num_items <= 1 || num_threads_ == 1) {
      for (int64_t item = 0; item < num_items; ++item) fn(item, 0);
      return;
    }
    const Call call = [](const void* f, int64_t item, int thread) { (*static_cast<const Fn*>(f))(item, thread); };
    run_shared(num_items, sharing, call, &fn);
  }

 private:
  using Call = void (*)(const void* fn, int64_t item, int thread);

  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  void run_shared(int64_t num_items, Sharing sharing, Call call, const void* fn);
  void work(int thread);
  void serve(int thread);
  uint64_t wait_for_run(uint64_t seen);

  const int num_threads_;
  std::unique_ptr<Share[]> shares_;
  Call call_ = nullptr;
  const void* fn_ = nullptr;

  // number of the run << 32 | kOpen | threads inside it: a thread enters by counting itself in while the run is open
  static constexpr uint64_t kOpen = uint64_t{1} << 31;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> num_asleep_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

}  // namespace kvn
