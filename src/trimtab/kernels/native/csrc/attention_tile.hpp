// One tile of paged attention over an instruction set's `Ops`. Anonymous namespace: see types.hpp.
//
// Every sum has an order of its own that the other rows of the step, the tile's height and the number of threads do not
// touch: scores add up over the key's coordinates one by one, values token by token, and the softmax's running maximum
// moves at multiples of kTileTokens of the sequence. So a query's result is bitwise the same in any batch.
#pragma once

#include "attention.hpp"
#include "numerics.hpp"

namespace trimtab {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();

inline float load_scalar(const float* at) { return *at; }
inline float load_scalar(const uint16_t* at) { return widen_bf16(*at); }
inline void store_scalar(float* at, float value) { *at = value; }
inline void store_scalar(uint16_t* at, float value) { *at = round_to_bf16(value); }

// scores[m][token] = query[m] . key[token] for `rows` queries and one vector pair (or single) of tokens.
template <class Ops, class Element, int rows, int vectors>
inline void score(const float* query, int64_t key_size, const Element* keys, int64_t block_size, float* scores) {
  typename Ops::Vector sums[rows][vectors];
  for (int m = 0; m < rows; ++m)
    for (int v = 0; v < vectors; ++v) sums[m][v] = Ops::zero();
  for (int64_t d = 0; d < key_size; ++d) {
    typename Ops::Vector key[vectors];
    for (int v = 0; v < vectors; ++v) key[v] = Ops::load(keys + d * block_size + v * Ops::kWidth);
    for (int m = 0; m < rows; ++m) {
      const typename Ops::Vector q = Ops::broadcast(query[m * key_size + d]);
      for (int v = 0; v < vectors; ++v) sums[m][v] = Ops::multiply_add(sums[m][v], q, key[v]);
    }
  }
  for (int m = 0; m < rows; ++m)
    for (int v = 0; v < vectors; ++v) Ops::store(scores + m * kTileTokens + v * Ops::kWidth, sums[m][v]);
}

template <class Ops, class Element, int rows>
inline void score_block(const float* query, int64_t key_size, const Element* keys, int64_t block_size, float* scores) {
  int64_t token = 0;
  for (; token + 2 * Ops::kWidth <= block_size; token += 2 * Ops::kWidth)
    score<Ops, Element, rows, 2>(query, key_size, keys + token, block_size, scores + token);
  for (; token < block_size; token += Ops::kWidth)
    score<Ops, Element, rows, 1>(query, key_size, keys + token, block_size, scores + token);
}

// sums[m][column] += weights[m][token] * value[token][column] over a run of tokens, for one vector pair of columns.
template <class Ops, class Element, int rows, int vectors>
inline void add_values(const float* weights, const Element* values, int64_t value_size, int64_t tokens, float* sums) {
  typename Ops::Vector held[rows][vectors];
  for (int m = 0; m < rows; ++m)
    for (int v = 0; v < vectors; ++v) held[m][v] = Ops::load(sums + m * value_size + v * Ops::kWidth);
  for (int64_t token = 0; token < tokens; ++token) {
    typename Ops::Vector value[vectors];
    for (int v = 0; v < vectors; ++v) value[v] = Ops::load(values + token * value_size + v * Ops::kWidth);
    for (int m = 0; m < rows; ++m) {
      const typename Ops::Vector p = Ops::broadcast(weights[m * kTileTokens + token]);
      for (int v = 0; v < vectors; ++v) held[m][v] = Ops::multiply_add(held[m][v], p, value[v]);
    }
  }
  for (int m = 0; m < rows; ++m)
    for (int v = 0; v < vectors; ++v) Ops::store(sums + m * value_size + v * Ops::kWidth, held[m][v]);
}

template <class Ops, class Element, int rows>
inline void add_block(const float* weights, const Element* values, int64_t value_size, int64_t tokens, float* sums) {
  int64_t column = 0;
  for (; column + 2 * Ops::kWidth <= value_size; column += 2 * Ops::kWidth)
    add_values<Ops, Element, rows, 2>(weights, values + column, value_size, tokens, sums + column);
  for (; column + Ops::kWidth <= value_size; column += Ops::kWidth)
    add_values<Ops, Element, rows, 1>(weights, values + column, value_size, tokens, sums + column);
  for (; column < value_size; ++column)
    for (int m = 0; m < rows; ++m)
      for (int64_t token = 0; token < tokens; ++token)
        sums[m * value_size + column] = __builtin_fmaf(
            weights[m * kTileTokens + token], load_scalar(values + token * value_size + column),
            sums[m * value_size + column]);
}

// Calls visit<rows>(first) for groups of up to Ops::kRows of `total` rows.
template <class Ops, class Visit>
inline void for_row_groups(int64_t total, Visit visit) {
  int64_t first = 0;
  for (; first + Ops::kRows <= total; first += Ops::kRows) visit(first, Ops::kRows);
  if (first < total) visit(first, static_cast<int>(total - first));
}

template <class Ops, class Element>
inline void score_rows(int rows, const float* query, int64_t key_size, const Element* keys, int64_t block_size,
                       float* scores) {
  switch (rows) {
    case 1: return score_block<Ops, Element, 1>(query, key_size, keys, block_size, scores);
    case 2: return score_block<Ops, Element, 2>(query, key_size, keys, block_size, scores);
    case 3: return score_block<Ops, Element, 3>(query, key_size, keys, block_size, scores);
    case 4: return score_block<Ops, Element, 4>(query, key_size, keys, block_size, scores);
    default: return score_block<Ops, Element, 5>(query, key_size, keys, block_size, scores);
  }
}

template <class Ops, class Element>
inline void add_rows(int rows, const float* weights, const Element* values, int64_t value_size, int64_t tokens,
                     float* sums) {
  switch (rows) {
    case 1: return add_block<Ops, Element, 1>(weights, values, value_size, tokens, sums);
    case 2: return add_block<Ops, Element, 2>(weights, values, value_size, tokens, sums);
    case 3: return add_block<Ops, Element, 3>(weights, values, value_size, tokens, sums);
    case 4: return add_block<Ops, Element, 4>(weights, values, value_size, tokens, sums);
    default: return add_block<Ops, Element, 5>(weights, values, value_size, tokens, sums);
  }
}

inline float tanh_of(float x) {
  const float e = exponential(-2.0f * (x < 0.0f ? -x : x));
  const float t = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -t : t;
}

// Turns a row's scores of positions [low, high) into weights, zero outside them up to `count`; moves the running
// maximum and total. Returns the factor for what was summed before.
inline float soften(float* scores, int64_t low, int64_t high, int64_t count, float softcap, float* maximum,
                    float* total) {
  if (softcap > 0.0f)
    for (int64_t i = low; i < high; ++i) scores[i] = softcap * tanh_of(scores[i] / softcap);
  // Sixteen lanes by position: the same order for every instruction set, whatever [low, high) is.
  constexpr int kLanes = 16;
  for (int64_t i = 0; i < low; ++i) scores[i] = kMinusInfinity;
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = high; i < padded; ++i) scores[i] = kMinusInfinity;
  float lanes[kLanes];
  for (int l = 0; l < kLanes; ++l) lanes[l] = kMinusInfinity;
  for (int64_t i = 0; i < padded; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] = scores[i + l] > lanes[l] ? scores[i + l] : lanes[l];
  float peak = *maximum;
  for (int l = 0; l < kLanes; ++l) peak = lanes[l] > peak ? lanes[l] : peak;
  for (int l = 0; l < kLanes; ++l) lanes[l] = 0.0f;
  for (int64_t i = 0; i < padded; i += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      // exponential() is clamped from below: what is masked must weigh nothing at all.
      const float weight = scores[i + l] == kMinusInfinity ? 0.0f : exponential(scores[i + l] - peak);
      scores[i + l] = weight;
      lanes[l] += weight;
    }
  float sum = 0.0f;
  for (int l = 0; l < kLanes; ++l) sum += lanes[l];
  const float factor = *maximum == kMinusInfinity ? 0.0f : exponential(*maximum - peak);
  *maximum = peak;
  *total = *total * factor + sum;
  return factor;
}

template <class Ops, class Element>
void attend_tile(const AttentionCall& call, const AttentionTile& tile, float* scratch) {
  const int64_t group = call.query_heads / call.kv_heads;
  const int64_t rows = tile.num_queries * group;
  const int64_t key_size = call.key_size, value_size = call.value_size, block_size = call.block_size;
  float* query = scratch;                          // [rows][key_size]
  float* sums = query + kTileRows * key_size;      // [rows][value_size]
  float* scores = sums + kTileRows * value_size;   // [rows][kTileTokens]
  float* maximum = scores + kTileRows * kTileTokens;
  float* total = maximum + kTileRows;

  const int64_t step_tokens = call.query_start[tile.row + 1] - call.query_start[tile.row];
  const int64_t first_position = call.seq_lens[tile.row] - step_tokens + tile.first_query;
  const int64_t last_position = first_position + tile.num_queries - 1;
  const int64_t first_token = call.query_start[tile.row] + tile.first_query;
  const int64_t first_head = tile.kv_head * group;
  const Element* queries = static_cast<const Element*>(call.query);
  for (int64_t m = 0; m < rows; ++m) {
    const Element* from = queries + (first_token + m / group) * call.query_token_stride +
                          (first_head + m % group) * call.query_head_stride;
    for (int64_t d = 0; d < key_size; ++d) query[m * key_size + d] = load_scalar(from + d) * call.scaling;
    for (int64_t d = 0; d < value_size; ++d) sums[m * value_size + d] = 0.0f;
    // A sink is a key whose value is zero: it only takes part in the softmax's total.
    maximum[m] = call.sinks ? call.sinks[first_head + m % group] : kMinusInfinity;
    total[m] = call.sinks ? 1.0f : 0.0f;
  }

  const int64_t lowest = call.window && first_position >= call.window ? first_position - call.window + 1 : 0;
  const int32_t* table = call.block_table + tile.row * call.table_stride;
  for (int64_t base = lowest / kTileTokens * kTileTokens; base <= last_position; base += kTileTokens) {
    const int64_t begin = base > lowest ? base : lowest;  // positions of this tile that any query sees
    const int64_t end = base + kTileTokens <= last_position + 1 ? base + kTileTokens : last_position + 1;
    for (int64_t at = begin / block_size * block_size; at < end; at += block_size) {
      const Element* keys = static_cast<const Element*>(call.keys) + table[at / block_size] * call.page_stride +
                            tile.kv_head * key_size * block_size;
      for_row_groups<Ops>(rows, [&](int64_t m, int count) {
        score_rows<Ops, Element>(count, query + m * key_size, key_size, keys, block_size,
                                 scores + m * kTileTokens + (at - base));
      });
    }
    for (int64_t m = 0; m < rows; ++m) {
      const int64_t position = first_position + m / group;
      const int64_t oldest = call.window && position >= call.window ? position - call.window + 1 : 0;
      const int64_t low = (oldest > base ? oldest : base) - base;
      const int64_t high = (position + 1 < end ? position + 1 : end) - base;
      float* row_scores = scores + m * kTileTokens;
      if (low >= high) {  // nothing of this tile is for this query
        for (int64_t i = begin - base; i < end - base; ++i) row_scores[i] = 0.0f;
        continue;
      }
      const float factor = soften(row_scores, low, high, end - base, call.softcap, &maximum[m], &total[m]);
      if (factor != 1.0f)
        for (int64_t d = 0; d < value_size; ++d) sums[m * value_size + d] *= factor;
    }
    for (int64_t at = begin / block_size * block_size; at < end; at += block_size) {
      // Positions after the last written one hold anything, NaN included: they are not even multiplied by zero.
      const int64_t from = at > begin ? at : begin;
      const int64_t until = at + block_size < end ? at + block_size : end;
      const Element* values = static_cast<const Element*>(call.values) + table[at / block_size] * call.page_stride +
                              tile.kv_head * value_size * block_size + (from - at) * value_size;
      for_row_groups<Ops>(rows, [&](int64_t m, int count) {
        add_rows<Ops, Element>(count, scores + m * kTileTokens + (from - base), values, value_size, until - from,
                               sums + m * value_size);
      });
    }
  }

  Element* out = static_cast<Element*>(call.out);
  for (int64_t m = 0; m < rows; ++m) {
    const float inverse = 1.0f / total[m];
    Element* to = out + ((first_token + m / group) * call.query_heads + first_head + m % group) * value_size;
    for (int64_t d = 0; d < value_size; ++d) store_scalar(to + d, sums[m * value_size + d] * inverse);
  }
}

}  // namespace
}  // namespace trimtab
