// A layer of a chain as chain_args() in cuda/chain_args.cpp cuts it, for the tests of chain_*.
#pragma once

#include <algorithm>
#include <vector>

#include "chain_partition.h"

namespace chain_cut {

namespace partition = qlinear::partition;

inline constexpr int kScaleBytes = 2;           // scales are of x's dtype
inline constexpr int kSharedBytes = 227 << 10;  // of a thread block on Hopper
inline constexpr int kMultiprocessors[] = {1, 2, 7, 66, 114, 132, 144, 200};

struct Layer {
  partition::ChainTiles tiles;
  partition::ChainSlot slot;
  int slots;   // of a tile
  int group;   // warps that share a slot
  int groups;  // of them
  int in_flight;
};

struct Chain {
  int m;
  partition::ChainMemory memory;
  std::vector<Layer> layers;
};

struct Sizes {
  int n_blocks, steps;
  bool one_group;
};

inline Chain cut(int m, const std::vector<Sizes>& sizes, int ctas) {
  Chain chain{m, {}, {}};
  int slot_bytes = partition::kChainLeastSlotBytes;
  for (const Sizes& each : sizes) {
    const partition::ChainTiles tiles = partition::chain_tiles(each.n_blocks, ctas);
    slot_bytes =
        std::max(slot_bytes,
                 partition::chain_slot(m, tiles.tile_blocks, 1, each.one_group, kScaleBytes).total);
  }
  chain.memory = partition::chain_memory(m, slot_bytes, kSharedBytes);
  for (const Sizes& each : sizes) {
    Layer layer{};
    layer.tiles = partition::chain_tiles(each.n_blocks, ctas);
    const int steps =
        partition::chain_steps(m, layer.tiles, each.one_group, kScaleBytes, slot_bytes);
    layer.slot =
        partition::chain_slot(m, layer.tiles.tile_blocks, steps, each.one_group, kScaleBytes);
    layer.slots = (each.steps + steps - 1) / steps;
    layer.group = layer.tiles.warps_n * steps;
    layer.groups = partition::chain_warps(m) / layer.group;
    layer.in_flight = partition::chain_in_flight(layer.slot, chain.memory.slots);
    chain.layers.push_back(layer);
  }
  return chain;
}

}  // namespace chain_cut
