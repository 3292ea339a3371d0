// See gpu/express.py, which does the same for batches that Python sends.
#include "dispatch/sender.h"

#include <algorithm>

namespace qlinear::dispatch {
namespace {

constexpr int64_t kRowAlign = 8;  // so that kernels can load 16 bytes
// By the copy engine; each takes the host half a microsecond and more.
constexpr int64_t kMostCopies = 64;

int64_t item_bytes(int dtype) { return dtype == QL_F32 ? 4 : 2; }

int64_t row_stride(int64_t k) { return (k + kRowAlign - 1) / kRowAlign * kRowAlign; }

uint64_t kind_of(int32_t form, int x_dtype, int y_dtype) {
  return static_cast<uint64_t>(form) << 16 | static_cast<uint64_t>(x_dtype) << 8 |
         static_cast<uint64_t>(y_dtype);
}

}  // namespace

Sender::Sender(const ql_dispatch_options& options)
    : options_(options),
      layers_(options.layers, options.layers + options.queue.layers_count),
      lanes_(options.second.stream != nullptr) {
  for (int i = options.stages_count - 1; i >= 0; --i) {
    stages_.push_back(std::make_unique<Stage>());
    stages_.back()->memory = options.stages[i];
    free_.push_back(stages_.back().get());
  }
}

void Sender::add_plan(int32_t form, int x_dtype, int y_dtype, int64_t rows,
                      const ql_cuda_plan& plan) {
  if (rows < 1 || rows > options_.table_rows) return;
  auto& plans = plans_[kind_of(form, x_dtype, y_dtype)];
  plans.resize(static_cast<size_t>(options_.table_rows) + 1);
  auto& place = plans[static_cast<size_t>(rows)];
  if (place == nullptr) place = std::make_unique<ql_cuda_plan>(plan);  // else it may be in use
}

const ql_cuda_plan* Sender::plan_of(const Batch& batch) const {
  if (!fits(batch)) return nullptr;
  const ql_descriptor& item = batch.parts[0].item();
  const auto found = plans_.find(kind_of(layers_[item.layer].form, item.x_dtype, item.y_dtype));
  if (found == plans_.end()) return nullptr;
  return found->second[static_cast<size_t>(batch.rows)].get();
}

bool Sender::fits(const Batch& batch) const {
  const ql_descriptor& first = batch.parts[0].item();
  const ql_dispatch_layer& layer = layers_[first.layer];
  if (!layer.is_direct || batch.rows > options_.table_rows || stages_.empty()) return false;
  const ql_dispatch_stage& memory = stages_[0]->memory;
  if (batch.rows * row_stride(layer.product.k) * item_bytes(first.x_dtype) > memory.x_bytes ||
      batch.rows * layer.product.n * item_bytes(first.y_dtype) > memory.y_bytes) {
    return false;
  }
  for (const Part& part : batch.parts) {
    if (part.rows != part.item().rows || !(part.item().flags & QL_RESULT_FITS)) return false;
  }
  return true;
}

Stage* Sender::take_stage() {
  if (free_.empty()) return nullptr;
  Stage* stage = free_.back();
  free_.pop_back();
  return stage;
}

int Sender::send(const Batch& batch, Stage& stage, const ql_cuda_plan* plan, Manner manner) {
  const Turn turn = lanes_.next(manner.may_overlap());
  fill(batch, stage, plan, manner, turn);
  int status = options_.run(&stage.batch);
  if (status == QL_BAD_PLAN) {
    stage.batch.launch.plan = nullptr;  // a measured plan that rows of this x do not allow
    status = options_.run(&stage.batch);
  }
  if (status == QL_OK) lanes_.sent(turn.lane, manner.is_timed, stage.batch.launch.stop_event);
  return status;
}

int Sender::wait(const Stage& stage, int64_t nanoseconds, bool& done, int64_t took[3]) const {
  int32_t ended = 0;
  const int status = options_.wait(&stage.batch, nanoseconds, &ended, took);
  done = ended != 0;
  return status;
}

void Sender::fill(const Batch& batch, Stage& stage, const ql_cuda_plan* plan, Manner manner,
                  Turn turn) const {
  const bool alone = manner.is_alone;
  const ql_descriptor& first = batch.parts[0].item();
  const ql_dispatch_layer& layer = layers_[first.layer];
  const ql_dispatch_stage& memory = stage.memory;
  stage.parts.clear();
  for (const Part& part : batch.parts) {
    char* rows = options_.slab + static_cast<int64_t>(part.item().slot) * options_.slot_unit_bytes;
    stage.parts.push_back({rows, part.rows});
  }
  ql_linear_params& product = stage.product = layer.product;
  const int x_dtype = first.x_dtype == QL_F32 ? product.compute_dtype : first.x_dtype;
  product.m = batch.rows;
  product.x = memory.x;
  product.y = memory.y;
  product.x_dtype = x_dtype;
  product.y_dtype = first.y_dtype;
  product.x_row_stride = row_stride(product.k);
  product.y_row_stride = product.n;
  const auto count = static_cast<int64_t>(stage.parts.size());
  const int64_t row_bytes = product.n * item_bytes(first.y_dtype);
  const bool copies = !alone && options_.copied_row_bytes > 0 && count <= kMostCopies &&
                      row_bytes >= options_.copied_row_bytes;
  // Alone, a batch has all multiprocessors; results that are copied need none.
  const auto [x_blocks, y_blocks] = alone    ? Blocks{}
                                    : copies ? Blocks{options_.row_blocks, 0}
                                             : blocks_of(product, first);
  ql_cuda_batch& out = stage.batch = {};
  out.product = &product;
  out.x = {
      stage.parts.data(), memory.table,         layer.permutation, memory.x, count,    batch.rows,
      product.k,          product.x_row_stride, first.x_dtype,     x_dtype,  x_blocks, 0};
  out.y = {stage.parts.data(),
           memory.table + options_.table_rows,
           nullptr,
           memory.y,
           count,
           batch.rows,
           product.n,
           product.n,
           first.y_dtype,
           first.y_dtype,
           y_blocks,
           0};
  out.launch = turn.lane == 1 ? options_.second : options_.launch;
  out.after = turn.after;
  out.launch.plan = plan;
  out.launch.start_event = memory.kernel_start;
  out.launch.stop_event = memory.kernel_stop;
  out.in_start = memory.in_start;
  out.out_stop = memory.out_stop;
  // Alone, nothing can overlap: one stream, and no events between streams.
  out.in_stream = alone ? options_.launch.stream : options_.in_stream;
  out.out_stream = alone ? options_.launch.stream : options_.out_stream;
  out.in_stop = alone ? memory.kernel_start : memory.in_stop;
  out.out_start = alone ? memory.kernel_stop : memory.out_start;
  if (!manner.is_timed) {
    out.in_start = out.launch.start_event = out.out_start = nullptr;
    out.in_stop = memory.in_done;
    out.launch.stop_event = memory.kernel_done;
    out.out_stop = memory.out_done;
  }
  out.copies_parts = copies;
}

// By the bytes that each moves: one of each may run at a time, and both have to do with what the
// products leave.
Sender::Blocks Sender::blocks_of(const ql_linear_params& product, const ql_descriptor& item) const {
  const int64_t all = options_.row_blocks;
  if (all == 0) return {};
  const int64_t in = product.k * item_bytes(item.x_dtype);
  const int64_t out = product.n * item_bytes(item.y_dtype);
  const int64_t share = (all * in + (in + out) / 2) / (in + out);
  const int64_t x = std::max<int64_t>(1, std::min(share, all - 1));
  return {static_cast<int32_t>(x), static_cast<int32_t>(std::max<int64_t>(1, all - x))};
}

}  // namespace qlinear::dispatch
