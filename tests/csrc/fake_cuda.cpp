// The GPU contract for machines without a GPU: host memory for device memory, the CPU kernels for
// the products, plans of the simplest kind. Tests of what stands above the contract use it; the
// fake_... functions tell it what to pretend and ask it what it was handed.
#include <algorithm>
#include <cstdio>
#include <string>

#include "linear_cuda.h"

namespace {

constexpr int64_t kWorkspaceBytes = 1 << 16;
constexpr int kTokenBlocks[] = {1, 2, 4, 8};

struct Fake {
  int devices = 1;
  int supported = 1;
  int failing_launches = 0;  // so many launches fail, the rest run
  int refused_plans = 0;     // so many launches with a plan refuse it
  bool lost = false;         // every launch fails, an empty kernel's too
  int64_t launches = 0, gathers = 0, chains = 0;
  ql_cuda_launch last = {};
  ql_linear_params params = {};
  ql_cuda_plan plan = {};  // of the last launch; all zero: it had none
  std::string text = "nothing has failed";
} fake;

ql_cuda_device h200() {
  ql_cuda_device device{};
  std::snprintf(device.name, sizeof device.name, "Fake H200");
  device.major = 9;
  device.sm_count = 132;
  device.shared_bytes_per_block = 227 * 1024;
  device.shared_bytes_per_sm = 228 * 1024;
  device.l2_bytes = 60 << 20;
  device.driver_version = device.runtime_version = 13000;
  device.supported = fake.supported;
  device.memory_bytes = int64_t{140} << 30;
  return device;
}

int begin(const ql_cuda_launch& launch, const char* operation) {
  fake.last = launch;
  if (launch.device < 0 || launch.device >= fake.devices) return QL_NO_DEVICE;
  if (!fake.lost && fake.failing_launches == 0) return QL_OK;
  fake.failing_launches = std::max(fake.failing_launches - 1, 0);
  fake.text = std::string(operation) + ": pretended failure";
  return QL_CUDA_ERROR;
}

}  // namespace

extern "C" {

void fake_reset(void) { fake = Fake{}; }
void fake_devices(int count) { fake.devices = count; }
void fake_supported(int supported) { fake.supported = supported; }
void fake_fail(int launches) { fake.failing_launches = launches; }
void fake_refuse_plans(int launches) { fake.refused_plans = launches; }
void fake_lose(void) { fake.lost = true; }
int64_t fake_launches(void) { return fake.launches; }
int64_t fake_gathers(void) { return fake.gathers; }
int64_t fake_chains(void) { return fake.chains; }
void fake_last_launch(ql_cuda_launch* launch) { *launch = fake.last; }
void fake_last_plan(ql_cuda_plan* plan) { *plan = fake.plan; }
void fake_last_params(ql_linear_params* params) { *params = fake.params; }

int ql_cuda_device_count(void) { return fake.devices; }

int ql_cuda_device_info(int device, ql_cuda_device* out) {
  if (device < 0 || device >= fake.devices) {
    fake.text = "there is no CUDA device " + std::to_string(device) + "; the driver shows " +
                std::to_string(fake.devices);
    return QL_NO_DEVICE;
  }
  *out = h200();
  return QL_OK;
}

int ql_cuda_plan_linear(const ql_linear_params* params, const ql_cuda_device* device, int,
                        ql_cuda_plan* out) {
  *out = ql_cuda_plan{};
  int form = 0;
  while (form < 3 && params->m > 8 * kTokenBlocks[form]) ++form;
  out->token_blocks = kTokenBlocks[form];
  out->warps_n = out->warps_k = 1;
  out->stages = 2;
  out->ctas = device->sm_count;
  out->m_tiles =
      static_cast<int32_t>((params->m + 8 * out->token_blocks - 1) / (8 * out->token_blocks));
  out->n_tiles = static_cast<int32_t>((params->n + 31) / 32);
  out->kernel = 4 * (params->bits == 8) + form;
  out->workspace_bytes = kWorkspaceBytes;
  return QL_OK;
}

int64_t ql_cuda_workspace_bytes(void) { return kWorkspaceBytes; }

int ql_cuda_linear(const ql_linear_params* params, const ql_cuda_launch* launch) {
  const int status = begin(*launch, "linear");
  if (status != QL_OK) return status;
  if (launch->workspace == nullptr || launch->workspace_bytes < kWorkspaceBytes) {
    return QL_WORKSPACE;
  }
  if (launch->plan != nullptr && fake.refused_plans > 0) {
    --fake.refused_plans;
    fake.text = "linear: pretended refusal of a plan";
    return QL_BAD_PLAN;
  }
  fake.plan = launch->plan == nullptr ? ql_cuda_plan{} : *launch->plan;
  fake.params = *params;
  ++fake.launches;
  return ql_cpu_linear(params);
}

int ql_cuda_linear_chain(const ql_linear_params* params, const ql_cuda_plan* const* plans,
                         int count, const ql_cuda_launch* launch) {
  if (launch->plan != nullptr) return QL_BAD_PLAN;
  ++fake.chains;
  for (int place = 0; place < count; ++place) {
    ql_cuda_launch one = *launch;
    one.plan = plans == nullptr ? nullptr : plans[place];
    const int status = ql_cuda_linear(params + place, &one);
    if (status != QL_OK) return status;
  }
  return QL_OK;
}
int ql_cuda_record_chain(const ql_linear_params*, const ql_cuda_plan* const*, int,
                         const ql_cuda_launch*, void**) {
  fake.text = "graphs are not pretended";
  return QL_CUDA_ERROR;
}
int ql_cuda_launch_chain(void*, const ql_cuda_launch*) { return QL_CUDA_ERROR; }
void ql_cuda_free_chain(void*) {}

int ql_cuda_gather(const ql_gather_params* params, const ql_cuda_launch* launch) {
  const int status = begin(*launch, "gather");
  if (status != QL_OK) return status;
  ++fake.gathers;
  return ql_cpu_gather(params);
}

int ql_cuda_dequantize(const ql_linear_params* params, int64_t n_begin, int64_t n_count,
                       int out_dtype, void* out, const ql_cuda_launch* launch) {
  const int status = begin(*launch, "dequantize");
  if (status != QL_OK) return status;
  if (out_dtype != QL_F32) return QL_BAD_DTYPE;
  return ql_cpu_dequantize(params, n_begin, n_count, static_cast<float*>(out));
}

int ql_cuda_read_probe(const void* buffer, int64_t bytes, int, void* sink, const ql_cuda_launch*) {
  *static_cast<uint64_t*>(sink) = ql_cpu_read_probe(buffer, bytes, 1, 1);
  return QL_OK;
}
int ql_cuda_read_variants(void) { return 2; }

int ql_cuda_empty(const ql_cuda_launch* launch) {
  if (!fake.lost) return launch->device < fake.devices ? QL_OK : QL_NO_DEVICE;
  fake.text = "empty kernel: pretended failure";
  return QL_CUDA_ERROR;
}

int ql_cuda_kernel_count(void) { return 8; }
const char* ql_cuda_kernel_name(int) { return "fake"; }
const char* ql_cuda_error_text(void) { return fake.text.c_str(); }
const char* ql_cuda_architectures(void) { return "80 90a"; }
int ql_cuda_device_bytes(void) { return sizeof(ql_cuda_device); }
int ql_cuda_plan_bytes(void) { return sizeof(ql_cuda_plan); }
int ql_cuda_launch_bytes(void) { return sizeof(ql_cuda_launch); }

}  // extern "C"
