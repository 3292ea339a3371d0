// How one product is cut into work for a GPU: steps, tiles, stripes, rings in shared memory.
//
// Like layout.h this header knows no CUDA header and is constexpr throughout: kernels, the planner
// and the host tests use the same functions. Why it is cut like this: docs/kernel.md.
//
// A *step* is 128 input features (k): one group of the largest size, so no cut ever falls inside a
// scale group. A *tile* is 8 * token_blocks rows of x by some n-blocks of 16 output features over
// all of k. Steps of all tiles stand in one line, tile after tile, tiles of the same output
// features next to each other; each thread block takes one contiguous *stripe* of that line.
#pragma once

#include "layout.h"

namespace qlinear::partition {

inline constexpr int kStepK = 128;
// n-blocks of 16 output features that a warp holds: fewer beside many rows, for the registers'
// sake.
constexpr int blocks_per_warp(int token_blocks) { return token_blocks >= 16 ? 1 : 2; }
constexpr int warp_columns(int token_blocks) {
  return blocks_per_warp(token_blocks) * layout::kTileN;
}
inline constexpr int kTokens = 8;          // rows of x in one mma operand
inline constexpr int kWarpgroupWarps = 4;  // whose warps multiply together on Hopper
inline constexpr int kMaxStages = 8;
inline constexpr int kMaxStagesAlone = 4;  // where warps copy for themselves
inline constexpr int kMaxWarpsK = 16;
inline constexpr int kMaxWarpsN = 8;
// Threads that multiply: so many have room for their registers side by side.
constexpr int max_threads(int token_blocks) {
  return token_blocks <= 2 ? 512 : token_blocks <= 4 ? 384 : 256;
}
// On Hopper four warps more may copy for all; registers are moved between groups of four warps.
inline constexpr int kCopyThreads = 128;
inline constexpr int kCopyRegisters = 24;
inline constexpr int kFeeders = 3;  // of those warps that copy at all
// Threads that multiply beside them, and the registers that each has then, in steps of 8.
constexpr int fed_max_threads(int token_blocks) {
  return token_blocks <= 2 || token_blocks > 16 ? 384 : 512;
}
constexpr int fed_registers(int token_blocks) {
  return token_blocks == 1 ? 96 : token_blocks == 2 || token_blocks > 16 ? 160 : 112;
}
// With which the kernel starts: those of one row block leave room for a second thread block.
constexpr int fed_bound(int token_blocks) {
  return token_blocks == 1 ? 768 : fed_max_threads(token_blocks) + kCopyThreads;
}
// n-blocks of 16 output features that a fed warp multiplies: they share what is loaded of x.
constexpr int fed_blocks_per_warp(int token_blocks) { return token_blocks <= 2 ? 4 : 1; }
// Whether weights are rounded to 16 bits before they are multiplied, beside many rows of x or where
// groups are short: sums of groups that are scaled one by one would cost more.
constexpr bool fed_rounded(int token_blocks, bool fine_groups) {
  return token_blocks >= 16 || fine_groups;
}
// Of a tile's row blocks, how many are added up and stored at a time.
constexpr int fed_part_blocks(int token_blocks) { return token_blocks >= 16 ? 4 : token_blocks; }
inline constexpr int kMaxCluster = 8;  // thread blocks that may share a tile's k

// Activations of one step: two halves of 64 k, each with its rows of 128 bytes cut into 16-byte
// chunks. Chunk c of row r lies at place c ^ (r % 8) of its row, so that the eight rows that
// ldmatrix reads together lie in different banks; Hopper's wgmma calls this layout the 128-byte
// swizzle.
inline constexpr int kRowChunks = kStepK * 2 / layout::kVectorBytes;
inline constexpr int kHalfChunks = kRowChunks / 2;
inline constexpr int kHalfRowBytes = kHalfChunks * layout::kVectorBytes;
constexpr int activation_offset(int row, int chunk, int rows) {
  return (chunk / kHalfChunks * rows + row) * kHalfRowBytes +
         (chunk % kHalfChunks ^ row % 8) * layout::kVectorBytes;
}

constexpr int groups_per_step(int64_t group_size) {
  return group_size == 32 ? 4 : group_size == 64 ? 2 : 1;
}

// What one warp's ring holds of one step, in this order; every part is a multiple of 16 bytes.
constexpr int code_bytes(int columns, int bits) { return columns * kStepK * bits / 8; }
constexpr int scale_bytes(int columns, int64_t group_size, int scale_item_bytes) {
  return columns * groups_per_step(group_size) * scale_item_bytes;
}
constexpr int zero_bytes(int columns, int64_t group_size, bool has_zeros) {
  return has_zeros ? columns * groups_per_step(group_size) : 0;
}

struct SharedMemory {
  int activation_stage;  // bytes of one step's activations, shared by warps_n warps
  int warp_stage;        // bytes of one step of one warp's codes, scales and zero points
  int weights;           // offset of the rings of codes, scales and zero points, after those of x:
                         // [warps_k][stages][warps_n]
  int partials;          // offset of float [warps_k][tokens][partial_row]
  int partial_row;       // floats in a row: four more than columns, against bank conflicts
  int barriers;          // offset of two times [warps_k][stages] barriers: full, and free again
  int flag;              // offset of one int
  int total;
};

struct Geometry {
  int token_blocks, warps_n, warps_k, stages;
};

constexpr SharedMemory shared_memory(Geometry geometry, int bits, int64_t group_size,
                                     int scale_item_bytes, bool has_zeros) {
  SharedMemory memory{};
  const int tokens = geometry.token_blocks * kTokens;
  const int columns = warp_columns(geometry.token_blocks);
  memory.activation_stage = tokens * 2 * kHalfRowBytes;
  memory.warp_stage = code_bytes(columns, bits) +
                      scale_bytes(columns, group_size, scale_item_bytes) +
                      zero_bytes(columns, group_size, has_zeros);
  memory.weights = geometry.warps_k * geometry.stages * memory.activation_stage;
  memory.partials =
      memory.weights + geometry.warps_n * geometry.warps_k * geometry.stages * memory.warp_stage;
  memory.partial_row = geometry.warps_n * columns + 4;
  memory.barriers = memory.partials + geometry.warps_k * tokens * memory.partial_row *
                                          static_cast<int>(sizeof(float));
  memory.flag = memory.barriers + 2 * geometry.warps_k * geometry.stages * 8;
  memory.total = static_cast<int>(layout::round_up(memory.flag + 4, layout::kVectorBytes));
  return memory;
}

// The rings of a fed thread block, one after the other: x, codes, scales, zero points, each
// [warps_k][stages] slots; then what the end of a tile needs.
struct FedGeometry {
  int token_blocks, tile_blocks, warps_k, stages;  // tile_blocks: n-blocks of a tile
  int cluster;                                     // thread blocks that share a tile's k
  bool several_tiles;                              // one after the other in a thread block
};
struct FedMemory {
  int x_slot, code_slot, scale_slot, zero_slot;  // bytes of a slot
  int codes, scales, zeros;                      // offsets of the rings after x's
  int partials;                                  // offset of float [warps_k][part][partial_row]
  int partial_row;     // floats in a row: four more than columns, against bank conflicts
  int received;        // offset of the places for what the cluster's thread blocks send
  int places;          // of these: 1, or 2 where several tiles follow each other
  int received_fours;  // of a row's columns in such a place, which is [cluster][tokens][this]
  int barriers;  // offset of two times [warps_k][stages] barriers: full, and free again; two more
                 // for what is received
  int total;
};
constexpr FedMemory fed_memory(FedGeometry geometry, int bits, int64_t group_size,
                               int scale_item_bytes, bool has_zeros) {
  constexpr int kCopyAlign = 128;  // of what the copy engine writes
  constexpr int kItem = static_cast<int>(sizeof(float));
  FedMemory memory{};
  const int slots = geometry.warps_k * geometry.stages;
  const int columns = geometry.tile_blocks * layout::kTileN;
  const int tokens = geometry.token_blocks * kTokens;
  const int groups = columns * groups_per_step(group_size);
  const auto slot = [](int bytes) { return static_cast<int>(layout::round_up(bytes, kCopyAlign)); };
  memory.x_slot = tokens * 2 * kHalfRowBytes;
  memory.code_slot = code_bytes(columns, bits);
  memory.scale_slot = slot(groups * scale_item_bytes);
  memory.zero_slot = slot(has_zeros ? groups : 0);
  memory.codes = slots * memory.x_slot;
  memory.scales = memory.codes + slots * memory.code_slot;
  memory.zeros = memory.scales + slots * memory.scale_slot;
  // Where a thread block has but one tile, its rings are of no use any more when it ends.
  const int rings = memory.zeros + slots * memory.zero_slot;
  memory.partials = geometry.several_tiles ? rings : 0;
  memory.partial_row = columns + 4;
  const int part = fed_part_blocks(geometry.token_blocks) * kTokens;
  const int end = memory.partials + geometry.warps_k * part * memory.partial_row * kItem;
  memory.received = end < rings ? rings : end;
  const int fours = (columns / 4 + geometry.cluster - 1) / geometry.cluster;
  memory.received_fours = geometry.cluster == 1 ? 0 : fours < 2 ? 2 : fours;  // see by_part_fours
  memory.places = geometry.several_tiles || part < tokens ? 2 : 1;
  memory.barriers =
      memory.received + memory.places * geometry.cluster * part * memory.received_fours * 4 * kItem;
  memory.total = memory.barriers + 2 * slots * 8 + 2 * 8;
  return memory;
}

// The line of steps and its stripes. A granule is what is never cut: one step, or a whole tile.
// The first `longer` stripes hold one granule more than the others.
struct Stripes {
  int64_t granules;
  int granule_steps;
  int ctas;      // at most as many as granules
  int64_t each;  // granules / ctas
  int longer;    // granules % ctas

  constexpr Stripes() : granules(0), granule_steps(1), ctas(1), each(0), longer(0) {}
  constexpr Stripes(int64_t granules_, int granule_steps_, int ctas_)
      : granules(granules_),
        granule_steps(granule_steps_),
        ctas(ctas_),
        each(granules_ / ctas_),
        longer(static_cast<int>(granules_ % ctas_)) {}

  // First granule of stripe `cta`; that of stripe `ctas` is the line's end.
  constexpr int64_t first(int64_t cta) const { return each * cta + (cta < longer ? cta : longer); }
  // First step of stripe `cta`.
  constexpr int64_t begin(int64_t cta) const { return first(cta) * granule_steps; }
  // The stripe that holds this step.
  constexpr int owner(int64_t step) const {
    const int64_t granule = step / granule_steps;
    const int64_t in_longer = (each + 1) * longer;
    return static_cast<int>(granule < in_longer ? granule / (each + 1)
                                                : longer + (granule - in_longer) / each);
  }
};

// Where a thread block leaves its share of a tile that it did not compute alone. It has at most two
// such tiles: the one that its stripe begins inside of, and the last one, which it began.
constexpr int64_t partial_slot(int cta, bool began_tile) {
  return 2 * static_cast<int64_t>(cta) + (began_tile ? 1 : 0);
}

// The workspace: counters of tiles first, then the slots.
inline constexpr int64_t kCounterBytes = int64_t{1} << 20;
inline constexpr int64_t kSlotsBytes = int64_t{32} << 20;
inline constexpr int64_t kWorkspaceBytes = kCounterBytes + kSlotsBytes;

constexpr int64_t slots_bytes(Geometry geometry, int ctas) {
  return 2 * static_cast<int64_t>(ctas) * geometry.token_blocks * kTokens * geometry.warps_n *
         warp_columns(geometry.token_blocks) * static_cast<int64_t>(sizeof(float));
}

static_assert(layout::kPadK % kStepK == 0, "a padded row is a whole number of steps");
static_assert(layout::kPadN % warp_columns(1) == 0,
              "a warp's two n-blocks are both there or both not");

}  // namespace qlinear::partition
