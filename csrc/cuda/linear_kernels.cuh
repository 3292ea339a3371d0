// The kernels of one format as a table, in the order of kForms.
#pragma once

#include "cuda/linear.cuh"
#include "cuda/linear_kernels.h"

namespace qlinear::cuda {

template <typename Dtype, int kBits, int kTokenBlocks, bool kFineGroups, bool kWarpgroups>
const void* linear_function() {
  return reinterpret_cast<const void*>(
      &linear<Dtype, kBits, kTokenBlocks, kFineGroups, kWarpgroups>);
}

template <typename Dtype, int kBits>
LinearFunctions linear_functions() {
  return {{linear_function<Dtype, kBits, 1, false, false>(),
           linear_function<Dtype, kBits, 1, true, false>(),
           linear_function<Dtype, kBits, 2, false, false>(),
           linear_function<Dtype, kBits, 2, true, false>(),
           linear_function<Dtype, kBits, 4, false, false>(),
           linear_function<Dtype, kBits, 4, true, false>(),
           linear_function<Dtype, kBits, 8, false, false>(),
           linear_function<Dtype, kBits, 8, true, false>()}};
}

template <typename Dtype, int kBits>
LinearFunctions warpgroup_functions() {
  return {{linear_function<Dtype, kBits, 4, false, true>(),
           linear_function<Dtype, kBits, 4, true, true>(),
           linear_function<Dtype, kBits, 8, false, true>(),
           linear_function<Dtype, kBits, 8, true, true>(),
           linear_function<Dtype, kBits, 16, false, true>(),
           linear_function<Dtype, kBits, 16, true, true>(), nullptr, nullptr}};
}

}  // namespace qlinear::cuda
