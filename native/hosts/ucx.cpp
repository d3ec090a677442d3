#include "hosts/ucx.hpp"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "hosts/full_sockets.hpp"

namespace weft {

namespace {

constexpr unsigned kMessage = 0;  // UCX's number of weft's active messages
constexpr size_t kMostTexts = 16 << 20;
constexpr size_t kLongestAddress = 1 << 20;
constexpr uint64_t kOvertaking = 1 << 16;  // messages that may overtake one
constexpr unsigned kLooks = 16;            // polls of which one looks for all events
// of epoll, beside the numbers of peers
constexpr uint64_t kWoken = ~uint64_t{0}, kArrived = kWoken - 1;
// what an abort may take to send the ends of what was sent
constexpr std::chrono::milliseconds kFlushing{500};

// A message without rows, in front of its text.
struct TextHeader {
  Kind kind;
  uint8_t lane;
  uint8_t reserved[6];
  uint64_t call, digest, size;
};
static_assert(sizeof(TextHeader) == 32);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "headers are in the order of the host");

// What a rank tells of itself, in front of its address.
struct Introduction {
  uint64_t key, size;
};

uint64_t random_key() {
  uint64_t key;
  if (getrandom(&key, sizeof key, 0) != sizeof key) throw std::runtime_error("getrandom");
  return key;
}

void gather(const Strided& rows, char* to) {
  for (size_t row = 0; row < rows.rows; ++row, to += rows.row_bytes)
    std::memcpy(to, rows.base + row * rows.stride, rows.row_bytes);
}

}  // namespace

UcxTransport::UcxTransport(size_t peers, int rank, Receiver& receiver)
    : ucp_(ucp::library()), rank_(rank), process_(getpid()), receiver_(receiver), peers_(peers) {
  for (size_t number = 0; number < peers; ++number) {
    peers_[number].number = static_cast<int>(number);
    peers_[number].transport = this;
  }
  try {
    begin();
  } catch (...) {
    close_all();
    disown();
    throw;
  }
}

UcxTransport::~UcxTransport() {
  if (getpid() == process_) close_all();  // a child has no part in UCX's connections
  disown();
}

void UcxTransport::begin() {
  const auto check = [&](ucp::Status status, const char* what) {
    if (status != ucp::kOk)
      throw std::runtime_error(std::string("UCX cannot ") + what + ": " +
                               ucp_.status_string(status));
  };
  context_ = ucp::context(peers_.size());
  ucp::WorkerParams params{};
  params.mask = ucp::WorkerParams::kThreadMode | ucp::WorkerParams::kFlags;
  params.thread_mode = ucp::WorkerParams::kSerialized;
  params.flags = ucp::WorkerParams::kIgnoreRequestLeak;  // of what an abort leaves
  check(ucp_.worker_create(context_, &params, &worker_), "make a worker");
  ucp::HandlerParams handler{};
  handler.mask = ucp::HandlerParams::kId | ucp::HandlerParams::kFlags |
                 ucp::HandlerParams::kCallback | ucp::HandlerParams::kArgument;
  handler.id = kMessage;
  handler.flags = ucp::HandlerParams::kWholeMessage | ucp::HandlerParams::kPersistentData;
  handler.callback = on_message;
  handler.argument = this;
  check(ucp_.worker_set_am_recv_handler(worker_, &handler), "receive active messages");
  int arrivals = -1;
  check(ucp_.worker_get_efd(worker_, &arrivals), "wait for messages");
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  watch(wake_, kWoken);
  watch(arrivals, kArrived);
}

void UcxTransport::watch(int fd, uint64_t which) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = which;
  if (epoll_ < 0 || fd < 0 || epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event))
    throw std::system_error(errno, std::generic_category(), "connections to other hosts");
}

void UcxTransport::connect(int number, int fd, std::shared_ptr<const std::string> first) {
  Peer& peer = peers_[number];
  Outgoing& outgoing = texts(peer, std::move(first));
  bool ended;
  {
    const std::lock_guard working(working_);
    peer.fd = fd;
    if (!worker_) return;
    peer.key_here = random_key();
    {
      const std::lock_guard lock(queueing_);
      peer.linked = true;
      ended = peer.ending.load(std::memory_order_acquire);
      connected_.push_back(&peer);
      peer.queue.push_front(&outgoing);
    }
    unsent_.fetch_add(1, std::memory_order_acq_rel);
    strangers_.fetch_add(1, std::memory_order_acq_rel);
    send_address(peer);
    watch(fd, static_cast<uint64_t>(number));
  }
  if (ended) send_end(peer);
  wake();
}

// Send a peer the address of this rank, and the key with which to send to it.
void UcxTransport::send_address(const Peer& peer) {
  ucp::WorkerAttributes found{};
  found.mask = ucp::WorkerAttributes::kAddress | ucp::WorkerAttributes::kAddressFlags;
  found.address_flags = ucp::WorkerAttributes::kNetworkOnly;  // never by shared memory
  if (const ucp::Status status = ucp_.worker_query(worker_, &found); status != ucp::kOk)
    throw std::runtime_error(std::string("UCX has no address: ") + ucp_.status_string(status));
  std::string text(sizeof(Introduction), 0);
  text.append(reinterpret_cast<const char*>(found.address), found.address_length);
  ucp_.worker_release_address(worker_, found.address);
  const Introduction introduction{peer.key_here, text.size() - sizeof introduction};
  std::memcpy(text.data(), &introduction, sizeof introduction);
  const ssize_t sent = ::send(peer.fd, text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  // a new connection takes some KiB, or is broken, as `learn_address` notices
  if (sent >= 0 && static_cast<size_t>(sent) < text.size())
    throw std::runtime_error("a connection does not take the address of UCX");
}

// Read what has arrived of a peer's address, and connect to the peer if that is all.
void UcxTransport::learn_address(Peer& peer) {
  char part[4096];
  Introduction introduction{};
  std::string broken;
  while (true) {
    size_t missing = sizeof introduction;
    if (peer.address.size() >= sizeof introduction) {
      std::memcpy(&introduction, peer.address.data(), sizeof introduction);
      missing += introduction.size;
    }
    if (introduction.size > kLongestAddress) broken = "an address of UCX that is too long";
    if (!broken.empty() || missing == peer.address.size()) break;
    const ssize_t n =
        recv(peer.fd, part, std::min(sizeof part, missing - peer.address.size()), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n <= 0) broken = n ? std::strerror(errno) : "it has sent no address of UCX";
    if (n > 0) peer.address.append(part, static_cast<size_t>(n));
  }
  ::close(std::exchange(peer.fd, -1));
  strangers_.fetch_sub(1, std::memory_order_acq_rel);
  if (aborted_.load(std::memory_order_acquire)) return;
  if (!broken.empty()) return receiver_.ended(peer.number, broken);
  peer.key_there = introduction.key;
  open(peer);
}

void UcxTransport::open(Peer& peer) {
  const std::lock_guard lock(working_);
  if (!worker_) return;
  ucp::EndpointParams params{};
  params.mask = ucp::EndpointParams::kAddress | ucp::EndpointParams::kErrorMode |
                ucp::EndpointParams::kErrorHandler;
  params.address =
      reinterpret_cast<const ucp::Address*>(peer.address.data() + sizeof(Introduction));
  params.error_mode = ucp::EndpointParams::kPeerErrors;
  params.error_handler = {on_failure, &peer};
  const ucp::Status status = ucp_.ep_create(worker_, &params, &peer.endpoint);
  if (status != ucp::kOk) {
    peer.endpoint = nullptr;
    fail(peer, status);
  }
  peer.address.clear();
  armed_.store(false, std::memory_order_release);
  queues_.store(true, std::memory_order_release);
}

bool UcxTransport::resumes() const {
  return !aborted_.load(std::memory_order_acquire) &&
         (!armed_.load(std::memory_order_acquire) || queues_.load(std::memory_order_acquire));
}

bool UcxTransport::put(int number, const Label& label, const std::vector<Strided>& rows, size_t,
                       std::function<void()> done) {
  Peer& peer = peers_[number];
  if (peer.ending.load(std::memory_order_acquire)) return true;
  Outgoing& outgoing = blank(peer, label, Content::rows, rows.size());
  outgoing.rows.assign(rows.begin(), rows.end());
  outgoing.done = std::move(done);
  return send(outgoing);
}

void UcxTransport::announce(int number, std::shared_ptr<const std::string> messages) {
  Peer& peer = peers_[number];
  if (peer.ending.load(std::memory_order_acquire)) return;
  send(texts(peer, std::move(messages)));
}

void UcxTransport::end(int number) {
  Peer& peer = peers_[number];
  {
    const std::lock_guard lock(queueing_);
    if (peer.ending.exchange(true, std::memory_order_acq_rel) || !peer.linked) return;
  }
  send_end(peer);
}

void UcxTransport::send_end(Peer& peer) {
  Outgoing& outgoing = blank(peer, {}, Content::end, 1);
  outgoing.rows.assign(1, {});
  ends_.fetch_add(1, std::memory_order_acq_rel);
  send(outgoing);
}

std::string UcxTransport::message(const Label& label, std::string_view text) const {
  size_t length = std::min(text.size(), longest_text(label.kind));
  // no part of a UTF-8 character
  while (length < text.size() && length && (text[length] & 0xc0) == 0x80) --length;
  const TextHeader header{label.kind, label.lane, {}, label.call, label.digest, length};
  std::string made(reinterpret_cast<const char*>(&header), sizeof header);
  return made.append(text.substr(0, length));
}

// A record of what is sent to a peer, with memory of an earlier one.
UcxTransport::Outgoing& UcxTransport::blank(Peer& peer, const Label& label, Content content,
                                            size_t messages) {
  Outgoing* found;
  {
    const std::lock_guard lock(queueing_);
    if (spare_.empty()) spare_.push_back(records_.emplace_back(std::make_unique<Outgoing>()).get());
    found = spare_.back();
    spare_.pop_back();
  }
  found->peer = &peer;
  Header header{};
  header.content = content;
  header.kind = label.kind;
  header.lane = label.lane;
  header.sender = static_cast<uint32_t>(rank_);
  header.call = label.call;
  header.digest = label.digest;
  found->headers.assign(messages, header);
  return *found;
}

// A record of messages without rows.
UcxTransport::Outgoing& UcxTransport::texts(Peer& peer,
                                            std::shared_ptr<const std::string> messages) {
  Outgoing& outgoing = blank(peer, {}, Content::texts, 1);
  const size_t size = messages->size();
  outgoing.rows.assign(1, {const_cast<char*>(messages->data()), 1, size, size});
  outgoing.texts = std::move(messages);
  return outgoing;
}

void UcxTransport::recycle(Outgoing& outgoing) {
  outgoing.done = {};
  outgoing.texts.reset();
  const std::lock_guard lock(queueing_);
  spare_.push_back(&outgoing);
}

// Send a record, or let the driver do so; whether its rows may be overwritten already.
bool UcxTransport::send(Outgoing& outgoing) {
  Peer& peer = *outgoing.peer;
  bool posted = false;
  unsent_.fetch_add(1, std::memory_order_acq_rel);
  if (const std::unique_lock working(working_, std::try_to_lock); working) {
    send_queued();
    posted = peer.endpoint || peer.failed || !worker_;
    if (posted && post(outgoing)) {
      recycle(outgoing);
      unsent_.fetch_sub(1, std::memory_order_acq_rel);
      return true;
    }
  }
  if (!posted) {
    const std::lock_guard lock(queueing_);
    peer.queue.push_back(&outgoing);
    queues_.store(true, std::memory_order_release);
  }
  wake();
  return false;
}

// Send what threads have left to the driver, to peers whose address is known.
void UcxTransport::send_queued() {
  if (!queues_.load(std::memory_order_acquire)) return;
  {
    const std::lock_guard lock(queueing_);
    queues_.store(false, std::memory_order_release);
    for (Peer* peer : connected_) {
      if (!peer->endpoint && !peer->failed) continue;
      queued_.insert(queued_.end(), peer->queue.begin(), peer->queue.end());
      peer->queue.clear();
    }
  }
  for (Outgoing* outgoing : queued_)
    if (post(*outgoing)) finished_.push_back(outgoing);
  queued_.clear();
}

// Give the messages of a record to UCX; whether they are sent, or dropped.
bool UcxTransport::post(Outgoing& outgoing) {
  Peer& peer = *outgoing.peer;
  size_t scattered = 0;
  for (const Strided& rows : outgoing.rows) scattered += rows.contiguous() ? 0 : rows.bytes();
  outgoing.gathered.resize(scattered);
  char* gathered = outgoing.gathered.data();
  ucp::RequestParams params{};
  params.mask = ucp::RequestParams::kCallback | ucp::RequestParams::kUserData;
  params.callback.sent = on_sent;
  params.user_data = &outgoing;
  const auto count = [&](ucp::StatusPointer started) {
    if (ucp::failed(started))
      fail(peer, ucp::status(started));
    else if (started)
      ++outgoing.under_way;
  };
  for (size_t i = 0; i < outgoing.rows.size() && peer.endpoint && !peer.failed; ++i) {
    const Strided& rows = outgoing.rows[i];
    const char* from = rows.base;
    if (!rows.contiguous()) {
      gather(rows, gathered);
      from = std::exchange(gathered, gathered + rows.bytes());
    }
    Header& header = outgoing.headers[i];
    header.number = peer.sent++;
    header.key = peer.key_there;
    count(ucp_.am_send_nbx(peer.endpoint, kMessage, &header, sizeof header, from, rows.bytes(),
                           &params));
  }
  const bool ends = outgoing.headers.front().content == Content::end;
  if (ends && peer.endpoint && !peer.failed) count(ucp_.ep_flush_nbx(peer.endpoint, &params));
  armed_.store(false, std::memory_order_release);
  if (outgoing.under_way) return false;
  if (ends) ends_.fetch_sub(1, std::memory_order_acq_rel);
  return true;
}

void UcxTransport::on_sent(void* request, ucp::Status, void* user_data) {
  Outgoing& outgoing = *static_cast<Outgoing*>(user_data);
  UcxTransport& self = *outgoing.peer->transport;
  self.ucp_.request_free(request);
  if (--outgoing.under_way) return;
  if (outgoing.headers.front().content == Content::end)
    self.ends_.fetch_sub(1, std::memory_order_acq_rel);
  self.finished_.push_back(&outgoing);
}

bool UcxTransport::poll() {
  if (strangers_.load(std::memory_order_acquire) || ++polls_ % kLooks == 0) return progress(0);
  return step();
}

bool UcxTransport::progress(int milliseconds) {
  if (step() || !arm()) return true;
  epoll_event events[16];
  const int count = epoll_wait(epoll_, events, 16, milliseconds);
  for (int i = 0; i < count; ++i) {
    const uint64_t which = events[i].data.u64;
    if (which == kWoken) {
      uint64_t times;
      [[maybe_unused]] const ssize_t n = read(wake_, &times, sizeof times);
      woken_.store(false, std::memory_order_seq_cst);
    } else if (which == kArrived) {
      armed_.store(false, std::memory_order_release);
    } else {
      learn_address(peers_[which]);
    }
  }
  return count > 0 && step();
}

// Let the descriptor be readable when there is something to do; false if there is already.
bool UcxTransport::arm() {
  if (armed_.load(std::memory_order_acquire)) return true;
  const std::lock_guard lock(working_);
  if (!worker_) return true;
  armed_.store(ucp_.worker_arm(worker_) == ucp::kOk, std::memory_order_release);
  return armed_.load(std::memory_order_relaxed);
}

// Receive and send what can be at once; whether anything was.
bool UcxTransport::step() {
  thread_local std::vector<Outgoing*> finished;
  thread_local std::vector<std::pair<int, std::string>> ended;
  finished.clear();
  ended.clear();
  bool any = false;
  {
    const std::lock_guard lock(working_);
    if (!worker_) return false;
    send_queued();
    if (ucp_.worker_progress(worker_)) {
      any = true;
      armed_.store(false, std::memory_order_release);
    }
    if (waiting())
      for (Peer* peer : connected_)
        if (peer->later) list(*peer);
    if (!arrived_.empty()) {
      delivering_.swap(arrived_);
      for (Peer* peer : delivering_) {
        peer->listed = false;
        any |= deliver(*peer);
      }
      delivering_.clear();
      waiting_.store(std::any_of(connected_.begin(), connected_.end(),
                                 [](const Peer* peer) { return peer->later; }),
                     std::memory_order_release);
    }
    report_failed();
    finished.swap(finished_);
    ended.swap(ended_);
  }
  for (Outgoing* outgoing : finished) {
    if (outgoing->done && !aborted_.load(std::memory_order_acquire)) outgoing->done();
    recycle(*outgoing);
    unsent_.fetch_sub(1, std::memory_order_acq_rel);
  }
  for (const auto& [peer, broken] : ended)
    if (!aborted_.load(std::memory_order_acquire)) receiver_.ended(peer, broken);
  return any || !finished.empty() || !ended.empty();
}

// Have a peer's messages delivered by this step.
void UcxTransport::list(Peer& peer) {
  if (!std::exchange(peer.listed, true)) arrived_.push_back(&peer);
}

ucp::Status UcxTransport::on_message(void* transport, const void* header, size_t header_length,
                                     void* data, size_t length, const ucp::ReceiveParams* params) {
  UcxTransport& self = *static_cast<UcxTransport*>(transport);
  Arrival arrival;
  if (header_length != sizeof arrival.header) return ucp::kOk;
  std::memcpy(&arrival.header, header, sizeof arrival.header);
  if (arrival.header.sender >= self.peers_.size()) return ucp::kOk;
  Peer& peer = self.peers_[arrival.header.sender];
  // a process that does not have the key is none of the ranks
  if (!peer.key_here || arrival.header.key != peer.key_here) return ucp::kOk;
  if (peer.over || self.aborted_.load(std::memory_order_acquire)) return ucp::kOk;
  self.list(peer);
  const uint64_t ahead = arrival.header.number - peer.received;
  if (ahead >= kOvertaking || (ahead < peer.inbox.size() && peer.inbox[ahead].state)) {
    self.garbled(peer, "a message of an unexpected number");
    return ucp::kOk;
  }
  const bool held =
      length && params->attributes & (ucp::ReceiveParams::kData | ucp::ReceiveParams::kRendezvous);
  if (length && !held) {
    self.garbled(peer, "a message that UCX does not keep");
    return ucp::kOk;
  }
  arrival.state = Arrival::arrived;
  arrival.data = held ? data : nullptr;
  arrival.length = length;
  arrival.with_sender = params->attributes & ucp::ReceiveParams::kRendezvous;
  if (peer.inbox.size() <= ahead) peer.inbox.resize(ahead + 1);
  peer.inbox[ahead] = arrival;
  return held ? ucp::kInProgress : ucp::kOk;
}

// Receive the messages of a peer that are next, as far as they have places; whether any.
bool UcxTransport::deliver(Peer& peer) {
  bool any = false;
  peer.later = false;
  while (!peer.over && !peer.inbox.empty() && receive(peer, peer.inbox.front())) {
    drop(peer.inbox.front());
    peer.inbox.pop_front();
    ++peer.received;
    any = true;
  }
  if (peer.over) {
    pass_on_events(peer);
    for (Arrival& arrival : peer.inbox) drop(arrival);
    peer.inbox.clear();
  }
  return any;
}

// Pass on the events behind a message that never becomes complete: the cause may be among them.
void UcxTransport::pass_on_events(Peer& peer) {
  for (Arrival& arrival : peer.inbox) {
    if (!peer.failed || arrival.state != Arrival::arrived || arrival.with_sender ||
        arrival.header.content != Content::texts)
      continue;
    receive_texts(peer, static_cast<const char*>(arrival.data), arrival.length, true);
    drop(arrival);
    arrival.state = Arrival::missing;
  }
}

// Receive the next message of a peer; whether that is complete.
bool UcxTransport::receive(Peer& peer, Arrival& arrival) {
  const Header& header = arrival.header;
  const bool rows = header.content == Content::rows;
  if (arrival.state == Arrival::missing || arrival.state == Arrival::fetching) return false;
  if (arrival.state == Arrival::arrived) {
    if (rows) {
      const Label label{header.kind, header.lane, header.call, header.digest};
      arrival.place = receiver_.place(peer.number, label, arrival.length);
      peer.later = arrival.place.state == Place::later;
      peer.over = peer.ended = arrival.place.state == Place::invalid;
      if (arrival.place.state != Place::here) return arrival.place.state == Place::nowhere;
    } else if (arrival.length > kMostTexts) {
      garbled(peer, "texts of " + std::to_string(arrival.length) + " bytes");
      return false;
    }
    if (arrival.with_sender && !arrival.data)
      peer.over = true;  // its sender is gone
    else if (arrival.with_sender)
      fetch(peer, arrival);
    if (arrival.state == Arrival::fetching || peer.over) return false;
  }
  const bool was_fetched = arrival.state == Arrival::fetched;
  const char* from = was_fetched ? peer.fetched.data() : static_cast<const char*>(arrival.data);
  if (rows) {
    if (!was_fetched || !arrival.place.rows.contiguous()) scatter(from, arrival.place.rows);
    receiver_.raise(peer.number);
  } else if (header.content == Content::texts) {
    receive_texts(peer, from, arrival.length);
  } else {
    peer.over = peer.ended = true;
    ended_.emplace_back(peer.number, "");
  }
  return true;
}

// Fetch what is still with its sender: rows in one piece into their place.
void UcxTransport::fetch(Peer& peer, Arrival& arrival) {
  const bool direct = arrival.header.content == Content::rows && arrival.place.rows.contiguous();
  if (!direct) peer.fetched.resize(arrival.length);
  ucp::RequestParams params{};
  params.mask = ucp::RequestParams::kCallback | ucp::RequestParams::kUserData;
  params.callback.received = on_fetched;
  params.user_data = &peer;
  const ucp::StatusPointer started = ucp_.am_recv_data_nbx(
      worker_, std::exchange(arrival.data, nullptr),
      direct ? arrival.place.rows.base : peer.fetched.data(), arrival.length, &params);
  armed_.store(false, std::memory_order_release);
  arrival.state = started && !ucp::failed(started) ? Arrival::fetching : Arrival::fetched;
  if (ucp::failed(started)) {
    peer.over = true;
    fail(peer, ucp::status(started));
  }
}

void UcxTransport::on_fetched(void* request, ucp::Status status, size_t, void* user_data) {
  Peer& peer = *static_cast<Peer*>(user_data);
  UcxTransport& self = *peer.transport;
  self.ucp_.request_free(request);
  peer.inbox.front().state = Arrival::fetched;  // only the first one is ever fetched
  if (status != ucp::kOk) {
    peer.over = true;
    self.fail(peer, status);
  }
  self.list(peer);
}

// Pass on the messages without rows of a peer, all or events.
void UcxTransport::receive_texts(Peer& peer, const char* texts, size_t size, bool only_events) {
  for (const char* const end = texts + size; texts < end;) {
    TextHeader header{};
    if (static_cast<size_t>(end - texts) < sizeof header)
      return garbled(peer, "a part of the header of a text");
    std::memcpy(&header, texts, sizeof header);
    texts += sizeof header;
    if (!has_text(header.kind))
      return garbled(peer,
                     "a message of unknown kind " + std::to_string(static_cast<int>(header.kind)));
    if (header.size > longest_text(header.kind) || header.size > static_cast<size_t>(end - texts))
      return garbled(peer, "a text of " + std::to_string(header.size) + " bytes");
    const Label label{header.kind, header.lane, header.call, header.digest};
    if (!only_events || header.kind == Kind::control)
      receiver_.announced(peer.number, label, {texts, header.size});
    texts += header.size;
  }
}

void UcxTransport::garbled(Peer& peer, const std::string& why) {
  peer.over = peer.ended = true;
  receiver_.garbled(peer.number, why);
}

// Give back to UCX what a message holds.
void UcxTransport::drop(Arrival& arrival) {
  if (arrival.data) ucp_.am_data_release(worker_, std::exchange(arrival.data, nullptr));
}

void UcxTransport::on_failure(void* peer, ucp::Endpoint, ucp::Status status) {
  Peer& failed = *static_cast<Peer*>(peer);
  failed.transport->fail(failed, status);
}

// A peer cannot be reached any more; `report_failed` tells of it.
void UcxTransport::fail(Peer& peer, ucp::Status status) {
  if (std::exchange(peer.failed, true)) return;
  peer.failure = status;
  failed_.push_back(&peer);
}

// Report peers that have failed; rows that are still with them are lost.
void UcxTransport::report_failed() {
  for (Peer* peer : failed_) {
    pass_on_events(*peer);
    for (Arrival& arrival : peer->inbox)
      if (arrival.with_sender) drop(arrival);
    const bool hung_up = peer->failure == ucp::kConnectionReset;
    if (!peer->ended)
      ended_.emplace_back(peer->number, hung_up ? "" : ucp_.status_string(peer->failure));
    queues_.store(true, std::memory_order_release);  // what waits is dropped
  }
  failed_.clear();
}

// End all use of UCX. Nothing arrives in anybody's memory once the worker is gone.
void UcxTransport::close_all() {
  const std::lock_guard lock(working_);
  aborted_.store(true, std::memory_order_release);
  if (worker_) {
    send_queued();
    const auto deadline = std::chrono::steady_clock::now() + kFlushing;
    while (ends_.load(std::memory_order_acquire) && failed_.empty() &&
           std::chrono::steady_clock::now() < deadline)
      if (!ucp_.worker_progress(worker_)) sched_yield();
    for (Peer* peer : connected_)
      for (Arrival& arrival : peer->inbox) drop(arrival);
    // UCX tells a peer over TCP of its end, and waits without a limit until the socket takes that
    shut_full_sockets(epoll_);
    ucp::RequestParams by_force{};
    by_force.mask = ucp::RequestParams::kFlags;
    by_force.flags = ucp::RequestParams::kCloseByForce;
    for (Peer* peer : connected_)
      if (peer->endpoint) ucp_.ep_close_nbx(std::exchange(peer->endpoint, nullptr), &by_force);
    ucp_.worker_destroy(std::exchange(worker_, nullptr));
  }
  if (context_) ucp_.cleanup(std::exchange(context_, nullptr));
  unsent_.store(0, std::memory_order_release);
}

void UcxTransport::abort() {
  for (const Peer& peer : peers_) end(peer.number);
  aborted_.store(true, std::memory_order_release);
  wake();
  close_all();
}

void UcxTransport::wake() {
  if (woken_.exchange(true, std::memory_order_seq_cst)) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_, &one, sizeof one);
}

void UcxTransport::disown() {
  for (Peer& peer : peers_)
    if (peer.fd >= 0) ::close(std::exchange(peer.fd, -1));
  if (epoll_ >= 0) ::close(std::exchange(epoll_, -1));
  if (wake_ >= 0) ::close(std::exchange(wake_, -1));
}

}  // namespace weft
