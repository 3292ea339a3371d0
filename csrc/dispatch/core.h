// The dispatcher: one lock around queue and batches, a thread that takes batches from the queue and
// sends them, and one that looks after those on the device, unless the first does. Whoever hands in
// a call while nothing runs may start it. The lock is held for fractions of a microsecond, never
// while a batch is sent or waited for.
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
  void host_joins(uint64_t number);
  void host_done(uint64_t number);
  void add_plan(int32_t form, int x_dtype, int y_dtype, int64_t rows, const ql_cuda_plan& plan);
  const int64_t* rows_left() const { return reinterpret_cast<const int64_t*>(rows_left_.data()); }
  double oldest() const { return oldest_.load(std::memory_order_acquire); }
  const char* error_text();

  // What the two threads do, once, for whoever has none: false if there was nothing to do.
  bool start_one();
  bool end_one();

 private:
  using Lock = std::unique_lock<std::mutex>;

  // A batch that was taken from the queue.
  struct Running {
    uint64_t number;
    double began;
    Batch batch;
    Stage* stage;  // null: it is the host's from the first on
    const ql_cuda_plan* plan;
    Manner manner;
    bool has_failed;
    bool has_more;    // the next one is the host's, too, and another layer of the same calls
    bool has_joined;  // another one, which the host computes together with it: it takes no place
  };
  using RunningPtr = std::unique_ptr<Running>;
  // When a layer's batch was timed last: so many batches ago, and what came of it.
  struct Timing {
    int batches = 0;
    int64_t kernel_nanoseconds = 0;
  };

  // ---- The lock and the threads ----
  void acquire(Lock& lock);
  Lock locked();
  void send_all();
  void watch_all();
  bool pump(Lock& lock, double now);
  bool watch(Lock& lock);
  void rest(Lock& lock, double idle_since);
  bool may_spin(double idle_since) const;
  template <typename Found>
  void spin(Lock& lock, double until, Found found);
  void sleep_watching(Lock& lock);
  void end_thread();
  void changed();
  void tell();
  void wake();

  // ---- What becomes of items ----
  bool take_in();
  void expire(double now);
  void post(const ql_completion& completion);
  void publish();

  // ---- What becomes of batches ----
  bool start_next(Lock& lock, double now);
  bool is_to_be_timed(const Running& running);
  void add_followers(double now);
  RunningPtr new_running();
  void begin(RunningPtr running, double now);
  bool is_hosts(const Running& running) const;
  void send(Lock& lock, RunningPtr running);
  void finish(Lock& lock, int status, const int64_t took[3]);
  void fail(Running& running);
  void hand_over(RunningPtr running, int kind, int status);
  void leave(Entry* entry);
  ql_completion head_of(const Running& running, int kind) const;
  bool is_busy() const { return is_sending_ || !sent_.empty(); }
  void set_running(int count);
  void note_oldest();

  ql_dispatch_options options_;
  Queue queue_;
  Sender sender_;
  Ring<ql_descriptor> arriving_;
  Ring<ql_completion> ended_;
  std::vector<std::atomic<int64_t>> rows_left_;
  std::atomic<double> oldest_{0};
  std::atomic<bool> is_idle_{true};     // nothing runs
  std::atomic<bool> is_asleep_{false};  // the thread that sends
  std::atomic<bool> is_told_{false};    // the consumer, and it has not looked yet
  std::atomic<bool> has_posted_{false};
  std::atomic<bool> has_spilled_{false};
  std::atomic<uint64_t> changes_{0};  // of what a spinning thread may be waiting for

  std::mutex mutex_;  // around all below
  std::condition_variable work_, sent_one_, thread_ended_;
  std::vector<std::thread> threads_;
  size_t threads_ended_ = 0;
  bool is_stopping_ = false;
  bool is_watching_asleep_ = false;
  bool is_sending_ = false;  // a batch, by whoever set it: nobody else starts one
  int faults_ = 0;  // batches that have failed and the host has not seen to: nothing is sent
  int running_ = 0;
  uint64_t numbers_ = 0;
  double sending_since_ = 0;
  std::vector<Timing> timings_;    // of layers
  std::deque<RunningPtr> sent_;    // in order
  std::vector<RunningPtr> chain_;  // that is to be sent
  std::vector<RunningPtr> spare_;
  std::unordered_map<uint64_t, RunningPtr> hosted_;
  std::deque<ql_completion> spilled_;  // what the ring had no room for
  std::vector<ql_descriptor> call_;    // room for what comes in
  size_t call_items_ = 0;              // in it, of a call of which the rest has not come in yet
  std::vector<Dropped> dropped_;
  std::string error_text_, told_error_text_;
};

}  // namespace qlinear::dispatch
