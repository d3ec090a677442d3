// Shared memory without a name: nothing is left behind, whatever dies.
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
  int fd;
};

// A mapped memory file; unmapped with the last reference to it.
class Mapping {
 public:
  // With the file. Takes all pages; throws std::system_error.
  static std::pair<std::shared_ptr<Mapping>, std::shared_ptr<File>> create(size_t bytes);
  static std::shared_ptr<Mapping> attach(const File& file, size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;

  char* base() const { return base_; }
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(base_); }
  size_t bytes() const { return bytes_; }

 private:
  Mapping(int fd, size_t bytes);
  char* base_;
  size_t bytes_;
};

// One symmetric allocation: this rank's memory and its peers', in rank order.
struct Segment {
  Segment(std::vector<std::shared_ptr<Mapping>> parts, int rank, uint64_t world = 0,
          uint64_t number = 0);
  ~Segment();
  Segment(const Segment&) = delete;

  const Mapping& own() const { return *parts.at(rank); }
  // Where all ranks have what lies `offset` bytes behind the beginning; 0 for a rank whose part is
  // not mapped.
  std::vector<uintptr_t> bases(size_t offset) const {
    std::vector<uintptr_t> found;
    for (const auto& part : parts) found.push_back(part ? part->address() + offset : 0);
    return found;
  }

  // The one in whose own part this lies; null if there is none. It lives while the tensor does
  // whose address it is.
  static const Segment* around(uintptr_t address);

  std::vector<std::shared_ptr<Mapping>> parts;
  int rank;
  uint64_t world;   // the number, in this process, of the world it belongs to; from 1 on
  uint64_t number;  // of the call that made it, alike on all ranks
};

}  // namespace weft
