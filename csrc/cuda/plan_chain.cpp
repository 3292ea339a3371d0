// Which products one launch computes: those whose results its kernel can compute, and whose weights
// it shares out evenly enough. Both libraries hold this, so that it can be asked without a GPU.
#include "cuda/plan_chain.h"

#include <algorithm>

namespace qlinear::cuda {
namespace {

// Whether the kernel can compute this product at all.
bool fits(const ql_linear_params& params) {
  return check_problem(params) == QL_OK && params.x != nullptr && params.qweight != nullptr &&
         params.scales != nullptr && params.y != nullptr && params.zeros == nullptr &&
         is_multiple(params.qweight, layout::kAlignBytes) &&
         is_multiple(params.scales, layout::kVectorBytes) && x_can_be_copied(params) &&
         params.m >= 1 && params.m <= partition::kChainMostRows && params.n > 0 && params.k > 0 &&
         params.k % kChainPieceK == 0 && params.bits == 4 &&
         (one_group(params) || params.group_size == partition::kStepK) &&
         params.scale_dtype == compute_dtype(params);
}

struct Bytes {
  uintptr_t begin, end;
};
bool overlap(const Bytes& one, const Bytes& other) {
  return one.begin < other.end && other.begin < one.end;
}
Bytes rows_of(const void* data, int64_t m, int64_t stride, int64_t columns, int dtype) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  return {begin, begin + static_cast<uintptr_t>(((m - 1) * stride + columns) * item_bytes(dtype))};
}
Bytes read_by(const ql_linear_params& p) {
  return rows_of(p.x, p.m, p.x_row_stride, p.k, p.x_dtype);
}
Bytes written_by(const ql_linear_params& p) {
  return rows_of(p.y, p.m, p.y_row_stride, p.n, p.y_dtype);
}

}  // namespace

int chain_length(const ql_linear_params* params, int count, const ql_cuda_device& device) {
  // The thread block with the largest share of a layer takes so many times the mean, at most: below
  // that layers are better cut along k, too, one by one.
  constexpr double kMostUneven = 1.12;
  // Kernels of Hopper, with more than 4 KiB of arguments, which drivers take from CUDA 12.1 on; 0:
  // nobody has asked for the driver's version.
  constexpr int kLeastDriver = 12010;
  const bool is_old = device.driver_version != 0 && device.driver_version < kLeastDriver;
  if (device.major != 9 || is_old) return 0;
  double bytes = 0, largest = 0;
  int length = 0;
  for (; length < std::min(count, partition::kChainLayers); ++length) {
    const ql_linear_params& next = params[length];
    if (!fits(next) || next.m != params[0].m || next.x_dtype != params[0].x_dtype) break;
    const int blocks = blocks_of(next), ctas = device.sm_count;
    bytes += static_cast<double>(blocks) * static_cast<double>(next.k) / ctas;
    largest += (blocks + ctas - 1) / ctas * static_cast<double>(next.k);
  }
  return length >= 2 && largest <= kMostUneven * bytes ? length : 0;
}

bool chain_waits(const ql_linear_params* params, int place) {
  const Bytes read = read_by(params[place]), written = written_by(params[place]);
  return std::any_of(params, params + place, [&](const ql_linear_params& before) {
    return overlap(read, written_by(before)) || overlap(written, written_by(before)) ||
           overlap(written, read_by(before));
  });
}

}  // namespace qlinear::cuda
