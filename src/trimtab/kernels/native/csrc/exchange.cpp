// Tokens between ranks of one machine, through memory that all of them see.
//
// The memory ("segment") has a header and one area per rank: an outbox with the rank's token rows and slot ids, and an
// inbox where the ranks that run its tokens' experts leave fp32 outputs, one row per (token, k). A MoE layer is:
//   1. send: a rank fills its outbox and publishes `sent`.
//   2. arrivals, once all have sent: a rank finds the pairs that chose its slots; it reads rows from the outboxes and
//      writes outputs to the inboxes, then publishes `answered`. If no other rank reads its inbox, a rank may take its
//      own tokens' pairs before all have sent, and after it has answered.
//   3. once all have answered, a rank sums what lies in its inbox, and may send again.
// Nothing is held twice: an outbox is rewritten only after all have answered, an inbox only after all have sent again.
//
// Flags are sequence numbers, each on cache lines of its own, written by one rank. A wait spins, then yields, then
// sleeps in short naps; it returns early when the abort word is set, and after `slice_ns` in any case, so that its
// caller can see to signals and deadlines.
#include <immintrin.h>
#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>

#define TRIMTAB_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr uint64_t kMagic = 0x317867696d697274;  // changes with any layout
// Two cache lines: the hardware fetches them in pairs.
constexpr int64_t kLine = 128;

using Sequence = std::atomic<uint64_t>;
static_assert(Sequence::is_always_lock_free, "flags are shared between processes");

enum Status : int { kOk = 0, kPending = 1, kAborted = 2, kTooMany = 3, kNotASegment = 4, kSlotOutOfRange = 5 };
enum Phase : int { kSent = 0, kAnswered = 1 };
enum Senders : int { kAll = 0, kOwn = 1, kOthers = 2 };

struct Header {
  uint64_t magic;
  int64_t bytes;
  int64_t num_ranks;
  int64_t max_tokens;
  int64_t max_top_k;
  int64_t max_hidden_size;
  alignas(kLine) std::atomic<int64_t> aborted_by;  // rank + 1, or -1 for someone who is no rank; 0 while all is well
};

struct Flags {
  alignas(kLine) Sequence sent;
  // Of the outbox; published by `sent`.
  int64_t num_tokens;
  int64_t row_bytes;
  int64_t scalar;  // what the values are; the callers' numbering
  alignas(kLine) Sequence answered;
};

int64_t rounded(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

struct Segment {
  char* memory;
  int64_t num_ranks, max_tokens, max_top_k, max_hidden_size;

  explicit Segment(void* address) : memory(static_cast<char*>(address)) {
    const Header& h = header();
    num_ranks = h.num_ranks;
    max_tokens = h.max_tokens;
    max_top_k = h.max_top_k;
    max_hidden_size = h.max_hidden_size;
  }
  Segment(int64_t ranks, int64_t tokens, int64_t top_k, int64_t hidden_size)
      : memory(nullptr), num_ranks(ranks), max_tokens(tokens), max_top_k(top_k), max_hidden_size(hidden_size) {}

  int64_t slot_ids_bytes() const { return rounded(max_tokens * max_top_k * 8); }
  int64_t rows_bytes() const { return rounded(max_tokens * max_hidden_size * 4); }
  int64_t inbox_bytes() const { return rounded(max_tokens * max_top_k * max_hidden_size * 4); }
  int64_t area_bytes() const { return slot_ids_bytes() + rows_bytes() + inbox_bytes(); }
  int64_t areas_at() const { return rounded(sizeof(Header)) + num_ranks * rounded(sizeof(Flags)); }
  int64_t bytes() const { return areas_at() + num_ranks * area_bytes(); }

  Header& header() const { return *reinterpret_cast<Header*>(memory); }
  Flags& flags(int64_t rank) const {
    return *reinterpret_cast<Flags*>(memory + rounded(sizeof(Header)) + rank * rounded(sizeof(Flags)));
  }
  char* area(int64_t rank) const { return memory + areas_at() + rank * area_bytes(); }
  int64_t* slot_ids(int64_t rank) const { return reinterpret_cast<int64_t*>(area(rank)); }
  char* rows(int64_t rank) const { return area(rank) + slot_ids_bytes(); }
  float* inbox(int64_t rank) const { return reinterpret_cast<float*>(rows(rank) + rows_bytes()); }
};

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

constexpr int64_t kNapNs = 20000;
constexpr int64_t kYieldNs = 2000000;       // with a core for every rank: yields before naps
constexpr int64_t kCrowdedYieldNs = 50000;  // with fewer cores: whoever is waited for needs this one

}  // namespace

// One rank's view; mirrored by exchange.py.
struct TrimtabExchange {
  void* segment;
  int64_t rank;
  uint64_t sequence;
  int64_t spins;       // polls before the first yield
  int32_t is_crowded;  // more ranks than cores
};

TRIMTAB_API int64_t trimtab_exchange_bytes(int64_t num_ranks, int64_t max_tokens, int64_t max_top_k,
                                           int64_t max_hidden_size) {
  return Segment(num_ranks, max_tokens, max_top_k, max_hidden_size).bytes();
}

// Makes zeroed memory a segment. Called once, before any rank attaches.
TRIMTAB_API void trimtab_exchange_format(void* memory, int64_t num_ranks, int64_t max_tokens, int64_t max_top_k,
                                         int64_t max_hidden_size) {
  Header* header = new (memory) Header{};
  header->num_ranks = num_ranks;
  header->max_tokens = max_tokens;
  header->max_top_k = max_top_k;
  header->max_hidden_size = max_hidden_size;
  const Segment segment(memory);
  for (int64_t rank = 0; rank < num_ranks; ++rank) new (&segment.flags(rank)) Flags{};
  header->bytes = segment.bytes();
  header->magic = kMagic;
}

TRIMTAB_API int trimtab_exchange_check(const void* memory, int64_t bytes) {
  if (bytes < static_cast<int64_t>(sizeof(Header))) return kNotASegment;
  const Header& header = *static_cast<const Header*>(memory);
  return header.magic == kMagic && header.bytes <= bytes ? kOk : kNotASegment;
}

// The first reason stays. Anyone who maps the segment may call it, at any time.
TRIMTAB_API void trimtab_exchange_abort(void* memory, int64_t aborted_by) {
  int64_t none = 0;
  static_cast<Header*>(memory)->aborted_by.compare_exchange_strong(none, aborted_by);
}

TRIMTAB_API int64_t trimtab_exchange_aborted_by(const void* memory) {
  return static_cast<const Header*>(memory)->aborted_by.load(std::memory_order_acquire);
}

TRIMTAB_API float* trimtab_exchange_inbox(void* memory, int64_t rank) { return Segment(memory).inbox(rank); }

// Starts a layer: `num_tokens` rows of `row_bytes` and their slot ids [num_tokens, top_k] go into the outbox. An id that
// is neither -1 nor below `num_slots` would never be answered: nothing is published then.
TRIMTAB_API int trimtab_exchange_send(TrimtabExchange* exchange, const void* rows, int64_t row_bytes, int64_t scalar,
                                      const int64_t* slot_ids, int64_t num_slots, int64_t num_tokens, int64_t top_k) {
  const Segment segment(exchange->segment);
  if (num_tokens > segment.max_tokens || top_k > segment.max_top_k || row_bytes > segment.max_hidden_size * 4)
    return kTooMany;
  int64_t* target = segment.slot_ids(exchange->rank);
  for (int64_t pair = 0; pair < num_tokens * top_k; ++pair) {
    if (slot_ids[pair] < -1 || slot_ids[pair] >= num_slots) return kSlotOutOfRange;
    target[pair] = slot_ids[pair];
  }
  // A rank without tokens has no rows: their address is null, which memcpy forbids even for no bytes.
  if (num_tokens > 0) std::memcpy(segment.rows(exchange->rank), rows, num_tokens * row_bytes);
  Flags& flags = segment.flags(exchange->rank);
  flags.num_tokens = num_tokens;
  flags.row_bytes = row_bytes;
  flags.scalar = scalar;
  flags.sent.store(++exchange->sequence, std::memory_order_release);
  return kOk;
}

// Writes to the inboxes are visible to whoever sees the flag.
TRIMTAB_API void trimtab_exchange_answer(TrimtabExchange* exchange) {
  Segment(exchange->segment).flags(exchange->rank).answered.store(exchange->sequence, std::memory_order_release);
}

// Waits until every rank has reached this one's sequence number in `phase`. kPending: a slice is over, call again;
// `missing` names a rank that was not there yet.
TRIMTAB_API int trimtab_exchange_wait(const TrimtabExchange* exchange, int phase, int64_t slice_ns, int64_t* missing) {
  const Segment segment(exchange->segment);
  const std::atomic<int64_t>& aborted_by = segment.header().aborted_by;
  const int64_t yield_ns = exchange->is_crowded ? kCrowdedYieldNs : kYieldNs;
  int64_t start = 0;
  int64_t rank = 0;
  for (int64_t turn = 0;; ++turn) {
    for (; rank < segment.num_ranks; ++rank) {
      const Flags& flags = segment.flags(rank);
      const Sequence& flag = phase == kSent ? flags.sent : flags.answered;
      if (flag.load(std::memory_order_acquire) < exchange->sequence) break;
    }
    if (aborted_by.load(std::memory_order_relaxed) != 0) return kAborted;
    if (rank == segment.num_ranks) return kOk;
    if (turn < exchange->spins) {
      _mm_pause();
      continue;
    }
    const int64_t now = now_ns();
    if (start == 0) start = now;
    if (now - start > slice_ns) {
      *missing = rank;
      return kPending;
    }
    if (now - start < yield_ns) {
      sched_yield();
    } else {
      const timespec nap{0, kNapNs};
      nanosleep(&nap, nullptr);
    }
  }
}

// The pairs of `senders`, in (rank, token, k) order, whose slots, counted from first_slot, are [from, to): these slots,
// where their row lies and where their output goes. Returns their number; `scalar` is what their rows' values are
// (unchanged without pairs). -1 when senders disagree about that.
TRIMTAB_API int64_t trimtab_exchange_arrivals(const TrimtabExchange* exchange, int senders, int64_t first_slot,
                                              int64_t from, int64_t to, int64_t top_k, int64_t hidden_size,
                                              int64_t* scalar, int64_t* slot_ids, const void** row_addresses,
                                              float** output_addresses) {
  const Segment segment(exchange->segment);
  int64_t count = 0;
  for (int64_t rank = 0; rank < segment.num_ranks; ++rank) {
    if (senders != kAll && (senders == kOwn) != (rank == exchange->rank)) continue;
    const Flags& flags = segment.flags(rank);
    const int64_t* chosen = segment.slot_ids(rank);
    const char* rows = segment.rows(rank);
    float* inbox = segment.inbox(rank);
    const int64_t before = count;
    for (int64_t token = 0; token < flags.num_tokens; ++token) {
      for (int64_t k = 0; k < top_k; ++k) {
        const int64_t pair = token * top_k + k;
        const int64_t slot = chosen[pair] - first_slot;
        if (slot < from || slot >= to) continue;
        slot_ids[count] = slot;
        row_addresses[count] = rows + token * flags.row_bytes;
        output_addresses[count] = inbox + pair * hidden_size;
        ++count;
      }
    }
    if (count == before) continue;
    if (before > 0 && flags.scalar != *scalar) return -1;
    *scalar = flags.scalar;
  }
  return count;
}

// For kernels that take rows only one after the other.
TRIMTAB_API void trimtab_gather_rows(const void* const* row_addresses, int64_t num_rows, int64_t row_bytes, char* out) {
  for (int64_t row = 0; row < num_rows; ++row) std::memcpy(out + row * row_bytes, row_addresses[row], row_bytes);
}

TRIMTAB_API void trimtab_scatter_rows(const char* rows, int64_t num_rows, int64_t row_bytes, void* const* addresses) {
  for (int64_t row = 0; row < num_rows; ++row) std::memcpy(addresses[row], rows + row * row_bytes, row_bytes);
}
