#include "hosts/network.hpp"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>
#include <utility>

#include "hosts/packed.hpp"

namespace weft {

namespace {

// Do not interrupt threads that compute: where all cores are busy this thread waits some
// milliseconds to be scheduled. A sandbox may refuse it, and a policy that the user chose stays.
void yield_to_computations() {
  const sched_param normal{};
  if (sched_getscheduler(0) == SCHED_OTHER) sched_setscheduler(0, SCHED_BATCH, &normal);
}

void signal(int descriptor) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(descriptor, &one, sizeof one);
}

void clear(int descriptor) {
  uint64_t times;
  [[maybe_unused]] const ssize_t n = read(descriptor, &times, sizeof times);
}

// Of an event of a rank.
Label label_of(int rank) { return {Kind::control, 0, static_cast<uint64_t>(rank), 0}; }

std::string bytes_of(uint64_t number) {
  return {reinterpret_cast<const char*>(&number), sizeof number};
}

}  // namespace

Network::Network(int rank, size_t ranks, Calls calls, std::shared_ptr<Mesh> mesh,
                 const Connect& connect)
    : rank_(rank),
      calls_(std::move(calls)),
      mesh_(std::move(mesh)),
      peers_(ranks),
      bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      trouble_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  try {
    if (bell_ < 0 || trouble_ < 0)
      throw std::system_error(errno, std::generic_category(), "eventfd");
    transport_ = connect(*this);
    thread_ = std::thread(&Network::work, this);
  } catch (...) {
    if (bell_ >= 0) ::close(bell_);
    if (trouble_ >= 0) ::close(trouble_);
    throw;
  }
}

Network::~Network() {
  stop();
  disown();
}

void Network::stop() {
  stopping_.store(true, std::memory_order_release);
  signal(bell_);
  if (thread_.joinable()) thread_.join();
}

void Network::disown() {
  transport_->disown();
  if (bell_ >= 0) ::close(std::exchange(bell_, -1));
  if (trouble_ >= 0) ::close(std::exchange(trouble_, -1));
}

void Network::need(int peer) {
  if (peers_[peer].needed.exchange(true, std::memory_order_acq_rel)) return;
  const std::lock_guard lock(mutex_);
  report({Trouble::unconnected, peer, 0, ""});
}

void Network::connect(int peer, int fd) {
  const std::lock_guard order(announcing_);
  std::unique_lock lock(announcements_mutex_);
  std::vector<Announcement> made = unannounced();
  sent_texts_.clear();  // this peer will know the texts of the latest calls only
  forget_ = true;
  lock.unlock();
  send(std::move(made));
  std::string messages;
  for (const Announcement& one : history_) messages += message(one, false);
  if (finishing_.load(std::memory_order_seq_cst)) messages += end_message();
  if (aborted_.load(std::memory_order_acquire) && mesh_->failed())
    messages += transport_->message(label_of(rank_), mesh_->failure_event());
  peers_[peer].needed.store(true, std::memory_order_seq_cst);
  peers_[peer].connected.store(true, std::memory_order_release);
  transport_->connect(peer, fd, std::make_shared<const std::string>(std::move(messages)));
  nudge();
}

std::list<Network::Expected> Network::blank(size_t count) {
  std::list<Expected> found;
  {
    const std::lock_guard lock(mutex_);
    while (found.size() < count && !spare_.empty())
      found.splice(found.end(), spare_, spare_.begin());
  }
  found.resize(count);
  return found;
}

void Network::begin(uint64_t call, const CallText& text, std::list<Expected> expected) {
  {
    const std::lock_guard lock(mutex_);
    for (auto each = expected.begin(); each != expected.end();) {
      const auto one = each++;
      auto& of_sender = peers_[one->channel->sender].expected;
      one->next = 0;
      of_sender.splice(of_sender.end(), expected, one);
      incomplete_.fetch_add(1, std::memory_order_acq_rel);
    }
    begun_ = call;
  }
  std::unique_lock lock(announcements_mutex_);
  if (sent_texts_.size() == kTexts && !sent_texts_.count(text.identity)) {
    sent_texts_.clear();
    forget_ = true;
  }
  std::shared_ptr<const std::string>& text_sent = sent_texts_[text.identity];
  const bool known = text_sent != nullptr;
  if (!known) text_sent = std::make_shared<const std::string>(text.text);
  const uint8_t lane = std::exchange(forget_, false) ? kForget : 0;
  announcements_.push_back(
      {{Kind::call, lane, call, text.digest}, text.identity, text_sent, known});
  announces_.store(true, std::memory_order_seq_cst);
  lock.unlock();
  if (!known)
    announce();  // before its rows, which keep what follows them from a peer that is a call behind
  else if (dozing_.load(std::memory_order_seq_cst))
    ring();
}

void Network::announce_refusal(uint64_t call, uint64_t times, std::string why) {
  {
    const std::lock_guard lock(announcements_mutex_);
    announcements_.push_back({{Kind::refusal, 0, call, times},
                              0,
                              std::make_shared<const std::string>(std::move(why)),
                              false});
    announces_.store(true, std::memory_order_seq_cst);
  }
  if (dozing_.load(std::memory_order_seq_cst)) ring();
}

// Announce the calls that have begun here; whether there were any.
bool Network::announce() {
  if (!announces_.load(std::memory_order_acquire)) return false;
  const std::lock_guard order(announcing_);
  std::unique_lock lock(announcements_mutex_);
  std::vector<Announcement> made = unannounced();
  lock.unlock();
  const bool any = !made.empty();
  send(std::move(made));
  return any;
}

// What is to be announced; for a thread that holds `announcements_mutex_`.
std::vector<Network::Announcement> Network::unannounced() {
  announces_.store(false, std::memory_order_seq_cst);
  return std::exchange(announcements_, {});
}

// Announce calls to connected peers; for a thread that holds `announcing_`.
void Network::send(std::vector<Announcement> made) {
  if (made.empty()) return;
  std::string messages;
  for (Announcement& one : made) {
    messages += message(one, one.known);
    one.label.lane = 0;
    if (history_.size() == kHistory) history_.pop_front();
    history_.push_back(std::move(one));
  }
  const auto shared = std::make_shared<const std::string>(std::move(messages));
  for (size_t peer = 0; peer < peers_.size(); ++peer)
    if (peers_[peer].connected) transport_->announce(static_cast<int>(peer), shared);
}

// The message of an announcement for peers, which may know its text.
std::string Network::message(const Announcement& one, bool known) const {
  return transport_->message(one.label, bytes_of(one.identity) + (known ? "" : *one.text));
}

void Network::serve(Kind kind, Service* service) {
  const std::lock_guard driving(driving_);
  (kind == Kind::tagged ? tagged_ : regions_) = service;
}

void Network::serve_control(ControlReceiver* receiver) {
  const std::lock_guard driving(driving_);
  control_ = receiver;
}

void Network::send_control(int peer, int rank, const std::string& event) {
  const std::string made = transport_->message(label_of(rank), event);
  transport_->announce(peer, std::make_shared<const std::string>(made));
}

void Network::send_control_to_connected(int rank, const std::string& event) {
  for (size_t peer = 0; peer < peers_.size(); ++peer)
    if (peers_[peer].connected) send_control(static_cast<int>(peer), rank, event);
}

void Network::credit(int peer, uint64_t bytes) {
  const std::string made = transport_->message({Kind::credit, 0, bytes, 0}, "");
  transport_->announce(peer, std::make_shared<const std::string>(made));
}

Transport::Place Network::place(int number, const Label& label, size_t bytes) {
  if (label.kind != Kind::rows) return place_message(number, label, bytes);
  Peer& peer = peers_[number];
  peer.latest = Peer::rows;
  place_kept(number);
  Transport::Place found;
  if (peer.kept.empty()) found = place_rows(number, label, bytes);
  if (found.state == Transport::Place::later) return keep(number, label, bytes);
  peer.early_since = 0;
  return found;
}

Transport::Place Network::place_message(int number, const Label& label, size_t bytes) {
  Service* const service = label.kind == Kind::tagged ? tagged_ : regions_;
  if (!service) return {Transport::Place::nowhere};
  Peer& peer = peers_[number];
  std::string why;
  const Transport::Place place = service->place(number, label, bytes, why);
  if (place.state == Transport::Place::invalid) garbled(number, why);
  peer.latest = Peer::message;
  peer.service = service;
  peer.bytes = bytes;
  return place;
}

// A place for rows that are too early, if they have been for long (R6).
Transport::Place Network::keep(int number, const Label& label, size_t bytes) {
  Peer& peer = peers_[number];
  if (!peer.early_since) peer.early_since = now();
  const int64_t patience = peer.kept_bytes + bytes <= kKept ? kPatience : kLongPatience;
  if (now() - peer.early_since < patience) return {};
  try {
    peer.kept.push_back({label, std::vector<char>(bytes)});
  } catch (const std::bad_alloc&) {
    return {};
  }
  peer.kept_bytes += bytes;
  peer.latest = Peer::kept_rows;
  kept_.fetch_add(1, std::memory_order_acq_rel);
  return {Transport::Place::here, {peer.kept.back().bytes.data(), 1, bytes, bytes}};
}

// Place kept rows of a peer that are not too early any more; whether there were any.
bool Network::place_kept(int number) {
  Peer& peer = peers_[number];
  bool any = false;
  while (!peer.kept.empty() && peer.kept.front().whole) {
    Kept& first = peer.kept.front();
    const Transport::Place place = place_rows(number, first.label, first.bytes.size());
    if (place.state == Transport::Place::later) break;
    if (place.state == Transport::Place::here) {
      scatter(first.bytes.data(), place.rows);
      raise_rows(number);
    }
    peer.kept_bytes -= first.bytes.size();
    peer.kept.pop_front();
    kept_.fetch_sub(1, std::memory_order_acq_rel);
    any = true;
  }
  if (any && peer.kept.empty()) peer.early_since = 0;
  return any;
}

Transport::Place Network::place_rows(int number, const Label& label, size_t bytes) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[number];
  if (peer.troubled) return {Transport::Place::nowhere};
  if (label.call > begun_) {
    const auto text = peer.by_digest.find(label.digest);
    if (peer.noted < label.call && text != peer.by_digest.end())
      calls_.note(number, label.call, label.digest, text->second);
    peer.noted = std::max(peer.noted, label.call);
    return {};
  }
  const auto of_call = [&](const Expected& each) { return each.call == label.call; };
  const auto any = std::find_if(peer.expected.begin(), peer.expected.end(), of_call);
  if (any == peer.expected.end() || any->digest != label.digest) {
    peer.troubled = true;
    report({Trouble::mismatch, number, label.call, ""});
    return {Transport::Place::nowhere};
  }
  const auto found = std::find_if(any, peer.expected.end(), [&](const Expected& each) {
    return of_call(each) && each.channel->lane == label.lane;
  });
  const auto wrong = [&](const std::string& why) -> Transport::Place {
    peer.troubled = true;
    report({Trouble::garbled, number, label.call, why});
    return {Transport::Place::invalid};
  };
  if (found == peer.expected.end())
    return wrong("rows for lane " + std::to_string(label.lane) +
                 ", which receives no more rows in call " + std::to_string(label.call));
  for (const int rank : found->channel->gate)  // R1
    if (calls_.under_way(rank).value.load(std::memory_order_acquire) < label.call &&
        !(rank != rank_ && mesh_->left(rank))) {
      gate_ = {rank, label.call};
      return {};
    }
  const Strided& rows = found->places[found->next];
  const auto packed = found->channel->packed[found->next];
  if (bytes != (packed ? packed_bytes(*packed, rows) : rows.bytes()))
    return wrong(std::to_string(bytes) + " bytes in place of " + std::to_string(rows.rows) +
                 (packed ? " packed rows of " : " rows of ") + std::to_string(rows.row_bytes) +
                 " bytes");
  peer.current = found;
  if (!packed) return {Transport::Place::here, rows};
  peer.packed.resize(bytes);
  return {Transport::Place::here, {peer.packed.data(), 1, bytes, bytes}};
}

void Network::raise(int number) {
  Peer& peer = peers_[number];
  if (peer.latest == Peer::rows) return raise_rows(number);
  if (peer.latest == Peer::message && (peer.service == tagged_ || peer.service == regions_))
    peer.service->raise(number, peer.bytes);
  if (peer.latest == Peer::kept_rows) peer.kept.back().whole = true;
}

void Network::raise_rows(int number) {
  Peer& peer = peers_[number];
  Expected& current = *peer.current;  // only this thread, the driver, removes it
  if (const auto dtype = current.channel->packed[current.next])
    unpack(*dtype, peer.packed.data(), current.places[current.next]);
  for (Counter* counter : current.channel->raised[current.next]) {
    counter->call.store(current.mark, std::memory_order_relaxed);  // S5
    weft::add(*counter, 1);
  }
  if (++current.next < current.places.size()) return;
  const std::lock_guard lock(mutex_);
  current.channel.reset();
  spare_.splice(spare_.end(), peer.expected, peer.current);
  incomplete_.fetch_sub(1, std::memory_order_acq_rel);
}

void Network::announced(int number, const Label& label, std::string_view text) {
  switch (label.kind) {
    case Kind::credit:
      if (tagged_) tagged_->credit(number, label.call);
      return;
    case Kind::control:
      if (control_ && !control_->receive(number, static_cast<int>(label.call), std::string(text)))
        garbled(number, "an event of rank " + std::to_string(label.call));
      return;
    case Kind::end:
      peers_[number].over.store(true, std::memory_order_release);
      if (regions_) regions_->silent(number);
      return end(number);  // acknowledges all rows
    default:
      note_call(number, label, text);
  }
}

// Note a call that a peer makes, or refuses.
void Network::note_call(int number, const Label& label, std::string_view text) {
  if (text.size() < sizeof(uint64_t)) return garbled(number, "a call without its text");
  uint64_t identity;
  std::copy_n(text.data(), sizeof identity, reinterpret_cast<char*>(&identity));
  text.remove_prefix(sizeof identity);
  if (label.kind == Kind::refusal)
    return calls_.note_refusal(number, label.call, label.digest, std::string(text));
  Peer& peer = peers_[number];
  if (label.lane == kForget) {
    peer.texts.clear();
    peer.by_digest.clear();
  }
  if (!text.empty()) {
    if (peer.texts.size() > kTexts + kHistory) return garbled(number, "too many texts of calls");
    peer.texts.emplace(identity, text);
    peer.by_digest.insert_or_assign(label.digest, std::string(text));
  }
  const auto known = peer.texts.find(identity);
  if (known == peer.texts.end()) return garbled(number, "a call of an unknown text");
  calls_.note(number, label.call, label.digest, known->second);
}

void Network::ended(int number, const std::string& broken) {
  if (aborted_.load(std::memory_order_acquire)) return;
  if (broken.empty()) {
    const bool expected = gone(number);
    peers_[number].over.store(true, std::memory_order_release);
    transport_->end(number);
    if (regions_) regions_->silent(number);
    if (!expected) mesh_->disconnected(number);  // R7
  } else {
    const std::lock_guard lock(mutex_);
    report({Trouble::broken, number, 0, broken});
  }
}

void Network::garbled(int number, const std::string& why) {
  const std::lock_guard lock(mutex_);
  report({Trouble::garbled, number, 0, why});
}

void Network::report(Trouble trouble) {
  troubles_.push_back(std::move(trouble));
  signal(trouble_);
}

std::vector<Trouble> Network::troubles() {
  const std::lock_guard lock(mutex_);
  clear(trouble_);
  return std::exchange(troubles_, {});
}

// Whether nothing more arrives from a peer: it has ended what it sends, or left.
bool Network::gone(size_t peer) const {
  const int number = static_cast<int>(peer);
  return ended(number) || mesh_->left(number);
}

bool Network::expects_more() {
  const std::lock_guard lock(mutex_);
  for (size_t peer = 0; peer < peers_.size(); ++peer)
    if (!peers_[peer].expected.empty() && (!gone(peer) || kept_.load())) return true;
  return false;
}

// Drive, unless another thread does, until `over`, an abort, or the time limit.
template <class Over>
void Network::drive_until(double seconds, Over over) {
  Deadline deadline(nanoseconds(seconds));
  while (!over() && !deadline.passed()) {
    const Inside inside(*this);
    const std::unique_lock driving(driving_, std::try_to_lock);
    if (driving)
      receive(kTick);
    else
      std::this_thread::sleep_for(std::chrono::milliseconds(kTick));
  }
}

// Say, once, that this rank sends a peer nothing more but control messages (R7).
void Network::end(int number) {
  if (peers_[number].ended_here.exchange(true, std::memory_order_acq_rel)) return;
  transport_->announce(number, std::make_shared<const std::string>(end_message()));
}

std::string Network::end_message() const { return transport_->message({Kind::end, 0, 0, 0}, ""); }

void Network::finish(double seconds, double linger) {
  const auto aborted = [&] { return aborted_.load(std::memory_order_acquire); };
  drive_until(seconds, [&] { return aborted() || !expects_more(); });
  announce();
  finishing_.store(true, std::memory_order_seq_cst);
  {
    const std::lock_guard driving(driving_);  // what has arrived has been answered
    for (size_t peer = 0; peer < peers_.size(); ++peer)
      if (peers_[peer].needed.load(std::memory_order_seq_cst)) end(static_cast<int>(peer));
  }
  drive_until(linger, [&] {
    for (size_t peer = 0; peer < peers_.size() && !aborted(); ++peer)
      if (peers_[peer].needed.load(std::memory_order_acquire) && !gone(peer)) return false;
    return true;
  });
}

void Network::abort() {
  announce();
  aborted_.store(true, std::memory_order_release);
  transport_->abort();
  const std::lock_guard last(driving_);  // R4
}

void Network::close(double seconds) {
  for (size_t peer = 0; peer < peers_.size(); ++peer) transport_->end(static_cast<int>(peer));
  std::vector<bool> open(peers_.size(), true);
  const auto closed = [&] {
    const std::unique_lock driving(driving_, std::try_to_lock);
    for (size_t peer = 0; peer < peers_.size() && driving; ++peer) {
      const int number = static_cast<int>(peer);
      const bool connecting = peers_[peer].needed.load() && !peers_[peer].connected.load();
      open[peer] = transport_->open(number) || (connecting && !mesh_->left(number));
    }
    return std::none_of(open.begin(), open.end(), [](bool each) { return each; });
  };
  constexpr int kWaits = 10;
  for (int wait = 0; wait < kWaits; ++wait) {
    const uint64_t before = transport_->bytes_sent();
    drive_until(seconds, closed);
    if (closed() || transport_->bytes_sent() == before) break;
  }
  abort();
}

void Network::ring() { signal(bell_); }

void Network::nudge() {
  const bool again = nudged_.exchange(true, std::memory_order_seq_cst);
  const int state = state_.load(std::memory_order_seq_cst);
  // a thread that watches sleeps on after a nudge that found nothing to do
  if (state == watching ? early() || transport_->resumes() : state == parked && !again) ring();
}

// Receive and send what can be now; false if another thread does. `closed` is a gate for which rows
// wait, if there is one.
bool Network::drive(Gate& closed) {
  const std::unique_lock driving(driving_, std::try_to_lock);
  if (!driving) return false;
  constexpr int kRounds = 64;  // after which there may be something to announce
  gate_.rank = -1;
  for (int i = 0; i < kRounds && receive(0); ++i) {
  }
  closed = gate_;
  return true;
}

// The thread of this network: it drives unless callers do, and announces calls.
void Network::work() {
  yield_to_computations();
  uint64_t seen = 0;
  while (!stopping_.load(std::memory_order_acquire)) {
    const bool hurry = nudged_.exchange(false, std::memory_order_seq_cst);
    const bool announced = announce();
    const uint64_t turns = turns_.load(std::memory_order_acquire);
    const bool others = inside_.load(std::memory_order_acquire) > 0 || turns != seen;
    seen = turns;
    Gate closed{-1, 0};
    const bool watches = (hurry || !others) && drive(closed);
    if (closed.rank >= 0) {
      Deadline soon(kTick * 1'000'000);
      const auto stopped = [&] {
        return stopping_.load(std::memory_order_acquire) || mesh_->failed();
      };
      weft::wait_until(calls_.under_way(closed.rank), Compare::greater_equal, closed.call, 0, soon,
                       stopped);
      continue;
    }
    pollfd polled[] = {{bell_, POLLIN, 0}, {transport_->descriptor(), POLLIN, 0}};
    const bool long_sleep = watches || (inside_.load(std::memory_order_acquire) && !announced);
    state_.store(watches ? watching : parked, std::memory_order_seq_cst);
    dozing_.store(long_sleep, std::memory_order_seq_cst);
    const bool due = nudged_.load(std::memory_order_seq_cst) ||
                     (long_sleep && announces_.load(std::memory_order_seq_cst)) ||
                     (watches && transport_->resumes());
    const int watch = transport_->waiting() ? kTick : -1;  // R6
    ::poll(polled, watches ? 2 : 1, due ? 0 : watches ? watch : long_sleep ? kLook : kTick);
    state_.store(awake, std::memory_order_seq_cst);
    dozing_.store(false, std::memory_order_seq_cst);
    if (polled[0].revents) clear(bell_);
  }
}

}  // namespace weft
