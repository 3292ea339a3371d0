// One producer, one consumer, no lock: descriptors one way, completions the other.
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

  // All or none of them, seen at once; false: no room.
  bool push(const T* items, size_t count) {
    const uint64_t end = end_.load(std::memory_order_relaxed);
    if (count > items_.size() - (end - begin_.load(std::memory_order_acquire))) return false;
    for (size_t i = 0; i < count; ++i) items_[(end + i) & (items_.size() - 1)] = items[i];
    end_.store(end + count, std::memory_order_release);
    return true;
  }

  size_t pop(T* out, size_t capacity) {
    const uint64_t begin = begin_.load(std::memory_order_relaxed);
    const uint64_t ready = end_.load(std::memory_order_acquire) - begin;
    const size_t count = ready < capacity ? static_cast<size_t>(ready) : capacity;
    for (size_t i = 0; i < count; ++i) out[i] = items_[(begin + i) & (items_.size() - 1)];
    begin_.store(begin + count, std::memory_order_release);
    return count;
  }

  bool is_empty() const {
    return begin_.load(std::memory_order_acquire) == end_.load(std::memory_order_acquire);
  }

 private:
  std::vector<T> items_;
  alignas(64) std::atomic<uint64_t> begin_{0};
  alignas(64) std::atomic<uint64_t> end_{0};
};

}  // namespace qlinear::dispatch
