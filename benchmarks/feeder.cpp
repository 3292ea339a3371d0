// A front end in one thread, for slab_native.py: puts rows into slots at a rate, hands in their
// descriptors, takes completions. It asks of the dispatcher what a process of its own would.
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "linear_dispatch.h"

namespace {

constexpr int64_t kAtOnce = 64;
constexpr uint64_t kPlaceBits = 20;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

extern "C" {

struct feed_options {
  ql_dispatch* dispatch;
  void (*submit)(ql_dispatch*, const ql_descriptor*, int64_t);
  int64_t (*drain)(ql_dispatch*, ql_completion*, int64_t);
  void (*host_done)(ql_dispatch*, uint64_t);
  char* slab;
  int64_t slot_unit_bytes;
  const uint32_t* slots;  // [slots_count]
  int64_t slots_count;
  const char* row;
  int64_t row_bytes;
  uint64_t first_number;  // larger with each run
  int32_t layer, dtype;
  double rate;         // rows a second, at random times; 0: one after the other
  double seconds;      // of offering
  double gap_seconds;  // one after the other: between an answer and the next call
};

struct feed_result {
  int64_t offered, answered, in_time, refused, hosted, batches, rows;
  double passed;          // seconds of offering
  double worst_lateness;  // by how much the feeder itself came late
  double median, p99;     // from a row in its slot to its result there
  double median_beyond;   // the same without the kernel's nanoseconds
  double mean_kernel;
};

}  // extern "C"

namespace {

class Feeder {
 public:
  explicit Feeder(const feed_options& options) : options_(options), sent_at_(options.slots_count) {
    for (int64_t place = options.slots_count - 1; place >= 0; --place) free_.push_back(place);
  }

  void at_a_rate(feed_result& out) {
    std::mt19937_64 random(1);
    std::exponential_distribution<double> gap(options_.rate);
    const double begun = now(), end = begun + options_.seconds;
    double due = begun + gap(random);
    for (double time = begun; time < end; time = now()) {
      while (due <= time && due < end) {
        out.worst_lateness = std::max(out.worst_lateness, time - due);
        due += gap(random);
        ++out.offered;
        if (!add()) ++out.refused;
        if (pending_.size() == kAtOnce) hand_in();
      }
      hand_in();
      take(out);
    }
    out.passed = now() - begun;
    out.in_time = out.answered;
    while (out.answered + out.hosted < out.offered - out.refused) take(out);
  }

  void one_by_one(feed_result& out) {
    const double begun = now(), end = begun + options_.seconds;
    while (now() < end) {
      add();
      ++out.offered;
      hand_in();
      while (out.answered + out.hosted < out.offered) take(out);
      const double until = now() + options_.gap_seconds;
      const timespec pause = {0, static_cast<long>(1e9 * options_.gap_seconds)};
      if (options_.gap_seconds > 0) nanosleep(&pause, nullptr);
      while (now() < until) continue;
    }
    out.passed = now() - begun;
    out.in_time = out.answered;
  }

  void figures(feed_result& out) {
    out.mean_kernel = out.batches > 0 ? kernel_ / static_cast<double>(out.batches) : 0;
    out.median = quantile(took_, 0.5);
    out.p99 = quantile(took_, 0.99);
    out.median_beyond = quantile(beyond_, 0.5);
  }

 private:
  char* memory(int64_t place) const {
    return options_.slab + options_.slots[place] * options_.slot_unit_bytes;
  }

  bool add() {
    if (free_.empty()) return false;
    const int64_t place = free_.back();
    free_.pop_back();
    std::memcpy(memory(place), options_.row, static_cast<size_t>(options_.row_bytes));
    ql_descriptor item = {};
    item.sequence = (options_.first_number + ++count_) << kPlaceBits | static_cast<uint64_t>(place);
    item.enqueued_at = sent_at_[static_cast<size_t>(place)] = now();
    item.deadline = INFINITY;
    item.slot = options_.slots[place];
    item.layer = static_cast<uint32_t>(options_.layer);
    item.rows = 1;
    item.bytes = static_cast<uint32_t>(options_.row_bytes);
    item.x_dtype = item.y_dtype = static_cast<uint8_t>(options_.dtype);
    item.flags = QL_RESULT_FITS;
    pending_.push_back(item);
    return true;
  }

  void hand_in() {
    if (pending_.empty()) return;
    options_.submit(options_.dispatch, pending_.data(), static_cast<int64_t>(pending_.size()));
    pending_.clear();
  }

  void take(feed_result& out) {
    const int64_t count = options_.drain(options_.dispatch, ended_, kAtOnce);
    const double time = now();
    for (int64_t i = 0; i < count; ++i) {
      const ql_completion& ended = ended_[i];
      if (ended.kind == QL_BATCH_DONE) {
        ++out.batches;
        out.rows += ended.rows;
        kernel_ += 1e-9 * static_cast<double>(ended.kernel_nanoseconds);
      } else if (ended.kind == QL_ITEM_DONE) {
        const uint64_t place = ended.sequence & ((uint64_t{1} << kPlaceBits) - 1);
        const double took = time - sent_at_[place];
        took_.push_back(took);
        beyond_.push_back(took - 1e-9 * static_cast<double>(ended.kernel_nanoseconds));
        free_.push_back(static_cast<int64_t>(place));
        ++out.answered;
      } else if (ended.kind >= QL_BATCH_HOST && ended.kind <= QL_BATCH_GONE) {
        out.hosted += ended.start;  // nobody here to compute it: a fault of the benchmark
        options_.host_done(options_.dispatch, ended.batch);
      }
    }
  }

  static double quantile(std::vector<double>& values, double share) {
    if (values.empty()) return NAN;
    const auto at = static_cast<size_t>(share * static_cast<double>(values.size() - 1));
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at),
                     values.end());
    return values[at];
  }

  feed_options options_;
  std::vector<double> sent_at_, took_, beyond_;
  std::vector<int64_t> free_;
  std::vector<ql_descriptor> pending_;
  ql_completion ended_[kAtOnce];
  uint64_t count_ = 0;
  double kernel_ = 0;
};

}  // namespace

extern "C" void feed(const feed_options* options, feed_result* result) {
  *result = {};
  Feeder feeder(*options);
  if (options->rate > 0) {
    feeder.at_a_rate(*result);
  } else {
    feeder.one_by_one(*result);
  }
  feeder.figures(*result);
}
