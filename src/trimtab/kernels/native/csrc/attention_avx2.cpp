// Compiled with -mavx2 -mfma.
#include <immintrin.h>

#include "attention_tile.hpp"

namespace trimtab {
namespace {

struct Avx2 {
  using Vector = __m256;
  static constexpr int64_t kWidth = 8;
  static constexpr int kRows = 5;  // with two vectors each: ten sums, two keys, one query of sixteen registers
  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector broadcast(float value) { return _mm256_set1_ps(value); }
  static Vector load(const float* at) { return _mm256_loadu_ps(at); }
  static Vector load(const uint16_t* at) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  static void store(float* at, Vector value) { _mm256_storeu_ps(at, value); }
  static Vector multiply_add(Vector sum, Vector a, Vector b) { return _mm256_fmadd_ps(a, b, sum); }
};

}  // namespace

extern const AttentionKernel kAvx2AttentionFp32;
extern const AttentionKernel kAvx2AttentionBf16;
const AttentionKernel kAvx2AttentionFp32 = attend_tile<Avx2, float>;
const AttentionKernel kAvx2AttentionBf16 = attend_tile<Avx2, uint16_t>;

}  // namespace trimtab
