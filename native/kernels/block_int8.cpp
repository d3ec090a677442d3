#include "kernels/block_int8.hpp"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "kernels/float16.hpp"
#include "kernels/vectors.hpp"

namespace weft {

namespace {

constexpr size_t kShare = 32;
// The largest number of a block has the exponent of the block, and its integer has 7 bits.
constexpr int kDigits = 6;
// Exponents as float32 has them: of blocks whose step is the smallest normal number, and of blocks
// that are NaN.
constexpr uint32_t kLeastExponent = kDigits + 1, kNaNs = 255;

float power_of_two(uint32_t exponent) { return bits_as<float>(exponent << 23); }

WEFT_INLINE inline float wide(float x) { return x; }
WEFT_INLINE inline float wide(BFloat16 x) { return bits_as<float>(uint32_t{x.bits} << 16); }
WEFT_INLINE inline float wide(Float16 x) { return widen(x); }

template <class T>
WEFT_INLINE inline T rounded(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return narrow<T>(x);
}

WEFT_INLINE inline uint8_t pack_block(const float* numbers, int8_t* integers) {
  // the bits of numbers without their signs are ordered as the numbers are
  uint32_t largest = 0;
  for (size_t i = 0; i < kShare; ++i)
    largest = std::max(largest, bits_as<uint32_t>(numbers[i]) & 0x7fffffff);
  uint32_t exponent = std::max(largest >> 23, kLeastExponent);
  const float per_step = exponent == kNaNs ? 0 : power_of_two(2 * 127 + kDigits - exponent);
  // Adding and subtracting it rounds a small number to an integer, ties to even.
  constexpr float kRounds = 0x1.8p23f;
  for (size_t i = 0; i < kShare; ++i) {
    const float steps = exponent == kNaNs ? 0 : numbers[i] * per_step;
    const float integer = (steps + kRounds) - kRounds;
    integers[i] = static_cast<int8_t>(std::clamp(integer, -127.0f, 127.0f));
  }
  return static_cast<uint8_t>(exponent);
}

size_t blocks_of(size_t columns) { return (columns + kShare - 1) / kShare; }

template <class T>
void pack(const char* rows, size_t stride, size_t count, size_t columns, char* packed) {
  vectorised(
      [](const char* rows, size_t stride, size_t count, size_t columns, char* packed) WEFT_INLINE {
        const size_t blocks = blocks_of(columns);
        for (size_t row = 0; row < count; ++row, packed += blocks + columns) {
          const T* source = reinterpret_cast<const T*>(rows + row * stride);
          auto* exponents = reinterpret_cast<uint8_t*>(packed);
          auto* integers = reinterpret_cast<int8_t*>(packed + blocks);
          for (size_t at = 0; at < columns; at += kShare) {
            const size_t numbers = std::min(kShare, columns - at);
            float of_block[kShare] = {};
            int8_t made[kShare];
            if (numbers == kShare)
              for (size_t i = 0; i < kShare; ++i) of_block[i] = wide(source[at + i]);
            else
              for (size_t i = 0; i < numbers; ++i) of_block[i] = wide(source[at + i]);
            exponents[at / kShare] = pack_block(of_block, made);
            std::copy_n(made, numbers, integers + at);
          }
        }
      },
      rows, stride, count, columns, packed);
}

template <class T>
void unpack(const char* packed, char* rows, size_t stride, size_t count, size_t columns) {
  vectorised(
      [](const char* packed, char* rows, size_t stride, size_t count, size_t columns) WEFT_INLINE {
        const size_t blocks = blocks_of(columns);
        for (size_t row = 0; row < count; ++row, packed += blocks + columns) {
          T* target = reinterpret_cast<T*>(rows + row * stride);
          const auto* exponents = reinterpret_cast<const uint8_t*>(packed);
          const auto* integers = reinterpret_cast<const int8_t*>(packed + blocks);
          for (size_t at = 0; at < columns; at += kShare) {
            const uint32_t exponent = std::max(uint32_t{exponents[at / kShare]}, kLeastExponent);
            const float step =
                exponent == kNaNs ? bits_as<float>(0x7fc00000u) : power_of_two(exponent - kDigits);
            const size_t numbers = std::min(kShare, columns - at);
            if (numbers == kShare)
              for (size_t i = 0; i < kShare; ++i)
                target[at + i] = rounded<T>(static_cast<float>(integers[at + i]) * step);
            else
              for (size_t i = 0; i < numbers; ++i)
                target[at + i] = rounded<T>(static_cast<float>(integers[at + i]) * step);
          }
        }
      },
      packed, rows, stride, count, columns);
}

[[noreturn]] void refuse() {
  throw std::invalid_argument("rows of float16, bfloat16 and float32 are packed");
}

}  // namespace

size_t packed_bytes(size_t rows, size_t columns) { return rows * (blocks_of(columns) + columns); }

void pack_rows(Dtype dtype, const char* rows, size_t stride, size_t count, size_t columns,
               char* packed) {
  switch (dtype) {
    case Dtype::float16:
      return pack<Float16>(rows, stride, count, columns, packed);
    case Dtype::bfloat16:
      return pack<BFloat16>(rows, stride, count, columns, packed);
    case Dtype::float32:
      return pack<float>(rows, stride, count, columns, packed);
    default:
      refuse();
  }
}

void unpack_rows(Dtype dtype, const char* packed, char* rows, size_t stride, size_t count,
                 size_t columns) {
  switch (dtype) {
    case Dtype::float16:
      return unpack<Float16>(packed, rows, stride, count, columns);
    case Dtype::bfloat16:
      return unpack<BFloat16>(packed, rows, stride, count, columns);
    case Dtype::float32:
      return unpack<float>(packed, rows, stride, count, columns);
    default:
      refuse();
  }
}

}  // namespace weft
