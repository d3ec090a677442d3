#include "hosts/regions.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace weft {

size_t Regions::Layout::bytes() const {
  size_t total = run;
  for (const Axis& axis : axes) total *= axis.size;
  return total;
}

std::string Regions::Layout::fault(size_t size) const {
  uint64_t total = run, end = 0, last;
  bool fits = run && !__builtin_add_overflow(offset, run, &end);
  for (const Axis& axis : axes)
    fits = fits && axis.size && !__builtin_mul_overflow(total, axis.size, &total) &&
           !__builtin_mul_overflow(axis.size - 1, axis.stride, &last) &&
           !__builtin_add_overflow(end, last, &end);
  if (fits && total <= kPiece && end <= size) return "";
  return "a one-sided call for " + (fits ? std::to_string(total) : "no or too many") +
         " bytes, up to byte " + (fits ? std::to_string(end) : "2**64") + " of memory of " +
         std::to_string(size);
}

std::optional<Strided> Regions::Layout::rows(char* base) const {
  Strided found{base + offset, 1, run, run};
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    if (found.rows == 1 && axis->stride == found.row_bytes)
      found.stride = found.row_bytes *= axis->size;
    else if (found.rows == 1)
      found.rows = axis->size, found.stride = axis->stride;
    else if (axis->stride == found.rows * found.stride)
      found.rows *= axis->size;
    else
      return {};
  }
  return found;
}

Strided Regions::Layout::gathered(char* base, std::shared_ptr<char[]>& adjacent) const {
  if (const auto found = rows(base)) return *found;
  const size_t size = bytes();
  adjacent.reset(new char[size]);
  copy(base, adjacent.get(), true).run();
  return {adjacent.get(), 1, size, size};
}

StridedCopy Regions::Layout::copy(char* base, char* adjacent, bool to_adjacent) const {
  std::vector<size_t> shape, strides, dense(axes.size() + 1, 1);
  for (const Axis& axis : axes) {
    shape.push_back(axis.size);
    strides.push_back(axis.stride);
  }
  shape.push_back(run);
  strides.push_back(1);
  for (size_t i = axes.size(); i-- > 0;) dense[i] = dense[i + 1] * shape[i + 1];
  char* const elements = base + offset;
  return to_adjacent ? StridedCopy(adjacent, elements, 1, shape, dense, strides)
                     : StridedCopy(elements, adjacent, 1, shape, strides, dense);
}

Regions::Regions(std::vector<int> peers, std::shared_ptr<Mesh> mesh,
                 std::shared_ptr<Network> network, int spins)
    : others_(std::move(peers)),
      mesh_(std::move(mesh)),
      network_(std::move(network)),
      spins_(spins),
      peers_(others_.empty() ? 0 : *std::max_element(others_.begin(), others_.end()) + 1) {
  network_->serve(Kind::region, this);
}

Regions::~Regions() { network_->serve(Kind::region, nullptr); }

void Regions::hold(uint64_t memory, std::shared_ptr<Mapping> part) {
  const std::lock_guard lock(holding_);
  regions_[memory] = {std::move(part), {others_.begin(), others_.end()}};
}

void Regions::release(int peer, uint64_t memory) {
  const std::lock_guard lock(holding_);
  const auto found = regions_.find(memory);
  if (found == regions_.end()) return;
  found->second.peers.erase(peer);
  if (found->second.peers.empty()) regions_.erase(found);
}

void Regions::release_all(int peer) {
  const std::lock_guard lock(holding_);
  for (auto each = regions_.begin(); each != regions_.end();) {
    each->second.peers.erase(peer);
    each = each->second.peers.empty() ? regions_.erase(each) : std::next(each);
  }
}

void Regions::close() {
  const std::lock_guard lock(holding_);
  regions_.clear();
}

// The layouts of pieces of two views, none of more than kPiece bytes and kAxes axes.
void Regions::cut(const Runs& runs, size_t from, size_t dst, size_t src,
                  std::vector<std::pair<Layout, Layout>>& pieces) {
  const auto& axes = runs.dimensions;
  if (from == axes.size()) {
    for (size_t at = 0; at < runs.run; at += kPiece) {
      const size_t part = std::min(kPiece, runs.run - at);
      pieces.emplace_back(Layout{dst + at, part, {}}, Layout{src + at, part, {}});
    }
    return;
  }
  const Dimension& outer = axes[from];
  size_t inner = runs.run;  // bytes of an index of it
  for (size_t i = from + 1; i < axes.size(); ++i) inner *= axes[i].size;
  const size_t most = axes.size() - from <= kAxes ? kPiece / inner : 0;
  for (size_t at = 0; at < outer.size && most; at += most) {
    Layout to{dst + at * outer.dst, runs.run, {}}, of{src + at * outer.src, runs.run, {}};
    for (size_t i = from; i < axes.size(); ++i) {
      const size_t size = i == from ? std::min(most, outer.size - at) : axes[i].size;
      to.axes.push_back({size, axes[i].dst});
      of.axes.push_back({size, axes[i].src});
    }
    pieces.emplace_back(std::move(to), std::move(of));
  }
  for (size_t at = 0; at < outer.size && !most; ++at)
    cut(runs, from + 1, dst + at * outer.dst, src + at * outer.src, pieces);
}

// Send the requests of all pieces, and wait for the answers, as far as they are needed.
template <class Send>
Regions::Outcome Regions::send_all(int number, size_t pieces, const Limit& limit, Send send) {
  Outcome outcome{WaitStatus::none, number};
  for (size_t at = 0; at < pieces && outcome.status == WaitStatus::none; ++at) {
    Requested made;
    {
      const std::lock_guard lock(peers_[number].requesting);
      made = send(at);
    }
    if (!made.answered) return part_with(number, made, limit);
    outcome.last = made.number;
    const uint64_t allowed = at + 1 == pieces ? 0 : std::min<uint64_t>(made.number, kUnanswered);
    outcome.status = wait(number, made.number - allowed, limit);
  }
  return outcome;
}

Regions::Outcome Regions::put(int number, const Copy& copy, const Change& change,
                              const Limit& limit) {
  std::vector<std::pair<Layout, Layout>> pieces;
  if (const Runs runs(copy.item, copy.shape, copy.strides, copy.local_strides); runs.bytes)
    cut(runs, 0, copy.offset, 0, pieces);
  else if (change.memory)
    return this->change(number, change, limit);
  if (change.memory)
    if (const Outcome others = settle(number, limit); others.status != WaitStatus::none)
      return others;
  return send_all(number, pieces.size(), limit, [&](size_t at) {
    const auto& [there, here] = pieces[at];
    const Change then = at + 1 == pieces.size() ? change : Change{};
    return request(number, puts, copy.memory, there, then, &here, copy.local);
  });
}

Regions::Outcome Regions::get(int number, const Copy& copy, const Limit& limit) {
  std::vector<std::pair<Layout, Layout>> pieces;
  if (const Runs runs(copy.item, copy.shape, copy.local_strides, copy.strides); runs.bytes)
    cut(runs, 0, 0, copy.offset, pieces);
  Peer& peer = peers_[number];
  return send_all(number, pieces.size(), limit, [&](size_t at) {
    const auto& [here, there] = pieces[at];
    {
      const std::lock_guard getting(getting_);
      peer.gets.push_back({peer.requests.load() + 1, landing(here, copy.local)});
    }
    return request(number, gets, copy.memory, there, {}, nullptr, nullptr);
  });
}

Regions::Outcome Regions::change(int number, const Change& change, const Limit& limit) {
  if (const Outcome others = settle(number, limit); others.status != WaitStatus::none)
    return others;
  return send_all(number, 1, limit, [&](size_t) {
    return request(number, changes, 0, {}, change, nullptr, nullptr);
  });
}

// End a call by its last request, which needs no answer: once the connection has taken the caller's
// memory.
Regions::Outcome Regions::part_with(int number, const Requested& made, const Limit& limit) {
  {
    const std::lock_guard lock(settling_);
    const auto of_peer = [&](const Unsettled& each) { return each.peer == number; };
    const auto found = std::find_if(unsettled_.begin(), unsettled_.end(), of_peer);
    if (found == unsettled_.end())
      unsettled_.push_back({number, made.number, false});
    else if (found->last < made.number)
      *found = {number, made.number, false};
  }
  if (!made.taken) {
    const uint64_t last = ask(number);
    return {wait(number, last, limit), number, last};
  }
  if (mesh_->failed()) return {WaitStatus::failed, number};
  return {network_->silent(number) ? WaitStatus::left : WaitStatus::none, number};
}

Regions::Outcome Regions::settle(int but, const Limit& limit) {
  for (const Unsettled& each : asked(but)) {
    const WaitStatus status = wait(each.peer, each.last, limit);
    if (status != WaitStatus::none && status != WaitStatus::left) return {status, each.peer};
  }
  return {WaitStatus::none, but};
}

// The peers, but for one, that have yet to carry out what they need not answer; they are asked.
std::vector<Regions::Unsettled> Regions::asked(int but) {
  const std::lock_guard lock(settling_);
  std::vector<Unsettled> found, kept;
  for (Unsettled each : unsettled_) {
    if (answered(each.peer) >= each.last || network_->silent(each.peer)) continue;
    if (each.peer != but) {
      if (!each.asked) each = {each.peer, ask(each.peer), true};
      found.push_back(each);
    }
    kept.push_back(each);
  }
  unsettled_ = std::move(kept);
  return found;
}

// Ask a peer for an answer to all requests; the number of that to wait for.
uint64_t Regions::ask(int number) {
  const std::lock_guard lock(peers_[number].requesting);
  return request(number, changes, 0, {}, {}, nullptr, nullptr).number;
}

// Send a request, and the bytes of a put from `local`; for a thread that holds `requesting`.
Regions::Requested Regions::request(int number, Operation operation, uint64_t memory,
                                    const Layout& layout, const Change& change, const Layout* local,
                                    char* base) {
  Peer& peer = peers_[number];
  const Request head{layout.offset,
                     layout.run,
                     layout.axes.size(),
                     change.memory,
                     change.set,
                     change.selection.start,
                     change.selection.count,
                     change.selection.step,
                     change.value};
  const size_t axes = layout.axes.size() * sizeof(Axis), begin = sizeof head + axes,
               bytes = local ? layout.bytes() : 0;
  const bool within = bytes <= kInline;
  const auto message = std::make_shared<std::vector<char>>(begin + (within ? bytes : 0));
  std::memcpy(message->data(), &head, sizeof head);
  if (axes) std::memcpy(message->data() + sizeof head, layout.axes.data(), axes);
  std::vector<Strided> parts{{message->data(), 1, message->size(), message->size()}};
  std::shared_ptr<char[]> adjacent;
  if (local && within) {
    local->copy(base, message->data() + begin, true).run();
  } else if (local) {
    parts.push_back(local->gathered(base, adjacent));
  }
  const uint64_t request = peer.requests.fetch_add(1) + 1;
  const bool answered = !change.memory;
  const uint8_t lane = answered ? operation : operation | kNoAnswer;
  network_->need(number);
  const bool taken = network_->put(number, {Kind::region, lane, request, memory}, parts, 2 * kPiece,
                                   [message, adjacent] {});
  return {request, answered, taken};
}

WaitStatus Regions::wait(int number, uint64_t request, const Limit& limit) {
  if (answered(number) >= request) return WaitStatus::none;
  WaitStatus status;
  const auto is = [&](bool condition, WaitStatus found) {
    return condition && (status = found, true);
  };
  const auto ended = [&] {
    return is(limit.interrupted(), WaitStatus::interrupted) ||
           is(mesh_->failed(), WaitStatus::failed);
  };
  const auto gone = [&] { return is(network_->silent(number), WaitStatus::left); };
  while (true) {
    const uint64_t before = answered(number);
    Deadline deadline(limit.timeout);
    status = WaitStatus::timeout;
    const Network::Patience patience{spins_ ? kPollsAlone : 0, kPolls};
    if (network_->wait_until(peers_[number].answered, request, true, patience, yields_after(spins_),
                             deadline, ended, gone))
      return WaitStatus::none;
    if (status != WaitStatus::timeout || answered(number) == before) return status;
  }
}

// Where the bytes of a layout in memory at `base` arrive.
Regions::Landing Regions::landing(const Layout& layout, char* base) {
  Landing made;
  if (const auto rows = layout.rows(base)) {
    made.rows = *rows;
    return made;
  }
  const size_t bytes = layout.bytes();
  made.adjacent.resize(bytes);
  made.rows = {made.adjacent.data(), 1, bytes, bytes};
  made.scatter = layout.copy(base, made.adjacent.data(), false);
  return made;
}

Transport::Place Regions::place(int number, const Label& label, size_t bytes, std::string& why) {
  using Place = Transport::Place;
  Peer& peer = peers_[number];
  peer.label = label;
  if (peer.rejected) return {Place::nowhere};
  if (label.lane == value || label.lane == done) {
    const std::lock_guard lock(getting_);
    const bool gets = !peer.gets.empty() && peer.gets.front().number <= label.call;
    why = "an answer that no one-sided call waits for";
    peer.latest = Peer::answer;
    if (label.call <= peer.answered.value.load() || label.call > peer.requests.load() ||
        gets != (label.lane == value))
      return {Place::invalid};
    const Strided rows = gets ? peer.gets.front().landing.rows : Strided{};
    if (bytes != rows.bytes() || (gets && peer.gets.front().number != label.call))
      return {Place::invalid};
    return {Place::here, rows};
  }
  why = "a one-sided call of " + std::to_string(bytes) + " bytes";
  if (peer.landing && operation(label) == puts) {
    peer.latest = Peer::data;
    return bytes == peer.landing->rows.bytes() ? Place{Place::here, peer.landing->rows}
                                               : Place{Place::invalid};
  }
  peer.latest = Peer::request;
  if (bytes < sizeof(Request) || bytes > sizeof(Request) + kAxes * sizeof(Axis) + kInline)
    return {Place::invalid};
  peer.message.resize(bytes);
  return {Place::here, {peer.message.data(), 1, bytes, bytes}};
}

void Regions::raise(int number, size_t bytes) {
  Peer& peer = peers_[number];
  if (peer.rejected) return;
  if (peer.latest == Peer::answer) {
    if (peer.label.lane == value) {
      std::unique_lock lock(getting_);
      const Get get = std::move(peer.gets.front());
      peer.gets.pop_front();
      lock.unlock();
      if (get.landing.scatter) get.landing.scatter->run();
    }
    return set(peer.answered, peer.label.call);
  }
  std::string why;
  if (peer.latest == Peer::data) {
    if (peer.landing->scatter) peer.landing->scatter->run();
    peer.landing.reset();
    why = complete(number);
  } else {
    why = carry_out(number, bytes);
  }
  if (why.empty()) return;
  peer.rejected = true;
  network_->garbled(number, why);
}

// Carry out a request, as far as its bytes have arrived; why it is not valid, "" if it is.
std::string Regions::carry_out(int number, size_t bytes) {
  Peer& peer = peers_[number];
  const uint8_t operation = this->operation(peer.label);
  Request& request = peer.carried_out;
  std::memcpy(&request, peer.message.data(), sizeof request);
  size_t begin = sizeof request;
  if (request.axes > kAxes || begin + request.axes * sizeof(Axis) > bytes)
    return "a one-sided call with " + std::to_string(request.axes) + " dimensions";
  Layout layout{request.offset, request.run, std::vector<Axis>(request.axes)};
  if (request.axes)
    std::memcpy(layout.axes.data(), peer.message.data() + begin, request.axes * sizeof(Axis));
  begin += request.axes * sizeof(Axis);
  const size_t within = bytes - begin;
  if (operation == changes && !layout.run && !within) return complete(number);
  if (operation != puts && operation != gets)
    return "a one-sided call of kind " + std::to_string(operation);
  const auto memory = part(peer.label.digest);
  if (!memory)
    return "a one-sided call for memory " + std::to_string(peer.label.digest) +
           ", which there is not";
  if (std::string why = layout.fault(memory->bytes()); !why.empty()) return why;
  if (operation == gets) return answer_with_value(number, layout, memory), "";
  if (!within) {
    peer.landing = landing(layout, memory->base());
    peer.landing->part = memory;
    return "";
  }
  if (within != layout.bytes())
    return std::to_string(within) + " bytes in place of " + std::to_string(layout.bytes());
  layout.copy(memory->base(), peer.message.data() + begin, false).run();
  return complete(number);
}

// Make the change of a request, if it has one; why it is not valid, "" if it is.
std::string Regions::make_change(const Request& request) {
  if (!request.counters) return "";
  const auto memory = part(request.counters);
  const uint64_t all = memory ? memory->bytes() / sizeof(Counter) : 0;
  uint64_t last = 0;
  const bool valid = memory && request.step &&
                     !__builtin_mul_overflow(request.count - 1, request.step, &last) &&
                     !__builtin_add_overflow(last, request.start, &last) && last < all;
  if (!valid && (request.count || !memory))
    return "a change of " + std::to_string(request.count) + " counters from " +
           std::to_string(request.start) + " on, step " + std::to_string(request.step) + ", of " +
           std::to_string(all);
  auto* const counters = reinterpret_cast<Counter*>(memory->base());
  for (uint64_t i = 0; i < request.count; ++i)
    (request.set ? weft::set : weft::add)(counters[request.start + i * request.step],
                                          request.value);
  return "";
}

void Regions::answer_with_value(int number, const Layout& layout, std::shared_ptr<Mapping> part) {
  std::shared_ptr<char[]> adjacent;
  const Strided rows = layout.gathered(part->base(), adjacent);
  network_->put(number, {Kind::region, value, peers_[number].label.call, 0}, {rows}, kPiece,
                [part, adjacent] {});
}

// Make the change of the request that is carried out, and answer it if need be; why it is not
// valid, "" if it is.
std::string Regions::complete(int number) {
  Peer& peer = peers_[number];
  std::string why = make_change(peer.carried_out);
  if (peer.label.lane == operation(peer.label))
    network_->put(number, {Kind::region, done, peer.label.call, 0}, {Strided{}}, kPiece, [] {});
  return why;
}

std::shared_ptr<Mapping> Regions::part(uint64_t memory) const {
  const std::lock_guard lock(holding_);
  const auto found = regions_.find(memory);
  return found == regions_.end() ? nullptr : found->second.part;
}

}  // namespace weft
