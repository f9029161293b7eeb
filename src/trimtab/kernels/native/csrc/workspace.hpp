// Scratch memory of the calling thread, kept between calls: a fresh 32 MiB per call costs milliseconds of page faults.
// Calls on different threads share nothing. Bounded because run_moe cuts long batches into chunks.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace trimtab {

class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { std::free(memory_); }

  static Workspace& of_this_thread() {
    thread_local Workspace workspace;
    return workspace;
  }

  // Starts a call that will take at most `bytes` (each part rounded up to a cache line).
  void begin(int64_t bytes) {
    used_ = 0;
    if (bytes <= capacity_) return;
    std::free(memory_);
    memory_ = nullptr;
    capacity_ = 0;
    memory_ = static_cast<char*>(std::aligned_alloc(kAlignment, rounded(bytes)));
    if (!memory_) throw std::bad_alloc();
    capacity_ = rounded(bytes);
  }

  template <class T>
  T* take(int64_t count) {
    T* part = reinterpret_cast<T*>(memory_ + used_);
    used_ += rounded(count * static_cast<int64_t>(sizeof(T)));
    if (used_ > capacity_) std::abort();  // the call's own sizes disagree: writing on would corrupt memory
    return part;
  }

  static int64_t rounded(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

 private:
  static constexpr int64_t kAlignment = 64;
  char* memory_ = nullptr;
  int64_t capacity_ = 0;
  int64_t used_ = 0;
};

}  // namespace trimtab
