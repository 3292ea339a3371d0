// Copying by four warps for all others, on Hopper; barriers in shared memory count what arrives,
// and the warps that multiply spend no instruction on addresses. The first warp copies scales and
// zero points, small pieces, with cp.async by all its lanes; a thread of each of the others names
// whole pieces of codes and boxes of x to the copy engine, which takes tens of ns for each (H200).
#pragma once

#include "cuda/stripe.cuh"

namespace qlinear::cuda {

inline constexpr int kCopyWarps = partition::kCopyThreads / 32;
inline constexpr int kEngineWarps = kCopyWarps - 1;

// The barriers of a thread block's rings: one pair for each stage of each group of warps.
struct RingBarriers {
  uint32_t full, free;  // of group 0, stage 0

  __device__ __forceinline__ RingBarriers(const LinearArgs& args, uint32_t shared_base)
      : full(shared_base + args.memory.barriers), free(full + args.warps_k * args.stages * 8) {}

  __device__ __forceinline__ void init(const LinearArgs& args) const {
    for (int slot = 0; slot < args.warps_k * args.stages; ++slot) {
      barrier_init(full + slot * 8, 32 + kCopyWarps - 1);  // the first warp's lanes, the others
      barrier_init(free + slot * 8, args.warps_n);
    }
    barrier_init_fence();
  }
};

template <int kBits, int kTokenBlocks>
struct CopyWarp {
  static constexpr int kTileRows = kTokenBlocks * kTokens;
  static constexpr int kBlocks = partition::blocks_per_warp(kTokenBlocks);
  static constexpr int kActivationStage = kTileRows * 2 * partition::kHalfRowBytes;
  static constexpr int kCodeBytes = partition::code_bytes(layout::kTileN, kBits);  // of an n-block

  const LinearArgs& args;
  const Stripe stripe;
  const RingBarriers barriers;
  const uint32_t shared_base;
  const int lane;
  const int part;  // of kEngineWarps: n-blocks are dealt to them; the last two copy half of x each
  int tile, step, end;
  int group = 0, stage = 0, phase = 1;  // whose turn it is, and where its bytes go
  int blocks, row0, bytes;
  const unsigned char* codes;
  const unsigned char* scales;
  const unsigned char* zeros;

  __device__ __forceinline__ CopyWarp(const LinearArgs& a, const RingBarriers& b, uint32_t base,
                                      int copy_warp)
      : args(a),
        stripe(a, blockIdx.x),
        barriers(b),
        shared_base(base),
        lane(threadIdx.x % 32),
        part(copy_warp - 1) {}

  __device__ __forceinline__ void enter_tile(int next) {
    tile = next;
    if (tile > stripe.last_tile) return;
    step = stripe.begin_of(tile);
    end = stripe.end_of(tile, args.tile_steps);
    const TilePlace place(args, tile);
    const int first = place.n_tile * args.warps_n * kBlocks;
    blocks = min(args.warps_n * kBlocks, args.n_blocks - first);
    row0 = place.m_tile * kTileRows;
    const int mine = (blocks - part + kEngineWarps - 1) / kEngineWarps;
    bytes = (has_half() ? kActivationStage / 2 : 0) + mine * kCodeBytes;
    const int64_t block = first, at = step;
    codes = args.qweight + (block + part) * args.code_block_bytes + at * args.code_step_bytes;
    scales = args.scales + block * args.scale_block_bytes + at * args.scale_step_bytes;
    zeros = args.zeros + block * args.zero_block_bytes + at * args.zero_step_bytes;
  }

  __device__ __forceinline__ void start() {
    group = stage = 0;
    phase = 1;
    enter_tile(stripe.first_tile);
  }

  __device__ __forceinline__ bool has_next() const { return tile <= stripe.last_tile; }

  __device__ __forceinline__ uint32_t ring(int slot) const {
    return shared_base + args.memory.weights + slot * (args.warps_n * args.memory.warp_stage);
  }

  __device__ __forceinline__ void copy_codes(int slot, uint32_t barrier) {
    const unsigned char* from = codes;
    for (int block = part; block < blocks; block += kEngineWarps) {
      copy_bulk(
          ring(slot) + block / kBlocks * args.memory.warp_stage + block % kBlocks * kCodeBytes,
          from, kCodeBytes, barrier);
      from += kEngineWarps * args.code_block_bytes;
    }
  }

  // By all lanes: `chunks` of 16 bytes, a power of two, for each n-block, to their place behind the
  // codes of the block's warp.
  __device__ __forceinline__ void copy_small(int slot, const unsigned char* from,
                                             int64_t block_bytes, int chunks, int offset) {
    const int shift = 31 - __clz(chunks);
    for (int i = lane; i < blocks << shift; i += 32) {
      const int block = i >> shift, chunk = i & (chunks - 1);
      copy_async(ring(slot) + block / kBlocks * args.memory.warp_stage + offset +
                     (block % kBlocks * chunks + chunk) * layout::kVectorBytes,
                 from + block * block_bytes + chunk * layout::kVectorBytes);
    }
  }

  __device__ __forceinline__ bool has_half() const { return part >= kEngineWarps - 2; }

  __device__ __forceinline__ void copy_activations(int slot, uint32_t barrier) {
    if (!has_half()) return;
    const int half = part - (kEngineWarps - 2);
    copy_box(shared_base + slot * kActivationStage + half * (kActivationStage / 2), &args.x_map,
             step * kStepK + half * (kStepK / 2), row0, barrier);
  }

  __device__ __forceinline__ void advance() {
    codes += args.code_step_bytes;
    scales += args.scale_step_bytes;
    zeros += args.zero_step_bytes;
    if (++group == args.warps_k) {
      group = 0;
      if (++stage == args.stages) {
        stage = 0;
        phase ^= 1;
      }
    }
    if (++step == end) enter_tile(tile + 1);
  }

  // Copies codes, activations or both of the next step, and moves on.
  __device__ __forceinline__ void copy_step(bool with_codes, bool with_activations) {
    const int slot = group * args.stages + stage;
    const uint32_t full = barriers.full + slot * 8;
    if (with_codes) {
      barrier_wait(barriers.free + slot * 8, phase);
      barrier_expect(full, bytes);
      copy_codes(slot, full);
    }
    if (with_activations) copy_activations(slot, full);
    advance();
  }

  // By a whole warp.
  __device__ __forceinline__ void run_small() {
    constexpr int kCodes = kBlocks * kCodeBytes;
    for (start(); has_next(); advance()) {
      const int slot = group * args.stages + stage;
      barrier_wait(barriers.free + slot * 8, phase);
      copy_small(slot, scales, args.scale_block_bytes, args.scale_chunks, kCodes);
      if (args.zero_chunks > 0) {
        copy_small(slot, zeros, args.zero_block_bytes, args.zero_chunks,
                   kCodes + kBlocks * args.scale_chunks * layout::kVectorBytes);
      }
      barrier_arrive_after_copies(barriers.full + slot * 8);
    }
  }

  // By one thread. Codes depend on no kernel, so they come first where this one may have been
  // started before the one that writes x has ended.
  __device__ __forceinline__ void run_engine() {
    start();
    if (args.dependent) {
      const int slots = args.warps_k * args.stages;
      for (int i = 0; i < slots && has_next(); ++i) copy_step(true, false);
      wait_for_previous_kernel();
      start();
      for (int i = 0; i < slots && has_next(); ++i) copy_step(false, true);
    }
    while (has_next()) copy_step(true, true);
  }

  __device__ __forceinline__ void run() {
    if (part < 0) {
      run_small();
    } else if (lane == 0) {
      run_engine();
    }
  }
};

}  // namespace qlinear::cuda
