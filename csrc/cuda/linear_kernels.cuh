// The kernels of one format as a table.
#pragma once

#include "cuda/linear.cuh"
#include "cuda/linear_kernels.h"

namespace qlinear::cuda {

template <typename Dtype, int kBits>
LinearFunctions linear_functions() {
  return {{
      reinterpret_cast<const void*>(&linear<Dtype, kBits, 1, false>),
      reinterpret_cast<const void*>(&linear<Dtype, kBits, 1, true>),
      reinterpret_cast<const void*>(&linear<Dtype, kBits, 2, false>),
      reinterpret_cast<const void*>(&linear<Dtype, kBits, 2, true>),
      reinterpret_cast<const void*>(&linear<Dtype, kBits, 4, false>),
      reinterpret_cast<const void*>(&linear<Dtype, kBits, 4, true>),
      reinterpret_cast<const void*>(&linear<Dtype, kBits, 8, false>),
      reinterpret_cast<const void*>(&linear<Dtype, kBits, 8, true>),
  }};
}

}  // namespace qlinear::cuda
