// A chain of products in one launch on Hopper: copies of weights run through the layers without a
// stop, as far as the ring has room, while what the next layer reads is still being computed.
//
// Thread blocks wait for each other between layers, so all of them must run at the same time: the
// launch is a cooperative one, with a thread block for each multiprocessor. How work is cut:
// chain_partition.h.
#pragma once

#include "cuda/chain_copier.cuh"
#include "cuda/step.cuh"

namespace qlinear::cuda {

template <typename Dtype, int kTokenBlocks>
struct ChainKernel {
  static constexpr int kWarps = partition::chain_warps(kTokenBlocks * kTokens);
  static constexpr int kThreads = kWarps * 32;

  const ChainArgs& args;
  unsigned char* const shared;
  const uint32_t shared_base;
  const int lane, warp;
  const ChainBarriers barriers;
  RingPlace place;  // of the next tile's first slot

  __device__ __forceinline__ ChainKernel(const ChainArgs& a, unsigned char* dynamic_shared)
      : args(a),
        shared(dynamic_shared),
        shared_base(shared_address(dynamic_shared)),
        lane(threadIdx.x % 32),
        warp(uniform_warp()),
        barriers(a, shared_base) {}

  // This warp's part of a layer's slots.
  struct Part {
    int warp_n, step, number;  // number: of the copies of a tile's sums
    int group, groups;         // every so many slots are its own
    __device__ __forceinline__ Part(const ChainLayer& layer, int warp) {
      const int in_group = warp % layer.group;
      group = warp / layer.group;
      groups = kWarps / layer.group;
      warp_n = in_group % layer.tiles.warps_n;
      step = in_group / layer.tiles.warps_n;
      number = group * layer.slot.steps + step;
    }
  };

  // Where this lane's rows of a step lie: m for each 64 k, one after the other, in the swizzle.
  // What stands for rows beyond m is the last one: nobody looks at its products.
  struct Rows {
    uint32_t places[2];
    __device__ __forceinline__ uint32_t half(int number) const { return places[number]; }
  };
  __device__ __forceinline__ Rows rows_of(int step) const {
    const int row = min(kTokenBlocks == 1 ? lane % 8 : lane % 8 + lane / 16 * 8, args.m - 1);
    const int chunk = kTokenBlocks == 1 ? lane / 8 : lane / 8 % 2;
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = (2 * step + half) * args.m + row;
      rows.places[half] =
          line * partition::kHalfRowBytes + (chunk ^ line % 8) * layout::kVectorBytes;
    }
    return rows;
  }

  __device__ __forceinline__ void block_barrier() const { named_barrier(0, kThreads); }

  // A tile of `blocks` n-blocks, of which this warp multiplies kBlocks.
  template <int kBlocks>
  __device__ __forceinline__ void multiply_tile(const ChainLayer& layer, const Part& part,
                                                int blocks, int n_block) {
    constexpr int kSplit = kBlocks <= 2 ? 2 : 1;
    using Step = cuda::Step<Dtype, 4, kTokenBlocks, kBlocks, false, true, kSplit>;
    // Nothing of it is asked for in the loop.
    const StepArgs step_args{1, 3, Dtype::kDtype, 1 << 3, false};
    const Step step(step_args, lane);
    typename Step::Totals totals;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) Step::clear(totals[j]);
    const int first = min(part.warp_n * kBlocks, blocks - kBlocks);
    typename Step::Place offsets = step.lane_offsets(first);
    offsets.codes += layer.slot.codes + part.step * blocks * Step::kBlockBytes;
    offsets.scales += layer.slot.scales + part.step * blocks * layer.scale_bytes;
    const Rows rows = rows_of(part.step);
    // A first look at arguments takes some 300 clocks: the end of the tile should not wait for it.
    const Output output = layer.output;
    asm volatile("" ::"l"(output.y), "l"(output.bias), "l"(output.y_row_stride), "r"(output.n),
                 "r"(output.y_dtype), "r"(output.bias_dtype), "r"(int{output.y_vector}),
                 "r"(layer.copies_at_once));
    const int arrivals = kWarps / layer.group, slots = layer.slots;
    int ring = args.memory.slots, slot_bytes = args.memory.slot_bytes;
    uint32_t ring_base = shared_base;
    keep(ring);
    keep(slot_bytes);
    keep(ring_base);
    RingPlace mine = place;
    mine.advance(part.group, ring);
#pragma unroll 1
    for (int i = part.group; i < slots; i += part.groups) {
      const uint32_t at = ring_base + mine.slot * slot_bytes;
      // Another group has had this slot before: until it is given back, its barriers may be two
      // turns behind, which looks like this turn.
      barrier_wait(barriers.free + mine.slot * 8, mine.phase ^ 1);
      barrier_wait(barriers.codes + mine.slot * 8, mine.phase);
      barrier_wait(barriers.others + mine.slot * 8, mine.phase);
      step.run(totals, {0, at + offsets.codes, at + offsets.scales, 0},
               Rows{{at + rows.places[0], at + rows.places[1]}});
      __syncwarp();
      if (lane == 0) barrier_arrive(barriers.free + mine.slot * 8, arrivals);
      mine.advance(part.groups, ring);
    }
    place.advance(slots, ring);
    finish_tile<Step, kBlocks>(layer, part, output, totals, blocks, first, n_block);
  }

  // Adds up what the warps hold of the same results, some copies at a time, in their order.
  template <typename Step, int kBlocks>
  __device__ __forceinline__ void finish_tile(const ChainLayer& layer, const Part& part,
                                              const Output& output,
                                              const typename Step::Totals& totals, int blocks,
                                              int first, int n_block) const {
    // A thread has four columns of every so many rows.
    constexpr int kMostFours = partition::kChainTileBlocks * (layout::kTileN / 4);
    constexpr int kItems = (kTokenBlocks * kTokens * kMostFours + kThreads - 1) / kThreads;
    float* const partials = reinterpret_cast<float*>(shared + args.memory.partials);
    const int four = threadIdx.x & ((1 << layer.fours_log2) - 1);
    const int first_row = threadIdx.x >> layer.fours_log2, row_step = kThreads >> layer.fours_log2;
    const bool has_columns = four < blocks * (layout::kTileN / 4);
    const int row_floats = partition::chain_partial_row(blocks);
    const int copy_floats = args.m * row_floats;
    const int copies = part.groups * layer.slot.steps;
    float4 sums[kItems];
#pragma unroll
    for (int item = 0; item < kItems; ++item) sums[item] = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int done = 0; done < copies; done += layer.copies_at_once) {
      if (done > 0) block_barrier();
      const int count = min(layer.copies_at_once, copies - done), copy = part.number - done;
      if (copy >= 0 && copy < count) {
        store_totals<Step, kBlocks>(totals, part, first, partials + copy * copy_floats, row_floats);
      }
      block_barrier();
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        const int row = first_row + item * row_step;
        if (!has_columns || row >= args.m) break;
        const float* from = partials + row * row_floats + four * 4;
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
          add(sums[item], *reinterpret_cast<const float4*>(from + i * copy_floats));
        }
      }
    }
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int row = first_row + item * row_step;
      if (!has_columns || row >= args.m) break;
      store_results(output, row, n_block * layout::kTileN + four * 4, sums[item]);
    }
    block_barrier();  // the partials' memory is free for the next tile
  }

  template <typename Step, int kBlocks>
  __device__ __forceinline__ void store_totals(const typename Step::Totals& totals,
                                               const Part& part, int first, float* to,
                                               int row_floats) const {
#pragma unroll
    for (int token = 0; token < kTokenBlocks; ++token) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // sums of a lane: rows g, g, g + 8, g + 8 of W; x rows 2t + i
        const int x_row = token * kTokens + lane % 4 * 2 + i % 2;
        if (x_row >= args.m) continue;
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          if (first + j < part.warp_n * kBlocks) continue;  // the warp before has it, too
          to[x_row * row_floats + (first + j) * layout::kTileN + i / 2 * 8 + lane / 4] =
              totals[j][token][i] * Step::unit(i);
        }
      }
    }
  }

  // Tells the others that this thread block has stored its share of a layer. The last tile's end
  // was a barrier: what all threads stored before it is this one's to release.
  __device__ __forceinline__ void finish_layer(int number) const {
    if (threadIdx.x == 0) add_release(args.finished + number, 1);
  }

  __device__ __forceinline__ void multiply() {
    for (int i = 0; i < args.count; ++i) {
      const ChainLayer& layer = args.layers[i];
      const partition::Share share =
          partition::share_of(layer.n_blocks, static_cast<int>(gridDim.x), blockIdx.x);
      if (share.count == 0) continue;
      const Part part(layer, warp);
      for (int t = 0; t < layer.tiles.tiles; ++t) {
        const partition::Share tile = partition::share_of(share.count, layer.tiles.tiles, t);
        if (tile.count == 0) continue;
        const int first = share.first + tile.first, warps_n = layer.tiles.warps_n;
        const int of_warp = (tile.count + warps_n - 1) / warps_n;
        if (of_warp == 4) {
          multiply_tile<4>(layer, part, tile.count, first);
        } else if (of_warp == 3) {
          multiply_tile<3>(layer, part, tile.count, first);
        } else if (of_warp == 2) {
          multiply_tile<2>(layer, part, tile.count, first);
        } else {
          multiply_tile<1>(layer, part, tile.count, first);
        }
      }
      if (i + 1 < args.count) finish_layer(i);
    }
    // Whoever ends last, when nobody looks at them any more, clears the counters. Fenced on both
    // sides, or what another has added might come after that.
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(args.ended, 1) + 1 < static_cast<int>(gridDim.x)) return;
    __threadfence();
    for (int i = 0; i < args.count; ++i) args.finished[i] = 0;
    *args.ended = 0;
  }

  __device__ __forceinline__ void run() {
    enum { kStart = 1, kCopyStart };
    if (threadIdx.x >= kThreads) {
      give_registers<partition::kCopyRegisters>();
      const int copy_warp = warp - kWarps;
      if (lane == 0) barriers.init(args, copy_warp, kWarps);
      __syncwarp();
      named_barrier(kCopyStart, partition::kCopyThreads);
      named_barrier_arrive(kStart, kThreads + partition::kCopyThreads);
      const ChainCopier copier{args, barriers, shared_base, copy_warp};
      if (copy_warp == partition::kFeeders) {
        copier.prefetch(lane);
      } else if (lane == 0) {
        copier.run();
      }
    } else {
      take_registers<partition::chain_registers(kWarps)>();
      named_barrier(kStart, kThreads + partition::kCopyThreads);
      multiply();
    }
  }
};

template <typename Dtype, int kTokenBlocks>
__global__ void __launch_bounds__(
    partition::chain_threads(ChainKernel<Dtype, kTokenBlocks>::kWarps), 1)
    linear_chain(const __grid_constant__ ChainArgs args) {
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __trap();  // the host knows which devices can run it
#else
  extern __shared__ __align__(1024) unsigned char chain_shared[];
  ChainKernel<Dtype, kTokenBlocks>(args, chain_shared).run();
#endif
}

}  // namespace qlinear::cuda
