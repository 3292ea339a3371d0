// Kernels for fp16 activations and 8-bit codes that are fed by Hopper's copy engine (sm_90a).
#include "cuda/linear_kernels.cuh"

namespace qlinear::cuda {

LinearFunctions linear_f16_8_fed() { return fed_functions<F16, 8>(); }

}  // namespace qlinear::cuda
