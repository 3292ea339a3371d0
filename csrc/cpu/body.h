// What a body of the CPU kernel is: how it wants a row of activations laid out, and how it
// multiplies 16 output features with some rows. linear.cpp owns checks, threads and memory.
//
// Each body is compiled with the flags of its instruction set. Were two copies of one inline
// function merged by the linker, a machine without AVX-512 could end up in the AVX-512 copy; so
// everything inline that bodies share lives in a namespace named after the body
// (QL_BODY_NAMESPACE).
#pragma once

#include <cstdint>

#include "linear_params.h"

namespace qlinear::cpu {

struct Body {
  ql_cpu_body id;
  // Bytes that one prepared row takes; a multiple of 64.
  int64_t (*row_bytes)(const ql_linear_params& p);
  // Writes row `row` of x to `out` (64-byte aligned), k padded with zeros.
  void (*prepare_row)(const ql_linear_params& p, int64_t row, char* out);
  // y of `rows` prepared rows, the first of which is `first_row`, for the 16 features of n_block.
  void (*multiply_block)(const ql_linear_params& p, const char* x, int64_t n_block,
                         int64_t first_row, int64_t rows);
};

extern const Body kPlainBody;
#if defined(__x86_64__)
extern const Body kAvx2Body;
extern const Body kAvx512Body;
extern const Body kAvx512Bf16Body;
#endif

}  // namespace qlinear::cpu
