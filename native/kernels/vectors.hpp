// The instructions of this processor that kernels use, and loops over elements compiled for them.
#pragma once

namespace weft {

// Each includes those before it: none beyond the architecture's own; AVX2, FMA and F16C; AVX-512 F,
// VL, BW and DQ; products of pairs of bfloat16.
enum class Instructions : int { baseline, avx2, avx512, avx512_bf16 };

constexpr const char* kInstructions[] = {"baseline", "avx2", "avx512", "avx512_bf16"};

// Those that this processor has, at most the ones that the environment variable WEFT_INSTRUCTIONS
// names.
Instructions find_instructions();

inline const Instructions instructions = find_instructions();

// Loops over elements are compiled for several vector widths: `WEFT_INLINE` inlines them into a
// function for each, and the processor's features select one. Compilers can do this by themselves
// (`target_clones`), but not all of them, not for templates, and not with musl as the C library.
#define WEFT_INLINE __attribute__((always_inline))

#if defined(__x86_64__)
template <class Loop, class... Args>
__attribute__((target("avx2"))) void with_256_bits(Loop loop, Args... args) {
  loop(args...);
}

template <class Loop, class... Args>
__attribute__((target("avx2,avx512f,avx512vl,avx512bw,avx512dq"))) void with_512_bits(
    Loop loop, Args... args) {
  loop(args...);
}

template <class Loop, class... Args>
void vectorised(Loop loop, Args... args) {
  if (instructions >= Instructions::avx512)
    with_512_bits(loop, args...);
  else if (instructions >= Instructions::avx2)
    with_256_bits(loop, args...);
  else
    loop(args...);
}
#else
template <class Loop, class... Args>
void vectorised(Loop loop, Args... args) {
  loop(args...);
}
#endif

}  // namespace weft
