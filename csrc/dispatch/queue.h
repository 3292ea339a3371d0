// Everything that waits: batching.WorkQueue in C++, which is the specification. Pure: every time is
// handed in. Not for several threads at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "dispatch/expiries.h"
#include "dispatch/index.h"
#include "dispatch/pace.h"
#include "dispatch/shares.h"
#include "dispatch/waiting.h"

namespace qlinear::dispatch {

// What waits under one key: layer, dtype of x, dtype of y.
struct Bucket {
  Bucket(uint64_t key, const Pace* pace) : key(key), pace(pace) {}
  uint64_t key;
  const Pace* pace;
  Waiting waiting{1};
};

struct Part {
  Entry* entry;
  int32_t start, rows;

  const ql_descriptor& item() const { return entry->item; }
};

struct Batch {
  std::vector<Part> parts;  // empty: there is none
  int64_t rows = 0;
};

struct Dropped {
  Entry* entry;
  bool is_late;  // past its deadline; else too old
};

class Queue {
 public:
  explicit Queue(const ql_queue_limits& limits);

  double admit(const ql_descriptor* items, int64_t count);
  Entry* find(uint64_t sequence) const { return entries_.find(sequence); }  // until it is released
  bool contains(uint64_t sequence) const;                                   // it waits
  bool cancel(uint64_t sequence);                                           // false: it does not
  bool has_begun(uint64_t sequence) const;
  int64_t rows() const { return waiting_.rows(); }
  double next_expiry() { return expiries_.next(); }
  void expire(double now, size_t most, std::vector<Dropped>& dropped);
  double wait_end(double now) const;
  void take(double now, Batch& batch);
  void take_together(const std::vector<Entry*>& entries, Batch& batch);

  // Forgets an entry that is gone. Until then whoever was told of it may look at it.
  void release(Entry* entry);

  // Told of rows that leave, by layer.
  void (*on_leave)(void* to, uint32_t layer, int64_t rows) = nullptr;
  void* on_leave_to = nullptr;

 private:
  Entry* new_entry();
  Bucket* bucket_of(const ql_descriptor& item);
  Entry* next(double now);
  void take_all(Bucket& bucket, Batch& batch);
  void take_entry(Entry* entry, double row_seconds, Batch& batch);
  void cut(Entry* entry, int64_t rows, double done_at);
  void remove(Entry* entry);
  void left(uint32_t layer, int64_t rows);

  int64_t max_batch_rows_;
  double max_age_seconds_, max_wait_seconds_;
  std::vector<Pace> paces_;
  std::vector<int32_t> pace_of_layer_;
  Arrivals arrivals_;
  Waiting waiting_{0};
  Index entries_;
  std::unordered_map<uint64_t, std::unique_ptr<Bucket>> buckets_;  // empty ones, too
  Bucket* last_ = nullptr;                                         // that was asked for
  size_t filled_ = 0;                                              // buckets in which entries wait
  Shares shares_;
  int turns_of_others_ = 0;
  Expiries expiries_;
  std::deque<Entry> pool_;
  std::vector<Entry*> spare_;
};

}  // namespace qlinear::dispatch
