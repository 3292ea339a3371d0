// Kernels for bf16 activations and 4-bit codes, for every GPU.
#include "cuda/linear_kernels.cuh"

namespace qlinear::cuda {

LinearFunctions linear_bf16_4() { return alone_functions<BF16, 4>(); }

}  // namespace qlinear::cuda
