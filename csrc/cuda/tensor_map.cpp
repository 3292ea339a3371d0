// Descriptions of arrays for the copy engine, as the driver encodes them.
#include "cuda/tensor_map.h"

#include <cuda_runtime_api.h>

namespace qlinear::cuda {

bool describe(const Array& array, TensorMap& map) {
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)
               : nullptr;
  }();
  constexpr cuuint32_t kOnes[kMaxRank] = {1, 1, 1};
  return encode != nullptr &&
         encode(reinterpret_cast<CUtensorMap*>(&map), array.type,
                static_cast<cuuint32_t>(array.rank), const_cast<void*>(array.data), array.sizes,
                array.strides, array.box, kOnes, CU_TENSOR_MAP_INTERLEAVE_NONE, array.swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace qlinear::cuda
