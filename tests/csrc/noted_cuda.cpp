// A CUDA runtime that does nothing and notes what it was asked for, in order: with it the host code
// of the GPU library runs on any machine. Streams and events are whatever numbers the caller uses.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "cuda/linear_kernels.h"
#include "cuda/rows.h"

namespace {

std::string notes;
int device = 0, device_calls = 0;

void note(const char* what, const void* first = nullptr, const void* second = nullptr) {
  if (!notes.empty()) notes += ", ";
  notes += what;
  for (const void* pointer : {first, second}) {
    if (pointer != nullptr) notes += " " + std::to_string(reinterpret_cast<size_t>(pointer));
  }
}

CUresult encode(...) {
  note("describe");
  return CUDA_SUCCESS;
}

qlinear::cuda::LinearFunctions functions() {
  qlinear::cuda::LinearFunctions found{};
  for (const void*& function : found.functions) function = &notes;
  return found;
}

}  // namespace

extern "C" {

const char* noted(void) { return notes.c_str(); }
int noted_device_calls(void) { return device_calls; }
void noted_reset(void) {
  notes.clear();
  device_calls = 0;
}

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* current) { return ++device_calls, *current = device, cudaSuccess; }
cudaError_t cudaSetDevice(int chosen) { return ++device_calls, device = chosen, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "no error"; }
const char* cudaGetErrorString(cudaError_t) { return "no error"; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int) {
  *out = cudaDeviceProp{};
  std::snprintf(out->name, sizeof out->name, "Noted H200");
  out->major = 9;
  out->multiProcessorCount = 132;
  out->sharedMemPerBlockOptin = 227 * 1024;
  out->sharedMemPerMultiprocessor = 228 * 1024;
  out->l2CacheSize = 60 << 20;
  out->totalGlobalMem = size_t{140} << 30;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = 1, cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&encode);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return note("record", event, stream), cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return note("wait", event, stream), cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  return note("product", config->stream), cudaSuccess;
}

static size_t copied_bytes = 0;
cudaError_t cudaMemcpyAsync(void*, const void*, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  copied_bytes = bytes;
  return note("copy", stream), cudaSuccess;
}

// How the copies of parts were told: address to, address from, bytes.
static uint64_t copied[64][3];
static int64_t copied_count = 0;
int64_t noted_copies(uint64_t* out) {
  std::memcpy(out, copied, sizeof copied);
  return copied_count;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* bytes,
                                 size_t count, cudaMemcpyAttributes*, size_t*, size_t,
                                 cudaStream_t stream) {
  copied_count = static_cast<int64_t>(count);
  for (size_t i = 0; i < count && i < 64; ++i) {
    note("copy", stream);
    copied[i][0] = reinterpret_cast<uint64_t>(to[i]);
    copied[i][1] = reinterpret_cast<uint64_t>(from[i]);
    copied[i][2] = bytes[i];
  }
  return cudaSuccess;
}
#endif

cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }

// chain.cpp is not here: what a chain is handed counts.
int ql_cuda_linear_chain(const ql_linear_params*, const ql_cuda_plan* const* plans, int count,
                         const ql_cuda_launch* launch) {
  if (launch->plan != nullptr) return QL_BAD_PLAN;
  note("record", launch->start_event, launch->stream);
  note(plans == nullptr ? "chain of" : "planned chain of", reinterpret_cast<void*>(intptr_t{count}),
       launch->stream);
  note("record", launch->stop_event, launch->stream);
  return QL_OK;
}

// The bytes of the last copy of one piece.
size_t noted_bytes(void) { return copied_bytes; }

}  // extern "C"

namespace qlinear::cuda {

cudaError_t launch_gather_rows(const ql_cuda_rows&, const RowTable&, cudaStream_t stream) {
  return note("gather", stream), cudaSuccess;
}
cudaError_t launch_scatter_rows(const ql_cuda_rows&, const RowTable&, cudaStream_t stream) {
  return note("scatter", stream), cudaSuccess;
}

LinearFunctions linear_f16_4() { return functions(); }
LinearFunctions linear_f16_8() { return functions(); }
LinearFunctions linear_bf16_4() { return functions(); }
LinearFunctions linear_bf16_8() { return functions(); }
LinearFunctions linear_f16_4_fed() { return functions(); }
LinearFunctions linear_f16_8_fed() { return functions(); }
LinearFunctions linear_bf16_4_fed() { return functions(); }
LinearFunctions linear_bf16_8_fed() { return functions(); }

}  // namespace qlinear::cuda
