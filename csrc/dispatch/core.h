// The dispatcher: one lock around queue and device, and the thread that keeps both busy. Whoever
// hands in a call while nothing runs may start it; all else happens on the thread. Where there are
// no cores to spin on, a second thread sleeps until batches end.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "dispatch/queue.h"
#include "dispatch/ring.h"
#include "dispatch/sender.h"

namespace qlinear::dispatch {

double monotonic_seconds();

class Core {
 public:
  explicit Core(const ql_dispatch_options& options);

  void start();
  bool stop(double seconds);

  void submit(const ql_descriptor* items, int64_t count);
  int64_t drain(ql_completion* out, int64_t capacity);
  bool cancel(uint64_t sequence);  // true: nothing will touch the slot again
  bool has_begun(uint64_t sequence);
  void host_done(uint64_t number);
  void add_plan(int32_t form, int x_dtype, int y_dtype, int64_t rows, const ql_cuda_plan& plan);
  const int64_t* rows_left() const { return reinterpret_cast<const int64_t*>(rows_left_.data()); }
  double oldest() const { return oldest_.load(std::memory_order_acquire); }
  const char* error_text();

 private:
  using Lock = std::unique_lock<std::mutex>;

  // A batch that was taken from the queue.
  struct Running {
    uint64_t number;
    double began;
    Batch batch;
    Stage* stage = nullptr;  // null: it is the host's from the first on
    bool has_failed = false;
  };
  // An item that waits or runs.
  struct Item {
    ql_descriptor descriptor;
    double waited = 0;
    int running = 0;  // its parts
  };

  void work();
  void work_asleep();
  void watch(Lock& lock);
  void rest(Lock& lock, double idle_since);
  bool pump(double now);
  bool take_in();
  void expire(double now);
  bool start_next(double now);
  void start_followers(const Running& leader, double now);
  const Running& begin(Batch&& batch, double now);
  void send(std::unique_ptr<Running> running, double now);
  void finish(int status, const int64_t took[3]);
  void hand_over(std::unique_ptr<Running> running, int kind, int status);
  void leave(uint64_t sequence);
  void post(const ql_completion& completion);
  void tell();
  void wake();

  ql_dispatch_options options_;
  Queue queue_;
  Sender sender_;
  Ring<ql_descriptor> arriving_;
  Ring<ql_completion> ended_;
  std::vector<std::atomic<int64_t>> rows_left_;
  std::atomic<double> oldest_{0};
  std::atomic<bool> is_idle_{true};     // nothing runs
  std::atomic<bool> is_asleep_{false};  // the thread
  std::atomic<bool> is_told_{false};    // the consumer, and it has not looked yet
  std::atomic<bool> has_spilled_{false};

  std::mutex mutex_;  // around all below
  std::condition_variable changed_;
  std::vector<std::thread> threads_;
  size_t threads_ended_ = 0;
  bool is_stopping_ = false, has_posted_ = false;
  bool is_paused_ = false;  // a batch has failed: nothing is sent until the host has seen to it
  int running_ = 0;
  uint64_t numbers_ = 0;
  std::unordered_map<uint64_t, Item> items_;
  std::deque<std::unique_ptr<Running>> sent_;  // in order
  std::unordered_map<uint64_t, std::unique_ptr<Running>> hosted_;
  std::deque<ql_completion> spilled_;  // what the ring had no room for
  std::vector<ql_descriptor> call_;    // of which the rest has not come in yet
  std::vector<Dropped> dropped_;
  std::string error_text_, told_error_text_;
};

}  // namespace qlinear::dispatch
