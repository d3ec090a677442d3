// Shared memory without a name: the kernel frees it when the last process that maps it ends.
//
// G1  All pages of this rank's part are allocated when it is created: a lack of memory is an error
//     then, and never a SIGBUS later.
// G2  The parts of a segment have equal sizes, and an allocation has the same offset in all of
//     them.
// G3  A tensor in a segment keeps it alive, so its address finds the segment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace weft {

// An open file, closed with the last reference to it.
struct File {
  explicit File(int descriptor) : fd(descriptor) {}
  ~File();
  File(const File&) = delete;
  // Leave the descriptor to the caller.
  int release() { return std::exchange(fd, -1); }
  int fd;
};

// A mapped memory file, unmapped with the last reference to it. Native code that gets one from
// Python shares it by itself, not by a Python object, which only a thread with the GIL may release.
class Mapping : public std::enable_shared_from_this<Mapping> {
 public:
  // A new mapping and its file, with all pages allocated; throws std::system_error.
  static std::pair<std::shared_ptr<Mapping>, std::shared_ptr<File>> create(size_t bytes);
  static std::shared_ptr<Mapping> attach(const File& file, size_t bytes);
  // Some bytes of a mapping, which lives as long as they are used.
  static std::shared_ptr<Mapping> part(std::shared_ptr<Mapping> whole, size_t offset, size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;

  char* base() const { return base_; }
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(base_); }
  size_t bytes() const { return bytes_; }

 private:
  Mapping(int fd, size_t bytes);
  Mapping(std::shared_ptr<Mapping> whole, size_t offset, size_t bytes);
  char* base_;
  size_t bytes_;
  std::shared_ptr<Mapping> whole_ = {};
};

// One symmetric allocation: this rank's memory and its peers', in rank order.
struct Segment {
  Segment(std::vector<std::shared_ptr<Mapping>> parts, int rank, uint64_t world = 0,
          uint64_t number = 0);
  ~Segment();
  Segment(const Segment&) = delete;

  const Mapping& own() const { return *parts.at(rank); }
  // The address of offset `offset` in each rank's part; 0 for a rank whose part is not mapped.
  std::vector<uintptr_t> bases(size_t offset) const {
    std::vector<uintptr_t> found;
    for (const auto& part : parts) found.push_back(part ? part->address() + offset : 0);
    return found;
  }

  // The segment whose own part contains this address, or null. The caller has a tensor there (G3).
  static const Segment* containing(uintptr_t address);

  std::vector<std::shared_ptr<Mapping>> parts;
  int rank;
  uint64_t world;   // number of its world in this process, from 1 on
  uint64_t number;  // of the call that allocated it, equal on all ranks
};

}  // namespace weft
