// A transport by UCX, which uses InfiniBand, RoCE or EFA where a host has them.
//
// A message is an active message: a header, and then its rows, or texts. UCX does not promise their
// order, so each has its number in all that a rank sends to a peer (T1). Short rows have arrived
// when their header has, and stay in UCX's memory until they have a place (T3). Of long rows only
// the header arrives; the rows stay with the sender, and are fetched into their place.
//
// Ranks send each other the addresses of UCX by the connections that they are given, which are
// closed then.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "hosts/transport.hpp"
#include "hosts/ucp.hpp"

namespace weft {

class UcxTransport : public Transport {
 public:
  // For so many peers, of which none is connected. Throws std::runtime_error.
  UcxTransport(size_t peers, int rank, Receiver& receiver);
  ~UcxTransport() override;

  void connect(int peer, int fd, std::shared_ptr<const std::string> first) override;
  bool put(int peer, const Label& label, const std::vector<Strided>& rows, size_t at_once,
           std::function<void()> done) override;
  void announce(int peer, std::shared_ptr<const std::string> messages) override;
  std::string message(const Label& label, std::string_view text) const override;
  bool poll() override;
  bool progress(int milliseconds) override;
  int descriptor() const override { return epoll_; }
  bool waiting() const override { return waiting_.load(std::memory_order_acquire); }
  bool resumes() const override;
  bool unsent() const override { return unsent_.load(std::memory_order_acquire); }
  void wake() override;
  void end(int peer) override;
  void abort() override;
  bool open(int peer) const override {
    return !aborted_.load(std::memory_order_acquire) &&
           peers_[peer].linked.load(std::memory_order_acquire) && !peers_[peer].over;
  }
  void disown() override;

 private:
  enum class Content : uint8_t { rows, texts, end };
  struct Header {
    Content content;
    Kind kind;
    uint8_t lane;
    uint8_t reserved;
    uint32_t sender;
    uint64_t call, digest;
    uint64_t number;  // of the message, in all that its sender sends to this rank
    uint64_t key;     // that this rank gave to its sender
  };
  static_assert(sizeof(Header) == 40);

  struct Peer;
  struct Outgoing {
    Peer* peer = nullptr;
    std::vector<Header> headers;  // UCX reads them until the messages are sent
    std::vector<Strided> rows;    // by message
    std::vector<char> gathered;   // those that are not contiguous
    int under_way = 0;            // operations of UCX
    std::function<void()> done = {};
    std::shared_ptr<const std::string> texts = {};
  };
  // A message that has arrived, or one that later ones have overtaken.
  struct Arrival {
    enum State { missing, arrived, fetching, fetched } state = missing;
    Header header = {};
    void* data = nullptr;  // UCX's, or a descriptor of rows that stay with the sender
    size_t length = 0;
    bool with_sender = false;
    Place place = {};
  };

  struct Peer {
    int number = -1, fd = -1;
    UcxTransport* transport = nullptr;
    std::string address;  // what has arrived of its address
    ucp::Endpoint endpoint = nullptr;
    ucp::Status failure = ucp::kOk;
    bool failed = false, over = false, later = false, listed = false;
    bool ended = false;  // or has sent something invalid: its failure is no news
    // of messages to it
    uint64_t sent = 0, key_there = 0;
    std::atomic<bool> linked{
        false};                   // whether it has been given a connection; set with `queueing_`
    std::deque<Outgoing*> queue;  // of `queueing_`
    std::atomic<bool> ending{false};
    // of messages from it
    uint64_t key_here = 0, received = 0;  // messages that are complete
    std::deque<Arrival> inbox;            // the first one has the number `received`
    std::vector<char> fetched;            // rows that do not lie in one piece, or texts
  };

  // Callbacks of UCX, called by a thread that holds `working_`.
  static ucp::Status on_message(void* transport, const void* header, size_t header_length,
                                void* data, size_t length, const ucp::ReceiveParams* params);
  static void on_sent(void* request, ucp::Status status, void* outgoing);
  static void on_fetched(void* request, ucp::Status status, size_t length, void* peer);
  static void on_failure(void* peer, ucp::Endpoint endpoint, ucp::Status status);

  void begin();
  void watch(int fd, uint64_t which);
  void send_end(Peer& peer);
  void send_address(const Peer& peer);
  void learn_address(Peer& peer);
  void open(Peer& peer);
  Outgoing& blank(Peer& peer, const Label& label, Content content, size_t messages);
  Outgoing& texts(Peer& peer, std::shared_ptr<const std::string> messages);
  void recycle(Outgoing& outgoing);
  bool send(Outgoing& outgoing);
  void send_queued();
  bool post(Outgoing& outgoing);
  bool step();
  bool arm();
  void list(Peer& peer);
  bool deliver(Peer& peer);
  bool receive(Peer& peer, Arrival& arrival);
  void fetch(Peer& peer, Arrival& arrival);
  void pass_on_events(Peer& peer);
  void receive_texts(Peer& peer, const char* texts, size_t size, bool only_events = false);
  void garbled(Peer& peer, const std::string& why);
  void drop(Arrival& arrival);
  void fail(Peer& peer, ucp::Status status);
  void report_failed();
  void close_all();

  const ucp::Library& ucp_;
  const int rank_, process_;
  Receiver& receiver_;
  std::deque<Peer> peers_;
  int epoll_ = -1, wake_ = -1;
  unsigned polls_ = 0;
  std::atomic<int> strangers_{0};  // peers whose address is not known yet
  std::atomic<bool> waiting_{false}, woken_{false}, aborted_{false};
  std::atomic<int> unsent_{0}, ends_{0};

  std::mutex working_;  // of all that follows: UCX is used by one thread at a time
  ucp::Context context_ = nullptr;
  ucp::Worker worker_ = nullptr;
  std::atomic<bool> armed_{false};
  std::vector<Peer*> connected_, arrived_, delivering_, failed_;
  std::vector<Outgoing*> finished_;
  std::vector<std::pair<int, std::string>> ended_;

  std::mutex queueing_;  // of records, and of peers' queues
  std::vector<std::unique_ptr<Outgoing>> records_;
  std::vector<Outgoing*> spare_, queued_;
  std::atomic<bool> queues_{false};
};

}  // namespace weft
