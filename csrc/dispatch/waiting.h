// Entries that wait, in the order in which they are to be served, as far as that is asked for:
// lanes.py in C++. Entries live in a pool and are never freed before it, so stale records may look.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "dispatch/shares.h"
#include "linear_dispatch.h"

namespace qlinear::dispatch {

struct Bucket;

// An item from when it is admitted until it is released: it waits, or the rest of it does while
// other pieces are computed, or all of it is computed.
struct Entry {
  ql_descriptor item;
  Share* share;    // where it waits
  Bucket* bucket;  // of its key
  double due, since;
  int64_t next_row;
  uint32_t version;
  int running;                  // parts that are computed: its owner's to count
  double waited;                // until the first one was, seconds
  bool is_gone;                 // nothing of it waits any more
  Entry *before[2], *after[2];  // among all that wait, and among those of its key

  int64_t rows_left() const { return item.rows - next_row; }
};

struct Record {
  double due;
  uint64_t sequence;
  uint32_t version;
  Entry* entry;

  bool is_valid() const {
    return entry->item.sequence == sequence && !entry->is_gone && entry->version == version;
  }
};

// Entries of one priority.
class Level {
 public:
  void add(Entry* entry);
  Entry* first();  // null: all have left

 private:
  struct Head {
    int64_t round;
    Record record;
    uint64_t share, serial;
  };
  struct Lane {
    std::vector<Record> records;  // a heap
    uint64_t head = 0;            // the serial of its one valid head
  };
  static bool later(const Record& one, const Record& other);
  static bool is_behind(const Head& one, const Head& other);
  void push_head(int64_t round, const Record& record, uint64_t share, Lane& lane);
  void pop_head();

  std::unordered_map<uint64_t, Lane> lanes_;
  std::vector<Head> heads_;  // a heap
  uint64_t serials_ = 0;
};

// Some of what waits: in order of arrival, and ranked once that is asked for.
class Waiting {
 public:
  explicit Waiting(int link) : link_(link) {}

  int64_t rows() const { return rows_; }
  int64_t count() const { return count_; }
  Entry* oldest() const { return head_; }
  Entry* next(const Entry* entry) const { return entry->after[link_]; }

  void add(Entry* entry);
  void remove(Entry* entry);
  void moved(Entry* entry, int64_t rows);
  Entry* first();  // there is one

 private:
  void append(Entry* entry);
  void unlink(Entry* entry);
  void note(Entry* entry);
  void rank(Entry* entry);

  int link_;
  int64_t rows_ = 0, count_ = 0, records_ = 0;
  Entry *head_ = nullptr, *tail_ = nullptr;
  bool is_ranked_ = false;
  std::map<int32_t, Level> levels_;
};

}  // namespace qlinear::dispatch
