// Copying by the warps that multiply: every lane copies the codes that it will use itself with
// cp.async, and its share of the rows of x. For every GPU from sm_80 on, and for any x. Everything
// that does not change from step to step is worked out when a tile is entered.
#pragma once

#include "cuda/stripe.cuh"

namespace qlinear::cuda {

template <typename Dtype, int kBits, int kTokenBlocks>
struct Producer {
  static constexpr int kTileRows = kTokenBlocks * kTokens;
  static constexpr int kBlocks = partition::blocks_per_warp(kTokenBlocks);
  static constexpr int kActivationStage = kTileRows * 2 * partition::kHalfRowBytes;
  static constexpr int kBlockVectors = kStepK / layout::kTileK * kBits / 4;  // per lane and step
  static constexpr int kVectorStride = 32 * layout::kVectorBytes;

  const LinearArgs& args;
  const Stripe stripe;
  const int group;             // of warps, along k
  const uint32_t codes_to;     // this lane's first vector in the warp's ring, stage 0
  uint32_t activations_to;     // this thread's first chunk in the group's ring, stage 0
  const int row_step;          // rows of x between two chunks of a thread
  const int first_row, chunk;  // the thread's first row in a tile, and its place in each row
  int tile, step, end;         // what comes next
  int stage = 0;               // and where it goes
  const unsigned char* codes_from;
  const unsigned char* scales_from;
  const unsigned char* zeros_from = nullptr;
  const unsigned char* x_from;
  int x_row0;  // first row of this tile
  int x_rows;  // rows of this tile from the thread's first one on

  __device__ __forceinline__ Producer(const LinearArgs& a, int lane, int warp_n, int warp_group,
                                      uint32_t activations, uint32_t codes)
      : args(a),
        stripe(a, blockIdx.x),
        group(warp_group),
        codes_to(codes + lane * layout::kVectorBytes),
        row_step(a.warps_n * 32 / partition::kRowChunks),
        first_row((warp_n * 32 + lane) / partition::kRowChunks),
        chunk(lane % partition::kRowChunks) {
    activations_to = activations + partition::activation_offset(first_row, chunk, kTileRows);
  }

  __device__ __forceinline__ bool has_next() const { return tile <= stripe.last_tile; }

  __device__ __forceinline__ void aim(int lane, int warp_n) {
    const TilePlace place(args, tile);
    // Warps beyond the last feature repeat the last ones unseen.
    const int64_t block =
        min((place.n_tile * args.warps_n + warp_n) * kBlocks, args.n_blocks - kBlocks);
    codes_from = args.qweight + block * args.code_block_bytes +
                 static_cast<int64_t>(step) * args.code_step_bytes + lane * layout::kVectorBytes;
    // Lanes of the first part copy for the first n-block, the next part for the second.
    const int second = lane >= args.scale_chunks ? 1 : 0;
    scales_from = args.scales + (block + second) * args.scale_block_bytes +
                  static_cast<int64_t>(step) * args.scale_step_bytes +
                  (lane - second * args.scale_chunks) * layout::kVectorBytes;
    if (args.zeros != nullptr) {
      const int next = lane >= args.zero_chunks ? 1 : 0;
      zeros_from = args.zeros + (block + next) * args.zero_block_bytes +
                   static_cast<int64_t>(step) * args.zero_step_bytes +
                   (lane - next * args.zero_chunks) * layout::kVectorBytes;
    }
    x_row0 = place.m_tile * kTileRows;
    const int row = x_row0 + first_row;
    const int column = step * kStepK + chunk * 8;
    x_rows = min(args.m - x_row0, kTileRows) - first_row;
    x_from = args.x + row * args.x_row_bytes + static_cast<int64_t>(column) * args.x_item_bytes;
  }

  // Starts copying the weights of the next step.
  __device__ __forceinline__ void fetch_weights(int lane) {
    const uint32_t to = codes_to + stage * (args.warps_n * args.memory.warp_stage);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const unsigned char* from = codes_from + block * args.code_block_bytes;
#pragma unroll
      for (int vector = 0; vector < kBlockVectors; ++vector) {
        copy_async(to + (block * kBlockVectors + vector) * kVectorStride,
                   from + vector * kVectorStride);
      }
    }
    constexpr int kCodes = kBlocks * kBlockVectors * kVectorStride;
    copy_async_if(lane < kBlocks * args.scale_chunks, to + kCodes, scales_from);
    copy_async_if(lane < kBlocks * args.zero_chunks,
                  to + kCodes + kBlocks * args.scale_chunks * layout::kVectorBytes, zeros_from);
  }

  // Where a row lies that is `ahead` rows, a multiple of the step, after the thread's first one.
  // Such a sum of row numbers is an exclusive or in its low bits, so it is one in the swizzle.
  __device__ __forceinline__ uint32_t activation_row(int ahead) const {
    const uint32_t to = activations_to + stage * kActivationStage;
    return (to ^ (static_cast<uint32_t>(ahead) % 8 * layout::kVectorBytes)) +
           ahead * partition::kHalfRowBytes;
  }

  // Starts copying this thread's share of the group's rows of x.
  __device__ __forceinline__ void fetch_activations() {
    if (!args.x_async) {
      convert_activations();
    } else if (args.k - step * kStepK < kStepK) {
      fetch_last_activations();
    } else {
      const unsigned char* from = x_from;
      constexpr int kTogether = kTokenBlocks == 1 ? 4 : 2;
      for (int row = 0; row < x_rows; row += kTogether * row_step) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int ahead = row + i * row_step;
          copy_async_if(ahead < x_rows, activation_row(ahead), from);
          from += args.x_advance_bytes;
        }
      }
    }
  }

  // The same for the step in which k ends: what lies beyond it must be zero, not anything.
  __device__ __forceinline__ void fetch_last_activations() {
    const int columns = max(0, min(args.k - (step * kStepK + chunk * 8), 8));
    for (int row = 0; row < x_rows; row += row_step) {
      const unsigned char* from = columns > 0 ? x_from + row * args.x_row_bytes : args.x;
      copy_async_part(activation_row(row), from, columns * 2);
    }
  }

  __device__ __forceinline__ void convert_activations() {
    const int columns = max(0, min(args.k - (step * kStepK + chunk * 8), 8));
    for (int row = 0; row < x_rows; row += row_step) {
      store_shared_16(activation_row(row), load_converted<Dtype>(x_from + row * args.x_row_bytes,
                                                                 columns, args.x_dtype));
    }
  }

  __device__ __forceinline__ void advance(int lane, int warp_n) {
    step += args.warps_k;
    stage = stage + 1 == args.stages ? 0 : stage + 1;
    if (step >= end) {
      enter_tile(tile + 1, step - end, lane, warp_n);
      return;
    }
    codes_from += args.code_advance;
    scales_from += args.scale_advance;
    zeros_from += args.zero_advance;
    x_from += args.warps_k * (kStepK * args.x_item_bytes);
  }

  // Aims at the group's first step in this tile, or in the first one after it that holds any. Steps
  // are dealt to the groups in turn, through tiles; `ahead` is how far off the group's turn is.
  __device__ __forceinline__ void enter_tile(int from_tile, int ahead, int lane, int warp_n) {
    for (tile = from_tile; tile <= stripe.last_tile; ++tile) {
      step = stripe.begin_of(tile) + ahead;
      end = stripe.end_of(tile, args.tile_steps);
      if (step < end) {
        aim(lane, warp_n);
        return;
      }
      ahead = step - end;
    }
  }

  __device__ __forceinline__ void fetch(int lane, int warp_n) {
    if (has_next()) {
      fetch_weights(lane);
      fetch_activations();
      advance(lane, warp_n);
    }
    copy_commit();  // also where nothing was copied: waiting counts commits
  }

  __device__ __forceinline__ void rewind(int lane, int warp_n) {
    stage = 0;
    enter_tile(stripe.first_tile, group, lane, warp_n);
  }

  // Fills the ring but for one stage. Weights depend on no kernel, so they come first where this
  // one may have been started before the one that writes x has ended.
  __device__ __forceinline__ void fill(int lane, int warp_n) {
    rewind(lane, warp_n);
    if (args.dependent) {
      for (int i = 0; i + 1 < args.stages && has_next(); ++i) {
        fetch_weights(lane);
        advance(lane, warp_n);
      }
      wait_for_previous_kernel();
      rewind(lane, warp_n);
    }
    for (int i = 0; i + 1 < args.stages; ++i) {
      if (has_next()) {
        if (!args.dependent) fetch_weights(lane);
        fetch_activations();
        advance(lane, warp_n);
      }
      copy_commit();
    }
  }
};

}  // namespace qlinear::cuda
