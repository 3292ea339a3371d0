// What a linear kernel is handed: the problem and how it is cut, all of it worked out on the host.
#pragma once

#include "partition.h"

namespace qlinear::cuda {

// How a kernel works. Alone: warps copy for themselves, for every GPU. Fed: four warps copy
// for all others, by Hopper's copy engine; those multiply each for itself, or four together as
// a warpgroup.
enum class Form { kAlone, kFed, kFedWarpgroups };

// Where results go.
struct Output {
  unsigned char* y;
  const unsigned char* bias;  // or null
  int64_t y_row_stride;
  int n;
  int y_dtype, bias_dtype;  // ql_dtype
  bool y_vector;            // four results can be stored at a time
};

// What a step's arithmetic depends on.
struct StepArgs {
  int groups_per_step;  // of scales
  int group_shift;      // 16 k of a step >> this are their group, where there are several
  int scale_dtype;      // ql_dtype
  int symmetric_zero;   // where there are no zero points
  bool has_zeros;
};

// What the form alone is handed.
struct LinearArgs {
  const unsigned char* x;
  const unsigned char* qweight;
  const unsigned char* scales;
  const unsigned char* zeros;  // or null
  Output output;
  StepArgs step;
  float* slots;   // partition.h: partial_slot
  int* counters;  // one per tile, zero between launches
  int64_t x_row_bytes;
  int64_t x_advance_bytes;    // between the rows that one thread copies
  int64_t code_block_bytes;   // of one n-block's codes: all of k
  int64_t scale_block_bytes;  // of one n-block's scales
  int64_t zero_block_bytes;
  int code_step_bytes, scale_step_bytes, zero_step_bytes;  // of one n-block; 0: one group for all
  int code_advance, scale_advance, zero_advance;           // between the steps of a warp
  int scale_chunks, zero_chunks;                           // of 16 bytes, per n-block and step
  partition::Stripes stripes;
  partition::SharedMemory memory;
  int m, k;
  int n_blocks;  // of 16 features, padded
  int tile_steps, m_tiles;
  int warps_n, warps_n_log2, warps_k, stages;
  int x_item_bytes, x_dtype;  // 2 or 4; ql_dtype
  bool x_async;               // rows of x can be copied 16 bytes at a time
  bool dependent;             // launched to overlap with the kernel in front
};

// A CUtensorMap: how Hopper's copy engine sees a matrix.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// What the fed forms are handed. Each first look at 64 bytes of arguments takes some 300 clocks, so
// what is needed together stands together: at the start, for a step, at the end of a tile.
struct alignas(64) FedArgs {
  TensorMap x_map, code_map, scale_map, zero_map;
  partition::FedMemory memory;
  int warps_n, warps_k, stages;

  int cluster, tiles, m_tiles, tile_blocks, tile_steps;
  int code_columns;   // of a step in code_map
  int group_columns;  // of a step in scale_map and zero_map; 0: one group for all
  int scale_box_bytes, zero_box_bytes;
  int x_boxes;  // in which a step of x is copied
  StepArgs step;
  bool dependent;  // launched to overlap with the kernel in front
  bool direct;     // warps store what they hold
  int m;
  // To divide small numbers with __umulhi: by the fours of a tile's columns, and by those of the
  // part of them that a thread block of a cluster adds up.
  uint32_t by_fours, by_part_fours;

  Output output;
};

}  // namespace qlinear::cuda
