#include <nanobind/stl/variant.h>

#include "hosts/network.hpp"
#include "memory/mesh.hpp"
#include "memory/segment.hpp"
#include "memory/signal_array.hpp"
#include "memory/signals.hpp"
#include "python/bind.hpp"
#include "python/gil.hpp"
#include "hosts/control.hpp"
#include "python/one_sided.hpp"
#include "python/range.hpp"

using namespace nanobind::literals;

namespace weft {

void bind_memory(nb::module_& m) {
  nb::class_<Deadline>(m, "Deadline")
      .def("__init__",
           [](Deadline* self, double seconds) { new (self) Deadline(nanoseconds(seconds)); })
      .def_prop_ro("left", [](Deadline& self) { return 1e-9 * self.left(); })
      .def_prop_ro("passed", &Deadline::passed);
  m.def(
      "segment_containing",
      [](uintptr_t address) {
        const Segment* within = Segment::containing(address);
        return within ? nb::find(*within) : nb::none();
      },
      "address"_a, nb::sig("def segment_containing(address: int) -> Segment | None"));

  nb::class_<Mapping>(m, "Mapping");
  nb::class_<File>(m, "File");
  m.def("create_mapping", &Mapping::create, "bytes"_a, Unlocked());
  m.def("attach_mapping", &Mapping::attach);
  m.def("part_of_mapping", &Mapping::part, "whole"_a, "offset"_a, "bytes"_a);

  nb::class_<Segment>(m, "Segment", nb::is_weak_referenceable())
      .def(nb::init<std::vector<std::shared_ptr<Mapping>>, int, uint64_t, uint64_t>())
      .def_ro("world", &Segment::world)
      .def_ro("number", &Segment::number)
      .def_prop_ro("size", [](Segment& self) { return self.own().bytes(); })
      .def("base", [](Segment& self, int rank) { return self.parts.at(rank)->address(); })
      .def("bases", &Segment::bases)
      .def("bytes", [](Segment& self, int rank) {
        // A tensor over a rank's part; it keeps the segment alive.
        Mapping& part = *self.parts.at(rank);
        return nb::ndarray<nb::pytorch, uint8_t>(part.base(), {part.bytes()}, nb::find(self));
      });

  nb::class_<Mesh>(m, "Mesh")
      .def(nb::init<std::vector<int>>())
      .def_prop_ro_static("elsewhere", [](nb::handle) { return Mesh::kElsewhere; })
      .def("send", &Mesh::send, "peer"_a, "text"_a, "file"_a.none(), Unlocked())
      .def("publish", &Mesh::publish, "text"_a, Unlocked())
      .def("receive", &Mesh::receive, Unlocked())
      .def("abort", [](Mesh& self, std::string kind, int culprit,
                       std::string text) { self.abort({kind, culprit, text}); })
      .def("leave", &Mesh::leave, "for_good"_a)
      .def("close", &Mesh::close, Unlocked())
      .def("disown", &Mesh::disown)
      .def("left", &Mesh::left)
      .def("gone", &Mesh::gone)
      .def("drop", &Mesh::drop, "memory"_a, Unlocked())
      .def("acknowledged", &Mesh::acknowledged, "seconds"_a, Unlocked())
      .def("failure", [](Mesh& self) {
        const auto [kind, culprit, text] = self.failure();
        return std::make_tuple(kind, culprit, text);
      });

  nb::enum_<WaitStatus>(m, "WaitStatus")
      .value("none", WaitStatus::none)
      .value("timeout", WaitStatus::timeout)
      .value("failed", WaitStatus::failed)
      .value("left", WaitStatus::left)
      .value("mismatch", WaitStatus::mismatch)
      .value("refused", WaitStatus::refused)
      .value("interrupted", WaitStatus::interrupted)
      .value("lane", WaitStatus::lane)
      .value("unreadable", WaitStatus::unreadable);

  nb::enum_<Compare>(m, "Compare")
      .value("equal", Compare::equal)
      .value("not_equal", Compare::not_equal)
      .value("greater", Compare::greater)
      .value("greater_equal", Compare::greater_equal)
      .value("less", Compare::less)
      .value("less_equal", Compare::less_equal);

  nb::class_<SignalArray>(m, "SignalArray")
      .def(nb::init<std::shared_ptr<Mesh>, std::shared_ptr<Segment>, int,
                    std::shared_ptr<Network>>(),
           "mesh"_a, "segment"_a, "spins"_a, "network"_a.none())
      .def(
          "add",
          [](SignalArray& self, int rank, size_t start, size_t count, size_t step, uint64_t value) {
            return in_range([] { return "notify"; },
                            [&] { return self.add(rank, {start, count, step}, value); });
          })
      .def(
          "set",
          [](SignalArray& self, int rank, size_t start, size_t count, size_t step, uint64_t value) {
            return in_range([] { return "notify"; },
                            [&] { return self.set(rank, {start, count, step}, value); });
          })
      .def("values", [](SignalArray& self, size_t start, size_t count,
                        size_t step) { return self.values({start, count, step}); })
      .def("test", [](SignalArray& self, size_t start, size_t count, size_t step, Compare compare,
                      uint64_t value) { return self.test({start, count, step}, compare, value); })
      .def_prop_ro("failed", &SignalArray::failed)
      .def("wait", [](SignalArray& self, size_t start, size_t count, size_t step, Compare compare,
                      uint64_t value, double timeout) {
        const auto wait = [&] {
          return unlocked([&] {
            return self.wait({start, count, step}, compare, value, nanoseconds(timeout),
                             signal_pending);
          });
        };
        const auto [status, index, actual] = in_range([] { return "wait"; }, wait);
        return std::make_tuple(status, index, actual);
      });

  nb::class_<StridedCopy>(m, "StridedCopy");
  nb::class_<Regions::Copy>(m, "RemoteCopy");
  nb::class_<Regions::Change>(m, "RemoteChange")
      .def("__init__", [](Regions::Change* self, uint64_t memory, bool set, size_t start,
                          size_t count, size_t step, uint64_t value) {
        new (self) Regions::Change{memory, set, {start, count, step}, value};
      });
  m.def("link_ranks", &link_ranks, "hosts"_a, "here"_a, "there"_a);
  nb::class_<Control>(m, "Control")
      .def(
          "__init__",
          [](Control* self, int rank, std::vector<int> hosts, std::shared_ptr<Mesh> mesh,
             std::shared_ptr<Network> network, PyRegions& regions) {
            new (self) Control(rank, std::move(hosts), std::move(mesh), std::move(network),
                               regions.regions);
          },
          nb::keep_alive<1, 6>());
  nb::class_<PyRegions>(m, "Regions")
      .def(nb::init<std::vector<int>, std::shared_ptr<Mesh>, std::shared_ptr<Network>, int>())
      .def(
          "hold",
          [](PyRegions& self, uint64_t memory, std::shared_ptr<Mapping> part) {
            self.regions.hold(memory, std::move(part));
          },
          Unlocked())
      .def(
          "close", [](PyRegions& self) { self.regions.close(); }, Unlocked())
      .def(
          "put",
          [](PyRegions& self, int peer, const Regions::Copy& copy,
             std::optional<Regions::Change> change, double timeout, nb::object tensors) {
            return self.complete(timeout, std::move(tensors), [&](const Regions::Limit& limit) {
              return self.regions.put(peer, copy, change.value_or(Regions::Change{}), limit);
            });
          },
          "peer"_a, "copy"_a, "change"_a.none(), "timeout"_a, "tensors"_a)
      .def("get",
           [](PyRegions& self, int peer, const Regions::Copy& copy, double timeout,
              nb::object tensors) {
             return self.complete(timeout, std::move(tensors), [&](const Regions::Limit& limit) {
               return self.regions.get(peer, copy, limit);
             });
           })
      .def("change",
           [](PyRegions& self, int peer, const Regions::Change& change, double timeout) {
             return self.complete(timeout, nb::none(), [&](const Regions::Limit& limit) {
               return self.regions.change(peer, change, limit);
             });
           })
      .def("settle",
           [](PyRegions& self, double timeout) {
             return self.complete(timeout, nb::none(), [&](const Regions::Limit& limit) {
               return self.regions.settle(Regions::kNobody, limit);
             });
           })
      .def("settled", [](PyRegions& self) { return self.regions.settled(); });
  m.def(
      "copy_at_once",
      [](bool put, nb::handle remote, nb::handle local, int peer, nb::handle tile) {
        // Whether the copy was made, through a contiguous tensor if a tile is given. False also if
        // another argument is wrong, which the caller reports.
        auto found = one_sided(put, remote, local, peer);
        const auto world = found ? PyTransfers::open.find(found->first) : PyTransfers::open.end();
        if (world == PyTransfers::open.end()) return false;
        auto* const copy = std::get_if<StridedCopy>(&found->second);
        if (!copy) return false;
        PyTransfers& open = *world->second;
        // another thread may close the world, and release the transfers
        const nb::object retained = nb::find(open);
        View buffer;
        if (!tile.is_none()) {
          if (!buffer.read_plain(tile)) throw nb::value_error("the tile is no plain tensor");
          *copy = copy->through(reinterpret_cast<char*>(buffer.address), buffer.span());
        }
        return in_range([&] { return put ? "put" : "get"; },
                        [&] { return unlocked([&] { return open.transfers.copy(*copy); }); });
      },
      "put"_a, "remote"_a.none(), "local"_a.none(), "peer"_a, "tile"_a = nb::none());
  m.def(
      "put_notify_at_once",
      [](nb::handle dst, nb::handle src, const SignalArray& signals, size_t index, int peer,
         bool set, uint64_t value, PyRegions& regions,
         double timeout) -> std::optional<std::pair<WaitStatus, int>> {
        // As `Regions.put`. None, with nothing done, if the peer is on this host, or an argument is
        // wrong, which the caller reports.
        auto found = one_sided(true, dst, src, peer);
        auto* const copy = found ? std::get_if<Regions::Copy>(&found->second) : nullptr;
        if (!copy || found->first != signals.segment().world) return {};
        const Regions::Change change{signals.segment().number, set, {index, 1, 1}, value};
        const auto put = [&](const Regions::Limit& limit) {
          return regions.regions.put(peer, *copy, change, limit);
        };
        return in_range([] { return "put"; },
                        [&] { return regions.complete(timeout, nb::make_tuple(dst, src), put); });
      },
      "dst"_a, "src"_a, "signals"_a, "index"_a, "peer"_a, "set"_a, "value"_a, "regions"_a,
      "timeout"_a);
  m.def("one_sided", &one_sided, "put"_a, "remote"_a.none(), "local"_a.none(), "peer"_a,
        "checked"_a = false);

  nb::class_<PyTransfers>(m, "Transfers")
      .def(nb::init<std::shared_ptr<Mesh>, int, size_t, uint64_t>())
      .def_prop_ro_static("max_outstanding", [](nb::handle) { return Transfers::kOutstanding; })
      .def("copy",
           [](PyTransfers& self, const StridedCopy& copy) {
             return in_range([] { return "copy"; },
                             [&] { return unlocked([&] { return self.transfers.copy(copy); }); });
           })
      .def("submit",
           [](PyTransfers& self, nb::object keepalive, const StridedCopy& copy) {
             const uint64_t number = in_range(
                 [] { return "copy_async"; },
                 [&] {
                   return unlocked([&] { return self.transfers.submit(copy, signal_pending); });
                 });
             self.keepalive.emplace_back(number, std::move(keepalive));
             self.release();
             return number;
           })
      .def("done",
           [](PyTransfers& self, uint64_t number) {
             self.release();
             return self.transfers.done(number);
           })
      .def("wait",
           [](PyTransfers& self, uint64_t number, double timeout) {
             const Deadline deadline(nanoseconds(timeout));
             const bool done =
                 in_range([] { return "wait"; },
                          [&] {
                            return unlocked([&] {
                              return self.transfers.wait(number, deadline, signal_pending);
                            });
                          });
             self.release();
             return done;
           })
      .def("disown", [](PyTransfers& self) { PyTransfers::open.erase(self.world); })
      .def("refused",
           [](PyTransfers& self, uint64_t number) { return self.transfers.refused(number); })
      .def("finish", [](PyTransfers& self) {
        {
          nb::gil_scoped_release release;
          self.transfers.finish();
        }
        self.release();
        PyTransfers::open.erase(self.world);
      });
}

}  // namespace weft
