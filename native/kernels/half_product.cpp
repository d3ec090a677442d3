#include "kernels/half_product.hpp"

#include <algorithm>

#include "kernels/blocks.hpp"
#include "kernels/half_kernels.hpp"
#include "kernels/team.hpp"

namespace weft::half {

namespace {

// Lay out some panels. Of a weight with contiguous rows some rows for all of them, else panel by
// panel some rows of each column, so that a line is read at once and few pages are in use.
void pack(const Matrix& weight, size_t depth, size_t all_columns, Interval panels,
          uint16_t* packed) {
  const size_t width = columns();
  constexpr size_t kRows = 32;  // a line of a transposed weight
  auto block = [&](size_t top, size_t panel) {
    const size_t left = panel * width, wide = std::min(width, all_columns - left);
    const size_t high = std::min(kRows, depth - top);
    const uint16_t* from = weight.data + top * weight.row_stride + left * weight.column_stride;
    uint16_t* const to = packed + ((panel - panels.begin) * depth + top) * width;
    if (wide < width) std::fill_n(to, high * width, uint16_t{0});
    if (weight.column_stride == 1)
      for (size_t row = 0; row < high; ++row)
        std::copy_n(from + row * weight.row_stride, wide, to + row * width);
    else
      for (size_t column = 0; column < wide; ++column, from += weight.column_stride)
        for (size_t row = 0; row < high; ++row)
          to[row * width + column] = from[row * weight.row_stride];
  };
  if (weight.column_stride == 1) {
    for (size_t top = 0; top < depth; top += kRows)
      for (size_t panel = panels.begin; panel < panels.end; ++panel) block(top, panel);
  } else {
    for (size_t panel = panels.begin; panel < panels.end; ++panel)
      for (size_t top = 0; top < depth; top += kRows) block(top, panel);
  }
}

// The part of a product that one thread computes, in memory of its own.
class Part {
 public:
  Part(const Product& product, Interval rows, Interval panels)
      : product_(product),
        kernels_(kernels_of(product.dtype)),
        rows_(rows),
        panels_(panels),
        panel_elements_(product.depth * columns()),
        tile_elements_(kernels_.rows * divided(product.depth, kRun) * kRun),
        tiles_{0, divided(rows.size(), kernels_.rows)},
        block_tiles_(fitting(tile_elements_ * sizeof(float), 1, tiles_.size())),
        block_panels_(
            fitting(panel_elements_ * sizeof(uint16_t), panels_together(1), panels.size())) {}

  // The bytes of its memory.
  size_t bytes() const {
    return wide_bytes() +
           (product_.packed ? 0 : block_panels_ * panel_elements_ * sizeof(uint16_t));
  }

  void compute(char* memory) const {
    float* const wide = reinterpret_cast<float*>(memory);
    uint16_t* const laid_out = reinterpret_cast<uint16_t*>(memory + wide_bytes());
    for (size_t first = panels_.begin; first < panels_.end; first += block_panels_) {
      const Interval panels = panels_.next(first, block_panels_);
      if (!product_.packed)
        pack(product_.weight, product_.depth, product_.columns, panels, laid_out);
      const uint16_t* const weight =
          product_.packed ? product_.weight.data + first * panel_elements_ : laid_out;
      for (size_t tile = 0; tile < tiles_.end; tile += block_tiles_)
        multiply_block(tiles_.next(tile, block_tiles_), wide, panels, weight);
    }
  }

 private:
  // How many of `all`, of so many bytes each, are a block.
  static size_t fitting(size_t bytes, size_t least, size_t all) {
    return std::min(std::max(kBlockBytes / std::max<size_t>(bytes, 1), least), all);
  }

  size_t wide_bytes() const { return block_tiles_ * tile_elements_ * sizeof(float); }

  // Multiply some tiles of rows, widened to `wide`, by some panels, laid out at `weight`.
  void multiply_block(Interval tiles, float* wide, Interval panels, const uint16_t* weight) const {
    auto widened = [&](size_t tile) { return wide + (tile - tiles.begin) * tile_elements_; };
    for (size_t tile = tiles.begin; tile < tiles.end; ++tile) widen_tile(tile, widened(tile));
    const size_t together = tiles.size() > 1 ? 1 : panels_together(rows_of(tiles.begin).size());
    for (size_t panel = panels.begin; panel < panels.end;) {
      const size_t count = panel + together <= panels.end ? together : 1;
      for (size_t tile = tiles.begin; tile < tiles.end; ++tile)
        multiply_tile(tile, widened(tile), panel, count, weight);
      panel += count;
      weight += count * panel_elements_;
    }
  }

  Interval rows_of(size_t tile) const { return rows_.part(tile, tiles_.size()); }

  void widen_tile(size_t tile, float* wide) const {
    const Interval rows = rows_of(tile);
    for (size_t row = rows.begin; row < rows.end; ++row)
      for (size_t start = 0; start < product_.depth; start += kRun)
        kernels_.widen(product_.x + row * product_.x_stride + start,
                       wide + start * rows.size() + (row - rows.begin) * kRun,
                       std::min(kRun, product_.depth - start));
  }

  // Multiply a tile by `count` panels, from `panel` on.
  void multiply_tile(size_t tile, const float* wide, size_t panel, size_t count,
                     const uint16_t* weight) const {
    alignas(64) float sums[kMostSums];
    const Interval rows = rows_of(tile);
    kernels_.sum[rows.size() - 1][count > 1](wide, weight, product_.depth, sums);
    const size_t left = panel * columns(), width = count * columns();
    const size_t item = size_of(product_.out_dtype);
    const auto finish = item == sizeof(float) ? kernels_.finish_wide : kernels_.finish;
    for (size_t row = 0; row < rows.size(); ++row)
      finish(sums + row * width, product_.bias ? product_.bias + left : nullptr,
             product_.out + ((rows.begin + row) * product_.out_stride + left) * item,
             std::min(width, product_.columns - left));
  }

  const Product& product_;
  const Kernels& kernels_;
  Interval rows_, panels_;
  size_t panel_elements_, tile_elements_;
  Interval tiles_;
  size_t block_tiles_, block_panels_;
};

}  // namespace

void pack_panels(const Matrix& weight, size_t depth, size_t all_columns, uint16_t* packed) {
  const Interval panels{0, divided(all_columns, columns())};
  const size_t panel = depth * columns();
  on_team(panels.size() * panel * sizeof(uint16_t), [&](size_t part, size_t parts) {
    const Interval own = panels.part(part, parts);
    pack(weight, depth, all_columns, own, packed + own.begin * panel);
  });
}

void multiply(const Product& product) {
  const Interval rows{0, product.rows}, panels{0, divided(product.columns, columns())};
  // A row takes as long as reading half a byte of each element.
  const size_t time = product.depth * product.columns * std::max<size_t>(product.rows / 2, 2);
  // All threads widen the rows if they share the columns, and lay out the weight if they share the
  // rows, which takes longer.
  const size_t tiles_each = product.packed ? 8 : 64;
  const size_t most = tiles_each * kernels_of(product.dtype).rows * team_size();
  auto part_of = [&](size_t part, size_t parts) {
    return product.rows < most ? Part(product, rows, panels.part(part, parts))
                               : Part(product, rows.part(part, parts), panels);
  };
  const size_t each = divided(Part(product, rows, panels).bytes(), kLine) * kLine;  // or less
  char* const all = kept_memory(team_size() * each);
  on_team(time,
          [&](size_t part, size_t parts) { part_of(part, parts).compute(all + part * each); });
}

}  // namespace weft::half
