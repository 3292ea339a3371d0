// Batches from host memory for machines without a GPU: what fake_cuda.cpp is for single products.
// Steps run at once and in order; the fake_... functions say what fails and what was asked for.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#define QL_BODY_NAMESPACE fake_rows
#include "cpu/half.h"
#include "cuda/registered.h"
#include "linear_cuda.h"

namespace half = qlinear::cpu::fake_rows;

namespace {

struct Fake {
  int failing_registers = 0;
  int failing_scatters = 0;
  int failing_waits = 0;
  int pending_waits = 0;  // so many waits end before the batch does
  int64_t gathers = 0, scatters = 0, copies = 0, part_copies = 0, registered = 0;
  ql_cuda_batch last = {};
  std::vector<ql_cuda_batch> first;  // so many as were sent, and kMostNoted at most
} fake;

constexpr size_t kMostNoted = 256;

std::atomic<bool> hangs{false};  // no batch ends

// Of chaos runs: rows whose first element is `poison` fail always, batches of several calls now and
// then, and batches take long now and then.
struct Chaos {
  float poison = 0;
  int failures = 0, pauses = 0;  // of a thousand
  std::atomic<uint32_t> draws{0};

  bool happens(int of_a_thousand) {
    const uint32_t drawn = (draws.fetch_add(1) + 1) * 2654435761u;
    return static_cast<int>((drawn >> 8) % 1000) < of_a_thousand;
  }
} chaos;
auto registered = std::make_unique<qlinear::cuda::Registered>();

int64_t item_bytes(int dtype) { return dtype == QL_F32 ? 4 : 2; }

bool holds_poison(const ql_cuda_rows& x) {
  if (chaos.poison == 0) return false;
  for (int64_t i = 0; i < x.parts_count; ++i) {
    for (int64_t row = 0; row < x.parts[i].count; ++row) {
      const float first = half::load_float(x.parts[i].rows, row * x.columns, x.host_dtype);
      if (first == chaos.poison) return true;
    }
  }
  return false;
}

// Copies rows either way, item by item: permuted and rounded on the way to the device.
int move_rows(const ql_cuda_rows& rows, bool to_host) {
  if (to_host && rows.host_dtype != rows.device_dtype) return QL_BAD_DTYPE;
  const int64_t row_bytes = rows.columns * item_bytes(rows.host_dtype);
  auto* device = static_cast<char*>(rows.device_rows);
  for (int64_t i = 0; i < rows.parts_count; ++i) {
    auto* host = static_cast<char*>(rows.parts[i].rows);
    for (int64_t row = 0; row < rows.parts[i].count; ++row, host += row_bytes) {
      if (to_host) std::memcpy(host, device, row_bytes);
      for (int64_t column = 0; !to_host && column < rows.columns; ++column) {
        const int64_t from = rows.permutation == nullptr ? column : rows.permutation[column];
        const float value = half::load_float(host, from, rows.host_dtype);
        half::store_float(device, column, rows.device_dtype, value);
      }
      device += rows.row_stride * item_bytes(rows.device_dtype);
    }
  }
  return QL_OK;
}

}  // namespace

extern "C" {

void fake_rows_reset(void) {
  fake = Fake{};
  registered = std::make_unique<qlinear::cuda::Registered>();
}
void fake_fail_registers(int count) { fake.failing_registers = count; }
void fake_fail_scatters(int count) { fake.failing_scatters = count; }
void fake_chaos(int seed, float poison, int failures, int pauses) {
  chaos.draws = static_cast<uint32_t>(seed);
  chaos.poison = poison;
  chaos.failures = failures;
  chaos.pauses = pauses;
}
void fake_fail_waits(int count) { fake.failing_waits = count; }
void fake_hang(int on) { hangs = on != 0; }
void fake_pend(int waits) { fake.pending_waits = waits; }
int64_t fake_row_gathers(void) { return fake.gathers; }
int64_t fake_row_scatters(void) { return fake.scatters; }
int64_t fake_row_copies(void) { return fake.copies; }
int64_t fake_part_copies(void) { return fake.part_copies; }
int64_t fake_registered(void) { return fake.registered; }
void fake_last_batch(ql_cuda_batch* batch) { *batch = fake.last; }
int64_t fake_batches(ql_cuda_batch* batches) {
  std::copy(fake.first.begin(), fake.first.end(), batches);
  return static_cast<int64_t>(fake.first.size());
}

int ql_cuda_inline_rows(void) { return 64; }

// As CUDA does it: what is registered cannot be again, and what is not cannot be let go of.
int ql_cuda_register(void* memory, int64_t bytes, int device) {
  return registered->add(memory, bytes, device, [=](bool is_new) {
    if (fake.failing_registers > 0) return --fake.failing_registers, int{QL_CUDA_ERROR};
    if (is_new && fake.registered != 0) return int{QL_CUDA_ERROR};
    if (is_new) fake.registered = bytes;
    return int{QL_OK};
  });
}

int ql_cuda_unregister(void* memory, int device) {
  return registered->remove(memory, device, [] {
    if (fake.registered == 0) return int{QL_CUDA_ERROR};
    fake.registered = 0;
    return int{QL_OK};
  });
}

int ql_cuda_gather_rows(const ql_cuda_rows* rows, const ql_cuda_launch*) {
  ++fake.gathers;
  return move_rows(*rows, false);
}

int ql_cuda_scatter_rows(const ql_cuda_rows* rows, const ql_cuda_launch*) {
  ++fake.scatters;
  if (fake.failing_scatters > 0) {
    --fake.failing_scatters;
    return QL_CUDA_ERROR;
  }
  return move_rows(*rows, true);
}

int ql_cuda_run_batch(const ql_cuda_batch* batch) {
  fake.last = *batch;
  if (fake.first.size() < kMostNoted) fake.first.push_back(*batch);
  if (holds_poison(batch->x)) return QL_CUDA_ERROR;
  if (batch->x.parts_count > 1 && chaos.happens(chaos.failures)) return QL_CUDA_ERROR;
  const ql_cuda_rows &x = batch->x, &y = batch->y;
  int status = QL_OK;
  if (batch->x_host == nullptr) {
    status = ql_cuda_gather_rows(&x, &batch->launch);
  } else {
    ++fake.copies;
    std::memcpy(x.device_rows, batch->x_host, x.m * x.columns * item_bytes(x.device_dtype));
  }
  const int count = batch->products_count;
  if (status == QL_OK && count > 1) {
    if (batch->y_host == nullptr || batch->launch.plan != nullptr) return QL_NULL_POINTER;
    status = ql_cuda_linear_chain(batch->product, batch->plans, count, &batch->launch);
  } else if (status == QL_OK) {
    status = ql_cuda_linear(batch->product, &batch->launch);
  }
  if (status != QL_OK) return status;
  if (batch->y_host == nullptr && batch->copies_parts != 0) {
    ++fake.part_copies;
    if (fake.failing_scatters == 0) return move_rows(y, true);
    ql_cuda_scatter_rows(&y, &batch->launch);
    return QL_PART_WRITTEN;
  }
  if (batch->y_host == nullptr) return ql_cuda_scatter_rows(&y, &batch->launch);
  ++fake.copies;
  int64_t bytes = y.m * y.columns * item_bytes(y.device_dtype);
  if (count > 1) {
    const ql_linear_params& last = batch->product[count - 1];
    bytes = static_cast<char*>(last.y) - static_cast<char*>(y.device_rows) +
            last.m * last.n * item_bytes(last.y_dtype);
  }
  std::memcpy(batch->y_host, y.device_rows, bytes);
  return QL_OK;
}

int ql_cuda_copies_parts(int) { return 1; }

int ql_cuda_wait_batch(const ql_cuda_batch* batch, int64_t nanoseconds, int32_t* done,
                       int64_t* took) {
  *done = 0;
  if (nanoseconds < 0 && chaos.happens(chaos.pauses)) usleep(20'000);
  while (hangs && nanoseconds < 0) usleep(1000);
  if (hangs) return QL_OK;
  if (fake.failing_waits > 0) {
    --fake.failing_waits;
    return QL_CUDA_ERROR;
  }
  if (nanoseconds >= 0 && fake.pending_waits > 0) {
    --fake.pending_waits;
    return QL_OK;
  }
  *done = 1;
  const int64_t pretended[] = {3000, 9000, 4000};
  for (int i = 0; i < 3; ++i) took[i] = batch->in_start != nullptr ? pretended[i] : -1;
  return QL_OK;
}

int ql_cuda_batch_bytes(void) { return sizeof(ql_cuda_batch); }

}  // extern "C"
