// The program on the CPU simulator of PTO: each kernel of each rank is a thread. It measures three
// views, communication and products one after the other, products alone, and all at once, verifies
// every element after each, and writes the results to out<rank>.bin.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "kernels.hpp"

template <typename T>
static std::vector<T> read(const std::string& name, size_t count) {
  std::vector<T> found(count);
  std::ifstream file(name, std::ios::binary);
  if (!file.read(reinterpret_cast<char*>(found.data()), count * sizeof(T))) {
    std::fprintf(stderr, "%s: cannot read %zu elements\n", name.c_str(), count);
    std::exit(2);
  }
  return found;
}

struct Rank {
  std::vector<Element> a, b;
  std::vector<Result> out;
  std::vector<int64_t> window;
  Memory memory;
};

static std::vector<Rank> ranks(RANKS);

using Kernels = std::vector<std::function<void(const Memory&, int)>>;

static const Kernels COMPUTING = {COMPUTE_KERNELS}, MOVING = {MOVING_KERNELS};

static Kernels both() {
  Kernels every = COMPUTING;
  every.insert(every.end(), MOVING.begin(), MOVING.end());
  return every;
}

static void on_all(const Kernels& kernels, int execution = 1) {
  std::vector<std::thread> threads;
  for (const Rank& rank : ranks) {
    for (const auto& kernel : kernels)
      threads.emplace_back(kernel, std::cref(rank.memory), execution);
  }
  for (std::thread& thread : threads) thread.join();
}

static void empty_results() {
  for (Rank& rank : ranks) {
    std::memset(rank.out.data(), 0xff, rank.out.size() * sizeof(Result));  // NaN
  }
}

// The windows, the results and the counters as they are before the first execution: NaN where
// something is to be written.
static void reset() {
  for (Rank& rank : ranks) {
    std::memset(rank.window.data(), 0xff, COUNTERS);
    std::memset(rank.memory.windows[rank.memory.rank] + COUNTERS, 0, COUNTER_BYTES);
  }
  empty_results();
}

// What element (row, column) of a rank's result must be, and the size of its terms.
struct Expected {
  double value = 0, size = 0;

  void add(const Rank& owner, int row, const Rank& weight, int column) {
    for (int k = 0; k < K; ++k) {
      const double term = static_cast<double>(owner.a[static_cast<size_t>(row) * K + k]) *
                          static_cast<double>(weight.b[static_cast<size_t>(k) * N + column]);
      value += term;
      size += std::fabs(term);
    }
  }
};

static Expected expected(const Rank& rank, int row, int column) {
  Expected made;
  if constexpr (SUMS) {
    const int begin = OUT_ROWS < ROWS ? rank.memory.rank * OUT_ROWS : 0;
    for (const Rank& owner : ranks) made.add(owner, begin + row, owner, column);
  } else if constexpr (MULTIPLIES) {
    made.add(ranks[row / ROWS], row % ROWS, rank, column);
  } else {
    made.value = static_cast<double>(ranks[row / ROWS].a[row % ROWS * K + column]);
  }
  return made;
}

static int wrong() {
  constexpr int WIDTH = MULTIPLIES ? N : K;
  int found = 0;
  for (const Rank& rank : ranks) {
    for (int row = 0; row < OUT_ROWS; ++row) {
      for (int column = 0; column < WIDTH; ++column) {
        const Expected each = expected(rank, row, column);
        const double result =
            static_cast<double>(rank.out[static_cast<size_t>(row) * WIDTH + column]);
        const double most = each.size * K * RANKS * std::numeric_limits<Sum>::epsilon();
        found += !(std::fabs(result - each.value) <= most);
      }
    }
  }
  return found;
}

static int verified(
    const char* name, const std::function<void()>& run,
    const std::function<void()>& after = [] {}) {
  const auto start = std::chrono::steady_clock::now();
  run();
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  after();
  const int found = wrong();
  std::printf("%-12s %10.3f ms  #wrong %d\n", name, took.count(), found);
  return found;
}

int main(int count, char** words) {
  const std::string folder = count > 1 ? words[1] : "data";
  for (int r = 0; r < RANKS; ++r) {
    Rank& rank = ranks[r];
    rank.a = read<Element>(folder + "/a" + std::to_string(r) + ".bin", size_t{ROWS} * K);
    if (MULTIPLIES)
      rank.b = read<Element>(folder + "/b" + std::to_string(r) + ".bin", size_t{K} * N);
    rank.out.resize(size_t{OUT_ROWS} * (MULTIPLIES ? N : K));
    rank.window.resize((COUNTERS + COUNTER_BYTES) / sizeof(int64_t) + 1);
  }
  for (int r = 0; r < RANKS; ++r) {
    Rank& rank = ranks[r];
    rank.memory = {r, rank.a.data(), rank.b.data(), rank.out.data(), {}};
    for (int p = 0; p < RANKS; ++p) {
      rank.memory.windows[p] = reinterpret_cast<uint8_t*>(ranks[p].window.data());
    }
  }
  const Kernels& first = SUMS ? COMPUTING : MOVING;
  const Kernels& second = SUMS ? MOVING : COMPUTING;
  int found = 0;
  reset();
  found += verified("sequential", [&] {
    on_all(first);
    on_all(second);
  });
  if (MULTIPLIES) {
    reset();
    if (!SUMS) on_all(MOVING);
    found += verified(
        "compute", [] { on_all(COMPUTING); },
        [] {
          if (SUMS) on_all(MOVING);
        });
  }
  reset();
  found += verified("pipelined", [] { on_all(both()); });
  for (int execution = 2; execution < 4; ++execution) {  // counters go on from one to the next
    empty_results();
    found += verified("again", [&] { on_all(both(), execution); });
  }
  for (int r = 0; r < RANKS; ++r) {
    std::ofstream file(folder + "/out" + std::to_string(r) + ".bin", std::ios::binary);
    file.write(reinterpret_cast<const char*>(ranks[r].out.data()),
               ranks[r].out.size() * sizeof(Result));
  }
  return found != 0;
}
