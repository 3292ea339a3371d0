// One producer, one consumer, no lock: descriptors one way, completions the other. Each side looks
// at the other's place only when it seems to have come to it, so that the two rarely share a line.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace qlinear::dispatch {

template <typename T>
class Ring {
 public:
  explicit Ring(size_t capacity) : items_(capacity) {}  // a power of two

  // ---- The producer ----

  // One that is not seen before publish(); false: no room.
  bool put(const T& item) {
    if (!has_room(1)) return false;
    items_[put_++ & (items_.size() - 1)] = item;
    return true;
  }

  void publish() { end_.store(put_, std::memory_order_release); }

  // All or none of them, seen at once; false: no room.
  bool push(const T* items, size_t count) {
    if (!has_room(count)) return false;
    for (size_t i = 0; i < count; ++i) put(items[i]);
    publish();
    return true;
  }

  // ---- The consumer ----

  size_t pop(T* out, size_t capacity) {
    const uint64_t begin = begin_.load(std::memory_order_relaxed);
    if (seen_end_ - begin < capacity) seen_end_ = end_.load(std::memory_order_acquire);
    const uint64_t ready = seen_end_ - begin;
    const size_t count = ready < capacity ? static_cast<size_t>(ready) : capacity;
    if (count == 0) return 0;
    for (size_t i = 0; i < count; ++i) out[i] = items_[(begin + i) & (items_.size() - 1)];
    begin_.store(begin + count, std::memory_order_release);
    return count;
  }

  bool is_empty() const {
    return begin_.load(std::memory_order_acquire) == end_.load(std::memory_order_acquire);
  }

 private:
  bool has_room(size_t count) {
    if (count <= items_.size() - (put_ - seen_begin_)) return true;
    seen_begin_ = begin_.load(std::memory_order_acquire);
    return count <= items_.size() - (put_ - seen_begin_);
  }

  std::vector<T> items_;
  alignas(64) std::atomic<uint64_t> begin_{0};
  uint64_t seen_end_ = 0;  // the consumer's
  alignas(64) std::atomic<uint64_t> end_{0};
  uint64_t put_ = 0, seen_begin_ = 0;  // the producer's
};

}  // namespace qlinear::dispatch
