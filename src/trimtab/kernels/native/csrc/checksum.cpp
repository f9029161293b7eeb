// A 64-bit checksum, and a copy that computes it in the same pass over memory.
//
// Every 8-byte word is mixed with its own position by a bijection, and the mixed words are added: no word waits for
// another, a changed word always changes the sum, and words that changed places do too. The last word is padded with
// zeros; the length is mixed in at the end. trimtab.kernels.checksum computes the same value without this library.
#include <cstdint>
#include <cstring>

#define TRIMTAB_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr uint64_t kStep = 0x9E3779B97F4A7C15;
constexpr uint64_t kFirst = 0xBF58476D1CE4E5B9;
constexpr uint64_t kSecond = 0x94D049BB133111EB;
constexpr int64_t kWord = 8;

inline uint64_t mixed(uint64_t word, uint64_t key) {
  word = (word ^ key) * kFirst;
  word = (word ^ (word >> 32)) * kSecond;
  return word ^ (word >> 29);
}

template <bool copies>
uint64_t run(const char* source, char* target, int64_t bytes) {
  uint64_t sum = 0;
  uint64_t key = kStep;
  int64_t at = 0;
  for (; at + kWord <= bytes; at += kWord, key += kStep) {
    uint64_t word;
    std::memcpy(&word, source + at, kWord);
    if (copies) std::memcpy(target + at, &word, kWord);
    sum += mixed(word, key);
  }
  if (at < bytes) {
    uint64_t word = 0;
    std::memcpy(&word, source + at, bytes - at);
    if (copies) std::memcpy(target + at, &word, bytes - at);
    sum += mixed(word, key);
  }
  return mixed(sum, static_cast<uint64_t>(bytes));
}

}  // namespace

// `target` may be null: then nothing is copied. Both may lie anywhere, without overlap.
TRIMTAB_API uint64_t trimtab_checksum(const void* source, void* target, int64_t bytes) {
  const char* from = static_cast<const char*>(source);
  return target ? run<true>(from, static_cast<char*>(target), bytes) : run<false>(from, nullptr, bytes);
}
