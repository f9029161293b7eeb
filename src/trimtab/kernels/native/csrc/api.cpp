// The C interface: pointers and plain integers. Callers check shapes and types (the Python binding does); what only the
// data can show, a slot id out of range or a slot without weights, comes back as a status.
#include <sys/mman.h>

#include <cstring>
#include <new>
#include <vector>

#include "core.hpp"

using namespace trimtab;

#define TRIMTAB_API extern "C" __attribute__((visibility("default")))

// Mirrored by library.py; the version changes with any signature, layout, or meaning of stored values.
struct TrimtabMoeLayer {
  int64_t hidden_size;
  int64_t intermediate_size;
  int64_t num_slots;
  const void* const* slot_table;
  int32_t level;
  int32_t format;
  int32_t has_gate;
  int32_t activation;
  float alpha;
  float limit;
};

TRIMTAB_API int trimtab_version() { return 3; }

TRIMTAB_API int trimtab_cpu_supports(int level, int format) {
  return cpu_supports(static_cast<Level>(level), static_cast<WeightFormat>(format));
}

TRIMTAB_API const char* trimtab_kernel_name(int level, int format) {
  const KernelTable* kernels = find_kernels(static_cast<Level>(level), static_cast<WeightFormat>(format));
  return kernels ? kernels->name : "";
}

// 0 when the kernel computes what it should; else 1 and the reason in `message`.
TRIMTAB_API int trimtab_self_test(int level, int format, char* message, int64_t message_bytes) {
  const KernelTable* kernels = find_kernels(static_cast<Level>(level), static_cast<WeightFormat>(format));
  const std::string failure = kernels ? self_test(*kernels) : "no such kernel";
  if (failure.empty()) return 0;
  std::strncpy(message, failure.c_str(), message_bytes - 1);
  message[message_bytes - 1] = 0;
  return 1;
}

TRIMTAB_API int64_t trimtab_slot_bytes(int format, int64_t hidden_size, int64_t intermediate_size, int has_gate) {
  return slot_layout(static_cast<WeightFormat>(format), hidden_size, intermediate_size, has_gate).bytes;
}

TRIMTAB_API void trimtab_pack_slot(int format, int64_t hidden_size, int64_t intermediate_size, int has_gate,
                                   const void* gate_up, const float* gate_up_bias, const float* gate_up_scale,
                                   const void* down, const float* down_bias, const float* down_scale, void* slot) {
  const SlotLayout layout = slot_layout(static_cast<WeightFormat>(format), hidden_size, intermediate_size, has_gate);
  pack_slot(layout, {gate_up, gate_up_bias, gate_up_scale}, {down, down_bias, down_scale}, static_cast<char*>(slot));
}

TRIMTAB_API void trimtab_unpack_slot(int format, int64_t hidden_size, int64_t intermediate_size, int has_gate,
                                     void* gate_up, float* gate_up_bias, float* gate_up_scale, void* down,
                                     float* down_bias, float* down_scale, const void* slot) {
  const SlotLayout layout = slot_layout(static_cast<WeightFormat>(format), hidden_size, intermediate_size, has_gate);
  unpack_slot(layout, static_cast<const char*>(slot), {gate_up, gate_up_bias, gate_up_scale},
              {down, down_bias, down_scale});
}

TRIMTAB_API int64_t trimtab_linear_bytes(int format, int64_t columns, int64_t depth) {
  int64_t bytes = 0;
  linear_layout(static_cast<WeightFormat>(format), columns, depth, &bytes);
  return bytes;
}

TRIMTAB_API void trimtab_pack_linear(int format, int64_t columns, int64_t depth, const void* weights, const float* bias,
                                     const float* scale, void* packed) {
  int64_t bytes = 0;
  const MatrixLayout layout = linear_layout(static_cast<WeightFormat>(format), columns, depth, &bytes);
  pack_linear(layout, {weights, bias, scale}, static_cast<char*>(packed));
}

TRIMTAB_API void trimtab_unpack_linear(int format, int64_t columns, int64_t depth, void* weights, float* bias,
                                       float* scale, const void* packed) {
  int64_t bytes = 0;
  const MatrixLayout layout = linear_layout(static_cast<WeightFormat>(format), columns, depth, &bytes);
  unpack_linear(layout, static_cast<const char*>(packed), {weights, bias, scale});
}

namespace {

int run_layer(const TrimtabMoeLayer* layer, const ConstRows& hidden, const Rows& out, const int64_t* slot_ids,
              const float* gate_weights, int64_t num_tokens, int64_t top_k, int num_threads) {
  const WeightFormat format = static_cast<WeightFormat>(layer->format);
  const KernelTable* kernels = find_kernels(static_cast<Level>(layer->level), format);
  if (!kernels) return static_cast<int>(Status::no_kernel);
  MoeCall call{};
  call.layout = slot_layout(format, layer->hidden_size, layer->intermediate_size, layer->has_gate);
  call.activation = {static_cast<ActivationKind>(layer->activation), layer->alpha, layer->limit};
  call.slot_table = layer->slot_table;
  call.num_slots = layer->num_slots;
  call.hidden = hidden;
  call.out = out;
  call.slot_ids = slot_ids;
  call.gate_weights = gate_weights;
  call.num_tokens = num_tokens;
  call.top_k = top_k;
  call.num_threads = num_threads;
  return static_cast<int>(run_moe(*kernels, call));
}

}  // namespace

// hidden, out: [num_tokens, hidden_size] of `scalar`; slot_ids, gate_weights: [num_tokens, top_k].
TRIMTAB_API int trimtab_moe(const TrimtabMoeLayer* layer, const void* hidden, int hidden_scalar, void* out,
                            int out_scalar, const int64_t* slot_ids, const float* gate_weights, int64_t num_tokens,
                            int64_t top_k, int num_threads) {
  return run_layer(layer, {hidden, static_cast<Scalar>(hidden_scalar), layer->hidden_size},
                   {out, static_cast<Scalar>(out_scalar), layer->hidden_size}, slot_ids, gate_weights, num_tokens,
                   top_k, num_threads);
}

// Each row's one expert without a gate weight, rows read and fp32 outputs written wherever they lie.
TRIMTAB_API int trimtab_experts_in_place(const TrimtabMoeLayer* layer, const void* const* rows, int scalar,
                                         void* const* outputs, const int64_t* slot_ids, int64_t num_rows,
                                         int num_threads) try {
  // A product with one, added to zero, is the expert's output itself.
  const std::vector<float> ones(num_rows, 1.0f);
  return run_layer(layer, {nullptr, static_cast<Scalar>(scalar), layer->hidden_size, rows},
                   {nullptr, Scalar::fp32, layer->hidden_size, outputs}, slot_ids, ones.data(), num_rows, 1,
                   num_threads);
} catch (const std::bad_alloc&) {
  return static_cast<int>(Status::out_of_memory);
}

TRIMTAB_API int trimtab_linear(int level, int format, int64_t columns, int64_t depth, const void* packed,
                               const void* input, int input_scalar, void* out, int out_scalar, int64_t num_rows,
                               int num_threads) {
  const KernelTable* kernels = find_kernels(static_cast<Level>(level), static_cast<WeightFormat>(format));
  if (!kernels) return static_cast<int>(Status::no_kernel);
  int64_t bytes = 0;
  const MatrixLayout layout = linear_layout(static_cast<WeightFormat>(format), columns, depth, &bytes);
  return static_cast<int>(run_linear(*kernels, layout, packed, {input, static_cast<Scalar>(input_scalar), depth},
                                     {out, static_cast<Scalar>(out_scalar), columns}, num_rows, num_threads));
}

// Weights are read front to back once per step: 2 MiB pages save most of the address translations. Advice only.
TRIMTAB_API void trimtab_advise_huge_pages(void* memory, int64_t bytes) {
  const uintptr_t page = 4096;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(memory) + bytes) / page * page;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}
