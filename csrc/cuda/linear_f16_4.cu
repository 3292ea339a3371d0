// Kernels for fp16 activations and 4-bit codes, for every GPU.
#include "cuda/linear_kernels.cuh"

namespace qlinear::cuda {

LinearFunctions linear_f16_4() { return alone_functions<F16, 4>(); }

}  // namespace qlinear::cuda
