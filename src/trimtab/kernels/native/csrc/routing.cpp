// Expert ids become slot ids, and the pairs that a rank owns are counted, in one pass over a layer's few integers.
#include <cstdint>

#define TRIMTAB_API extern "C" __attribute__((visibility("default")))

// What stays the same from step to step. slots: [num_experts, period]; counts: one per slot; the rest are single numbers.
struct TrimtabLookUp {
  const int64_t* slots;
  int64_t num_experts;
  int64_t period;
  const int64_t* first_position;
  int64_t* counts;
  const int64_t* counted;
};

// expert_ids, slot_ids: [num_tokens, top_k]. Token t's experts are looked up in column (t + *first_position) mod period;
// tokens [start, stop) are counted, `*counted` for each pair. An id below 0 stays -1 and counts nothing. Returns 1, with
// nothing counted, for an id that is no expert's; else 0.
TRIMTAB_API int trimtab_look_up(const TrimtabLookUp* layer, const int64_t* expert_ids, int64_t num_tokens,
                                int64_t top_k, int64_t start, int64_t stop, int64_t* slot_ids) {
  for (int64_t pair = 0; pair < num_tokens * top_k; ++pair)
    if (expert_ids[pair] >= layer->num_experts) return 1;
  int64_t column = *layer->first_position % layer->period;
  for (int64_t token = 0; token < num_tokens; ++token) {
    for (int64_t pair = token * top_k; pair < (token + 1) * top_k; ++pair) {
      const int64_t expert = expert_ids[pair];
      slot_ids[pair] = expert < 0 ? -1 : layer->slots[expert * layer->period + column];
    }
    if (++column == layer->period) column = 0;
  }
  for (int64_t pair = start * top_k; pair < stop * top_k; ++pair)
    if (slot_ids[pair] >= 0) layer->counts[slot_ids[pair]] += *layer->counted;
  return 0;
}
