// A dispatcher over the device of stress_device.h, with two streams for its products: for
// dispatch_stress.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "linear_dispatch.h"
#include "stress_device.h"

namespace stress_device {

inline constexpr int kLayers = 3;  // the last one is the host's
inline constexpr int kMostRows = 64;
inline constexpr int kStages = 3;
inline constexpr int64_t kUnit = 1024;
inline constexpr uint32_t kSlots = 600;
inline constexpr size_t kMostHeld = 200;

inline Device device;

inline int run(const ql_cuda_batch* batch) { return device.run(batch); }
inline int wait(const ql_cuda_batch* batch, int64_t nanoseconds, int32_t* done, int64_t* took) {
  return device.wait(batch, nanoseconds, done, took);
}
inline const char* error_text() { return "a fault"; }

// A dispatcher over the device, and what it must not outlive.
class Bench {
 public:
  Bench(int spins, bool starts_lone)
      : slab(kSlots * kUnit / sizeof(uint64_t)),
        tables_(6 * kMostRows),
        buffer_(1),
        events_(3 * kStages),
        workspaces_(2) {
    device.start_over();
    const std::vector<double> seconds(kMostRows + 1, 1e-5);
    const int32_t sizes[] = {8, kMostRows};
    const double costs[] = {1e-5, 3e-5};
    const ql_pace pace = {8, 32, kMostRows, 2, 1e-6, sizes, costs, seconds.data()};
    const int32_t paces[kLayers] = {};
    ql_dispatch_layer layers[kLayers] = {};
    for (int i = 0; i < kLayers; ++i) {
      layers[i].product.n = layers[i].product.k = 4;
      layers[i].is_direct = i + 1 < kLayers;
    }
    ql_dispatch_stage stages[kStages] = {};
    for (int i = 0; i < kStages; ++i) {
      stages[i].x = stages[i].y = buffer_.data();
      stages[i].x_bytes = stages[i].y_bytes = 1 << 20;
      stages[i].table = &tables_[static_cast<size_t>(2 * kMostRows * i)];
      char* events = &events_[static_cast<size_t>(3 * i)];
      stages[i].in_start = events;  // which is how the device knows that a batch is timed
      stages[i].kernel_stop = events + 1;
      stages[i].kernel_done = events + 2;
    }
    ql_dispatch_options options = {};
    options.queue = {kMostRows, 0.05, 0, 1, kLayers, &pace, paces};
    options.layers = layers;
    options.stages = stages;
    options.stages_count = options.most_running = kStages;
    options.most_chained = 2;
    options.table_rows = kMostRows;
    options.spins = spins;
    options.starts_lone = starts_lone;
    options.done_fd = -1;
    options.timed_each = 4;
    options.launch.stream = Streams::kLanes;
    options.launch.workspace = &workspaces_[0];
    options.second.stream = Streams::kLanes + 1;
    options.second.workspace = &workspaces_[1];
    options.idle_spin_seconds = 2e-5;
    options.slab = reinterpret_cast<char*>(slab.data());
    options.slot_unit_bytes = kUnit;
    options.run = run;
    options.wait = wait;
    options.error_text = error_text;
    dispatch = ql_dispatch_new(&options);
    require(dispatch != nullptr, "it can be made");
    const ql_cuda_plan plan = {};
    for (int64_t rows = 1; rows <= kMostRows; ++rows) {
      ql_dispatch_plan(dispatch, 0, QL_F16, QL_F16, rows, &plan);
    }
  }

  ~Bench() {
    device.dispatch = nullptr;
    ql_dispatch_free(dispatch);
  }

  ql_dispatch* dispatch;
  std::vector<uint64_t> slab;

 private:
  std::vector<uint64_t> tables_, buffer_;
  std::vector<char> events_, workspaces_;
};

}  // namespace stress_device
