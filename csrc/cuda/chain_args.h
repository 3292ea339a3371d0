// What the kernel of a whole chain is handed.
#pragma once

#include "chain_partition.h"
#include "cuda/linear_args.h"

namespace qlinear::cuda {

// Maps of tiles of the larger size and of one n-block less.
struct alignas(64) ChainLayer {
  TensorMap codes[2], scales[2], x;
  Output output;
  int n_blocks;
  partition::ChainTiles tiles;
  int slots;  // of a tile
  partition::ChainSlot slot;
  int group;           // warps that share a slot
  int in_flight;       // slots whose codes may be on their way
  int copies_at_once;  // of a tile's sums
  int fours_log2;      // the columns of a tile by fours, as a power of two at least
  int scale_bytes;     // of an n-block's group; 0: one for all steps
  int slot_groups;     // by which a slot's scales go on in their map; 0: one for all
  bool waits;          // for all layers before it: what it reads or writes is theirs
};

struct alignas(64) ChainArgs {
  ChainLayer layers[partition::kChainLayers];
  partition::ChainMemory memory;
  int count;  // of layers
  int m;
  // Zero between launches: how many thread blocks have finished each layer, and how many all.
  int* finished;
  int* ended;
};

}  // namespace qlinear::cuda
