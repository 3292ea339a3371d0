// Problems, devices and words that the checks of the planner share.
#pragma once

#include <cstdio>
#include <string>

#include "linear_cuda.h"

namespace problems {

// Shared memory of a thread block, and the compute capability's first number: A10 and L4, A100,
// H100 and H200, and those after it, which lack the warpgroup products of 9.0.
struct Kind {
  int shared_kib, major;
};
constexpr Kind kKinds[] = {{99, 8}, {163, 8}, {227, 9}, {227, 10}, {99, 12}};
constexpr int kDtypes[] = {QL_F16, QL_BF16, QL_F32};

inline ql_linear_params params_of(int64_t m, int64_t n, int64_t k) {
  ql_linear_params params{};
  params.m = m;
  params.n = n;
  params.k = k;
  params.x_row_stride = k;
  params.y_row_stride = n;
  params.group_size = 128;
  params.bits = 4;
  params.x_dtype = params.compute_dtype = params.scale_dtype = QL_F16;
  params.bias_dtype = params.y_dtype = QL_F16;
  params.threads = 1;
  return params;
}

inline ql_cuda_device device_of(int multiprocessors, Kind kind) {
  ql_cuda_device device{};
  device.sm_count = multiprocessors;
  device.major = kind.major;
  device.shared_bytes_per_block = kind.shared_kib * 1024;
  device.shared_bytes_per_sm = (kind.shared_kib + 1) * 1024;
  device.supported = 1;
  return device;
}

inline std::string words(const ql_linear_params& p, const ql_cuda_device& device, int flags,
                         const ql_cuda_plan& plan) {
  char text[400];
  std::snprintf(text, sizeof text,
                "m %lld n %lld k %lld bits %d group_size %lld scale_dtype %d zeros %d on %d x %d "
                "bytes, major %d, flags %d: warpgroups %d token_blocks %d warps_n %d warps_k %d "
                "stages %d ctas %d whole %d tile_blocks %d cluster %d",
                static_cast<long long>(p.m), static_cast<long long>(p.n),
                static_cast<long long>(p.k), p.bits, static_cast<long long>(p.group_size),
                p.scale_dtype, p.zeros != nullptr, device.sm_count, device.shared_bytes_per_block,
                device.major, flags, plan.warpgroups, plan.token_blocks, plan.warps_n, plan.warps_k,
                plan.stages, plan.ctas, plan.whole_tiles, plan.tile_blocks, plan.cluster);
  return text;
}

// Every form of weights: bits, group size, dtype of the scales, zero points.
template <typename See>
void for_each_form(ql_linear_params params, See see) {
  static const uint8_t some_zeros = 0;
  for (const int bits : {4, 8}) {
    for (const int group_size : {-1, 32, 64, 128}) {
      for (const int scale_dtype : {QL_F16, QL_F32}) {
        for (const uint8_t* zeros : {static_cast<const uint8_t*>(nullptr), &some_zeros}) {
          params.bits = bits;
          params.group_size = group_size;
          params.scale_dtype = scale_dtype;
          params.zeros = zeros;
          see(params);
        }
      }
    }
  }
}

}  // namespace problems

// What the planner must refuse (plan_refusals.cpp).
void check_refusals();
