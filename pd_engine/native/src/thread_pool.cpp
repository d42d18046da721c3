#include "thread_pool.h"

#include <immintrin.h>

#include <algorithm>

namespace kvn {

namespace {

constexpr int kSpinsBeforeSleep = 3000;  // some 50 us: longer than any gap between two runs of a step
constexpr int kSpinsBeforeYield = 2000;

uint64_t run_of(uint64_t state) { return state >> 32; }

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads), shares_(new Share[num_threads]) {
  threads_.reserve(num_threads - 1);
  try {
    for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
  } catch (...) {
    stopping_ = true;
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
    for (std::thread& started : threads_) started.join();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  stopping_ = true;
  { std::lock_guard<std::mutex> lock(mutex_); }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run_shared(int64_t num_items, Sharing sharing, Call call, const void* fn) {
  const int num_shares = sharing == Sharing::kContiguous ? num_threads_ : 1;
  for (int i = 0; i < num_threads_; ++i) {
    // the shares behind the last one are empty
    shares_[i].next.store(num_items * std::min(i, num_shares) / num_shares, std::memory_order_relaxed);
    shares_[i].end = num_items * std::min(i + 1, num_shares) / num_shares;
  }
  call_ = call;
  fn_ = fn;
  const uint64_t run = run_of(state_.load()) + 1;
  state_.store(run << 32 | kOpen);
  if (num_asleep_.load() > 0) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  work(0);
  state_.fetch_and(~kOpen);
  for (int spins = 0; (state_.load() & (kOpen - 1)) != 0; ++spins) {
    if (spins < kSpinsBeforeYield) {
      _mm_pause();
    } else {
      std::this_thread::yield();  // the thread we wait for may need this core
    }
  }
}

void ThreadPool::work(int thread) {
  for (int i = 0; i < num_threads_; ++i) {
    Share& share = shares_[(thread + i) % num_threads_];
    for (;;) {
      const int64_t item = share.next.fetch_add(1, std::memory_order_relaxed);
      if (item >= share.end) break;
      call_(fn_, item, thread);
    }
  }
}

void ThreadPool::serve(int thread) {
  uint64_t seen = 0;
  for (;;) {
    uint64_t state = wait_for_run(seen);
    if (stopping_.load()) return;
    seen = run_of(state);
    bool entered = false;
    while (!entered && run_of(state) == seen && (state & kOpen) != 0) {
      entered = state_.compare_exchange_weak(state, state + 1);
    }
    if (!entered) continue;  // came too late: it was done without us
    work(thread);
    state_.fetch_sub(1);
  }
}

uint64_t ThreadPool::wait_for_run(uint64_t seen) {
  const auto called = [&] { return run_of(state_.load()) != seen || stopping_.load(); };
  for (int spins = 0; spins < kSpinsBeforeSleep; ++spins) {
    if (called()) return state_.load();
    _mm_pause();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  ++num_asleep_;
  wake_.wait(lock, called);
  --num_asleep_;
  return state_.load();
}

}  // namespace kvn
