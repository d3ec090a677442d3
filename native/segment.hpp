// Shared memory without a name: nothing is left behind, whatever dies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace weft {

// A mapped memory file; unmapped with the last reference to it.
class Mapping {
 public:
  static std::shared_ptr<Mapping> create(size_t bytes, int& fd);  // reserves all pages; throws std::system_error
  static std::shared_ptr<Mapping> attach(int fd, size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;

  char* base() const { return base_; }
  size_t bytes() const { return bytes_; }

 private:
  Mapping(int fd, size_t bytes);
  char* base_;
  size_t bytes_;
};

// One symmetric allocation: this rank's memory and its peers', in rank order.
struct Segment {
  std::vector<std::shared_ptr<Mapping>> parts;
  int rank;
  uint64_t world = 0;   // the number, in this process, of the world it belongs to
  uint64_t number = 0;  // of the call that made it, alike on all ranks
};

}  // namespace weft
