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

#include "cuda/copy_warp.cuh"
#include "cuda/producer.cuh"
#include "cuda/wgmma.cuh"

namespace qlinear::cuda {

template <typename Dtype, int kBits, int kTokenBlocks, bool kFineGroups, Form kForm>
struct LinearKernel {
  using Format = Codes<Dtype, kBits>;
  using Ring = Producer<Dtype, kBits, kTokenBlocks>;
  static constexpr int kStepTiles = kStepK / layout::kTileK;
  static constexpr int kVectors = kBits / 4;  // of 16 bytes per lane and layout tile
  static constexpr int kTileRows = Ring::kTileRows;
  static constexpr int kBlocks = Ring::kBlocks;  // n-blocks of this warp
  static constexpr int kColumns = kBlocks * layout::kTileN;
  static constexpr int kStepK16 = kStepK / 16;
  static constexpr int kGroupK16 = kFineGroups ? 2 : kStepK16;  // products between two scalings
  static constexpr bool kWarpgroups = kForm == Form::kFedWarpgroups;
  using Sums = float[kBlocks][kTokenBlocks][4];

  const LinearArgs& args;
  unsigned char* const shared;
  const uint32_t shared_base;
  const int lane, warp_n, group;      // warp's place along n, and its group along k
  const uint32_t activations, codes;  // the rings this warp reads, stage 0
  const Stripe stripe;
  int stage = 0;  // to be read next
  typename Format::Zeros zeros[kBlocks];
  uint32_t b_operands[4];
  Sums totals;

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
        stripe(a, blockIdx.x) {}

  // The number of this warp; the compiler sees that it is the same for all lanes.
  static __device__ __forceinline__ int uniform_warp() {
    return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  }

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
    for (int block = 0; block < kBlocks; ++block) {
      const uint32_t pair = load_shared_2(
          at + (block * groups_per_step() + group_in_step) * layout::kTileN + lane / 4 * 2);
      zeros[block] = Format::zeros(pair & 0xff, pair >> 8);
    }
  }

  // Scales of rows g and g + 8 of both n-blocks, as they lie in memory.
  struct RawScales {
    uint32_t low[kBlocks], high[kBlocks];
  };

  __device__ __forceinline__ RawScales load_scales(uint32_t at, int group_in_step) const {
    RawScales raw;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int pair = (block * groups_per_step() + group_in_step) * layout::kTileN + lane / 4 * 2;
      const uint32_t from = at + pair * args.scale_item_bytes;
      raw.low[block] = load_shared_4(from);
      raw.high[block] = args.scale_item_bytes == 4 ? load_shared_4(from + 4) : 0;
    }
    return raw;
  }

  // total += scale * sum for one n-block.
  __device__ __forceinline__ void apply_scales(int block, const Sums& sums, uint32_t low,
                                               uint32_t high) {
    const float2 scale = scales_of(low, high, args.scale_dtype);
#pragma unroll
    for (int token = 0; token < kTokenBlocks; ++token) {
      totals[block][token][0] += scale.x * sums[block][token][0];
      totals[block][token][1] += scale.x * sums[block][token][1];
      totals[block][token][2] += scale.y * sums[block][token][2];
      totals[block][token][3] += scale.y * sums[block][token][3];
    }
  }

  // What of the activations one load_matrices brings: k 0-7 and 8-15 of two blocks of rows, or,
  // where there is but one block, of two sixteenths of k. The address that this lane gives for the
  // first; others differ in bits that the swizzle leaves to an exclusive or, and by whole halves.
  __device__ __forceinline__ int matrix_row() const {
    return kTokenBlocks == 1
               ? partition::activation_offset(lane % 8, lane / 8, kTileRows)
               : partition::activation_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2, kTileRows);
  }
  static constexpr int kHalfBytes = kTileRows * partition::kHalfRowBytes;
  static constexpr int kTokenBytes = kTokens * partition::kHalfRowBytes;

  // sums += weights of the `k16`-th 16 k of the step, times all rows of x. By each warp for itself:
  __device__ __forceinline__ void multiply_by_warp(Sums& sums, const uint32_t (&a)[kBlocks][4],
                                                   uint32_t x, int k16) {
    const uint32_t row = x + k16 / 4 * kHalfBytes;
    if constexpr (kTokenBlocks == 1) {
      if (k16 % 2 == 0) load_matrices(b_operands, row ^ (k16 / 2 % 2 * 64));
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        multiply_accumulate<Dtype>(sums[block][0], a[block], b_operands[k16 % 2 * 2],
                                   b_operands[k16 % 2 * 2 + 1]);
      }
    } else {
#pragma unroll
      for (int token = 0; token < kTokenBlocks; token += 2) {
        load_matrices(b_operands, (row + token * kTokenBytes) ^ (k16 % 4 * 32));
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          multiply_accumulate<Dtype>(sums[block][token], a[block], b_operands[0], b_operands[1]);
          multiply_accumulate<Dtype>(sums[block][token + 1], a[block], b_operands[2],
                                     b_operands[3]);
        }
      }
    }
  }

  // The lane's words of one layout tile of the step.
  __device__ __forceinline__ void load_block_words(uint32_t (&words)[kVectors * 4],
                                                   uint32_t step_codes, int block, int tile) const {
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const uint4 loaded = load_shared_16(
          step_codes + ((block * kStepTiles + tile) * kVectors + vector) * Ring::kVectorStride +
          lane * layout::kVectorBytes);
      words[4 * vector] = loaded.x;
      words[4 * vector + 1] = loaded.y;
      words[4 * vector + 2] = loaded.z;
      words[4 * vector + 3] = loaded.w;
    }
  }
  __device__ __forceinline__ void load_words(uint32_t (&words)[kBlocks][kVectors * 4],
                                             uint32_t step_codes, int tile) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      load_block_words(words[block], step_codes, block, tile);
    }
  }

  // Where the bytes of this stage lie.
  struct StepPlace {
    uint32_t codes, scales, zeros, x;
  };
  __device__ __forceinline__ StepPlace place_of_stage() {
    StepPlace place;
    place.codes = codes + stage * (args.warps_n * args.memory.warp_stage);
    place.scales = place.codes + partition::code_bytes(kColumns, kBits);
    place.zeros = place.scales + kBlocks * args.scale_chunks * layout::kVectorBytes;
    place.x = activations + stage * Ring::kActivationStage;
    return place;
  }
  // Scale group, within the step, of its k16-th 16 k; fine groups of 64 take two turns.
  __device__ __forceinline__ int group_in_step(int k16) const {
    return !kFineGroups ? 0 : k16 / (args.group_size == 64 ? 4 : 2);
  }

  __device__ __forceinline__ void compute_step_by_warp() {
    const StepPlace place = place_of_stage();
    const uint32_t row = place.x + matrix_row();
    RawScales raw;
    Sums sums;
    uint32_t words[kBlocks][kVectors * 4];
#pragma unroll
    for (int k16 = 0; k16 < kStepK16; ++k16) {
      if (k16 % 4 == 0) load_words(words, place.codes, k16 / 4);
      if (k16 % kGroupK16 == 0) {
        if (args.zeros != nullptr) load_zeros(place.zeros, group_in_step(k16));
        raw = load_scales(place.scales, group_in_step(k16));
        clear(sums);
      }
      uint32_t a[kBlocks][4];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        Format::operand(a[block], &words[block][k16 % 4 * Format::kWords], zeros[block]);
      }
      multiply_by_warp(sums, a, row, k16);
      if ((k16 + 1) % kGroupK16 == 0) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          apply_scales(block, sums, raw.low[block], raw.high[block]);
        }
      }
    }
  }

  // Products by warpgroups run on while their warps go on. One n-block's products of a scale group
  // are one phase; what a phase has summed is scaled while the products of the next one run.
  static constexpr int kOperandSets = 4;  // a set is free when the product so many before is done

  __device__ __forceinline__ void compute_step_by_warpgroup() {
    const StepPlace place = place_of_stage();
    Sums sums;
    uint32_t words[kBlocks][kVectors * 4];
    uint32_t a[kOperandSets][4];
    const uint32_t x = activation_descriptor(place.x);
    clear(sums);
#pragma unroll
    for (int first = 0; first < kStepK16; first += kGroupK16) {
      if (args.zeros != nullptr) load_zeros(place.zeros, group_in_step(first));
      const RawScales raw = load_scales(place.scales, group_in_step(first));
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int k16 = first; k16 < first + kGroupK16; ++k16) {
          if (k16 % 4 == 0) load_block_words(words[block], place.codes, block, k16 / 4);
          if (block * kGroupK16 + k16 - first >= kOperandSets) warpgroup_wait<kOperandSets - 1>();
          uint32_t (&operand)[4] = a[k16 % kOperandSets];
          Format::operand(operand, &words[block][k16 % 4 * Format::kWords], zeros[block]);
          warpgroup_fence();
          WarpgroupProduct<Dtype, kTokenBlocks>::run(
              sums[block], operand, x + (k16 / 4 * kHalfBytes + k16 % 4 * 32) / 16, k16 != first);
          warpgroup_commit();
        }
        if (block > 0) {
          warpgroup_wait<kGroupK16>();
          hold_block(sums[block - 1]);
          apply_scales(block - 1, sums, raw.low[block - 1], raw.high[block - 1]);
        }
      }
      warpgroup_wait<0>();
      hold_block(sums[kBlocks - 1]);
      apply_scales(kBlocks - 1, sums, raw.low[kBlocks - 1], raw.high[kBlocks - 1]);
    }
  }

  __device__ __forceinline__ static void clear(Sums& sums) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
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

  // Threads that multiply, and a barrier among them.
  __device__ __forceinline__ int threads() const { return args.warps_n * args.warps_k * 32; }
  __device__ __forceinline__ void block_barrier() {
    if constexpr (kForm == Form::kAlone) {
      __syncthreads();
    } else {
      named_barrier(0, threads());
    }
  }

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
    block_barrier();
    float* slot = slot_of(blockIdx.x, began);
    for (int i = threadIdx.x; i < rows << row_shift; i += threads()) {
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
        for (int i = threadIdx.x; i < rows << row_shift; i += threads()) {
          float4 sum = load_share(from, first_began, i);
          for (int cta = from + 1; cta <= to; ++cta) add(sum, load_share(cta, false, i));
          store_results(args, row0 + (i >> row_shift), n0 + (i & columns_mask) * 4, sum);
        }
      }
    }
    block_barrier();  // the partials' memory is free for the next tile
  }

  __device__ __forceinline__ float* slot_of(int cta, bool began_tile) const {
    return args.slots +
           partition::partial_slot(cta, began_tile) * (kTileRows * kColumns) * args.warps_n;
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
    block_barrier();
    if (threadIdx.x == 0) {
      const bool is_last = atomicAdd(args.counters + tile, 1) == others;
      if (is_last) args.counters[tile] = 0;  // for the next launch
      *flag = is_last;
      __threadfence();
    }
    block_barrier();
    return *flag != 0;
  }

  __device__ __forceinline__ void compute_step() {
    if constexpr (kWarpgroups) {
      compute_step_by_warpgroup();
    } else {
      compute_step_by_warp();
    }
  }

  // Goes through the stripe's tiles; `step` does one step, of those that are this group's.
  template <typename Step>
  __device__ __forceinline__ void run_tiles(Step step) {
    int ahead = group;  // steps are dealt to the groups in turn, through tiles
    for (int tile = stripe.first_tile; tile <= stripe.last_tile; ++tile) {
      clear(totals);
      const int end = stripe.end_of(tile, args.tile_steps);
      int next = stripe.begin_of(tile) + ahead;
      for (; next < end; next += args.warps_k) step();
      ahead = next - end;
      finish_tile(tile);
    }
  }

  // Warps copy for themselves.
  __device__ __forceinline__ void run_alone() {
    Ring ring(args, lane, warp_n, group, activations, codes);
    ring.fill(lane, warp_n);
    release_next_kernel();
    run_tiles([&] {
      wait_for_oldest(args.stages);
      group_barrier();
      ring.fetch(lane, warp_n);
      compute_step();
      stage = stage + 1 == args.stages ? 0 : stage + 1;
    });
  }

  // Four warps copy for all others.
  __device__ __forceinline__ void run_fed() {
    const RingBarriers barriers(args, shared_base);
    if (threadIdx.x == 0) barriers.init(args);
    __syncthreads();
    if (threadIdx.x >= threads()) {
      give_registers<partition::kCopyRegisters>();
      const int copy_warp = uniform_warp() - threads() / 32;
      CopyWarp<kBits, kTokenBlocks>(args, barriers, shared_base, copy_warp).run();
    } else {
      take_registers<partition::fed_registers(kTokenBlocks)>();
      release_next_kernel();
      if (args.dependent) wait_for_previous_kernel();  // before anything is written
      const uint32_t full = barriers.full + group * args.stages * 8;
      const uint32_t free = barriers.free + group * args.stages * 8;
      int phase = 0;
      run_tiles([&] {
        barrier_wait(full + stage * 8, phase);
        compute_step();
        __syncwarp();
        if (lane == 0) barrier_arrive(free + stage * 8);
        if (++stage == args.stages) {
          stage = 0;
          phase ^= 1;
        }
      });
    }
  }

  __device__ __forceinline__ void run() {
    if (args.zeros == nullptr) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        zeros[block] = Format::zeros(args.symmetric_zero, args.symmetric_zero);
      }
    }
    if constexpr (kForm == Form::kAlone) {
      run_alone();
    } else {
      run_fed();
    }
  }
};

constexpr int launch_threads(int token_blocks, Form form) {
  return partition::max_threads(token_blocks) +
         (form == Form::kAlone ? 0 : partition::kCopyThreads);
}

template <typename Dtype, int kBits, int kTokenBlocks, bool kFineGroups, Form kForm>
__global__ void __launch_bounds__(launch_threads(kTokenBlocks, kForm), 1)
    linear(const __grid_constant__ LinearArgs args) {
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (kForm != Form::kAlone) {
    __trap();  // the planner knows which devices can run it
  } else
#endif
  {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    LinearKernel<Dtype, kBits, kTokenBlocks, kFineGroups, kForm>(args, dynamic_shared).run();
  }
}

}  // namespace qlinear::cuda
