// The lock, the thread and the two rings. See docs/decisions/0011-native-dispatch.md.
#include "dispatch/core.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace qlinear::dispatch {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kRingItems = 1 << 16;
constexpr size_t kTakenAtOnce = 256;
constexpr size_t kDroppedAtOnce = 4096;
constexpr int kPauses = 32;  // some tenths of a microsecond in which others get the lock
constexpr double kLongestRest = 3600;

void pause() {
  for (int i = 0; i < kPauses; ++i) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
}

}  // namespace

double monotonic_seconds() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

Core::Core(const ql_dispatch_options& options)
    : options_(options),
      queue_(options.queue),
      sender_(options),
      arriving_(kRingItems),
      ended_(kRingItems),
      rows_left_(static_cast<size_t>(options.queue.layers_count) + 1) {
  queue_.on_leave_to = this;
  queue_.on_leave = [](void* to, uint32_t layer, int64_t rows) {
    auto& left = static_cast<Core*>(to)->rows_left_;
    left[layer].fetch_add(rows, std::memory_order_relaxed);
    left.back().fetch_add(rows, std::memory_order_release);
  };
}

void Core::start() {
  const Lock lock(mutex_);
  threads_.emplace_back([this] { work(); });
  if (!options_.spins) threads_.emplace_back([this] { work_asleep(); });
}

bool Core::stop(double seconds) {
  Lock lock(mutex_);
  is_stopping_ = true;
  changed_.notify_all();
  const auto end = std::chrono::duration<double>(seconds);
  if (!changed_.wait_for(lock, end, [this] { return threads_ended_ == threads_.size(); })) {
    return false;
  }
  lock.unlock();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  return true;
}

void Core::submit(const ql_descriptor* items, int64_t count) {
  if (!arriving_.push(items, static_cast<size_t>(count))) {
    const Lock lock(mutex_);
    take_in();
    arriving_.push(items, static_cast<size_t>(count));  // no call has more layers than the ring
  }
  if (options_.starts_lone && is_idle_.load(std::memory_order_acquire) && mutex_.try_lock()) {
    const Lock lock(mutex_, std::adopt_lock);
    if (running_ == 0) pump(monotonic_seconds());
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
  const Lock lock(mutex_);
  count += ended_.pop(out + count, most - count);
  while (count < most && !spilled_.empty()) {
    out[count++] = spilled_.front();
    spilled_.pop_front();
  }
  has_spilled_.store(!spilled_.empty(), std::memory_order_release);
  return static_cast<int64_t>(count);
}

bool Core::cancel(uint64_t sequence) {
  const Lock lock(mutex_);
  take_in();
  if (!queue_.cancel(sequence)) return false;
  const auto item = items_.find(sequence);
  if (item->second.running > 0) return false;
  items_.erase(item);
  return true;
}

bool Core::has_begun(uint64_t sequence) {
  const Lock lock(mutex_);
  take_in();
  return queue_.has_begun(sequence);
}

void Core::host_done(uint64_t number) {
  {
    const Lock lock(mutex_);
    const auto found = hosted_.find(number);
    if (found == hosted_.end()) return;
    const std::unique_ptr<Running> running = std::move(found->second);
    hosted_.erase(found);
    if (running->has_failed) is_paused_ = false;
    if (running->stage != nullptr) sender_.give_back(running->stage);
    for (const Part& part : running->batch.parts) leave(part.item.sequence);
    is_idle_.store(--running_ == 0, std::memory_order_release);
    tell();
  }
  wake();
}

void Core::add_plan(int32_t form, int x_dtype, int y_dtype, int64_t rows,
                    const ql_cuda_plan& plan) {
  const Lock lock(mutex_);
  sender_.add_plan(form, x_dtype, y_dtype, rows, plan);
}

const char* Core::error_text() {
  const Lock lock(mutex_);
  told_error_text_ = error_text_;
  return told_error_text_.c_str();
}

void Core::work() {
  Lock lock(mutex_);
  double idle_since = monotonic_seconds();
  while (!is_stopping_ || !sent_.empty()) {
    const double now = monotonic_seconds();
    const bool has_moved = pump(now);
    const bool watches = options_.spins && !sent_.empty();
    if (watches) watch(lock);
    if (has_moved || watches) {
      idle_since = now;
    } else {
      rest(lock, idle_since);
    }
  }
  ++threads_ended_;
  changed_.notify_all();
}

// Where no thread spins: waits for batches, so that the other one can see to what comes and
// expires.
void Core::work_asleep() {
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_stopping_ || !sent_.empty(); });
    if (sent_.empty()) break;
    watch(lock);
    changed_.notify_all();
  }
  ++threads_ended_;
  changed_.notify_all();
}

// Looks after the oldest batch on the device. Nobody else takes it from there, so the lock is not
// held meanwhile.
void Core::watch(Lock& lock) {
  const Stage& stage = *sent_.front()->stage;
  int64_t took[3] = {};
  bool done = false;
  lock.unlock();
  const int status = sender_.wait(stage, options_.spins ? 0 : -1, done, took);
  lock.lock();
  if (done || status != QL_OK) finish(status, took);
}

// Nothing can be started, and nothing is to be watched by this thread.
void Core::rest(Lock& lock, double idle_since) {
  const double now = monotonic_seconds();
  double until = std::min(queue_.next_expiry(), now + kLongestRest);
  if (queue_.rows() > 0 && running_ == 0) until = std::min(until, queue_.wait_end(now));
  if (options_.spins && now - idle_since < options_.idle_spin_seconds) {
    lock.unlock();
    pause();
    lock.lock();
    return;
  }
  is_asleep_.store(true, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (arriving_.is_empty() && (!is_stopping_ || !sent_.empty())) {
    changed_.wait_for(lock, std::chrono::duration<double>(std::max(0.0, until - now)));
  }
  is_asleep_.store(false, std::memory_order_relaxed);
}

// Whatever can be done now; false: nothing could.
bool Core::pump(double now) {
  bool has_moved = take_in();
  if (queue_.next_expiry() <= now) expire(now);
  while (!is_stopping_ && start_next(now)) has_moved = true;
  tell();
  return has_moved;
}

bool Core::take_in() {
  bool has_come = false;
  ql_descriptor items[kTakenAtOnce];
  while (const size_t count = arriving_.pop(items, kTakenAtOnce)) {
    has_come = true;
    for (size_t i = 0; i < count; ++i) {
      call_.push_back(items[i]);
      items_[items[i].sequence].descriptor = items[i];
      if (items[i].flags & QL_CALL_GOES_ON) continue;
      queue_.admit(call_.data(), static_cast<int64_t>(call_.size()));
      call_.clear();
    }
  }
  return has_come;
}

void Core::expire(double now) {
  do {
    dropped_.clear();
    queue_.expire(now, kDroppedAtOnce, dropped_);
    for (const Dropped& dropped : dropped_) {
      const auto item = items_.find(dropped.item.sequence);
      ql_completion out = {};
      out.sequence = dropped.item.sequence;
      out.kind = dropped.is_late ? QL_ITEM_LATE : QL_ITEM_OLD;
      out.is_last = item->second.running == 0;
      post(out);
      if (out.is_last) items_.erase(item);
    }
  } while (dropped_.size() == kDroppedAtOnce);
}

bool Core::start_next(double now) {
  if (running_ >= options_.most_running || queue_.rows() == 0) return false;
  if (running_ == 0 && queue_.wait_end(now) > now) return false;
  Batch batch;
  queue_.take(now, batch);
  start_followers(begin(std::move(batch), now), now);
  return true;
}

void Core::post(const ql_completion& completion) {
  has_posted_ = true;
  if (spilled_.empty() && ended_.push(&completion, 1)) return;
  spilled_.push_back(completion);
  has_spilled_.store(true, std::memory_order_release);
}

void Core::tell() {
  if (!has_posted_) return;
  has_posted_ = false;
  if (options_.done_fd < 0 || is_told_.exchange(true, std::memory_order_seq_cst)) return;
  const uint64_t one = 1;
  if (write(options_.done_fd, &one, sizeof one) < 0) {
    // The counter is full: the consumer will look in any case.
  }
}

void Core::wake() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!is_asleep_.load(std::memory_order_seq_cst)) return;
  {
    const Lock lock(mutex_);
  }  // it is asleep, or about to look once more
  changed_.notify_all();
}

}  // namespace qlinear::dispatch
