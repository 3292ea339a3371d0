// See batching.py: what next_expiry and expire go through.
#include "dispatch/expiries.h"

#include <algorithm>
#include <functional>

#include "dispatch/pace.h"

namespace qlinear::dispatch {
namespace {

constexpr size_t kSpare = 1 << 16;

}  // namespace

void Expiries::add(double at, Entry* entry) {
  const Expiry expiry = {at, entry->item.sequence, entry};
  if (line_.empty() || expiry > line_.back()) {
    line_.push_back(expiry);
    return;
  }
  heap_.push_back(expiry);
  std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
}

double Expiries::next() {
  skip_stale();
  if (line_.empty() && heap_.empty()) return kNever;
  return is_line_first() ? line_.front().at : heap_.front().at;
}

Entry* Expiries::take_next() {
  skip_stale();
  Entry* entry;
  if (is_line_first()) {
    entry = line_.front().entry;
    line_.pop_front();
  } else {
    entry = heap_.front().entry;
    pop_heap();
  }
  return entry;
}

void Expiries::forget_some(size_t waiting) {
  if (line_.size() + heap_.size() <= 2 * waiting + kSpare) return;
  const auto stale = [](const Expiry& one) { return !one.is_valid(); };
  line_.erase(std::remove_if(line_.begin(), line_.end(), stale), line_.end());
  heap_.erase(std::remove_if(heap_.begin(), heap_.end(), stale), heap_.end());
  std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
}

void Expiries::pop_heap() {
  std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
  heap_.pop_back();
}

void Expiries::skip_stale() {
  while (!line_.empty() && !line_.front().is_valid()) line_.pop_front();
  while (!heap_.empty() && !heap_.front().is_valid()) pop_heap();
}

bool Expiries::is_line_first() const {
  return heap_.empty() || (!line_.empty() && heap_.front() > line_.front());
}

}  // namespace qlinear::dispatch
