// y = x W^T + bias on the CPU, read straight from the packed bytes.
//
// This is the plain body: one loop that names every feature of the format and that faster bodies
// are compared with. Per tile of 16 n x 64 k it decodes the weights to float once (exact for
// 16-bit scales) and lets all rows of a chunk use them. Every row is summed in the same order
// whatever m is, so a row's result never depends on its neighbours.
#include <cstdint>
#include <new>

#include "cpu/half.h"
#include "layout.h"
#include "linear_params.h"

namespace qlinear::cpu {
namespace {

using layout::kTileK;
using layout::kTileN;

// Rows that share one decoded tile. More rows amortize decoding further but their activations
// (4 bytes times k each) should stay in a core's L2.
constexpr int64_t kRowChunk = 32;

// Below this many multiply-adds a second thread costs more to wake than it saves.
constexpr int64_t kWorkPerThread = 1 << 17;

bool known_dtype(int dtype) { return dtype == QL_F16 || dtype == QL_BF16 || dtype == QL_F32; }

ql_status check(const ql_linear_params& p) {
  if (p.m < 0 || p.n < 0 || p.k < 0 || p.x_row_stride < p.k || p.y_row_stride < p.n) {
    return QL_BAD_SHAPE;
  }
  if (!layout::bits_supported(p.bits)) return QL_BAD_BITS;
  if (!layout::group_size_supported(p.group_size)) return QL_BAD_GROUP_SIZE;
  if (!known_dtype(p.x_dtype) || !known_dtype(p.compute_dtype) || !known_dtype(p.scale_dtype) ||
      !known_dtype(p.y_dtype) || (p.bias != nullptr && !known_dtype(p.bias_dtype))) {
    return QL_BAD_DTYPE;
  }
  if (p.m == 0 || p.n == 0) return QL_OK;
  if (p.x == nullptr || p.y == nullptr || p.qweight == nullptr || p.scales == nullptr) {
    return QL_NULL_POINTER;
  }
  return QL_OK;
}

// What float32 x is rounded to before the product, as the tensor cores of a GPU would need.
float round_to(float value, int dtype) {
  if (dtype == QL_F16) return f16_to_float(float_to_f16(value));
  if (dtype == QL_BF16) return bf16_to_float(float_to_bf16(value));
  return value;
}

void widen_row(const ql_linear_params& p, int64_t row, float* out, int64_t k_padded) {
  const int64_t base = row * p.x_row_stride;
  for (int64_t k = 0; k < p.k; ++k) {
    const float value = load_float(p.x, base + k, p.x_dtype);
    out[k] = p.x_dtype == QL_F32 ? round_to(value, p.compute_dtype) : value;
  }
  for (int64_t k = p.k; k < k_padded; ++k) out[k] = 0.0f;
}

// Decodes one tile to weights[k][n], scale applied.
void decode_tile(const ql_linear_params& p, int64_t n_block, int64_t k_tile, int64_t k_padded,
                 float (*weights)[kTileN]) {
  const int64_t groups = layout::group_count(k_padded, p.group_size);
  const auto* bytes = static_cast<const uint8_t*>(p.qweight);
  const int mask = (1 << p.bits) - 1;
  const float middle = static_cast<float>(1 << (p.bits - 1));
  for (int k = 0; k < kTileK; ++k) {
    const int64_t group = layout::group_of(k_tile * kTileK + k, p.group_size);
    for (int n = 0; n < kTileN; ++n) {
      const auto place =
          layout::code_place(n_block * kTileN + n, k_tile * kTileK + k, k_padded, p.bits);
      const int code = bytes[place.byte] >> place.shift & mask;
      const int64_t at = layout::scale_index(group, n_block * kTileN + n, groups);
      const float zero = p.zeros == nullptr ? middle : static_cast<float>(p.zeros[at]);
      weights[k][n] = (static_cast<float>(code) - zero) * load_float(p.scales, at, p.scale_dtype);
    }
  }
}

void store_block(const ql_linear_params& p, int64_t n_block, int64_t first_row, int64_t rows,
                 const float (*sums)[kTileN]) {
  const int64_t n_begin = n_block * kTileN;
  for (int64_t row = 0; row < rows; ++row) {
    for (int n = 0; n < kTileN && n_begin + n < p.n; ++n) {
      float value = sums[row][n];
      if (p.bias != nullptr) value += load_float(p.bias, n_begin + n, p.bias_dtype);
      store_float(p.y, (first_row + row) * p.y_row_stride + n_begin + n, p.y_dtype, value);
    }
  }
}

// One block of 16 columns for up to kRowChunk rows; x is [rows][k_padded] floats.
void multiply_block(const ql_linear_params& p, const float* x, int64_t n_block, int64_t first_row,
                    int64_t rows, int64_t k_padded) {
  float sums[kRowChunk][kTileN] = {};
  float weights[kTileK][kTileN];
  for (int64_t k_tile = 0; k_tile < k_padded / kTileK; ++k_tile) {
    decode_tile(p, n_block, k_tile, k_padded, weights);
    for (int64_t row = 0; row < rows; ++row) {
      const float* x_tile = x + row * k_padded + k_tile * kTileK;
      for (int k = 0; k < kTileK; ++k) {
        for (int n = 0; n < kTileN; ++n) sums[row][n] += x_tile[k] * weights[k][n];
      }
    }
  }
  store_block(p, n_block, first_row, rows, sums);
}

int useful_threads(const ql_linear_params& p, int64_t k_padded) {
  const int64_t work = p.m * layout::round_up(p.n, layout::kPadN) * k_padded;
  const int64_t wanted = 1 + work / kWorkPerThread;
  return static_cast<int>(wanted < p.threads ? wanted : (p.threads < 1 ? 1 : p.threads));
}

}  // namespace
}  // namespace qlinear::cpu

extern "C" int ql_cpu_linear(const ql_linear_params* params) {
  using namespace qlinear;
  if (params == nullptr) return QL_NULL_POINTER;
  const ql_linear_params& p = *params;
  const ql_status status = cpu::check(p);
  if (status != QL_OK || p.m == 0 || p.n == 0) return status;

  const int64_t k_padded = layout::round_up(p.k, layout::kPadK);
  const int64_t n_blocks = (p.n + layout::kTileN - 1) / layout::kTileN;
  const int64_t chunk = p.m < cpu::kRowChunk ? p.m : cpu::kRowChunk;
  float* x = new (std::nothrow) float[static_cast<size_t>(chunk * k_padded)];
  if (x == nullptr) return QL_OUT_OF_MEMORY;
  const int threads = cpu::useful_threads(p, k_padded);
  for (int64_t first = 0; first < p.m; first += chunk) {
    const int64_t rows = p.m - first < chunk ? p.m - first : chunk;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < rows; ++row) {
        cpu::widen_row(p, first + row, x + row * k_padded, k_padded);
      }
#pragma omp for schedule(static)
      for (int64_t n_block = 0; n_block < n_blocks; ++n_block) {
        cpu::multiply_block(p, x, n_block, first, rows, k_padded);
      }
    }
  }
  delete[] x;
  return QL_OK;
}
