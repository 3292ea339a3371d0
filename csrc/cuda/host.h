// What the host functions share: devices, error texts, and a guard around every launch.
#pragma once

#include <cuda_runtime_api.h>

#include "linear_cuda.h"

namespace qlinear::cuda {

// Remembers a failed CUDA call for ql_cuda_error_text() and returns QL_CUDA_ERROR; QL_OK for none.
int check_cuda(cudaError_t error, const char* operation, int64_t m, int64_t n, int64_t k);

void set_error_text(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Description of a device, read once. Null, and a status, where there is none or not one of ours.
const ql_cuda_device* device_info(int device, int* status);

// Makes a device the current one and gives back the former one; records the events of a launch:
// construct, check status(), begin(), launch, finish().
class LaunchGuard {
 public:
  LaunchGuard(const ql_cuda_launch& launch, const char* operation, int64_t m, int64_t n, int64_t k);
  ~LaunchGuard();
  LaunchGuard(const LaunchGuard&) = delete;
  LaunchGuard& operator=(const LaunchGuard&) = delete;

  int status() const { return status_; }  // QL_OK: go on and launch
  cudaStream_t stream() const { return static_cast<cudaStream_t>(launch_.stream); }
  const ql_cuda_device& device() const { return *device_; }
  // Right before the launch: the first event. What the host does before must not count as device
  // time.
  int begin();
  // After the launch: its error, the second event.
  int finish(cudaError_t error);

 private:
  int check(cudaError_t error) { return check_cuda(error, operation_, m_, n_, k_); }

  const ql_cuda_launch& launch_;
  const char* operation_;
  int64_t m_, n_, k_;
  const ql_cuda_device* device_ = nullptr;
  int previous_ = -1;  // to be current again
  int outer_ = -1;     // device of the guard around this one
  bool holds_ = false;
  int status_;
};

}  // namespace qlinear::cuda
