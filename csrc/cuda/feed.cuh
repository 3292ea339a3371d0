// Copying on Hopper: a thread each of three warps hands whole boxes to the copy engine; barriers in
// shared memory count what arrives. One brings codes, one scales and zero points, one the rows of
// x: a thread needs some 80 ns to name a box (H200), the engine far less, so a step's boxes are
// named side by side.
#pragma once

#include "cuda/linear_args.h"
#include "cuda/primitives.cuh"

namespace qlinear::cuda {

using partition::kStepK;
using partition::kTokens;

// Which tiles and steps a thread block takes: its cluster's tiles in turn, a part of k of each.
struct FedWork {
  int rank;  // in the cluster
  int first_tile, tile_stride;
  int first_step, end_step;

  __device__ __forceinline__ explicit FedWork(const FedArgs& args) {
    const unsigned block = blockIdx.x, blocks = args.cluster, steps = args.tile_steps;
    rank = static_cast<int>(block % blocks);
    first_tile = static_cast<int>(block / blocks);
    tile_stride = static_cast<int>(gridDim.x / blocks);
    first_step = static_cast<int>(steps * rank / blocks);
    end_step = static_cast<int>(steps * (rank + 1) / blocks);
  }
};

// Which features and rows a tile is of: tiles of the same features come one after the other.
struct FedTile {
  int n, m;

  __device__ __forceinline__ FedTile(const FedArgs& args, int tile) : n(tile), m(0) {
    if (args.m_tiles > 1) {
      n = tile / args.m_tiles;
      m = tile - n * args.m_tiles;
    }
  }
};

// How often a warp arrives where sums of a cluster are waited for. One lane's arrival after
// __syncwarp orders what all of them stored; racecheck orders only what the arriving lane itself
// stored, so in a library built for it (build --racecheck) every lane arrives.
#ifdef QL_EVERY_LANE_ARRIVES
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif

// The barriers of a thread block: a pair for each slot of the rings, and two for what the others of
// its cluster send.
struct FedBarriers {
  uint32_t full, free;  // of slot 0
  uint32_t summed;      // of tiles in turn

  __device__ __forceinline__ FedBarriers(const FedArgs& args, uint32_t shared_base)
      : full(shared_base + args.memory.barriers),
        free(full + args.warps_k * args.stages * 8),
        summed(free + args.warps_k * args.stages * 8) {}

  // By one lane of each copying warp, of which this is number `part`: setting one up takes some 30
  // clocks, and lanes take turns at it.
  __device__ __forceinline__ void init(const FedArgs& args, int part) const {
    const int slots = args.warps_k * args.stages;
    for (int i = part; i < 2 * slots + 2; i += partition::kCopyThreads / 32) {
      const int arrivals = i < slots ? partition::kFeeders
                           : i < 2 * slots
                               ? args.warps_n
                               : args.cluster * args.warps_n * args.warps_k * kWarpArrivals;
      barrier_init(full + i * 8, arrivals);
    }
    barrier_init_fence();
  }
};

template <int kTokenBlocks>
struct CopyWarp {
  static constexpr int kTileRows = kTokenBlocks * kTokens;
  static constexpr int kPieces = kStepK * 2 / partition::kHalfRowBytes;  // of x, 64 k wide
  enum Part { kCodes, kScales, kRows };

  const FedArgs& args;
  const FedBarriers barriers;
  const FedWork work;
  const uint32_t shared_base;
  const int part;

  __device__ __forceinline__ CopyWarp(const FedArgs& a, const FedBarriers& b, uint32_t base,
                                      int copy_warp)
      : args(a), barriers(b), work(a), shared_base(base), part(copy_warp) {}

  // Hands over this part of one step; columns of the maps are in units of their elements.
  __device__ __forceinline__ void copy_step(int slot, int step, int block, int row) const {
    const partition::FedMemory& memory = args.memory;
    const uint32_t full = barriers.full + slot * 8;
    if (part == kCodes) {
      barrier_expect(full, memory.code_slot);
      copy_box(shared_base + memory.codes + slot * memory.code_slot, &args.code_map,
               step * args.code_columns, block, full);
    } else if (part == kScales) {
      barrier_expect(full, args.scale_box_bytes + args.zero_box_bytes);
      copy_box(shared_base + memory.scales + slot * memory.scale_slot, &args.scale_map,
               step * args.group_columns, block, full);
      if (args.zero_box_bytes > 0) {
        copy_box(shared_base + memory.zeros + slot * memory.zero_slot, &args.zero_map,
                 step * args.group_columns, block, full);
      }
    } else {
      barrier_expect(full, memory.x_slot);
      const uint32_t to = shared_base + slot * memory.x_slot;
      if (args.x_boxes == 1) {
        copy_box(to, &args.x_map, 0, row, step * kPieces, full);
      } else {
        for (int piece = 0; piece < kPieces; ++piece) {
          copy_box(to + piece * (kTileRows * partition::kHalfRowBytes), &args.x_map,
                   step * kStepK + piece * (kStepK / kPieces), row, 0, full);
        }
      }
    }
  }

  // By one thread of each warp. Weights depend on no kernel; x may be written by the one in front,
  // where this one may start before that has ended.
  __device__ __forceinline__ void run() const {
    if (args.dependent && part == kRows) wait_for_previous_kernel();
    int group = 0, stage = 0, phase = 1;  // whose turn it is, and where its bytes go
    for (int tile = work.first_tile; tile < args.tiles; tile += work.tile_stride) {
      const FedTile at(args, tile);
      for (int step = work.first_step; step < work.end_step; ++step) {
        const int slot = group * args.stages + stage;
        barrier_wait(barriers.free + slot * 8, phase);
        copy_step(slot, step, at.n * args.tile_blocks, at.m * kTileRows);
        if (++group == args.warps_k) {
          group = 0;
          if (++stage == args.stages) {
            stage = 0;
            phase ^= 1;
          }
        }
      }
    }
  }
};

}  // namespace qlinear::cuda
