// Kernels for fp16 activations and 4-bit codes.
#include "cuda/linear_kernels.cuh"

namespace qlinear::cuda {

LinearFunctions linear_f16_4() { return linear_functions<F16, 4>(); }

}  // namespace qlinear::cuda
