// Rows times one panel of weights: the inner loop of every kernel, written once over an instruction set's `Ops`.
//
// Row invariance: one accumulator per (row, column) takes its products in the order of K, one after the other,
// whatever number of rows shares the tile and however K is cut into blocks (sums are stored and reloaded exactly).
// A row's result is therefore bitwise the same alone, in any batch and at any position.
//
// An `Ops` provides: Rows (a row kind of rows.hpp), Vector (one register of sums), Weight (one register of weights),
// kVectorBytes, kMaxRows (the tallest tile whose sums fit the registers), kParts (how many sub-steps a 4-byte word of weights is taken in), kRowElements (row elements per step),
// vectors_for(rows) (registers of columns that fit beside that many rows), load/store of sums, weights<part>(address),
// broadcast<part>(row, step) and multiply_add(sum, activation, weight).
// Anonymous namespace: see types.hpp.
#pragma once

#include <immintrin.h>

#include "rows.hpp"

namespace trimtab {
namespace {

// Steps multiplied for all rows before the next ones. Many rows pass by a block: 32 KiB stay in the nearest caches and
// sums are reloaded seldom. Few rows wait for memory: a shorter block is prefetched just in time.
constexpr int64_t kBlockSteps = 128;
constexpr int64_t kShortBlockSteps = 32;
constexpr int64_t kPrefetchSteps = 8;
constexpr int64_t kCacheLineBytes = 64;

// Brings the next block into the L2 cache while this one is multiplied: the lines are shared out evenly over the
// passes, so memory and arithmetic overlap for any number of rows.
struct Prefetcher {
  const char* next;
  int64_t lines_left;
  int64_t lines_per_turn;

  void turn() {
    const int64_t lines = lines_per_turn < lines_left ? lines_per_turn : lines_left;
    for (int64_t i = 0; i < lines; ++i) _mm_prefetch(next + i * kCacheLineBytes, _MM_HINT_T1);
    next += lines * kCacheLineBytes;
    lines_left -= lines;
  }
};

template <class Ops, int M, int V, int part>
inline __attribute__((always_inline)) void accumulate(typename Ops::Vector (&sums)[M][V],
                                                      const typename Ops::Rows::Element* const (&rows)[M],
                                                      const char* weights, int64_t step) {
  typename Ops::Weight weight[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) weight[v] = Ops::template weights<part>(weights + v * Ops::kVectorBytes);
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    const auto activation = Ops::template broadcast<part>(rows[m], step);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[m][v] = Ops::multiply_add(sums[m][v], activation, weight[v]);
  }
}

// M rows times V registers of columns, for one block of steps.
template <class Ops, int M, int V>
inline void multiply_columns(const typename Ops::Rows::Element* const (&rows)[M], const char* weights, int64_t steps,
                             typename Ops::Rows::Sum* sums_out, Prefetcher& prefetcher) {
  constexpr int64_t lanes = Ops::kVectorBytes / 4;
  typename Ops::Vector sums[M][V];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[m][v] = Ops::load(sums_out + m * kPanelColumns + v * lanes);
  for (int64_t first = 0; first < steps; first += kPrefetchSteps) {
    prefetcher.turn();
    const int64_t last = first + kPrefetchSteps < steps ? first + kPrefetchSteps : steps;
    for (int64_t step = first; step < last; ++step) {
      accumulate<Ops, M, V, 0>(sums, rows, weights + step * kStepBytes, step);
      if constexpr (Ops::kParts == 2) {
        // Keeps the parts apart: interleaved by the compiler they need more registers than there are, and spill.
#pragma GCC unroll 6
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) asm volatile("" : "+x"(sums[m][v])::"memory");
        accumulate<Ops, M, V, 1>(sums, rows, weights + step * kStepBytes, step);
      }
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) Ops::store(sums_out + m * kPanelColumns + v * lanes, sums[m][v]);
}

// M rows times the 64 columns of a panel, for one block of steps.
template <class Ops, int M>
void multiply_tile(const typename Ops::Rows::Element* const* row_pointers, const char* weights, int64_t steps,
                   typename Ops::Rows::Sum* sums, Prefetcher& prefetcher) {
  constexpr int V = Ops::vectors_for(M);
  const typename Ops::Rows::Element* rows[M];
  for (int m = 0; m < M; ++m) rows[m] = row_pointers[m];
  for (int64_t at = 0; at < kStepBytes; at += V * Ops::kVectorBytes)
    multiply_columns<Ops, M, V>(rows, weights + at, steps, sums + at / 4, prefetcher);
}

// Up to kRowBlock rows times one panel: `sums` [num_rows, 64]. `next_panel` is what this thread reads afterwards.
template <class Ops>
void multiply_panel(const typename Ops::Rows::Element* const* rows, int64_t num_rows, const char* panel, int64_t steps,
                    const char* next_panel, typename Ops::Rows::Sum* sums) {
  using Element = typename Ops::Rows::Element;
  constexpr int64_t kVectors = kStepBytes / Ops::kVectorBytes;
  constexpr int64_t kElementBytes = sizeof(Element);
  for (int64_t i = 0; i < num_rows * kPanelColumns; ++i) sums[i] = 0;
  // Tiles of nearly equal height: seven rows are four and three, not six and a wasteful one.
  static_assert(Ops::kMaxRows == 4 || Ops::kMaxRows == 6, "the switch below knows these");
  const int64_t tiles = (num_rows + Ops::kMaxRows - 1) / Ops::kMaxRows;
  const int64_t passes = tiles * (kVectors / Ops::vectors_for(static_cast<int>((num_rows + tiles - 1) / tiles)));
  const int64_t block = tiles == 1 ? kShortBlockSteps : kBlockSteps;
  for (int64_t first = 0; first < steps; first += block) {
    const int64_t count = first + block < steps ? block : steps - first;
    const char* weights = panel + first * kStepBytes;
    const bool is_last = first + count == steps;
    const int64_t lines = count * (kStepBytes / kCacheLineBytes);
    const int64_t turns = passes * ((count + kPrefetchSteps - 1) / kPrefetchSteps);
    Prefetcher prefetcher{is_last ? next_panel : weights + count * kStepBytes, lines, (lines + turns - 1) / turns};
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t top = num_rows * tile / tiles;
      const int64_t height = num_rows * (tile + 1) / tiles - top;
      const Element* at[Ops::kMaxRows];
      for (int64_t m = 0; m < height; ++m) at[m] = rows[top + m] + first * Ops::kRowElements;
      // The next tile's piece of each row is too short for the hardware prefetcher to notice.
      const int64_t end = num_rows * (tile + 2) / tiles < num_rows ? num_rows * (tile + 2) / tiles : num_rows;
      for (int64_t m = top + height; m < end; ++m) {
        const char* piece = reinterpret_cast<const char*>(rows[m] + first * Ops::kRowElements);
        for (int64_t byte = 0; byte < count * kElementBytes * Ops::kRowElements; byte += kCacheLineBytes)
          _mm_prefetch(piece + byte, _MM_HINT_T0);
      }
      auto* tile_sums = sums + top * kPanelColumns;
      switch (height) {
        case 1: multiply_tile<Ops, 1>(at, weights, count, tile_sums, prefetcher); break;
        case 2: multiply_tile<Ops, 2>(at, weights, count, tile_sums, prefetcher); break;
        case 3: multiply_tile<Ops, 3>(at, weights, count, tile_sums, prefetcher); break;
        case 4: multiply_tile<Ops, 4>(at, weights, count, tile_sums, prefetcher); break;
        default:
          if constexpr (Ops::kMaxRows == 6) {
            if (height == 5) multiply_tile<Ops, 5>(at, weights, count, tile_sums, prefetcher);
            if (height == 6) multiply_tile<Ops, 6>(at, weights, count, tile_sums, prefetcher);
          }
      }
    }
  }
}

}  // namespace
}  // namespace trimtab
