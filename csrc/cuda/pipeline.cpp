// One batch in one call: rows in, product, rows out, each on its stream and held in order by
// events, and the wait for its end. The only file here that copies, orders streams or waits.
#include <chrono>
#include <cmath>
#include <mutex>
#include <vector>

#include "cuda/product.h"
#include "cuda/rows.h"

namespace qlinear::cuda {
namespace {

using Clock = std::chrono::steady_clock;

// Copies from the device to the host in one call of the driver.
class Copies {
 public:
  void clear() {
    to_.clear();
    from_.clear();
    bytes_.clear();
  }
  void add(void* to, const void* from, size_t bytes) {
    to_.push_back(to);
    from_.push_back(from);
    bytes_.push_back(bytes);
  }
  cudaError_t launch(cudaStream_t stream) {
    if (to_.empty()) return cudaSuccess;
#if CUDART_VERSION >= 13000
    cudaMemcpyAttributes attributes = {};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    size_t first = 0;
    return cudaMemcpyBatchAsync(to_.data(), from_.data(), bytes_.data(), to_.size(), &attributes,
                                &first, 1, stream);
#else
    for (size_t i = 0; i < to_.size(); ++i) {
      const cudaError_t error =
          cudaMemcpyAsync(to_[i], from_[i], bytes_[i], cudaMemcpyDeviceToHost, stream);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
#endif
  }

 private:
  std::vector<void*> to_;
  std::vector<const void*> from_;
  std::vector<size_t> bytes_;
};

uintptr_t address_of(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

// Where the gapless results of a product end.
uintptr_t end_of_results(const ql_linear_params& product) {
  return address_of(product.y) +
         static_cast<uintptr_t>(product.m * product.n * item_bytes(product.y_dtype));
}

// The steps of one batch; the first that fails ends it.
class Steps {
 public:
  explicit Steps(const ql_cuda_batch& batch) : batch_(batch) {}

  int run() {
    // Before the rows move: they take some microseconds, in which the host gets ahead of the device
    // again. Else the device waits for it between the first event of the product and the product.
    // A chain cannot be prepared: what its later launches cost the host lies between its events.
    Product product(*batch_.product, batch_.launch);
    int status = is_chain() ? QL_OK : product.prepare();
    if (status == QL_OK) status = in();
    if (status == QL_OK && batch_.in_stream != stream()) status = wait(stream(), batch_.in_stop);
    if (status == QL_OK && batch_.after != nullptr) status = wait(stream(), batch_.after);
    if (status == QL_OK) status = is_chain() ? launch_chain() : product.launch();
    if (status == QL_OK && batch_.out_stream != stream()) {
      status = wait(batch_.out_stream, batch_.launch.stop_event);
    }
    if (status == QL_OK) status = out();
    return status;
  }

 private:
  void* stream() const { return batch_.launch.stream; }
  bool is_chain() const { return batch_.products_count > 1; }

  int launch_chain() const {
    return ql_cuda_linear_chain(batch_.product, batch_.plans, batch_.products_count,
                                &batch_.launch);
  }

  int in() {
    ql_cuda_launch launch = step(batch_.in_stream);
    launch.start_event = batch_.in_start;
    // The product records its first event itself, at once after this on the same stream.
    launch.stop_event = batch_.in_stop == batch_.launch.start_event ? nullptr : batch_.in_stop;
    if (batch_.x_host == nullptr) return ql_cuda_gather_rows(&batch_.x, &launch);
    const size_t bytes = bytes_of(batch_.x);
    return copy(launch, batch_.x.device_rows, batch_.x_host, bytes, cudaMemcpyHostToDevice);
  }

  int out() {
    ql_cuda_launch launch = step(batch_.out_stream);
    launch.start_event = batch_.out_start == batch_.launch.stop_event ? nullptr : batch_.out_start;
    launch.stop_event = batch_.out_stop;
    if (batch_.y_host == nullptr) {
      return batch_.copies_parts ? copy_parts(launch) : ql_cuda_scatter_rows(&batch_.y, &launch);
    }
    const size_t bytes = is_chain() ? bytes_of_results() : bytes_of(batch_.y);
    return copy(launch, batch_.y_host, batch_.y.device_rows, bytes, cudaMemcpyDeviceToHost);
  }

  ql_cuda_launch step(void* stream) const {
    ql_cuda_launch launch = {};
    launch.device = batch_.launch.device;
    launch.stream = stream;
    return launch;
  }

  static size_t bytes_of(const ql_cuda_rows& rows) {
    return static_cast<size_t>(rows.m * rows.columns * item_bytes(rows.device_dtype));
  }

  // Of all products, with what lies between them.
  size_t bytes_of_results() const {
    const ql_linear_params& last = batch_.product[batch_.products_count - 1];
    return static_cast<size_t>(end_of_results(last) - address_of(batch_.y.device_rows));
  }

  int copy(const ql_cuda_launch& launch, void* to, const void* from, size_t bytes,
           cudaMemcpyKind kind) {
    LaunchGuard guard(launch, "copying rows", batch_.x.m, batch_.y.columns, batch_.x.columns);
    if (guard.status() != QL_OK) return guard.status();
    const int begun = guard.begin();
    if (begun != QL_OK) return begun;
    return guard.finish(cudaMemcpyAsync(to, from, bytes, kind, guard.stream()));
  }

  // The copy engine takes less of what products need of memory and bus than a kernel does, but the
  // host more time for each copy.
  int copy_parts(const ql_cuda_launch& launch) {
    const ql_cuda_rows& y = batch_.y;
    LaunchGuard guard(launch, "copying rows", y.m, y.columns, 0);
    if (guard.status() != QL_OK) return guard.status();
    const auto row_bytes = static_cast<size_t>(y.columns * item_bytes(y.device_dtype));
    const auto* from = static_cast<const char*>(y.device_rows);
    thread_local Copies copies;
    copies.clear();
    for (int64_t i = 0; i < y.parts_count; ++i) {
      const ql_cuda_part& part = y.parts[i];
      const size_t bytes = static_cast<size_t>(part.count) * row_bytes;
      if (bytes > 0) copies.add(part.rows, from, bytes);
      from += bytes;
    }
    const int begun = guard.begin();
    if (begun != QL_OK) return begun;
    return guard.finish(copies.launch(guard.stream())) == QL_OK ? QL_OK : QL_PART_WRITTEN;
  }

  // Lets `stream` go on after `event`.
  int wait(void* stream, void* event) {
    const cudaError_t error =
        cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0);
    return check_cuda(error, "ordering streams", batch_.x.m, batch_.y.columns, batch_.x.columns);
  }

  const ql_cuda_batch& batch_;
};

// What copies of the parts need; ql_cuda_scatter_rows() checks for itself.
int check_parts(const ql_cuda_batch& batch) {
  const ql_cuda_rows& y = batch.y;
  if (batch.y_host != nullptr || (y.m > 1 && y.row_stride != y.columns)) return QL_BAD_SHAPE;
  if (y.host_dtype != y.device_dtype) return QL_BAD_DTYPE;
  if (y.permutation != nullptr) return QL_BAD_SHAPE;
  if (y.parts == nullptr && y.m > 0) return QL_NULL_POINTER;
  int64_t rows = 0;
  for (int64_t i = 0; i < y.parts_count; ++i) {
    if (y.parts[i].rows == nullptr) return QL_NULL_POINTER;
    if (y.parts[i].count < 0 || y.parts[i].count > y.m - rows) return QL_BAD_SHAPE;
    rows += y.parts[i].count;
  }
  return rows == y.m ? QL_OK : QL_BAD_SHAPE;
}

// What a chain needs beyond what its first product does; the chain checks each product for itself.
int check_products(const ql_cuda_batch& batch) {
  if (batch.launch.plan != nullptr) return QL_BAD_PLAN;
  if (batch.y_host == nullptr) return QL_NULL_POINTER;
  const ql_linear_params& first = *batch.product;
  for (int i = 1; i < batch.products_count; ++i) {
    const ql_linear_params &next = batch.product[i], &before = batch.product[i - 1];
    if (next.m != first.m || next.k != first.k || next.x != first.x ||
        next.x_row_stride != first.x_row_stride || (next.m > 1 && next.y_row_stride != next.n) ||
        address_of(next.y) < end_of_results(before)) {
      return QL_BAD_SHAPE;
    }
    if (next.x_dtype != first.x_dtype) return QL_BAD_DTYPE;
  }
  return QL_OK;
}

int check_batch(const ql_cuda_batch* batch) {
  if (batch == nullptr || batch->product == nullptr) return QL_NULL_POINTER;
  for (const void* event : {batch->in_stop, batch->out_stop, batch->launch.stop_event}) {
    if (event == nullptr) return QL_NULL_POINTER;
  }
  const void* begins[] = {batch->in_start, batch->launch.start_event, batch->out_start};
  for (const void* event : begins) {  // all or none
    if ((event == nullptr) != (batch->in_start == nullptr)) return QL_NULL_POINTER;
  }
  const ql_linear_params& product = *batch->product;
  const ql_cuda_rows &x = batch->x, &y = batch->y;
  if (x.m != product.m || y.m != product.m || x.columns != product.k || y.columns != product.n) {
    return QL_BAD_SHAPE;
  }
  if (x.device_dtype != product.x_dtype || y.device_dtype != product.y_dtype) return QL_BAD_DTYPE;
  // Copies have no gaps between rows.
  const bool x_gap = product.m > 1 && x.row_stride != x.columns;
  const bool y_gap = product.m > 1 && y.row_stride != y.columns;
  if ((batch->x_host != nullptr && x_gap) || (batch->y_host != nullptr && y_gap)) {
    return QL_BAD_SHAPE;
  }
  if (batch->x_host != nullptr && (x.permutation != nullptr || x.host_dtype != x.device_dtype)) {
    return QL_BAD_DTYPE;
  }
  if (batch->products_count < 0) return QL_BAD_SHAPE;
  const int status = batch->products_count > 1 ? check_products(*batch) : QL_OK;
  return status == QL_OK && batch->copies_parts != 0 ? check_parts(*batch) : status;
}

cudaError_t nanoseconds_between(void* start, void* stop, int64_t& out) {
  float milliseconds = 0;
  const cudaError_t error = cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(start),
                                                 static_cast<cudaEvent_t>(stop));
  out = std::llround(1e6 * static_cast<double>(milliseconds));
  return error;
}

// cudaErrorNotReady if the time is over.
cudaError_t wait_until_out(const ql_cuda_batch& batch, int64_t nanoseconds) {
  const auto event = static_cast<cudaEvent_t>(batch.out_stop);
  if (nanoseconds < 0) return cudaEventSynchronize(event);
  const auto end = Clock::now() + std::chrono::nanoseconds(nanoseconds);
  cudaError_t error;
  do {
    error = cudaEventQuery(event);
  } while (error == cudaErrorNotReady && Clock::now() < end);
  return error;
}

}  // namespace
}  // namespace qlinear::cuda

extern "C" int ql_cuda_run_batch(const ql_cuda_batch* batch) {
  const int checked = qlinear::cuda::check_batch(batch);
  if (checked != QL_OK) return checked;
  // One batch of a device after the other, or events of one would measure kernels of both.
  static std::mutex launching[64];
  const std::lock_guard<std::mutex> lock(launching[batch->launch.device & 63]);
  return qlinear::cuda::Steps(*batch).run();
}

extern "C" int ql_cuda_wait_batch(const ql_cuda_batch* batch, int64_t nanoseconds, int32_t* done,
                                  int64_t* took) {
  if (batch == nullptr || done == nullptr || took == nullptr) return QL_NULL_POINTER;
  *done = 0;
  cudaError_t error = qlinear::cuda::wait_until_out(*batch, nanoseconds);
  if (error == cudaErrorNotReady) {
    cudaGetLastError();
    return QL_OK;
  }
  void* const pairs[3][2] = {{batch->in_start, batch->in_stop},
                             {batch->launch.start_event, batch->launch.stop_event},
                             {batch->out_start, batch->out_stop}};
  for (int i = 0; i < 3 && error == cudaSuccess; ++i) {
    took[i] = -1;
    if (batch->in_start == nullptr) continue;
    error = qlinear::cuda::nanoseconds_between(pairs[i][0], pairs[i][1], took[i]);
  }
  const int status = qlinear::cuda::check_cuda(error, "waiting for a batch", batch->x.m,
                                               batch->y.columns, batch->x.columns);
  *done = status == QL_OK ? 1 : 0;
  return status;
}

extern "C" int ql_cuda_copies_parts(int device) {
  int status;
  return CUDART_VERSION >= 13000 && qlinear::cuda::device_info(device, &status) != nullptr ? 1 : 0;
}

extern "C" int ql_cuda_batch_bytes(void) { return sizeof(ql_cuda_batch); }
