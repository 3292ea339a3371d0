// What a chain's weights and rows are copied by: one thread each of three warps names codes, scales
// and rows of x to the copy engine, slot after slot through all layers.
#pragma once

#include "cuda/chain_args.h"
#include "cuda/primitives.cuh"

namespace qlinear::cuda {

// One place in the ring after the other.
struct RingPlace {
  int slot = 0, phase = 0;

  __device__ __forceinline__ void advance(int by, int slots) {
    slot += by;
    while (slot >= slots) {
      slot -= slots;
      phase ^= 1;
    }
  }
};

struct ChainBarriers {
  uint32_t codes, others, free;  // of slot 0

  __device__ __forceinline__ ChainBarriers(const ChainArgs& args, uint32_t shared_base)
      : codes(shared_base + args.memory.barriers),
        others(codes + args.memory.slots * 8),
        free(others + args.memory.slots * 8) {}

  // By one lane of each copying warp, of which this is number `part`.
  __device__ __forceinline__ void init(const ChainArgs& args, int part, int warps) const {
    const int slots = args.memory.slots;
    for (int i = part; i < partition::kChainBarriers * slots; i += partition::kCopyThreads / 32) {
      const int arrivals = i < slots ? 1 : i < 2 * slots ? 2 : warps;
      barrier_init(codes + i * 8, arrivals);
    }
    barrier_init_fence();
  }
};

struct ChainCopier {
  enum Part { kCodes, kScales, kRows };

  const ChainArgs& args;
  const ChainBarriers barriers;
  const uint32_t shared_base;
  const int part;

  // For rows of x that others store, so that the copy engine, which looks at memory in a way of its
  // own, sees them.
  __device__ __forceinline__ void wait_for_layers(int before) const {
    for (int layer = 0; layer < before; ++layer) {
      const int n_blocks = args.layers[layer].n_blocks, blocks = static_cast<int>(gridDim.x);
      while (load_acquire(args.finished + layer) < min(n_blocks, blocks)) continue;
    }
    copies_see_stores();
  }

  // The boxes of one part: all that does not change from slot to slot.
  struct Boxes {
    const TensorMap* map;
    uint32_t to;  // in slot 0
    int bytes;
    int by;  // from box to box, along the map's last dimension
  };
  __device__ __forceinline__ Boxes boxes_of(const ChainLayer& layer, int blocks) const {
    const partition::ChainSlot& slot = layer.slot;
    const int most = layer.tiles.tile_blocks, smaller = blocks == most ? 0 : 1;
    if (part == kCodes) {
      return {layer.codes + smaller, shared_base + slot.codes, slot.code_bytes / most * blocks,
              slot.steps};
    }
    if (part == kScales) {
      return {layer.scales + smaller, shared_base + slot.scales, slot.scale_bytes / most * blocks,
              layer.slot_groups};
    }
    return {&layer.x, shared_base, slot.x_bytes, 2 * slot.steps};
  }

  // By one thread.
  __device__ __forceinline__ void run() const {
    const int ring = args.memory.slots, slot_bytes = args.memory.slot_bytes;
    const uint32_t there = part == kCodes ? barriers.codes : barriers.others;
    RingPlace place{0, 1}, awaited;
    int ahead = 0;  // slots of codes that are on their way
    for (int i = 0; i < args.count; ++i) {
      const ChainLayer& layer = args.layers[i];
      const partition::Share share =
          partition::share_of(layer.n_blocks, static_cast<int>(gridDim.x), blockIdx.x);
      if (share.count == 0) continue;
      if (part == kRows && layer.waits) wait_for_layers(i);
      for (int t = 0; t < layer.tiles.tiles; ++t) {
        const partition::Share tile = partition::share_of(share.count, layer.tiles.tiles, t);
        if (tile.count == 0) continue;
        const Boxes boxes = boxes_of(layer, tile.count);
        const int row = part == kRows ? 0 : share.first + tile.first;
        const int in_flight = layer.in_flight;
        int at = 0;
#pragma unroll 1
        for (int left = layer.slots; left > 0; --left) {
          for (ahead += part == kCodes ? 1 : 0; ahead > in_flight; --ahead) {
            barrier_wait(barriers.codes + awaited.slot * 8, awaited.phase);
            awaited.advance(1, ring);
          }
          barrier_wait(barriers.free + place.slot * 8, place.phase);
          barrier_expect(there + place.slot * 8, boxes.bytes);
          copy_box(boxes.to + place.slot * slot_bytes, boxes.map, 0, row, at,
                   there + place.slot * 8);
          at += boxes.by;
          place.advance(1, ring);
        }
      }
    }
  }

  // Has the engine look at all maps before they are needed.
  __device__ __forceinline__ void prefetch(int lane) const {
    for (int i = lane; i < args.count; i += 32) {
      const ChainLayer& layer = args.layers[i];
      prefetch_map(layer.codes);
      prefetch_map(layer.scales);
      prefetch_map(&layer.x);
      if (layer.tiles.tile_blocks == 1) continue;
      prefetch_map(layer.codes + 1);
      prefetch_map(layer.scales + 1);
    }
  }
};

}  // namespace qlinear::cuda
