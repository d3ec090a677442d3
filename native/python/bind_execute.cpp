#include "execute/binding.hpp"
#include "execute/executor.hpp"
#include "execute/program.hpp"
#include "memory/deferred_work.hpp"
#include "hosts/tcp.hpp"
#include "hosts/ucx.hpp"
#include "python/bind.hpp"
#include "python/execute.hpp"
#include "python/tensor_view.hpp"

using namespace nanobind::literals;

namespace weft {

namespace {

using Place = std::tuple<uint32_t, uint32_t, uint32_t>;  // slot, start, stop
// as in Buffer
using PyBuffer =
    std::tuple<std::string, std::string, size_t, Role, uint32_t, bool, bool, std::vector<uint32_t>>;
// `parts` and `place` of a BoundTensor; a tensor with a place but no parts is unmapped
using Shared = std::pair<std::vector<uintptr_t>, std::string>;
using ByName = nb::typed<nb::dict, nb::str, nb::any>;  // by the names of buffers
using Sizes = std::vector<size_t>;

// The rows of a message: none, or a place, and the blocks of as many rows if the place is a slot
using PyMessage = std::optional<std::tuple<Place, std::vector<int>, std::optional<Dtype>>>;
using PyCounters = std::vector<std::pair<int, uint32_t>>;  // ranks and indices

Operand operand(const Place& place) {
  return {std::get<0>(place), std::get<1>(place), std::get<2>(place)};
}

std::vector<Operand> operands(const std::vector<Place>& places) {
  std::vector<Operand> result;
  for (const Place& place : places) result.push_back(operand(place));
  return result;
}

std::vector<MessageRows> rows_of(const std::vector<PyMessage>& messages) {
  std::vector<MessageRows> result;
  for (const PyMessage& message : messages) {
    MessageRows& rows = result.emplace_back();
    if (!message) continue;
    const auto& [place, blocks, packed] = *message;
    rows = {true, operand(place), blocks, packed};
  }
  return result;
}

// The tensors of a program's buffers, with the parts of tensors that peers access. Throws
// std::invalid_argument for a tensor that is no matrix.
std::vector<BoundTensor> bound_tensors(const Program& program, ByName tensors, ByName shared) {
  std::vector<BoundTensor> found;
  View view;
  for (auto [name, tensor] : tensors) {
    if (!view.read(tensor) || view.dimensions != 2 || (view.shape[1] > 1 && view.strides[1] != 1))
      throw std::invalid_argument(
          std::string("a buffer is a matrix with contiguous rows; got shape ") +
          nb::str(nb::tuple(tensor.attr("shape"))).c_str() + ", strides " +
          nb::str(tensor.attr("stride")()).c_str());
    const size_t rows = static_cast<size_t>(view.shape[0]),
                 columns = static_cast<size_t>(view.shape[1]);
    const size_t stride = (rows > 1 ? static_cast<size_t>(view.strides[0]) : columns) * view.item;
    const uint32_t number = program.number(nb::cast<std::string_view>(name));
    if (number == program.buffers.size()) throw nb::key_error(nb::cast<std::string>(name).c_str());
    BoundTensor& one =
        found.emplace_back(BoundTensor{number, view.address, rows, columns, stride, {}, {}});
    if (!shared.contains(name)) continue;
    std::tie(one.parts, one.place) = nb::cast<Shared>(shared[name]);
    one.unmapped = one.parts.empty() && !one.place.empty();
  }
  return found;
}

}  // namespace

void bind_execute(nb::module_& m) {
  nb::enum_<Role>(m, "Role")
      .value("input", Role::input)
      .value("output", Role::output)
      .value("workspace", Role::workspace)
      .value("eager", Role::eager);
  nb::class_<Program>(m, "Compiled")
      .def(nb::init<std::string, size_t, std::vector<std::pair<uint32_t, uint64_t>>, size_t>(),
           "call"_a, "lanes"_a, "growth"_a, "ranks"_a)
      .def("set_call_text",
           [](Program& self, std::string text) {
             self.text = CallText(std::move(text));
             self.name.clear();
           })
      .def("describe",
           [](Program& self, std::string name, std::string ending) {
             self.name = std::move(name);
             self.ending = std::move(ending);
           })
      .def("lay_out",
           [](Program& self, int own_rank, std::vector<uint32_t> pieces, size_t rows_multiple,
              std::vector<std::vector<int>> layouts, const std::vector<PyBuffer>& buffers,
              std::vector<std::pair<int, uint32_t>> slots,
              std::vector<std::pair<uint32_t, uint32_t>> exchanges) {
             self.rank = own_rank;
             self.pieces = std::move(pieces);
             self.rows_multiple = rows_multiple;
             self.layouts = std::move(layouts);
             self.slots = std::move(slots);
             self.exchanges = std::move(exchanges);
             for (const auto& [name, dtype, itemsize, role, like, in_digest, shared, by_rank] :
                  buffers) {
               self.buffers.push_back(
                   {name, dtype, itemsize, role, like, in_digest, shared, by_rank});
               self.eager |= role == Role::eager;
             }
           })
      .def(
          "bind", [](Program& self, const Binding* binding) { self.execution.binding = binding; },
          nb::arg().none())
      .def("copy",
           [](Program& self, size_t lane, Place dst, Place src, uint32_t sizing,
              bool counts_as_output, bool remote, bool returns) {
             Instruction i{Op::copy, operands({dst, src}), sizing, counts_as_output};
             i.remote = remote;
             self.add(lane, i, returns);
           })
      .def("reduce",
           [](Program& self, size_t lane, std::vector<Place> places, uint32_t sizing,
              bool counts_as_output, std::vector<Dtype> dtypes, Combine combine, bool returns) {
             self.add(lane,
                      {Op::reduce, operands(places), sizing, counts_as_output, dtypes, combine},
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
             i.counter = &executor.counter(rank, index);
             i.index = index;
             i.source = source;
             i.count = count;
             self.add(lane, i);
           })
      .def("pause", [](Program& self, size_t lane) { self.add(lane, {Op::pause, {}}); })
      .def(
          "send",
          [](Program& self, size_t lane, Executor& executor, int rank, int peer, uint8_t of,
             const std::vector<PyMessage>& messages, uint32_t sent) {
            const uint32_t number = static_cast<uint32_t>(self.batches.size());
            self.batches.push_back(
                {&self, number, peer, of, rows_of(messages), &executor.counter(rank, sent)});
            Instruction i{Op::send, {}};
            i.index = number;
            self.add(lane, i);
          },
          "lane"_a, "executor"_a, "rank"_a, "peer"_a, "of"_a, "messages"_a, "sent"_a)
      .def(
          "receive",
          [](Program& self, Executor& executor, int sender, uint8_t of, std::vector<int> gate,
             const std::vector<PyMessage>& messages, const std::vector<PyCounters>& raised) {
            auto channel = std::make_shared<Network::Channel>();
            channel->sender = sender;
            channel->lane = of;
            channel->gate = std::move(gate);
            for (const PyCounters& counters : raised) {
              auto& own = channel->raised.emplace_back();
              for (const auto& [rank, index] : counters)
                own.push_back(&executor.counter(rank, index));
            }
            std::vector<MessageRows> rows = rows_of(messages);
            for (const MessageRows& each : rows) channel->packed.push_back(each.packed);
            self.arrivals.push_back({std::move(channel), std::move(rows)});
          },
          "executor"_a, "sender"_a, "of"_a, "gate"_a, "messages"_a, "raised"_a)
      .def("mark_arrivals", &Program::mark_arrivals)
      .def_prop_ro("sent",
                   [](Program& self) {
                     const std::lock_guard lock(self.sending);
                     std::vector<std::tuple<uint32_t, int64_t, int64_t>> found;
                     for (const auto& [number, begun, ended] : self.sent)
                       found.emplace_back(number, begun, ended);
                     return found;
                   })
      .def("multiply",
           [](Program& self, size_t lane, const std::vector<Place>& places) {
             self.add(lane, {Op::pause, operands(places)});
           })
      .def_prop_ro("call", [](Program& self) { return self.execution.call; })
      .def_prop_ro("digest",
                   [](Program& self) {
                     return self.execution.digest ? self.execution.digest : self.text.digest;
                   })
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
            new (self)
                Binding(program, rows, bound_tensors(program, tensors, shared), std::move(words));
          },
          "compiled"_a, "rows"_a, "tensors"_a, "shared"_a, "words"_a = "", nb::keep_alive<1, 2>())
      .def(
          "again",
          [](Binding& self, const Sizes& rows, ByName tensors) {
            return self.again(rows, bound_tensors(self.program(), tensors, {}));
          },
          "rows"_a, "tensors"_a)
      .def_prop_ro("rows", &Binding::shards)
      .def_prop_ro("workspace", &Binding::workspace)
      .def_prop_ro("call", [](Binding& self) { return self.text().text; })
      .def_prop_ro("eager", &Binding::eager)
      .def("place", &Binding::place)
      .def("matrix", [](Binding& self, Place place) {
        const Operand o = operand(place);
        const auto address = reinterpret_cast<uintptr_t>(self.at(o));
        return std::make_tuple(self.first(o), self.rows(o), self.columns(o), self.row_bytes(o),
                               self.stride(o), address);
      });

  nb::class_<RefusedCall>(m, "RefusedCall").def_prop_ro("stands", &RefusedCall::stands);

  nb::class_<Executor>(m, "Executor")
      .def("__init__",
           [](Executor* self, std::shared_ptr<Mesh> mesh, std::shared_ptr<Segment> control,
              int spins, size_t comm_threads) {
             new (self) Executor(mesh, control, spins, comm_threads);
             self->caller_interrupted = signal_pending;
             self->release_caller = release_gil;
           })
      .def_static("control_bytes", &Executor::control_bytes)
      .def_prop_ro_static("header_bytes", [](nb::handle) { return Calls::kBytes; })
      .def_ro_static("max_names", &Executor::kNames)
      .def_ro_static("eager_bytes", &Program::kEager)
      .def_ro_static("eager_sets", &Program::kEagerSets)
      .def_prop_ro("within_host", &Executor::within_host)
      .def(
          "connect",
          [](Executor& self, size_t ranks, bool ucx) {
            return self.connect(
                ranks, [&](Transport::Receiver& receiver) -> std::unique_ptr<Transport> {
                  if (ucx) return std::make_unique<UcxTransport>(ranks, self.rank(), receiver);
                  return std::make_unique<TcpTransport>(ranks, receiver);
                });
          },
          "ranks"_a, "ucx"_a = false)
      .def_rw("pids", &Executor::pids)
      .def("eager_bases", &Executor::eager_bases)
      .def_prop_ro("calls", [](Executor& self) { return self.calls.latest(); })
      .def("begin", [](Executor& self, Program& program,
                       double timeout) { self.begin(program, nanoseconds(timeout)); })
      .def("run", [](Executor& self, Program& program, size_t lane,
                     int at) { return unlocked([&] { return self.run(program, lane, at); }); })
      .def(
          "start",
          [](Executor& self, Program& program, size_t lane, nb::object retained) {
            in_range([&] { return program.name + "_async"; },
                     [&] { self.lane_thread.start({&program, lane, keep(std::move(retained))}); });
          },
          "compiled"_a, "lane"_a, "retained"_a = nb::none())
      .def("enter", &Executor::enter)
      .def("leave", &Executor::leave)
      .def("stop", [](Executor& self, Program& program) { self.stop(program); })
      .def(
          "join",
          [](Executor& self, Program& program, double seconds) {
            const auto join = [&] {
              return unlocked([&] { return self.lane_thread.join(program, seconds); });
            };
            return seconds > 0 ? in_range([] { return "wait"; }, join) : join();
          },
          "compiled"_a, "seconds"_a = 1e9)
      .def(
          "execute",
          [](Executor& self, nb::handle program, Binding& bound, double timeout,
             nb::object multiply) {
            execute(self, program, bound, timeout, [&](int at) { multiply(at); });
          },
          "program"_a, "binding"_a, "timeout"_a, "multiply"_a = nb::none())
      .def("refuse", [](Executor& self, const std::string& why) { return self.calls.refuse(why); })
      .def("times_refused", [](Executor& self, int rank,
                               uint64_t call) { return self.calls.times_refused(rank, call); })
      .def(
          "refused_call",
          [](Executor& self, Program& program, int peer) {
            return RefusedCall(self.calls, peer, program.execution.call);
          },
          nb::keep_alive<0, 1>())
      .def("reason_of_refusal", [](Executor& self, int rank) { return self.calls.reason(rank); })
      .def("mismatch",
           [](Executor& self, Program& program, int peer) {
             return self.calls.mismatch(peer, program.execution.call, program.execution.digest);
           })
      .def("peer_call",
           [](Executor& self, int peer, uint64_t call) { return self.calls.text(peer, call); })
      .def("made_calls",
           [](Executor& self, int rank) {
             std::vector<std::tuple<uint64_t, int64_t, bool, std::string>> found;
             for (const auto& [number, began, ended, text] : self.calls.made(rank))
               found.emplace_back(number, began, ended, text);
             return found;
           })
      .def("end", [](Executor& self, Program& program) { self.calls.end(program.execution.call); })
      .def("emulate_link",
           [](Executor& self, double bytes_per_second, double latency_seconds) {
             self.link.set(bytes_per_second, latency_seconds);
           })
      .def("trace", [](Executor& self, bool on) { self.tracing = on; });

  m.def("ucx_resources", &ucp::resources);
  m.def("ucx_version", [] { return ucp::library().get_version_string(); });

  nb::enum_<Trouble::Kind>(m, "Trouble")
      .value("broken", Trouble::broken)
      .value("garbled", Trouble::garbled)
      .value("mismatch", Trouble::mismatch)
      .value("unconnected", Trouble::unconnected);
  nb::class_<Network>(m, "Network")
      .def("connect", &Network::connect, "peer"_a, "descriptor"_a, Unlocked())
      .def("announce_refusal", &Network::announce_refusal, "call"_a, "times"_a, "why"_a)
      .def("finish", &Network::finish, "seconds"_a, "linger"_a, Unlocked())
      .def(
          "ended", [](Network& self, int peer) { return self.ended(peer); }, "peer"_a)
      .def("need", &Network::need, "peer"_a, Unlocked())
      .def("abort", &Network::abort, Unlocked())
      .def("close", &Network::close, "seconds"_a, Unlocked())
      .def("stop", &Network::stop, Unlocked())
      .def("disown", &Network::disown)
      .def_prop_ro("trouble_descriptor", &Network::trouble_descriptor)
      .def("troubles", [](Network& self) {
        std::vector<std::tuple<Trouble::Kind, int, uint64_t, std::string>> found;
        for (const auto& [kind, peer, call, text] : self.troubles())
          found.emplace_back(kind, peer, call, text);
        return found;
      });
}

}  // namespace weft
