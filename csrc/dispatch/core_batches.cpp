// What becomes of a batch once it has been taken from the queue.
#include <algorithm>

#include "dispatch/core.h"

namespace qlinear::dispatch {

// Sends other layers of the same calls right behind a batch, without a wait for room.
void Core::start_followers(const Running& leader, double now) {
  std::vector<std::vector<uint64_t>> layers;
  const auto& parts = leader.batch.parts;
  if (options_.most_chained == 0) return;
  for (size_t place = 0; place < parts.size(); ++place) {
    if (parts[place].rows < parts[place].item.rows) return;
    size_t depth = 0;
    ql_descriptor item = parts[place].item;
    for (; item.flags & QL_CALL_GOES_ON; ++depth) {
      const auto found = items_.find(item.sequence + 1);
      if (found == items_.end()) return;
      item = found->second.descriptor;
      if (place == 0) layers.emplace_back();
      if (depth == layers.size()) return;
      if (place > 0) {
        const ql_descriptor& other = items_[layers[depth][0]].descriptor;
        if (item.layer != other.layer || item.x_dtype != other.x_dtype ||
            item.y_dtype != other.y_dtype) {
          return;
        }
      }
      layers[depth].push_back(item.sequence);
    }
    if (depth != layers.size()) return;
  }
  for (size_t i = 0; i < layers.size() && i < static_cast<size_t>(options_.most_chained); ++i) {
    Batch batch;
    queue_.take_together(layers[i], batch);
    if (batch.parts.empty()) return;
    begin(std::move(batch), now);
  }
}

const Core::Running& Core::begin(Batch&& batch, double now) {
  auto running = std::make_unique<Running>();
  running->number = ++numbers_;
  running->began = now;
  running->batch = std::move(batch);
  for (const Part& part : running->batch.parts) {
    Item& item = items_[part.item.sequence];
    ++item.running;
    // What has come since the time was taken has not waited.
    if (part.start == 0) item.waited = std::max(now - part.item.enqueued_at, 0.0);
  }
  const Running& begun = *running;
  if (!is_paused_ && sender_.can_send(begun.batch)) running->stage = sender_.take_stage();
  if (running->stage != nullptr) {
    send(std::move(running), now);
  } else {
    hand_over(std::move(running), QL_BATCH_HOST, QL_OK);
  }
  ++running_;
  is_idle_.store(false, std::memory_order_release);
  return begun;
}

void Core::send(std::unique_ptr<Running> running, double now) {
  if (sent_.empty()) oldest_.store(now, std::memory_order_release);
  const bool is_alone = running_ == 0 && queue_.rows() == 0;
  const int status = sender_.send(running->batch, *running->stage, is_alone);
  if (status == QL_OK) {
    sent_.push_back(std::move(running));
    if (!options_.spins) changed_.notify_all();
    return;
  }
  if (sent_.empty()) oldest_.store(0, std::memory_order_release);
  hand_over(std::move(running), QL_BATCH_FAILED, status);
}

// Ends the oldest batch on the device.
void Core::finish(int status, const int64_t took[3]) {
  std::unique_ptr<Running> running = std::move(sent_.front());
  sent_.pop_front();
  oldest_.store(sent_.empty() ? 0 : sent_.front()->began, std::memory_order_release);
  if (status != QL_OK) {
    hand_over(std::move(running), QL_BATCH_GONE, status);
    tell();
    return;
  }
  const Batch& batch = running->batch;
  ql_completion out = {};
  out.sequence = out.batch = running->number;
  out.in_nanoseconds = took[0];
  out.kernel_nanoseconds = took[1];
  out.out_nanoseconds = took[2];
  out.seconds = running->began;
  out.rows = static_cast<int32_t>(batch.rows);
  out.start = static_cast<int32_t>(batch.parts.size());
  out.layer = static_cast<int32_t>(batch.parts[0].item.layer);
  out.kind = QL_BATCH_DONE;
  post(out);
  out.kind = QL_ITEM_DONE;
  out.is_last = 1;
  for (const Part& part : batch.parts) {
    const auto item = items_.find(part.item.sequence);
    out.sequence = part.item.sequence;
    out.seconds = item->second.waited;
    post(out);
    items_.erase(item);
  }
  sender_.give_back(running->stage);
  is_idle_.store(--running_ == 0, std::memory_order_release);
  tell();
}

// Leaves a batch to the host: from the first on, or as it has failed.
void Core::hand_over(std::unique_ptr<Running> running, int kind, int status) {
  const Batch& batch = running->batch;
  if (kind != QL_BATCH_HOST) {
    running->has_failed = is_paused_ = true;
    error_text_ = sender_.error_text();
  }
  ql_completion out = {};
  out.sequence = out.batch = running->number;
  out.seconds = running->began;
  out.rows = static_cast<int32_t>(batch.rows);
  out.start = static_cast<int32_t>(batch.parts.size());
  out.layer = static_cast<int32_t>(batch.parts[0].item.layer);
  out.kind = static_cast<uint8_t>(kind);
  out.status = static_cast<uint16_t>(status);
  post(out);
  out.kind = QL_ITEM_PART;
  for (const Part& part : batch.parts) {
    out.sequence = part.item.sequence;
    out.seconds = items_[part.item.sequence].waited;
    out.start = part.start;
    out.rows = part.rows;
    post(out);
  }
  const uint64_t number = running->number;
  hosted_[number] = std::move(running);
}

// Notes that a part of an item has run on the host.
void Core::leave(uint64_t sequence) {
  const auto item = items_.find(sequence);
  if (--item->second.running > 0 || queue_.contains(sequence)) return;
  items_.erase(item);
  ql_completion out = {};
  out.sequence = sequence;
  out.kind = QL_ITEM_LEFT;
  out.is_last = 1;
  post(out);
}

}  // namespace qlinear::dispatch
