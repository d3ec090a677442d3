// What a rank shares with its peers, and the interpreter of programs over it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "mesh.hpp"
#include "program.hpp"
#include "segment.hpp"

namespace weft {

// What a rank says of its latest calls, where its peers can read it.
struct Header {
  std::atomic<uint64_t> call;
  std::atomic<uint64_t> hash;
  char text[496];
};
static_assert(sizeof(Header) == 512);

class World {
 public:
  static constexpr size_t kHeaders = 16;  // a rank is never this many calls ahead of a peer that still waits for it
  static constexpr size_t kNames = 256;   // signal names of all plans of a world

  static size_t control_bytes(size_t ranks) { return kHeaders * sizeof(Header) + kNames * ranks * sizeof(Counter); }

  // `control` is a zeroed symmetric segment of control_bytes; `spins` is how long a wait spins before it sleeps.
  World(std::shared_ptr<Mesh> mesh, std::shared_ptr<Segment> control, int spins);
  ~World();

  Counter& counter(int rank, uint32_t index) const;

  // Publish a call, and fix what its waits wait for. Calls begin on one thread at a time, in the same order on all ranks.
  void begin(const Program& program, Execution& execution);
  // Interpret instructions of a lane from `at` on, up to a pause or the end; the next position, or -1 if a wait ended early.
  int run(const Program& program, Execution& execution, size_t lane, int at);
  // Called now and then by waits on the caller's thread; true ends the wait.
  std::function<bool()> caller_interrupted = [] { return false; };
  // Run a whole lane on the lane thread.
  void start(const Program& program, Execution& execution, size_t lane);
  // Wait until the lane thread is done with all it was given.
  void join();
  // Wait until it is done with this execution; false if `seconds` pass first.
  bool join(const Execution& execution, double seconds);
  // Whether the lane thread has anything to do.
  bool busy() const { return outstanding_.load(std::memory_order_acquire); }

  // The text of the call that `peer` made as this rank made `call`; empty if it has not made it yet.
  std::string peer_call(int peer, uint64_t call) const;
  // Does `peer` say that it made another call than this rank?
  bool mismatch(int peer, const Program& program, uint64_t call) const;
  uint64_t calls() const { return calls_; }
  // What a peer on another host says of a call it makes; it comes by message, and is kept where a peer's header is looked for.
  void hear(int peer, uint64_t call, uint64_t hash, const std::string& text);

  // An emulated link: every copy to or from a peer takes at least this long, one after the other. A lane that is not held up
  // feeds it without a gap, as if its copies were queued, so that a late wake-up of its thread costs the link nothing.
  void emulate_link(double bytes_per_second, double latency_seconds);
  void trace(bool on) { tracing_ = on; }

 private:
  struct Job {
    const Program* program;
    Execution* execution;
    size_t lane;
  };
  Header& header(int rank, uint64_t call) const;
  void publish(int rank, uint64_t call, uint64_t hash, const std::string& text);
  bool wait(const Program& program, Execution& execution, size_t lane, int at, const Instruction& instruction);
  void move(Execution& execution, size_t lane, const Instruction* first, size_t count);
  void feed(Execution& execution, size_t lane) const;
  void pass_link(int64_t ready, size_t bytes);
  void work();

  std::shared_ptr<Mesh> mesh_;
  std::shared_ptr<Segment> control_;
  int rank_, ranks_, spins_;
  std::vector<uint64_t> base_;  // what earlier executions promised, by counter
  uint64_t calls_ = 0;
  bool tracing_ = false;
  double seconds_per_byte_ = 0, latency_ = 0;
  std::atomic<int64_t> link_free_{0};

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;  // the first is being done
  std::atomic<size_t> outstanding_{0};
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace weft
