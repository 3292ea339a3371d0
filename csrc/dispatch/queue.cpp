// See batching.py, which says why; tests compare the two decision by decision.
#include "dispatch/queue.h"

#include <algorithm>

namespace qlinear::dispatch {
namespace {

constexpr double kPatience = 0.5;
constexpr int kTurnsOfOthers = 3;

uint64_t key_of(const ql_descriptor& item) {
  return uint64_t{item.layer} << 16 | uint64_t{item.x_dtype} << 8 | item.y_dtype;
}

}  // namespace

Queue::Queue(const ql_queue_limits& limits)
    : max_batch_rows_(limits.max_batch_rows),
      max_age_seconds_(limits.max_age_seconds),
      max_wait_seconds_(limits.max_wait_seconds),
      pace_of_layer_(limits.pace_of_layer, limits.pace_of_layer + limits.layers_count) {
  for (int i = 0; i < limits.paces_count; ++i) {
    paces_.emplace_back(limits.paces[i], max_batch_rows_);
  }
}

double Queue::admit(const ql_descriptor* items, int64_t count) {
  int64_t rows = 0;
  for (int64_t i = 0; i < count; ++i) rows += items[i].rows;
  if (max_wait_seconds_ > 0) arrivals_.note(items[0].enqueued_at, rows);
  double first_expiry = kNever;
  for (int64_t i = 0; i < count; ++i) {
    const ql_descriptor& item = items[i];
    const double expiry = std::min(item.enqueued_at + max_age_seconds_, item.deadline);
    Entry* entry = new_entry();
    *entry = {item,
              shares_.enter(item.client),
              bucket_of(item),
              expiry,
              item.enqueued_at,
              0,
              0,
              0,
              0,
              false,
              {},
              {}};
    entries_.add(item.sequence, entry);
    waiting_.add(entry);
    if (entry->bucket->waiting.count() == 0) ++filled_;
    entry->bucket->waiting.add(entry);
    expiries_.add(expiry, entry);
    first_expiry = std::min(first_expiry, expiry);
  }
  expiries_.forget_some(static_cast<size_t>(waiting_.count()));
  return first_expiry;
}

void Queue::release(Entry* entry) {
  entries_.remove(entry->item.sequence);
  spare_.push_back(entry);
}

bool Queue::contains(uint64_t sequence) const {
  const Entry* entry = find(sequence);
  return entry != nullptr && !entry->is_gone;
}

bool Queue::cancel(uint64_t sequence) {
  if (!contains(sequence)) return false;
  Entry* entry = find(sequence);
  const int64_t rows = entry->rows_left();
  remove(entry);
  left(entry->item.layer, rows);
  return true;
}

bool Queue::has_begun(uint64_t sequence) const {
  return !contains(sequence) || find(sequence)->next_row > 0;
}

void Queue::expire(double now, size_t most, std::vector<Dropped>& dropped) {
  while (dropped.size() < most && next_expiry() <= now) {
    Entry* entry = expiries_.take_next();
    const ql_descriptor& item = entry->item;
    if (item.deadline > now && entry->next_row > 0) {
      // It runs already, piece by piece: only its deadline can stop it.
      if (item.deadline != kNever) expiries_.add(item.deadline, entry);
      continue;
    }
    dropped.push_back({entry, item.deadline <= now});
    const int64_t rows = entry->rows_left();
    remove(entry);
    left(item.layer, rows);
  }
}

double Queue::wait_end(double now) const {
  if (max_wait_seconds_ <= 0 || filled_ != 1) return now;
  const Entry* oldest = waiting_.oldest();
  return dispatch::wait_end(oldest->since, rows(), oldest->bucket->pace->sweet_rows,
                            arrivals_.row_gap(now), max_wait_seconds_);
}

void Queue::take(double now, Batch& batch) {
  batch.parts.clear();
  batch.rows = 0;
  if (filled_ == 0) return;
  if (filled_ == 1) {
    // Mostly all of it is taken, and nobody needs to know its order.
    Bucket& only = *waiting_.oldest()->bucket;
    const int64_t rows = only.waiting.rows();
    if (only.pace->rows_to_take(rows, 0) == rows) {
      shares_.serve(waiting_.oldest()->share);
      take_all(only, batch);
      return;
    }
  }
  Entry* entry = next(now);
  shares_.serve(entry->share);
  Bucket& bucket = *entry->bucket;
  const Pace& pace = *bucket.pace;
  const int64_t waiting = bucket.waiting.rows();
  int64_t room = pace.rows_to_take(waiting, rows() - waiting);
  // What is not cut must fit.
  room = std::max(room, std::min(entry->rows_left(), pace.chunk_rows));
  if (waiting <= room) {
    take_all(bucket, batch);
    return;
  }
  while (true) {
    const int64_t left = entry->rows_left(), count = std::min(left, room - batch.rows);
    // Only large calls are cut; anything else waits for a batch that holds it.
    if (count < left && entry->item.rows <= pace.chunk_rows) break;
    batch.parts.push_back(
        {entry, static_cast<int32_t>(entry->next_row), static_cast<int32_t>(count)});
    batch.rows += count;
    entry->share->charge(static_cast<double>(count) * pace.row_seconds);
    if (count == left) {
      remove(entry);
    } else {
      cut(entry, count, now + pace.seconds(batch.rows));
    }
    if (batch.rows == room) break;
    entry = bucket.waiting.first();
  }
  left(entry->item.layer, batch.rows);
}

void Queue::take_together(const std::vector<Entry*>& entries, Batch& batch) {
  batch.parts.clear();
  batch.rows = 0;
  int64_t rows = 0;
  for (const Entry* entry : entries) {
    if (entry == nullptr || entry->is_gone || entry->next_row > 0) return;
    rows += entry->item.rows;
  }
  if (entries.empty() || rows > max_batch_rows_) return;
  const double row_seconds = entries[0]->bucket->pace->seconds(rows) / static_cast<double>(rows);
  for (Entry* entry : entries) take_entry(entry, row_seconds, batch);
  left(entries[0]->item.layer, rows);
}

Entry* Queue::new_entry() {
  if (spare_.empty()) return &pool_.emplace_back();
  Entry* entry = spare_.back();
  spare_.pop_back();
  return entry;
}

Bucket* Queue::bucket_of(const ql_descriptor& item) {
  const uint64_t key = key_of(item);
  if (last_ != nullptr && last_->key == key) return last_;
  auto& bucket = buckets_[key];
  if (bucket == nullptr) {
    const auto pace = static_cast<size_t>(pace_of_layer_[item.layer]);
    bucket = std::make_unique<Bucket>(key, &paces_[pace]);
  }
  return last_ = bucket.get();
}

// The entry that is to be served next; there is one.
Entry* Queue::next(double now) {
  Entry* oldest = waiting_.oldest();
  if (waiting_.count() == 1) return oldest;
  const bool is_long = now - oldest->since > kPatience * max_age_seconds_;
  if (is_long && turns_of_others_ >= kTurnsOfOthers) {
    turns_of_others_ = 0;
    return oldest;
  }
  ++turns_of_others_;
  return filled_ == 1 ? oldest->bucket->waiting.first() : waiting_.first();
}

void Queue::take_all(Bucket& bucket, Batch& batch) {
  const int64_t rows = bucket.waiting.rows();
  const uint32_t layer = bucket.waiting.oldest()->item.layer;
  const double row_seconds = bucket.pace->seconds(rows) / static_cast<double>(rows);
  while (bucket.waiting.count() > 0) take_entry(bucket.waiting.oldest(), row_seconds, batch);
  left(layer, rows);
}

// All of one, whose rows the caller says to have left.
void Queue::take_entry(Entry* entry, double row_seconds, Batch& batch) {
  const int64_t rows = entry->rows_left();
  batch.parts.push_back({entry, static_cast<int32_t>(entry->next_row), static_cast<int32_t>(rows)});
  batch.rows += rows;
  entry->share->charge(static_cast<double>(rows) * row_seconds);
  remove(entry);
}

// Hands out the next rows of a large item; the rest waits as if it came when they are done.
void Queue::cut(Entry* entry, int64_t rows, double done_at) {
  entry->next_row += rows;
  entry->since = done_at;
  entry->due = done_at + max_age_seconds_;
  ++entry->version;
  waiting_.moved(entry, rows);
  entry->bucket->waiting.moved(entry, rows);
}

void Queue::remove(Entry* entry) {
  waiting_.remove(entry);
  entry->bucket->waiting.remove(entry);
  if (entry->bucket->waiting.count() == 0) --filled_;
  entry->is_gone = true;
  shares_.leave(entry->share);
}

void Queue::left(uint32_t layer, int64_t rows) {
  if (on_leave != nullptr) on_leave(on_leave_to, layer, rows);
}

}  // namespace qlinear::dispatch
