#include "kernels/experts.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernels/blocks.hpp"
#include "kernels/half_product.hpp"
#include "kernels/team.hpp"

namespace weft::experts {

namespace {

using half::kRun;

// Bytes between the products of some tokens, of which large calls compute several after another.
constexpr size_t kMostBytes = size_t{64} << 20;

// The layout of rows and panels for the products of a shape.
struct Layout {
  const half::Kernels* pairs;
  const half::Kernels& kernels;
  size_t item, each;    // bytes of an element, and elements of a unit: a number, or a pair
  size_t columns;       // of a panel
  size_t width, inner;  // units of the depths of the two products

  explicit Layout(const Shape& shape)
      : pairs(half::kernels_of_pairs(shape.dtype)),
        kernels(pairs ? *pairs : half::kernels_of(shape.dtype)),
        item(size_of(shape.dtype)),
        each(pairs ? 2 : 1),
        columns(half::columns()),
        width(divided(shape.width, each)),
        inner(divided(shape.inner, each)) {}

  // Units of a row in memory: whole runs.
  static size_t row(size_t units) { return divided(units, kRun) * kRun; }
  // Elements of a panel of this depth in units.
  size_t panel(size_t depth) const { return depth * each * columns; }
  size_t panels(size_t all) const { return divided(all, columns); }
};

template <class T>
void pack_panel(const T* from, size_t row_stride, size_t column_stride, size_t depth, size_t wide,
                size_t columns, size_t each, T* to) {
  std::fill_n(to, divided(depth, each) * each * columns, T{0});
  constexpr size_t kRows = 32;  // so that few lines are in use
  for (size_t top = 0; top < depth; top += kRows)
    for (size_t column = 0; column < wide; ++column)
      for (size_t row = top; row < std::min(top + kRows, depth); ++row)
        to[(row / each * columns + column) * each + row % each] =
            from[row * row_stride + column * column_stride];
}

// Lay out a matrix (all, depth) in panels of its rows, each at a distance of `distance` elements.
void pack_panels(const Layout& layout, const char* from, size_t row_stride, size_t column_stride,
                 size_t all, size_t depth, size_t distance, char* to) {
  for (size_t left = 0; left < all; left += layout.columns) {
    const size_t wide = std::min(layout.columns, all - left), item = layout.item;
    const char* const corner = from + left * row_stride * item;
    char* const panel = to + left / layout.columns * distance * item;
    auto pack = [&](auto* as) {
      using T = std::remove_pointer_t<decltype(as)>;
      pack_panel(reinterpret_cast<const T*>(corner), column_stride, row_stride, depth, wide,
                 layout.columns, layout.each, reinterpret_cast<T*>(panel));
    };
    item == 2 ? pack(static_cast<uint16_t*>(nullptr)) : pack(static_cast<uint32_t*>(nullptr));
  }
}

// A token's place in the rows of an expert.
struct Row {
  size_t token;
  float score;
};

// Rows of an expert that are multiplied together.
struct Tile {
  size_t begin, rows;
};

// The tokens of some rows of the call, in the order of the experts that they chose.
struct Routed {
  std::vector<size_t> starts;  // the first row of each expert, and the end
  std::vector<Row> rows;
  std::vector<size_t> tiles_of;  // the first tile of each expert, and the end
  std::vector<Tile> tiles;

  void route(const Product& product, Interval tokens, size_t tile_rows) {
    const Routing& routing = product.routing;
    const size_t count = product.shape.count;
    auto each = [&](auto use) {
      for (size_t token = tokens.begin; token < tokens.end; ++token)
        for (size_t choice = 0; choice < routing.top; ++choice) {
          const int64_t expert = routing.expert(token, choice) - product.first;
          if (expert >= 0 && static_cast<size_t>(expert) < count)
            use(static_cast<size_t>(expert), token, choice);
        }
    };
    starts.assign(count + 2, 0);
    each([&](size_t expert, size_t, size_t) { ++starts[expert + 2]; });
    for (size_t expert = 0; expert < count; ++expert) starts[expert + 2] += starts[expert + 1];
    rows.resize(starts[count + 1]);
    each([&](size_t expert, size_t token, size_t choice) {
      rows[starts[expert + 1]++] = {token, routing.score(token, choice)};
    });
    starts.pop_back();
    tiles.clear();
    tiles_of.assign(1, 0);
    for (size_t expert = 0; expert < count; ++expert) {
      const Interval all{starts[expert], starts[expert + 1]};
      const size_t parts = divided(all.size(), tile_rows);
      for (size_t part = 0; part < parts; ++part)
        tiles.push_back({all.part(part, parts).begin, all.part(part, parts).size()});
      tiles_of.push_back(tiles.size());
    }
  }
};

// The products of some tokens.
class Block {
 public:
  Block(const Product& product, const Layout& layout, const Routed& routed, Interval tokens)
      : product_(product),
        layout_(layout),
        kernels_(layout.kernels),
        routed_(routed),
        tokens_(tokens),
        wide_out_(product.out_dtype == Dtype::float32) {}

  // Bytes of memory for a row, and for a token.
  static size_t row_bytes(const Layout& layout) {
    return (Layout::row(layout.width) +
            Layout::row(
                divided(divided(layout.inner * layout.each, layout.columns) * layout.columns,
                        layout.each))) *
           sizeof(float);
  }
  static size_t token_bytes(const Product& product) {
    return product.out_dtype == Dtype::float32 ? 0 : product.shape.width * sizeof(float);
  }

  void compute(char* memory) {
    const Shape& shape = product_.shape;
    const size_t rows = routed_.rows.size();
    inner_row_ = row_bytes(layout_) / sizeof(float) - Layout::row(layout_.width);
    wide_ = reinterpret_cast<float*>(memory);
    inner_ = wide_ + rows * Layout::row(layout_.width);
    sums_ = inner_ + rows * inner_row_;
    // a row takes as long as reading half a byte of each element
    const size_t time = std::max<size_t>(rows / 2, 2) * shape.width * shape.inner * (rows ? 3 : 0);
    on_team(rows * shape.width * sizeof(float), [&](size_t part, size_t parts) {
      const Interval own = Interval{0, routed_.tiles.size()}.part(part, parts);
      for (size_t tile = own.begin; tile < own.end; ++tile) lay_out(routed_.tiles[tile]);
    });
    on_team(time, [&](size_t part, size_t parts) {
      up(Interval{0, layout_.panels(shape.inner)}.part(part, parts));
    });
    on_team(time, [&](size_t part, size_t parts) {
      down(Interval{0, layout_.panels(shape.width)}.part(part, parts));
    });
  }

 private:
  // Widen the tokens of a tile, run by run.
  void lay_out(const Tile& tile) const {
    const size_t all = product_.shape.width, run = kRun * layout_.each;
    float* const to = wide_ + tile.begin * Layout::row(layout_.width);
    for (size_t row = 0; row < tile.rows; ++row) {
      const size_t token = routed_.rows[tile.begin + row].token;
      const char* const from = product_.x + token * product_.x_stride * layout_.item;
      for (size_t start = 0; start < all; start += run) {
        const size_t elements = std::min(run, all - start), units = elements / layout_.each;
        float* const at = to + start / layout_.each * tile.rows + row * kRun;
        kernels_.widen(from + start * layout_.item, at, units);
        if (elements % layout_.each) {  // the last number of a row is a pair with zero
          uint32_t pair = 0;
          std::memcpy(&pair, from + (start + elements - 1) * layout_.item, layout_.item);
          std::memcpy(at + units, &pair, sizeof pair);
        }
      }
    }
  }

  // Call ``use(tile, panel, count)`` for some panels of an expert, of which `together` at most are
  // multiplied at once, and its tiles: block by block, so that both are read from a near cache.
  template <class Use>
  void each_tile(size_t expert, Interval panels, size_t row_units, size_t panels_each,
                 const Use& use) const {
    const Interval tiles{routed_.tiles_of[expert], routed_.tiles_of[expert + 1]};
    const size_t tile_bytes = kernels_.rows * row_units * sizeof(float);
    const size_t most = std::max<size_t>(kBlockBytes / std::max<size_t>(tile_bytes, 1), 1);
    for (size_t first = tiles.begin; first < tiles.end; first += most) {
      const Interval block = tiles.next(first, most);
      const size_t possible =
          block.size() > 1 ? 1 : half::panels_together(routed_.tiles[block.begin].rows);
      const size_t together = std::max<size_t>(possible / panels_each, 1);
      for (size_t panel = panels.begin; panel < panels.end;) {
        const size_t count = panel + together <= panels.end ? together : 1;
        for (size_t tile = block.begin; tile < block.end; ++tile)
          use(routed_.tiles[tile], panel, count);
        panel += count;
      }
    }
  }

  // The inner elements of some panels, for all experts.
  void up(Interval panels) const {
    alignas(kLine) float sums[2 * half::kMostSums];
    const size_t columns = layout_.columns, row_units = Layout::row(layout_.width);
    const size_t panel_bytes = layout_.panel(layout_.width) * layout_.item;
    const size_t expert_bytes = product_.shape.gate_up_elements() * layout_.item;
    for (size_t expert = 0; expert < product_.shape.count; ++expert) {
      const char* const weight = product_.gate_up + expert * expert_bytes;
      each_tile(expert, panels, row_units, 2, [&](const Tile& tile, size_t pair, size_t count) {
        const float* const x = wide_ + tile.begin * row_units;
        const char* const from = weight + 2 * pair * panel_bytes;
        const auto* const sum = kernels_.sum[tile.rows - 1];
        const bool together = 2 * count == half::panels_together(tile.rows);
        size_t stride = columns, up_at = tile.rows * columns;
        if (together) {
          sum[1](x, from, layout_.width, sums);
          stride = 2 * count * columns, up_at = columns;
        } else {
          sum[0](x, from, layout_.width, sums);
          sum[0](x, from + panel_bytes, layout_.width, sums + up_at);
        }
        for (size_t row = 0; row < tile.rows; ++row)
          for (size_t i = 0; i < count; ++i) {
            const float* const gate = sums + row * stride + 2 * i * columns;
            float* const to = inner_at(tile, row, pair + i);
            kernels_.activate(product_.activation, gate, gate + up_at, to);
            // an infinite token makes a NaN of the zeros that fill the last pair
            const size_t own = product_.shape.inner - (pair + i) * columns;
            if (layout_.each == 2 && own < columns && own % 2)
              std::memset(reinterpret_cast<uint16_t*>(to) + own, 0, sizeof(uint16_t));
          }
      });
    }
  }

  // The place of a panel's columns in an inner row.
  float* inner_at(const Tile& tile, size_t row, size_t panel) const {
    const size_t unit = panel * layout_.columns / layout_.each;
    return inner_ + tile.begin * inner_row_ + unit / kRun * kRun * tile.rows + row * kRun +
           unit % kRun;
  }

  // The columns of some panels of the result, from all experts.
  void down(Interval panels) const {
    alignas(kLine) float sums[half::kMostSums];
    const size_t columns = layout_.columns, all = product_.shape.width;
    const Interval own{panels.begin * columns, std::min(panels.end * columns, all)};
    const size_t panel_bytes = layout_.panel(layout_.inner) * layout_.item;
    const size_t expert_bytes = product_.shape.down_elements() * layout_.item;
    if (own.begin >= own.end) return;
    for (size_t token = tokens_.begin; token < tokens_.end; ++token)
      std::fill_n(sum_of(token) + own.begin, own.size(), 0.f);
    for (size_t expert = 0; expert < product_.shape.count; ++expert) {
      const char* const weight = product_.down + expert * expert_bytes;
      each_tile(expert, panels, inner_row_, 1, [&](const Tile& tile, size_t panel, size_t count) {
        kernels_.sum[tile.rows - 1][count > 1](inner_ + tile.begin * inner_row_,
                                               weight + panel * panel_bytes, layout_.inner, sums);
        const size_t left = panel * columns, wide = count * columns;
        for (size_t row = 0; row < tile.rows; ++row) {
          const Row& routed = routed_.rows[tile.begin + row];
          kernels_.add_scaled(sums + row * wide, routed.score, sum_of(routed.token) + left,
                              std::min(wide, all - left));
        }
      });
    }
    if (wide_out_) return;
    for (size_t token = tokens_.begin; token < tokens_.end; ++token)
      kernels_.finish(sum_of(token) + own.begin, nullptr,
                      product_.out + (token * product_.out_stride + own.begin) * layout_.item,
                      own.size());
  }

  // The sums of a token in float32.
  float* sum_of(size_t token) const {
    return wide_out_ ? reinterpret_cast<float*>(product_.out) + token * product_.out_stride
                     : sums_ + (token - tokens_.begin) * product_.shape.width;
  }

  const Product& product_;
  const Layout& layout_;
  const half::Kernels& kernels_;
  const Routed& routed_;
  Interval tokens_;
  bool wide_out_;
  size_t inner_row_ = 0;  // units of an inner row: of whole panels
  float *wide_ = nullptr, *inner_ = nullptr, *sums_ = nullptr;
};

}  // namespace

size_t Shape::gate_up_elements() const {
  if (!half::columns()) return 0;
  const Layout layout(*this);
  return 2 * layout.panels(inner) * layout.panel(layout.width);
}

size_t Shape::down_elements() const {
  if (!half::columns()) return 0;
  const Layout layout(*this);
  return layout.panels(width) * layout.panel(layout.inner);
}

void pack(const Shape& shape, const Stack& gate_up, const Stack& down, char* packed_gate_up,
          char* packed_down) {
  const Layout layout(shape);
  const size_t item = layout.item, panel = layout.panel(layout.width);
  const size_t gate_up_bytes = shape.gate_up_elements() * item,
               down_bytes = shape.down_elements() * item;
  on_team(shape.count * (gate_up_bytes + down_bytes), [&](size_t part, size_t parts) {
    const Interval own = Interval{0, shape.count}.part(part, parts);
    for (size_t expert = own.begin; expert < own.end; ++expert) {
      for (size_t up = 0; up < 2; ++up)
        pack_panels(
            layout,
            gate_up.data + (expert * gate_up.stride + up * shape.inner * gate_up.row_stride) * item,
            gate_up.row_stride, gate_up.column_stride, shape.inner, shape.width, 2 * panel,
            packed_gate_up + expert * gate_up_bytes + up * panel * item);
      pack_panels(layout, down.data + expert * down.stride * item, down.row_stride,
                  down.column_stride, shape.width, shape.inner, layout.panel(layout.inner),
                  packed_down + expert * down_bytes);
    }
  });
}

void multiply(const Product& product) {
  const Layout layout(product.shape);
  const size_t token_bytes =
      product.routing.top * Block::row_bytes(layout) + Block::token_bytes(product);
  const size_t most = std::max<size_t>(kMostBytes / std::max<size_t>(token_bytes, 1), 1);
  const Interval all{0, product.tokens};
  thread_local Routed routed;
  for (size_t first = 0; first < product.tokens; first += most) {
    const Interval tokens = all.next(first, most);
    routed.route(product, tokens, layout.kernels.rows);
    Block(product, layout, routed, tokens).compute(kept_memory(tokens.size() * token_bytes));
  }
}

}  // namespace weft::experts
