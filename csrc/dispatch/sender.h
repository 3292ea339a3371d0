// Sends batches to the device: the addresses of their rows, a stage for each, the plan of its
// product. Knows no queue and no caller.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "dispatch/compute_lanes.h"
#include "dispatch/queue.h"

namespace qlinear::dispatch {

// The buffers of one batch in flight and what the device was handed for it. One thread has it at a
// time.
struct Stage {
  ql_dispatch_stage memory;
  ql_linear_params product;
  ql_cuda_batch batch;
  std::vector<ql_cuda_part> parts;
};

// How a batch is sent.
struct Manner {
  bool is_alone;  // nothing else is with the device, or waits
  bool is_timed;
  bool is_host_busy;  // it computes a batch, on the stream of `launch`

  // Its product beside others. A time would be that of several.
  bool may_overlap() const { return !is_alone && !is_timed && !is_host_busy; }
};

class Sender {
 public:
  explicit Sender(const ql_dispatch_options& options);

  void add_plan(int32_t form, int x_dtype, int y_dtype, int64_t rows, const ql_cuda_plan& plan);

  // How a batch is computed, which stays; null unless the device can read and write all its rows
  // where they lie, and it is known.
  const ql_cuda_plan* plan_of(const Batch& batch) const;

  Stage* take_stage();  // null: all are in use
  void give_back(Stage* stage) { free_.push_back(stage); }

  // A ql_status; the batch is on its way, or none of its results will be written anywhere, but for
  // QL_PART_WRITTEN. One thread at a time: of what may change it looks at nothing but the lanes,
  // which are its own.
  int send(const Batch& batch, Stage& stage, const ql_cuda_plan* plan, Manner manner);

  // A ql_status, and whether it has ended; waits for as long as it takes if `nanoseconds` is
  // negative. `took` holds the nanoseconds of rows in, product and rows out.
  int wait(const Stage& stage, int64_t nanoseconds, bool& done, int64_t took[3]) const;

  // Of what failed last in this thread.
  const char* error_text() const { return options_.error_text(); }

 private:
  // Most of the kernels that bring rows in and out; 0: as many as they take.
  struct Blocks {
    int32_t x, y;
  };

  bool fits(const Batch& batch) const;
  void fill(const Batch& batch, Stage& stage, const ql_cuda_plan* plan, Manner manner,
            Turn turn) const;
  Blocks blocks_of(const ql_linear_params& product, const ql_descriptor& item) const;

  ql_dispatch_options options_;  // whose arrays are not looked at again
  std::vector<ql_dispatch_layer> layers_;
  std::vector<std::unique_ptr<Stage>> stages_;
  std::vector<Stage*> free_;
  ComputeLanes lanes_;
  std::unordered_map<uint64_t, std::vector<std::unique_ptr<ql_cuda_plan>>> plans_;
};

}  // namespace qlinear::dispatch
