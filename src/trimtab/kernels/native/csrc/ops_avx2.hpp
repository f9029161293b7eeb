// The three weight formats on AVX2 + FMA. Anonymous namespace: see types.hpp.
#pragma once

#include <immintrin.h>

#include "tile.hpp"

namespace trimtab {
namespace {

// Sixteen registers: sums, one register per weight vector, one activation. One row takes a whole step at once, which
// reads memory front to back; that some sums spill does not matter there.
constexpr int vectors_beside(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }

struct Avx2Float {
  using Rows = Fp32Rows;
  using Vector = __m256;
  using Weight = __m256;
  static constexpr int64_t kVectorBytes = 32;
  static Vector load(const float* at) { return _mm256_loadu_ps(at); }
  static void store(float* at, Vector value) { _mm256_storeu_ps(at, value); }
  // Into the sum's own register: left to itself the compiler puts sums wherever a weight was, copies them, and spills.
  static Vector multiply_add(Vector sum, __m256 activation, Weight weight) {
    asm("vfmadd231ps %1, %2, %0" : "+x"(sum) : "x"(weight), "x"(activation));
    return sum;
  }
  static constexpr int64_t kStripRows = 6;
  static void keep(char* at, Weight weight) { _mm256_store_ps(reinterpret_cast<float*>(at), weight); }
  static Weight kept(const char* at) { return _mm256_load_ps(reinterpret_cast<const float*>(at)); }
  static __m256 broadcast_word(const char* at) { return _mm256_broadcast_ss(reinterpret_cast<const float*>(at)); }
};

struct Avx2Fp32 : Avx2Float {
  static constexpr int kParts = 1;
  static constexpr int kMaxRows = 6;
  static constexpr int64_t kStripsFrom = 24;
  static constexpr int vectors_for(int rows) { return vectors_beside(rows); }
  static constexpr int64_t kRowElements = 1;
  template <int part>
  static Weight weights(const char* at) { return _mm256_loadu_ps(reinterpret_cast<const float*>(at)); }
  template <int part>
  static __m256 broadcast(const float* row, int64_t step) { return _mm256_broadcast_ss(row + step); }
};

// A bf16 is the upper half of an fp32: of a word holding two, a shift widens the first and a mask the second.
struct Avx2Bf16 : Avx2Float {
  static constexpr int kParts = 2;
  static constexpr int kMaxRows = 5;  // widening needs registers too: a sixth row would spill
  static constexpr int64_t kStripsFrom = 16;
  static constexpr int vectors_for(int rows) { return vectors_beside(rows); }
  static constexpr int64_t kRowElements = 2;
  template <int part>
  static Weight weights(const char* at) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    if constexpr (part == 0) return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  template <int part>
  static __m256 broadcast(const float* row, int64_t step) { return _mm256_broadcast_ss(row + 2 * step + part); }
};

// Bytes widen to int16 in registers and multiply in pairs into int32: exact, where the byte instruction (vpmaddubsw)
// would saturate its int16 pair sums.
struct Avx2Int8 {
  using Rows = Int16PairRows;
  using Vector = __m256i;
  using Weight = __m256i;
  static constexpr int64_t kVectorBytes = 32;
  static constexpr int kParts = 2;
  static constexpr int kMaxRows = 6;
  static constexpr int64_t kStripsFrom = 16;
  static constexpr int64_t kStripRows = 6;
  static constexpr int vectors_for(int rows) { return vectors_beside(rows); }
  static constexpr int64_t kRowElements = 4;
  static Vector load(const int32_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
  static void store(int32_t* at, Vector value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), value); }
  template <int part>
  static Weight weights(const char* at) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    if constexpr (part == 0) return _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
    return _mm256_srai_epi16(bytes, 8);
  }
  template <int part>
  static __m256i broadcast(const int16_t* row, int64_t step) {
    int32_t pair;
    __builtin_memcpy(&pair, row + 4 * step + 2 * part, sizeof pair);
    return _mm256_set1_epi32(pair);
  }
  // Together: the compiler would multiply ahead of adding, and spill the products.
  static Vector multiply_add(Vector sum, __m256i activation, Weight weight) {
    __m256i product;
    asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(weight), "x"(activation));
    return sum;
  }
  static void keep(char* at, Weight weight) { _mm256_store_si256(reinterpret_cast<__m256i*>(at), weight); }
  static Weight kept(const char* at) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(at)); }
  static __m256i broadcast_word(const char* at) {
    int32_t pair;
    __builtin_memcpy(&pair, at, sizeof pair);
    return _mm256_set1_epi32(pair);
  }
};

}  // namespace
}  // namespace trimtab
