// A plan's lane, compiled: instructions over addresses instead of names.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "memory/calls.hpp"
#include "kernels/reduce.hpp"
#include "memory/signals.hpp"

namespace weft {

// Blocks `start:stop` of one of the program's slots, a buffer on a rank. Where they lie, and how
// many rows they are, is bound later.
struct Operand {
  uint32_t slot;
  uint32_t start;
  uint32_t stop;

  bool operator==(const Operand& other) const {
    return slot == other.slot && start == other.start && stop == other.stop;
  }
};

enum class Op : int { copy, reduce, notify, wait, pause };

struct Instruction {
  Op op;
  std::vector<Operand> operands;  // the destination first, then the sources
  // the operand whose blocks say how many rows there are: room for blocks does not
  uint32_t measure = 0;
  // written with all that goes to outputs before anybody looks at it again
  bool together = false;
  std::vector<Dtype> dtypes = {};  // of the operands of a reduction
  Combine combine = Combine::sum;
  bool remote = false;         // crosses the link to a peer
  Counter* counter = nullptr;  // to raise or to wait for
  uint32_t index = 0;          // of the counter waited for, among this rank's
  int source = 0;              // who raises the counter waited for
  uint64_t count = 0;
  Reader reader = Reader::self;  // of what it writes
  // reads a peer's tensor, which is its owner's again once that has closed the world
  bool exposed = false;
  // a copy of the same rows as the one before it, made in one pass with that
  bool follows = false;

  // Is it a copy of the rows that `first` copies or makes?
  bool joins(const Instruction& first) const {
    if (op != Op::copy) return false;
    if (first.op == Op::copy) return first.operands[1] == operands[1];
    return first.op == Op::reduce && first.operands[0] == operands[1];
  }
};

// What a buffer is to the caller; as in the plan.
enum class Role : int { input, output, workspace, eager };

// A buffer of a plan: which blocks it has on each rank.
struct Buffer {
  static constexpr int kRoom = -1;  // room for any block: as many rows as the largest has
  static constexpr int kRow = -2;   // a single row, in plans whose sizes are fixed

  std::string name, dtype;
  size_t itemsize;
  Role role;
  uint32_t like;  // the caller's buffer whose columns its rows have
  bool told;      // whether ranks tell each other what it is, since they must agree on it
  bool shared;    // whether peers access it
  std::vector<uint32_t> layouts;  // by rank
};

struct WaitFailure {
  WaitStatus status = WaitStatus::none;
  int instruction = 0;
  int source = 0;
  uint64_t expected = 0;
  uint64_t actual = 0;
};

using Span = std::pair<int64_t, int64_t>;  // when it began, and when it was over

class Binding;

// The eager buffer of an execution: `behind` is its offset from the first one; `crossed` is all
// ones if two ranks use each other's, else 0.
struct Turn {
  size_t behind = 0, crossed = 0;
};

// The state of a program's execution. It is used again, so that a repeated call allocates nothing.
struct Execution {
  Execution(size_t lanes, size_t ranks)
      : spans(lanes),
        failures(lanes),
        targets(lanes),
        held(lanes),
        agreed(lanes, std::vector<char>(ranks)) {}
  void reset(uint64_t new_call, uint64_t new_digest) {
    call = new_call, digest = new_digest;
    mark = digest ^ call * 0x9e3779b97f4a7c15;
    for (auto& peers : agreed) peers.assign(peers.size(), 0);
    failures.assign(failures.size(), WaitFailure{});
    stopped.store(-1, std::memory_order_relaxed);
  }

  const Binding* binding = nullptr;      // of an execution whose plan has buffers
  std::vector<std::vector<Span>> spans;  // by lane and instruction, when tracing
  std::vector<WaitFailure> failures;     // by lane
  // the lane that ended early on the lane thread: no other need wait any more
  std::atomic<int> stopped{-1};
  // by lane and instruction: what a wait waits for, fixed when the call begins
  std::vector<std::vector<uint64_t>> targets;
  std::vector<int64_t> held;              // by lane: when it last began, computed or had to wait
  std::vector<std::vector<char>> agreed;  // by lane: peers seen to have made the same call
  uint64_t call = 0, digest = 0;
  uint64_t mark = 0;  // both in one number, for peers to compare
  Turn turn;
  int64_t timeout = 0;  // of each wait, in nanoseconds
};

// One rank's part of a plan: its lanes, how much each of its counters grows in one execution, and
// the state of one.
struct Program {
  static constexpr size_t kEager = 64 << 10;  // bytes of eager buffers that a plan has on each rank
  static constexpr size_t kEagerSets = 2;     // of these buffers: executions alternate

  std::vector<std::vector<Instruction>> lanes;
  std::vector<std::pair<uint32_t, uint64_t>> promised;
  Said said;  // of an execution for which nothing is bound
  // the operator's name and the plan's, where what is said of an execution follows from what is
  // bound
  std::string name, ending;
  // into how many blocks each shard is cut; blocks are numbered over all shards
  std::vector<uint32_t> pieces = {};
  // the numbers of blocks that lie one after another in some buffer
  std::vector<std::vector<int>> layouts = {};
  std::vector<Buffer> buffers = {};
  std::vector<std::pair<int, uint32_t>> slots = {};  // a rank, and the number of a buffer there
  int rank = 0;                                      // whose part it is, where there are slots
  bool eager = false;  // whether some buffer is: then no rank ends it before all have begun it
  Execution execution;

  Program(std::string what, size_t lane_count, std::vector<std::pair<uint32_t, uint64_t>> growth,
          size_t ranks)
      : lanes(lane_count),
        promised(std::move(growth)),
        said(std::move(what)),
        execution(lane_count, ranks) {}

  // Whether the two ranks that it is for swap their eager buffers in every other execution. They
  // then write where they last read: that is in their own cache, and what they last wrote in the
  // other's, which would have to give it up line after line.
  bool crosses() const { return eager && buffers[0].layouts.size() == 2; }

  // The number of a buffer; that behind the last if there is none of this name.
  uint32_t number(std::string_view name) const {
    const auto found = std::find_if(buffers.begin(), buffers.end(),
                                    [&](const Buffer& buffer) { return buffer.name == name; });
    return static_cast<uint32_t>(found - buffers.begin());
  }

  const Buffer& buffer(const Operand& o) const { return buffers.at(slots.at(o.slot).second); }

  // Whether it is the caller's: what was there before the call may be read until then.
  bool given(const Operand& o) const {
    return buffer(o).role == Role::input || buffer(o).role == Role::output;
  }

  // Whether it reads a tensor of a peer's caller.
  bool exposes(const Instruction& instruction) const {
    // to the first operand
    const bool writes = instruction.op == Op::copy || instruction.op == Op::reduce;
    return std::any_of(instruction.operands.begin() + writes, instruction.operands.end(),
                       [&](const Operand& source) {
                         return given(source) && slots.at(source.slot).first != rank;
                       });
  }

  // `returns`: this rank also reads what lies where it writes.
  void add(size_t lane, Instruction instruction, bool returns = false) {
    auto& instructions = lanes[lane];
    auto first = instructions.rbegin();
    while (first != instructions.rend() && first->follows) ++first;
    instruction.follows = first != instructions.rend() && instruction.joins(*first);
    instruction.exposed = exposes(instruction) || (instruction.follows && first->exposed);
    if (instruction.op == Op::copy || instruction.op == Op::reduce) {
      const Operand& written = instruction.operands[0];
      returns = returns || (buffer(written).role == Role::eager && crosses());
      if (buffer(written).shared && !returns && (instruction.remote || !given(written)))
        instruction.reader = instruction.remote ? Reader::owner : Reader::peers;
    }
    instructions.push_back(std::move(instruction));
  }
};

}  // namespace weft
