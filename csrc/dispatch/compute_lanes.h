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

// A product that may run beside others goes to the other lane than the one before it. All else goes
// to the first lane, behind all that was sent before: the host's own products run there, too. After
// one that is timed, which is never beside others, the second lane waits for its end.
//
// When an event is waited for, its stage may have been used again. Then the product that was meant
// has ended long ago, and the event stands for a later one, which does no harm:
// - second_ended_: of a product that is not timed and was sent to the first lane, or this would be
//   its event; the first lane waits, where it is next in line anyway.
// - timed_ended_: of none, as only products that are timed record such an event, and this is that
//   of the last one.
//
// A send that fails may take with it what was to be waited for. Before the next one somebody has
// waited for all that runs.
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
