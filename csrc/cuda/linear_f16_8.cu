// Kernels for fp16 activations and 8-bit codes, for every GPU.
#include "cuda/linear_kernels.cuh"

namespace qlinear::cuda {

LinearFunctions linear_f16_8() { return alone_functions<F16, 8>(); }

}  // namespace qlinear::cuda
