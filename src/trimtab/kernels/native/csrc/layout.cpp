#include "layout.hpp"

#include <algorithm>
#include <cstring>

namespace trimtab {
namespace {

constexpr int64_t kCacheLine = 64;
// Below this a matrix is packed sooner than a second thread wakes up.
constexpr int64_t kParallelBytes = 1 << 20;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

int64_t element_bytes(WeightFormat format) {
  switch (format) {
    case WeightFormat::fp32: return 4;
    case WeightFormat::bf16: return 2;
    case WeightFormat::int8: return 1;
  }
  return 0;
}

MatrixLayout matrix_layout(WeightFormat format, int64_t columns, int64_t depth, int64_t panels) {
  MatrixLayout m{};
  m.format = format;
  m.columns = columns;
  m.depth = depth;
  m.panels = panels;
  m.steps = round_up(depth * element_bytes(format), kWordBytes) / kWordBytes;
  m.panel_bytes = m.steps * kStepBytes;
  return m;
}

int64_t place_weights(MatrixLayout& m, int64_t at) {
  m.weights_at = at;
  return at + m.panels * m.panel_bytes;
}

int64_t place_columns(MatrixLayout& m, int64_t at) {
  const int64_t column_bytes = round_up(m.panels * kPanelColumns * kWordBytes, kCacheLine);
  m.bias_at = at;
  at += column_bytes;
  if (m.format != WeightFormat::int8) return at;
  m.scale_at = at;
  m.zero_at = at + column_bytes;
  return at + 2 * column_bytes;
}

// Which row of the canonical [N, K] matrix a packed column holds; -1 is padding.
struct PlainColumns {
  int64_t columns;
  int64_t operator()(int64_t panel, int64_t column) const {
    const int64_t row = panel * kPanelColumns + column;
    return row < columns ? row : -1;
  }
};
struct GateUpColumns {
  int64_t intermediate_size;
  int64_t operator()(int64_t panel, int64_t column) const {
    const bool is_up = column >= kGateColumns;
    const int64_t row = panel * kGateColumns + column - (is_up ? kGateColumns : 0);
    if (row >= intermediate_size) return -1;
    return is_up ? intermediate_size + row : row;
  }
};

// Words [first, last) of a source row go to every kStepBytes of the target; zeros beyond the row, and for no row.
void copy_words(const char* row, int64_t row_bytes, int64_t first, int64_t last, char* target) {
  const int64_t whole = row ? std::clamp(row_bytes / kWordBytes, first, last) : first;
  // A copy of constant size is one instruction; of a size known only at run time it is a call.
  for (int64_t step = first; step < whole; ++step)
    std::memcpy(target + step * kStepBytes, row + step * kWordBytes, kWordBytes);
  for (int64_t step = whole; step < last; ++step) {
    const int64_t at = step * kWordBytes;
    char word[kWordBytes] = {};
    if (row && at < row_bytes) std::memcpy(word, row + at, row_bytes - at);
    std::memcpy(target + step * kStepBytes, word, kWordBytes);
  }
}

template <class Columns>
void pack_matrix(const MatrixLayout& m, const Columns& row_of, const ConstMatrix& matrix, char* slot) {
  const int64_t row_bytes = m.depth * element_bytes(m.format);
  const char* source = static_cast<const char*>(matrix.weights);
#pragma omp parallel for schedule(static) if (m.panels * m.panel_bytes > kParallelBytes)
  for (int64_t panel = 0; panel < m.panels; ++panel) {
    char* target = slot + m.weights_at + panel * m.panel_bytes;
    // Sixteen words are one cache line of the source: each line is read once.
    for (int64_t first = 0; first < m.steps; first += 16) {
      const int64_t last = std::min(first + 16, m.steps);
      for (int64_t column = 0; column < kPanelColumns; ++column) {
        const int64_t row = row_of(panel, column);
        copy_words(row < 0 ? nullptr : source + row * row_bytes, row_bytes, first, last, target + column * kWordBytes);
      }
    }
    for (int64_t column = 0; column < kPanelColumns; ++column) {
      const int64_t row = row_of(panel, column);
      const int64_t at = (panel * kPanelColumns + column) * kWordBytes;
      const float bias = row >= 0 && matrix.bias ? matrix.bias[row] : 0.0f;
      std::memcpy(slot + m.bias_at + at, &bias, kWordBytes);
      if (m.format != WeightFormat::int8) continue;
      const float scale = row >= 0 ? matrix.scale[row] : 0.0f;
      int32_t zero = 0;
      if (row >= 0)
        for (int64_t k = 0; k < m.depth; ++k) zero += 128 * static_cast<int8_t>(source[row * row_bytes + k]);
      std::memcpy(slot + m.scale_at + at, &scale, kWordBytes);
      std::memcpy(slot + m.zero_at + at, &zero, kWordBytes);
    }
  }
}

template <class Columns>
void unpack_matrix(const MatrixLayout& m, const Columns& row_of, const char* slot, const Matrix& matrix) {
  const int64_t row_bytes = m.depth * element_bytes(m.format);
  char* target = static_cast<char*>(matrix.weights);
#pragma omp parallel for schedule(static) if (m.panels * m.panel_bytes > kParallelBytes)
  for (int64_t panel = 0; panel < m.panels; ++panel) {
    const char* source = slot + m.weights_at + panel * m.panel_bytes;
    for (int64_t column = 0; column < kPanelColumns; ++column) {
      const int64_t row = row_of(panel, column);
      if (row < 0) continue;
      const int64_t whole = row_bytes / kWordBytes;
      for (int64_t step = 0; step < whole; ++step)
        std::memcpy(target + row * row_bytes + step * kWordBytes, source + step * kStepBytes + column * kWordBytes,
                    kWordBytes);
      if (const int64_t at = whole * kWordBytes; at < row_bytes)
        std::memcpy(target + row * row_bytes + at, source + whole * kStepBytes + column * kWordBytes, row_bytes - at);
      const int64_t at = (panel * kPanelColumns + column) * kWordBytes;
      if (matrix.bias) std::memcpy(matrix.bias + row, slot + m.bias_at + at, kWordBytes);
      if (matrix.scale) std::memcpy(matrix.scale + row, slot + m.scale_at + at, kWordBytes);
    }
  }
}

}  // namespace

SlotLayout slot_layout(WeightFormat format, int64_t hidden_size, int64_t intermediate_size, bool has_gate) {
  SlotLayout layout{};
  layout.format = format;
  layout.has_gate = has_gate;
  layout.hidden_size = hidden_size;
  layout.intermediate_size = intermediate_size;
  const int64_t features = has_gate ? kGateColumns : kPanelColumns;  // intermediate features per panel
  const int64_t gate_up_panels = round_up(intermediate_size, features) / features;
  const int64_t gate_up_columns = has_gate ? 2 * intermediate_size : intermediate_size;
  layout.gate_up = matrix_layout(format, gate_up_columns, hidden_size, gate_up_panels);
  layout.down = matrix_layout(format, hidden_size, intermediate_size, round_up(hidden_size, kPanelColumns) / kPanelColumns);
  int64_t at = place_weights(layout.gate_up, 0);
  at = place_weights(layout.down, at);
  at = place_columns(layout.gate_up, at);
  layout.bytes = place_columns(layout.down, at);
  layout.hidden_capacity = round_up(hidden_size, kRowPiece);
  layout.inner_capacity = gate_up_panels * features;
  return layout;
}

MatrixLayout linear_layout(WeightFormat format, int64_t columns, int64_t depth, int64_t* bytes) {
  MatrixLayout m = matrix_layout(format, columns, depth, round_up(columns, kPanelColumns) / kPanelColumns);
  *bytes = place_columns(m, place_weights(m, 0));
  return m;
}

void pack_slot(const SlotLayout& layout, const ConstMatrix& gate_up, const ConstMatrix& down, char* slot) {
  if (layout.has_gate) {
    pack_matrix(layout.gate_up, GateUpColumns{layout.intermediate_size}, gate_up, slot);
  } else {
    pack_matrix(layout.gate_up, PlainColumns{layout.intermediate_size}, gate_up, slot);
  }
  pack_matrix(layout.down, PlainColumns{layout.hidden_size}, down, slot);
}

void unpack_slot(const SlotLayout& layout, const char* slot, const Matrix& gate_up, const Matrix& down) {
  if (layout.has_gate) {
    unpack_matrix(layout.gate_up, GateUpColumns{layout.intermediate_size}, slot, gate_up);
  } else {
    unpack_matrix(layout.gate_up, PlainColumns{layout.intermediate_size}, slot, gate_up);
  }
  unpack_matrix(layout.down, PlainColumns{layout.hidden_size}, slot, down);
}

void pack_linear(const MatrixLayout& layout, const ConstMatrix& matrix, char* packed) {
  pack_matrix(layout, PlainColumns{layout.columns}, matrix, packed);
}

void unpack_linear(const MatrixLayout& layout, const char* packed, const Matrix& matrix) {
  unpack_matrix(layout, PlainColumns{layout.columns}, packed, matrix);
}

}  // namespace trimtab
