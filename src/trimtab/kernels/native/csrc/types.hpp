// Words shared by every file of the native core: what weights are stored as, what a call asks for, what an ISA offers.
//
// Files compiled for one instruction set include only this header, layout.hpp and headers that open an anonymous
// namespace: an inline function with external linkage would be merged by the linker across differently compiled
// files, and the survivor may use instructions that this CPU lacks. For the same reason those files use no std
// templates.
#pragma once

#include <cstdint>

#include "layout.hpp"

namespace trimtab {

enum class Scalar : int { fp32 = 0, bf16 = 1 };

enum class ActivationKind : int { silu = 0, gelu = 1, gelu_tanh = 2, relu = 3, relu2 = 4, swiglu_clamped = 5 };

struct Activation {
  ActivationKind kind;
  float alpha;  // swiglu_clamped: slope inside the sigmoid
  float limit;  // swiglu_clamped: clamp of gate (above) and up (both sides)
};

// Rows of activations: one after the other without gaps from `data` on, or each where `addresses` says.
struct ConstRows {
  const void* data;
  Scalar scalar;
  int64_t columns;
  const void* const* addresses = nullptr;
};
struct Rows {
  void* data;
  Scalar scalar;
  int64_t columns;
  void* const* addresses = nullptr;
};

// A slot that at least one token of the chunk chose; its rows are sorted together.
struct ActiveSlot {
  const char* bytes;
  int64_t first_row;
  int64_t num_rows;
  int64_t first_block;  // row blocks of the active slots before this one
  int64_t num_blocks;
};

// Tokens that go through one layer together. "Row" is one (token, k) pair that has a slot, in slot order.
struct MoeChunk {
  const SlotLayout* layout;
  Activation activation;
  ConstRows hidden;
  Rows out;
  const float* gate_weights;  // [tokens, top_k]
  int64_t num_tokens;
  int64_t top_k;
  const ActiveSlot* slots;
  int64_t num_slots;
  int64_t num_rows;
  int64_t num_blocks;
  const int32_t* token_of_row;  // [num_rows]
  const int32_t* row_of_pair;   // [tokens, top_k], -1 for a pair without a slot
  int num_threads;
  int64_t group_panels;  // down-projection panels computed between two combines: bounds `partials`
  // Workspace.
  char* hidden_rows;     // [num_tokens] prepared rows
  float* hidden_scales;  // [num_tokens]
  float* inner;          // [num_rows, inner_capacity] fp32; kernels with quantised rows only
  char* inner_rows;      // [num_rows] prepared rows
  float* inner_scales;   // [num_rows]
  float* partials;       // [num_rows, group_panels * kPanelColumns]
  int64_t* counters;     // zeroed; one for the first stage and one per group of panels
};

struct LinearCall {
  const MatrixLayout* layout;
  const char* weights;
  ConstRows input;
  Rows out;
  int64_t num_rows;
  int num_threads;
  char* input_rows;
  float* input_scales;
  int64_t* counters;  // one, zeroed
};

// Rows multiplied with one panel before moving to the next: bounds the fp32 sums kept on the stack.
constexpr int64_t kRowBlock = 96;

// The kernels of one weight format for one instruction set.
struct KernelTable {
  const char* name;
  WeightFormat format;
  bool rounds_rows_to_bf16;   // activations are bf16 inside the kernel, whatever they are outside
  int64_t row_element_bytes;  // of a prepared row
  void (*moe)(const MoeChunk&);
  void (*linear)(const LinearCall&);
};

// Bytes from one prepared row to the next. The odd cache line keeps rows of a power-of-two length from meeting in one
// set of the L1 cache, where six of them would evict the weights.
static constexpr int64_t row_stride(int64_t capacity, int64_t element_bytes) {
  return (capacity * element_bytes + 63) / 64 * 64 + 64;
}

}  // namespace trimtab
