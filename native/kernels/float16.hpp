// The two floating-point formats of 16 bits, converted by integer arithmetic, on any processor, to
// the same bits as by the conversion instructions of processors that have them.
#pragma once

#include <cstdint>
#include <cstring>

namespace weft {

struct Float16 {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

template <class To, class From>
To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To same;
  std::memcpy(&same, &x, sizeof same);
  return same;
}

inline float widen(BFloat16 x) { return bits_as<float>(uint32_t{x.bits} << 16); }

inline float widen(Float16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, magnitude = x.bits & 0x7fffu;
  uint32_t bits = (magnitude << 13) + (112u << 23);  // the two exponents have different biases
  // subnormal numbers
  if (magnitude < 0x400) bits = bits_as<uint32_t>(static_cast<float>(magnitude) * 0x1p-24f);
  // a NaN becomes a quiet one
  if (magnitude >= 0x7c00)
    bits = 0x7f800000 | magnitude << 13 | (magnitude > 0x7c00 ? 0x400000 : 0);
  return bits_as<float>(sign | bits);
}

// To nearest, ties to even; a NaN stays a NaN.
template <class T>
T narrow(float x);

template <>
inline BFloat16 narrow(float x) {
  const uint32_t bits = bits_as<uint32_t>(x), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>(x != x ? 0x7fc0 : rounded)};
}

template <>
inline Float16 narrow(float x) {
  const uint32_t bits = bits_as<uint32_t>(x), magnitude = bits & 0x7fffffff;
  uint32_t rounded = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  // subnormal numbers: adding 1/2 rounds to the last place of a subnormal float16
  if (magnitude < 0x38800000)
    rounded = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - bits_as<uint32_t>(0.5f);
  if (magnitude >= 0x477ff000) rounded = 0x7c00;  // nearer to 2^16 than to the largest number
  if (magnitude > 0x7f800000) rounded = 0x7e00 | (magnitude >> 13 & 0x3ff);
  return {static_cast<uint16_t>((bits >> 16 & 0x8000) | rounded)};
}

}  // namespace weft
