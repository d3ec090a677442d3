// The program on the CPU simulator of PTO: each kernel of each rank is a thread. It measures three
// views, compute alone, communication and then compute, and both at once, verifies every element
// after each, and writes the results to out<rank>.bin.
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
  std::vector<Sum> out;
  std::vector<int64_t> window;
  Memory memory;
};

static std::vector<Rank> ranks(RANKS);

static void on_all(const std::vector<std::function<void(Memory&)>>& kernels) {
  std::vector<std::thread> threads;
  for (Rank& rank : ranks) {
    for (const auto& kernel : kernels) threads.emplace_back(kernel, std::ref(rank.memory));
  }
  for (std::thread& thread : threads) thread.join();
}

// The rows that products read, the sums and the counters as they are before the first execution:
// NaN where something is to be written.
static void reset() {
  for (Rank& rank : ranks) {
    std::memset(rank.window.data(), 0xff, COUNTERS);
    std::memset(rank.memory.windows[rank.memory.rank] + COUNTERS, 0, COUNTER_BYTES);
    std::fill(rank.out.begin(), rank.out.end(), std::numeric_limits<Sum>::quiet_NaN());
  }
}

static int wrong() {
  int found = 0;
  for (const Rank& rank : ranks) {
    for (int row = 0; row < OUT_ROWS; ++row) {
      const Rank& owner = ranks[row / ROWS];
      for (int n = 0; n < N; ++n) {
        double sum = 0, size = 0;
        for (int k = 0; k < K; ++k) {
          const double term = static_cast<double>(owner.a[row % ROWS * K + k]) *
                              static_cast<double>(rank.b[static_cast<size_t>(k) * N + n]);
          sum += term;
          size += std::fabs(term);
        }
        const double off = std::fabs(rank.out[static_cast<size_t>(row) * N + n] - sum);
        found += !(off <= size * K * std::numeric_limits<Sum>::epsilon());
      }
    }
  }
  return found;
}

static int view(const char* name, const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  const int found = wrong();
  std::printf("%-12s %10.3f ms  #wrong %d\n", name, took.count(), found);
  return found;
}

int main(int count, char** words) {
  const std::string folder = count > 1 ? words[1] : "data";
  for (int r = 0; r < RANKS; ++r) {
    Rank& rank = ranks[r];
    rank.a = read<Element>(folder + "/a" + std::to_string(r) + ".bin", size_t{ROWS} * K);
    rank.b = read<Element>(folder + "/b" + std::to_string(r) + ".bin", size_t{K} * N);
    rank.out.resize(size_t{OUT_ROWS} * N);
    rank.window.resize((COUNTERS + COUNTER_BYTES) / sizeof(int64_t) + 1);
  }
  for (int r = 0; r < RANKS; ++r) {
    Rank& rank = ranks[r];
    rank.memory = {r, rank.a.data(), rank.b.data(), rank.out.data(), {}};
    for (int p = 0; p < RANKS; ++p) {
      rank.memory.windows[p] = reinterpret_cast<uint8_t*>(ranks[p].window.data());
    }
  }
  const auto communicate = [](Memory& memory) { communication_kernel(memory, 1); };
  const auto compute = [](Memory& memory) { compute_kernel(memory, 1); };
  int found = 0;
  reset();
  found += view("sequential", [&] {
    on_all({communicate});
    on_all({compute});
  });
  // the rows and counters of the communication are there
  for (Rank& rank : ranks) {
    std::fill(rank.out.begin(), rank.out.end(), std::numeric_limits<Sum>::quiet_NaN());
  }
  found += view("compute", [&] { on_all({compute}); });
  reset();
  found += view("pipelined", [&] { on_all({communicate, compute}); });
  for (int execution = 2; execution < 4; ++execution) {  // counters go on from one to the next
    for (Rank& rank : ranks) {
      std::fill(rank.out.begin(), rank.out.end(), std::numeric_limits<Sum>::quiet_NaN());
    }
    found += view("again", [&] {
      on_all({[&](Memory& memory) { communication_kernel(memory, execution); },
              [&](Memory& memory) { compute_kernel(memory, execution); }});
    });
  }
  for (int r = 0; r < RANKS; ++r) {
    std::ofstream file(folder + "/out" + std::to_string(r) + ".bin", std::ios::binary);
    file.write(reinterpret_cast<const char*>(ranks[r].out.data()),
               ranks[r].out.size() * sizeof(Sum));
  }
  return found != 0;
}
