// The layer of a mixture of experts that is on one rank: gate, up, activation and down of each of
// its experts for the tokens that chose it, and each token's weighted sum of the results.
//
// X1  A row of a product is one sum in float32, from the first product to the last. Results of a
//     token's experts are weighted and added in float32 in the order of the experts, and rounded
//     once. So the bits of a token depend on no other token, and on no number of threads.
// X2  Threads share the columns, never the rows: each reads its part of every weight, once for some
//     tokens, whatever the router has chosen.
// X3  NaN and infinities give what they give in float64. A logistic function below float32's
//     smallest normal number may be 0, and so may numbers below it where pairs are multiplied.
//
// A packed expert consists of panels of `half::columns()` columns, as those of a packed weight:
// pairs of a panel of the gate and one of up, of depth `width`; and those of down, of depth
// `inner`. Where the processor multiplies pairs, a row of a panel has pairs of numbers along the
// depth.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/half_kernels.hpp"

namespace weft::experts {

using half::Activation;

// `count` experts with rows of `width` elements and `inner` ones between the products.
struct Shape {
  Dtype dtype;  // float16, bfloat16 or float32
  size_t count, width, inner;

  // Elements of one packed expert; 0 if this processor has no instructions for these products.
  size_t gate_up_elements() const;
  size_t down_elements() const;
};

// Elements of a stack of matrices; strides count elements.
struct Stack {
  const char* data;
  size_t stride, row_stride, column_stride;
};

// Lay out gate and up (count, 2 * inner, width), the gate first, and down (count, width, inner).
void pack(const Shape& shape, const Stack& gate_up, const Stack& down, char* packed_gate_up,
          char* packed_down);

// The experts that tokens have chosen, and the factors of their results: (tokens, top).
struct Routing {
  const char* chosen;  // numbers of experts, of 8 bytes if `wide`, else of 4
  size_t chosen_stride;
  bool wide;
  const float* scores;
  size_t scores_stride;
  size_t top;

  int64_t expert(size_t token, size_t choice) const {
    const size_t at = token * chosen_stride + choice;
    return wide ? reinterpret_cast<const int64_t*>(chosen)[at]
                : reinterpret_cast<const int32_t*>(chosen)[at];
  }
  float score(size_t token, size_t choice) const { return scores[token * scores_stride + choice]; }
};

struct Product {
  Shape shape;
  Dtype out_dtype;             // that of the shape, or float32
  const char *gate_up, *down;  // packed
  Activation activation;
  int64_t first;  // the number of the first expert; choices of others count as none
  Routing routing;
  const char* x;    // (tokens, width); columns are contiguous, as those of `out`
  size_t x_stride;  // elements between rows
  char* out;        // (tokens, width)
  size_t out_stride;
  size_t tokens;
};

// out = for each token the sum of its experts' results; zeros for a token that chose none of these.
void multiply(const Product& product);

}  // namespace weft::experts
