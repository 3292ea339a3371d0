// Weights as plain numbers: what a dense product needs, and what tests compare. One thread writes
// the eight weights of one row that lie side by side along k.
#include "cuda/host.h"
#include "cuda/plan.h"
#include "cuda/values.cuh"

namespace qlinear::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 8;

struct DequantizeArgs {
  const unsigned char* qweight;
  const unsigned char* scales;
  const unsigned char* zeros;
  unsigned char* out;
  int64_t k, k_padded, groups, group_size, n_begin, items;
  int bits, scale_dtype, out_dtype;
};

__global__ void __launch_bounds__(kThreads, 1)
    dequantize(const __grid_constant__ DequantizeArgs args) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= args.items) return;
  const int64_t per_row = (args.k + kPerThread - 1) / kPerThread;
  const int64_t row = item / per_row, k0 = item % per_row * kPerThread;
  const int64_t n = args.n_begin + row;
  // Eight k from a multiple of 8 on never leave their group.
  const int64_t group = layout::group_of(k0, args.group_size);
  const int64_t index = layout::scale_index(group, n, args.groups);
  const float scale = load_value(args.scales, index, args.scale_dtype);
  const int zero = args.zeros != nullptr ? args.zeros[index] : 1 << (args.bits - 1);
  const int end = static_cast<int>(args.k - k0 < kPerThread ? args.k - k0 : kPerThread);
  for (int i = 0; i < end; ++i) {
    const layout::CodePlace place = layout::code_place(n, k0 + i, args.k_padded, args.bits);
    const int code = args.qweight[place.byte] >> place.shift & ((1 << args.bits) - 1);
    store_value(args.out, row * args.k + k0 + i, scale * static_cast<float>(code - zero),
                args.out_dtype);
  }
}

}  // namespace
}  // namespace qlinear::cuda

extern "C" int ql_cuda_dequantize(const ql_linear_params* params, int64_t n_begin, int64_t n_count,
                                  int out_dtype, void* out, const ql_cuda_launch* launch) {
  using namespace qlinear;
  if (params == nullptr || launch == nullptr) return QL_NULL_POINTER;
  const int status = cuda::check_problem(*params);
  if (status != QL_OK) return status;
  if (n_begin < 0 || n_count < 0 || n_begin % layout::kTileN != 0 ||
      n_begin + n_count > params->n) {
    return QL_BAD_SHAPE;
  }
  if (out_dtype < QL_F16 || out_dtype > QL_F32) return QL_BAD_DTYPE;
  const bool empty = n_count == 0 || params->k == 0;
  if (!empty && (params->qweight == nullptr || params->scales == nullptr || out == nullptr)) {
    return QL_NULL_POINTER;
  }
  cuda::LaunchGuard guard(*launch, "dequantize", 0, n_count, params->k);
  if (guard.status() != QL_OK) return guard.status();
  const int begun = guard.begin();
  if (begun != QL_OK) return begun;
  if (empty) return guard.finish(cudaSuccess);
  cuda::DequantizeArgs args{};
  args.qweight = static_cast<const unsigned char*>(params->qweight);
  args.scales = static_cast<const unsigned char*>(params->scales);
  args.zeros = params->zeros;
  args.out = static_cast<unsigned char*>(out);
  args.k = params->k;
  args.k_padded = layout::round_up(params->k, layout::kPadK);
  args.groups = layout::group_count(args.k_padded, params->group_size);
  args.group_size = params->group_size;
  args.n_begin = n_begin;
  args.items = n_count * ((params->k + cuda::kPerThread - 1) / cuda::kPerThread);
  args.bits = params->bits;
  args.scale_dtype = params->scale_dtype;
  args.out_dtype = out_dtype;
  const auto blocks = static_cast<unsigned>((args.items + cuda::kThreads - 1) / cuda::kThreads);
  cuda::dequantize<<<blocks, cuda::kThreads, 0, guard.stream()>>>(args);
  return guard.finish(cudaGetLastError());
}
