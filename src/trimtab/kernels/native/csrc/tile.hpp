// Rows times one panel of weights: the inner loop of every kernel, written once over an instruction set's `Ops`.
//
// Row invariance: one accumulator per (row, column) takes its products in the order of K, one after the other,
// whatever number of rows shares the tile and however K is cut into blocks (sums are stored and reloaded exactly).
// A row's result is therefore bitwise the same alone, in any batch and at any position.
//
// An `Ops` provides: Rows (a row kind of rows.hpp), Vector (one register of sums), Weight (one register of weights),
// kVectorBytes, kMaxRows (the tallest tile whose sums fit the registers), kParts (how many sub-steps a 4-byte word of
// weights is taken in), kRowElements (row elements per step), vectors_for(rows) (registers of columns that fit beside
// that many rows), load/store of sums, weights<part>(address), broadcast<part>(row, step) and
// multiply_add(sum, activation, weight). kStripsFrom is the number of rows from which a panel is multiplied strip by
// strip (0: never); such an Ops also provides kStripRows, keep/kept (a widened register to and from memory) and
// broadcast_word(address): the 4 bytes of a row that meet one part of a step.
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

// Many rows: the columns of one cache line of each step, a "strip", are widened once for all rows and laid out one after
// the other. What is left per step is loads, broadcasts and products, without gaps between addresses: few instructions,
// which is what counts where another hardware thread shares the core's front end, and no few cache sets that all steps
// fall into. 256 words are 16 KiB: half of the L1 cache.
constexpr int64_t kStripBytes = 64;
constexpr int64_t kStripWords = 256;
constexpr int64_t kWordsPerTurn = 32;
constexpr int64_t kWordsTogether = 4;

// Words of a strip, in order: the parts of the first step, the parts of the second, ... 64 bytes each.
template <class Ops, int part>
inline void widen_part(const char* weights, char* strip) {
#pragma GCC unroll 2
  for (int64_t at = 0; at < kStripBytes; at += Ops::kVectorBytes)
    Ops::keep(strip + part * kStripBytes + at, Ops::template weights<part>(weights + at));
}

template <class Ops>
inline void widen_strip(const char* weights, int64_t steps, char* strip) {
  for (int64_t step = 0; step < steps; ++step) {
    widen_part<Ops, 0>(weights, strip);
    if constexpr (Ops::kParts == 2) widen_part<Ops, 1>(weights, strip);
    weights += kStepBytes;
    strip += Ops::kParts * kStripBytes;
  }
}

// `at`: bytes from the start of the rows to the word that meets `strip`'s first one.
template <class Ops, int M, int V>
inline __attribute__((always_inline)) void multiply_word(typename Ops::Vector (&sums)[M][V],
                                                         const char* const (&rows)[M], const char* strip, int64_t at) {
  typename Ops::Weight weight[V];
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) weight[v] = Ops::kept(strip + v * Ops::kVectorBytes);
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    const auto activation = Ops::broadcast_word(rows[m] + at);
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) sums[m][v] = Ops::multiply_add(sums[m][v], activation, weight[v]);
  }
}

// M rows, given by the address of their first word, times one strip.
// A function of its own: inlined side by side, the tiles take each other's registers.
template <class Ops, int M>
__attribute__((noinline)) void multiply_strip(const char* const* row_words, const char* strip, int64_t words,
                                              typename Ops::Rows::Sum* sums_out, Prefetcher& prefetcher) {
  constexpr int V = kStripBytes / Ops::kVectorBytes;
  constexpr int64_t lanes = Ops::kVectorBytes / 4;
  const char* rows[M];
  for (int m = 0; m < M; ++m) rows[m] = row_words[m];
  typename Ops::Vector sums[M][V];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) sums[m][v] = Ops::load(sums_out + m * kPanelColumns + v * lanes);
  int64_t at = 0;
  for (int64_t left = words; left > 0;) {
    prefetcher.turn();
    int64_t turn = left < kWordsPerTurn ? left : kWordsPerTurn;
    left -= turn;
    for (; turn >= kWordsTogether; turn -= kWordsTogether) {
#pragma GCC unroll 4
      for (int64_t i = 0; i < kWordsTogether; ++i)
        multiply_word<Ops, M, V>(sums, rows, strip + i * kStripBytes, at + i * kWordBytes);
      at += kWordsTogether * kWordBytes;
      strip += kWordsTogether * kStripBytes;
      // One index for all rows, where the compiler would advance a pointer for each.
      asm("" : "+r"(at));
    }
    for (; turn > 0; --turn, at += kWordBytes, strip += kStripBytes) multiply_word<Ops, M, V>(sums, rows, strip, at);
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) Ops::store(sums_out + m * kPanelColumns + v * lanes, sums[m][v]);
}

// As multiply_panel below, the panel widened strip by strip; `sums` are zeros on entry.
template <class Ops>
void multiply_panel_in_strips(const typename Ops::Rows::Element* const* rows, int64_t num_rows, const char* panel,
                              int64_t steps, const char* next_panel, typename Ops::Rows::Sum* sums) {
  static_assert(Ops::kStripRows == 6, "the switch below knows this");
  constexpr int64_t kBlock = kStripWords / Ops::kParts;
  alignas(kStripBytes) char strip[kStripWords * kStripBytes];
  const int64_t tiles = (num_rows + Ops::kStripRows - 1) / Ops::kStripRows;
  for (int64_t first = 0; first < steps; first += kBlock) {
    const int64_t count = first + kBlock < steps ? kBlock : steps - first;
    const char* weights = panel + first * kStepBytes;
    const bool is_last = first + count == steps;
    const int64_t words = count * Ops::kParts;
    const int64_t lines = count * (kStepBytes / kCacheLineBytes);
    const int64_t turns = (kStepBytes / kStripBytes) * tiles * ((words + kWordsPerTurn - 1) / kWordsPerTurn);
    Prefetcher prefetcher{is_last ? next_panel : weights + count * kStepBytes, lines, (lines + turns - 1) / turns};
    for (int64_t at = 0; at < kStepBytes; at += kStripBytes) {
      widen_strip<Ops>(weights + at, count, strip);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t top = num_rows * tile / tiles;
        const int64_t height = num_rows * (tile + 1) / tiles - top;
        const char* words_at[Ops::kStripRows];
        for (int64_t m = 0; m < height; ++m)
          words_at[m] = reinterpret_cast<const char*>(rows[top + m] + first * Ops::kRowElements);
        auto* tile_sums = sums + top * kPanelColumns + at / 4;
        switch (height) {
          case 1: multiply_strip<Ops, 1>(words_at, strip, words, tile_sums, prefetcher); break;
          case 2: multiply_strip<Ops, 2>(words_at, strip, words, tile_sums, prefetcher); break;
          case 3: multiply_strip<Ops, 3>(words_at, strip, words, tile_sums, prefetcher); break;
          case 4: multiply_strip<Ops, 4>(words_at, strip, words, tile_sums, prefetcher); break;
          case 5: multiply_strip<Ops, 5>(words_at, strip, words, tile_sums, prefetcher); break;
          default: multiply_strip<Ops, 6>(words_at, strip, words, tile_sums, prefetcher);
        }
      }
    }
  }
}

// Up to kRowBlock rows times one panel: `sums` [num_rows, 64]. `next_panel` is what this thread reads afterwards.
template <class Ops>
void multiply_panel(const typename Ops::Rows::Element* const* rows, int64_t num_rows, const char* panel, int64_t steps,
                    const char* next_panel, typename Ops::Rows::Sum* sums) {
  using Element = typename Ops::Rows::Element;
  constexpr int64_t kVectors = kStepBytes / Ops::kVectorBytes;
  for (int64_t i = 0; i < num_rows * kPanelColumns; ++i) sums[i] = 0;
  if constexpr (Ops::kStripsFrom > 0) {
    if (num_rows >= Ops::kStripsFrom)
      return multiply_panel_in_strips<Ops>(rows, num_rows, panel, steps, next_panel, sums);
  }
  // Tiles of nearly equal height: seven rows are four and three, not six and a wasteful one.
  static_assert(Ops::kMaxRows >= 4 && Ops::kMaxRows <= 6, "the switch below knows these");
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
      auto* tile_sums = sums + top * kPanelColumns;
      switch (height) {
        case 1: multiply_tile<Ops, 1>(at, weights, count, tile_sums, prefetcher); break;
        case 2: multiply_tile<Ops, 2>(at, weights, count, tile_sums, prefetcher); break;
        case 3: multiply_tile<Ops, 3>(at, weights, count, tile_sums, prefetcher); break;
        case 4: multiply_tile<Ops, 4>(at, weights, count, tile_sums, prefetcher); break;
        default:
          if constexpr (Ops::kMaxRows >= 5)
            if (height == 5) multiply_tile<Ops, 5>(at, weights, count, tile_sums, prefetcher);
          if constexpr (Ops::kMaxRows == 6)
            if (height == 6) multiply_tile<Ops, 6>(at, weights, count, tile_sums, prefetcher);
      }
    }
  }
}

}  // namespace
}  // namespace trimtab
