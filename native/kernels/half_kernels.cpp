#include "kernels/half_kernels.hpp"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "kernels/half_product.hpp"
#include "kernels/vectors.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weft::half {

#if defined(__x86_64__)

namespace {

// Two adjacent numbers, at the address of any number, which instructions multiply by two others,
// and add up.
struct __attribute__((packed)) Pair {
  uint32_t bits;
};

inline float widen(float x) { return x; }
inline float widen(Pair x) { return bits_as<float>(x.bits); }

template <class Out>
Out narrow_to(float x) {
  if constexpr (std::is_same_v<Out, float>)
    return x;
  else
    return narrow<Out>(x);
}

}  // namespace

namespace avx2 {
#define WEFT_TARGET __attribute__((target("avx2,fma,f16c")))
using Vector = __m256;
constexpr size_t kWidth = 8, kColumns = 16, kRows = 6;

WEFT_TARGET inline Vector all(float x) { return _mm256_set1_ps(x); }
WEFT_TARGET inline Vector load(const float* from) { return _mm256_loadu_ps(from); }
WEFT_TARGET inline Vector add(Vector x, Vector y) { return _mm256_add_ps(x, y); }
WEFT_TARGET inline Vector multiply_add(Vector x, Vector y, Vector sum) {
  return _mm256_fmadd_ps(x, y, sum);
}
WEFT_TARGET inline Vector scaled_add(Vector x, Vector y, Vector sum) {
  return multiply_add(x, y, sum);
}
WEFT_TARGET inline Vector widen_vector(const float* from) { return load(from); }
WEFT_TARGET inline __m128i load_half(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}
WEFT_TARGET inline Vector widen_vector(const BFloat16* from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(from)), 16));
}
WEFT_TARGET inline Vector widen_vector(const Float16* from) {
  return _mm256_cvtph_ps(load_half(from));
}
WEFT_TARGET inline void store(float* to, Vector x) { _mm256_storeu_ps(to, x); }
WEFT_TARGET inline void store(Float16* to, Vector x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
WEFT_TARGET inline void store(BFloat16* to, Vector x) {  // as `narrow` in float16.hpp
  const __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i none = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i wide = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), none);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(to),
      _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
}
#include "kernels/half_tile.hpp"
#undef WEFT_TARGET
}  // namespace avx2

namespace avx512 {
#define WEFT_TARGET __attribute__((target("avx512f")))
using Vector = __m512;
constexpr size_t kWidth = 16, kColumns = 32, kRows = 12;
// With this mask intrinsics do what they do without one, and GCC 12 does not warn of its header.
constexpr __mmask16 kAll = 0xffff;

WEFT_TARGET inline Vector all(float x) { return _mm512_set1_ps(x); }
WEFT_TARGET inline Vector load(const float* from) { return _mm512_loadu_ps(from); }
WEFT_TARGET inline Vector add(Vector x, Vector y) { return _mm512_add_ps(x, y); }
WEFT_TARGET inline Vector multiply_add(Vector x, Vector y, Vector sum) {
  return _mm512_fmadd_ps(x, y, sum);
}
WEFT_TARGET inline Vector scaled_add(Vector x, Vector y, Vector sum) {
  return multiply_add(x, y, sum);
}
WEFT_TARGET inline Vector widen_vector(const float* from) { return load(from); }
WEFT_TARGET inline __m256i load_half(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
WEFT_TARGET inline Vector widen_vector(const BFloat16* from) {
  return _mm512_castsi512_ps(
      _mm512_maskz_slli_epi32(kAll, _mm512_maskz_cvtepu16_epi32(kAll, load_half(from)), 16));
}
WEFT_TARGET inline Vector widen_vector(const Float16* from) {
  return _mm512_maskz_cvtph_ps(kAll, load_half(from));
}
WEFT_TARGET inline void store(float* to, Vector x) { _mm512_storeu_ps(to, x); }
WEFT_TARGET inline void store(Float16* to, Vector x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_maskz_cvtps_ph(kAll, x, _MM_FROUND_TO_NEAREST_INT));
}
WEFT_TARGET inline void store(BFloat16* to, Vector x) {  // as `narrow` in float16.hpp
  const __m512i bits = _mm512_castps_si512(x), high = _mm512_maskz_srli_epi32(kAll, bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_maskz_srli_epi32(
      kAll, _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i wide = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                                             _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(kAll, wide));
}
#include "kernels/half_tile.hpp"
#undef WEFT_TARGET
}  // namespace avx512

namespace avx512_pairs {
#define WEFT_TARGET __attribute__((target("avx512f,avx512bf16")))
using avx512::all, avx512::load, avx512::add, avx512::scaled_add, avx512::store;
using avx512::Vector, avx512::kWidth, avx512::kColumns, avx512::kRows;

// The sum of both products of each pair of bfloat16.
WEFT_TARGET inline Vector multiply_add(Vector x, Vector y, Vector sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
}
WEFT_TARGET inline Vector widen_vector(const Pair* from) { return _mm512_loadu_ps(from); }
#include "kernels/half_tile.hpp"
#undef WEFT_TARGET
}  // namespace avx512_pairs

namespace {

template <class Item>
Kernels chosen() {
  return instructions >= Instructions::avx512 ? avx512::kernels_of<Item>()
                                              : avx2::kernels_of<Item>();
}

}  // namespace

size_t columns() {
  if (instructions >= Instructions::avx512) return avx512::kColumns;
  return instructions == Instructions::avx2 ? avx2::kColumns : 0;
}

const Kernels& kernels_of(Dtype dtype) {
  static const Kernels of_float16 = chosen<Float16>(), of_bfloat16 = chosen<BFloat16>(),
                       of_float32 = chosen<float>();
  return dtype == Dtype::float16 ? of_float16 : dtype == Dtype::bfloat16 ? of_bfloat16 : of_float32;
}

const Kernels* kernels_of_pairs(Dtype dtype) {
  static const Kernels pairs = avx512_pairs::kernels_of<Pair, BFloat16, BFloat16>();
  return instructions == Instructions::avx512_bf16 && dtype == Dtype::bfloat16 ? &pairs : nullptr;
}

#else

size_t columns() { return 0; }

const Kernels& kernels_of(Dtype) {
  static const Kernels none{};
  return none;
}

const Kernels* kernels_of_pairs(Dtype) { return nullptr; }

#endif

}  // namespace weft::half
