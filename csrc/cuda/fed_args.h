// From a problem and a plan to what the fed forms are handed.
#pragma once

#include "cuda/linear_args.h"
#include "linear_cuda.h"

namespace qlinear::cuda {

// What all forms need: where results go, and what a step's arithmetic depends on.
Output output_of(const ql_linear_params& params);
StepArgs step_args(const ql_linear_params& params);

// Fills all but `dependent`; false if the driver cannot describe the operands to the copy engine.
bool fed_args(const ql_linear_params& params, const ql_cuda_plan& plan, FedArgs& args);

}  // namespace qlinear::cuda
