// Chains that one launch computes: which they are, and what their kernel is handed.
#pragma once

#include "cuda/chain_args.h"
#include "linear_cuda.h"

namespace qlinear::cuda {

// The kernel for rows of x in so many blocks of 8: 1 or 2.
const void* chain_function(bool bf16, int token_blocks);

// How many of `count` products, from the first on, one launch computes; at most kChainLayers, and
// below 2 none.
int chain_length(const ql_linear_params* params, int count, const ql_cuda_device& device);

// Fills all for `count` products; false if the driver cannot describe their operands.
bool chain_args(const ql_linear_params* params, int count, const ql_cuda_device& device,
                void* workspace, ChainArgs& args);

}  // namespace qlinear::cuda
