// Events of ranks (failures, farewells, memory without tensors) between hosts. For every two hosts
// one rank of each, its link rank for the other, has a connection to the other's link rank. It
// sends by that the events of its host's ranks, which all reach it by the mesh; the one that
// receives an event passes it on to its host's ranks.
//
// E1  The link rank of a host for another one is the first in a fixed order that has not left. A
//     rank that leaves sends what it has to send as a link rank, and takes over no more.
// E2  Where a link rank at either end has left, the next one connects, and the link rank of each
//     host sends again the failures and farewells of its host: handled twice they change nothing.
//     News of memory may be lost then; it is kept until the world ends.
// E3  A rank sends its own failure by all of its connections, too, before it hangs up.
// E4  An event is valid only from a rank of the host of the rank that it is about.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "hosts/network.hpp"
#include "hosts/regions.hpp"
#include "memory/mesh.hpp"

namespace weft {

// The ranks of host `here` in the order in which they are its link rank for host `there`: each once
// those before it have left.
std::vector<int> link_ranks(const std::vector<int>& hosts, int here, int there);

class Control : public Outside, private ControlReceiver {
 public:
  // `hosts` has the host of each rank, numbered from 0.
  Control(int rank, std::vector<int> hosts, std::shared_ptr<Mesh> mesh,
          std::shared_ptr<Network> network, Regions& regions);
  ~Control() override;

  void post(int rank, const std::string& event) override;
  void left(int rank) override;
  void dropped(int rank, uint64_t memory) override { regions_.release(rank, memory); }

 private:
  // The ranks of this host and of another one in their orders for each other.
  struct Link {
    std::vector<int> here, there;
  };

  bool receive(int peer, int rank, const std::string& event) override;
  int first_present(const std::vector<int>& order) const;
  void send_again(const Link& link);

  const int rank_;
  const std::vector<int> hosts_;
  const std::shared_ptr<Mesh> mesh_;
  const std::shared_ptr<Network> network_;
  Regions& regions_;
  std::mutex mutex_;  // of the following
  std::map<int, Link> links_;
  // the failures and farewells of this host, by rank and kind
  std::map<std::pair<int, char>, std::string> events_;
  bool leaving_ = false;
};

}  // namespace weft
