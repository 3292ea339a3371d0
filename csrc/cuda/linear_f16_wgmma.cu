// Kernels for fp16 activations that multiply by warpgroups: Hopper (sm_90a).
#include "cuda/linear_kernels.cuh"

namespace qlinear::cuda {

LinearFunctions linear_f16_4_wgmma() { return warpgroup_functions<F16, 4>(); }
LinearFunctions linear_f16_8_wgmma() { return warpgroup_functions<F16, 8>(); }

}  // namespace qlinear::cuda
