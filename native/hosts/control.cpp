#include "hosts/control.hpp"

#include <algorithm>

namespace weft {

namespace {

bool is_failure(const std::string& event) { return event[0] == 'a'; }
bool is_farewell(const std::string& event) { return event[0] == 'f'; }

}  // namespace

std::vector<int> link_ranks(const std::vector<int>& hosts, int here, int there) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < hosts.size(); ++rank)
    if (hosts[rank] == here) ranks.push_back(static_cast<int>(rank));
  const auto first = static_cast<std::ptrdiff_t>(static_cast<size_t>(there) % ranks.size());
  std::rotate(ranks.begin(), ranks.begin() + first, ranks.end());
  return ranks;
}

Control::Control(int rank, std::vector<int> hosts, std::shared_ptr<Mesh> mesh,
                 std::shared_ptr<Network> network, Regions& regions)
    : rank_(rank),
      hosts_(std::move(hosts)),
      mesh_(std::move(mesh)),
      network_(std::move(network)),
      regions_(regions) {
  const int here = hosts_[rank_];
  for (const int there : hosts_)
    if (there != here && !links_.count(there))
      links_[there] = {link_ranks(hosts_, here, there), link_ranks(hosts_, there, here)};
  mesh_->attach(this);
  network_->serve_control(this);
}

Control::~Control() {
  network_->serve_control(nullptr);
  mesh_->attach(nullptr);
}

// The first of these ranks that has not left, -1 if all have.
int Control::first_present(const std::vector<int>& order) const {
  const auto stays = [&](int rank) { return rank == rank_ || !mesh_->left(rank); };
  const auto found = std::find_if(order.begin(), order.end(), stays);
  return found == order.end() ? -1 : *found;
}

void Control::post(int rank, const std::string& event) {
  const std::lock_guard lock(mutex_);
  if (is_failure(event) || is_farewell(event)) events_.insert_or_assign({rank, event[0]}, event);
  if (rank == rank_ && is_failure(event)) network_->send_control_to_connected(rank, event);
  if (rank == rank_ && is_farewell(event)) leaving_ = true;
  for (const auto& [host, link] : links_) {
    const int other = first_present(link.there);
    if (first_present(link.here) != rank_ || other < 0) continue;
    network_->need(other);
    network_->send_control(other, rank, event);
  }
}

void Control::left(int rank) {
  const std::lock_guard lock(mutex_);
  if (leaving_) return;
  const auto before = [&](const std::vector<int>& order) {  // the one that is the first now
    const auto last = std::find(order.begin(), order.end(), first_present(order));
    return std::find(order.begin(), last, rank) != last;
  };
  for (const auto& [host, link] : links_)
    if (first_present(link.here) == rank_ && (before(link.here) || before(link.there)))
      send_again(link);
}

void Control::send_again(const Link& link) {
  const int other = first_present(link.there);
  if (other < 0) return;
  network_->need(other);
  for (const auto& [of, event] : events_) network_->send_control(other, of.first, event);
}

bool Control::receive(int peer, int rank, const std::string& event) {
  const bool valid = rank >= 0 && rank < static_cast<int>(hosts_.size()) &&
                     hosts_[rank] == hosts_[peer] && hosts_[rank] != hosts_[rank_];  // E4
  return valid && mesh_->deliver(rank, event);
}

}  // namespace weft
