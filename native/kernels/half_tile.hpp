// The loops of `half_kernels.cpp`, which includes this file once for each kind of vectors, in a
// namespace with `Vector`, its width, functions on vectors, and the sizes of a tile. For this there
// is no `#pragma once`. Every function has the attribute `WEFT_TARGET`, without which compilers do
// not inline intrinsics.
//
// `Item` is what is widened to an element of a vector: a number, or a pair of numbers.

template <class Item>
WEFT_TARGET void widen_all(const void* from, float* to, size_t n) {
  const Item* const row = static_cast<const Item*>(from);
  size_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(to + i, widen_vector(row + i));
  for (; i < n; ++i) to[i] = widen(row[i]);
}

// The sums of `Rows` rows for `Panels` adjacent panels.
template <class Item, size_t Rows, size_t Panels>
WEFT_TARGET void sum_tile(const float* x, const void* panels, size_t depth, float* sums) {
  const Item* weight = static_cast<const Item*>(panels);
  Vector sum[Rows][Panels][2];
  for (size_t row = 0; row < Rows; ++row)
    for (size_t panel = 0; panel < Panels; ++panel)
      sum[row][panel][0] = sum[row][panel][1] = all(0);
  for (size_t start = 0; start < depth; start += kRun, x += Rows * kRun) {
    const size_t end = std::min(kRun, depth - start);
    for (size_t k = 0; k < end; ++k, weight += kColumns)
      for (size_t panel = 0; panel < Panels; ++panel) {
        const Item* const columns = weight + panel * depth * kColumns;
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

WEFT_TARGET inline void add_scaled(const float* sums, float factor, float* to, size_t n) {
  const Vector factors = all(factor);
  size_t i = 0;
  for (; i + kWidth <= n; i += kWidth)
    store(to + i, scaled_add(factors, load(sums + i), load(to + i)));
  for (; i < n; ++i) to[i] += factor * sums[i];
}

// 1 / (1 + exp(-x)), and 0 where that is less than float32's smallest normal number. Compilers make
// vectors of loops over it.
WEFT_TARGET inline float logistic(float x) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  // up to where the power of two is infinite; NaN stays NaN, being no lesser argument
  const float y = std::min(std::max(-x, -87.f), 89.f);
  const float shifted = y * 1.44269504f + kRound, power = shifted - kRound;
  const float rest = y - power * 0.693359375f + power * 2.12194440e-4f;
  float e = 1.9875691500e-4f;  // of Cephes' expf
  e = e * rest + 1.3981999507e-3f;
  e = e * rest + 8.3334519073e-3f;
  e = e * rest + 4.1665795894e-2f;
  e = e * rest + 1.6666665459e-1f;
  e = e * rest + 5.0000001201e-1f;
  e = e * rest * rest + rest + 1.f;
  const uint32_t exponent = bits_as<uint32_t>(shifted) - bits_as<uint32_t>(kRound);
  return 1.f / (1.f + e * bits_as<float>((exponent + 127) << 23));
}

template <class Out>
WEFT_TARGET void activate(Activation activation, const float* gate, const float* up, void* to) {
  alignas(64) float result[kColumns];
  switch (activation) {
    case Activation::silu:
      for (size_t i = 0; i < kColumns; ++i) result[i] = gate[i] * logistic(gate[i]) * up[i];
      break;
    case Activation::gelu:
      for (size_t i = 0; i < kColumns; ++i)
        result[i] = 0.5f * gate[i] * (1.f + std::erf(gate[i] * 0.707106781f)) * up[i];
      break;
    case Activation::gelu_tanh:
      for (size_t i = 0; i < kColumns; ++i) {
        const float cube = gate[i] * gate[i] * gate[i];
        result[i] = gate[i] * logistic(1.59576912f * (gate[i] + 0.044715f * cube)) * up[i];
      }
      break;
    case Activation::relu:
      for (size_t i = 0; i < kColumns; ++i) result[i] = (gate[i] < 0.f ? 0.f : gate[i]) * up[i];
  }
  for (size_t i = 0; i < kColumns; i += kWidth) store(static_cast<Out*>(to) + i, load(result + i));
}

// The loops for items of a weight; results that are not wide, and those of an activation for a
// product of pairs, are `Out`.
template <class Item, class Out, class Activated, size_t... Below>
Kernels kernels_of(std::index_sequence<Below...>) {
  Kernels made{kRows,      widen_all<Item>,    {}, finish<Out>, finish<float>,
               add_scaled, activate<Activated>};
  ((made.sum[Below][0] = sum_tile<Item, Below + 1, 1>,
    made.sum[Below][1] = sum_tile<Item, Below + 1, panels_together(Below + 1)>),
   ...);
  return made;
}

template <class Item, class Out = Item, class Activated = float>
Kernels kernels_of() {
  return kernels_of<Item, Out, Activated>(std::make_index_sequence<kRows>());
}
