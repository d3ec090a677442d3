// The loops of `half_kernels.cpp`, which includes this file once for each kind of vectors, in a
// namespace with `Vector`, its width, functions on vectors, and the sizes of a tile. For this there
// is no `#pragma once`. Every function has the attribute `WEFT_TARGET`, without which compilers do
// not inline intrinsics.

template <class Half>
WEFT_TARGET void widen_all(const void* from, float* to, size_t n) {
  const Half* const row = static_cast<const Half*>(from);
  size_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(to + i, widen_vector(row + i));
  for (; i < n; ++i) to[i] = widen(row[i]);
}

// The sums of `Rows` rows for `Panels` adjacent panels.
template <class Half, size_t Rows, size_t Panels>
WEFT_TARGET void sum_tile(const float* x, const void* panels, size_t depth, float* sums) {
  const Half* weight = static_cast<const Half*>(panels);
  Vector sum[Rows][Panels][2];
  for (size_t row = 0; row < Rows; ++row)
    for (size_t panel = 0; panel < Panels; ++panel)
      sum[row][panel][0] = sum[row][panel][1] = all(0);
  for (size_t start = 0; start < depth; start += kRun, x += Rows * kRun) {
    const size_t end = std::min(kRun, depth - start);
    for (size_t k = 0; k < end; ++k, weight += kColumns)
      for (size_t panel = 0; panel < Panels; ++panel) {
        const Half* const columns = weight + panel * depth * kColumns;
        const Vector left = widen_vector(columns), right = widen_vector(columns + kWidth);
        for (size_t row = 0; row < Rows; ++row) {
          const Vector factor = all(x[row * kRun + k]);
          sum[row][panel][0] = multiply_add(factor, left, sum[row][panel][0]);
          sum[row][panel][1] = multiply_add(factor, right, sum[row][panel][1]);
        }
      }
  }
  for (size_t row = 0; row < Rows; ++row)
    for (size_t panel = 0; panel < Panels; ++panel, sums += kColumns) {
      store(sums, sum[row][panel][0]);
      store(sums + kWidth, sum[row][panel][1]);
    }
}

template <class Out>
WEFT_TARGET void finish(const float* sums, const float* bias, void* to, size_t n) {
  Out* const out = static_cast<Out*>(to);
  size_t i = 0;
  for (; i + kWidth <= n; i += kWidth)
    store(out + i, bias ? add(load(sums + i), load(bias + i)) : load(sums + i));
  for (; i < n; ++i) out[i] = narrow_to<Out>(bias ? sums[i] + bias[i] : sums[i]);
}

template <class Half, size_t... Below>
Kernels kernels_of(std::index_sequence<Below...>) {
  Kernels made{kRows, widen_all<Half>, {}, finish<Half>, finish<float>};
  ((made.sum[Below][0] = sum_tile<Half, Below + 1, 1>,
    made.sum[Below][1] = sum_tile<Half, Below + 1, panels_together(Below + 1)>),
   ...);
  return made;
}

template <class Half>
Kernels kernels_of() {
  return kernels_of<Half>(std::make_index_sequence<kRows>());
}
