#include "execute/binding.hpp"

#include <algorithm>
#include <stdexcept>

namespace weft {
namespace {

constexpr size_t kPage = 4096;

// The rows of each block, as `weft.plan.binding.split` gives them.
std::vector<size_t> cut(const Program& program, const std::vector<size_t>& rows) {
  const std::vector<uint32_t>& pieces = program.pieces;
  if (rows.size() != pieces.size())
    throw std::invalid_argument("a plan of " + std::to_string(pieces.size()) +
                                " shards got the rows of " + std::to_string(rows.size()));
  std::vector<size_t> sizes;
  for (size_t shard = 0; shard < pieces.size(); ++shard) {
    const size_t units = rows[shard] / program.rows_multiple;
    for (size_t piece = 0; piece < pieces[shard]; ++piece)
      sizes.push_back(program.rows_multiple *
                      (units / pieces[shard] + (piece < units % pieces[shard])));
    if (pieces[shard]) sizes.back() += rows[shard] % program.rows_multiple;
  }
  return sizes;
}

[[noreturn]] void not_symmetric(const Buffer& buffer) {
  throw std::invalid_argument(
      "peers access '" + buffer.name +
      "' in this plan, so it must be symmetric: make it with world.empty(...)");
}

std::string wide(const Program& program, uint32_t buffer, size_t columns) {
  return "'" + program.buffers[buffer].name + "' has " + std::to_string(columns) + " columns";
}

}  // namespace

Binding::Binding(Program& program, const std::vector<size_t>& rows,
                 const std::vector<BoundTensor>& bound, std::string words)
    : program_(program),
      shards_(rows),
      widths_(program.buffers.size()),
      sizes_(cut(program, rows)),
      offsets_(program.buffers.size()),
      text_(program.text) {
  const int rank = program.rank;
  const size_t largest = sizes_.empty() ? 1 : *std::max_element(sizes_.begin(), sizes_.end());
  for (const auto& layout : program.layouts) {
    auto& sums = sums_.emplace_back();
    sums.reserve(layout.size() + 1);
    sums.push_back(0);
    for (int block : layout)
      sums.push_back(sums.back() + (block == Buffer::kRow        ? 1
                                    : block == Buffer::kAnyBlock ? largest
                                                                 : sizes_[block]));
  }
  std::vector<const BoundTensor*> tensors(program.buffers.size());
  for (const BoundTensor& tensor : bound) {
    const Buffer& buffer = program.buffers[tensor.buffer];
    tensors[tensor.buffer] = &tensor;
    widths_[tensor.buffer] = tensor.columns;
    if (size_t planned = sums_[buffer.layouts[rank]].back(); tensor.rows != planned)
      throw std::invalid_argument("'" + buffer.name + "' has " + std::to_string(tensor.rows) +
                                  " rows; the plan gives it " + std::to_string(planned));
    if (buffer.shared && tensor.unmapped && published_buffer_ < 0) {
      published_ = tensor.address;
      published_buffer_ = static_cast<int>(tensor.buffer);
    } else if (buffer.shared && tensor.parts.empty()) {
      not_symmetric(buffer);
    }
  }
  const auto columns = [&](uint32_t buffer) {
    const BoundTensor* tensor = tensors[program.buffers[buffer].like];
    if (!tensor)
      throw std::invalid_argument("the plan needs a tensor for '" +
                                  program.buffers[program.buffers[buffer].like].name + "'");
    return tensor->columns;
  };
  for (const auto& [one, other] : program.exchanges)  // W6
    if (columns(one) != columns(other))
      throw std::invalid_argument(wide(program, one, columns(one)) + " and " +
                                  wide(program, other, columns(other)) +
                                  ": the plan moves rows between them, so they must have equal "
                                  "columns");
  for (uint32_t number = 0; number < program.buffers.size(); ++number) {
    const Buffer& buffer = program.buffers[number];
    if (buffer.role != Role::workspace && buffer.role != Role::eager) continue;
    size_t most = 0;  // rows of the rank that has most of them
    for (uint32_t layout : buffer.layouts) most = std::max(most, sums_[layout].back());
    size_t& end = buffer.role == Role::eager ? eager_ : workspace_;
    const size_t unit = buffer.role == Role::eager ? sizeof(Counter) : kPage;  // W2
    offsets_[number] = end;                                                    // W1
    end += (most * columns(number) * buffer.itemsize + unit - 1) / unit * unit;
  }
  if (eager_ > Program::kEager)  // W4
    throw std::invalid_argument("eager buffers have " + std::to_string(Program::kEager) +
                                " bytes on a rank; the plan needs " + std::to_string(eager_));
  placed_.reserve(program.slots.size());
  for (const auto& [owner, which] : program.slots) {
    const Buffer& buffer = program.buffers[which];
    const BoundTensor* tensor = tensors[which];
    const size_t wide = columns(which), row = wide * buffer.itemsize,
                 eager_mask = buffer.role == Role::eager ? ~size_t{0} : 0;
    Placed& placed = placed_.emplace_back(Placed{&sums_[buffer.layouts[owner]], wide, row,
                                                 tensor ? tensor->stride : row, eager_mask});
    if (tensor && tensor->unmapped && owner != rank)
      placed.unmapped_owner = owner;
    else if (tensor)
      placed.base =
          reinterpret_cast<char*>(owner == rank ? tensor->address : tensor->parts.at(owner));
  }
  for (const auto& lane : program.lanes)
    for (const Instruction& i : lane) {
      for (size_t at = 0; at < i.operands.size(); ++at)
        // W5
        if (unmapped_owner(i.operands[at]) >= 0 && (i.op != Op::copy || at == 0))
          not_symmetric(program.buffer(i.operands[at]));
      if (i.counts_as_output)
        written_ += Binding::rows(i.operands[i.sizing]) * row_bytes(i.operands[0]);
    }
  if (program.name.empty()) return;
  std::vector<bool> listed_already(program.buffers.size());
  // the sizes of the caller's buffers on which ranks must agree; all properties on which they must
  std::string in_words, agreed;
  for (uint32_t number = 0; number < program.buffers.size(); ++number) {
    const Buffer& buffer = program.buffers[number];
    if (!buffer.in_digest) continue;
    const std::string wide = std::to_string(columns(number));
    agreed += buffer.name + "=[" + listed(buffer) + "] rows x " + wide + " " + buffer.dtype;
    if (buffer.shared && tensors[number])
      agreed +=
          tensors[number]->place + ", " + std::to_string(tensors[number]->stride) + " bytes a row";
    agreed += ", ";
    if (const Buffer& of_caller = program.buffers[buffer.like]; !listed_already[buffer.like]) {
      listed_already[buffer.like] = true;
      const size_t own = sums_[of_caller.layouts[rank]].back();
      const bool even = std::all_of(of_caller.layouts.begin(), of_caller.layouts.end(),
                                    [&](uint32_t l) { return sums_[l].back() == own; });
      in_words += (in_words.empty() ? "" : ", ") + of_caller.name + "=";
      in_words += even ? "(" + std::to_string(own) + ", " + wide + ") "
                       : "[" + listed(of_caller) + "] rows x " + wide + " ";
      in_words += of_caller.dtype;
    }
  }
  if (words.empty()) words = program.name + "(" + in_words + ")";
  text_ = CallText(words + "\n" + program.name + "(" + agreed + program.ending);
}

std::string Binding::listed(const Buffer& buffer) const {
  std::string rows;
  for (uint32_t layout : buffer.layouts)
    rows += (rows.empty() ? "" : ", ") + std::to_string(sums_[layout].back());
  return rows;
}

void Binding::place(Role role, const std::vector<uintptr_t>& begins) {
  for (uint32_t number = 0; number < program_.slots.size(); ++number) {
    const auto [owner, which] = program_.slots[number];
    if (program_.buffers[which].role != role) continue;
    placed_[number].base = reinterpret_cast<char*>(begins.at(owner) + offsets_[which]);
    if (role == Role::eager && begins.size() == 2)
      placed_[number].swap_distance = begins[1 - owner] - begins[owner];
  }
}

bool Binding::again(const std::vector<size_t>& rows, const std::vector<BoundTensor>& bound) {
  if (rows != shards_) return false;
  for (const BoundTensor& tensor : bound) {
    const Buffer& buffer = program_.buffers[tensor.buffer];
    if (tensor.columns != widths_[tensor.buffer] ||
        tensor.rows != sums_[buffer.layouts[program_.rank]].back())
      return false;
    for (uint32_t number = 0; number < program_.slots.size(); ++number)
      if (const auto [owner, which] = program_.slots[number];
          which == tensor.buffer &&
          (owner != program_.rank || placed_[number].stride != tensor.stride))
        return false;
  }
  for (const BoundTensor& tensor : bound) move(tensor.buffer, tensor.address);
  return true;
}

void Binding::move(uint32_t buffer, uintptr_t address) {
  for (uint32_t number = 0; number < program_.slots.size(); ++number)
    if (program_.slots[number] == std::pair(program_.rank, buffer))
      placed_[number].base = reinterpret_cast<char*>(address);
  if (static_cast<int>(buffer) == published_buffer_) published_ = address;
}

}  // namespace weft
