// Elementwise mathematics, written as plain loops of fixed length that the compiler turns into vectors.
//
// Every loop has a constant trip count, so there is no scalar remainder that could round differently, and fused
// multiply-adds are spelled out (the build forbids contraction): a value does not depend on its position in a batch.
// Anonymous namespace: see types.hpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "types.hpp"

namespace trimtab {
namespace {

inline float float_of_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float widen_bf16(uint16_t value) { return float_of_bits(static_cast<uint32_t>(value) << 16); }

// Round to nearest, ties to even; a NaN stays a NaN.
inline uint16_t round_to_bf16(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

// 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits (for |value| < 2^22).
constexpr float kRoundingShift = 12582912.0f;

// e^x within 2 ulp for x in [-87.3, 88.3], clamped outside: exp(-x) then stays finite, and a sigmoid never divides
// infinity by infinity.
inline float exponential(float x) {
  x = x < -87.3f ? -87.3f : x;
  x = x > 88.3f ? 88.3f : x;
  const float shifted = __builtin_fmaf(x, 1.44269504f, kRoundingShift);
  const float n = shifted - kRoundingShift;
  float r = __builtin_fmaf(n, -0.693359375f, x);
  r = __builtin_fmaf(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = __builtin_fmaf(p, r, 1.3981999507e-3f);
  p = __builtin_fmaf(p, r, 8.3334519073e-3f);
  p = __builtin_fmaf(p, r, 4.1665795894e-2f);
  p = __builtin_fmaf(p, r, 1.6666665459e-1f);
  p = __builtin_fmaf(p, r, 5.0000001201e-1f);
  p = __builtin_fmaf(p * r, r, r) + 1.0f;
  return p * float_of_bits((bits_of_float(shifted) + 127u) << 23);
}

inline float times_sigmoid(float x, float slope_times_x) { return x / (1.0f + exponential(-slope_times_x)); }

inline float gelu_erf(float x) {
  // erf by Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7, the last bits of fp32.
  const float z = x * 0.70710678f;
  const float magnitude = z < 0.0f ? -z : z;
  const float t = 1.0f / __builtin_fmaf(0.3275911f, magnitude, 1.0f);
  float p = 1.061405429f;
  p = __builtin_fmaf(p, t, -1.453152027f);
  p = __builtin_fmaf(p, t, 1.421413741f);
  p = __builtin_fmaf(p, t, -0.284496736f);
  p = __builtin_fmaf(p, t, 0.254829592f);
  const float tail = p * t * exponential(-magnitude * magnitude);  // 1 - erf(|z|)
  return 0.5f * x * (z < 0.0f ? tail : 2.0f - tail);
}

template <ActivationKind kind>
inline float activated(float x) {
  if constexpr (kind == ActivationKind::silu) return times_sigmoid(x, x);
  if constexpr (kind == ActivationKind::gelu) return gelu_erf(x);
  if constexpr (kind == ActivationKind::gelu_tanh) {
    // 0.5 * (1 + tanh(u)) is the sigmoid of 2u: no cancellation near zero.
    return times_sigmoid(x, 1.59576912f * x * __builtin_fmaf(0.044715f * x, x, 1.0f));
  }
  const float positive = x < 0.0f ? 0.0f : x;  // keeps NaN
  if constexpr (kind == ActivationKind::relu2) return positive * positive;
  return positive;
}

template <ActivationKind kind>
inline void activate_gated(const float* gate, const float* up, float* out) {
  for (int i = 0; i < kGateColumns; ++i) out[i] = activated<kind>(gate[i]) * up[i];
}

template <ActivationKind kind>
inline void activate_plain(const float* values, float* out) {
  for (int i = 0; i < kPanelColumns; ++i) out[i] = activated<kind>(values[i]);
}

inline void activate_swiglu_clamped(const float* gates, const float* ups, float alpha, float limit, float* out) {
  for (int i = 0; i < kGateColumns; ++i) {
    const float gate = gates[i] > limit ? limit : gates[i];
    float up = ups[i] > limit ? limit : ups[i];
    up = up < -limit ? -limit : up;
    out[i] = times_sigmoid(gate, alpha * gate) * (up + 1.0f);
  }
}

// One panel of gate/up sums (64 values, 32 gate then 32 up) to 32 intermediate values.
inline void activate_gated_panel(const Activation& activation, const float* sums, float* out) {
  const float* up = sums + kGateColumns;
  switch (activation.kind) {
    case ActivationKind::silu: return activate_gated<ActivationKind::silu>(sums, up, out);
    case ActivationKind::gelu: return activate_gated<ActivationKind::gelu>(sums, up, out);
    case ActivationKind::gelu_tanh: return activate_gated<ActivationKind::gelu_tanh>(sums, up, out);
    case ActivationKind::relu: return activate_gated<ActivationKind::relu>(sums, up, out);
    case ActivationKind::relu2: return activate_gated<ActivationKind::relu2>(sums, up, out);
    case ActivationKind::swiglu_clamped:
      return activate_swiglu_clamped(sums, up, activation.alpha, activation.limit, out);
  }
}

inline void activate_plain_panel(const Activation& activation, const float* sums, float* out) {
  switch (activation.kind) {
    case ActivationKind::silu: return activate_plain<ActivationKind::silu>(sums, out);
    case ActivationKind::gelu: return activate_plain<ActivationKind::gelu>(sums, out);
    case ActivationKind::gelu_tanh: return activate_plain<ActivationKind::gelu_tanh>(sums, out);
    case ActivationKind::relu: return activate_plain<ActivationKind::relu>(sums, out);
    case ActivationKind::relu2: return activate_plain<ActivationKind::relu2>(sums, out);
    case ActivationKind::swiglu_clamped: return;  // gated by definition: refused when the layer is made
  }
}

// Reads 32 values of a row as fp32; values past the row's end are zeros.
inline void read_piece(const void* row, Scalar scalar, int64_t first, int64_t columns, float* piece) {
  const int64_t count = columns - first < kRowPiece ? columns - first : kRowPiece;
  if (scalar == Scalar::fp32) {
    const float* source = static_cast<const float*>(row) + first;
    for (int64_t i = 0; i < count; ++i) piece[i] = source[i];
  } else {
    const uint16_t* source = static_cast<const uint16_t*>(row) + first;
    for (int64_t i = 0; i < count; ++i) piece[i] = widen_bf16(source[i]);
  }
  for (int64_t i = count; i < kRowPiece; ++i) piece[i] = 0.0f;
}

// Writes the part of one panel's 64 values that lies inside the row.
inline void write_panel(const float* values, int64_t first, const Rows& rows, int64_t row) {
  const int64_t count = rows.columns - first < kPanelColumns ? rows.columns - first : kPanelColumns;
  void* data = rows.addresses ? rows.addresses[row] : rows.data;
  if (rows.addresses) row = 0;
  if (rows.scalar == Scalar::fp32) {
    float* target = static_cast<float*>(data) + row * rows.columns + first;
    for (int64_t i = 0; i < count; ++i) target[i] = values[i];
  } else {
    uint16_t* target = static_cast<uint16_t*>(data) + row * rows.columns + first;
    for (int64_t i = 0; i < count; ++i) target[i] = round_to_bf16(values[i]);
  }
}

inline const void* row_at(const ConstRows& rows, int64_t row) {
  if (rows.addresses) return rows.addresses[row];
  const int64_t bytes = rows.scalar == Scalar::fp32 ? 4 : 2;
  return static_cast<const char*>(rows.data) + row * rows.columns * bytes;
}

}  // namespace
}  // namespace trimtab
