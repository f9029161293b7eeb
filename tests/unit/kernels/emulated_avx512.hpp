// The AVX-512 intrinsics that ops_avx512.hpp and attention_avx512.cpp use, in plain C++: lets machines without the instructions run and check
// the AVX-512 kernels' layout, tiling and arithmetic. Written from the operation descriptions in Intel's manual.
// Types are compiler vectors of 64 bytes, lowered to whatever the CPU has.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>

namespace trimtab {
namespace {

typedef float EmulatedFloats __attribute__((vector_size(64)));
typedef int32_t EmulatedWords __attribute__((vector_size(64)));

inline EmulatedFloats emulated_load_ps(const void* at) {
  EmulatedFloats value;
  __builtin_memcpy(&value, at, sizeof value);
  return value;
}
inline EmulatedWords emulated_load_si512(const void* at) {
  EmulatedWords value;
  __builtin_memcpy(&value, at, sizeof value);
  return value;
}
template <class Vector>
inline void emulated_store(void* at, Vector value) {
  __builtin_memcpy(at, &value, sizeof value);
}
template <class Vector, class Value>
inline Vector emulated_broadcast(Value value) {
  Vector all;
  for (int i = 0; i < 16; ++i) all[i] = value;
  return all;
}

inline EmulatedFloats emulated_fmadd(EmulatedFloats a, EmulatedFloats b, EmulatedFloats c) {
  for (int i = 0; i < 16; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}

inline float emulated_bf16(uint32_t half) {
  const uint32_t bits = half << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline EmulatedWords emulated_widen_u16(__m256i halves) {
  uint16_t values[16];
  __builtin_memcpy(values, &halves, sizeof values);
  EmulatedWords words;
  for (int i = 0; i < 16; ++i) words[i] = values[i];
  return words;
}
inline EmulatedFloats emulated_bits_as_floats(EmulatedWords words) {
  EmulatedFloats floats;
  __builtin_memcpy(&floats, &words, sizeof floats);
  return floats;
}

// A library loaded while this variable is set computes bf16 products wrongly: what a self-test must find.
const bool kInjectedFault = std::getenv("TRIMTAB_INJECTED_FAULT") != nullptr;

// VDPBF16PS: the odd product first, then the even one, each rounded to nearest; denormals (not emulated) are zero.
inline EmulatedFloats emulated_dpbf16(EmulatedFloats sum, EmulatedWords a, EmulatedWords b) {
  for (int i = 0; i < 16; ++i) {
    const uint32_t x = static_cast<uint32_t>(a[i]);
    const uint32_t y = static_cast<uint32_t>(b[i]);
    sum[i] = __builtin_fmaf(emulated_bf16(x >> 16), emulated_bf16(y >> 16), sum[i]);
    if (kInjectedFault) continue;
    sum[i] = __builtin_fmaf(emulated_bf16(x & 0xffffu), emulated_bf16(y & 0xffffu), sum[i]);
  }
  return sum;
}

// VPDPBUSD: unsigned bytes of the first operand times signed bytes of the second, four products added to the sum.
inline EmulatedWords emulated_dpbusd(EmulatedWords sum, EmulatedWords a, EmulatedWords b) {
  for (int i = 0; i < 16; ++i) {
    for (int byte = 0; byte < 4; ++byte) {
      const int32_t x = static_cast<uint8_t>(static_cast<uint32_t>(a[i]) >> (8 * byte));
      const int32_t y = static_cast<int8_t>(static_cast<uint32_t>(b[i]) >> (8 * byte));
      sum[i] += x * y;
    }
  }
  return sum;
}

}  // namespace
}  // namespace trimtab

// The compiler's own header may already be included; its names are replaced from here on.
#define __m512 EmulatedFloats
#define __m512i EmulatedWords
#define __m512bh EmulatedWords
#define _mm512_loadu_ps emulated_load_ps
#define _mm512_loadu_si512 emulated_load_si512
#define _mm512_storeu_ps emulated_store
#define _mm512_storeu_si512 emulated_store
#define _mm512_set1_ps emulated_broadcast<EmulatedFloats>
#define _mm512_set1_epi32 emulated_broadcast<EmulatedWords>
#define _mm512_fmadd_ps emulated_fmadd
#define _mm512_cvtepu16_epi32 emulated_widen_u16
#define _mm512_slli_epi32(words, bits) ((words) << (bits))
#define _mm512_castsi512_ps emulated_bits_as_floats
#define _mm512_dpbf16_ps emulated_dpbf16
#define _mm512_dpbusd_epi32 emulated_dpbusd
