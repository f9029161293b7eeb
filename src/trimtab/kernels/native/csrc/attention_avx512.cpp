// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl.
#include <immintrin.h>

#include "attention_tile.hpp"

// Tests build this file without the instructions, against the same names written in plain C++.
#ifdef TRIMTAB_EMULATED_AVX512
#include TRIMTAB_EMULATED_AVX512
#endif

namespace trimtab {
namespace {

struct Avx512 {
  using Vector = __m512;
  static constexpr int64_t kWidth = 16;
  static constexpr int kRows = 5;
  static Vector zero() { return _mm512_set1_ps(0.0f); }
  static Vector broadcast(float value) { return _mm512_set1_ps(value); }
  static Vector load(const float* at) { return _mm512_loadu_ps(at); }
  static Vector load(const uint16_t* at) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  static void store(float* at, Vector value) { _mm512_storeu_ps(at, value); }
  static Vector multiply_add(Vector sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
};

}  // namespace

extern const AttentionKernel kAvx512AttentionFp32;
extern const AttentionKernel kAvx512AttentionBf16;
const AttentionKernel kAvx512AttentionFp32 = attend_tile<Avx512, float>;
const AttentionKernel kAvx512AttentionBf16 = attend_tile<Avx512, uint16_t>;

}  // namespace trimtab
