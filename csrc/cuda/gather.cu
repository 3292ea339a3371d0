// out[m, i] = x[m, permutation[i]]: activations in the order of an act-order layer's codes.
#include "cuda/host.h"

namespace qlinear::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = 8;  // one load of the permutation serves so many rows

template <typename Item>
__global__ void __launch_bounds__(kThreads)
    gather(const Item* __restrict__ x, const int32_t* __restrict__ permutation,
           Item* __restrict__ out, int64_t m, int64_t k, int64_t x_row_stride) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= k) return;
  const int64_t from = permutation[column];
  // Rows beyond the grid's reach are taken in turns.
  for (int64_t row0 = static_cast<int64_t>(blockIdx.y) * kRowsPerBlock; row0 < m;
       row0 += static_cast<int64_t>(gridDim.y) * kRowsPerBlock) {
    const int64_t end = row0 + kRowsPerBlock < m ? row0 + kRowsPerBlock : m;
    for (int64_t row = row0; row < end; ++row) {
      out[row * k + column] = x[row * x_row_stride + from];
    }
  }
}

template <typename Item>
cudaError_t launch_gather(const ql_gather_params& params, cudaStream_t stream) {
  constexpr int64_t kMostRows = 65535;
  const int64_t row_blocks = (params.m + kRowsPerBlock - 1) / kRowsPerBlock;
  const dim3 grid(static_cast<unsigned>((params.k + kThreads - 1) / kThreads),
                  static_cast<unsigned>(row_blocks < kMostRows ? row_blocks : kMostRows));
  gather<Item><<<grid, kThreads, 0, stream>>>(static_cast<const Item*>(params.x),
                                              params.permutation, static_cast<Item*>(params.out),
                                              params.m, params.k, params.x_row_stride);
  return cudaGetLastError();
}

}  // namespace
}  // namespace qlinear::cuda

extern "C" int ql_cuda_gather(const ql_gather_params* params, const ql_cuda_launch* launch) {
  if (params == nullptr || launch == nullptr) return QL_NULL_POINTER;
  if (params->m < 0 || params->k < 0 || params->k >= int64_t{1} << 31) return QL_BAD_SHAPE;
  if (params->m > 1 && params->x_row_stride < params->k) return QL_BAD_SHAPE;
  if (params->item_bytes != 2 && params->item_bytes != 4) return QL_BAD_DTYPE;
  const bool empty = params->m == 0 || params->k == 0;
  if (!empty &&
      (params->x == nullptr || params->permutation == nullptr || params->out == nullptr)) {
    return QL_NULL_POINTER;
  }
  qlinear::cuda::LaunchGuard guard(*launch, "gather", params->m, 0, params->k);
  if (guard.status() != QL_OK) return guard.status();
  const int begun = guard.begin();
  if (begun != QL_OK) return begun;
  if (empty) return guard.finish(cudaSuccess);
  return guard.finish(params->item_bytes == 2
                          ? qlinear::cuda::launch_gather<uint16_t>(*params, guard.stream())
                          : qlinear::cuda::launch_gather<uint32_t>(*params, guard.stream()));
}
