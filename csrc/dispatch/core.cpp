// The two rings, and what callers ask. See docs/decisions/0011-native-dispatch.md.
#include "dispatch/core.h"

#include <algorithm>
#include <chrono>

namespace qlinear::dispatch {
namespace {

constexpr size_t kRingItems = 1 << 16;
constexpr size_t kTakenAtOnce = 256;
constexpr size_t kDroppedAtOnce = 4096;

}  // namespace

double monotonic_seconds() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

Core::Core(const ql_dispatch_options& options)
    : options_(options),
      queue_(options.queue),
      sender_(options),
      arriving_(kRingItems),
      ended_(kRingItems),
      rows_left_(static_cast<size_t>(options.queue.layers_count) + 1),
      timings_(static_cast<size_t>(options.queue.layers_count)),
      call_(kTakenAtOnce) {
  queue_.on_leave_to = this;
  queue_.on_leave = [](void* to, uint32_t layer, int64_t rows) {
    // Under the lock, so nobody else adds to them.
    auto& left = static_cast<Core*>(to)->rows_left_;
    const auto add = [rows](std::atomic<int64_t>& sum) {
      sum.store(sum.load(std::memory_order_relaxed) + rows, std::memory_order_release);
    };
    add(left[layer]);
    add(left.back());
  };
}

void Core::submit(const ql_descriptor* items, int64_t count) {
  if (!arriving_.push(items, static_cast<size_t>(count))) {
    const Lock lock = locked();
    take_in();
    arriving_.push(items, static_cast<size_t>(count));  // no call has more layers than the ring
  }
  if (options_.starts_lone && is_idle_.load(std::memory_order_acquire) && mutex_.try_lock()) {
    Lock lock(mutex_, std::adopt_lock);
    if (running_ == 0) {
      pump(lock, monotonic_seconds());
      if (queue_.rows() == 0) return;  // there is nothing left to wake anybody for
    }
  }
  wake();
}

int64_t Core::drain(ql_completion* out, int64_t capacity) {
  is_told_.store(false, std::memory_order_seq_cst);
  const auto most = static_cast<size_t>(capacity);
  size_t count = ended_.pop(out, most);
  if (count == most || !has_spilled_.load(std::memory_order_acquire)) {
    return static_cast<int64_t>(count);
  }
  const Lock lock = locked();
  count += ended_.pop(out + count, most - count);
  while (count < most && !spilled_.empty()) {
    out[count++] = spilled_.front();
    spilled_.pop_front();
  }
  has_spilled_.store(!spilled_.empty(), std::memory_order_release);
  return static_cast<int64_t>(count);
}

bool Core::cancel(uint64_t sequence) {
  const Lock lock = locked();
  take_in();
  if (!queue_.cancel(sequence)) return false;
  Entry* entry = queue_.find(sequence);
  if (entry->running > 0) return false;
  queue_.release(entry);
  return true;
}

bool Core::has_begun(uint64_t sequence) {
  const Lock lock = locked();
  take_in();
  return queue_.has_begun(sequence);
}

void Core::host_joins(uint64_t number) {
  const Lock lock = locked();
  const auto found = hosted_.find(number);
  if (found == hosted_.end() || found->second->has_joined) return;
  found->second->has_joined = true;
  set_running(running_ - 1);
  changed();
}

void Core::host_done(uint64_t number) {
  const Lock lock = locked();
  const auto found = hosted_.find(number);
  if (found == hosted_.end()) return;
  RunningPtr running = std::move(found->second);
  hosted_.erase(found);
  if (running->has_failed) --faults_;
  if (running->stage != nullptr) sender_.give_back(running->stage);
  for (const Part& part : running->batch.parts) leave(part.entry);
  if (!running->has_joined) set_running(running_ - 1);
  spare_.push_back(std::move(running));
  publish();
  changed();
  tell();
}

void Core::add_plan(int32_t form, int x_dtype, int y_dtype, int64_t rows,
                    const ql_cuda_plan& plan) {
  const Lock lock = locked();
  sender_.add_plan(form, x_dtype, y_dtype, rows, plan);
}

const char* Core::error_text() {
  const Lock lock = locked();
  told_error_text_ = error_text_;
  return told_error_text_.c_str();
}

bool Core::start_one() {
  Lock lock = locked();
  return pump(lock, monotonic_seconds());
}

bool Core::end_one() {
  Lock lock = locked();
  return watch(lock);
}

// What has been handed in is the queue's; of a call that has not come in whole, nothing.
bool Core::take_in() {
  bool has_come = false;
  while (true) {
    if (call_.size() < call_items_ + kTakenAtOnce) call_.resize(2 * call_.size());
    const size_t begun = call_items_;
    const size_t count = arriving_.pop(&call_[begun], kTakenAtOnce);
    if (count == 0) return has_come;
    has_come = true;
    const size_t end = begun + count;
    size_t first = 0;
    for (size_t i = begun; i < end; ++i) {
      if (call_[i].flags & QL_CALL_GOES_ON) continue;
      queue_.admit(&call_[first], static_cast<int64_t>(i + 1 - first));
      first = i + 1;
    }
    if (first > 0) std::move(call_.data() + first, call_.data() + end, call_.data());
    call_items_ = end - first;
  }
}

void Core::expire(double now) {
  do {
    dropped_.clear();
    queue_.expire(now, kDroppedAtOnce, dropped_);
    for (const Dropped& dropped : dropped_) {
      ql_completion out = {};
      out.sequence = dropped.entry->item.sequence;
      out.kind = dropped.is_late ? QL_ITEM_LATE : QL_ITEM_OLD;
      out.is_last = dropped.entry->running == 0;
      post(out);
      if (out.is_last) queue_.release(dropped.entry);
    }
  } while (dropped_.size() == kDroppedAtOnce);
  publish();
}

// Seen once publish() was called, before the lock is given up.
void Core::post(const ql_completion& completion) {
  if (spilled_.empty() && ended_.put(completion)) return;
  spilled_.push_back(completion);
  has_spilled_.store(true, std::memory_order_release);
}

void Core::publish() {
  ended_.publish();
  has_posted_.store(true, std::memory_order_release);
}

}  // namespace qlinear::dispatch
