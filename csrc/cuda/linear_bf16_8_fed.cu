// Kernels for bf16 activations and 8-bit codes that are fed by Hopper's copy engine (sm_90a).
#include "cuda/linear_kernels.cuh"

namespace qlinear::cuda {

LinearFunctions linear_bf16_8_fed() { return fed_functions<BF16, 8>(); }

}  // namespace qlinear::cuda
