// Loops over elements, compiled for several widths of vectors.
#pragma once

namespace weft {

// Loops over elements are compiled for several vector widths: `WEFT_INLINE` inlines them into a
// function for each, and the processor's features select one. Compilers can do this by themselves
// (`target_clones`), but not all of them, not for templates, and not with musl as the C library.
#define WEFT_INLINE __attribute__((always_inline))

#if defined(__x86_64__)
inline const int vector_bits = [] {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2")) return 128;
  bool wider = __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq");
  return wider ? 512 : 256;
}();

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
  if (vector_bits == 512)
    with_512_bits(loop, args...);
  else if (vector_bits == 256)
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
