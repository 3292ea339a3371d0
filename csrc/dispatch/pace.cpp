// See scheduling.py, which says why; tests compare the two decision by decision.
#include "dispatch/pace.h"

#include <algorithm>

namespace qlinear::dispatch {
namespace {

constexpr double kNoGain = 1.15;
constexpr double kMemory = 0.1;

}  // namespace

Pace::Pace(const ql_pace& from, int64_t max_batch_rows)
    : sweet_rows(from.sweet_rows),
      chunk_rows(from.chunk_rows),
      most_rows(from.most_rows),
      row_seconds(from.row_seconds),
      seconds_(from.seconds, from.seconds + max_batch_rows + 1) {
  for (int i = 0; i < from.sizes_count; ++i) {
    sizes_.emplace_back(from.sizes[i], from.size_seconds[i]);
  }
}

int64_t Pace::rows_to_take(int64_t waiting, int64_t others) const {
  if (waiting <= sweet_rows) return waiting;
  const double all =
      waiting <= most_rows ? static_cast<double>(waiting + others) * seconds(waiting) : kNever;
  double least = all;
  for (const auto& [rows, cost] : sizes_) {
    if (rows < waiting) least = std::min(least, waits(rows, cost, waiting, others));
  }
  const double most = kNoGain * least;
  int64_t found = waiting <= most_rows && all <= most ? waiting : 0;
  for (const auto& [rows, cost] : sizes_) {
    if (rows < waiting && rows > found && waits(rows, cost, waiting, others) <= most) found = rows;
  }
  return found;
}

double Pace::waits(int64_t rows, double cost, int64_t waiting, int64_t others) const {
  const int64_t batches = waiting / rows, rest = waiting % rows;
  const auto count = static_cast<double>(batches);
  double waits = static_cast<double>(rows) * cost * count * (count + 1) / 2;
  double drained = count * cost;
  if (rest > 0) {
    drained += seconds(rest);
    waits += static_cast<double>(rest) * drained;
  }
  return waits + static_cast<double>(others) * (cost + drained) / 2;
}

void Arrivals::note(double now, int64_t rows) {
  if (last_ != -kNever) {
    const double gap = (now - last_) / static_cast<double>(rows);
    const double before = gap_ == kNever ? gap : gap_;
    gap_ = before + kMemory * (gap - before);
  }
  last_ = now;
}

double Arrivals::row_gap(double now) const {
  return gap_ == kNever ? kNever : std::max(gap_, now - last_);
}

double wait_end(double oldest, int64_t waiting, int64_t sweet_rows, double row_gap,
                double most_seconds) {
  if (waiting >= sweet_rows || 2 * row_gap > most_seconds) return oldest;
  return oldest + std::min(most_seconds, static_cast<double>(sweet_rows - waiting) * row_gap);
}

}  // namespace qlinear::dispatch
