// Where a thread block's work lies: its stripe of tiles and steps, and each tile's place in y.
#pragma once

#include "cuda/linear_args.h"
#include "cuda/values.cuh"

namespace qlinear::cuda {

using partition::kStepK;
using partition::kTokens;

// A thread block's stripe as tiles: from a step of the first tile to before a step of the last one.
struct Stripe {
  int first_tile, first_step, last_tile, last_end;

  __device__ __forceinline__ Stripe(const LinearArgs& args, int cta) {
    const partition::Stripes& stripes = args.stripes;
    if (stripes.granule_steps == args.tile_steps) {
      first_tile = static_cast<int>(stripes.first(cta));
      last_tile = static_cast<int>(stripes.first(cta + 1)) - 1;
      first_step = 0;
      last_end = args.tile_steps;
    } else {  // the line of a product whose tiles are cut is short: plan.cpp
      const uint32_t first = static_cast<uint32_t>(stripes.begin(cta));
      const uint32_t last = static_cast<uint32_t>(stripes.begin(cta + 1)) - 1;
      const uint32_t tile_steps = static_cast<uint32_t>(args.tile_steps);
      first_tile = static_cast<int>(first / tile_steps);
      last_tile = static_cast<int>(last / tile_steps);
      first_step = static_cast<int>(first - first_tile * tile_steps);
      last_end = static_cast<int>(last - last_tile * tile_steps) + 1;
    }
  }
  __device__ __forceinline__ int begin_of(int tile) const {
    return tile == first_tile ? first_step : 0;
  }
  __device__ __forceinline__ int end_of(int tile, int tile_steps) const {
    return tile == last_tile ? last_end : tile_steps;
  }
};

// Which output features and rows of x a tile holds; tiles of the same features lie side by side.
struct TilePlace {
  int n_tile, m_tile;
  __device__ __forceinline__ TilePlace(const LinearArgs& args, int tile) : n_tile(tile), m_tile(0) {
    if (args.m_tiles > 1) {
      n_tile = tile / args.m_tiles;
      m_tile = tile - n_tile * args.m_tiles;
    }
  }
};

}  // namespace qlinear::cuda
