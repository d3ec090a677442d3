// The innermost loops of products of 16-bit numbers, for the widest vectors of this processor.
#pragma once

#include <cstddef>

#include "kernels/float16.hpp"
#include "kernels/reduce.hpp"

namespace weft::half {

// Elements of a widened row that are adjacent in memory; those of the tile's next row follow. So a
// tile is read as one stream, with its rows at constant distances.
constexpr size_t kRun = 64;
// The most rows of a tile, and the most sums.
constexpr size_t kMostRows = 12, kMostSums = 12 * 32;

// The number of panels whose sums are computed together: with few rows more, since in one sum a
// multiply-add waits for the one before.
constexpr size_t panels_together(size_t rows) { return rows == 1 ? 4 : rows < 4 ? 2 : 1; }

struct Kernels {
  size_t rows;  // of a full tile, whose sums fit the registers
  void (*widen)(const void* from, float* to, size_t n);
  // By the number of rows less one, and by whether for one panel or for `panels_together`: the sums
  // of widened rows of `depth` elements times adjacent panels, row after row.
  void (*sum[kMostRows][2])(const float* x, const void* panels, size_t depth, float* sums);
  // Add a bias, unless it is null, and round, to 16 bits or not.
  void (*finish)(const float* sums, const float* bias, void* to, size_t n);
  void (*finish_wide)(const float* sums, const float* bias, void* to, size_t n);
};

const Kernels& kernels_of(Dtype dtype);

}  // namespace weft::half
