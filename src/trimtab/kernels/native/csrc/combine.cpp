// The last stage of a MoE layer on its own, for experts that ran elsewhere: each token's K outputs, already computed,
// are weighted and summed. Compiled for AVX2 with FMA, the least the kernels of this core need.
//
// The arithmetic is that of `combine` in kernels.hpp, operation by operation: a token's result is bitwise the same
// whether its experts ran in the fused call or on another rank.
#include <cstdint>

#include "numerics.hpp"

using namespace trimtab;

#define TRIMTAB_API extern "C" __attribute__((visibility("default")))

// outputs [num_tokens, top_k, hidden_size]; a pair whose slot id is negative contributes nothing, whatever lies there.
TRIMTAB_API void trimtab_combine(const float* outputs, const int64_t* slot_ids, const float* gate_weights, void* out,
                                 int out_scalar, int64_t num_tokens, int64_t top_k, int64_t hidden_size,
                                 int num_threads) {
  const Rows rows{out, static_cast<Scalar>(out_scalar), hidden_size};
#pragma omp parallel for num_threads(num_threads)
  for (int64_t token = 0; token < num_tokens; ++token) {
    for (int64_t first = 0; first < hidden_size; first += kPanelColumns) {
      const int64_t count = hidden_size - first < kPanelColumns ? hidden_size - first : kPanelColumns;
      alignas(64) float sums[kPanelColumns] = {};
      for (int64_t k = 0; k < top_k; ++k) {
        const int64_t pair = token * top_k + k;
        if (slot_ids[pair] < 0) continue;
        const float weight = gate_weights[pair];
        const float* output = outputs + pair * hidden_size + first;
        if (count == kPanelColumns) {
          for (int i = 0; i < kPanelColumns; ++i) sums[i] = __builtin_fmaf(weight, output[i], sums[i]);
        } else {
          for (int64_t i = 0; i < count; ++i) sums[i] = __builtin_fmaf(weight, output[i], sums[i]);
        }
      }
      write_panel(sums, first, rows, token);
    }
  }
}
