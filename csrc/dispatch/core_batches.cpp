// What becomes of a batch once it has been taken from the queue.
#include <algorithm>

#include "dispatch/core.h"

namespace qlinear::dispatch {

// Takes the next batch and sends it, with what follows it. What is sent meanwhile, and what ends,
// others see to.
bool Core::start_next(Lock& lock, double now) {
  if (is_stopping_ || is_sending_ || running_ >= options_.most_running) return false;
  if (queue_.rows() == 0 || (running_ == 0 && queue_.wait_end(now) > now)) return false;
  RunningPtr first = new_running();
  queue_.take(now, first->batch);
  begin(std::move(first), now);
  add_followers(now);
  is_sending_ = true;
  for (size_t place = 0; place < chain_.size(); ++place) {
    RunningPtr& running = chain_[place];
    // Nothing gives up the lock between two that are the host's, so they are told of in a row.
    running->has_more =
        is_hosts(*running) && place + 1 < chain_.size() && is_hosts(*chain_[place + 1]);
    send(lock, std::move(running));
  }
  chain_.clear();
  is_sending_ = false;
  note_oldest();
  changed();
  return true;
}

// Other layers of the same calls go right behind a batch, without a wait for room.
void Core::add_followers(double now) {
  if (options_.most_chained == 0) return;
  const auto& parts = chain_[0]->batch.parts;
  if (!(parts[0].item().flags & QL_CALL_GOES_ON)) return;
  std::vector<std::vector<Entry*>> layers;
  for (size_t place = 0; place < parts.size(); ++place) {
    if (parts[place].rows < parts[place].item().rows) return;
    size_t depth = 0;
    const Entry* entry = parts[place].entry;
    for (; entry->item.flags & QL_CALL_GOES_ON; ++depth) {
      Entry* next = queue_.find(entry->item.sequence + 1);
      if (next == nullptr) return;
      if (place == 0) layers.emplace_back();
      if (depth == layers.size()) return;
      if (place > 0) {
        const ql_descriptor &item = next->item, &other = layers[depth][0]->item;
        if (item.layer != other.layer || item.x_dtype != other.x_dtype ||
            item.y_dtype != other.y_dtype) {
          return;
        }
      }
      layers[depth].push_back(next);
      entry = next;
    }
    if (depth != layers.size()) return;
  }
  for (size_t i = 0; i < layers.size() && i < static_cast<size_t>(options_.most_chained); ++i) {
    RunningPtr follower = new_running();
    queue_.take_together(layers[i], follower->batch);
    if (follower->batch.parts.empty()) return spare_.push_back(std::move(follower));
    begin(std::move(follower), now);
  }
}

Core::RunningPtr Core::new_running() {
  if (spare_.empty()) return std::make_unique<Running>();
  RunningPtr running = std::move(spare_.back());
  spare_.pop_back();
  return running;
}

// From here on a batch runs, and is to be sent.
void Core::begin(RunningPtr running, double now) {
  running->number = ++numbers_;
  running->began = now;
  running->has_failed = running->has_more = running->has_joined = false;
  for (const Part& part : running->batch.parts) {
    Entry& entry = *part.entry;
    ++entry.running;
    // What has come since the time was taken has not waited.
    if (part.start == 0) entry.waited = std::max(now - entry.item.enqueued_at, 0.0);
  }
  running->manner.is_alone = running_ == 0 && queue_.rows() == 0;
  running->plan = sender_.plan_of(running->batch);
  running->stage = running->plan == nullptr ? nullptr : sender_.take_stage();
  running->manner.is_timed = running->stage != nullptr && is_to_be_timed(*running);
  chain_.push_back(std::move(running));
  set_running(running_ + 1);
}

// Events that take the time hold up the device by microseconds, so not each batch of many has them.
bool Core::is_to_be_timed(const Running& running) {
  Timing& timing = timings_[running.batch.parts[0].item().layer];
  const bool is_timed = running.manner.is_alone || timing.kernel_nanoseconds == 0 ||
                        timing.batches + 1 >= options_.timed_each;
  timing.batches = is_timed ? 0 : timing.batches + 1;
  return is_timed;
}

// After a failure all batches are, until the host has seen to it.
bool Core::is_hosts(const Running& running) const {
  return running.stage == nullptr || faults_ > 0;
}

void Core::send(Lock& lock, RunningPtr running) {
  if (running->stage != nullptr && is_hosts(*running)) {
    sender_.give_back(running->stage);
    running->stage = nullptr;
  }
  if (running->stage == nullptr) return hand_over(std::move(running), QL_BATCH_HOST, QL_OK);
  // Whatever becomes the host's does so while nothing is being sent.
  running->manner.is_host_busy = !hosted_.empty();
  sending_since_ = running->began;
  note_oldest();
  lock.unlock();
  const int status = sender_.send(running->batch, *running->stage, running->plan, running->manner);
  acquire(lock);
  if (status == QL_OK) {
    sent_.push_back(std::move(running));
    return;
  }
  fail(*running);
  hand_over(std::move(running), status == QL_PART_WRITTEN ? QL_BATCH_GONE : QL_BATCH_FAILED,
            status);
}

// Ends the oldest batch on the device.
void Core::finish(Lock& lock, int status, const int64_t took[3]) {
  RunningPtr running = std::move(sent_.front());
  sent_.pop_front();
  note_oldest();
  if (status != QL_OK) {
    fail(*running);
    // What is being sent must be with the device before anybody mends it.
    while (is_sending_) sleep_watching(lock);
    return hand_over(std::move(running), QL_BATCH_GONE, status);
  }
  ql_completion out = head_of(*running, QL_BATCH_DONE);
  out.in_nanoseconds = took[0];
  int64_t& kernel_nanoseconds = timings_[static_cast<size_t>(out.layer)].kernel_nanoseconds;
  if (running->manner.is_timed) kernel_nanoseconds = took[1];
  out.kernel_nanoseconds = kernel_nanoseconds;
  out.out_nanoseconds = took[2];
  post(out);
  out.kind = QL_ITEM_DONE;
  out.is_last = 1;
  for (const Part& part : running->batch.parts) {
    out.sequence = part.item().sequence;
    out.seconds = part.entry->waited;
    post(out);
    queue_.release(part.entry);
  }
  publish();
  sender_.give_back(running->stage);
  spare_.push_back(std::move(running));
  set_running(running_ - 1);
  changed();
}

// Until the host has seen to it, nothing more is sent.
void Core::fail(Running& running) {
  running.has_failed = true;
  ++faults_;
  error_text_ = sender_.error_text();
}

// Leaves a batch to the host: from the first on, or as it has failed.
void Core::hand_over(RunningPtr running, int kind, int status) {
  ql_completion out = head_of(*running, kind);
  out.status = static_cast<uint16_t>(status);
  out.is_last = running->has_more ? 0 : 1;
  post(out);
  out.kind = QL_ITEM_PART;
  out.is_last = 0;
  for (const Part& part : running->batch.parts) {
    out.sequence = part.item().sequence;
    out.seconds = part.entry->waited;
    out.start = part.start;
    out.rows = part.rows;
    post(out);
  }
  publish();
  const uint64_t number = running->number;
  hosted_[number] = std::move(running);
}

// Notes that a part of an item has run on the host.
void Core::leave(Entry* entry) {
  if (--entry->running > 0 || !entry->is_gone) return;
  ql_completion out = {};
  out.sequence = entry->item.sequence;
  out.kind = QL_ITEM_LEFT;
  out.is_last = 1;
  post(out);
  queue_.release(entry);
}

ql_completion Core::head_of(const Running& running, int kind) const {
  const Batch& batch = running.batch;
  ql_completion out = {};
  out.sequence = out.batch = running.number;
  out.seconds = running.began;
  out.rows = static_cast<int32_t>(batch.rows);
  out.start = static_cast<int32_t>(batch.parts.size());
  out.layer = static_cast<int32_t>(batch.parts[0].item().layer);
  out.kind = static_cast<uint8_t>(kind);
  return out;
}

void Core::set_running(int count) {
  running_ = count;
  is_idle_.store(count == 0, std::memory_order_release);
}

void Core::note_oldest() {
  const double began = !sent_.empty() ? sent_.front()->began : is_sending_ ? sending_since_ : 0;
  oldest_.store(began, std::memory_order_release);
}

}  // namespace qlinear::dispatch
