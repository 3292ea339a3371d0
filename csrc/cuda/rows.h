// Where the rows of a batch lie in host memory, as the kernels of rows.cu take it, and those
// kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "linear_cuda.h"

#ifdef __CUDACC__
#define QL_DEVICE __device__ __forceinline__
#else
#define QL_DEVICE inline
#endif

namespace qlinear::cuda {

constexpr int kInlineRows = 64;  // 512 bytes of arguments

// The address of each row. Those of a few rows travel with the launch; a table in pinned memory
// would cost a trip over the bus before the first row can be asked for.
struct RowTable {
  uint64_t inside[kInlineRows];
  const uint64_t* outside;  // null: inside

  QL_DEVICE unsigned char* row(int64_t index) const {
    return reinterpret_cast<unsigned char*>(outside == nullptr ? inside[index] : outside[index]);
  }
};

constexpr int64_t item_bytes(int dtype) { return dtype == QL_F32 ? 4 : 2; }

cudaError_t launch_gather_rows(const ql_cuda_rows& rows, const RowTable& table,
                               cudaStream_t stream);
cudaError_t launch_scatter_rows(const ql_cuda_rows& rows, const RowTable& table,
                                cudaStream_t stream);

}  // namespace qlinear::cuda
