#include "hosts/messages.hpp"
#include "python/bind.hpp"
#include "python/gil.hpp"
#include "../../weft/process_group/message_calls.h"  // of both sides

using namespace nanobind::literals;

namespace weft {

namespace {

// What native code of others holds: a message, and whose it is.
struct Held {
  Messages* messages;
  MessagePtr message;
};

// Whether a peer may be sent to, or received from.
bool valid(const Messages& messages, int peer, int tag, bool any) {
  return !messages.failed() && tag >= 0 && peer < static_cast<int>(messages.ranks()) &&
         peer != messages.rank() && peer >= (any ? Message::kAny : 0);
}

// A new message, or null: also where there is no memory for it, as Python will find.
template <class Begin>
void* begun(Messages& messages, Begin begin) try {
  MessagePtr message = begin();
  return message ? new Held{&messages, std::move(message)} : nullptr;
} catch (const std::bad_alloc&) {
  return nullptr;
}

constexpr WeftMessageCalls kCalls{
    [](void* self, const void* data, uint64_t bytes, int peer, int tag) -> void* {
      Messages& messages = *static_cast<Messages*>(self);
      if (!valid(messages, peer, tag, false)) return nullptr;
      return begun(messages,
                   [&] { return messages.send(static_cast<const char*>(data), bytes, peer, tag); });
    },
    [](void* self, void* data, uint64_t bytes, int peer, int tag) -> void* {
      Messages& messages = *static_cast<Messages*>(self);
      if (!valid(messages, peer, tag, true)) return nullptr;
      return begun(messages,
                   [&] { return messages.receive(static_cast<char*>(data), bytes, peer, tag); });
    },
    [](void* message, double seconds) -> int {
      Held& one = *static_cast<Held*>(message);
      if (one.messages->inside()) return static_cast<int>(WaitStatus::refused);
      const WaitStatus status =
          one.messages->wait(*one.message, nanoseconds(seconds), signal_pending);
      const bool failed = one.message->state.load() == Message::failed;
      return static_cast<int>(status == WaitStatus::none && failed ? WaitStatus::failed : status);
    },
    [](const void* message) -> int {
      return static_cast<const Held*>(message)->message->state.load(std::memory_order_acquire);
    },
    [](const void* message) -> int { return static_cast<const Held*>(message)->message->source; },
    [](void* message) -> void* {
      return nb::cast(static_cast<Held*>(message)->message).release().ptr();
    },
    [](void* message) { delete static_cast<Held*>(message); },
};

// The error of a message that `fail` or `fail_all` has ended.
nb::object error_of(const Message& message) {
  return message.error ? nb::borrow(static_cast<PyObject*>(message.error.get())) : nb::none();
}

}  // namespace

void bind_messages(nb::module_& m) {
  nb::class_<DeferredWork>(m, "DeferredWork")
      .def(nb::init<>())
      .def("issue", &DeferredWork::issue)
      .def("begin", &DeferredWork::begin)
      .def("hurry", &DeferredWork::hurry)
      .def("close", &DeferredWork::close)
      .def("due", &DeferredWork::due, Unlocked());

  nb::class_<Message>(m, "Message")
      .def_prop_ro("done", [](Message& self) { return self.state.load() != Message::open; })
      .def_prop_ro("failed", [](Message& self) { return self.state.load() == Message::failed; })
      .def_ro("sending", &Message::sending)
      .def_prop_ro("peer",
                   [](Message& self) {
                     return self.peer == Message::kAny ? std::nullopt : std::optional(self.peer);
                   })
      .def_ro("tag", &Message::tag)
      .def_ro("bytes", &Message::bytes)
      .def_ro("source", &Message::source)
      .def_ro("size", &Message::size)
      .def_prop_ro("error", &error_of, nb::sig("def error(self) -> BaseException"));

  nb::class_<Messages>(m, "Messages")
      .def(nb::init<std::shared_ptr<Mesh>, std::shared_ptr<Segment>, size_t, std::vector<int>, int,
                    std::shared_ptr<Network>, std::shared_ptr<DeferredWork>>(),
           "mesh"_a, "segment"_a, "ring"_a, "pids"_a, "spins"_a, "network"_a.none(), "progress"_a)
      .def_static("segment_bytes", &Messages::bytes, "ranks"_a, "ring"_a)
      .def_prop_ro("address", [](Messages& self) { return reinterpret_cast<uintptr_t>(&self); })
      .def(
          "send",
          [](Messages& self, uintptr_t data, size_t bytes, int peer, int tag) {
            return self.send(reinterpret_cast<const char*>(data), bytes, peer, tag);
          },
          "data"_a, "bytes"_a, "peer"_a, "tag"_a, Unlocked())
      .def(
          "receive",
          [](Messages& self, uintptr_t data, size_t bytes, std::optional<int> peer, int tag) {
            return self.receive(reinterpret_cast<char*>(data), bytes, peer.value_or(Message::kAny),
                                tag);
          },
          "data"_a, "bytes"_a, "peer"_a.none(), "tag"_a, Unlocked())
      .def("wait",
           [](Messages& self, Message& message, double timeout) {
             return unlocked(
                 [&] { return self.wait(message, nanoseconds(timeout), signal_pending); });
           })
      .def("advance",
           [](Messages& self, double timeout) {
             return unlocked([&] { return self.advance(nanoseconds(timeout), signal_pending); });
           })
      .def("watch", &Messages::watch)
      .def("ended", &Messages::ended)
      .def("fail", [](Messages& self, Message& message,
                      nb::object error) { return self.fail(message, keep(std::move(error))); })
      .def("fail_all",
           [](Messages& self, nb::object error) { self.fail_all(keep(std::move(error))); })
      .def("close", &Messages::close)
      .def_prop_ro("closed", &Messages::closed)
      .def_prop_ro("trouble", [](Messages& self) { return self.trouble() ? self.trouble() : ""; })
      .def_prop_ro("inside", &Messages::inside)
      .def("outstanding", &Messages::outstanding);

  m.def(
      "message_calls", [] { return nb::capsule(&kCalls, "weft.message_calls"); },
      nb::sig("def message_calls() -> object"));
}

}  // namespace weft
