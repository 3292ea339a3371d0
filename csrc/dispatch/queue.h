// Everything that waits: batching.WorkQueue in C++, which is the specification. Pure: every time is
// handed in. Not for several threads at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

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
  ql_descriptor item;
  int32_t start, rows;
};

struct Batch {
  std::vector<Part> parts;  // empty: there is none
  int64_t rows = 0;
};

struct Dropped {
  ql_descriptor item;
  bool is_late;  // past its deadline; else too old
};

class Queue {
 public:
  explicit Queue(const ql_queue_limits& limits);

  double admit(const ql_descriptor* items, int64_t count);
  bool cancel(uint64_t sequence);  // false: it does not wait
  bool has_begun(uint64_t sequence) const;
  bool contains(uint64_t sequence) const { return entries_.count(sequence) > 0; }
  int64_t rows() const { return waiting_.rows(); }
  double next_expiry();
  void expire(double now, size_t most, std::vector<Dropped>& dropped);
  double wait_end(double now) const;
  void take(double now, Batch& batch);
  void take_together(const std::vector<uint64_t>& sequences, Batch& batch);

  // Told of rows that leave, by layer.
  void (*on_leave)(void* to, uint32_t layer, int64_t rows) = nullptr;
  void* on_leave_to = nullptr;

 private:
  Entry* new_entry();
  Entry* next(double now);
  void take_all(Bucket& bucket, Batch& batch);
  void take_entry(Entry* entry, double row_seconds, Batch& batch);
  void cut(Entry* entry, int64_t rows, double done_at);
  void remove(Entry* entry);
  void left(uint32_t layer, int64_t rows);
  void forget_expiries();

  int64_t max_batch_rows_;
  double max_age_seconds_, max_wait_seconds_;
  std::vector<Pace> paces_;
  std::vector<int32_t> pace_of_layer_;
  Arrivals arrivals_;
  Waiting waiting_{0};
  std::unordered_map<uint64_t, Entry*> entries_;
  std::unordered_map<uint64_t, std::unique_ptr<Bucket>> buckets_;
  Shares shares_;
  int turns_of_others_ = 0;
  struct Expiry {
    double at;
    uint64_t sequence;
    bool operator>(const Expiry& other) const {
      return at != other.at ? at > other.at : sequence > other.sequence;
    }
  };
  std::vector<Expiry> expiries_;  // a heap; of entries that left, too
  std::deque<Entry> pool_;
  std::vector<Entry*> spare_;
};

}  // namespace qlinear::dispatch
