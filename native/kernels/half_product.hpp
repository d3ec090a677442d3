// The product of float16 or bfloat16 rows by a weight of the same dtype, computed in float32: the
// weight is widened in registers, so 2 bytes are read for each of its elements.
//
// P1  An element of the result is one sum in float32, from the first product to the last, each by
//     a fused multiply-add, then the bias, then one rounding. So its bits do not depend on the
//     number of rows or of threads, on the layout of the weight, or on the kind of vectors.
// P2  No memory is taken in proportion to the operands: rows are widened, and a weight that is not
//     packed is laid out, a block at a time in memory that the thread keeps. On some machines new
//     memory costs more than all conversions.
//
// A packed weight consists of panels of `columns()` columns: element (k, n) is the element n
// % columns of row k of panel n / columns. Columns that the weight lacks are zeros.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/reduce.hpp"

namespace weft::half {

// The columns of a panel on this processor; 0 if it lacks instructions for these products (AVX2,
// FMA and F16C, or AVX-512).
size_t columns();

// Elements of a matrix (K, N) of 16-bit numbers; strides count elements.
struct Matrix {
  const uint16_t* data;
  size_t row_stride, column_stride;
};

// Lay out a weight of `depth` rows and `all_columns` columns in panels.
void pack_panels(const Matrix& weight, size_t depth, size_t all_columns, uint16_t* panels);

struct Product {
  Dtype dtype, out_dtype;  // float16 or bfloat16; the same or float32
  const uint16_t* x;       // columns are contiguous, as those of `out`
  size_t x_stride;         // elements between rows
  char* out;
  size_t out_stride;
  const float* bias;  // or null
  Matrix weight;      // of a packed weight `data` alone, its panels
  bool packed;
  size_t rows, depth, columns;
};

// out = x @ weight (+ bias), divided among the threads of the team if it is large.
void multiply(const Product& product);

}  // namespace weft::half
