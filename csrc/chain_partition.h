// How a chain of products that one launch computes is cut: docs/kernel.md says why.
//
// Of each layer a thread block takes a share of the n-blocks and all of their k, so that nobody has
// to add up what others hold. It goes through its share in tiles, mostly one, and through a tile in
// *slots* of some steps (partition.h). A slot holds x, codes and scales of its steps, and belongs
// to a group of warps: each has one of the steps and up to four of the n-blocks. Slots of all
// layers have one size, so that the ring runs on from layer to layer.
#pragma once

#include "partition.h"

namespace qlinear::partition {

inline constexpr int kChainLayers = 8;  // that one launch may have
// Warps that multiply: as many as have registers, which 16 rows of x take more of.
constexpr int chain_warps(int m) { return m <= kTokens ? 16 : 12; }
constexpr int chain_threads(int warps) { return warps * 32 + kCopyThreads; }
// Of a thread that multiplies: what the launch has for each thread in steps of 8, less what those
// that copy give back.
constexpr int chain_registers(int warps) {
  constexpr int kRegisters = 65536, kStep = 8;
  const int each = kRegisters / chain_threads(warps) / kStep * kStep;
  return (each * chain_threads(warps) - kCopyRegisters * kCopyThreads) / (warps * 32) / kStep *
         kStep;
}
inline constexpr int kChainWarpBlocks = 4;  // n-blocks of a warp
inline constexpr int kChainTileBlocks = 16;
inline constexpr int kChainMostRows = 16;
// Where a tile's sums are added up.
constexpr int chain_partial_bytes(int m) { return (m <= 4 ? 16 : 30) << 10; }
inline constexpr int kChainLeastSlotBytes = 12 << 10;
// Of codes that have been asked for and are not there yet: more would only keep what the layers
// tell each other waiting behind it.
inline constexpr int kChainBytesInFlight = 56 << 10;

// A contiguous part of `count` things for each of `parts`, longer ones first.
struct Share {
  int first, count;
};
constexpr Share share_of(int count, int parts, int part) {
  const int each = count / parts, longer = count % parts;
  return {each * part + (part < longer ? part : longer), each + (part < longer ? 1 : 0)};
}

// What is alike for all thread blocks of one layer. A share's tiles have `tile_blocks` n-blocks, or
// one less.
struct ChainTiles {
  int tiles, tile_blocks;
  int warps_n;  // that share a tile's n-blocks
};
constexpr ChainTiles chain_tiles(int n_blocks, int ctas) {
  const int most = (n_blocks + ctas - 1) / ctas;
  const int tiles = (most + kChainTileBlocks - 1) / kChainTileBlocks;
  const int blocks = (most + tiles - 1) / tiles;
  return {tiles, blocks, blocks <= kChainWarpBlocks ? 1 : blocks <= 2 * kChainWarpBlocks ? 2 : 4};
}

// Where the parts of a slot lie in it: x first, in the 128-byte swizzle, m rows for each 64 k.
struct ChainSlot {
  int steps;
  int x_bytes, code_bytes, scale_bytes;  // of a slot of tiles of the larger size
  int codes, scales;                     // offsets
  int total;
};
constexpr ChainSlot chain_slot(int m, int tile_blocks, int steps, bool one_group,
                               int scale_item_bytes) {
  constexpr int kCopyAlign = 128, kSwizzleAlign = 1024;
  ChainSlot slot{};
  slot.steps = steps;
  slot.x_bytes = steps * 2 * m * kHalfRowBytes;
  slot.code_bytes = tile_blocks * steps * partition::code_bytes(layout::kTileN, 4);
  slot.scale_bytes = tile_blocks * (one_group ? 1 : steps) * layout::kTileN * scale_item_bytes;
  slot.codes = slot.x_bytes;
  slot.scales = slot.codes + slot.code_bytes;
  slot.total = static_cast<int>(layout::round_up(
      layout::round_up(slot.scales + slot.scale_bytes, kCopyAlign), kSwizzleAlign));
  return slot;
}
// A step for each warp of the group, as many as fit; groups must share out all warps.
constexpr int chain_steps(int m, ChainTiles tiles, bool one_group, int scale_item_bytes,
                          int slot_bytes) {
  const int warps = chain_warps(m);
  for (int steps = warps / 2 / tiles.warps_n; steps > 1; --steps) {
    if (warps % (tiles.warps_n * steps) == 0 &&
        chain_slot(m, tiles.tile_blocks, steps, one_group, scale_item_bytes).total <= slot_bytes) {
      return steps;
    }
  }
  return 1;
}

// Of a tile's sums in shared memory; how many copies of them, each of a warp's steps, have room
// there at a time.
constexpr int chain_partial_row(int blocks) { return blocks * layout::kTileN + 4; }
constexpr int chain_copies_at_once(int m, int tile_blocks) {
  return chain_partial_bytes(m) /
         (m * chain_partial_row(tile_blocks) * static_cast<int>(sizeof(float)));
}

struct ChainMemory {
  int slots, slot_bytes;
  int partials, barriers;  // offsets after the ring's
  int total;
};
constexpr int kChainBarriers = 3;  // of a slot: codes are there, all else is, and it is free again
constexpr ChainMemory chain_memory(int m, int slot_bytes, int budget) {
  constexpr int kBytes = kChainBarriers * 8;
  ChainMemory memory{};
  memory.slot_bytes = slot_bytes;
  memory.slots = (budget - chain_partial_bytes(m)) / (slot_bytes + kBytes);
  memory.partials = memory.slots * slot_bytes;
  memory.barriers = memory.partials + chain_partial_bytes(m);
  memory.total = memory.barriers + memory.slots * kBytes;
  return memory;
}

// Slots whose codes may be on their way. Not more than the ring has: whoever asks for them would
// wait for the first turn of a slot whose second has come already, which looks like none.
constexpr int chain_in_flight(const ChainSlot& slot, int ring) {
  const int some = kChainBytesInFlight / slot.code_bytes;
  return some < 2 ? 2 : some < ring ? some : ring;
}

static_assert(chain_registers(12) == 160 && chain_registers(16) == 112);
static_assert(chain_copies_at_once(kChainMostRows, kChainTileBlocks) >= 1);

}  // namespace qlinear::partition
