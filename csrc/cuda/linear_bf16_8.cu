// Kernels for bf16 activations and 8-bit codes.
#include "cuda/linear_kernels.cuh"

namespace qlinear::cuda {

LinearFunctions linear_bf16_8() { return linear_functions<BF16, 8>(); }

}  // namespace qlinear::cuda
