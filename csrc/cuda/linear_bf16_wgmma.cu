// Kernels for bf16 activations that multiply by warpgroups: Hopper (sm_90a).
#include "cuda/linear_kernels.cuh"

namespace qlinear::cuda {

LinearFunctions linear_bf16_4_wgmma() { return warpgroup_functions<BF16, 4>(); }
LinearFunctions linear_bf16_8_wgmma() { return warpgroup_functions<BF16, 8>(); }

}  // namespace qlinear::cuda
