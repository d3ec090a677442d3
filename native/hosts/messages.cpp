#include "hosts/messages.hpp"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "kernels/copy.hpp"

namespace weft {

namespace {

std::atomic<int> forks{0};  // of this process from its ancestors, since it was loaded

size_t aligned(size_t bytes, size_t line) { return (bytes + line - 1) / line * line; }

}  // namespace

Messages::Messages(std::shared_ptr<Mesh> mesh, std::shared_ptr<Segment> segment, size_t ring,
                   std::vector<int> pids, int spins, std::shared_ptr<Network> network,
                   std::shared_ptr<DeferredWork> progress)
    : mesh_(std::move(mesh)),
      segment_(std::move(segment)),
      ring_(ring),
      rank_(segment_->rank),
      spins_(spins),
      network_(std::move(network)),
      progress_(std::move(progress)),
      forks_(forks.load()),
      peers_(segment_->parts.size()) {
  static const int watched = pthread_atfork(nullptr, nullptr, [] { ++forks; });
  static_cast<void>(watched);
  const size_t ranks = peers_.size();
  const auto counters = [&](size_t rank) {
    return reinterpret_cast<Counter*>(segment_->parts[rank]->base() + ranks * ring_);
  };
  bell_ = counters(rank_);
  for (size_t number = 0; number < ranks; ++number) {
    if (static_cast<int>(number) == rank_) continue;
    order_.push_back(static_cast<int>(number));
    Peer& peer = peers_[number];
    peer.here = segment_->parts[number] != nullptr;
    if (!peer.here) continue;
    const auto words = [&](size_t of, size_t for_rank) {
      return counters(of) + 1 + for_rank * (1 + kLong);
    };
    peer.inbox = segment_->own().base() + number * ring_;
    peer.outbox = segment_->parts[number]->base() + rank_ * ring_;
    peer.bell = counters(number);
    peer.taken = words(rank_, number);
    peer.taken_there = words(number, rank_);
    peer.read = peer.taken + 1;
    peer.read_there = peer.taken_there + 1;
    peer.pid = pids[number];
  }
  if (network_) network_->serve(Kind::tagged, this);
}

Messages::~Messages() {
  if (network_) network_->serve(Kind::tagged, nullptr);
}

MessagePtr Messages::send(const char* data, size_t bytes, int peer, int tag) {
  return begin(std::make_shared<Message>(true, peer, tag, const_cast<char*>(data), bytes));
}

MessagePtr Messages::receive(char* data, size_t bytes, int peer, int tag) {
  return begin(std::make_shared<Message>(false, peer, tag, data, bytes));
}

MessagePtr Messages::begin(MessagePtr message) {
  if (closed() || inside() || forks_ != forks.load(std::memory_order_relaxed)) return nullptr;
  if (message->sending && mesh_->failed()) return nullptr;
  const std::lock_guard lock(mutex_);
  if (message->sending) {
    Peer& peer = peers_[message->peer];
    if (network_ && !peer.here) network_->need(message->peer);
    peer.sending.push_back(message);
    while (put(message->peer, peer)) {
    }
    update();
    return message;
  }
  const auto kept = [&](int number) { return receive_kept(number, message); };
  if (message->peer == Message::kAny ? std::any_of(order_.begin(), order_.end(), kept)
                                     : kept(message->peer)) {
    update();
    return message;
  }
  receives_.push_back(message);
  ++receives_like(*message);
  if (network_)  // what follows what was kept is wanted now (P4)
    for (const int number : order_) {
      Peer& peer = peers_[number];
      if (peer.here || (message->peer != Message::kAny && message->peer != number)) continue;
      network_->need(number);
      size_t held = 0;
      for (Incoming& each : peer.unexpected) held += std::exchange(each.held, 0);
      if (peer.incoming) held += std::exchange(peer.incoming->held, 0);
      release(number, held);
    }
  update();
  return message;
}

// Give a receive the first message of its tag that was kept of a peer; whether there is one.
bool Messages::receive_kept(int number, const MessagePtr& receive) {
  auto& kept = peers_[number].unexpected;
  const auto found = std::find_if(kept.begin(), kept.end(),
                                  [&](const Incoming& each) { return each.tag == receive->tag; });
  if (found == kept.end()) return false;
  Incoming incoming = std::move(*found);
  kept.erase(found);
  incoming.receive = receive;
  deliver_unless_read(number, std::move(incoming));
  favour_others(number);
  return true;
}

WaitStatus Messages::wait(Message& message, int64_t timeout,
                          const std::function<bool()>& interrupted) {
  if (message.state.load(std::memory_order_acquire) != Message::open) return WaitStatus::none;
  if (forks_ != forks.load(std::memory_order_relaxed)) return WaitStatus::refused;
  const Messages* const outer = std::exchange(inside_, this);
  waiting_.fetch_add(1);
  {
    const std::lock_guard lock(mutex_);
    awaited_.push_back(&message);
  }
  const auto over = [&] { return message.state.load(std::memory_order_acquire) != Message::open; };
  const WaitStatus status = move_until(over, &message, timeout, interrupted);
  {
    const std::lock_guard lock(mutex_);
    awaited_.remove(&message);
  }
  waiting_.fetch_sub(1);
  inside_ = outer;
  return status;
}

WaitStatus Messages::advance(int64_t timeout, const std::function<bool()>& interrupted) {
  const auto over = [&] {
    if (waiting_.load() || closed()) return true;
    const std::lock_guard lock(mutex_);
    return !pending_ || !ended_.empty();
  };
  return over() ? WaitStatus::none : move_until(over, nullptr, timeout, interrupted);
}

template <class Over>
WaitStatus Messages::move_until(Over over, const Message* message, int64_t timeout,
                                const std::function<bool()>& interrupted) {
  Deadline deadline(timeout);
  const Yields yields = yields_after(spins_);
  if (message) {
    for (int spin = 0; spin <= spins_; ++spin) {
      step(false);
      if (over()) return WaitStatus::none;
      pause();
    }
    const int64_t start = now();
    for (int turn = 0; turn < kYields || (network_ && spins_ && now() - start < kPolls); ++turn) {
      step(false);
      if (over()) return WaitStatus::none;
      if (!yield(yields)) break;
    }
  }
  while (true) {
    // before the messages are looked at: a peer puts its messages before it leaves or fails
    const bool failed = mesh_->failed(), left_alone = all_left();
    const bool left =
        message && (left_alone || (message->peer != Message::kAny && mesh_->left(message->peer)));
    {
      Sleeper sleeper(*bell_);
      std::atomic_thread_fence(std::memory_order_seq_cst);
      const uint64_t seen = bell_->value.load(std::memory_order_seq_cst);
      const bool moved = step(true);
      if (over()) return WaitStatus::none;
      if (trouble()) return WaitStatus::unreadable;
      if (failed) return WaitStatus::failed;
      if (left || (left_alone && !message)) return WaitStatus::left;
      if (closed()) return WaitStatus::refused;
      const int64_t rest = deadline.left();
      if (rest <= 0) return WaitStatus::timeout;
      const int64_t slice = std::min(rest, kSlice);
      const bool from_network =
          message && message->peer != Message::kAny && !peers_[message->peer].here;
      if (!moved && !(from_network && network_->poll_for(slice))) {
        if (network_) network_->nudge();
        sleep_on(*bell_, seen, slice);
      }
    }
    if (interrupted()) return WaitStatus::interrupted;
  }
}

// Move what can be moved now, unless another thread does, or after that; whether anything was.
bool Messages::step(bool after_others) {
  bool moved = network_ && network_->poll();
  std::unique_lock lock(mutex_, std::defer_lock);
  if (after_others)
    lock.lock();
  else if (!lock.try_lock())
    return moved;
  return move() || moved;
}

bool Messages::all_left() const {
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer)
    if (peer != rank_ && !mesh_->left(peer)) return false;
  return peers_.size() > 1;
}

bool Messages::watch(const MessagePtr& message) {
  {
    const std::lock_guard lock(mutex_);
    if (message->state.load() != Message::open) return false;
    message->watched = true;
  }
  progress_->hurry();
  return true;
}

std::vector<MessagePtr> Messages::ended() {
  const std::lock_guard lock(mutex_);
  std::vector<MessagePtr> found = std::exchange(ended_, {});
  update();
  return found;
}

bool Messages::fail(Message& message, std::shared_ptr<void> error) {
  const std::lock_guard lock(mutex_);
  const auto is = [&](const MessagePtr& each) { return each.get() == &message; };
  MessagePtr found;
  if (message.sending) {
    auto& queue = peers_[message.peer].sending;
    const auto at = std::find_if(queue.begin(), queue.end(), is);
    if (at == queue.end() || message.moved) return false;
    found = *at;
    queue.erase(at);
  } else {
    const auto at = std::find_if(receives_.begin(), receives_.end(), is);
    if (at == receives_.end()) return false;
    found = *at;
    receives_.erase(at);
    --receives_like(message);
  }
  message.error = std::move(error);
  end(found, Message::failed);
  update();
  return true;
}

void Messages::fail_all(const std::shared_ptr<void>& error) {
  const std::lock_guard lock(mutex_);
  const auto fails = [&](const MessagePtr& message) {
    if (!message || message->state.load() != Message::open) return;
    message->error = error;
    end(message, Message::failed);
  };
  for (Peer& peer : peers_) {
    for (const MessagePtr& each : std::exchange(peer.sending, {})) fails(each);
    for (MessagePtr& each : peer.unread) fails(std::exchange(each, nullptr));
    peer.unread_count = 0;
    if (peer.incoming) fails(peer.incoming->receive);
    // the driver may be writing to it: what arrives next is dropped
    if (peer.here) peer.incoming.reset();
    peer.receives = 0;
  }
  for (const MessagePtr& each : std::exchange(receives_, {})) fails(each);
  any_source_ = 0;
  for (const MessagePtr& each : std::exchange(flying_, {})) fails(each);
  for (Reading& each : reading_) fails(each.message.receive);
  reading_.clear();
  update();
  ring(*bell_);
}

void Messages::close() {
  closed_.store(true, std::memory_order_release);
  weft::add(*bell_, 1);
}

MessagePtr Messages::outstanding() {
  const std::lock_guard lock(mutex_);
  MessagePtr first;
  const auto look = [&](const MessagePtr& each) {
    if (!each || each->state.load() != Message::open) return;
    const bool awaited = std::find(awaited_.begin(), awaited_.end(), each.get()) != awaited_.end();
    if (!first || awaited) first = each;
  };
  for (Peer& peer : peers_) {
    for (const MessagePtr& each : peer.unread) look(each);
    for (const MessagePtr& each : peer.sending) look(each);
    if (peer.incoming) look(peer.incoming->receive);
  }
  for (const MessagePtr& each : receives_) look(each);
  for (const MessagePtr& each : flying_) look(each);
  for (const Reading& each : reading_) look(each.message.receive);
  return first;
}

// Move all that can be moved now, but of each long message only a part; whether anything was.
bool Messages::move() {
  bool moved = settle();
  for (const int number : order_) {
    Peer& peer = peers_[number];
    while (put(number, peer)) moved = true;
    for (size_t at = 0; peer.unread_count && at < kLong; ++at)
      if (MessagePtr& message = peer.unread[at];
          message && peer.read[at].value.load(std::memory_order_acquire)) {
        --peer.unread_count;
        end(std::exchange(message, nullptr), Message::done);
        moved = true;
      }
  }
  // a receive from any source changes the order of the peers
  for (size_t at = 0; at < order_.size();) {
    const int number = order_[at];
    if (take(number))
      moved = true;
    else
      ++at;
  }
  for (auto each = reading_.begin(); each != reading_.end();) {
    moved = true;
    const auto one = each++;
    if (read_part(*one)) reading_.erase(one);
  }
  update();
  return moved;
}

// Put the next part of the first message for a peer; false if there is none, or no room for it.
bool Messages::put(int number, Peer& peer) {
  if (peer.sending.empty()) return false;
  const MessagePtr message = peer.sending.front();
  if (!(peer.here ? put_here(peer, *message) : put_there(number, peer, message))) return false;
  if (peer.sending.empty() || peer.sending.front() != message) return true;
  if (message->moved == message->bytes) {
    peer.sending.pop_front();
    end(message, Message::done);
  }
  return true;
}

bool Messages::put_here(Peer& peer, Message& message) {
  if (!message.moved && peer.pid && message.bytes > kShort && message.bytes < kLarge) {
    if (peer.unread_count == kLong) return false;
    Record* const record = room(peer, sizeof(uint64_t));
    if (!record) return false;
    size_t at = 0;
    while (peer.unread[at]) ++at;
    peer.read[at].value.store(0, std::memory_order_relaxed);
    const auto address = reinterpret_cast<uint64_t>(message.data);
    record->size = message.bytes;
    record->kind = Record::address;
    record->tag = static_cast<uint32_t>(message.tag);
    record->number = at;
    std::memcpy(record->payload, &address, sizeof address);
    peer.unread[at] = std::move(peer.sending.front());
    ++peer.unread_count;
    peer.sending.pop_front();
    publish(peer, record, sizeof address);
    return true;
  }
  const size_t part = std::min({message.bytes - message.moved, ring_ / 4 - sizeof(Record), kPart});
  Record* const record = room(peer, part);
  if (!record) return false;
  record->size = message.bytes;
  record->kind = Record::bytes;
  record->tag = static_cast<uint32_t>(message.tag);
  if (part) std::memcpy(record->payload, message.data + message.moved, part);
  message.moved += part;
  publish(peer, record, part);
  return true;
}

// Room in a ring for a record with so many bytes, null if there is none yet.
Messages::Record* Messages::room(Peer& peer, size_t payload) {
  const size_t needed = aligned(sizeof(Record) + payload, kLine);
  while (true) {
    const size_t at = peer.put % ring_, rest = ring_ - at;
    // and of the next record's word
    const size_t total = (needed > rest ? rest : needed) + kLine;
    if (peer.put + total > peer.space + ring_) {
      peer.space = peer.taken->value.load(std::memory_order_acquire);
      if (peer.put + total > peer.space + ring_) return nullptr;
    }
    auto* const record = reinterpret_cast<Record*>(peer.outbox + at);
    if (needed <= rest) return record;
    record->kind = Record::skip;
    publish(peer, record, rest - sizeof(Record));
  }
}

// Let the receiver find a record (P2).
void Messages::publish(Peer& peer, Record* record, size_t payload) {
  peer.put += aligned(sizeof(Record) + payload, kLine);
  auto* const next = reinterpret_cast<Record*>(peer.outbox + peer.put % ring_);
  next->word.store(0, std::memory_order_relaxed);
  record->word.store(payload + 1, std::memory_order_release);
  ring(*peer.bell);
}

// Wake whoever sleeps on a bell, once what it is to see has been written (P5).
void Messages::ring(Counter& bell) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (bell.sleepers.load(std::memory_order_relaxed)) weft::add(bell, 1);
}

bool Messages::put_there(int number, Peer& peer, const MessagePtr& message) {
  while (true) {
    const size_t part = std::min(
        {message->bytes - message->moved, kTurn, kWindow - std::min(kWindow, peer.under_way)});
    if (!part && message->bytes) return false;
    const Label label{Kind::tagged, message->moved ? uint8_t{0} : uint8_t{1},
                      static_cast<uint64_t>(message->tag), message->bytes};
    message->under_way.fetch_add(1);
    const auto done = [this, message] {  // by the driver, which may hold other locks
      message->under_way.fetch_sub(1);
      ring(*bell_);
    };
    const size_t from = message->moved;
    message->moved += part;
    peer.under_way += part;
    if (network_->put(number, label, {{message->data + from, 1, part, part}}, 2 * kTurn, done))
      message->under_way.fetch_sub(1);
    if (message->moved < message->bytes) continue;
    peer.sending.pop_front();
    if (message->under_way.load())
      flying_.push_back(message);
    else
      end(message, Message::done);
    return true;
  }
}

// End the sends to other hosts of which the network has taken all.
bool Messages::settle() {
  const size_t before = flying_.size();
  for (size_t at = 0; at < flying_.size();) {
    if (flying_[at]->under_way.load()) {
      ++at;
      continue;
    }
    end(flying_[at], Message::done);
    flying_.erase(flying_.begin() + static_cast<std::ptrdiff_t>(at));
  }
  return flying_.size() != before;
}

// Take the next record of a peer of this host, if there is one and a receive may need it (P4).
bool Messages::take(int number) {
  Peer& peer = peers_[number];
  if (!peer.here || !(peer.incoming || peer.receives || any_source_)) return false;
  auto* const record = reinterpret_cast<Record*>(peer.inbox + peer.got % ring_);
  const uint64_t word = record->word.load(std::memory_order_acquire);
  if (!word) return false;
  const size_t payload = word - 1;
  if (record->kind != Record::skip) {
    if (!peer.incoming && !expect(number, static_cast<int>(record->tag), record->size,
                                  record->kind == Record::bytes)) {
      trouble_.store("no memory for a message that nobody receives yet", std::memory_order_release);
      return false;
    }
    Incoming& incoming = *peer.incoming;
    if (record->kind == Record::address) {
      std::memcpy(&incoming.address, record->payload, sizeof incoming.address);
      incoming.number = record->number + 1;
      incoming.arrived = incoming.size;
    } else {
      const Target place{incoming.place() + incoming.arrived, payload, incoming.size};
      if (payload) copy_rows(&place, 1, record->payload, payload, 1, payload);
      incoming.arrived += payload;
    }
  }
  peer.got += aligned(sizeof(Record) + payload, kLine);
  if (peer.got - peer.reported >= ring_ / 8) report(peer);
  if (peer.incoming && peer.incoming->arrived == peer.incoming->size) {
    Incoming whole = std::move(*peer.incoming);
    peer.incoming.reset();
    arrive(number, std::move(whole));
  }
  return true;
}

void Messages::report(Peer& peer) {
  peer.reported = peer.got;
  peer.taken_there->value.store(peer.got, std::memory_order_release);
  ring(*peer.bell);
}

// Begin to take a message, with a place for its bytes if they come now; false if there is no
// memory.
bool Messages::expect(int number, int tag, size_t size, bool with_place) {
  Incoming made{tag, size};
  const auto fits = [&](const MessagePtr& receive) { return receive->bytes >= size; };
  const auto receive = meant(number, tag);
  if (with_place && (receive == receives_.end() || !fits(*receive))) {
    made.kept.reset(new (std::nothrow) char[size + 1]);
    if (!made.kept) return false;
  }
  favour_others(number);
  made.receive = match(number, tag);
  peers_[number].incoming = std::move(made);
  return true;
}

// Deliver a whole message, or keep it for a receive to come.
void Messages::arrive(int number, Incoming message) {
  // a receive may have come after the first part
  if (!message.receive) message.receive = match(number, message.tag);
  if (message.receive)
    deliver_unless_read(number, std::move(message));
  else
    peers_[number].unexpected.push_back(std::move(message));
}

// Deliver a message with a receive, once it has been read.
void Messages::deliver_unless_read(int number, Incoming message) {
  const bool fits = message.size <= message.receive->bytes;
  if (message.number && fits) return reading_.push_back({number, std::move(message)});
  if (message.number) has_been_read(peers_[number], message.number);
  deliver(number, message);
}

// Read a part of a long message; whether that was the last (P3).
bool Messages::read_part(Reading& reading) {
  Incoming& message = reading.message;
  Message& receive = *message.receive;
  const size_t part = std::min(kTurn, message.size - receive.moved);
  const int error = read_memory(peers_[reading.peer].pid, message.address + receive.moved, part,
                                receive.data + receive.moved, part, 1, part);
  if (mesh_->failed()) {  // its sender may have had other uses for the memory
    receives_.push_front(message.receive);
    ++receives_like(receive);
    return true;
  }
  if (error) trouble_.store(std::strerror(error), std::memory_order_release);
  if (error || (receive.moved += part) < message.size) return false;
  has_been_read(peers_[reading.peer], message.number);
  deliver(reading.peer, message);
  return true;
}

void Messages::has_been_read(Peer& peer, uint64_t number) {
  peer.read_there[number - 1].value.store(1, std::memory_order_release);
  ring(*peer.bell);
}

void Messages::deliver(int number, Incoming& message) {
  Message& receive = *message.receive;
  receive.source = number;
  receive.size = message.size;
  if (message.held) release(number, std::exchange(message.held, 0));
  if (message.size > receive.bytes) return end(message.receive, Message::failed);
  if (message.kept && message.size) std::memcpy(receive.data, message.kept.get(), message.size);
  end(message.receive, Message::done);
}

// The first receive for a message of this tag from a peer.
std::list<MessagePtr>::iterator Messages::meant(int peer, int tag) {
  return std::find_if(receives_.begin(), receives_.end(), [&](const MessagePtr& receive) {
    return receive->tag == tag && (receive->peer == peer || receive->peer == Message::kAny);
  });
}

// Remove and return it.
MessagePtr Messages::match(int peer, int tag) {
  const auto found = meant(peer, tag);
  if (found == receives_.end()) return nullptr;
  const MessagePtr receive = *found;
  receives_.erase(found);
  --receives_like(*receive);
  return receive;
}

// The number of outstanding receives from the source of this one.
size_t& Messages::receives_like(const Message& receive) {
  return receive.peer == Message::kAny ? any_source_ : peers_[receive.peer].receives;
}

// Give the other peers priority in the next receive from any source.
void Messages::favour_others(int peer) {
  const auto at = std::find(order_.begin(), order_.end(), peer);
  std::rotate(at, at + 1, order_.end());
}

void Messages::end(const MessagePtr& message, Message::State state) {
  message->state.store(state, std::memory_order_release);
  // its waiting thread may sleep, while this one moves for all
  ring(*bell_);
  if (!message->watched) return;
  ended_.push_back(message);
  progress_->hurry();
}

// Let the progress thread know whether there are messages to move.
void Messages::update() {
  bool pending = !receives_.empty() || !flying_.empty() || !reading_.empty() || !ended_.empty();
  for (auto peer = peers_.begin(); !pending && peer != peers_.end(); ++peer)
    pending = peer->incoming || !peer->sending.empty() || peer->unread_count;
  if (pending == pending_) return;
  pending_ = pending;
  if (pending)
    progress_->issue();
  else
    progress_->begin();
}

// Messages of other hosts

Transport::Place Messages::place(int number, const Label& label, size_t bytes, std::string& why) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[number];
  if (closed()) return {Transport::Place::nowhere};
  const bool first = label.lane == 1;
  why = "a part of a message that does not follow the part before it";
  if (first == peer.incoming.has_value() || label.call >> 31) return {Transport::Place::invalid};
  if (first && !expect(number, static_cast<int>(label.call), label.digest, true)) {
    why = "a message of " + std::to_string(label.digest) + " bytes, for which there is no memory";
    return {Transport::Place::invalid};
  }
  Incoming& incoming = *peer.incoming;
  if (label.digest != incoming.size || bytes > incoming.size - incoming.arrived)
    return {Transport::Place::invalid};
  return {Transport::Place::here, {incoming.place() + incoming.arrived, 1, bytes, bytes}};
}

void Messages::raise(int number, size_t bytes) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[number];
  Incoming& incoming = *peer.incoming;
  incoming.arrived += bytes;
  if (incoming.receive || peer.receives || any_source_)
    release(number, bytes);
  else
    incoming.held += bytes;
  if (incoming.arrived < incoming.size) return;
  Incoming whole = std::move(incoming);
  peer.incoming.reset();
  if (!closed()) arrive(number, std::move(whole));
  update();
}

void Messages::credit(int number, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[number];
  peer.under_way -= std::min<uint64_t>(bytes, peer.under_way);
  while (put(number, peer)) {
  }
  update();
}

// Let a peer on another host send so many bytes more (P4).
void Messages::release(int number, size_t bytes) {
  Peer& peer = peers_[number];
  peer.delivered += bytes;
  if (peer.delivered < kWindow / 4) return;
  network_->credit(number, std::exchange(peer.delivered, 0));
}

}  // namespace weft
