// What a linear kernel is handed: the problem and how it is cut, all of it worked out on the host.
#pragma once

#include "partition.h"

namespace qlinear::cuda {

// How a kernel works. Alone: warps copy for themselves, for every GPU. Fed: four warps copy
// for all others, by Hopper's copy engine; those multiply each for itself, or four together as
// a warpgroup.
enum class Form { kAlone, kFed, kFedWarpgroups };

// A CUtensorMap: how Hopper's copy engine sees x as a matrix.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

struct LinearArgs {
  TensorMap x_map;  // where copy_warp
  const unsigned char* x;
  const unsigned char* qweight;
  const unsigned char* scales;
  const unsigned char* zeros;  // or null
  const unsigned char* bias;   // or null
  unsigned char* y;
  float* slots;   // partition.h: partial_slot
  int* counters;  // one per tile, zero between launches
  int64_t x_row_bytes, y_row_stride;
  int64_t x_advance_bytes;    // between the rows that one thread copies
  int64_t code_block_bytes;   // of one n-block's codes: all of k
  int64_t scale_block_bytes;  // of one n-block's scales
  int64_t zero_block_bytes;
  int code_step_bytes, scale_step_bytes, zero_step_bytes;  // of one n-block; 0: one group for all
  int code_advance, scale_advance, zero_advance;           // between the steps of a warp
  int scale_chunks, zero_chunks;                           // of 16 bytes, per n-block and step
  partition::Stripes stripes;
  partition::SharedMemory memory;
  int m, n, k;
  int n_blocks;  // of 16 features, padded
  int tile_steps, m_tiles;
  int warps_n, warps_n_log2, warps_k, stages;
  int group_size;                                 // -1, 32, 64, 128
  int scale_item_bytes, x_item_bytes;             // 2 or 4
  int x_dtype, scale_dtype, bias_dtype, y_dtype;  // ql_dtype
  int symmetric_zero;                             // where `zeros` is null
  bool x_async;                                   // rows of x can be copied 16 bytes at a time
  bool copy_warp;  // four warps more copy for all, by the copy engine
  bool y_vector;   // four results can be stored at a time
  bool dependent;  // launched to overlap with the kernel in front
};

}  // namespace qlinear::cuda
