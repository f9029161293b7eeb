// Root-mean-square norm with transformers' roundings: the normalised row is rounded to its own type, then scaled by the
// weight and rounded again. The sum of squares runs in sixteen lanes by column, so a row is bitwise the same anywhere.
#include <omp.h>

#include <cmath>

#include "numerics.hpp"

#define TRIMTAB_API extern "C" __attribute__((visibility("default")))

namespace trimtab {
namespace {

constexpr int64_t kLanes = 16;
// Below this many values a second thread costs more than it brings.
constexpr int64_t kParallelValues = 1 << 16;

inline float load(const float* at) { return *at; }
inline float load(const uint16_t* at) { return widen_bf16(*at); }
inline float rounded(const float*, float value) { return value; }
inline float rounded(const uint16_t*, float value) { return widen_bf16(round_to_bf16(value)); }
inline void store(float* at, float value) { *at = value; }
inline void store(uint16_t* at, float value) { *at = round_to_bf16(value); }

template <class Element>
void norm_row(const Element* in, const Element* weight, Element* out, int64_t columns, float epsilon) {
  float lanes[kLanes] = {};
  int64_t column = 0;
  for (; column + kLanes <= columns; column += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float value = load(in + column + lane);
      lanes[lane] += value * value;
    }
  for (; column < columns; ++column) lanes[column % kLanes] += load(in + column) * load(in + column);
  float sum = 0.0f;
  for (float lane : lanes) sum += lane;
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(columns) + epsilon);
  for (column = 0; column < columns; ++column)
    store(out + column, load(weight + column) * rounded(in, load(in + column) * scale));
}

template <class Element>
void norm_rows(const void* in, const void* weight, void* out, int64_t rows, int64_t columns, float epsilon,
               int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (rows * columns >= kParallelValues)
  for (int64_t row = 0; row < rows; ++row)
    norm_row(static_cast<const Element*>(in) + row * columns, static_cast<const Element*>(weight),
             static_cast<Element*>(out) + row * columns, columns, epsilon);
}

}  // namespace
}  // namespace trimtab

// in, out [rows, columns] and weight [columns], all of `scalar`.
TRIMTAB_API void trimtab_rms_norm(int scalar, const void* in, const void* weight, void* out, int64_t rows,
                                  int64_t columns, float epsilon, int num_threads) {
  const auto run = scalar == 0 ? trimtab::norm_rows<float> : trimtab::norm_rows<uint16_t>;
  run(in, weight, out, rows, columns, epsilon, num_threads);
}
