// What a plan's blocks are in one call: how many rows each has, and where they lie. Plans know no
// sizes; this is where they get them.
#pragma once

#include <string>
#include <vector>

#include "execute/program.hpp"

namespace weft {

// A tensor of the caller's: rows `stride` bytes apart. `parts` are where all ranks' parts begin if
// it is symmetric; else peers may read it through the kernel if it is `apart`.
struct BoundTensor {
  uint32_t buffer;
  uintptr_t address;
  size_t rows, columns, stride;
  std::vector<uintptr_t> parts;
  std::string place;  // which symmetric memory, in words
  bool apart = false;
};

class Binding {
 public:
  // `rows` of each shard, cut as evenly as it goes, the first pieces a row larger where it does not
  // divide. Throws std::invalid_argument where a tensor has not as many rows as its blocks. The
  // program must live as long. `words` are what peers are told that the user called; by default the
  // operator and the rows that ranks must agree on.
  Binding(Program& program, const std::vector<size_t>& rows, const std::vector<BoundTensor>& given,
          std::string words = "");

  Program& program() const { return program_; }
  const std::vector<size_t>& shards() const { return shards_; }
  // Bytes of workspace on every rank.
  size_t workspace() const { return workspace_; }
  // Bytes of eager buffers on every rank.
  size_t eager() const { return eager_; }
  // Where each rank's workspace begins, or its eager buffers of the first turn.
  void place(Role role, const std::vector<uintptr_t>& begins);

  // Whether this is a binding of so many rows to tensors like these, none of them symmetric; if so
  // they are its own from now on.
  bool again(const std::vector<size_t>& rows, const std::vector<BoundTensor>& given);

  // A buffer of the caller's, on this rank itself, begins elsewhere from now on.
  void move(uint32_t buffer, uintptr_t address);

  // `turn`: that of the execution.
  char* at(const Operand& o, Turn turn = {}) const {
    const Placed& p = placed_[o.slot];
    return p.base + (turn.behind & p.turns) + (turn.crossed & p.others) + first(o) * p.stride;
  }
  size_t stride(const Operand& o) const { return placed_[o.slot].stride; }
  size_t first(const Operand& o) const { return (*placed_[o.slot].bounds)[o.start]; }
  size_t rows(const Operand& o) const { return (*placed_[o.slot].bounds)[o.stop] - first(o); }
  size_t columns(const Operand& o) const { return placed_[o.slot].columns; }
  size_t row_bytes(const Operand& o) const { return placed_[o.slot].row_bytes; }
  // The rank whose memory this lies in, at an offset from the address which that rank tells, if it
  // is not mapped here; else -1.
  int apart(const Operand& o) const { return placed_[o.slot].apart; }
  // The address to tell peers; 0 if they read nothing through the kernel.
  uintptr_t offered() const { return offered_; }
  // Bytes that are written to outputs.
  size_t written() const { return written_; }

  const Said& said() const { return said_; }

 private:
  struct Placed {
    const std::vector<size_t>* bounds;  // of `sums_`
    size_t columns, row_bytes, stride;
    // all bits where buffers take turns; how far the other rank's lie from them
    size_t turns, others = 0;
    char* base = nullptr;
    int apart = -1;
  };
  // The rows of a buffer on each rank, in words.
  std::string listed(const Buffer& buffer) const;

  Program& program_;
  // the rows of shards, and the columns of the caller's buffers
  std::vector<size_t> shards_, widths_;
  // by layout: where each block begins, and the last one ends
  std::vector<std::vector<size_t>> sums_;
  std::vector<Placed> placed_;  // by slot
  uintptr_t offered_ = 0;
  int offers_ = -1;              // the buffer that lies there
  std::vector<size_t> offsets_;  // of workspaces and eager buffers, by buffer
  size_t workspace_ = 0, eager_ = 0, written_ = 0;
  Said said_;
};

}  // namespace weft
