// Values at the edges of the kernel, of whatever dtype: x that must be converted, scales, results.
#pragma once

#include "cuda/fragments.cuh"
#include "cuda/linear_args.h"
#include "linear_params.h"

namespace qlinear::cuda {

__device__ __forceinline__ float half_bits_to_float(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
__device__ __forceinline__ float bf16_bits_to_float(uint32_t bits) {
  return __uint_as_float(bits << 16);
}

__device__ __forceinline__ float load_value(const unsigned char* from, int64_t index, int dtype) {
  if (dtype == QL_F32) return reinterpret_cast<const float*>(from)[index];
  const uint32_t bits = reinterpret_cast<const unsigned short*>(from)[index];
  return dtype == QL_F16 ? half_bits_to_float(bits) : bf16_bits_to_float(bits);
}

// Eight elements of x, zero from `columns` on, as 16-bit numbers: for rows that are not 16-byte
// aligned, and for fp32, which is rounded to nearest here. Not inlined: it is the way less taken.
template <typename Dtype>
__device__ __noinline__ uint4 load_converted(const unsigned char* from, int columns, int dtype) {
  uint32_t words[4];
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const bool has_low = 2 * pair < columns, has_high = 2 * pair + 1 < columns;
    if (dtype == QL_F32) {
      const float* values = reinterpret_cast<const float*>(from);
      words[pair] =
          Dtype::pack(has_low ? values[2 * pair] : 0.0f, has_high ? values[2 * pair + 1] : 0.0f);
    } else {
      const unsigned short* values = reinterpret_cast<const unsigned short*>(from);
      const uint32_t low = has_low ? values[2 * pair] : 0;
      const uint32_t high = has_high ? values[2 * pair + 1] : 0;
      words[pair] = low | high << 16;
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void store_shared_16(uint32_t to, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

// Two scales that lie side by side: both halves of `low`, or for fp32 both words.
__device__ __forceinline__ float2 scales_of(uint32_t low, uint32_t high, int dtype) {
  if (dtype == QL_F32) return make_float2(__uint_as_float(low), __uint_as_float(high));
  if (dtype == QL_F16)
    return make_float2(half_bits_to_float(low & 0xffff), half_bits_to_float(low >> 16));
  return make_float2(__uint_as_float(low << 16), __uint_as_float(low & 0xffff0000u));
}

__device__ __forceinline__ void store_value(unsigned char* y, int64_t index, float value,
                                            int dtype) {
  if (dtype == QL_F32) {
    reinterpret_cast<float*>(y)[index] = value;
  } else if (dtype == QL_F16) {
    reinterpret_cast<__half*>(y)[index] = __float2half_rn(value);
  } else {
    reinterpret_cast<__nv_bfloat16*>(y)[index] = __float2bfloat16_rn(value);
  }
}

// Adds the bias and stores four results from feature n on, or as many as there are.
__device__ __forceinline__ void store_results(const Output& args, int64_t row, int n, float4 sum) {
  if (n >= args.n) return;
  float values[4] = {sum.x, sum.y, sum.z, sum.w};
  if (args.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (n + i < args.n) values[i] += load_value(args.bias, n + i, args.bias_dtype);
    }
  }
  const int64_t index = row * args.y_row_stride + n;
  if (args.y_vector && n + 4 <= args.n) {
    if (args.y_dtype == QL_F32) {
      *reinterpret_cast<float4*>(args.y + index * 4) =
          make_float4(values[0], values[1], values[2], values[3]);
    } else if (args.y_dtype == QL_F16) {
      *reinterpret_cast<uint2*>(args.y + index * 2) =
          make_uint2(F16::pack(values[0], values[1]), F16::pack(values[2], values[3]));
    } else {
      *reinterpret_cast<uint2*>(args.y + index * 2) =
          make_uint2(BF16::pack(values[0], values[1]), BF16::pack(values[2], values[3]));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (n + i < args.n) store_value(args.y, index + i, values[i], args.y_dtype);
  }
}

}  // namespace qlinear::cuda
