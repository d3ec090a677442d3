// The symmetric memory of this rank for ranks on other hosts, and theirs for it: put, get, and
// changes of counters. The driver of the peer carries them out, whatever the peer does meanwhile.
//
// W1  A rank carries out the requests of a peer in their order. The answer to one, once it is done,
//     answers those before it as well.
// W2  A request names memory by the number of the call that made it, equal on all ranks, and a
//     layout in it. The receiver checks both, so no message reads or writes anything but the
//     symmetric memory of its world.
// W3  A rank's part of memory is kept until no rank on another host has a tensor in it.
// W4  The caller's memory of a request is used until it is answered, or the network is aborted; if
//     it needs no answer, until the connection has taken it.
// W5  A change of counters needs no answer: by W1 its peer has what was put there before. Peers are
//     asked whether they have carried out what they need not answer before counters of another rank
//     are changed, before a barrier, and before they learn that this rank has dropped memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "hosts/network.hpp"
#include "kernels/strided.hpp"
#include "memory/mesh.hpp"
#include "memory/segment.hpp"
#include "memory/signal_array.hpp"
#include "memory/signals.hpp"

namespace weft {

class Regions : public Service {
 public:
  // Of counters of a peer: an addition, or that they are set. Memory 0: there is none.
  struct Change {
    uint64_t memory = 0;
    bool set = false;
    Selection selection{};
    uint64_t value = 0;
  };
  // Elements of one shape in a peer's part of memory and in this process; strides count elements of
  // `item` bytes, the offset bytes.
  struct Copy {
    uint64_t memory, offset;
    char* local;
    size_t item;
    std::vector<size_t> shape, strides, local_strides;
  };

  // `peers` are the ranks on other hosts.
  Regions(std::vector<int> peers, std::shared_ptr<Mesh> mesh, std::shared_ptr<Network> network,
          int spins);
  ~Regions() override;

  // Let peers use this rank's part of memory (W3).
  void hold(uint64_t memory, std::shared_ptr<Mapping> part);
  // A peer has no tensor in memory any more, or in none since it has left.
  void release(int peer, uint64_t memory);
  void release_all(int peer);
  // Keep no memory for peers any more.
  void close();

  static constexpr int kNobody = -1;
  // How requests are waited for: `timeout` nanoseconds for each answer; `interrupted` is called
  // from time to time.
  struct Limit {
    int64_t timeout;
    std::function<bool()> interrupted;
  };
  // How requests have ended. `left`: the peer answers nothing more.
  struct Outcome {
    WaitStatus status = WaitStatus::none;
    int peer = kNobody;  // of which it is told
    uint64_t last = 0;   // the request of it for whose answer the caller's memory waits, if any
  };
  // Make requests of a peer, and wait for the answers; with a change after the copy only until the
  // caller's memory may be used again, and other peers are settled (W5).
  Outcome put(int peer, const Copy& copy, const Change& change, const Limit& limit);
  Outcome get(int peer, const Copy& copy, const Limit& limit);
  Outcome change(int peer, const Change& change, const Limit& limit);
  // Wait until peers have carried out what they were sent, all of them or all but one (W5).
  Outcome settle(int but, const Limit& limit);
  // Whether they have; if not, they soon will.
  bool settled() { return asked(kNobody).empty(); }
  // Wait for the answer to a request, and all before it.
  WaitStatus wait(int peer, uint64_t request, const Limit& limit);
  // The latest request that a peer has answered.
  uint64_t answered(int peer) const {
    return peers_[peer].answered.value.load(std::memory_order_acquire);
  }

 private:
  static constexpr size_t kPiece = 1 << 20;   // bytes of a request, at most
  static constexpr size_t kInline = 4 << 10;  // bytes of a put in the message of its request
  static constexpr size_t kAxes = 8;          // of a request
  static constexpr size_t kUnanswered = 64;   // requests of a call

  enum Operation : uint8_t { puts = 1, gets, changes, value, done };
  static constexpr uint8_t kNoAnswer = 0x80;  // in the lane of a request that needs none
  // The beginning of a request, which axes, and the bytes of a short put, follow.
  struct Request {
    uint64_t offset, run, axes;  // a run of 0: there is no layout
    uint64_t counters, set, start, count, step, value;
  };
  struct Axis {
    uint64_t size, stride;  // in bytes
  };
  // Runs of bytes in memory.
  struct Layout {
    uint64_t offset = 0, run = 0;
    std::vector<Axis> axes = {};  // around the runs, outermost first

    size_t bytes() const;
    // Why it is not valid in memory of `size` bytes, "" if it is.
    std::string fault(size_t size) const;
    // All of it, if it is rows.
    std::optional<Strided> rows(char* base) const;
    // The same, or its elements, copied to `adjacent`.
    Strided gathered(char* base, std::shared_ptr<char[]>& adjacent) const;
    // A copy between it and adjacent bytes.
    StridedCopy copy(char* base, char* adjacent, bool to_adjacent) const;
  };
  struct Region {
    std::shared_ptr<Mapping> part;
    std::set<int> peers;  // that have a tensor in it
  };
  // Bytes that arrive, and where they go: to `rows`, or from there to elements.
  struct Landing {
    std::shared_ptr<Mapping> part;  // of a put
    Strided rows;
    std::vector<char> adjacent;
    std::optional<StridedCopy> scatter;
  };
  struct Get {
    uint64_t number;
    Landing landing;
  };
  struct Requested {
    uint64_t number = 0;
    bool answered = true;  // or it needs no answer (W5)
    bool taken = true;     // the caller's memory may be used again
  };
  struct Unsettled {  // W5
    int peer;
    uint64_t last;  // its last request that needs no answer, or the one that asks for it
    bool asked;
  };
  struct Peer {
    Counter answered;
    std::mutex requesting;  // of the order of requests
    std::atomic<uint64_t> requests{0};
    std::deque<Get> gets;  // of `getting_`
    // of the driver
    enum Latest { request, data, answer } latest = request;
    Label label{};
    std::vector<char> message;
    Request carried_out{};
    std::optional<Landing> landing;  // of a put whose bytes are to follow
    bool rejected = false;
  };

  Transport::Place place(int peer, const Label& label, size_t bytes, std::string& why) override;
  void raise(int peer, size_t bytes) override;
  void silent(int peer) override { release_all(peer); }

  template <class Send>
  Outcome send_all(int number, size_t pieces, const Limit& limit, Send send);
  Outcome part_with(int number, const Requested& made, const Limit& limit);
  std::vector<Unsettled> asked(int but);
  uint64_t ask(int number);
  static void cut(const Runs& runs, size_t from, size_t dst, size_t src,
                  std::vector<std::pair<Layout, Layout>>& pieces);
  Requested request(int number, Operation operation, uint64_t memory, const Layout& layout,
                    const Change& change, const Layout* local, char* base);
  // What a message is, whether it needs an answer or not.
  static uint8_t operation(const Label& label) {
    const uint8_t found = label.lane & ~kNoAnswer;
    return found == puts || found == changes ? found : label.lane;
  }
  std::string carry_out(int number, size_t bytes);
  std::string make_change(const Request& request);
  void answer_with_value(int number, const Layout& layout, std::shared_ptr<Mapping> part);
  std::string complete(int number);
  std::shared_ptr<Mapping> part(uint64_t memory) const;
  static Landing landing(const Layout& layout, char* base);

  const std::vector<int> others_;
  const std::shared_ptr<Mesh> mesh_;
  const std::shared_ptr<Network> network_;
  const int spins_;
  std::deque<Peer> peers_;
  mutable std::mutex holding_;  // of the following
  std::unordered_map<uint64_t, Region> regions_;
  std::mutex getting_;
  std::mutex settling_;  // of the following; no other of these is held meanwhile
  std::vector<Unsettled> unsettled_;
};

}  // namespace weft
