// What the files compiled for every CPU share: choosing kernels, running a layer, checking a kernel.
#pragma once

#include <string>

#include "types.hpp"

namespace trimtab {

enum class Level : int { avx2 = 1, avx512 = 2 };

// The kernels of a level, or null where this build has none. A pointer says nothing about the CPU: ask cpu_supports.
const KernelTable* find_kernels(Level level, WeightFormat format);
bool cpu_supports(Level level, WeightFormat format);

enum class Status : int { ok = 0, slot_out_of_range = 1, slot_without_weights = 2, out_of_memory = 3, no_kernel = 4 };

struct MoeCall {
  SlotLayout layout;
  Activation activation;
  const void* const* slot_table;
  int64_t num_slots;
  ConstRows hidden;
  Rows out;
  const int64_t* slot_ids;     // [tokens, top_k]; -1 contributes nothing
  const float* gate_weights;   // [tokens, top_k]
  int64_t num_tokens;
  int64_t top_k;
  int num_threads;
};

Status run_moe(const KernelTable& kernels, const MoeCall& call);
Status run_linear(const KernelTable& kernels, const MatrixLayout& layout, const void* weights, const ConstRows& input,
                  const Rows& out, int64_t num_rows, int num_threads);

// Runs small odd-shaped problems against plain C++ in double precision. Returns an empty string, or what went wrong.
std::string self_test(const KernelTable& kernels);

}  // namespace trimtab
