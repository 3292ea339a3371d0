// The entries for rows in host memory: checks, the table of addresses, registration.
#include "cuda/rows.h"

#include "cuda/host.h"
#include "cuda/registered.h"

namespace qlinear::cuda {
namespace {

bool is_dtype(int32_t dtype) { return dtype == QL_F32 || dtype == QL_F16 || dtype == QL_BF16; }

int check_rows(const ql_cuda_rows& rows, bool to_host) {
  if (rows.m < 0 || rows.columns < 0 || rows.columns >= int64_t{1} << 31) return QL_BAD_SHAPE;
  if (rows.m > 1 && rows.row_stride < rows.columns) return QL_BAD_SHAPE;
  if (rows.most_blocks < 0) return QL_BAD_SHAPE;
  if (!is_dtype(rows.host_dtype) || !is_dtype(rows.device_dtype)) return QL_BAD_DTYPE;
  if (rows.host_dtype != rows.device_dtype && (to_host || rows.host_dtype != QL_F32)) {
    return QL_BAD_DTYPE;
  }
  if (to_host && rows.permutation != nullptr) return QL_BAD_SHAPE;
  if (rows.m == 0 || rows.columns == 0) return QL_OK;
  if (rows.parts == nullptr || rows.device_rows == nullptr) return QL_NULL_POINTER;
  if (rows.m > kInlineRows && rows.table == nullptr) return QL_NULL_POINTER;
  int64_t counted = 0;
  for (int64_t i = 0; i < rows.parts_count; ++i) {
    const ql_cuda_part& part = rows.parts[i];
    if (part.rows == nullptr) return QL_NULL_POINTER;
    const auto address = reinterpret_cast<uint64_t>(part.rows);
    if (address % static_cast<uint64_t>(item_bytes(rows.host_dtype)) != 0) return QL_MISALIGNED;
    if (part.count < 0 || part.count > rows.m - counted) return QL_BAD_SHAPE;
    counted += part.count;
  }
  return counted == rows.m ? QL_OK : QL_BAD_SHAPE;
}

// One address for each row, so that no thread has to search for its part.
RowTable table_of(const ql_cuda_rows& rows) {
  RowTable table = {};
  uint64_t* to = table.inside;
  if (rows.m > kInlineRows) table.outside = to = rows.table;
  const auto row_bytes = static_cast<uint64_t>(rows.columns * item_bytes(rows.host_dtype));
  for (int64_t i = 0; i < rows.parts_count; ++i) {
    auto address = reinterpret_cast<uint64_t>(rows.parts[i].rows);
    for (int64_t row = 0; row < rows.parts[i].count; ++row, address += row_bytes) *to++ = address;
  }
  return table;
}

int run(const ql_cuda_rows* rows, const ql_cuda_launch* launch, bool to_host) {
  if (rows == nullptr || launch == nullptr) return QL_NULL_POINTER;
  const int checked = check_rows(*rows, to_host);
  if (checked != QL_OK) return checked;
  LaunchGuard guard(*launch, to_host ? "scatter rows" : "gather rows", rows->m,
                    to_host ? rows->columns : 0, to_host ? 0 : rows->columns);
  if (guard.status() != QL_OK) return guard.status();
  const int64_t shared_bytes = rows->columns * item_bytes(rows->device_dtype);
  if (rows->permutation != nullptr && shared_bytes > guard.device().shared_bytes_per_block) {
    return QL_BAD_SHAPE;
  }
  const int begun = guard.begin();
  if (begun != QL_OK) return begun;
  if (rows->m == 0 || rows->columns == 0) return guard.finish(cudaSuccess);
  const RowTable table = table_of(*rows);
  return guard.finish(to_host ? launch_scatter_rows(*rows, table, guard.stream())
                              : launch_gather_rows(*rows, table, guard.stream()));
}

// For calls that launch nothing: makes the device current.
int on_device(int device, const char* operation, cudaError_t (*call)(void*, int64_t), void* memory,
              int64_t bytes) {
  ql_cuda_launch launch = {};
  launch.device = device;
  LaunchGuard guard(launch, operation, 0, 0, bytes);
  if (guard.status() != QL_OK) return guard.status();
  int same_addresses = 0;
  const int asked = check_cuda(
      cudaDeviceGetAttribute(&same_addresses, cudaDevAttrCanUseHostPointerForRegisteredMem, device),
      operation, 0, 0, bytes);
  if (asked != QL_OK) return asked;
  if (!same_addresses) return QL_BAD_DEVICE;
  return check_cuda(call(memory, bytes), operation, 0, 0, bytes);
}

Registered& registered() {
  static Registered all;
  return all;
}

cudaError_t host_register(void* memory, int64_t bytes) {
  return cudaHostRegister(memory, static_cast<size_t>(bytes),
                          cudaHostRegisterPortable | cudaHostRegisterMapped);
}
cudaError_t host_unregister(void* memory, int64_t) { return cudaHostUnregister(memory); }
cudaError_t nothing(void*, int64_t) { return cudaSuccess; }

}  // namespace
}  // namespace qlinear::cuda

extern "C" int ql_cuda_gather_rows(const ql_cuda_rows* rows, const ql_cuda_launch* launch) {
  return qlinear::cuda::run(rows, launch, false);
}

extern "C" int ql_cuda_scatter_rows(const ql_cuda_rows* rows, const ql_cuda_launch* launch) {
  return qlinear::cuda::run(rows, launch, true);
}

extern "C" int ql_cuda_inline_rows(void) { return qlinear::cuda::kInlineRows; }

extern "C" int ql_cuda_register(void* memory, int64_t bytes, int device) {
  if (memory == nullptr) return QL_NULL_POINTER;
  if (bytes < 1) return QL_BAD_SHAPE;
  using namespace qlinear::cuda;
  return registered().add(memory, bytes, device, [=](bool is_new) {
    const auto call = is_new ? host_register : nothing;
    return on_device(device, "registering host memory", call, memory, bytes);
  });
}

extern "C" int ql_cuda_unregister(void* memory, int device) {
  if (memory == nullptr) return QL_NULL_POINTER;
  using namespace qlinear::cuda;
  return registered().remove(memory, device, [=] {
    return on_device(device, "unregistering host memory", host_unregister, memory, 0);
  });
}
