// A device for dispatch_stress.cpp: the result of a row's eight bytes is their complement. It fails
// now and then, takes its time to be handed a batch, and does not bear to be asked out of turn.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>

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

class Device {
 public:
  bool has_faults = false;
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
    if (fails && is_being_sent) ++failed_meanwhile;
    return fails ? QL_CUDA_ERROR : QL_OK;
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
    if (has_faults && number % 97 == 0) return QL_CUDA_ERROR;
    if (has_faults && number % 31 == 0 && batch->launch.plan != nullptr) return QL_BAD_PLAN;
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
};

}  // namespace stress_device
