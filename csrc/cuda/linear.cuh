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

#include "cuda/fragments.cuh"
#include "cuda/linear_args.h"
#include "cuda/values.cuh"

namespace qlinear::cuda {

using partition::kBlocksPerWarp;
using partition::kStepK;
using partition::kTokens;
using partition::kWarpN;

// A thread block's stripe as tiles: from a step of the first tile to before a step of the last one.
struct Stripe {
  int first_tile, first_step, last_tile, last_end;

  __device__ __forceinline__ Stripe(const LinearArgs& args, int cta) {
    const int64_t first = args.stripes.begin(cta), last = args.stripes.begin(cta + 1);
    first_tile = static_cast<int>(first / args.tile_steps);
    first_step = static_cast<int>(first % args.tile_steps);
    last_tile = static_cast<int>((last - 1) / args.tile_steps);
    last_end = static_cast<int>((last - 1) % args.tile_steps) + 1;
  }
  __device__ __forceinline__ int begin_of(int tile) const {
    return tile == first_tile ? first_step : 0;
  }
  __device__ __forceinline__ int end_of(int tile, int tile_steps) const {
    return tile == last_tile ? last_end : tile_steps;
  }
};

template <typename Dtype, int kBits, int kTokenBlocks, bool kFineGroups>
struct LinearKernel {
  using Format = Codes<Dtype, kBits>;
  static constexpr int kTileCodeBytes = static_cast<int>(layout::tile_bytes(kBits));
  static constexpr int kStepTiles = kStepK / layout::kTileK;
  static constexpr int kVectors = kBits / 4;  // of 16 bytes per lane and layout tile
  static constexpr int kTileRows = kTokenBlocks * kTokens;
  static constexpr int kActivationStage = kTileRows * partition::kRowBytes;

  const LinearArgs& args;
  unsigned char* const shared;
  const int lane, warp_n, group;  // warp's place along n, and its group along k
  const Stripe stripe;

  // Producer: the step to be copied next, and where its bytes come from.
  int next_tile, next_step, next_end;
  const unsigned char* codes_from;
  const unsigned char* scales_from;
  const unsigned char* zeros_from = nullptr;
  int write_stage = 0;
  // Consumer.
  int read_stage = 0;
  typename Format::Zeros zeros[kBlocksPerWarp];
  float totals[kBlocksPerWarp][kTokenBlocks][4];

  __device__ __forceinline__ LinearKernel(const LinearArgs& a, unsigned char* dynamic_shared)
      : args(a),
        shared(dynamic_shared),
        lane(threadIdx.x % 32),
        warp_n(threadIdx.x / 32 % a.warps_n),
        group(threadIdx.x / 32 / a.warps_n),
        stripe(a, blockIdx.x) {}

  __device__ __forceinline__ int groups_per_step() const {
    return kFineGroups ? 128 / args.group_size : 1;
  }
  __device__ __forceinline__ uint32_t activations(int stage) const {
    return shared_address(shared) + (group * args.stages + stage) * kActivationStage;
  }
  __device__ __forceinline__ uint32_t weights(int stage) const {
    return shared_address(shared) + args.memory.weights +
           ((group * args.warps_n + warp_n) * args.stages + stage) * args.memory.warp_stage;
  }
  __device__ __forceinline__ int first_row(int tile) const {
    return tile % args.m_tiles * kTileRows;
  }
  __device__ __forceinline__ int rows_of(int tile) const {
    return min(args.m - first_row(tile), kTileRows);
  }
  // The warp's first n-block; warps beyond the last feature repeat the last ones unseen.
  __device__ __forceinline__ int n_block(int tile) const {
    const int block = (tile / args.m_tiles * args.warps_n + warp_n) * kBlocksPerWarp;
    return min(block, args.n_blocks - kBlocksPerWarp);
  }

  __device__ __forceinline__ void aim() {
    const int64_t block = n_block(next_tile);
    codes_from = args.qweight + block * args.code_block_bytes +
                 static_cast<int64_t>(next_step) * (kStepTiles * kTileCodeBytes) +
                 lane * layout::kVectorBytes;
    // Lanes of the first half copy for the first n-block where there are enough chunks for both.
    const int chunks = groups_per_step() * args.scale_item_bytes;
    const int64_t step = args.group_size == -1 ? 0 : next_step;
    scales_from = args.scales + (block + (lane >= chunks ? 1 : 0)) * args.scale_block_bytes +
                  (step * chunks + lane % chunks) * layout::kVectorBytes;
    if (args.zeros != nullptr) {
      const int zero_chunks = groups_per_step();
      zeros_from = args.zeros + (block + (lane >= zero_chunks ? 1 : 0)) * args.zero_block_bytes +
                   (step * zero_chunks + lane % zero_chunks) * layout::kVectorBytes;
    }
  }

  // Starts copying the weights of the producer's step into its stage.
  __device__ __forceinline__ void fetch_weights() {
    uint32_t to = weights(write_stage);
#pragma unroll
    for (int block = 0; block < kBlocksPerWarp; ++block) {
      const unsigned char* from = codes_from + block * args.code_block_bytes;
#pragma unroll
      for (int vector = 0; vector < kStepTiles * kVectors; ++vector) {
        copy_async(to + lane * layout::kVectorBytes, from);
        to += 32 * layout::kVectorBytes;
        from += 32 * layout::kVectorBytes;
      }
    }
    const int chunks = groups_per_step() * args.scale_item_bytes;
    if (lane < kBlocksPerWarp * chunks) copy_async(to + lane * layout::kVectorBytes, scales_from);
    if (args.zeros != nullptr) {
      to += kBlocksPerWarp * chunks * layout::kVectorBytes;
      if (lane < kBlocksPerWarp * groups_per_step()) {
        copy_async(to + lane * layout::kVectorBytes, zeros_from);
      }
    }
  }

  // Starts copying the rows of x of the producer's step, this thread's share of the group's.
  __device__ __forceinline__ void fetch_activations() {
    const uint32_t to = activations(write_stage);
    const int row0 = first_row(next_tile);
    const int rows = rows_of(next_tile);
    const int thread = warp_n * 32 + lane;
    const int chunk = thread % partition::kRowChunks;
    const int k0 = next_step * kStepK + chunk * 8;
    const int columns = max(0, min(args.k - k0, 8));
    const int row_step = args.warps_n * 32 / partition::kRowChunks;
    if (args.x_async) {
      const unsigned char* from = args.x +
                                  (row0 + thread / partition::kRowChunks) * args.x_row_bytes +
                                  (columns > 0 ? static_cast<int64_t>(k0) * 2 : 0);
      const int64_t advance = row_step * args.x_row_bytes;
      for (int row = thread / partition::kRowChunks; row < rows; row += row_step) {
        copy_async_part(to + partition::activation_offset(row, chunk), from, columns * 2);
        from += advance;
      }
    } else {
      for (int row = thread / partition::kRowChunks; row < rows; row += row_step) {
        const unsigned char* from = args.x + (row0 + row) * args.x_row_bytes;
        const uint4 values = load_converted<Dtype>(from, k0, columns, args.x_dtype);
        store_shared_16(to + partition::activation_offset(row, chunk), values);
      }
    }
  }

  __device__ __forceinline__ void advance() {
    next_step += args.warps_k;
    write_stage = write_stage + 1 == args.stages ? 0 : write_stage + 1;
    if (next_step >= next_end) {
      enter_tile(next_tile + 1);
      return;
    }
    codes_from += args.warps_k * (kStepTiles * kTileCodeBytes);
    if (args.group_size != -1) {
      const int groups = args.warps_k * groups_per_step();
      scales_from += groups * args.scale_item_bytes * layout::kVectorBytes;
      if (args.zeros != nullptr) zeros_from += groups * layout::kVectorBytes;
    }
  }

  // Aims at the group's first step in this tile, or in the first one after it that holds any.
  __device__ __forceinline__ void enter_tile(int tile) {
    for (next_tile = tile; next_tile <= stripe.last_tile; ++next_tile) {
      next_step = stripe.begin_of(next_tile) + group;
      next_end = stripe.end_of(next_tile, args.tile_steps);
      if (next_step < next_end) {
        aim();
        return;
      }
    }
  }

  __device__ __forceinline__ bool has_next() const { return next_tile <= stripe.last_tile; }

  __device__ __forceinline__ void fetch() {
    if (has_next()) {
      fetch_weights();
      fetch_activations();
      advance();
    }
    copy_commit();  // also where nothing was copied: waiting counts commits
  }

  __device__ __forceinline__ void rewind() {
    write_stage = 0;
    enter_tile(stripe.first_tile);
  }

  // Fills the ring but for one stage. Weights depend on no kernel, so they come first where this
  // one may have been started before the one that writes x has ended.
  __device__ __forceinline__ void fill() {
    rewind();
    if (!args.dependent) {
      for (int stage = 0; stage + 1 < args.stages; ++stage) fetch();
      return;
    }
    for (int stage = 0; stage + 1 < args.stages && has_next(); ++stage) {
      fetch_weights();
      advance();
    }
    wait_for_previous_kernel();
    rewind();
    for (int stage = 0; stage + 1 < args.stages; ++stage) {
      if (has_next()) {
        fetch_activations();
        advance();
      }
      copy_commit();
    }
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

  // total += scale * sum for both n-blocks.
  __device__ __forceinline__ void apply_scales(const float (&sums)[kBlocksPerWarp][kTokenBlocks][4],
                                               uint32_t at, int group_in_step) {
#pragma unroll
    for (int block = 0; block < kBlocksPerWarp; ++block) {
      const int pair = (block * groups_per_step() + group_in_step) * layout::kTileN + lane / 4 * 2;
      const float2 scale = load_shared_scales(at + pair * args.scale_item_bytes, args.scale_dtype);
#pragma unroll
      for (int token = 0; token < kTokenBlocks; ++token) {
        totals[block][token][0] += scale.x * sums[block][token][0];
        totals[block][token][1] += scale.x * sums[block][token][1];
        totals[block][token][2] += scale.y * sums[block][token][2];
        totals[block][token][3] += scale.y * sums[block][token][3];
      }
    }
  }

  __device__ __forceinline__ void compute_step() {
    const uint32_t x = activations(read_stage);
    const uint32_t codes = weights(read_stage);
    const uint32_t scales = codes + partition::code_bytes(kBits);
    const uint32_t zero_bytes = scales + kWarpN * groups_per_step() * args.scale_item_bytes;
    read_stage = read_stage + 1 == args.stages ? 0 : read_stage + 1;
    // Lane l reads row l % 8 of chunk l / 8 of each quarter; the quarter is an exclusive or.
    const uint32_t row = x + partition::activation_offset(lane % 8, lane / 8);
    const bool zeros_vary = args.zeros != nullptr;
    if (!kFineGroups && zeros_vary) load_zeros(zero_bytes, 0);

    float sums[kBlocksPerWarp][kTokenBlocks][4];
#pragma unroll
    for (int tile = 0; tile < kStepTiles; ++tile) {
      uint32_t words[kBlocksPerWarp][kVectors * 4];
#pragma unroll
      for (int block = 0; block < kBlocksPerWarp; ++block) {
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector) {
          const uint4 loaded = load_shared_16(
              codes + ((block * kStepTiles + tile) * kVectors + vector) * 512 + lane * 16);
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
        if (kFineGroups && zeros_vary) load_zeros(zero_bytes, fine_group);
        if (kFineGroups || quarter == 0) clear(sums);
        uint32_t a[2][kBlocksPerWarp][4];
#pragma unroll
        for (int k16 = 0; k16 < 2; ++k16) {
#pragma unroll
          for (int block = 0; block < kBlocksPerWarp; ++block) {
            Format::operand(a[k16][block], &words[block][(2 * half + k16) * Format::kWords],
                            zeros[block]);
          }
        }
#pragma unroll
        for (int token = 0; token < kTokenBlocks; ++token) {
          uint32_t b[4];
          load_matrices(b, (row + token * kTokens * partition::kRowBytes) ^ (quarter * 64));
#pragma unroll
          for (int block = 0; block < kBlocksPerWarp; ++block) {
            multiply_accumulate<Dtype>(sums[block][token], a[0][block], b[0], b[1]);
            multiply_accumulate<Dtype>(sums[block][token], a[1][block], b[2], b[3]);
          }
        }
        if (kFineGroups) apply_scales(sums, scales, fine_group);
      }
    }
    if (!kFineGroups) apply_scales(sums, scales, 0);
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
    for (int other = 1; other < args.warps_k; ++other) {
      from += kTokenBlocks * kTokens * args.memory.partial_row;
      add(sum, *reinterpret_cast<const float4*>(from));
    }
    return sum;
  }

  // Adds the groups up, and stores results or, where others hold the rest of the tile, a share.
  __device__ __forceinline__ void finish_tile(int tile) {
    const bool began = stripe.begin_of(tile) == 0;
    const bool whole = began && stripe.end_of(tile, args.tile_steps) == args.tile_steps;
    const int columns = args.warps_n * kWarpN;
    const int rows = rows_of(tile), row0 = first_row(tile);
    const int n0 = tile / args.m_tiles * columns;

    store_totals();
    __syncthreads();
    float* slot = slot_of(blockIdx.x, began);
    for (int i = threadIdx.x; i < rows * columns / 4; i += blockDim.x) {
      const int row = i / (columns / 4), column = i % (columns / 4) * 4;
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
        for (int i = threadIdx.x; i < rows * columns / 4; i += blockDim.x) {
          float4 sum = load_share(from, first_began, i);
          for (int cta = from + 1; cta <= to; ++cta) add(sum, load_share(cta, false, i));
          store_results(args, row0 + i / (columns / 4), n0 + i % (columns / 4) * 4, sum);
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
    fill();
    release_next_kernel();
    for (int tile = stripe.first_tile; tile <= stripe.last_tile; ++tile) {
      clear(totals);
      const int end = stripe.end_of(tile, args.tile_steps);
      for (int step = stripe.begin_of(tile) + group; step < end; step += args.warps_k) {
        copy_wait(args.stages - 2);
        group_barrier();
        fetch();
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
