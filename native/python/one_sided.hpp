// One-sided copies between tensors: `put` and `get`, at once or queued.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memory/segment.hpp"
#include "memory/transfers.hpp"
#include "python/tensor_view.hpp"

namespace weft {

// The number of the world in whose symmetric memory `remote` lies, and a copy between a peer's
// counterpart of it and `local`; nothing if there is something wrong with one of them, which is to
// be told in words.
inline std::optional<std::pair<uint64_t, StridedCopy>> one_sided(bool put, nb::handle remote,
                                                                 nb::handle local, int peer) {
  View there, here;
  if (!there.look_plain(remote) || !here.look_plain(local) || there.dtype != here.dtype ||
      !there.same_shape(here))
    return {};
  if (!there.reads_as_stored(remote) || !here.reads_as_stored(local)) return {};
  // Without elements a tensor need not say where it lies.
  const auto at = there.span()
                      ? there.address
                      : nb::cast<uintptr_t>(remote.attr("untyped_storage")().attr("data_ptr")());
  const Segment* segment = Segment::around(at);
  if (!segment || peer < 0 || static_cast<size_t>(peer) >= segment->parts.size() ||
      !segment->parts[peer])
    return {};
  const size_t offset = at - segment->own().address();
  const std::vector<size_t> shape(there.shape, there.shape + there.dimensions),
      remote_strides(there.strides, there.strides + there.dimensions),
      local_strides(here.strides, here.strides + here.dimensions);
  if (may_repeat(shape, put ? remote_strides : local_strides))
    throw nb::value_error(
        "dst holds elements more than once, or its dimensions interleave; write to a tensor that "
        "is not expanded");
  char *far = segment->parts[peer]->base() + offset, *near = reinterpret_cast<char*>(here.address);
  return std::pair(segment->world,
                   put ? StridedCopy(far, near, there.item, shape, remote_strides, local_strides)
                       : StridedCopy(near, far, there.item, shape, local_strides, remote_strides));
}

// Transfers, and the Python objects whose memory they use, which live until a transfer is over. All
// calls hold the GIL.
struct PyTransfers {
  // by the numbers of worlds, until they are closed
  static inline std::unordered_map<uint64_t, PyTransfers*> open;

  uint64_t world;
  std::deque<std::pair<uint64_t, nb::object>> keepalive;
  Transfers transfers;  // destroyed first, so that nothing is under way when the objects go

  PyTransfers(std::shared_ptr<Mesh> mesh, int spins, size_t comm_threads, uint64_t number)
      : world(number), transfers(std::move(mesh), spins, comm_threads) {
    open[world] = this;
  }
  ~PyTransfers() { open.erase(world); }

  void release() {
    while (!keepalive.empty() && transfers.done(keepalive.front().first)) {
      // its end may run Python code that comes back here
      nb::object last = std::move(keepalive.front().second);
      keepalive.pop_front();
    }
  }
};

}  // namespace weft
