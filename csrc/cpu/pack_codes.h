// Brings codes into the runtime layout: the work of `qlinear pack`, done once for each weight.
// The same result comes from kernels/packing.py with torch, several times slower.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// out: tiles of layout.h. codes: [k, n] bytes, each below 2^bits, rows `row_stride` bytes apart; k
// a multiple of 64, n of 16. Returns a ql_status.
int ql_cpu_pack_codes(const uint8_t* codes, int64_t row_stride, int64_t k, int64_t n, int bits,
                      uint8_t* out, int threads);

#ifdef __cplusplus
}
#endif
