// Copies between two views of one shape, each with its own strides.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace weft {

// The bytes from the first element to the end of the last one, 0 without elements. Strides count
// elements of `item` bytes.
template <class Number>
size_t span_of(size_t item, size_t dimensions, const Number* shape, const Number* strides) {
  size_t last = 0;
  for (size_t i = 0; i < dimensions; ++i) {
    if (!shape[i]) return 0;
    last += static_cast<size_t>((shape[i] - 1) * strides[i]);
  }
  return (last + 1) * item;
}

// Whether a view might hold an element more than once. It does not if each dimension's stride
// exceeds the span of the dimensions inside it.
bool may_repeat(const std::vector<size_t>& shape, const std::vector<size_t>& strides);

// A dimension of two views of one shape, with its stride in each, in bytes.
struct Dimension {
  size_t size, dst, src;
};

// Two views of one shape: the longest runs of bytes that are contiguous in both, and the dimensions
// around them, in the order of the first in memory, outermost first. Dimensions that are one in
// both are merged.
struct Runs {
  // Strides count elements of `item` bytes.
  Runs(size_t item, const std::vector<size_t>& shape, const std::vector<size_t>& dst_strides,
       const std::vector<size_t>& src_strides);

  size_t bytes;  // of all elements
  size_t run;
  std::vector<Dimension> dimensions;
};

// One copy, ready to run.
class StridedCopy {
 public:
  // Strides count elements of `item` bytes. Elements in both views are read before any is written.
  StridedCopy(char* dst, const char* src, size_t item, const std::vector<size_t>& shape,
              const std::vector<size_t>& dst_strides, const std::vector<size_t>& src_strides);

  // The same copy, a tile after the other: into the `capacity` bytes at `tile`, and on from there.
  // Throws std::invalid_argument unless both views are contiguous and apart from each other.
  StridedCopy through(char* tile, size_t capacity) const;

  void run() const;

 private:
  void run_shared() const;
  void run_from(size_t dimension, char* dst, const char* src) const;
  void run_tiles(const Dimension& outer, const Dimension& inner, char* dst, const char* src) const;
  void run_rows(const Dimension& rows, char* dst, const char* src) const;
  void run_staged() const;
  void run_in_tiles() const;

  char* dst_;
  const char* src_;
  size_t bytes_, run_;  // as those of `Runs`
  std::vector<Dimension> dimensions_;
  // capacity for all elements if the views overlap: allocated in the constructor, where a lack of
  // memory can be reported
  std::shared_ptr<char[]> staged_;
  char* tile_ = nullptr;  // the caller's, of `capacity_` bytes, if the copy goes through a tile
  size_t capacity_ = 0;
};

}  // namespace weft
