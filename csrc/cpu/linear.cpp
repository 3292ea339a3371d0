// The entry of the CPU kernel: checks, the choice of a body, threads and scratch memory.
#include <cstdint>
#include <cstdlib>

#include "cpu/body.h"
#include "layout.h"
#include "linear_params.h"

namespace qlinear::cpu {
namespace {

// Rows that are prepared together: at k = 4096 and 2 bytes they fill half of a 1 MiB L2.
constexpr int64_t kRowChunk = 64;

// Below this many multiply-adds a second thread costs more to wake than it saves.
constexpr int64_t kWorkPerThread = 1 << 20;

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
  const auto address = reinterpret_cast<std::uintptr_t>(p.qweight);
  return address % layout::kAlignBytes == 0 ? QL_OK : QL_MISALIGNED;
}

bool runs_here(int body) {
  switch (body) {
    case QL_BODY_PLAIN:
      return true;
#if defined(__x86_64__)
    case QL_BODY_AVX2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case QL_BODY_AVX512:
      return runs_here(QL_BODY_AVX2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    case QL_BODY_AVX512_BF16:
      return runs_here(QL_BODY_AVX512) && __builtin_cpu_supports("avx512bf16");
#endif
    default:
      return false;
  }
}

const Body* find_body(const ql_linear_params& p) {
  int body = p.body == QL_BODY_BEST ? ql_cpu_best_body(p.bits) : p.body;
  if (!runs_here(body)) return nullptr;
#if defined(__x86_64__)
  if (body == QL_BODY_AVX512_BF16 && p.bits != 4) return nullptr;
  // Not rounded to 16 bits, float32 x would take three bfloat16 parts: no faster than float32.
  if (body == QL_BODY_AVX512_BF16 && p.x_dtype == QL_F32 && p.compute_dtype == QL_F32) {
    body = QL_BODY_AVX512;
  }
#endif
  switch (body) {
    case QL_BODY_PLAIN:
      return &kPlainBody;
#if defined(__x86_64__)
    case QL_BODY_AVX2:
      return &kAvx2Body;
    case QL_BODY_AVX512:
      return &kAvx512Body;
    case QL_BODY_AVX512_BF16:
      return &kAvx512Bf16Body;
#endif
    default:
      return nullptr;
  }
}

int useful_threads(const ql_linear_params& p) {
  const int64_t wanted = 1 + p.m * p.n * p.k / kWorkPerThread;
  const int64_t allowed = p.threads < 1 ? 1 : p.threads;
  return static_cast<int>(wanted < allowed ? wanted : allowed);
}

}  // namespace
}  // namespace qlinear::cpu

extern "C" int ql_cpu_best_body(int bits) {
  using namespace qlinear::cpu;
  if (bits == 4 && runs_here(QL_BODY_AVX512_BF16)) return QL_BODY_AVX512_BF16;
  if (runs_here(QL_BODY_AVX512)) return QL_BODY_AVX512;
  return runs_here(QL_BODY_AVX2) ? QL_BODY_AVX2 : QL_BODY_PLAIN;
}

extern "C" int ql_cpu_linear(const ql_linear_params* params) {
  using namespace qlinear;
  if (params == nullptr) return QL_NULL_POINTER;
  const ql_linear_params& p = *params;
  const ql_status status = cpu::check(p);
  if (status != QL_OK) return status;
  const cpu::Body* body = cpu::find_body(p);
  if (body == nullptr) return QL_BAD_BODY;
  if (p.m == 0 || p.n == 0) return QL_OK;

  const int64_t n_blocks = (p.n + layout::kTileN - 1) / layout::kTileN;
  const int64_t chunk = p.m < cpu::kRowChunk ? p.m : cpu::kRowChunk;
  const int64_t row_bytes = body->row_bytes(p);
  auto* x = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(chunk * row_bytes + 64)));
  if (x == nullptr) return QL_OUT_OF_MEMORY;
  const int threads = cpu::useful_threads(p);
  for (int64_t first = 0; first < p.m; first += chunk) {
    const int64_t rows = p.m - first < chunk ? p.m - first : chunk;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < rows; ++row) {
        body->prepare_row(p, first + row, x + row * row_bytes);
      }
#pragma omp for schedule(static)
      for (int64_t n_block = 0; n_block < n_blocks; ++n_block) {
        body->multiply_block(p, x, n_block, first, rows);
      }
    }
  }
  std::free(x);
  return QL_OK;
}
