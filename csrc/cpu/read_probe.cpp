// Reads memory as fast as this processor can: what the kernels' bandwidth is compared with.
//
// Sixty-four bytes at a time and eight sums that do not wait for each other; the compiler cuts the
// vectors to what the target has. The sum is returned so that no read can be left out.
#include <cstdint>
#include <cstring>

#include "linear_params.h"

namespace {

using Wide = uint64_t __attribute__((vector_size(64)));

constexpr int64_t kSums = 8;
constexpr int64_t kStepBytes = kSums * static_cast<int64_t>(sizeof(Wide));

// One thread's piece; a multiple of this keeps pieces of different threads off each other's lines.
constexpr int64_t kPieceBytes = 4096;

inline __attribute__((always_inline)) uint64_t sum(const char* from, int64_t bytes) {
  Wide sums[kSums] = {};
  int64_t at = 0;
  for (; at + kStepBytes <= bytes; at += kStepBytes) {
    for (int64_t i = 0; i < kSums; ++i) {
      Wide read;
      std::memcpy(&read, from + at + i * static_cast<int64_t>(sizeof read), sizeof read);
      sums[i] += read;
    }
  }
  Wide all = {};
  for (const Wide& one : sums) all += one;
  uint64_t total = 0;
  for (int i = 0; i < 8; ++i) total += all[i];
  for (; at + 8 <= bytes; at += 8) {
    uint64_t word;
    std::memcpy(&word, from + at, sizeof word);
    total += word;
  }
  return total;
}

uint64_t sum_plain(const char* from, int64_t bytes) { return sum(from, bytes); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) uint64_t sum_avx2(const char* from, int64_t bytes) {
  return sum(from, bytes);
}

__attribute__((target("avx512f"))) uint64_t sum_avx512(const char* from, int64_t bytes) {
  return sum(from, bytes);
}
#endif

using Sum = uint64_t (*)(const char*, int64_t);

Sum best_sum() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return sum_avx512;
  if (__builtin_cpu_supports("avx2")) return sum_avx2;
#endif
  return sum_plain;
}

}  // namespace

extern "C" uint64_t ql_cpu_read_probe(const void* buffer, int64_t bytes, int passes, int threads) {
  if (buffer == nullptr || bytes <= 0) return 0;
  const Sum sum_piece = best_sum();
  const auto* from = static_cast<const char*>(buffer);
  const int64_t wanted = threads < 1 ? 1 : threads;
  const int64_t share = (bytes + wanted - 1) / wanted;
  const int64_t piece = (share + kPieceBytes - 1) / kPieceBytes * kPieceBytes;
  const int64_t pieces = (bytes + piece - 1) / piece;
  uint64_t total = 0;
  // A pass ends with the threads' meeting, as a kernel's call does.
  for (int pass = 0; pass < passes; ++pass) {
#pragma omp parallel for num_threads(static_cast<int>(wanted)) schedule(static) reduction(+ : total)
    for (int64_t i = 0; i < pieces; ++i) {
      const int64_t begin = i * piece;
      total += sum_piece(from + begin, bytes - begin < piece ? bytes - begin : piece);
    }
  }
  return total;
}
