// What the copy engine is told of an array, and of the boxes that kernels ask for.
#pragma once

#include <cuda.h>

#include "cuda/linear_args.h"

namespace qlinear::cuda {

constexpr int kMaxRank = 3;

// Innermost dimension first; what a box holds beyond the array becomes zero.
struct Array {
  CUtensorMapDataType type;
  const void* data;
  int rank;
  cuuint64_t sizes[kMaxRank];
  cuuint64_t strides[kMaxRank - 1];  // in bytes, of all but the innermost
  cuuint32_t box[kMaxRank];
  CUtensorMapSwizzle swizzle;
};

// False if the driver cannot describe it.
bool describe(const Array& array, TensorMap& map);

}  // namespace qlinear::cuda
