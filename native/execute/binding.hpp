// Block sizes and addresses of a program for one call. Plans have no sizes; a binding adds them.
//
// W1  A buffer of the workspace, or of the eager buffers, has the same offset on all ranks: offsets
//     follow from the plan and from sizes on which ranks agree. So an offset is enough to access a
//     peer's buffer.
// W2  Buffers of the workspace begin at pages, eager buffers at cache lines.
// W3  All plans of a world share one workspace, each with its own offsets. So a plan accesses it
//     only after all accesses of earlier plans, on all ranks; weft/plan/happens_before.py proves it
//     (`check_workspaces`).
// W4  The eager buffers of a plan have at most Program::kEager bytes on a rank.
// W5  Only the source of a copy may be unmapped: any other access to a peer's tensor needs its
//     memory.
// W6  Buffers between which rows are moved have equal columns. That their dtypes fit is checked
// when
//     the plan is compiled (`check_dtypes` of weft/engines/program.py).
#pragma once

#include <string>
#include <vector>

#include "execute/program.hpp"

namespace weft {

// A tensor of the caller, with rows `stride` bytes apart. If it is symmetric, `parts` are the
// addresses of all ranks' parts. If it is `unmapped`, peers may read it through the kernel.
struct BoundTensor {
  uint32_t buffer;
  uintptr_t address;
  size_t rows, columns, stride;
  std::vector<uintptr_t> parts;
  std::string place;  // description of its symmetric memory
  bool unmapped = false;
};

class Binding {
 public:
  // `rows` of each shard are divided into blocks as evenly as possible, the first blocks a row
  // larger. Throws std::invalid_argument if a tensor's number of rows differs from its blocks'. The
  // program must outlive the binding. `words` are the user's call, shown to peers; by default the
  // operator and the sizes on which ranks must agree.
  Binding(Program& program, const std::vector<size_t>& rows,
          const std::vector<BoundTensor>& tensors, std::string words = "");

  Program& program() const { return program_; }
  const std::vector<size_t>& shards() const { return shards_; }
  // Bytes of workspace on every rank.
  size_t workspace() const { return workspace_; }
  // Bytes of eager buffers on every rank.
  size_t eager() const { return eager_; }
  // Set the addresses of all ranks' workspaces, or of their eager buffers of the first set.
  void place(Role role, const std::vector<uintptr_t>& begins);

  // Whether this is a binding of the same numbers of rows to tensors of the same layouts, none of
  // them symmetric; if so, it refers to these tensors from now on.
  bool again(const std::vector<size_t>& rows, const std::vector<BoundTensor>& tensors);

  // Set the address of this rank's part of a caller's buffer.
  void move(uint32_t buffer, uintptr_t address);

  // Address of the first row, in the execution that has this eager offset.
  char* at(const Operand& o, EagerOffset eager = {}) const {
    const Placed& p = placed_[o.slot];
    return p.base + (eager.offset & p.eager_mask) + (eager.swap_mask & p.swap_distance) +
           first(o) * p.stride;
  }
  size_t stride(const Operand& o) const { return placed_[o.slot].stride; }
  size_t first(const Operand& o) const { return (*placed_[o.slot].bounds)[o.start]; }
  size_t rows(const Operand& o) const { return (*placed_[o.slot].bounds)[o.stop] - first(o); }
  size_t columns(const Operand& o) const { return placed_[o.slot].columns; }
  size_t row_bytes(const Operand& o) const { return placed_[o.slot].row_bytes; }
  // The rows of a message in the execution that has this eager offset.
  Strided rows_of(const MessageRows& message, EagerOffset eager) const {
    if (!message.any) return {};
    size_t count = message.blocks.empty() ? rows(message.operand) : 0;
    for (int block : message.blocks) count += block == Buffer::kRow ? 1 : sizes_[block];
    return {at(message.operand, eager), count, row_bytes(message.operand), stride(message.operand)};
  }
  // The owner of memory that is not mapped here, or -1. `at` is then an offset from the address
  // that the owner publishes with the call.
  int unmapped_owner(const Operand& o) const { return placed_[o.slot].unmapped_owner; }
  // The address that this rank publishes; 0 if peers read nothing through the kernel.
  uintptr_t published() const { return published_; }
  // Bytes that are written to outputs.
  size_t written() const { return written_; }

  // The call as peers see it: that of the binding, or of the program if it was given one, which may
  // be another in each execution.
  const CallText& text() const { return program_.name.empty() ? program_.text : text_; }

 private:
  struct Placed {
    const std::vector<size_t>* bounds;  // of `sums_`
    size_t columns, row_bytes, stride;
    size_t eager_mask;         // all ones for eager buffers, else 0
    size_t swap_distance = 0;  // from the owner's eager buffers to the other of two ranks'
    char* base = nullptr;
    int unmapped_owner = -1;
  };
  // The numbers of rows of a buffer on each rank, as text.
  std::string listed(const Buffer& buffer) const;

  Program& program_;
  // rows of the shards, and columns of the caller's buffers
  std::vector<size_t> shards_, widths_;
  std::vector<size_t> sizes_;  // rows of the blocks
  // by layout: the first row of each block, and the end of the last one
  std::vector<std::vector<size_t>> sums_;
  std::vector<Placed> placed_;  // by slot
  uintptr_t published_ = 0;
  int published_buffer_ = -1;    // the buffer at that address
  std::vector<size_t> offsets_;  // of workspaces and eager buffers, by buffer
  size_t workspace_ = 0, eager_ = 0, written_ = 0;
  CallText text_;
};

}  // namespace weft
