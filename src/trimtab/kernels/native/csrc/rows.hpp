// Activations as a kernel wants to read them: "prepared rows", padded with zeros to whole pieces of 32 values.
// Each kind says how 32 values are stored. Anonymous namespace: see types.hpp.
#pragma once

#include <immintrin.h>

#include "numerics.hpp"

namespace trimtab {
namespace {

struct Fp32Rows {
  using Element = float;
  using Sum = float;
  static constexpr bool kQuantised = false;
  static void put(const float* piece, Element* target) { __builtin_memcpy(target, piece, kRowPiece * sizeof(float)); }
};

struct Bf16Rows {
  using Element = uint16_t;
  using Sum = float;
  static constexpr bool kQuantised = false;
  static void put(const float* piece, Element* target) {
    for (int i = 0; i < kRowPiece; ++i) target[i] = round_to_bf16(piece[i]);
  }
};

// int8 activations q in [-127, 127] as q + 128, what the unsigned x signed dot product takes. The sums are then too
// large by 128 * (sum of the column's weights): the compensation stored in the slot.
struct UnsignedByteRows {
  using Element = uint8_t;
  using Sum = int32_t;
  static constexpr bool kQuantised = true;
  static constexpr bool kHasZeroPoint = true;
  static void put(const int32_t* piece, Element* target) {
    for (int i = 0; i < kRowPiece; ++i) target[i] = static_cast<uint8_t>(piece[i] + 128);
  }
};

// int8 activations as int16, each four reordered to (0, 2, 1, 3): the pairs that the even and the odd bytes of a
// weight word meet.
struct Int16PairRows {
  using Element = int16_t;
  using Sum = int32_t;
  static constexpr bool kQuantised = true;
  static constexpr bool kHasZeroPoint = false;
  static void put(const int32_t* piece, Element* target) {
    for (int i = 0; i < kRowPiece; i += 4) {
      target[i] = static_cast<int16_t>(piece[i]);
      target[i + 1] = static_cast<int16_t>(piece[i + 2]);
      target[i + 2] = static_cast<int16_t>(piece[i + 1]);
      target[i + 3] = static_cast<int16_t>(piece[i + 3]);
    }
  }
};

// One stage of the transform below within eight values: sums where the index has a zero bit, differences where a one.
inline __m256 add_and_subtract(__m256 values, __m256 swapped, __m256 signs) {
  return _mm256_add_ps(swapped, _mm256_xor_ps(values, signs));
}

// The Hadamard transform of 32 values, without its factor, at distances 16, 8, 4, 2, 1: one large value becomes 32
// middling ones, which 8 bits hold far better. Experts' int8 weights are stored as this transform's values over 32
// (trimtab/experts/formats/int8.py), so the products are those of the values themselves. Additions only, in a fixed
// order: the same bits on every instruction set.
inline void rotate_piece(float* piece) {
  const __m256 v0 = _mm256_loadu_ps(piece), v1 = _mm256_loadu_ps(piece + 8);
  const __m256 v2 = _mm256_loadu_ps(piece + 16), v3 = _mm256_loadu_ps(piece + 24);
  const __m256 s0 = _mm256_add_ps(v0, v2), s1 = _mm256_add_ps(v1, v3);
  const __m256 s2 = _mm256_sub_ps(v0, v2), s3 = _mm256_sub_ps(v1, v3);
  const __m256 eights[4] = {_mm256_add_ps(s0, s1), _mm256_sub_ps(s0, s1), _mm256_add_ps(s2, s3), _mm256_sub_ps(s2, s3)};
  const __m256 signs4 = _mm256_setr_ps(0.0f, 0.0f, 0.0f, 0.0f, -0.0f, -0.0f, -0.0f, -0.0f);
  const __m256 signs2 = _mm256_setr_ps(0.0f, 0.0f, -0.0f, -0.0f, 0.0f, 0.0f, -0.0f, -0.0f);
  const __m256 signs1 = _mm256_setr_ps(0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f);
  for (int i = 0; i < 4; ++i) {
    __m256 values = eights[i];
    values = add_and_subtract(values, _mm256_permute2f128_ps(values, values, 1), signs4);
    values = add_and_subtract(values, _mm256_permute_ps(values, 0x4e), signs2);
    values = add_and_subtract(values, _mm256_permute_ps(values, 0xb1), signs1);
    _mm256_storeu_ps(piece + 8 * i, values);
  }
}

// A last piece that is not whole: made about as large as the transform makes the others, which share its row's scale.
inline void enlarge_piece(float* piece) {
  for (int i = 0; i < kRowPiece; ++i) piece[i] *= 4.0f;
}

// What is quantised of the piece that begins at `first` in a row of `columns` values.
inline void spread_piece(float* piece, int64_t first, int64_t columns) {
  if (first + kRowPiece <= columns) {
    rotate_piece(piece);
  } else {
    enlarge_piece(piece);
  }
}

template <bool rotated>
inline void read_for_quantisation(const void* row, Scalar scalar, int64_t first, int64_t columns, float* piece) {
  read_piece(row, scalar, first, columns, piece);
  if (rotated) spread_piece(piece, first, columns);
}

// Largest magnitude of a row; NaN when any value is not finite, so that the whole row's result is NaN and not a
// plausible number.
template <bool rotated>
inline float largest_magnitude(const void* row, Scalar scalar, int64_t columns) {
  float lanes[kRowPiece] = {};
  uint32_t not_finite = 0;
  for (int64_t first = 0; first < columns; first += kRowPiece) {
    float piece[kRowPiece];
    read_for_quantisation<rotated>(row, scalar, first, columns, piece);
    for (int i = 0; i < kRowPiece; ++i) {
      const uint32_t bits = bits_of_float(piece[i]) & 0x7fffffffu;
      const float magnitude = float_of_bits(bits);
      not_finite |= bits >= 0x7f800000u ? 1u : 0u;
      lanes[i] = magnitude > lanes[i] ? magnitude : lanes[i];
    }
  }
  float largest = 0.0f;
  for (int i = 0; i < kRowPiece; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
  return not_finite ? __builtin_nanf("") : largest;
}

// Fills one prepared row and returns its scale (1 for rows that are not quantised, and never rotated then).
template <class RowKind, bool rotated = false>
inline float prepare_row(const void* row, Scalar scalar, int64_t columns, typename RowKind::Element* target) {
  float piece[kRowPiece];
  if constexpr (!RowKind::kQuantised) {
    for (int64_t first = 0; first < columns; first += kRowPiece) {
      read_piece(row, scalar, first, columns, piece);
      RowKind::put(piece, target + first);
    }
    return 1.0f;
  } else {
    const float largest = largest_magnitude<rotated>(row, scalar, columns);
    // Below this the inverse would overflow; such a row counts as zeros, wrong by less than its own size.
    const float inverse = largest > 1e-35f ? 127.0f / largest : 0.0f;
    for (int64_t first = 0; first < columns; first += kRowPiece) {
      read_for_quantisation<rotated>(row, scalar, first, columns, piece);
      int32_t quantised[kRowPiece];
      for (int i = 0; i < kRowPiece; ++i) {
        // The low mantissa bits of the shifted value are the rounded integer: no conversion that a NaN could upset.
        const float shifted = piece[i] * inverse + kRoundingShift;
        int32_t q = static_cast<int32_t>(bits_of_float(shifted) & 0x7fffffu) - 0x400000;
        q = q > 127 ? 127 : q;
        quantised[i] = q < -127 ? -127 : q;
      }
      RowKind::put(quantised, target + first);
    }
    return largest / 127.0f;
  }
}

}  // namespace
}  // namespace trimtab
