// One rank's part of a plan, compiled: instructions on slots and blocks instead of names.
//
// P1  An instruction that `follows` copies the rows that the first instruction of its pass copies
//     or computes. So the rows are read from memory once, and written to all targets of the pass,
//     block by block: all targets get the first elements before any gets the last.
// P3  That is not the order of the lane, in which the proof has the instructions one after the
//     other. So instructions join a pass only if the order of elements cannot matter: each target
//     is apart from every other operand of the pass, or has the same elements (R2).
// P2  A rank reads a peer's tensor only by instructions with `reads_peer_tensor`, after each of
//     which the executor checks that no peer had closed the world (X5).
//
// Eager buffers: kEager bytes on each rank, kEagerSets times, at the end of every control segment.
// A call here is an execution with eager buffers; n counts them.
//
//     call n              0    1    2    3    4    5    6    7    8
//     set                 0    1    0    1    0    1    0    1    0
//     more than 2 ranks   A0   A1   A0   A1   A0   A1   A0   A1   A0    A: the rank's own buffers
//     2 ranks             A0   A1   B0   B1   A0   A1   B0   B1   A0    B: the other rank's
//
// E1  A set is used in call n only after all ranks have ended call n - 2, which used it before. A
//     rank ends call n - 1 only after all ranks have begun it (E2), and they had ended call n - 2
//     by then. So no signal reports that a buffer is free.
// E2  No rank ends a call before all ranks have begun it: a plan with eager buffers synchronizes.
//     weft/plan/happens_before.py proves it (`check_synchronizing`), and weft/plan/proof.py refuses
//     a plan with eager buffers that does not promise it.
// E3  The two ranks of a call swap their buffers in every second pair of calls. Each then writes
//     lines that it has read last, which are in its own cache; lines that it has written last are
//     in the other's cache, which would have to give them up one by one. Both ranks count the same
//     calls, so both swap in the same ones.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hosts/network.hpp"
#include "memory/calls.hpp"
#include "kernels/reduce.hpp"
#include "memory/signals.hpp"

namespace weft {

// Blocks `start:stop` of one of the program's slots; a slot is a buffer on a rank. A binding adds
// their addresses and numbers of rows.
struct Operand {
  uint32_t slot;
  uint32_t start;
  uint32_t stop;

  bool operator==(const Operand& other) const {
    return slot == other.slot && start == other.start && stop == other.stop;
  }
  // Whether both have the same elements, or none in common.
  bool same_or_apart(const Operand& other) const {
    return *this == other || slot != other.slot || stop <= other.start || other.stop <= start;
  }
};

enum class Op : int { copy, reduce, notify, wait, pause, send };

struct Instruction {
  Op op;
  // the destination first, of a pause the region whose rows are counted; then the sources
  std::vector<Operand> operands;
  uint32_t sizing = 0;  // the operand whose blocks give the number of rows: none holds any block
  bool counts_as_output = false;   // no output is read before all such instructions have ended
  std::vector<Dtype> dtypes = {};  // of the operands of a reduction
  Combine combine = Combine::sum;
  bool remote = false;         // uses the link to a peer
  Counter* counter = nullptr;  // to raise or to wait for
  // of the counter waited for, among this rank's counters; of the batch to send
  uint32_t index = 0;
  bool arrives = false;  // whether the network alone raises the counter waited for
  int source = 0;        // the rank that raises the counter waited for
  uint64_t count = 0;
  Reader reader = Reader::self;    // of the destination
  bool reads_peer_tensor = false;  // P2: its owner may overwrite it after closing the world
  bool follows = false;            // P1

  // Whether this is a copy of the rows that `first` copies or computes.
  bool repeats(const Instruction& first) const {
    if (op != Op::copy) return false;
    if (first.op == Op::copy) return first.operands[1] == operands[1];
    return first.op == Op::reduce && first.operands[0] == operands[1];
  }
};

// Role of a buffer, as in the plan.
enum class Role : int { input, output, workspace, eager };

// A buffer of a plan, with its blocks on each rank.
struct Buffer {
  static constexpr int kAnyBlock = -1;  // holds any block: the number of rows of the largest
  static constexpr int kRow = -2;       // a single row, in plans whose sizes are fixed

  std::string name, dtype;
  size_t itemsize;
  Role role;
  uint32_t like;  // the caller's buffer with the same number of columns
  bool
      in_digest;  // whether ranks must agree on its sizes, which are then part of the call's digest
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

using Span = std::pair<int64_t, int64_t>;  // times of the beginning and the end

struct Program;

// The rows of a message between hosts, at one of its ends.
struct MessageRows {
  bool any = false;  // a token has none
  Operand operand = {};
  std::vector<int> blocks =
      {};  // as many rows as these blocks have, if the operand holds any block
  std::optional<Dtype> packed = {};  // their dtype, if they travel packed
};

// Messages to a peer on another host, and the counter of this rank that is raised once their rows
// may be overwritten.
struct Batch {
  Program* program;
  uint32_t number;
  int peer;
  uint8_t lane;
  std::vector<MessageRows> messages;
  Counter* sent;
  std::vector<std::vector<char>> packed = {};  // rows that travel so, by message
  int64_t begun = 0;
};

// The messages of a peer's lane to this rank.
struct Arrivals {
  std::shared_ptr<const Network::Channel> channel;
  std::vector<MessageRows> messages;
};

// A batch that was sent, when tracing.
struct SentBatch {
  uint32_t number;
  int64_t begun, ended;
};

class Binding;

// The eager buffers of an execution: `offset` from the first set (E1); `swap_mask` is all ones if
// two ranks use each other's buffers (E3), else 0.
struct EagerOffset {
  size_t offset = 0, swap_mask = 0;
};

// The state of a program's execution. It is reused, so that a repeated call allocates nothing.
struct Execution {
  Execution(size_t lanes, size_t ranks)
      : spans(lanes),
        failures(lanes),
        targets(lanes),
        link_ready(lanes),
        agreed(lanes, std::vector<char>(ranks)) {}
  void reset(uint64_t new_call, uint64_t new_digest) {
    call = new_call;
    digest = new_digest;
    locked = false;
    mark = digest ^ call * 0x9e3779b97f4a7c15;
    for (auto& peers : agreed) peers.assign(peers.size(), 0);
    failures.assign(failures.size(), WaitFailure{});
    stopped.store(-1, std::memory_order_relaxed);
  }

  const Binding* binding = nullptr;      // null if the plan has no buffers
  std::vector<std::vector<Span>> spans;  // by lane and instruction, when tracing
  std::vector<WaitFailure> failures;     // by lane
  // the lane that ended early on the lane thread, which ends the waits of all others; -1: none
  std::atomic<int> stopped{-1};
  // by lane and instruction: the value that a wait waits for, fixed when the call begins
  std::vector<std::vector<uint64_t>> targets;
  std::vector<int64_t> link_ready;        // by lane: time from which rows are ready for the link
  std::vector<std::vector<char>> agreed;  // by lane: peers known to have made the same call
  uint64_t call = 0, digest = 0;
  uint64_t mark = 0;  // both combined, for peers to compare
  EagerOffset eager;
  int64_t timeout = 0;  // of each wait, in nanoseconds
  int spins = 0;        // of each wait of the caller's thread
  bool locked = false;  // whether the caller's thread holds a lock that others may need
};

// One rank's part of a plan: its lanes, the growth of its counters in an execution, and the state
// of the current execution.
struct Program {
  // bytes of eager buffers of a plan on each rank: a bound of memory
  static constexpr size_t kEager = 64 << 10;
  static constexpr size_t kEagerSets = 2;  // sets of eager buffers (E1)

  std::vector<std::vector<Instruction>> lanes;
  std::vector<std::pair<uint32_t, uint64_t>> growth;  // of this rank's counters, by index
  CallText text;                                      // of an execution without a binding
  // names of the operator and of the plan; the binding adds sizes to make the text
  std::string name, ending;
  // number of blocks of each shard; blocks are numbered over all shards
  std::vector<uint32_t> pieces = {};
  size_t rows_multiple = 1;  // of blocks, but for the last one of a shard that does not divide
  // numbers of consecutive blocks of buffers; a buffer refers to a layout for each rank
  std::vector<std::vector<int>> layouts = {};
  std::vector<Buffer> buffers = {};
  std::vector<std::pair<int, uint32_t>> slots = {};  // a rank, and the number of a buffer there
  // pairs of buffers between which some rank moves rows
  std::vector<std::pair<uint32_t, uint32_t>> exchanges = {};
  int rank = 0;        // the rank of this part, if there are slots
  bool eager = false;  // whether it has eager buffers
  // of several hosts
  std::deque<Batch> batches = {};
  std::vector<Arrivals> arrivals = {};
  bool connected = false;            // whether the network knows what peers it needs
  std::mutex sending;                // of `sent`
  std::vector<SentBatch> sent = {};  // of the current execution, when tracing
  Execution execution;

  Program(std::string call, size_t lane_count,
          std::vector<std::pair<uint32_t, uint64_t>> counter_growth, size_t ranks)
      : lanes(lane_count),
        growth(std::move(counter_growth)),
        text(std::move(call)),
        execution(lane_count, ranks) {}

  // Whether an execution takes some microseconds if no rank is late: it moves few bytes, or none,
  // by the caller's thread alone.
  bool brief() const { return (eager || buffers.empty()) && lanes[1].empty(); }

  // Whether its caller computes products.
  bool computes() const {
    return std::any_of(lanes[0].begin(), lanes[0].end(),
                       [](const Instruction& i) { return i.op == Op::pause; });
  }

  // Whether its ranks swap their eager buffers in every second pair of executions (E3).
  bool swaps_eager() const { return eager && buffers[0].layouts.size() == 2; }

  // The number of the buffer of this name; the number of buffers if there is none.
  uint32_t number(std::string_view of_name) const {
    const auto found = std::find_if(buffers.begin(), buffers.end(),
                                    [&](const Buffer& buffer) { return buffer.name == of_name; });
    return static_cast<uint32_t>(found - buffers.begin());
  }

  const Buffer& buffer(const Operand& o) const { return buffers.at(slots.at(o.slot).second); }

  // Whether it is a buffer of the caller's, which may be used outside the call.
  bool of_caller(const Operand& o) const {
    return buffer(o).role == Role::input || buffer(o).role == Role::output;
  }

  // Whether it reads a tensor of a peer's caller.
  bool reads_peers(const Instruction& instruction) const {
    const bool writes = instruction.op == Op::copy || instruction.op == Op::reduce;
    const auto sources = instruction.operands.begin() + writes;  // after the destination
    return std::any_of(sources, instruction.operands.end(), [&](const Operand& source) {
      return of_caller(source) && slots.at(source.slot).first != rank;
    });
  }

  // The numbers of the blocks of an instruction's rows.
  std::vector<int> blocks(const Instruction& instruction) const {
    const Operand& o = instruction.operands[instruction.sizing];
    const auto& layout = layouts.at(buffer(o).layouts.at(slots.at(o.slot).first));
    return {layout.begin() + o.start, layout.begin() + o.stop};
  }

  // Whether an instruction may be executed in the pass of the instructions from `first` to the end
  // of a lane (P1, P3).
  bool joins(const Instruction& instruction, const std::vector<Instruction>& lane,
             size_t first) const {
    if (!instruction.repeats(lane[first]) || blocks(instruction) != blocks(lane[first]))
      return false;
    const auto harmless = [&](const Operand& other) {
      return instruction.operands[0].same_or_apart(other);
    };
    return std::all_of(lane[first].operands.begin(), lane[first].operands.end(), harmless) &&
           std::all_of(lane.begin() + first, lane.end(),
                       [&](const Instruction& earlier) { return harmless(earlier.operands[0]); });
  }

  // Note which waits are for counters that the network alone raises, once all instructions and
  // messages are added.
  void mark_arrivals() {
    std::map<const Counter*, uint64_t> raised;
    for (const Arrivals& each : arrivals)
      for (const auto& counters : each.channel->raised)
        for (const Counter* counter : counters) ++raised[counter];
    for (const Batch& batch : batches) ++raised[batch.sent];
    const std::map<uint32_t, uint64_t> every(growth.begin(), growth.end());
    for (auto& lane : lanes)
      for (Instruction& i : lane)
        if (const auto found = raised.find(i.counter); i.op == Op::wait && found != raised.end())
          if (const auto all = every.find(i.index); all != every.end())
            i.arrives = all->second == found->second;
  }

  // Append an instruction. `returns`: this rank also reads the memory that it writes.
  void add(size_t lane, Instruction instruction, bool returns = false) {
    auto& instructions = lanes[lane];
    size_t first = instructions.size();
    while (first && instructions[--first].follows) {
    }
    instruction.follows = first < instructions.size() && joins(instruction, instructions, first);
    instruction.reads_peer_tensor =
        reads_peers(instruction) || (instruction.follows && instructions[first].reads_peer_tensor);
    if (instruction.op == Op::copy || instruction.op == Op::reduce) {
      const Operand& written = instruction.operands[0];
      returns = returns || (buffer(written).role == Role::eager && swaps_eager());
      if (buffer(written).shared && !returns && (instruction.remote || !of_caller(written)))
        instruction.reader = instruction.remote ? Reader::owner : Reader::peers;
    }
    instructions.push_back(std::move(instruction));
  }
};

}  // namespace weft
