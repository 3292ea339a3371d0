// Entries by sequence number: a table with open addressing, as a map with a node for each takes
// longer than all else that is done for a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace qlinear::dispatch {

struct Entry;

class Index {
 public:
  Index() : places_(kSmallest) {}

  size_t size() const { return count_; }

  Entry* find(uint64_t sequence) const {
    for (size_t at = home(sequence);; at = after(at)) {
      const Place& place = places_[at];
      if (place.entry == nullptr || place.sequence == sequence) return place.entry;
    }
  }

  // A sequence that is not in it.
  void add(uint64_t sequence, Entry* entry) {
    if (2 * ++count_ > places_.size()) grow();
    put({sequence, entry});
  }

  // One that is; those behind it move up, so that no search ends too early.
  void remove(uint64_t sequence) {
    size_t hole = home(sequence);
    while (places_[hole].sequence != sequence || places_[hole].entry == nullptr) hole = after(hole);
    for (size_t at = after(hole); places_[at].entry != nullptr; at = after(at)) {
      const size_t wanted = home(places_[at].sequence);
      if (((at - wanted) & mask()) < ((at - hole) & mask())) continue;  // it would be in front
      places_[hole] = places_[at];
      hole = at;
    }
    places_[hole] = {};
    --count_;
  }

 private:
  struct Place {
    uint64_t sequence = 0;
    Entry* entry = nullptr;  // null: free
  };

  static constexpr size_t kSmallest = 1024;
  static constexpr uint64_t kSpread = 0x9E3779B97F4A7C15;

  size_t mask() const { return places_.size() - 1; }
  size_t after(size_t at) const { return (at + 1) & mask(); }
  size_t home(uint64_t sequence) const {
    return static_cast<size_t>(sequence * kSpread >> 32) & mask();
  }

  void put(const Place& place) {
    size_t at = home(place.sequence);
    while (places_[at].entry != nullptr) at = after(at);
    places_[at] = place;
  }

  void grow() {
    std::vector<Place> before(2 * places_.size());
    before.swap(places_);
    for (const Place& place : before) {
      if (place.entry != nullptr) put(place);
    }
  }

  std::vector<Place> places_;  // a power of two of them, at least half of them free
  size_t count_ = 0;
};

}  // namespace qlinear::dispatch
