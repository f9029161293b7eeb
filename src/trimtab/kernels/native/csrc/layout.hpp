// How weights lie in memory: the same bytes for every instruction set, so slots can move between unlike machines.
//
// A matrix [N, K] becomes panels of 64 columns (output features). Inside a panel one step holds, for each of the 64
// columns, the next 4 bytes along K: one fp32, two bf16 or four int8. A step is therefore always 256 bytes: four
// 512-bit or eight 256-bit vectors, read front to back. N is padded to whole panels and K to whole steps with zeros,
// which add nothing to a sum.
//
// A slot is one expert, contiguous and self-contained: gate/up panels, down panels, then per-column fp32 bias and, for
// int8, per-column fp32 scale and int32 zero-point compensation (128 * column sum). Bias is always stored (zeros when
// the expert has none): 0.2 % of the bytes for kernels without that branch. Each part starts on a cache line.
#pragma once

#include <cstdint>

namespace trimtab {

enum class WeightFormat : int { fp32 = 0, bf16 = 1, int8 = 2 };

constexpr int64_t kPanelColumns = 64;
constexpr int64_t kWordBytes = 4;
constexpr int64_t kStepBytes = 256;
// Gate and up columns of the same 32 intermediate features share a panel, so the activation needs no second pass.
constexpr int64_t kGateColumns = 32;
// Prepared rows are filled in pieces of 32 values.
constexpr int64_t kRowPiece = 32;

struct MatrixLayout {
  WeightFormat format;
  int64_t columns;  // N
  int64_t depth;    // K
  int64_t panels;
  int64_t steps;
  int64_t panel_bytes;
  // Byte offsets from the start of the matrix's slot (a linear layer is a slot with one matrix).
  int64_t weights_at;
  int64_t bias_at;
  int64_t scale_at;
  int64_t zero_at;
};

struct SlotLayout {
  WeightFormat format;
  bool has_gate;
  int64_t hidden_size;
  int64_t intermediate_size;
  MatrixLayout gate_up;
  MatrixLayout down;
  int64_t hidden_capacity;  // columns of a prepared hidden row
  int64_t inner_capacity;   // columns of a prepared intermediate row
  int64_t bytes;
};

// One linear layer as the outside world holds it. `weights` is fp32, bf16 or int8 as the format says; `bias` may be
// null; `scale` is null except for int8.
struct ConstMatrix {
  const void* weights;
  const float* bias;
  const float* scale;
};
struct Matrix {
  void* weights;
  float* bias;
  float* scale;
};

SlotLayout slot_layout(WeightFormat format, int64_t hidden_size, int64_t intermediate_size, bool has_gate);
MatrixLayout linear_layout(WeightFormat format, int64_t columns, int64_t depth, int64_t* bytes);

void pack_slot(const SlotLayout& layout, const ConstMatrix& gate_up, const ConstMatrix& down, char* slot);
void unpack_slot(const SlotLayout& layout, const char* slot, const Matrix& gate_up, const Matrix& down);
void pack_linear(const MatrixLayout& layout, const ConstMatrix& matrix, char* packed);
void unpack_linear(const MatrixLayout& layout, const char* packed, const Matrix& matrix);

}  // namespace trimtab
