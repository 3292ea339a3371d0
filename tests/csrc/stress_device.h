// A device for dispatch_stress.cpp: the result of a row's eight bytes is their complement. It fails
// now and then, takes its time to be handed a batch, and does not bear to be asked out of turn.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "linear_dispatch.h"

namespace stress_device {

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::abort();
}

// What must have ended before something begins on the device: of each of two streams so many
// products. Streams keep their order, events stand for what was recorded, and what the host has
// seen to have ended has.
using Past = std::array<int64_t, 2>;

inline Past later(const Past& one, const Past& other) {
  return {std::max(one[0], other[0]), std::max(one[1], other[1])};
}

// The streams of products: says which may run beside each other.
class Streams {
 public:
  int64_t beside = 0;  // products that were sent while another may have run

  // Not `is_recorded`: what comes behind the product could not be launched.
  void send(const ql_cuda_batch& batch, bool is_host_busy, bool is_recorded) {
    const auto lane = static_cast<size_t>(batch.launch.stream == kLanes + 1);
    require(batch.launch.stream == kLanes + lane, "a stream of products");
    const bool is_timed = batch.in_start != nullptr;
    Past past = later(seen_, ended_[lane]);
    if (batch.after != nullptr) past = later(past, events_[batch.after]);
    require(!is_timed || past == sent_, "nothing that was sent runs beside what is timed");
    require(past[0] >= timed_, "nor does what is sent behind it");
    require(lane == 0 || !(is_timed || is_host_busy), "the second stream is for what may overlap");
    require(lane == 0 || last_ == 0, "the streams take turns");
    bool is_beside = false;
    for (const Running& other : running_) {
      if (other.number <= past[other.lane]) continue;
      is_beside = true;
      require(other.workspace != batch.launch.workspace, "what runs at a time has two workspaces");
    }
    beside += is_beside;
    last_ = lane;
    past[lane] = ++sent_[lane];
    running_.push_back({lane, past[lane], batch.launch.workspace});
    if (running_.size() > kMostRunning) running_.pop_front();
    ended_[lane] = past;
    if (is_timed) timed_ = past[0];
    if (is_recorded) events_[batch.launch.stop_event] = past;
    if (is_recorded) pasts_[&batch] = past;
  }

  void see_end(const ql_cuda_batch* batch) { seen_ = later(seen_, pasts_[batch]); }
  void start_over() {
    seen_ = sent_;
    last_ = 0;
  }

  static inline char kLanes[2] = {};

 private:
  static constexpr size_t kMostRunning = 32;
  struct Running {
    size_t lane;
    int64_t number;
    void* workspace;
  };

  size_t last_ = 0;
  int64_t timed_ = 0;
  Past sent_ = {}, seen_ = {};
  std::array<Past, 2> ended_ = {};
  std::unordered_map<const void*, Past> events_;
  std::unordered_map<const ql_cuda_batch*, Past> pasts_;
  std::deque<Running> running_;
};

class Device {
 public:
  bool has_faults = false;
  std::atomic<int> hosted{0};        // batches that the host computes
  ql_dispatch* dispatch = nullptr;   // once it is known
  std::thread::id front_end;         // which is never kept waiting
  std::atomic<int> being_mended{0};  // failures that were told and are not seen to
  std::atomic<int> asked{0};         // what the front end has asked and was answered
  std::atomic<bool> hangs{false};    // with the next batch
  std::atomic<bool> is_hanging{false};
  std::atomic<bool> is_being_sent{false};  // a batch
  std::atomic<int> asked_meanwhile{0};     // while a batch was being sent
  std::atomic<int> failed_meanwhile{0};    // batches that did while another was being sent

  int run(const ql_cuda_batch* batch) {
    require(!is_being_sent.exchange(true), "batches are sent one after the other");
    require(being_mended == 0, "nothing is sent to a device that is being mended");
    if (dispatch != nullptr) require(ql_dispatch_oldest(dispatch) > 0, "the watchdog sees it");
    const uint32_t number = ++launches_;
    if (number % 8 == 0) take_time(number);
    while (hangs) is_hanging = true;
    is_hanging = false;
    require(being_mended == 0, "nobody mends a device to which a batch is being sent");
    const int status = handed(batch, number);
    is_being_sent = false;
    return status;
  }

  int wait(const ql_cuda_batch* batch, int64_t nanoseconds, int32_t* done, int64_t* took) {
    const uint32_t number = ++waits_;
    *done = nanoseconds < 0 || number % 3 == 0;
    took[0] = took[1] = took[2] = 1000;
    // Rather while another one is being sent.
    const bool fails = has_faults && *done && ++ends_ % (is_being_sent ? 8 : 64) == 0;
    const std::lock_guard<std::mutex> lock(mutex_);
    require(!sent_.empty() && sent_.front() == batch, "the oldest is looked after");
    if (*done) sent_.pop_front();
    if (*done && !fails) streams_.see_end(batch);
    if (fails && is_being_sent) ++failed_meanwhile;
    return fails ? QL_CUDA_ERROR : QL_OK;
  }

  // Nothing runs any more: somebody has waited for that after a failure, or another dispatcher has
  // the device.
  void start_over() {
    const std::lock_guard<std::mutex> lock(mutex_);
    streams_.start_over();
  }

  int64_t beside() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return streams_.beside;
  }

  bool is_empty() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return sent_.empty();
  }

 private:
  // Some microseconds, and now and then until the front end has asked something: for as long as
  // it is kept waiting itself at most.
  void take_time(uint32_t number) {
    const int before = asked;
    const double begun = now();
    const bool can_ask = std::this_thread::get_id() != front_end && dispatch != nullptr;
    const double most = can_ask && number % 64 == 0 ? 2e-3 : 2e-5;
    while (now() - begun < most && asked == before) std::this_thread::yield();
    if (can_ask && asked != before) ++asked_meanwhile;
  }

  int handed(const ql_cuda_batch* batch, uint32_t number) {
    const bool fails = has_faults && number % 97 == 0;
    if (!fails && has_faults && number % 31 == 0 && batch->launch.plan != nullptr) {
      return QL_BAD_PLAN;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      streams_.send(*batch, hosted > 0, !fails);
    }
    if (fails) return QL_CUDA_ERROR;
    for (int64_t i = 0; i < batch->x.parts_count; ++i) {
      auto* rows = static_cast<uint64_t*>(batch->x.parts[i].rows);
      for (int64_t row = 0; row < batch->x.parts[i].count; ++row) rows[row] = ~rows[row];
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    sent_.push_back(batch);
    return QL_OK;
  }

  std::atomic<uint32_t> launches_{0}, waits_{0}, ends_{0};
  std::mutex mutex_;
  std::deque<const ql_cuda_batch*> sent_;  // in order
  Streams streams_;
};

}  // namespace stress_device
