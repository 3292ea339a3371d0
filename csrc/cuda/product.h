// A product in two steps: what the host works out, and the bare launch between its events.
#pragma once

#include "cuda/fed_args.h"
#include "cuda/host.h"
#include "cuda/linear_args.h"

namespace qlinear::cuda {

// Construct, prepare(), then launch() once if that was QL_OK. `params` and `launch` must outlive
// it. Other launches may come between the two steps: what the host does after the first event of a
// product would count as time of the device.
class Product {
 public:
  Product(const ql_linear_params& params, const ql_cuda_launch& launch);

  // Checks, the plan, the kernel's arguments; launches and records nothing.
  int prepare();
  int launch();

 private:
  int prepare_kernel();

  const ql_linear_params& params_;
  const ql_cuda_launch& launch_;
  LaunchGuard guard_;
  ql_cuda_plan plan_ = {};
  LinearArgs args_;
  FedArgs fed_;  // instead of args_ where the plan has copy_warp
};

}  // namespace qlinear::cuda
