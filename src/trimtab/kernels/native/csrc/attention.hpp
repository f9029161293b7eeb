// Paged attention: what a call asks for, and the words its files share.
//
// A page is one block of one layer: for each key/value head the keys transposed, [Dk][S], so that a vector holds one
// coordinate of neighbouring tokens, then for each head the values as they come, [S][Dv]. S is the block size.
#pragma once

#include <cstdint>

#include "types.hpp"

namespace trimtab {

struct AttentionCall {
  // Queries [tokens, query_heads, key_size] with strides in elements; out [tokens, query_heads, value_size], no gaps.
  const void* query;
  int64_t query_token_stride;
  int64_t query_head_stride;
  void* out;
  Scalar scalar;  // of query, out and the cache
  // The cache of this layer: first key and first value of page 0, and elements from one page to the next.
  const void* keys;
  const void* values;
  int64_t page_stride;
  int64_t block_size;
  const int32_t* block_table;  // [rows, table_stride]
  int64_t table_stride;
  const int32_t* query_start;  // [rows + 1]
  const int32_t* seq_lens;     // [rows], the step's tokens included
  int64_t num_rows;
  int64_t query_heads;
  int64_t kv_heads;
  int64_t key_size;
  int64_t value_size;
  int64_t window;  // 0: full attention; else a query sees itself and the window - 1 tokens before
  const float* sinks;  // [query_heads] or null
  float scaling;
  float softcap;  // 0: none
  int num_threads;
};

// Queries of one row and one key/value head that attend together.
struct AttentionTile {
  int32_t row;
  int32_t first_query;  // within the row's queries of this step
  int32_t num_queries;
  int32_t kv_head;
};

// Query rows (queries x heads of a group) of one tile: enough to use a key in cache many times.
constexpr int64_t kTileRows = 48;
// Keys scored before the softmax's running maximum moves on; a multiple of every block size that is allowed.
constexpr int64_t kTileTokens = 256;
// Block sizes that a page may have: whole vectors of every instruction set, and a whole number of them in a tile.
constexpr bool block_size_allowed(int64_t block_size) {
  return block_size >= 16 && block_size <= kTileTokens && kTileTokens % block_size == 0;
}

// Floats that one thread needs beside its stack.
constexpr int64_t attention_scratch(int64_t key_size, int64_t value_size) {
  return kTileRows * (key_size + value_size + kTileTokens + 2);
}

using AttentionKernel = void (*)(const AttentionCall&, const AttentionTile&, float* scratch);

}  // namespace trimtab
