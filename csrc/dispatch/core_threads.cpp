// The lock, the thread that sends and the one that looks after what was sent.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <system_error>

#include "dispatch/core.h"

namespace qlinear::dispatch {
namespace {

constexpr int kOneThread = 1;  // that spins, and looks after batches between sending others
constexpr int kTries = 200;    // for the lock, before a thread that may spin goes to sleep over it
constexpr int kPauses = 16;    // between two looks: some tenths of a microsecond
constexpr double kLongestSpin = 10e-6;
constexpr double kLongestRest = 3600;

void pause(int count) {
  for (int i = 0; i < count; ++i) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
}

}  // namespace

void Core::start() {
  threads_.reserve(2);
  threads_.emplace_back([this] { send_all(); });
  if (options_.spins == kOneThread) return;
  try {
    threads_.emplace_back([this] { watch_all(); });
  } catch (const std::system_error&) {
    stop(kLongestRest);
    throw;
  }
}

bool Core::stop(double seconds) {
  Lock lock = locked();
  is_stopping_ = true;
  changed();
  const auto end = std::chrono::duration<double>(seconds);
  if (!thread_ended_.wait_for(lock, end, [this] { return threads_ended_ == threads_.size(); })) {
    return false;
  }
  lock.unlock();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  return true;
}

// Whoever sleeps over a lock is woken by a system call; it is held far shorter than that takes.
void Core::acquire(Lock& lock) {
  for (int i = 0; options_.spins && i < kTries; ++i) {
    if (lock.try_lock()) return;
    pause(1);
  }
  lock.lock();
}

Core::Lock Core::locked() {
  Lock lock(mutex_, std::defer_lock);
  acquire(lock);
  return lock;
}

void Core::send_all() {
  Lock lock = locked();
  double idle_since = monotonic_seconds();
  while (!is_stopping_ || is_busy()) {
    const double now = monotonic_seconds();
    const bool has_moved = pump(lock, now);
    const bool has_looked = options_.spins == kOneThread && watch(lock);
    if (has_moved || has_looked) {
      idle_since = now;
    } else {
      rest(lock, idle_since);
    }
  }
  end_thread();
}

void Core::watch_all() {
  Lock lock = locked();
  double idle_since = monotonic_seconds();
  while (!is_stopping_ || is_busy()) {
    if (watch(lock)) {
      idle_since = monotonic_seconds();
    } else if (may_spin(idle_since)) {
      spin(lock, monotonic_seconds() + kLongestSpin, [] { return false; });
    } else {
      sleep_watching(lock);
    }
  }
  end_thread();
}

// Whatever can be done now; false: nothing could.
bool Core::pump(Lock& lock, double now) {
  bool has_moved = take_in();
  if (queue_.next_expiry() <= now) expire(now);
  if (start_next(lock, now)) has_moved = true;
  tell();
  return has_moved;
}

// Looks after the oldest batch on the device: until it has ended, unless there is other work.
// False: there is none. Nobody else takes it from there.
bool Core::watch(Lock& lock) {
  if (sent_.empty()) return false;
  const Stage& stage = *sent_.front()->stage;
  int64_t took[3] = {};
  bool done = false;
  lock.unlock();
  int status = sender_.wait(stage, options_.spins ? 0 : -1, done, took);
  while (status == QL_OK && !done && options_.spins != kOneThread) {
    pause(kPauses);
    status = sender_.wait(stage, options_.spins ? 0 : -1, done, took);
  }
  acquire(lock);
  if (status == QL_OK && !done) return true;
  finish(lock, status, took);
  lock.unlock();
  tell();  // a system call
  acquire(lock);
  return true;
}

// Nothing can be started now.
void Core::rest(Lock& lock, double idle_since) {
  const double now = monotonic_seconds();
  double until = std::min(queue_.next_expiry(), now + kLongestRest);
  if (queue_.rows() > 0 && running_ == 0) until = std::min(until, queue_.wait_end(now));
  if (may_spin(idle_since)) {
    const auto has_come = [this] { return !arriving_.is_empty(); };
    return spin(lock, std::min(until, now + kLongestSpin), has_come);
  }
  is_asleep_.store(true, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (arriving_.is_empty()) {
    work_.wait_for(lock, std::chrono::duration<double>(std::max(0.0, until - now)));
  }
  is_asleep_.store(false, std::memory_order_relaxed);
}

bool Core::may_spin(double idle_since) const {
  if (!options_.spins) return false;
  return is_busy() || monotonic_seconds() - idle_since < options_.idle_spin_seconds;
}

// Looks without the lock until something has changed, or what else is looked for is there.
template <typename Found>
void Core::spin(Lock& lock, double until, Found found) {
  const uint64_t seen = changes_.load(std::memory_order_acquire);
  lock.unlock();
  do {
    pause(kPauses);
  } while (changes_.load(std::memory_order_acquire) == seen && !found() &&
           monotonic_seconds() < until);
  acquire(lock);
}

// Until something has changed, or for no reason.
void Core::sleep_watching(Lock& lock) {
  is_watching_asleep_ = true;
  sent_one_.wait(lock);
  is_watching_asleep_ = false;
}

void Core::end_thread() {
  ++threads_ended_;
  changed();
  thread_ended_.notify_all();
}

// Something that a thread may wait for.
void Core::changed() {
  changes_.fetch_add(1, std::memory_order_release);
  const bool watches = options_.spins == kOneThread && !sent_.empty();
  const bool has_work = is_stopping_ || watches || queue_.rows() > 0;
  if (has_work && is_asleep_.load(std::memory_order_relaxed)) work_.notify_one();
  if (is_watching_asleep_) sent_one_.notify_one();
}

void Core::tell() {
  if (!has_posted_.load(std::memory_order_relaxed) || !has_posted_.exchange(false)) return;
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
    const Lock lock = locked();
  }  // it is asleep, or about to look once more
  work_.notify_one();
}

}  // namespace qlinear::dispatch
