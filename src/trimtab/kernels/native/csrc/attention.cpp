// Runs paged attention: cuts a step into tiles and shares them out; writes keys and values into pages.
#include "attention.hpp"

#include <omp.h>

#include <algorithm>
#include <new>
#include <vector>

#include "core.hpp"
#include "workspace.hpp"

#define TRIMTAB_API extern "C" __attribute__((visibility("default")))

namespace trimtab {

extern const AttentionKernel kAvx2AttentionFp32;
extern const AttentionKernel kAvx2AttentionBf16;
extern const AttentionKernel kAvx512AttentionFp32;
extern const AttentionKernel kAvx512AttentionBf16;

namespace {

AttentionKernel find_attention(Level level, Scalar scalar) {
  if (level == Level::avx512) return scalar == Scalar::fp32 ? kAvx512AttentionFp32 : kAvx512AttentionBf16;
  return scalar == Scalar::fp32 ? kAvx2AttentionFp32 : kAvx2AttentionBf16;
}

std::vector<AttentionTile> cut_tiles(const AttentionCall& call) {
  const int64_t group = call.query_heads / call.kv_heads;
  const int64_t queries = std::max<int64_t>(1, kTileRows / group);
  std::vector<AttentionTile> tiles;
  for (int64_t row = 0; row < call.num_rows; ++row) {
    const int64_t count = call.query_start[row + 1] - call.query_start[row];
    // The last queries see the most keys: longest work first keeps the threads even.
    for (int64_t first = (count - 1) / queries * queries; first >= 0 && count > 0; first -= queries)
      for (int64_t head = 0; head < call.kv_heads; ++head)
        tiles.push_back({static_cast<int32_t>(row), static_cast<int32_t>(first),
                         static_cast<int32_t>(std::min(queries, count - first)), static_cast<int32_t>(head)});
  }
  return tiles;
}

Status run_attention(Level level, const AttentionCall& call) try {
  const AttentionKernel kernel = find_attention(level, call.scalar);
  const std::vector<AttentionTile> tiles = cut_tiles(call);
  const int64_t floats = attention_scratch(call.key_size, call.value_size);
  const int64_t num_tiles = static_cast<int64_t>(tiles.size());
  const int threads = static_cast<int>(std::min<int64_t>(call.num_threads, std::max<int64_t>(1, num_tiles)));
  // Allocated here, where a failure can be reported: no exception may leave a parallel region.
  Workspace& workspace = Workspace::of_this_thread();
  const int64_t stride = Workspace::rounded(floats * 4) / 4;
  workspace.begin(threads * stride * 4);
  float* scratch = workspace.take<float>(threads * stride);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float* own = scratch + omp_get_thread_num() * stride;
#pragma omp for schedule(dynamic, 1)
    for (int64_t index = 0; index < num_tiles; ++index) kernel(call, tiles[index], own);
  }
  return Status::ok;
} catch (const std::bad_alloc&) {
  return Status::out_of_memory;
}

struct PageWrite {
  const void* key;
  const void* value;
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
  void* keys;
  void* values;
  int64_t page_stride, block_size;
  const int64_t* slots;
  int64_t num_tokens, kv_heads, key_size, value_size;
  int32_t element_bytes;
  int32_t num_threads;
};

template <class Element>
void write_pages(const PageWrite& call) {
  const Element* key = static_cast<const Element*>(call.key);
  const Element* value = static_cast<const Element*>(call.value);
  const int64_t size = call.block_size;
  const bool parallel = call.num_threads > 1 && call.num_tokens * call.kv_heads >= 64;
#pragma omp parallel for schedule(static) num_threads(call.num_threads) if (parallel)
  for (int64_t token = 0; token < call.num_tokens; ++token) {
    const int64_t page = call.slots[token] / size, at = call.slots[token] % size;
    for (int64_t head = 0; head < call.kv_heads; ++head) {
      const Element* k = key + token * call.key_token_stride + head * call.key_head_stride;
      const Element* v = value + token * call.value_token_stride + head * call.value_head_stride;
      Element* keys = static_cast<Element*>(call.keys) + page * call.page_stride + head * call.key_size * size + at;
      Element* values =
          static_cast<Element*>(call.values) + page * call.page_stride + (head * size + at) * call.value_size;
      for (int64_t d = 0; d < call.key_size; ++d) keys[d * size] = k[d];
      for (int64_t d = 0; d < call.value_size; ++d) values[d] = v[d];
    }
  }
}

}  // namespace
}  // namespace trimtab

using namespace trimtab;

TRIMTAB_API int trimtab_attention_block_size_allowed(int64_t block_size) { return block_size_allowed(block_size); }

TRIMTAB_API int trimtab_attention(int level, const AttentionCall* call) {
  return static_cast<int>(run_attention(static_cast<Level>(level), *call));
}

TRIMTAB_API void trimtab_write_pages(const PageWrite* call) {
  call->element_bytes == 4 ? write_pages<uint32_t>(*call) : write_pages<uint16_t>(*call);
}
