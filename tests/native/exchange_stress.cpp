// Ranks as threads hammer the exchange, and check every value they get: built with ThreadSanitizer by
// tests/unit/kernels/test_exchange_races.py and scripts/sanitize_native.sh.
//
//     exchange_stress RANKS LAYERS
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

struct TrimtabExchange {
  void* segment;
  int64_t rank;
  uint64_t sequence;
  int64_t spins;
  int32_t is_crowded;
};

extern "C" {
int64_t trimtab_exchange_bytes(int64_t, int64_t, int64_t, int64_t);
void trimtab_exchange_format(void*, int64_t, int64_t, int64_t, int64_t);
void trimtab_exchange_abort(void*, int64_t);
float* trimtab_exchange_inbox(void*, int64_t);
int trimtab_exchange_send(TrimtabExchange*, const void*, int64_t, int64_t, const int64_t*, int64_t, int64_t, int64_t);
void trimtab_exchange_answer(TrimtabExchange*);
int trimtab_exchange_wait(const TrimtabExchange*, int, int64_t, int64_t*);
int64_t trimtab_exchange_arrivals(const TrimtabExchange*, int, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t*,
                                  int64_t*, const void**, float**);
}

namespace {

constexpr int64_t kTokens = 9, kTopK = 3, kHidden = 17, kSlotsPerRank = 4;
constexpr int kAborted = 2;
std::atomic<int64_t> finished{0};

void fail(const char* what) {
  std::fprintf(stderr, "exchange_stress: %s\n", what);
  std::exit(1);
}

int wait(const TrimtabExchange& exchange, int phase) {
  int64_t missing = 0;
  int status;
  while ((status = trimtab_exchange_wait(&exchange, phase, 1000000, &missing)) == 1) {
  }
  return status;
}

// Expert `slot` of value x is x * 1000 + slot: exact in fp32 for what is drawn here.
float expert(float x, int64_t slot) { return x * 1000.0f + static_cast<float>(slot); }

void run_rank(void* segment, int64_t rank, int64_t num_ranks, int64_t layers) {
  const int64_t num_slots = num_ranks * kSlotsPerRank;
  std::mt19937 random(static_cast<unsigned>(rank));
  TrimtabExchange exchange{segment, rank, 0, 50, 1};
  std::vector<float> rows(kTokens * kHidden);
  std::vector<int64_t> slots(kTokens * kTopK);
  std::vector<int64_t> local(num_ranks * kTokens * kTopK);
  std::vector<const void*> sources(local.size());
  std::vector<float*> targets(local.size());
  for (int64_t layer = 0; layer < layers; ++layer) {
    const int64_t tokens = static_cast<int64_t>(random() % (kTokens + 1));
    for (float& value : rows) value = static_cast<float>(random() % 1000);
    for (int64_t& slot : slots) slot = static_cast<int64_t>(random() % (num_slots + 1)) - 1;
    if (trimtab_exchange_send(&exchange, rows.data(), kHidden * 4, 0, slots.data(), num_slots, tokens, kTopK))
      fail("send");
    const auto compute = [&](int senders, int64_t from, int64_t to) {
      int64_t scalar = 0;
      const int64_t first = rank * kSlotsPerRank;
      const int64_t count = trimtab_exchange_arrivals(&exchange, senders, first, from, to, kTopK, kHidden, &scalar,
                                                      local.data(), sources.data(), targets.data());
      for (int64_t i = 0; i < count; ++i)
        for (int64_t h = 0; h < kHidden; ++h)
          targets[i][h] = expert(static_cast<const float*>(sources[i])[h], first + local[i]);
    };
    // In every second layer own pairs are computed around the others', each rank as it likes.
    const bool is_around = (layer + rank) % 2 == 0;
    if (is_around) compute(1, 0, kSlotsPerRank / 2);
    if (wait(exchange, 0)) fail("wait for tokens");
    compute(is_around ? 2 : 0, 0, kSlotsPerRank);
    trimtab_exchange_answer(&exchange);
    if (is_around) compute(1, kSlotsPerRank / 2, kSlotsPerRank);
    if (wait(exchange, 1)) fail("wait for answers");
    const float* inbox = trimtab_exchange_inbox(segment, rank);
    for (int64_t pair = 0; pair < tokens * kTopK; ++pair) {
      if (slots[pair] < 0) continue;
      for (int64_t h = 0; h < kHidden; ++h)
        if (inbox[pair * kHidden + h] != expert(rows[pair / kTopK * kHidden + h], slots[pair])) fail("wrong output");
    }
  }
  // The last rank leaves instead of sending: everyone else must be woken by the abort word.
  ++finished;
  if (rank == num_ranks - 1) {
    while (finished < num_ranks) std::this_thread::yield();
    trimtab_exchange_abort(segment, rank + 1);
  } else {
    trimtab_exchange_send(&exchange, rows.data(), kHidden * 4, 0, slots.data(), num_slots, 1, kTopK);
    if (wait(exchange, 0) != kAborted) fail("not woken");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) fail("usage: exchange_stress RANKS LAYERS");
  const int64_t num_ranks = std::atoll(argv[1]), layers = std::atoll(argv[2]);
  const int64_t bytes = trimtab_exchange_bytes(num_ranks, kTokens, kTopK, kHidden);
  void* segment = std::aligned_alloc(128, static_cast<size_t>(bytes));
  trimtab_exchange_format(segment, num_ranks, kTokens, kTopK, kHidden);
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < num_ranks; ++rank) threads.emplace_back(run_rank, segment, rank, num_ranks, layers);
  for (std::thread& thread : threads) thread.join();
  std::free(segment);
  std::printf("%lld ranks, %lld layers: all values right\n", static_cast<long long>(num_ranks),
              static_cast<long long>(layers));
  return 0;
}
