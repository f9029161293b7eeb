// The three weight formats on AVX-512; a file that includes this sees the formats whose instructions it is compiled
// for. Anonymous namespace: see types.hpp.
#pragma once

#include "tile.hpp"

// Tests build this file without the instructions, against the same names written in plain C++.
#ifdef TRIMTAB_EMULATED_AVX512
#include TRIMTAB_EMULATED_AVX512
#else
#include <immintrin.h>
#endif

namespace trimtab {
namespace {

// 32 registers: six rows by four vectors of sums, four of weights, one activation. A full step per row keeps every
// pass reading whole steps front to back.
constexpr int kAvx512Vectors = 4;
constexpr int kAvx512Rows = 6;
constexpr int64_t kAvx512Bytes = 64;

struct Avx512Float {
  using Vector = __m512;
  static constexpr int64_t kVectorBytes = kAvx512Bytes;
  static constexpr int kParts = 1;
  static constexpr int kMaxRows = kAvx512Rows;
  static constexpr int64_t kStripsFrom = 0;  // a tile reads whole steps and widens nothing
  static constexpr int vectors_for(int) { return kAvx512Vectors; }
  static Vector load(const float* at) { return _mm512_loadu_ps(at); }
  static void store(float* at, Vector value) { _mm512_storeu_ps(at, value); }
};

inline __m512i broadcast_word(const void* at) {
  int32_t word;
  __builtin_memcpy(&word, at, sizeof word);
  return _mm512_set1_epi32(word);
}

struct Avx512Fp32 : Avx512Float {
  using Rows = Fp32Rows;
  using Weight = __m512;
  static constexpr int64_t kRowElements = 1;
  template <int part>
  static Weight weights(const char* at) { return _mm512_loadu_ps(at); }
  template <int part>
  static __m512 broadcast(const float* row, int64_t step) { return _mm512_set1_ps(row[step]); }
  static Vector multiply_add(Vector sum, __m512 activation, Weight weight) {
    return _mm512_fmadd_ps(activation, weight, sum);
  }
};

#if defined(__AVX512BF16__) || defined(TRIMTAB_EMULATED_AVX512)
struct Avx512Bf16 : Avx512Float {
  using Rows = Bf16Rows;
  using Weight = __m512i;
  static constexpr int64_t kRowElements = 2;
  template <int part>
  static Weight weights(const char* at) { return _mm512_loadu_si512(at); }
  template <int part>
  static __m512i broadcast(const uint16_t* row, int64_t step) { return broadcast_word(row + 2 * step); }
  static Vector multiply_add(Vector sum, __m512i activation, Weight weight) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(activation), reinterpret_cast<__m512bh>(weight));
  }
};
#endif

#if defined(__AVX512VNNI__) || defined(TRIMTAB_EMULATED_AVX512)
struct Avx512Int8 {
  using Rows = UnsignedByteRows;
  using Vector = __m512i;
  using Weight = __m512i;
  static constexpr int64_t kVectorBytes = kAvx512Bytes;
  static constexpr int kParts = 1;
  static constexpr int kMaxRows = kAvx512Rows;
  static constexpr int64_t kStripsFrom = 0;  // a tile reads whole steps and widens nothing
  static constexpr int64_t kRowElements = 4;
  static constexpr int vectors_for(int) { return kAvx512Vectors; }
  static Vector load(const int32_t* at) { return _mm512_loadu_si512(at); }
  static void store(int32_t* at, Vector value) { _mm512_storeu_si512(at, value); }
  template <int part>
  static Weight weights(const char* at) { return _mm512_loadu_si512(at); }
  template <int part>
  static __m512i broadcast(const uint8_t* row, int64_t step) { return broadcast_word(row + 4 * step); }
  static Vector multiply_add(Vector sum, __m512i activation, Weight weight) {
    return _mm512_dpbusd_epi32(sum, activation, weight);
  }
};
#endif

}  // namespace
}  // namespace trimtab
