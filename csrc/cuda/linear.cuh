// The kernel: y = x * W^T with 4- or 8-bit weights that stay packed until they are in registers.
//
// Weights are the left operand (16 output features by 16 k), rows of x the right one (8 columns),
// so one instruction uses 256 weights however few rows there are, and both scales a lane needs
// belong to its two rows. A thread block's warps stand in warps_k groups of warps_n: a group takes
// every warps_k-th step of a tile and shares that step's activations; its warps hold 32 features
// each.
//
//   ring     every lane copies exactly the codes that it will use itself: no barrier for them.
//            Activations, scales and zero points need one among the warps of a group per step.
//   compute  codes -> code - zero point, exact in 16 bits -> tensor cores, fp32 sums. At the end of
//            each scale group: total += scale * sum, in fp32.
//   tile end the groups' totals meet in shared memory and are added in order of the group. What is
//            not the whole tile goes to the block's slot; the last block to arrive adds the slots
//            in order of the stripes. Nobody waits for another block.
//
// How the work is cut: partition.h. Rings keep running across tiles.
#pragma once

#include "cuda/producer.cuh"

namespace qlinear::cuda {

template <typename Dtype, int kBits, int kTokenBlocks, bool kFineGroups>
struct LinearKernel {
  using Format = Codes<Dtype, kBits>;
  using Ring = Producer<Dtype, kBits, kTokenBlocks>;
  static constexpr int kStepTiles = kStepK / layout::kTileK;
  static constexpr int kVectors = kBits / 4;  // of 16 bytes per lane and layout tile
  static constexpr int kTileRows = Ring::kTileRows;

  const LinearArgs& args;
  unsigned char* const shared;
  const uint32_t shared_base;
  const int lane, warp_n, group;      // warp's place along n, and its group along k
  const uint32_t activations, codes;  // the rings this warp reads, stage 0
  Ring ring;
  int stage = 0;  // to be read next
  typename Format::Zeros zeros[kBlocksPerWarp];
  uint32_t b_operands[4];
  float totals[kBlocksPerWarp][kTokenBlocks][4];

  __device__ __forceinline__ LinearKernel(const LinearArgs& a, unsigned char* dynamic_shared)
      : args(a),
        shared(dynamic_shared),
        shared_base(shared_address(dynamic_shared)),
        lane(threadIdx.x % 32),
        warp_n(threadIdx.x / 32 % a.warps_n),
        group(threadIdx.x / 32 / a.warps_n),
        activations(shared_base + group * a.stages * Ring::kActivationStage),
        codes(shared_base + a.memory.weights +
              (group * a.warps_n + warp_n) * a.stages * a.memory.warp_stage),
        ring(a, lane, warp_n, group, activations, codes) {}

  __device__ __forceinline__ int groups_per_step() const {
    return kFineGroups ? 128 / args.group_size : 1;
  }

  __device__ __forceinline__ void group_barrier() {
    if (args.warps_n == 1) {
      __syncwarp();
    } else {
      named_barrier(group + 1, args.warps_n * 32);
    }
  }

  __device__ __forceinline__ void load_zeros(uint32_t at, int group_in_step) {
#pragma unroll
    for (int block = 0; block < kBlocksPerWarp; ++block) {
      const uint32_t pair = load_shared_2(
          at + (block * groups_per_step() + group_in_step) * layout::kTileN + lane / 4 * 2);
      zeros[block] = Format::zeros(pair & 0xff, pair >> 8);
    }
  }

  // Scales of rows g and g + 8 of both n-blocks, as they lie in memory.
  struct RawScales {
    uint32_t low[kBlocksPerWarp], high[kBlocksPerWarp];
  };

  __device__ __forceinline__ RawScales load_scales(uint32_t at, int group_in_step) const {
    RawScales raw;
#pragma unroll
    for (int block = 0; block < kBlocksPerWarp; ++block) {
      const int pair = (block * groups_per_step() + group_in_step) * layout::kTileN + lane / 4 * 2;
      const uint32_t from = at + pair * args.scale_item_bytes;
      raw.low[block] = load_shared_4(from);
      raw.high[block] = args.scale_item_bytes == 4 ? load_shared_4(from + 4) : 0;
    }
    return raw;
  }

  // total += scale * sum for both n-blocks.
  __device__ __forceinline__ void apply_scales(const float (&sums)[kBlocksPerWarp][kTokenBlocks][4],
                                               const RawScales& raw) {
#pragma unroll
    for (int block = 0; block < kBlocksPerWarp; ++block) {
      const float2 scale = scales_of(raw.low[block], raw.high[block], args.scale_dtype);
#pragma unroll
      for (int token = 0; token < kTokenBlocks; ++token) {
        totals[block][token][0] += scale.x * sums[block][token][0];
        totals[block][token][1] += scale.x * sums[block][token][1];
        totals[block][token][2] += scale.y * sums[block][token][2];
        totals[block][token][3] += scale.y * sums[block][token][3];
      }
    }
  }

  // What of the activations one load_matrices brings: k 0-7 and 8-15 of two blocks of rows, or,
  // where there is but one block, of two sixteenths of k. The address this lane gives for the
  // first; others differ in bits that the swizzle leaves to an exclusive or.
  __device__ __forceinline__ int matrix_row() const {
    return kTokenBlocks == 1 ? partition::activation_offset(lane % 8, lane / 8)
                             : partition::activation_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }

  // sums += weights of 16 k, the `k16`-th of the step, times all rows of x.
  __device__ __forceinline__ void multiply(float (&sums)[kBlocksPerWarp][kTokenBlocks][4],
                                           const uint32_t (&a)[kBlocksPerWarp][4], uint32_t row,
                                           int k16) {
    if constexpr (kTokenBlocks == 1) {
      if (k16 % 2 == 0) load_matrices(b_operands, row ^ (k16 / 2 * 64));
#pragma unroll
      for (int block = 0; block < kBlocksPerWarp; ++block) {
        multiply_accumulate<Dtype>(sums[block][0], a[block], b_operands[k16 % 2 * 2],
                                   b_operands[k16 % 2 * 2 + 1]);
      }
    } else {
#pragma unroll
      for (int token = 0; token < kTokenBlocks; token += 2) {
        load_matrices(b_operands, (row + token * kTokens * partition::kRowBytes) ^ (k16 * 32));
#pragma unroll
        for (int block = 0; block < kBlocksPerWarp; ++block) {
          multiply_accumulate<Dtype>(sums[block][token], a[block], b_operands[0], b_operands[1]);
          multiply_accumulate<Dtype>(sums[block][token + 1], a[block], b_operands[2],
                                     b_operands[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void compute_step() {
    const uint32_t step_codes = codes + stage * args.memory.warp_stage;
    const uint32_t scales_at = step_codes + partition::code_bytes(kBits);
    const uint32_t zeros_at = scales_at + kBlocksPerWarp * args.scale_chunks * layout::kVectorBytes;
    const uint32_t row = activations + stage * Ring::kActivationStage + matrix_row();
    stage = stage + 1 == args.stages ? 0 : stage + 1;
    const bool zeros_vary = args.zeros != nullptr;
    RawScales raw;
    if (!kFineGroups) {
      if (zeros_vary) load_zeros(zeros_at, 0);
      raw = load_scales(scales_at, 0);
    }

    float sums[kBlocksPerWarp][kTokenBlocks][4];
#pragma unroll
    for (int tile = 0; tile < kStepTiles; ++tile) {
      uint32_t words[kBlocksPerWarp][kVectors * 4];
#pragma unroll
      for (int block = 0; block < kBlocksPerWarp; ++block) {
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector) {
          const uint4 loaded = load_shared_16(
              step_codes + ((block * kStepTiles + tile) * kVectors + vector) * 512 + lane * 16);
          words[block][4 * vector] = loaded.x;
          words[block][4 * vector + 1] = loaded.y;
          words[block][4 * vector + 2] = loaded.z;
          words[block][4 * vector + 3] = loaded.w;
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // 32 of the tile's 64 k
        const int quarter = 2 * tile + half;
        const int fine_group = kFineGroups && args.group_size == 64 ? quarter / 2 : quarter;
        if (kFineGroups) {
          if (zeros_vary) load_zeros(zeros_at, fine_group);
          raw = load_scales(scales_at, fine_group);
        }
        if (kFineGroups || quarter == 0) clear(sums);
#pragma unroll
        for (int k16 = 0; k16 < 2; ++k16) {
          uint32_t a[kBlocksPerWarp][4];
#pragma unroll
          for (int block = 0; block < kBlocksPerWarp; ++block) {
            Format::operand(a[block], &words[block][(2 * half + k16) * Format::kWords],
                            zeros[block]);
          }
          multiply(sums, a, row, 2 * quarter + k16);
        }
        if (kFineGroups) apply_scales(sums, raw);
      }
    }
    if (!kFineGroups) apply_scales(sums, raw);
  }

  template <int kCount>
  __device__ __forceinline__ static void clear(float (&sums)[kCount][kTokenBlocks][4]) {
#pragma unroll
    for (int block = 0; block < kCount; ++block) {
#pragma unroll
      for (int token = 0; token < kTokenBlocks; ++token) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[block][token][i] = 0.0f;
      }
    }
  }

  // Writes this warp's totals where the thread block adds them up.
  __device__ __forceinline__ void store_totals() {
    float* to = reinterpret_cast<float*>(shared + args.memory.partials) +
                group * kTileRows * args.memory.partial_row + warp_n * kWarpN + lane / 4;
#pragma unroll
    for (int token = 0; token < kTokenBlocks; ++token) {
#pragma unroll
      for (int block = 0; block < kBlocksPerWarp; ++block) {
#pragma unroll
        for (int i = 0; i < 4;
             ++i) {  // sums of a lane: rows g, g, g + 8, g + 8 of W; x rows 2t + i
          const int x_row = token * kTokens + lane % 4 * 2 + i % 2;
          to[x_row * args.memory.partial_row + block * layout::kTileN + i / 2 * 8] =
              totals[block][token][i];
        }
      }
    }
  }

  __device__ __forceinline__ float4 add_groups(int row, int column) const {
    const float* from = reinterpret_cast<const float*>(shared + args.memory.partials) +
                        row * args.memory.partial_row + column;
    float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll 4
    for (int other = 1; other < args.warps_k; ++other) {
      add(sum,
          *reinterpret_cast<const float4*>(from + other * kTileRows * args.memory.partial_row));
    }
    return sum;
  }

  // Adds the groups up, and stores results or, where others hold the rest of the tile, a share.
  __device__ __forceinline__ void finish_tile(int tile) {
    const bool began = ring.stripe.begin_of(tile) == 0;
    const bool whole = began && ring.stripe.end_of(tile, args.tile_steps) == args.tile_steps;
    const TilePlace place(args, tile);
    const int row0 = place.m_tile * kTileRows, rows = min(args.m - row0, kTileRows);
    const int n0 = place.n_tile * args.warps_n * kWarpN;
    const int row_shift = 3 + args.warps_n_log2;  // a row of the tile is so many float4, as a power
    const int columns_mask = (1 << row_shift) - 1;

    store_totals();
    __syncthreads();
    float* slot = slot_of(blockIdx.x, began);
    for (int i = threadIdx.x; i < rows << row_shift; i += blockDim.x) {
      const int row = i >> row_shift, column = (i & columns_mask) * 4;
      const float4 sum = add_groups(row, column);
      if (whole) {
        store_results(args, row0 + row, n0 + column, sum);
      } else {
        __stcg(reinterpret_cast<float4*>(slot) + i, sum);
      }
    }
    if (!whole) {
      const int64_t begin = static_cast<int64_t>(tile) * args.tile_steps;
      const int from = args.stripes.owner(begin);
      const int to = args.stripes.owner(begin + args.tile_steps - 1);
      if (is_last_to_arrive(tile, to - from)) {
        const bool first_began = args.stripes.begin(from) <= begin;
        for (int i = threadIdx.x; i < rows << row_shift; i += blockDim.x) {
          float4 sum = load_share(from, first_began, i);
          for (int cta = from + 1; cta <= to; ++cta) add(sum, load_share(cta, false, i));
          store_results(args, row0 + (i >> row_shift), n0 + (i & columns_mask) * 4, sum);
        }
      }
    }
    __syncthreads();  // the partials' memory is free for the next tile
  }

  __device__ __forceinline__ float* slot_of(int cta, bool began_tile) const {
    return args.slots +
           partition::partial_slot(cta, began_tile) * (kTileRows * kWarpN) * args.warps_n;
  }
  __device__ __forceinline__ float4 load_share(int cta, bool began_tile, int index) const {
    return __ldcg(reinterpret_cast<const float4*>(slot_of(cta, began_tile)) + index);
  }
  static __device__ __forceinline__ void add(float4& sum, float4 part) {
    sum.x += part.x;
    sum.y += part.y;
    sum.z += part.z;
    sum.w += part.w;
  }

  // True in the block that arrives last at a shared tile: all shares can be read then.
  __device__ __forceinline__ bool is_last_to_arrive(int tile, int others) {
    int* flag = reinterpret_cast<int*>(shared + args.memory.flag);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      const bool is_last = atomicAdd(args.counters + tile, 1) == others;
      if (is_last) args.counters[tile] = 0;  // for the next launch
      *flag = is_last;
      __threadfence();
    }
    __syncthreads();
    return *flag != 0;
  }

  __device__ __forceinline__ void run() {
    if (args.zeros == nullptr) {
#pragma unroll
      for (int block = 0; block < kBlocksPerWarp; ++block) {
        zeros[block] = Format::zeros(args.symmetric_zero, args.symmetric_zero);
      }
    }
    ring.fill(lane, warp_n);
    release_next_kernel();
    for (int tile = ring.stripe.first_tile; tile <= ring.stripe.last_tile; ++tile) {
      clear(totals);
      const int end = ring.stripe.end_of(tile, args.tile_steps);
      for (int step = ring.stripe.begin_of(tile) + group; step < end; step += args.warps_k) {
        wait_for_oldest(args.stages);
        group_barrier();
        ring.fetch(lane, warp_n);
        compute_step();
      }
      finish_tile(tile);
    }
  }
};

template <typename Dtype, int kBits, int kTokenBlocks, bool kFineGroups>
__global__ void __launch_bounds__(partition::max_threads(kTokenBlocks), 1)
    linear(const __grid_constant__ LinearArgs args) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  LinearKernel<Dtype, kBits, kTokenBlocks, kFineGroups>(args, dynamic_shared).run();
}

}  // namespace qlinear::cuda
