// Which of two streams, or lanes, a product goes to, and what it waits for there: successive ones
// take turns, so that thread blocks of the next take multiprocessors as those of the one before
// leave. Knows no batch.
#pragma once

#include <utility>

namespace qlinear::dispatch {

// The lane of a product, and an event that it waits for beside its own rows; null: none.
struct Turn {
  int lane;
  void* after;
};

// One product that may run beside others goes to the other lane than the one before it. All else
// goes to the first, which the host's own products have, too, after all that was sent before. A
// product that is timed is such a one, and none behind it begins before it has ended.
//
// An event is waited for when its stage may have been used again. Then what recorded it has ended
// long ago, and the wait does no harm: on the first lane it is for a product of the second, or for
// one that has taken its stage since, on the first itself; on the second it is for the last product
// that was timed, as no other records that event.
//
// A failure may lose what was to be waited for. Nothing is sent before it is seen to, which waits
// for all that runs.
class ComputeLanes {
 public:
  explicit ComputeLanes(bool has_two) : has_two_(has_two) {}

  Turn next(bool may_overlap) {
    if (!has_two_) return {0, nullptr};
    if (!may_overlap) return {0, std::exchange(second_ended_, nullptr)};
    if (last_ == 1) return {0, nullptr};
    return {1, std::exchange(timed_ended_, nullptr)};
  }

  // `ended` is the event behind the product.
  void sent(int lane, bool is_timed, void* ended) {
    last_ = lane;
    if (lane == 1) second_ended_ = ended;
    if (is_timed) timed_ended_ = ended;
  }

 private:
  bool has_two_;
  int last_ = 0;
  void* second_ended_ = nullptr;  // of the last product there that the first lane has not awaited
  void* timed_ended_ = nullptr;   // of the last timed one that the second lane has not awaited
};

}  // namespace qlinear::dispatch
