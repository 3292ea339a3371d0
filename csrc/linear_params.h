// The host contract of the kernel library: one params struct, one status enum, plain C.
// Kernels on every device take the same struct; ctypes mirrors it in kernels/abi.py, and a
// test compares sizes and offsets. Dtype numbers are those of qlinear.v1.DType.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ql_status {
  QL_OK = 0,
  QL_BAD_SHAPE = 1,         // m, n or k negative, too large or 0 for a plan; a short row stride
  QL_BAD_BITS = 2,          // bits is neither 4 nor 8
  QL_BAD_GROUP_SIZE = 3,    // group_size is none of -1, 32, 64, 128
  QL_BAD_DTYPE = 4,         // a dtype is none of ql_dtype, or item_bytes neither 2 nor 4
  QL_NULL_POINTER = 5,      // x, qweight, scales or y is null
  QL_OUT_OF_MEMORY = 6,     // a scratch buffer could not be allocated
  QL_BAD_BODY = 7,          // this processor cannot run that ql_cpu_body, or there is none such
  QL_MISALIGNED = 8,        // qweight does not start at a multiple of 64 bytes
  QL_NO_DEVICE = 9,         // no such CUDA device, or no driver that this library can use
  QL_BAD_DEVICE = 10,       // this library holds no kernels for that GPU's architecture
  QL_BAD_PLAN = 11,         // a plan that no kernel can run for this problem on this device
  QL_WORKSPACE = 12,        // the workspace is null, misaligned or smaller than the plan needs
  QL_CUDA_ERROR = 13,       // a CUDA call failed; ql_cuda_error_text() says which and where
  QL_BAD_DESCRIPTION = 14,  // a plan was asked for on a ql_cuda_device that no GPU can be
  QL_PART_WRITTEN = 15,     // the same as QL_CUDA_ERROR, when some results may have been written
} ql_status;

typedef enum ql_dtype { QL_F16 = 1, QL_BF16 = 2, QL_F32 = 3 } ql_dtype;

// Bodies of the CPU kernel. All compute the same sums in an order of their own.
typedef enum ql_cpu_body {
  QL_BODY_BEST = 0,         // the last of these that this processor can run
  QL_BODY_PLAIN = 1,        // one loop, any processor
  QL_BODY_AVX2 = 2,         // AVX2, FMA, F16C: float32 products
  QL_BODY_AVX512 = 3,       // AVX-512 F, BW, VL: float32 products
  QL_BODY_AVX512_BF16 = 4,  // AVX512_BF16: bfloat16 products, exact, for 4-bit codes
} ql_cpu_body;

// y[m, n] = x[m, k] * W^T + bias, W[n, k] = scale[k / group_size, n] * (code[k, n] - zero).
// Rows of x and y are contiguous in their last dimension; strides are in elements.
typedef struct ql_linear_params {
  const void* x;         // [m, k] of x_dtype
  const void* qweight;   // layout.h, padded, 64-byte aligned: vector loads fault elsewhere
  const void* scales;    // layout.h, of scale_dtype
  const uint8_t* zeros;  // layout.h, or null: 2^(bits - 1) everywhere
  const void* bias;      // [n] of bias_dtype, or null
  void* y;               // [m, n] of y_dtype
  int64_t m, n, k;       // logical sizes
  int64_t x_row_stride, y_row_stride;
  int64_t group_size;     // -1, 32, 64, 128
  int32_t bits;           // 4 or 8
  int32_t x_dtype;        // ql_dtype
  int32_t compute_dtype;  // ql_dtype: what float32 x is rounded to first; QL_F32 rounds nothing
  int32_t scale_dtype, bias_dtype, y_dtype;
  int32_t threads;  // at most so many threads; 1 or more
  int32_t body;     // ql_cpu_body; ignored on a GPU
  // 1: no |scale * (code - zero)| is above 65504, so that kernels may round weights to fp16. Those
  // of a GPU do, or to bf16, beside many rows, if scales are of x's dtype and results no finer.
  int32_t weights_fit;
  int32_t reserved;  // 0
} ql_linear_params;

// out[m, i] = x[m, permutation[i]]: the gather that act-order layers need before ql_*_linear.
typedef struct ql_gather_params {
  const void* x;               // [m, k]
  const int32_t* permutation;  // [k], each in 0 .. k - 1
  void* out;                   // [m, k], contiguous
  int64_t m, k;
  int64_t x_row_stride;  // in elements
  int32_t item_bytes;    // 2 or 4
  int32_t threads;
} ql_gather_params;

// Both return a ql_status, never throw, and may be called from many threads at once.
int ql_cpu_linear(const ql_linear_params* params);
int ql_cpu_gather(const ql_gather_params* params);

// out[n_count, k]: float32 weights of the features from n_begin on, which is a multiple of 16.
// Takes qweight, scales, zeros, n, k, bits, group_size, scale_dtype and threads from `params`.
int ql_cpu_dequantize(const ql_linear_params* params, int64_t n_begin, int64_t n_count, float* out);

// The body that QL_BODY_BEST means on this processor for layers of `bits`, as a ql_cpu_body.
int ql_cpu_best_body(int bits);

// Reads the whole 64-bit words of `buffer` `passes` times with at most `threads` threads. The time
// that it takes is the point; the sum of all that was read keeps reads from being left out.
uint64_t ql_cpu_read_probe(const void* buffer, int64_t bytes, int passes, int threads);

// One sentence for people; never null.
const char* ql_status_text(int status);

// The layout version that this library reads.
int ql_layout_version(void);

// Sizes of the two structs, for callers in other languages to compare with their own.
int ql_linear_params_bytes(void);
int ql_gather_params_bytes(void);

#ifdef __cplusplus
}
#endif
