// The kernels of whole chains: fp16 or bf16 activations, 4-bit codes, groups of 128 and more, up to
// 8 or 16 rows of x (sm_90a).
#include "cuda/chain_kernel.cuh"
#include "cuda/chain_kernels.h"

namespace qlinear::cuda {

const void* chain_function(bool bf16, int token_blocks) {
  const bool few = token_blocks == 1;
  if (bf16) {
    return few ? reinterpret_cast<const void*>(&linear_chain<BF16, 1>)
               : reinterpret_cast<const void*>(&linear_chain<BF16, 2>);
  }
  return few ? reinterpret_cast<const void*>(&linear_chain<F16, 1>)
             : reinterpret_cast<const void*>(&linear_chain<F16, 2>);
}

}  // namespace qlinear::cuda
