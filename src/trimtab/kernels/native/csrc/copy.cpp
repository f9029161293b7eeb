// A copy that leaves the caches to others: an expert's bytes are read once, when they move, and not again soon.
//
// Stores go past the caches and need not read the target's lines first. 5.3 MB on Zen 3: 0.6 -> 0.3 ms where the
// source is in cache, 0.95 -> 0.7 ms where it is not.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define TRIMTAB_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t kVector = 32;
constexpr int64_t kLine = 2 * kVector;

}  // namespace

// Both may lie anywhere, without overlap. What is written is seen by other threads and processes in the order of writes.
TRIMTAB_API void trimtab_copy_past_caches(const void* source, void* target, int64_t bytes) {
  const char* from = static_cast<const char*>(source);
  char* to = static_cast<char*>(target);
  const int64_t to_line = -reinterpret_cast<intptr_t>(to) & (kLine - 1);
  const int64_t head = to_line < bytes ? to_line : bytes;
  std::memcpy(to, from, head);
  int64_t at = head;
  for (; at + kLine <= bytes; at += kLine) {  // whole lines, so that each is written at once
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at + kVector));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at), first);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at + kVector), second);
  }
  std::memcpy(to + at, from + at, bytes - at);
  _mm_sfence();  // streaming stores are not ordered with the others
}
