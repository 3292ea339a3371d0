// How many rows the next batch takes, and whether to wait for more: scheduling.py in C++.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "linear_dispatch.h"

namespace qlinear::dispatch {

inline constexpr double kNever = std::numeric_limits<double>::infinity();

class Pace {
 public:
  Pace(const ql_pace& from, int64_t max_batch_rows);

  double seconds(int64_t rows) const { return seconds_[static_cast<size_t>(rows)]; }

  // How many of `waiting` rows the next batch should have, where `others` wait for other layers.
  int64_t rows_to_take(int64_t waiting, int64_t others) const;

  int64_t sweet_rows, chunk_rows, most_rows;
  double row_seconds;

 private:
  double waits(int64_t rows, double cost, int64_t waiting, int64_t others) const;

  std::vector<std::pair<int64_t, double>> sizes_;
  std::vector<double> seconds_;
};

// How fast rows have come lately.
class Arrivals {
 public:
  void note(double now, int64_t rows);
  double row_gap(double now) const;  // infinity: not known

 private:
  double last_ = -kNever, gap_ = kNever;
};

double wait_end(double oldest, int64_t waiting, int64_t sweet_rows, double row_gap,
                double most_seconds);

}  // namespace qlinear::dispatch
