// Expert ids become slot ids, and the pairs that a rank owns are counted, in one pass over a layer's few integers.
#include <cstdint>

#define TRIMTAB_API extern "C" __attribute__((visibility("default")))

// expert_ids, slot_ids: [num_tokens, top_k]; slots: [num_experts, period]; counts: one per slot. Token t's experts are
// looked up in column (t + *first_position) mod period; tokens [start, stop) are counted, `*counted` for each pair. An id
// below 0 stays -1 and counts nothing. Returns 1, with nothing counted, for an id that is no expert's; else 0.
TRIMTAB_API int trimtab_map_and_record(const int64_t* expert_ids, const int64_t* slots, int64_t num_experts,
                                       int64_t period, const int64_t* first_position, int64_t* counts,
                                       const int64_t* counted, int64_t num_tokens, int64_t top_k, int64_t start,
                                       int64_t stop, int64_t* slot_ids) {
  for (int64_t pair = 0; pair < num_tokens * top_k; ++pair)
    if (expert_ids[pair] >= num_experts) return 1;
  int64_t column = *first_position % period;
  for (int64_t token = 0; token < num_tokens; ++token) {
    for (int64_t pair = token * top_k; pair < (token + 1) * top_k; ++pair) {
      const int64_t expert = expert_ids[pair];
      slot_ids[pair] = expert < 0 ? -1 : slots[expert * period + column];
    }
    if (++column == period) column = 0;
  }
  for (int64_t pair = start * top_k; pair < stop * top_k; ++pair)
    if (slot_ids[pair] >= 0) counts[slot_ids[pair]] += *counted;
  return 0;
}
