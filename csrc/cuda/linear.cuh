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
#include "cuda/step.cuh"

namespace qlinear::cuda {

template <typename Dtype, int kBits, int kTokenBlocks, bool kFineGroups>
struct LinearKernel {
  using Ring = Producer<Dtype, kBits, kTokenBlocks>;
  static constexpr int kTileRows = Ring::kTileRows;
  static constexpr int kBlocks = Ring::kBlocks;  // n-blocks of this warp
  static constexpr int kColumns = kBlocks * layout::kTileN;
  using Step = cuda::Step<Dtype, kBits, kTokenBlocks, kBlocks, kFineGroups, false>;

  const LinearArgs& args;
  unsigned char* const shared;
  const uint32_t shared_base;
  const int lane, warp_n, group;      // warp's place along n, and its group along k
  const uint32_t activations, codes;  // the rings this warp reads, stage 0
  const Stripe stripe;
  Step step;
  const typename Step::Place lane_offsets;
  int stage = 0;  // to be read next
  typename Step::Totals totals;

  __device__ __forceinline__ LinearKernel(const LinearArgs& a, unsigned char* dynamic_shared)
      : args(a),
        shared(dynamic_shared),
        shared_base(shared_address(dynamic_shared)),
        lane(threadIdx.x % 32),
        warp_n(uniform_warp() % a.warps_n),
        group(uniform_warp() / a.warps_n),
        activations(shared_base + group * a.stages * Ring::kActivationStage),
        codes(shared_base + a.memory.weights +
              (group * a.stages * a.warps_n + warp_n) * a.memory.warp_stage),
        stripe(a, blockIdx.x),
        step(a.step, threadIdx.x % 32),
        lane_offsets(step.lane_offsets(0)) {}

  // Of the warps that share a step's activations. Where these are several, all groups meet: named
  // barriers, one for each group, were up to 5 % faster, but nothing can check them for races.
  __device__ __forceinline__ void group_barrier() {
    if (args.warps_n == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // Where the bytes of this stage lie.
  __device__ __forceinline__ typename Step::Place place() const {
    const uint32_t codes_at = codes + stage * (args.warps_n * args.memory.warp_stage);
    const uint32_t scales_at = codes_at + partition::code_bytes(kColumns, kBits);
    const uint32_t zeros_at = scales_at + kBlocks * args.scale_chunks * layout::kVectorBytes;
    return {activations + stage * Ring::kActivationStage, codes_at + lane_offsets.codes,
            scales_at + lane_offsets.scales, zeros_at + lane_offsets.zeros};
  }

  // Writes this warp's totals where the thread block adds them up.
  __device__ __forceinline__ void store_totals() {
    float* to = reinterpret_cast<float*>(shared + args.memory.partials) +
                group * kTileRows * args.memory.partial_row + warp_n * kColumns + lane / 4;
#pragma unroll
    for (int token = 0; token < kTokenBlocks; ++token) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4;
             ++i) {  // sums of a lane: rows g, g, g + 8, g + 8 of W; x rows 2t + i
          const int x_row = token * kTokens + lane % 4 * 2 + i % 2;
          to[x_row * args.memory.partial_row + block * layout::kTileN + i / 2 * 8] =
              totals[block][token][i] * Step::unit(i);
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

  __device__ __forceinline__ int threads() const { return args.warps_n * args.warps_k * 32; }

  // Adds the groups up, and stores results or, where others hold the rest of the tile, a share.
  __device__ __forceinline__ void finish_tile(int tile) {
    const bool began = stripe.begin_of(tile) == 0;
    const bool whole = began && stripe.end_of(tile, args.tile_steps) == args.tile_steps;
    const TilePlace place(args, tile);
    const int row0 = place.m_tile * kTileRows, rows = min(args.m - row0, kTileRows);
    const int n0 = place.n_tile * args.warps_n * kColumns;
    const int row_shift = (kBlocks == 2 ? 3 : 2) +
                          args.warps_n_log2;  // a row of the tile is so many float4, as a power
    const int columns_mask = (1 << row_shift) - 1;

    store_totals();
    __syncthreads();
    float* slot = slot_of(blockIdx.x, began);
    for (int i = threadIdx.x; i < rows << row_shift; i += threads()) {
      const int row = i >> row_shift, column = (i & columns_mask) * 4;
      const float4 sum = add_groups(row, column);
      if (whole) {
        store_results(args.output, row0 + row, n0 + column, sum);
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
        for (int i = threadIdx.x; i < rows << row_shift; i += threads()) {
          float4 sum = load_share(from, first_began, i);
          for (int cta = from + 1; cta <= to; ++cta) add(sum, load_share(cta, false, i));
          store_results(args.output, row0 + (i >> row_shift), n0 + (i & columns_mask) * 4, sum);
        }
      }
    }
    __syncthreads();  // the partials' memory is free for the next tile
  }

  __device__ __forceinline__ float* slot_of(int cta, bool began_tile) const {
    return args.slots +
           partition::partial_slot(cta, began_tile) * (kTileRows * kColumns) * args.warps_n;
  }
  __device__ __forceinline__ float4 load_share(int cta, bool began_tile, int index) const {
    return __ldcg(reinterpret_cast<const float4*>(slot_of(cta, began_tile)) + index);
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
    Ring ring(args, lane, warp_n, group, activations, codes);
    ring.fill(lane, warp_n);
    release_next_kernel();
    int ahead = group;  // steps are dealt to the groups in turn, through tiles
    for (int tile = stripe.first_tile; tile <= stripe.last_tile; ++tile) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) Step::clear(totals[j]);
      const int begin = stripe.begin_of(tile), end = stripe.end_of(tile, args.tile_steps);
      // Where groups meet all take as many turns, the last of which is not every group's.
      const int stop = args.warps_n == 1 ? end : end + ahead;
      int next = begin + ahead;
      for (; next < stop; next += args.warps_k) {
        wait_for_oldest(args.stages);
        group_barrier();
        if (next >= end) break;
        ring.fetch(lane, warp_n);
        step.run(totals, place());
        stage = stage + 1 == args.stages ? 0 : stage + 1;
      }
      ahead = next - end;
      finish_tile(tile);
    }
  }
};

template <typename Dtype, int kBits, int kTokenBlocks, bool kFineGroups>
__global__ void __launch_bounds__(partition::max_threads(kTokenBlocks), 1)
    linear_alone(const __grid_constant__ LinearArgs args) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  LinearKernel<Dtype, kBits, kTokenBlocks, kFineGroups>(args, dynamic_shared).run();
}

}  // namespace qlinear::cuda
