// The innermost loops of products of 16-bit numbers and of float32, for the widest vectors of this
// processor.
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

// What an expert does to the products by its gate.
enum class Activation : int { silu, gelu, gelu_tanh, relu };

struct Kernels {
  size_t rows;  // of a full tile, whose sums fit the registers
  void (*widen)(const void* from, float* to, size_t n);
  // By the number of rows less one, and by whether for one panel or for `panels_together`: the sums
  // of widened rows of `depth` elements times adjacent panels, row after row.
  void (*sum[kMostRows][2])(const float* x, const void* panels, size_t depth, float* sums);
  // Add a bias, unless it is null, and round, to 16 bits or not.
  void (*finish)(const float* sums, const float* bias, void* to, size_t n);
  void (*finish_wide)(const float* sums, const float* bias, void* to, size_t n);
  // to += factor * sums
  void (*add_scaled)(const float* sums, float factor, float* to, size_t n);
  // activation(gate) * up for the columns of a panel, as elements of a widened row.
  void (*activate)(Activation activation, const float* gate, const float* up, void* to);
};

// float16, bfloat16 or float32.
const Kernels& kernels_of(Dtype dtype);

// The same for rows and panels of pairs of numbers along the depth, each pair in the place of one
// widened number; null if this processor does not multiply pairs of that dtype. They take half as
// long.
const Kernels* kernels_of_pairs(Dtype dtype);

}  // namespace weft::half
