// The stages of a fused MoE layer and of a linear layer, over an instruction set's `Ops`.
// Anonymous namespace: see types.hpp.
//
// MoE, inside one OpenMP region: prepare hidden rows | gate/up + activation | (int8: quantise inner rows) | per group
// of down panels: down, then combine its columns per token in k order. The groups bound the fp32 partial outputs.
// Work is handed out by an atomic counter: a thread that loses its core to another process holds up two claims at
// most, not its fixed share. Which thread computes what never changes a result.
#pragma once

#include <omp.h>

#include "tile.hpp"

namespace trimtab {
namespace {

struct Range {
  int64_t first;
  int64_t last;
};

// Claims shrink with what is left, so that threads end a stage together, and are long while much is left: a claim reads
// long runs of memory.
constexpr int64_t kClaimsPerThread = 16;

inline Range claim(int64_t total, int num_threads, int64_t* counter) {
  int64_t first = __atomic_load_n(counter, __ATOMIC_RELAXED);
  for (;;) {
    const int64_t left = total - first;
    if (left <= 0) return {total, total};
    const int64_t even = left / (num_threads * kClaimsPerThread);
    const int64_t last = num_threads == 1 ? total : first + (even < 1 ? 1 : even);
    if (__atomic_compare_exchange_n(counter, &first, last, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      return {first, last};
  }
}

// `visit(index, next)`: `next` is what this thread visits afterwards, or `index` itself at the end. A claim is made
// when the last one's end begins, so that its memory can be fetched ahead.
template <class Visit>
inline void share_out(int64_t total, int num_threads, int64_t* counter, Visit visit) {
  for (Range range = claim(total, num_threads, counter), ahead{}; range.first < range.last; range = ahead) {
    for (int64_t index = range.first; index < range.last; ++index) {
      int64_t next = index + 1;
      if (next == range.last) {
        ahead = claim(total, num_threads, counter);
        next = ahead.first < ahead.last ? ahead.first : index;
      }
      visit(index, next);
    }
  }
}

// Asks OpenMP for the team's size: it may have granted fewer threads than the region wanted.
inline Range share_of_thread(int64_t total) {
  const int64_t thread = omp_get_thread_num();
  const int64_t num_threads = omp_get_num_threads();
  return {total * thread / num_threads, total * (thread + 1) / num_threads};
}

// Sums of one row of a panel to fp32 values. For int8 the operations and their order are the same on every
// instruction set, so results are too.
template <class RowKind>
inline void finish_sums(const typename RowKind::Sum* sums, const MatrixLayout& m, const char* slot, int64_t panel,
                        float row_scale, float* values) {
  const float* bias = reinterpret_cast<const float*>(slot + m.bias_at) + panel * kPanelColumns;
  if constexpr (!RowKind::kQuantised) {
    for (int i = 0; i < kPanelColumns; ++i) values[i] = sums[i] + bias[i];
  } else {
    const float* scale = reinterpret_cast<const float*>(slot + m.scale_at) + panel * kPanelColumns;
    const int32_t* zero = reinterpret_cast<const int32_t*>(slot + m.zero_at) + panel * kPanelColumns;
    for (int i = 0; i < kPanelColumns; ++i) {
      const int32_t sum = RowKind::kHasZeroPoint ? sums[i] - zero[i] : sums[i];
      values[i] = __builtin_fmaf(static_cast<float>(sum), row_scale * scale[i], bias[i]);
    }
  }
}

// A unit of work: one panel of one active slot for one block of its rows.
struct Unit {
  int64_t slot;
  int64_t panel;
  int64_t first_row;
  int64_t num_rows;
};

struct UnitWalk {
  const MoeChunk& chunk;
  int64_t panels;
  int64_t slot = 0;

  Unit at(int64_t index) {
    while (index >= (chunk.slots[slot].first_block + chunk.slots[slot].num_blocks) * panels) ++slot;
    const ActiveSlot& active = chunk.slots[slot];
    const int64_t local = index - active.first_block * panels;
    const int64_t block = local % active.num_blocks;
    const int64_t first = active.num_rows * block / active.num_blocks;
    const int64_t last = active.num_rows * (block + 1) / active.num_blocks;
    return {slot, local / active.num_blocks, active.first_row + first, last - first};
  }
};

// Multiplies every row of the chunk with panels [first_panel, first_panel + panels) of its slot's matrix.
// `row(index)` gives a prepared row; `finish(slot bytes, panel, first row, number of rows, sums)` takes the sums.
template <class Ops, class RowOf, class Finish>
inline void multiply_units(const MoeChunk& chunk, const MatrixLayout& m, int64_t first_panel, int64_t panels,
                           int64_t* counter, RowOf row, Finish finish) {
  alignas(64) typename Ops::Rows::Sum sums[kRowBlock * kPanelColumns];
  const typename Ops::Rows::Element* rows[kRowBlock];
  const int64_t total = chunk.num_blocks * panels;
  UnitWalk walk{chunk, panels}, ahead{chunk, panels};
  const auto address = [&](const Unit& unit) {
    return chunk.slots[unit.slot].bytes + m.weights_at + (first_panel + unit.panel) * m.panel_bytes;
  };
  share_out(total, chunk.num_threads, counter, [&](int64_t index, int64_t next_index) {
    const Unit unit = walk.at(index);
    for (int64_t i = 0; i < unit.num_rows; ++i) rows[i] = row(unit.first_row + i);
    multiply_panel<Ops>(rows, unit.num_rows, address(unit), m.steps, address(ahead.at(next_index)), sums);
    finish(chunk.slots[unit.slot].bytes, first_panel + unit.panel, unit.first_row, unit.num_rows, sums);
  });
}

template <class RowKind>
inline typename RowKind::Element* prepared(char* rows, int64_t capacity, int64_t row) {
  using Element = typename RowKind::Element;
  return reinterpret_cast<Element*>(rows + row * row_stride(capacity, sizeof(Element)));
}

template <class Ops>
void gate_up_stage(const MoeChunk& chunk) {
  using Rows = typename Ops::Rows;
  const SlotLayout& layout = *chunk.layout;
  const int64_t features = layout.has_gate ? kGateColumns : kPanelColumns;
  const auto row = [&](int64_t index) {
    return prepared<Rows>(chunk.hidden_rows, layout.hidden_capacity, chunk.token_of_row[index]);
  };
  const auto finish = [&](const char* slot, int64_t panel, int64_t first_row, int64_t num_rows,
                          const typename Rows::Sum* sums) {
    for (int64_t i = 0; i < num_rows; ++i) {
      alignas(64) float values[kPanelColumns];
      alignas(64) float inner[kPanelColumns];
      const float row_scale = chunk.hidden_scales[chunk.token_of_row[first_row + i]];
      finish_sums<Rows>(sums + i * kPanelColumns, layout.gate_up, slot, panel, row_scale, values);
      if (layout.has_gate) {
        activate_gated_panel(chunk.activation, values, inner);
      } else {
        activate_plain_panel(chunk.activation, values, inner);
      }
      if constexpr (Rows::kQuantised) {
        float* target = chunk.inner + (first_row + i) * layout.inner_capacity + panel * features;
        for (int64_t c = 0; c < features; c += kRowPiece)
          spread_piece(inner + c, panel * features + c, layout.intermediate_size);
        for (int64_t c = 0; c < features; ++c) target[c] = inner[c];
      } else {
        auto* target = prepared<Rows>(chunk.inner_rows, layout.inner_capacity, first_row + i) + panel * features;
        for (int64_t c = 0; c < features; c += kRowPiece) Rows::put(inner + c, target + c);
      }
    }
  };
  multiply_units<Ops>(chunk, layout.gate_up, 0, layout.gate_up.panels, chunk.counters, row, finish);
}

template <class Ops>
void quantise_inner(const MoeChunk& chunk) {
  using Rows = typename Ops::Rows;
  const SlotLayout& layout = *chunk.layout;
  const Range range = share_of_thread(chunk.num_rows);
  for (int64_t row = range.first; row < range.last; ++row)
    chunk.inner_scales[row] = prepare_row<Rows>(chunk.inner + row * layout.inner_capacity, Scalar::fp32,
                                                layout.inner_capacity,
                                                prepared<Rows>(chunk.inner_rows, layout.inner_capacity, row));
}

template <class Ops>
void down_stage(const MoeChunk& chunk, int64_t first_panel, int64_t panels, int64_t* counter) {
  using Rows = typename Ops::Rows;
  const SlotLayout& layout = *chunk.layout;
  const auto row = [&](int64_t index) { return prepared<Rows>(chunk.inner_rows, layout.inner_capacity, index); };
  const auto finish = [&](const char* slot, int64_t panel, int64_t first_row, int64_t num_rows,
                          const typename Rows::Sum* sums) {
    for (int64_t i = 0; i < num_rows; ++i) {
      const int64_t index = first_row + i;
      float* target = chunk.partials + (index * chunk.group_panels + panel - first_panel) * kPanelColumns;
      const float row_scale = Rows::kQuantised ? chunk.inner_scales[index] : 1.0f;
      finish_sums<Rows>(sums + i * kPanelColumns, layout.down, slot, panel, row_scale, target);
    }
  };
  multiply_units<Ops>(chunk, layout.down, first_panel, panels, counter, row, finish);
}

// out[token] = sum over k of gate weight * partial, in fp32 and in the order of k: slot numbers, and so the placement,
// cannot change it.
inline void combine(const MoeChunk& chunk, int64_t first_panel, int64_t panels) {
  const Range range = share_of_thread(chunk.num_tokens);
  for (int64_t token = range.first; token < range.last; ++token) {
    for (int64_t panel = 0; panel < panels; ++panel) {
      alignas(64) float sums[kPanelColumns] = {};
      for (int64_t k = 0; k < chunk.top_k; ++k) {
        const int64_t pair = token * chunk.top_k + k;
        const int64_t row = chunk.row_of_pair[pair];
        if (row < 0) continue;
        const float weight = chunk.gate_weights[pair];
        const float* partial = chunk.partials + (row * chunk.group_panels + panel) * kPanelColumns;
        for (int i = 0; i < kPanelColumns; ++i) sums[i] = __builtin_fmaf(weight, partial[i], sums[i]);
      }
      write_panel(sums, (first_panel + panel) * kPanelColumns, chunk.out, token);
    }
  }
}

template <class Ops>
void moe(const MoeChunk& chunk) {
  using Rows = typename Ops::Rows;
  const SlotLayout& layout = *chunk.layout;
#pragma omp parallel num_threads(chunk.num_threads)
  {
    const Range tokens = share_of_thread(chunk.num_tokens);
    for (int64_t token = tokens.first; token < tokens.last; ++token)
      chunk.hidden_scales[token] =
          prepare_row<Rows, true>(row_at(chunk.hidden, token), chunk.hidden.scalar, layout.hidden_size,
                                  prepared<Rows>(chunk.hidden_rows, layout.hidden_capacity, token));
#pragma omp barrier
    gate_up_stage<Ops>(chunk);
#pragma omp barrier
    if constexpr (Rows::kQuantised) {
      quantise_inner<Ops>(chunk);
#pragma omp barrier
    }
    int64_t* counter = chunk.counters;
    for (int64_t first = 0; first < layout.down.panels; first += chunk.group_panels) {
      const int64_t left = layout.down.panels - first;
      const int64_t panels = chunk.group_panels < left ? chunk.group_panels : left;
      down_stage<Ops>(chunk, first, panels, ++counter);
#pragma omp barrier
      combine(chunk, first, panels);
      // The next group overwrites the partials that others still combine.
      if (panels < left) {
#pragma omp barrier
      }
    }
  }
}

template <class Ops>
void linear(const LinearCall& call) {
  using Rows = typename Ops::Rows;
  const MatrixLayout& m = *call.layout;
  const int64_t capacity = (m.depth + kRowPiece - 1) / kRowPiece * kRowPiece;
  const int64_t blocks = (call.num_rows + kRowBlock - 1) / kRowBlock;
  const int64_t total = m.panels * blocks;
#pragma omp parallel num_threads(call.num_threads)
  {
    const Range range = share_of_thread(call.num_rows);
    for (int64_t row = range.first; row < range.last; ++row)
      call.input_scales[row] = prepare_row<Rows>(row_at(call.input, row), call.input.scalar, m.depth,
                                                 prepared<Rows>(call.input_rows, capacity, row));
#pragma omp barrier
    alignas(64) typename Rows::Sum sums[kRowBlock * kPanelColumns];
    const typename Rows::Element* rows[kRowBlock];
    const auto address = [&](int64_t unit) { return call.weights + m.weights_at + unit / blocks * m.panel_bytes; };
    share_out(total, call.num_threads, call.counters, [&](int64_t unit, int64_t next) {
      const int64_t panel = unit / blocks;
      const int64_t top = call.num_rows * (unit % blocks) / blocks;
      const int64_t num_rows = call.num_rows * (unit % blocks + 1) / blocks - top;
      for (int64_t i = 0; i < num_rows; ++i) rows[i] = prepared<Rows>(call.input_rows, capacity, top + i);
      multiply_panel<Ops>(rows, num_rows, address(unit), m.steps, address(next), sums);
      for (int64_t i = 0; i < num_rows; ++i) {
        alignas(64) float values[kPanelColumns];
        finish_sums<Rows>(sums + i * kPanelColumns, m, call.weights, panel, call.input_scales[top + i], values);
        write_panel(values, panel * kPanelColumns, call.out, top + i);
      }
    });
  }
}

}  // namespace
}  // namespace trimtab
