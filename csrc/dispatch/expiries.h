// When what waits expires: a line for what comes in that order, as nearly all does, and a heap for
// the rest. Of entries that left, too, until they come up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "dispatch/waiting.h"

namespace qlinear::dispatch {

class Expiries {
 public:
  void add(double at, Entry* entry);
  double next();       // infinity: never
  Entry* take_next();  // there is one

  // Keeps those of what still waits, if most is stale: at some hundred thousand rows a second
  // they pile up for as long as the largest age behind one that waits long.
  void forget_some(size_t waiting);

 private:
  struct Expiry {
    double at;
    uint64_t sequence;
    Entry* entry;

    bool is_valid() const { return entry->item.sequence == sequence && !entry->is_gone; }
    bool operator>(const Expiry& other) const {
      return at != other.at ? at > other.at : sequence > other.sequence;
    }
  };

  void pop_heap();
  void skip_stale();
  bool is_line_first() const;

  std::deque<Expiry> line_;
  std::vector<Expiry> heap_;
};

}  // namespace qlinear::dispatch
