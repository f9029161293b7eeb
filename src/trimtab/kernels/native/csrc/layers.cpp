// Runs a layer: sorts (token, k) pairs by slot, lays out the workspace, hands chunks of tokens to the kernels.
#include <algorithm>
#include <cstring>
#include <new>

#include "core.hpp"
#include "workspace.hpp"

namespace trimtab {
namespace {

// Pairs computed together: bounds the workspace. At 4096 tokens of top-8 every expert's weights are read for hundreds
// of rows, so reading them once more per chunk costs little.
constexpr int64_t kMaxChunkPairs = 32768;
// fp32 partial outputs between two combines stay about this size, which the last-level cache holds.
constexpr int64_t kPartialsBytes = 8 << 20;

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

struct SortedPairs {
  ActiveSlot* slots;
  int64_t num_slots;
  int64_t num_rows;
  int64_t num_blocks;
  int32_t* token_of_row;
  int32_t* row_of_pair;
};

// Counting sort by slot; pairs of one slot keep token order.
Status sort_pairs(const MoeCall& call, const int64_t* slot_ids, int64_t num_tokens, int64_t* starts,
                  SortedPairs& sorted) {
  const int64_t num_pairs = num_tokens * call.top_k;
  std::fill(starts, starts + call.num_slots, 0);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const int64_t slot = slot_ids[pair];
    if (slot < -1 || slot >= call.num_slots) return Status::slot_out_of_range;
    if (slot >= 0) ++starts[slot];
  }
  sorted.num_slots = sorted.num_rows = sorted.num_blocks = 0;
  for (int64_t slot = 0; slot < call.num_slots; ++slot) {
    const int64_t rows = starts[slot];
    starts[slot] = sorted.num_rows;
    if (rows == 0) continue;
    const char* bytes = static_cast<const char*>(call.slot_table[slot]);
    if (!bytes) return Status::slot_without_weights;
    const int64_t blocks = ceil_div(rows, kRowBlock);
    sorted.slots[sorted.num_slots++] = {bytes, sorted.num_rows, rows, sorted.num_blocks, blocks};
    sorted.num_rows += rows;
    sorted.num_blocks += blocks;
  }
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const int64_t slot = slot_ids[pair];
    if (slot < 0) {
      sorted.row_of_pair[pair] = -1;
      continue;
    }
    const int64_t row = starts[slot]++;
    sorted.token_of_row[row] = static_cast<int32_t>(pair / call.top_k);
    sorted.row_of_pair[pair] = static_cast<int32_t>(row);
  }
  return Status::ok;
}

const char* row_address(const ConstRows& rows, int64_t row) {
  return static_cast<const char*>(rows.data) + row * rows.columns * (rows.scalar == Scalar::fp32 ? 4 : 2);
}

ConstRows from_row(const ConstRows& rows, int64_t row) {
  if (rows.addresses) return {nullptr, rows.scalar, rows.columns, rows.addresses + row};
  return {row_address(rows, row), rows.scalar, rows.columns};
}

Rows from_row(const Rows& rows, int64_t row) {
  if (rows.addresses) return {nullptr, rows.scalar, rows.columns, rows.addresses + row};
  const ConstRows same{rows.data, rows.scalar, rows.columns};
  return {const_cast<char*>(row_address(same, row)), rows.scalar, rows.columns};
}

Status run_chunk(const KernelTable& kernels, const MoeCall& call, int64_t first_token, int64_t num_tokens) {
  const SlotLayout& layout = call.layout;
  const int64_t pairs = num_tokens * call.top_k;
  const bool quantised = layout.format == WeightFormat::int8;
  const int64_t panels = layout.down.panels;
  const int64_t panel_partials = std::max<int64_t>(pairs, 1) * kPanelColumns;
  const int64_t group = std::min(
      panels, std::max<int64_t>({kPartialsBytes / 4 / panel_partials, call.num_threads, 2}));
  const int64_t num_groups = ceil_div(panels, group);
  const int64_t hidden_stride = row_stride(layout.hidden_capacity, kernels.row_element_bytes);
  const int64_t inner_stride = row_stride(layout.inner_capacity, kernels.row_element_bytes);
  const int64_t inner_floats = quantised ? pairs * layout.inner_capacity : 0;

  const int64_t parts[] = {
      call.num_slots * static_cast<int64_t>(sizeof(int64_t)),
      std::min(call.num_slots, pairs) * static_cast<int64_t>(sizeof(ActiveSlot)),
      pairs * 4,
      pairs * 4,
      num_tokens * hidden_stride,
      num_tokens * 4,
      inner_floats * 4,
      pairs * inner_stride,
      pairs * 4,
      group * panel_partials * 4,
      (1 + num_groups) * static_cast<int64_t>(sizeof(int64_t)),
  };
  int64_t bytes = 0;
  for (const int64_t part : parts) bytes += Workspace::rounded(part);
  Workspace& workspace = Workspace::of_this_thread();
  workspace.begin(bytes);

  SortedPairs sorted{};
  int64_t* starts = workspace.take<int64_t>(call.num_slots);
  sorted.slots = workspace.take<ActiveSlot>(std::min(call.num_slots, pairs));
  sorted.token_of_row = workspace.take<int32_t>(pairs);
  sorted.row_of_pair = workspace.take<int32_t>(pairs);
  const Status status =
      sort_pairs(call, call.slot_ids + first_token * call.top_k, num_tokens, starts, sorted);
  if (status != Status::ok) return status;

  MoeChunk chunk{};
  chunk.layout = &layout;
  chunk.activation = call.activation;
  chunk.hidden = from_row(call.hidden, first_token);
  chunk.out = from_row(call.out, first_token);
  chunk.gate_weights = call.gate_weights + first_token * call.top_k;
  chunk.num_tokens = num_tokens;
  chunk.top_k = call.top_k;
  chunk.slots = sorted.slots;
  chunk.num_slots = sorted.num_slots;
  chunk.num_rows = sorted.num_rows;
  chunk.num_blocks = sorted.num_blocks;
  chunk.token_of_row = sorted.token_of_row;
  chunk.row_of_pair = sorted.row_of_pair;
  chunk.num_threads = call.num_threads;
  chunk.group_panels = group;
  chunk.hidden_rows = workspace.take<char>(num_tokens * hidden_stride);
  chunk.hidden_scales = workspace.take<float>(num_tokens);
  chunk.inner = workspace.take<float>(inner_floats);
  chunk.inner_rows = workspace.take<char>(pairs * inner_stride);
  chunk.inner_scales = workspace.take<float>(pairs);
  chunk.partials = workspace.take<float>(group * panel_partials);
  chunk.counters = workspace.take<int64_t>(1 + num_groups);
  std::fill(chunk.counters, chunk.counters + 1 + num_groups, 0);
  kernels.moe(chunk);
  return Status::ok;
}

}  // namespace

Status run_moe(const KernelTable& kernels, const MoeCall& call) try {
  const int64_t chunk = std::max<int64_t>(1, kMaxChunkPairs / std::max<int64_t>(1, call.top_k));
  for (int64_t first = 0; first < call.num_tokens; first += chunk) {
    const Status status = run_chunk(kernels, call, first, std::min(chunk, call.num_tokens - first));
    if (status != Status::ok) return status;
  }
  return Status::ok;
} catch (const std::bad_alloc&) {
  return Status::out_of_memory;
}

Status run_linear(const KernelTable& kernels, const MatrixLayout& layout, const void* weights, const ConstRows& input,
                  const Rows& out, int64_t num_rows, int num_threads) try {
  const int64_t stride = row_stride(ceil_div(layout.depth, kRowPiece) * kRowPiece, kernels.row_element_bytes);
  const int64_t max_rows = kMaxChunkPairs / 4;
  for (int64_t first = 0; first < num_rows; first += max_rows) {
    const int64_t rows = std::min(max_rows, num_rows - first);
    Workspace& workspace = Workspace::of_this_thread();
    workspace.begin(Workspace::rounded(rows * stride) + Workspace::rounded(rows * 4) + Workspace::rounded(8));
    LinearCall call{};
    call.layout = &layout;
    call.weights = static_cast<const char*>(weights);
    call.input = from_row(input, first);
    call.out = from_row(out, first);
    call.num_rows = rows;
    call.num_threads = num_threads;
    call.input_rows = workspace.take<char>(rows * stride);
    call.input_scales = workspace.take<float>(rows);
    call.counters = workspace.take<int64_t>(1);
    *call.counters = 0;
    kernels.linear(call);
  }
  return Status::ok;
} catch (const std::bad_alloc&) {
  return Status::out_of_memory;
}

}  // namespace trimtab
