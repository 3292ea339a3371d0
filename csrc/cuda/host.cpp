// Devices, error texts and the guard around launches.
#include "cuda/host.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#ifndef QL_CUDA_ARCHITECTURES
#error "the build defines QL_CUDA_ARCHITECTURES, such as \"80 86 89 90a\""
#endif

namespace qlinear::cuda {
namespace {

constexpr int kMaxDevices = 64;

// That a guard of this thread keeps current. Guards lie within each other where a batch is sent,
// and nothing below them chooses a device.
thread_local int held_device = -1;

thread_local char error_text[512] = "no CUDA call has failed in this thread";

// Machine code for x.y runs on x.z with z >= y; code for "90a" on 9.0 alone.
bool has_code_for(int major, int minor) {
  const std::string list = std::string(" ") + QL_CUDA_ARCHITECTURES + " ";
  for (int code_minor = minor; code_minor >= 0; --code_minor) {
    if (list.find(" " + std::to_string(10 * major + code_minor) + " ") != std::string::npos) {
      return true;
    }
  }
  return list.find(" " + std::to_string(10 * major + minor) + "a ") != std::string::npos;
}

cudaError_t describe(int device, ql_cuda_device& out) {
  cudaDeviceProp properties;
  cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) return error;
  out = {};
  std::snprintf(out.name, sizeof out.name, "%s", properties.name);
  out.major = properties.major;
  out.minor = properties.minor;
  out.sm_count = properties.multiProcessorCount;
  out.shared_bytes_per_block = static_cast<int32_t>(properties.sharedMemPerBlockOptin);
  out.shared_bytes_per_sm = static_cast<int32_t>(properties.sharedMemPerMultiprocessor);
  out.l2_bytes = properties.l2CacheSize;
  out.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  out.supported = has_code_for(properties.major, properties.minor) ? 1 : 0;
  error = cudaDriverGetVersion(&out.driver_version);
  if (error != cudaSuccess) return error;
  return cudaRuntimeGetVersion(&out.runtime_version);
}

}  // namespace

void set_error_text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(error_text, sizeof error_text, format, arguments);
  va_end(arguments);
}

int check_cuda(cudaError_t error, const char* operation, int64_t m, int64_t n, int64_t k) {
  if (error == cudaSuccess) return QL_OK;
  set_error_text("%s m=%lld n=%lld k=%lld: %s (%s)", operation, static_cast<long long>(m),
                 static_cast<long long>(n), static_cast<long long>(k), cudaGetErrorString(error),
                 cudaGetErrorName(error));
  cudaGetLastError();  // an error that does not stay is this call's alone
  return QL_CUDA_ERROR;
}

const ql_cuda_device* device_info(int device, int* status) {
  static std::mutex mutex;
  static ql_cuda_device known[kMaxDevices];
  static bool is_known[kMaxDevices];
  const bool in_range = device >= 0 && device < kMaxDevices;
  const std::lock_guard<std::mutex> lock(mutex);
  *status = QL_OK;
  if (in_range && is_known[device]) return &known[device];  // each launch comes by here
  if (!in_range || device >= ql_cuda_device_count()) {
    set_error_text("there is no CUDA device %d; the driver shows %d", device,
                   ql_cuda_device_count());
    *status = QL_NO_DEVICE;
    return nullptr;
  }
  *status = check_cuda(describe(device, known[device]), "reading a device's properties", 0, 0, 0);
  if (*status != QL_OK) return nullptr;
  is_known[device] = true;
  return &known[device];
}

LaunchGuard::LaunchGuard(const ql_cuda_launch& launch, const char* operation, int64_t m, int64_t n,
                         int64_t k)
    : launch_(launch), operation_(operation), m_(m), n_(n), k_(k) {
  device_ = device_info(launch.device, &status_);
  if (device_ == nullptr) return;
  if (!device_->supported) {
    set_error_text("%s has compute capability %d.%d; this library holds code for %s", device_->name,
                   device_->major, device_->minor, QL_CUDA_ARCHITECTURES);
    status_ = QL_BAD_DEVICE;
    return;
  }
  if (held_device == launch.device) return;
  int current = -1;
  status_ = check(cudaGetDevice(&current));
  // Also where it is the current one: a thread that has called nothing yet has no context, and the
  // driver, which is asked for maps, does not make one as the runtime does.
  if (status_ == QL_OK) status_ = check(cudaSetDevice(launch.device));
  if (status_ != QL_OK) return;
  if (current != launch.device) previous_ = current;
  holds_ = true;
  outer_ = std::exchange(held_device, launch.device);
}

int LaunchGuard::begin() {
  if (launch_.start_event == nullptr) return QL_OK;
  return check(cudaEventRecord(static_cast<cudaEvent_t>(launch_.start_event), stream()));
}

LaunchGuard::~LaunchGuard() {
  if (holds_) held_device = outer_;
  // A thread that had used no device is taken back to the first one, which may be lost: no fault of
  // this launch, nor of the next.
  if (previous_ >= 0 && cudaSetDevice(previous_) != cudaSuccess) cudaGetLastError();
}

int LaunchGuard::finish(cudaError_t error) {
  const cudaError_t last = cudaGetLastError();
  int status = check(error != cudaSuccess ? error : last);
  if (status == QL_OK && launch_.stop_event != nullptr) {
    status = check(cudaEventRecord(static_cast<cudaEvent_t>(launch_.stop_event), stream()));
  }
  return status;
}

}  // namespace qlinear::cuda

extern "C" int ql_cuda_device_count(void) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

extern "C" int ql_cuda_device_info(int device, ql_cuda_device* out) {
  if (out == nullptr) return QL_NULL_POINTER;
  int status;
  const ql_cuda_device* info = qlinear::cuda::device_info(device, &status);
  if (info != nullptr) *out = *info;
  return status;
}

extern "C" const char* ql_cuda_error_text(void) { return qlinear::cuda::error_text; }
extern "C" const char* ql_cuda_architectures(void) { return QL_CUDA_ARCHITECTURES; }
extern "C" int ql_cuda_device_bytes(void) { return sizeof(ql_cuda_device); }
extern "C" int ql_cuda_plan_bytes(void) { return sizeof(ql_cuda_plan); }
extern "C" int ql_cuda_launch_bytes(void) { return sizeof(ql_cuda_launch); }
