// What the dispatcher itself takes, in one thread and without a device, and what that makes of a
// load on a device that is a timeline: for dispatcher.py. All but the device is the server's code;
// in the timeline only hosts' and the device's times are made up.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "dispatch/core.h"

using qlinear::dispatch::Core;
using qlinear::dispatch::monotonic_seconds;

extern "C" {

struct bench_device {
  double send, end;                // of the host: run() and the wait() that finds the end, seconds
  double product;                  // seconds, however many rows
  double in_row, out_row, moving;  // seconds a row, and until the first is there
  double in_turn;                  // 1: no step of a batch runs beside one of another
};

struct bench_own {
  double start_batch, start_row, end_batch, end_row;  // of the dispatcher's code, seconds
};

struct bench_load {
  double rows_per_second;
  int64_t rows;
  int32_t threads;  // 1: who sends looks after what has ended, too; 2: one for each
};

struct bench_found {
  int64_t rows, batches;
  double seconds, median, p99;       // of a row, from its arrival to its completion
  double busy_sending, busy_ending;  // share of the time
};

}  // extern "C"

namespace {

constexpr int kMostRows = 1024;
constexpr int kStages = 3;
constexpr int kClients = 16;
constexpr int64_t kUnit = 1024;

int run(const ql_cuda_batch*) { return QL_OK; }

int wait(const ql_cuda_batch*, int64_t, int32_t* done, int64_t* took) {
  *done = 1;
  took[0] = took[1] = took[2] = 1000;
  return QL_OK;
}

const char* error_text() { return ""; }

// A dispatcher without threads over a device that costs nothing, and one-row calls of one layer.
class Bench {
 public:
  explicit Bench(const std::vector<double>& seconds) : seconds_(seconds) {
    std::vector<int32_t> sizes;
    std::vector<double> costs;
    for (int32_t size = 8; size <= kMostRows; size *= 2) {
      sizes.push_back(size);
      costs.push_back(seconds_[static_cast<size_t>(size)]);
    }
    const int sizes_count = static_cast<int>(sizes.size());
    const ql_pace pace = {8,           kMostRows,    kMostRows,    sizes_count,
                          seconds_[1], sizes.data(), costs.data(), seconds_.data()};
    const int32_t paces[] = {0};
    ql_dispatch_layer layer = {};
    layer.product.k = 4096;
    layer.product.n = 28672;
    layer.is_direct = 1;
    ql_dispatch_stage stages[kStages] = {};
    for (int i = 0; i < kStages; ++i) {
      stages[i].x_bytes = stages[i].y_bytes = int64_t{1} << 40;
      stages[i].table = table_;
    }
    ql_dispatch_options options = {};
    options.queue = {kMostRows, 60, 0, 1, 1, &pace, paces};
    options.layers = &layer;
    options.stages = stages;
    options.stages_count = options.most_running = kStages;
    options.table_rows = kMostRows;
    options.row_blocks = 4;
    options.done_fd = -1;
    options.slab = slab_;
    options.slot_unit_bytes = 0;
    options.run = run;
    options.wait = wait;
    options.error_text = error_text;
    core_ = std::make_unique<Core>(options);
    const ql_cuda_plan plan = {};
    for (int rows = 1; rows <= kMostRows; ++rows) {
      core_->add_plan(0, QL_F16, QL_F16, rows, plan);
    }
  }

  Core& core() { return *core_; }

  void hand_in(int64_t rows) {
    const double time = monotonic_seconds();
    items_.assign(static_cast<size_t>(rows), {});
    for (ql_descriptor& item : items_) {
      item.sequence = ++sequence_;
      item.client = sequence_ % kClients;
      item.enqueued_at = time;
      item.deadline = INFINITY;
      item.rows = 1;
      item.x_dtype = item.y_dtype = QL_F16;
      item.flags = QL_RESULT_FITS;
    }
    core_->submit(items_.data(), rows);
  }

  // The rows of the batch that ends, each of which it tells of.
  int64_t take_ended() { return core_->drain(ended_, kMostRows + 1) - 1; }

 private:
  std::vector<double> seconds_;
  char slab_[kUnit] = {};
  uint64_t table_[2 * kMostRows] = {};
  uint64_t sequence_ = 0;
  std::vector<ql_descriptor> items_;
  ql_completion ended_[kMostRows + 1];
  std::unique_ptr<Core> core_;
};

std::vector<double> flat(double seconds) { return std::vector<double>(kMostRows + 1, seconds); }

// One after the other in virtual time: arrivals, the thread that sends, the one that ends batches.
class Timeline {
 public:
  Timeline(const bench_device& device, const bench_own& own, const bench_load& load)
      : device_(device), own_(own), load_(load), bench_(costs(device)) {
    std::mt19937_64 random(1);
    std::exponential_distribution<double> gap(load.rows_per_second);
    double at = 0;
    for (int64_t i = 0; i < load.rows; ++i) arrivals_.push_back(at += gap(random));
  }

  void run(bench_found& out) {
    while (ended_ < load_.rows) {
      const double start = can_start(), end = can_end();
      if (start <= end) {
        start_one(start);
      } else {
        end_one(end);
      }
    }
    const double last = std::max(sender_, ender_);
    out.rows = load_.rows;
    out.batches = batches_;
    out.seconds = last;
    out.busy_sending = busy_sending_ / last;
    out.busy_ending = busy_ending_ / last;
    out.median = quantile(0.5);
    out.p99 = quantile(0.99);
  }

 private:
  struct Sent {
    double done;
    size_t first, end;  // arrivals
  };

  // What the scheduler is told: the slowest step.
  static std::vector<double> costs(const bench_device& device) {
    std::vector<double> seconds = flat(device.product);
    for (size_t rows = 1; rows < seconds.size(); ++rows) {
      seconds[rows] = std::max(device.product, device.out_row * static_cast<double>(rows));
    }
    return seconds;
  }

  double& ender() { return load_.threads == 1 ? sender_ : ender_; }

  double can_start() const {
    if (sent_.size() == kStages || taken_ == arrivals_.size()) return INFINITY;
    return std::max({sender_, arrivals_[taken_], room_since_});
  }

  double can_end() { return sent_.empty() ? INFINITY : std::max(ender(), sent_.front().done); }

  void start_one(double now) {
    const size_t before = handed_in_;
    while (handed_in_ < arrivals_.size() && arrivals_[handed_in_] <= now) ++handed_in_;
    if (handed_in_ > before) bench_.hand_in(static_cast<int64_t>(handed_in_ - before));
    const int64_t left = bench_.core().rows_left()[1];
    bench_.core().start_one();
    const auto rows = static_cast<double>(bench_.core().rows_left()[1] - left);
    const size_t first = taken_;
    taken_ += static_cast<size_t>(rows);
    const double took = own_.start_batch + rows * own_.start_row + device_.send;
    busy_sending_ += took;
    const double sent = sender_ = now + took;
    if (device_.in_turn != 0 && !sent_.empty()) in_free_ = std::max(in_free_, sent_.back().done);
    in_free_ = std::max(in_free_, sent) + rows * device_.in_row;
    product_free_ = std::max(product_free_, in_free_ + device_.moving) + device_.product;
    out_free_ = std::max(out_free_, product_free_) + rows * device_.out_row;
    sent_.push_back({out_free_ + device_.moving, first, taken_});
    ++batches_;
  }

  void end_one(double now) {
    bench_.core().end_one();
    const Sent batch = sent_.front();
    sent_.pop_front();
    ended_ += bench_.take_ended();
    const auto rows = static_cast<double>(batch.end - batch.first);
    const double took = own_.end_batch + rows * own_.end_row + device_.end;
    busy_ending_ += took;
    ender() = room_since_ = now + took;
    for (size_t i = batch.first; i < batch.end; ++i) times_.push_back(ender() - arrivals_[i]);
  }

  double quantile(double share) {
    const auto at = static_cast<std::ptrdiff_t>(share * static_cast<double>(times_.size() - 1));
    std::nth_element(times_.begin(), times_.begin() + at, times_.end());
    return times_[static_cast<size_t>(at)];
  }

  bench_device device_;
  bench_own own_;
  bench_load load_;
  Bench bench_;
  std::vector<double> arrivals_, times_;
  size_t handed_in_ = 0, taken_ = 0;
  int64_t ended_ = 0, batches_ = 0;
  double sender_ = 0, ender_ = 0, room_since_ = 0;
  double in_free_ = 0, product_free_ = 0, out_free_ = 0;
  double busy_sending_ = 0, busy_ending_ = 0;
  std::deque<Sent> sent_;
};

}  // namespace

extern "C" {

// Nanoseconds of a batch of so many rows, by `batches` of them: [0] until it is handed in, [1]
// until it is sent, [2] until its end is told, [3] until that is taken.
void bench_costs(int64_t rows, int64_t batches, double took[4]) {
  Bench bench(flat(17e-6));
  std::fill(took, took + 4, 0.0);
  for (int64_t i = 0; i < batches + 100; ++i) {
    if (i == 100) std::fill(took, took + 4, 0.0);
    double times[5];
    times[0] = monotonic_seconds();
    bench.hand_in(rows);
    times[1] = monotonic_seconds();
    bench.core().start_one();
    times[2] = monotonic_seconds();
    bench.core().end_one();
    times[3] = monotonic_seconds();
    bench.take_ended();
    times[4] = monotonic_seconds();
    for (int j = 0; j < 4; ++j) took[j] += times[j + 1] - times[j];
  }
  for (int j = 0; j < 4; ++j) took[j] *= 1e9 / static_cast<double>(batches);
}

void bench_timeline(const bench_device* device, const bench_own* own, const bench_load* load,
                    bench_found* found) {
  *found = {};
  Timeline(*device, *own, *load).run(*found);
}

}  // extern "C"
