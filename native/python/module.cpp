// The Python face of the native core. Everything here is internal to weft; the package's modules
// are the public face.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <stdexcept>
#include <system_error>
#include <unordered_map>

#include "python/alike.hpp"
#include "python/backlog.hpp"
#include "execute/binding.hpp"
#include "kernels/copy.hpp"
#include "python/execute.hpp"
#include "execute/executor.hpp"
#include "python/repeats.hpp"
#include "memory/signal_array.hpp"
#include "kernels/team.hpp"
#include "python/tensor_view.hpp"
#include "memory/transfers.hpp"

using namespace nanobind::literals;
using namespace weft;

namespace {

using Place = std::tuple<uint32_t, uint32_t, uint32_t>;  // slot, start, stop
// as in Buffer
using PyBuffer =
    std::tuple<std::string, std::string, size_t, Role, uint32_t, bool, bool, std::vector<uint32_t>>;
// `parts` and `place` of a Given: a place without parts is apart
using Shared = std::pair<std::vector<uintptr_t>, std::string>;
using ByName = nb::typed<nb::dict, nb::str, nb::any>;  // by the names of buffers
using Sizes = std::vector<size_t>;
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

Operand operand(const Place& place) {
  return {std::get<0>(place), std::get<1>(place), std::get<2>(place)};
}

std::vector<Operand> operands(const std::vector<Place>& places) {
  std::vector<Operand> result;
  for (const Place& place : places) result.push_back(operand(place));
  return result;
}

// Tensors of a program's buffers, and where those lie that peers access. Throws
// std::invalid_argument for what is no matrix.
std::vector<Given> given(const Program& program, ByName tensors, ByName shared) {
  std::vector<Given> found;
  View view;
  for (auto [name, tensor] : tensors) {
    if (!view.look(tensor) || view.dimensions != 2 || (view.shape[1] > 1 && view.strides[1] != 1))
      throw std::invalid_argument(
          std::string("a buffer is a matrix with contiguous rows; got shape ") +
          nb::str(nb::tuple(tensor.attr("shape"))).c_str() + ", strides " +
          nb::str(tensor.attr("stride")()).c_str());
    const size_t rows = static_cast<size_t>(view.shape[0]),
                 columns = static_cast<size_t>(view.shape[1]);
    const size_t stride = (rows > 1 ? static_cast<size_t>(view.strides[0]) : columns) * view.item;
    const uint32_t number = program.number(nb::cast<std::string_view>(name));
    if (number == program.buffers.size()) throw nb::key_error(nb::cast<std::string>(name).c_str());
    Given& one = found.emplace_back(Given{number, view.address, rows, columns, stride, {}, {}});
    if (!shared.contains(name)) continue;
    std::tie(one.parts, one.place) = nb::cast<Shared>(shared[name]);
    one.apart = one.parts.empty() && !one.place.empty();
  }
  return found;
}

// A Python object as native code holds it that knows nothing of Python; None is none.
std::shared_ptr<void> kept(nb::object held) {
  if (held.is_none()) return nullptr;
  return {held.release().ptr(), [](void* object) {
            nb::gil_scoped_acquire acquire;
            Py_DECREF(static_cast<PyObject*>(object));
          }};
}

bool signal_pending() {
  nb::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

// The number of the world in whose symmetric memory `remote` lies, and a copy between a peer's
// counterpart of it and `local`; nothing if there is something wrong with one of them, which is to
// be told in words.
std::optional<std::pair<uint64_t, StridedCopy>> one_sided(bool put, nb::handle remote,
                                                          nb::handle local, int peer) {
  View there, here;
  if (!there.look_plain(remote) || !here.look_plain(local) || there.dtype != here.dtype ||
      !there.same_shape(here))
    return {};
  if (!there.read_as_they_lie(remote) || !here.read_as_they_lie(local)) return {};
  // Without elements a tensor need not say where it lies.
  const auto at = there.span()
                      ? there.address
                      : nb::cast<uintptr_t>(remote.attr("untyped_storage")().attr("data_ptr")());
  const Segment* segment = Segment::around(at);
  if (!segment || peer < 0 || static_cast<size_t>(peer) >= segment->parts.size() ||
      !segment->parts[peer])
    return {};
  const size_t offset = at - segment->own().address();
  const Sizes shape(there.shape, there.shape + there.dimensions),
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

}  // namespace

NB_MODULE(_native, m) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {  // what the operating system refuses
      PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
    } catch (const InUse& use) {
      const nb::object error = in_use(use);
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    }
  });
  // a tensor in a global variable outlives the interpreter, and that is no leak
  nb::set_leak_warnings(false);

  nb::enum_<Dtype>(m, "Dtype")
      .value("float16", Dtype::float16)
      .value("bfloat16", Dtype::bfloat16)
      .value("float32", Dtype::float32)
      .value("float64", Dtype::float64)
      .value("int8", Dtype::int8)
      .value("int16", Dtype::int16)
      .value("int32", Dtype::int32)
      .value("int64", Dtype::int64)
      .value("uint8", Dtype::uint8)
      .value("bool", Dtype::boolean);

  nb::enum_<Combine>(m, "Combine")
      .value("sum", Combine::sum)
      .value("avg", Combine::avg)
      .value("max", Combine::max)
      .value("min", Combine::min);

  nb::enum_<Role>(m, "Role")
      .value("input", Role::input)
      .value("output", Role::output)
      .value("workspace", Role::workspace)
      .value("eager", Role::eager);
  nb::enum_<WaitStatus>(m, "WaitStatus")
      .value("none", WaitStatus::none)
      .value("timeout", WaitStatus::timeout)
      .value("failed", WaitStatus::failed)
      .value("left", WaitStatus::left)
      .value("mismatch", WaitStatus::mismatch)
      .value("interrupted", WaitStatus::interrupted)
      .value("lane", WaitStatus::lane)
      .value("unread", WaitStatus::unread);

  m.def("look_by", &View::look_by, "plain"_a, "exchange"_a.none());
  m.def("layouts", &layouts, "tensors"_a);
  m.def("seen", &seen, "tensor"_a, "sampled"_a);
  m.def(
      "lies",
      [](nb::handle tensor) -> std::optional<uint64_t> {
        View view;
        if (!view.look_plain(tensor) || !view.contiguous()) return {};
        const Segment* within = Segment::around(view.address);
        return within ? within->world : 0;
      },
      "tensor"_a.none());

  m.def(
      "around",
      [](uintptr_t address) {
        const Segment* within = Segment::around(address);
        return within ? nb::find(*within) : nb::none();
      },
      "address"_a, nb::sig("def around(address: int) -> Segment | None"));

  nb::class_<Mapping>(m, "Mapping");
  nb::class_<File>(m, "File");
  m.def("create_mapping", &Mapping::create);
  m.def("attach_mapping", &Mapping::attach);

  nb::class_<Segment>(m, "Segment", nb::is_weak_referenceable())
      .def(nb::init<std::vector<std::shared_ptr<Mapping>>, int, uint64_t, uint64_t>())
      .def_ro("world", &Segment::world)
      .def_ro("number", &Segment::number)
      .def_prop_ro("size", [](Segment& self) { return self.own().bytes(); })
      .def("base", [](Segment& self, int rank) { return self.parts.at(rank)->address(); })
      .def("bases", &Segment::bases)
      .def("bytes", [](Segment& self, int rank) {
        // A tensor over a rank's part; it keeps the whole segment alive.
        Mapping& part = *self.parts.at(rank);
        return nb::ndarray<nb::pytorch, uint8_t>(part.base(), {part.bytes()}, nb::find(self));
      });

  nb::class_<Mesh>(m, "Mesh")
      .def(nb::init<std::vector<int>>())
      .def("send", &Mesh::send, "peer"_a, "text"_a, "file"_a.none(), Unlocked())
      .def("receive", &Mesh::receive, Unlocked())
      .def("abort", [](Mesh& self, std::string kind, int culprit,
                       std::string text) { self.abort({kind, culprit, text}); })
      .def("leave", &Mesh::leave)
      .def("disown", &Mesh::disown)
      .def("left", &Mesh::left)
      .def("failure", [](Mesh& self) {
        const auto [kind, culprit, text] = self.failure();
        return std::make_tuple(kind, culprit, text);
      });

  nb::class_<Program>(m, "Compiled")
      .def(
          nb::init<std::string, size_t, std::vector<std::pair<uint32_t, uint64_t>>, size_t, bool>(),
          "call"_a, "lanes"_a, "promised"_a, "ranks"_a, "meets"_a = false)
      .def("say", [](Program& self,
                     std::string what) { self.said = Said(std::move(what)), self.name.clear(); })
      .def("describe",
           [](Program& self, std::string name, std::string ending) {
             self.name = std::move(name), self.ending = std::move(ending);
           })
      .def(
          "lay_out",
          [](Program& self, int own_rank, std::vector<uint32_t> pieces,
             std::vector<std::vector<int>> layouts, const std::vector<PyBuffer>& buffers,
             std::vector<std::pair<int, uint32_t>> slots) {
            self.rank = own_rank, self.pieces = std::move(pieces),
            self.layouts = std::move(layouts), self.slots = std::move(slots);
            for (const auto& [name, dtype, itemsize, role, like, told, shared, by_rank] : buffers) {
              self.buffers.push_back({name, dtype, itemsize, role, like, told, shared, by_rank});
              self.eager |= role == Role::eager;
            }
          })
      .def(
          "bind", [](Program& self, const Binding* binding) { self.execution.binding = binding; },
          nb::arg().none())
      .def("copy",
           [](Program& self, size_t lane, Place dst, Place src, uint32_t measure, bool together,
              bool remote, bool returns) {
             Instruction i{Op::copy, operands({dst, src}), measure, together};
             i.remote = remote;
             self.add(lane, i, returns);
           })
      .def("reduce",
           [](Program& self, size_t lane, std::vector<Place> places, uint32_t measure,
              bool together, std::vector<Dtype> dtypes, Combine combine, bool returns) {
             self.add(lane, {Op::reduce, operands(places), measure, together, dtypes, combine},
                      returns);
           })
      .def("notify",
           [](Program& self, size_t lane, Executor& executor, int rank, uint32_t index) {
             Instruction i{Op::notify, {}};
             i.counter = &executor.counter(rank, index);
             self.add(lane, i);
           })
      .def("wait",
           [](Program& self, size_t lane, Executor& executor, int rank, uint32_t index, int source,
              uint64_t count) {
             Instruction i{Op::wait, {}};
             i.counter = &executor.counter(rank, index), i.index = index, i.source = source,
             i.count = count;
             self.add(lane, i);
           })
      .def("pause", [](Program& self, size_t lane) { self.add(lane, {Op::pause, {}}); })
      .def("multiply", [](Program& self, size_t lane,
                          Place src) { self.add(lane, {Op::pause, {operand(src)}}); })
      .def_prop_ro("call", [](Program& self) { return self.execution.call; })
      .def_prop_ro("digest",
                   [](Program& self) {
                     return self.execution.digest ? self.execution.digest : self.said.digest;
                   })
      .def("set_span", [](Program& self, size_t lane, size_t at, int64_t start,
                          int64_t stop) { self.execution.spans[lane][at] = {start, stop}; })
      .def("spans", [](Program& self, size_t lane) { return self.execution.spans[lane]; })
      .def_prop_ro(
          "stopped",
          [](Program& self) { return self.execution.stopped.load(std::memory_order_acquire); })
      .def("wait_failure", [](Program& self, size_t lane) {
        const auto [status, instruction, source, expected, actual] = self.execution.failures[lane];
        return std::make_tuple(status, instruction, source, expected, actual);
      });

  nb::class_<Binding>(m, "Binding")
      .def(
          "__init__",
          [](Binding* self, Program& program, const Sizes& rows, ByName tensors, ByName shared,
             std::string words) {
            new (self) Binding(program, rows, given(program, tensors, shared), std::move(words));
          },
          "compiled"_a, "rows"_a, "tensors"_a, "shared"_a, "words"_a = "", nb::keep_alive<1, 2>())
      .def(
          "again",
          [](Binding& self, const Sizes& rows, ByName tensors) {
            return self.again(rows, given(self.program(), tensors, {}));
          },
          "rows"_a, "tensors"_a)
      .def_prop_ro("rows", &Binding::shards)
      .def_prop_ro("workspace", &Binding::workspace)
      .def_prop_ro("call", [](Binding& self) { return self.said().text; })
      .def_prop_ro("eager", &Binding::eager)
      .def("place", &Binding::place)
      .def("matrix", [](Binding& self, Place place) {
        const Operand o = operand(place);
        const auto address = reinterpret_cast<uintptr_t>(self.at(o));
        return std::make_tuple(self.first(o), self.rows(o), self.columns(o), self.row_bytes(o),
                               self.stride(o), address);
      });

  nb::class_<Executor>(m, "Executor")
      .def("__init__",
           [](Executor* self, std::shared_ptr<Mesh> mesh, std::shared_ptr<Segment> control,
              int spins, size_t comm_threads) {
             new (self) Executor(mesh, control, spins, comm_threads);
             self->caller_interrupted = signal_pending;
           })
      .def_static("control_bytes", &Executor::control_bytes)
      .def_prop_ro_static("said_bytes", [](nb::handle) { return Calls::kBytes; })
      .def_ro_static("max_names", &Executor::kNames)
      .def_ro_static("turns", &Program::kTurns)
      .def_ro_static("meeting", &Program::kMeeting)
      .def_rw("within_host", &Executor::within_host)
      .def_rw("pids", &Executor::pids)
      .def("must_meet", &Executor::must_meet)
      .def("eager_bases", &Executor::eager_bases)
      .def_prop_ro("calls", [](Executor& self) { return self.calls.latest(); })
      .def("begin", [](Executor& self, Program& program,
                       double timeout) { self.begin(program, nanoseconds(timeout)); })
      .def("run", [](Executor& self, Program& program, size_t lane,
                     int at) { return unlocked([&] { return self.run(program, lane, at); }); })
      .def(
          "start",
          [](Executor& self, Program& program, size_t lane, nb::object held) {
            self.lane_thread.start({&program, lane, kept(std::move(held))});
          },
          "compiled"_a, "lane"_a, "held"_a = nb::none())
      .def("enter", &Executor::enter)
      .def("leave", &Executor::leave)
      .def(
          "wait_under_way",
          [](Executor& self, uint64_t call, const std::vector<int>& ranks, double seconds) {
            return self.wait_under_way(call, ranks, nanoseconds(seconds));
          },
          "call"_a, "ranks"_a, "seconds"_a, Unlocked())
      .def("stop", [](Executor& self, Program& program) { self.stop(program); })
      .def(
          "join",
          [](Executor& self, Program& program, double seconds) {
            return self.lane_thread.join(program, seconds);
          },
          "compiled"_a, "seconds"_a = 1e9, Unlocked())
      .def("execute", &execute)
      .def("execute_alone",
           [](Executor& self, nb::handle program, Binding& bound, double timeout) {
             in_turn(self, program, [&] { execute(self, program, bound, timeout); });
           })
      .def("mismatch",
           [](Executor& self, Program& program, int peer) {
             return self.calls.mismatch(peer, program.execution.call, program.execution.digest);
           })
      .def("peer_call",
           [](Executor& self, int peer, uint64_t call) { return self.calls.text(peer, call); })
      .def("note_call", [](Executor& self, int peer, uint64_t call, uint64_t digest,
                           const std::string& text) { self.calls.note(peer, call, digest, text); })
      .def("emulate_link",
           [](Executor& self, double bytes_per_second, double latency_seconds) {
             self.link.set(bytes_per_second, latency_seconds);
           })
      .def("trace", [](Executor& self, bool on) { self.tracing = on; });

  nb::class_<Repeats>(m, "Repeats", nb::type_slots(Repeats::slots))
      .def(nb::init<Executor&>(), "executor"_a, nb::keep_alive<1, 2>())
      .def("add", &Repeats::add, "what"_a, "a"_a, "out"_a, "options"_a, "program"_a, "binding"_a,
           "tensors"_a)
      .def("call", &Repeats::call, "what"_a, "a"_a.none(), "out"_a, "options"_a, "timeout"_a)
      .def("clear", &Repeats::clear)
      .def("__len__", &Repeats::size);

  nb::class_<Alike>(m, "Alike", nb::type_slots(Alike::slots))
      .def(nb::init<nb::object, uint64_t>(), "packed"_a, "world"_a)
      .def("add", &Alike::add, "options"_a, "a"_a, "weights"_a, "biases"_a, "made"_a)
      .def("find", &Alike::find, "options"_a, "a"_a.none(), "weights"_a, "biases"_a)
      .def("clear", &Alike::clear)
      .def("__len__", &Alike::size);

  nb::enum_<Compare>(m, "Compare")
      .value("equal", Compare::equal)
      .value("not_equal", Compare::not_equal)
      .value("greater", Compare::greater)
      .value("greater_equal", Compare::greater_equal)
      .value("less", Compare::less)
      .value("less_equal", Compare::less_equal);

  nb::class_<SignalArray>(m, "SignalArray")
      .def(nb::init<std::shared_ptr<Mesh>, std::shared_ptr<Segment>, int>())
      .def("add", [](SignalArray& self, int rank, size_t start, size_t count, size_t step,
                     uint64_t value) { return self.add(rank, {start, count, step}, value); })
      .def("set", [](SignalArray& self, int rank, size_t start, size_t count, size_t step,
                     uint64_t value) { return self.set(rank, {start, count, step}, value); })
      .def("values", [](SignalArray& self, size_t start, size_t count,
                        size_t step) { return self.values({start, count, step}); })
      .def("test", [](SignalArray& self, size_t start, size_t count, size_t step, Compare compare,
                      uint64_t value) { return self.test({start, count, step}, compare, value); })
      .def_prop_ro("failed", &SignalArray::failed)
      .def("wait", [](SignalArray& self, size_t start, size_t count, size_t step, Compare compare,
                      uint64_t value, double timeout) {
        const auto [status, index, actual] = unlocked([&] {
          return self.wait({start, count, step}, compare, value, nanoseconds(timeout),
                           signal_pending);
        });
        return std::make_tuple(status, index, actual);
      });

  m.def("read_number", [](int pid, uintptr_t from) {
    // The 8 bytes at an address of a process.
    uint64_t number = 0;
    const int error = read_memory(pid, from, 8, reinterpret_cast<char*>(&number), 8, 1, 8);
    if (error) throw std::system_error(error, std::generic_category());
    return number;
  });

  nb::class_<StridedCopy>(m, "StridedCopy");
  m.def(
      "copy_at_once",
      [](bool put, nb::handle remote, nb::handle local, int peer) {
        // Whether that copy was made; not where something is to be told in words.
        const auto found = one_sided(put, remote, local, peer);
        const auto world = found ? PyTransfers::open.find(found->first) : PyTransfers::open.end();
        if (world == PyTransfers::open.end()) return false;
        PyTransfers& open = *world->second;
        const nb::object held =
            nb::find(open);  // another thread may close the world, and let go of it
        nb::gil_scoped_release release;
        return open.transfers.copy(found->second);
      },
      "put"_a, "remote"_a.none(), "local"_a.none(), "peer"_a);
  m.def("one_sided", &one_sided, "put"_a, "remote"_a.none(), "local"_a.none(), "peer"_a);

  nb::class_<PyTransfers>(m, "Transfers")
      .def(nb::init<std::shared_ptr<Mesh>, int, size_t, uint64_t>())
      .def_prop_ro_static("max_outstanding", [](nb::handle) { return Transfers::kOutstanding; })
      .def(
          "copy",
          [](PyTransfers& self, const StridedCopy& copy) { return self.transfers.copy(copy); },
          Unlocked())
      .def("submit",
           [](PyTransfers& self, nb::object keepalive, const StridedCopy& copy) {
             const uint64_t number =
                 unlocked([&] { return self.transfers.submit(copy, signal_pending); });
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
             const int64_t deadline = now() + nanoseconds(timeout);
             const bool come =
                 unlocked([&] { return self.transfers.wait(number, deadline, signal_pending); });
             self.release();
             return come;
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

  nb::class_<Backlog>(m, "Backlog")
      .def(nb::init<>())
      .def("issue", &Backlog::issue)
      .def("begin", &Backlog::begin)
      .def("hurry", &Backlog::hurry)
      .def("close", &Backlog::close)
      .def("due", &Backlog::due, Unlocked());

  m.def("set_team_size", &set_team_size);
  m.def("team_size", &team_size);
  m.def("let_teams", &let_teams);
  m.def("cycles", [] {  // of the processor's time-stamp counter; 0 where there is none
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#else
    return 0ULL;
#endif
  });
  m.def("now", &now);
}
