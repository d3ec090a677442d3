// Rows as blocks of numbers of 8 bits: each 32 numbers of a row, and the rest of it, share a power
// of two, in the format MXINT8 (OCP Microscaling Formats (MX) Specification, version 1.0, 5.5.4 and
// 6.3).
//
// A row is its blocks' exponents, a byte each, and then its numbers, a byte each.
//
// B1  A number differs from the original by at most 1/128 of the largest of its block, or by
// 2^-127.
//     A block with an infinity or a NaN is NaN.
// B2  Rows that were packed and unpacked are the same when they are packed again, in any of the
//     dtypes.
#pragma once

#include <cstddef>

#include "kernels/reduce.hpp"

namespace weft {

// The bytes of `rows` packed rows of `columns` numbers.
size_t packed_bytes(size_t rows, size_t columns);

// Pack rows of float16, bfloat16 or float32, `stride` bytes apart.
void pack_rows(Dtype dtype, const char* rows, size_t stride, size_t count, size_t columns,
               char* packed);

// The inverse.
void unpack_rows(Dtype dtype, const char* packed, char* rows, size_t stride, size_t count,
                 size_t columns);

}  // namespace weft
