// One-sided copies between tensors: `put` and `get`, synchronous or queued.
//
// O1  The tensors of a queued copy are retained until it is done, and released with the GIL.
// O2  A copy starts only in an open world; `open` has these worlds' transfers.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "hosts/regions.hpp"
#include "memory/segment.hpp"
#include "memory/transfers.hpp"
#include "python/gil.hpp"
#include "python/modes.hpp"
#include "python/tensor_view.hpp"

namespace weft {

// A copy within this host, or to or from another one.
using OneSided = std::variant<StridedCopy, Regions::Copy>;

// The number of the world to whose symmetric memory `remote` belongs, and a copy between a peer's
// counterpart of it and `local`; none if one of the tensors is not suitable, or has yet to be
// `checked` in the modes of this thread, and the caller reports the reason.
inline std::optional<std::pair<uint64_t, OneSided>> one_sided(bool put, nb::handle remote,
                                                              nb::handle local, int peer,
                                                              bool checked = false) {
  if (!checked && checked_modes()) return {};
  View there, here;
  if (!there.read_plain(remote) || !here.read_plain(local) || there.dtype != here.dtype ||
      !there.same_shape(here))
    return {};
  if (!there.reads_as_stored(remote) || !here.reads_as_stored(local)) return {};
  // The address of a tensor without elements may be null; its storage has one.
  const auto at = there.span()
                      ? there.address
                      : nb::cast<uintptr_t>(remote.attr("untyped_storage")().attr("data_ptr")());
  const Segment* segment = Segment::containing(at);
  if (!segment || peer < 0 || static_cast<size_t>(peer) >= segment->parts.size()) return {};
  const size_t offset = at - segment->own().address();
  const std::vector<size_t> shape(there.shape, there.shape + there.dimensions),
      remote_strides(there.strides, there.strides + there.dimensions),
      local_strides(here.strides, here.strides + here.dimensions);
  if (may_repeat(shape, put ? remote_strides : local_strides))
    throw nb::value_error(
        "dst holds elements more than once, or its dimensions interleave; write to a tensor that "
        "is not expanded");
  char* const near = reinterpret_cast<char*>(here.address);
  if (!segment->parts[peer])
    return std::pair(segment->world, Regions::Copy{segment->number, offset, near, there.item, shape,
                                                   remote_strides, local_strides});
  char* const far = segment->parts[peer]->base() + offset;
  return std::pair(segment->world,
                   put ? StridedCopy(far, near, there.item, shape, remote_strides, local_strides)
                       : StridedCopy(near, far, there.item, shape, local_strides, remote_strides));
}

// Transfers, and the Python objects whose memory they use (O1). All methods are called with the
// GIL.
struct PyTransfers {
  // by number of the world, until it is closed (O2)
  static inline std::unordered_map<uint64_t, PyTransfers*> open;

  uint64_t world;
  std::deque<std::pair<uint64_t, nb::object>> keepalive;
  Transfers
      transfers;  // destroyed first: it finishes all transfers before the objects are released

  PyTransfers(std::shared_ptr<Mesh> mesh, int spins, size_t comm_threads, uint64_t number)
      : world(number), transfers(std::move(mesh), spins, comm_threads) {
    open[world] = this;
  }
  ~PyTransfers() { open.erase(world); }

  void release() {
    while (!keepalive.empty() && transfers.done(keepalive.front().first)) {
      // its destructor may run Python code that calls this function again
      nb::object last = std::move(keepalive.front().second);
      keepalive.pop_front();
    }
  }
};

// The one-sided calls between hosts, and the tensors of those that have been given up (W4). All
// methods are called with the GIL.
class PyRegions {
 public:
  PyRegions(std::vector<int> peers, std::shared_ptr<Mesh> mesh, std::shared_ptr<Network> network,
            int spins)
      : regions(std::move(peers), std::move(mesh), std::move(network), spins) {}

  // Make a request of peers, and wait `timeout` seconds for each answer to it. How it has ended,
  // and the peer of which that is told.
  template <class Request>
  std::pair<WaitStatus, int> complete(double timeout, nb::object tensors, Request request) {
    release();
    Regions::Outcome outcome;
    {
      const nb::gil_scoped_release unlock;
      outcome = request(Regions::Limit{nanoseconds(timeout), signal_pending});
      if (outcome.status == WaitStatus::interrupted)
        regions.wait(outcome.peer, outcome.last, {kGrace, never});
    }
    const auto [status, peer, last] = outcome;
    if (last && regions.answered(peer) < last)
      unanswered_.push_back({peer, last, std::move(tensors)});
    if (PyErr_Occurred()) throw nb::python_error();
    return {status, peer};
  }

  Regions regions;

 private:
  // nanoseconds that a peer has to answer before a signal handler's exception is raised
  static constexpr int64_t kGrace = 500'000'000;
  struct Unanswered {
    int peer;
    uint64_t number;
    nb::object tensors;
  };

  void release() {
    const auto answered = [&](const Unanswered& each) {
      return regions.answered(each.peer) >= each.number;
    };
    std::vector<Unanswered> kept, over;  // whose destructors may run Python code that calls this
    for (Unanswered& each : unanswered_) (answered(each) ? over : kept).push_back(std::move(each));
    unanswered_ = std::move(kept);
  }

  std::vector<Unanswered> unanswered_;
};

}  // namespace weft
