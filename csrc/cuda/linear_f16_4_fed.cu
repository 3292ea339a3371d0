// Kernels for fp16 activations and 4-bit codes that are fed by Hopper's copy engine (sm_90a).
#include "cuda/linear_kernels.cuh"

namespace qlinear::cuda {

LinearFunctions linear_f16_4_fed() { return fed_functions<F16, 4>(); }

}  // namespace qlinear::cuda
