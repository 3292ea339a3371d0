// The kernel on Hopper: four warps copy (feed.cuh), the others multiply, each for itself
// (mma.sync, up to 16 rows of x) or four together as a warpgroup (wgmma, 32 rows and more).
//
// A thread block's warps stand in warps_k groups of warps_n: a group takes every warps_k-th step of
// a tile. Thread blocks of a cluster share a tile's k; what each has summed meets through
// distributed shared memory, added in order of the groups and then of the blocks. The thread blocks
// of a cluster run at the same time by definition: nobody waits for one that may not be resident.
#pragma once

#include "cuda/direct.cuh"
#include "cuda/feed.cuh"
#include "cuda/step.cuh"
#include "cuda/warpgroup.cuh"

namespace qlinear::cuda {

template <typename Dtype, int kBits, int kTokenBlocks, bool kFineGroups, Form kForm>
struct FedKernel {
  static constexpr bool kWarpgroups = kForm == Form::kFedWarpgroups;
  static constexpr int kBlocks = partition::fed_blocks_per_warp(kTokenBlocks);
  static constexpr bool kRounded = partition::fed_rounded(kTokenBlocks, kFineGroups);
  // Beside many rows of x the sums of x cost more than they save.
  static constexpr bool kRaw = kTokenBlocks <= 2 && !kRounded;
  using Step = cuda::Step<Dtype, kBits, kTokenBlocks, kBlocks, kFineGroups || kRounded, kRaw>;
  using Format = typename Step::Format;
  using BlockSums = typename Step::BlockSums;
  using Place = typename Step::Place;
  static constexpr int kTileRows = Step::kTileRows;

  const FedArgs& args;
  unsigned char* const shared;
  const uint32_t shared_base;
  const int lane, warp_n, group;  // warp's place along n, and its group along k
  const FedWork work;
  const FedBarriers barriers;
  const int first_block;  // of the warp in the tile
  Step step;
  const Place ring;  // where this group's steps begin, as this lane reads them, but for x
  int stage = 0, phase = 0;
  int shared_parts = 0;  // that the cluster has added up
  typename Step::Totals totals;

  __device__ __forceinline__ FedKernel(const FedArgs& a, unsigned char* dynamic_shared)
      : args(a),
        shared(dynamic_shared),
        shared_base(shared_address(dynamic_shared)),
        lane(threadIdx.x % 32),
        warp_n(uniform_warp() % a.warps_n),
        group(uniform_warp() / a.warps_n),
        work(a),
        barriers(a, shared_base),
        first_block(min(warp_n * kBlocks, a.tile_blocks - kBlocks)),
        step(a.step, threadIdx.x % 32),
        ring(first_slot()) {}

  __device__ __forceinline__ int threads() const { return args.warps_n * args.warps_k * 32; }

  __device__ __forceinline__ Place first_slot() const {
    const partition::FedMemory& memory = args.memory;
    const int slot = group * args.stages;
    Place at = step.lane_offsets(first_block);
    at.codes += shared_base + memory.codes + slot * memory.code_slot;
    at.scales += shared_base + memory.scales + slot * memory.scale_slot;
    at.zeros += shared_base + memory.zeros + slot * memory.zero_slot;
    // Registers, and not worked out again for each step.
    asm volatile("" : "+r"(at.codes), "+r"(at.scales), "+r"(at.zeros));
    return at;
  }

  // Rows of a tile are added up and stored some at a time, where all would take too much memory.
  static constexpr int kPartBlocks = partition::fed_part_blocks(kTokenBlocks);
  static constexpr int kPartRows = kPartBlocks * kTokens;

  // Writes this warp's totals of a part of the rows where the thread block adds them up.
  __device__ __forceinline__ void store_totals(int part) {
    const int partial_row = args.memory.partial_row;
    float* to = partials() + group * kPartRows * partial_row + lane / 4;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const int block = first_block + j;
      if (block < warp_n * kBlocks) continue;  // the warp before has it, too
#pragma unroll
      for (int token = 0; token < kPartBlocks; ++token) {
#pragma unroll
        for (int i = 0; i < 4;
             ++i) {  // sums of a lane: rows g, g, g + 8, g + 8 of W; x rows 2t + i
          const int x_row = token * kTokens + lane % 4 * 2 + i % 2;
          to[x_row * partial_row + block * layout::kTileN + i / 2 * 8] =
              totals[j][part * kPartBlocks + token][i] * Step::unit(i);
        }
      }
    }
  }

  __device__ __forceinline__ float* partials() const {
    return reinterpret_cast<float*>(shared + args.memory.partials);
  }

  // The groups' totals of four columns, added in order.
  __device__ __forceinline__ float4 add_groups(int row, int four) const {
    const float* from = partials() + row * args.memory.partial_row + four * 4;
    float4 sum = *reinterpret_cast<const float4*>(from);
    const int stride = kPartRows * args.memory.partial_row;
#pragma unroll 4
    for (int other = 1; other < args.warps_k; ++other) {
      add(sum, *reinterpret_cast<const float4*>(from + other * stride));
    }
    return sum;
  }
  __device__ __forceinline__ void block_barrier() const { named_barrier(0, threads()); }

  // Calls visit(row, four) for every four columns of so many rows, a thread each.
  template <typename Visit>
  __device__ __forceinline__ void for_each_four(int rows, int fours, uint32_t by_fours,
                                                Visit visit) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * fours; i += threads()) {
      const int row = static_cast<int>(__umulhi(i, by_fours));
      visit(row, i - row * fours);
    }
  }

  __device__ __forceinline__ void finish_tile(const FedTile& tile) {
    const int n0 = tile.n * args.tile_blocks * layout::kTileN;
    if (kWarpgroups && args.direct) {
      const int row0 = tile.m * kTileRows;
      // A warp beyond the tile's features has those of the last one, which stores them itself.
      if (warp_n < args.tile_blocks) {
        store_directly(args.output, totals[0], row0, args.m - row0, n0 + warp_n * layout::kTileN,
                       lane);
      }
      return;
    }
    const int fours = args.tile_blocks * (layout::kTileN / 4);
    constexpr int kParts = kTokenBlocks / kPartBlocks;
    if (args.memory.partials == 0) block_barrier();  // over the rings: nobody reads them any more
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      const int row0 = tile.m * kTileRows + part * kPartRows;
      const int rows = min(args.m - row0, kPartRows);
      if (rows <= 0) return;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {  // a register's number must be known
        if (i == part) store_totals(i);
      }
      block_barrier();
      if (args.cluster == 1) {
        for_each_four(rows, fours, args.by_fours, [&](int row, int four) {
          store_results(args.output, row0 + row, n0 + four * 4, add_groups(row, four));
        });
      } else {
        share_sums(row0, rows, n0, fours);
      }
      block_barrier();  // the partials' memory is free for what comes next
    }
  }

  // Each thread block of the cluster adds up some of the columns: the others store theirs there.
  // Nobody can be two parts ahead of another, as each waits for all: two places for what arrives
  // are enough.
  __device__ __forceinline__ void share_sums(int row0, int rows, int n0, int fours) {
    const partition::FedMemory& memory = args.memory;
    const int parity = shared_parts % 2, part_fours = memory.received_fours;
    const int part_bytes = kPartRows * part_fours * 16;
    const uint32_t barrier = barriers.summed + parity * 8;
    const uint32_t place = shared_base + memory.received +
                           (memory.places > 1 ? parity * args.cluster * part_bytes : 0);
    for_each_four(rows, fours, args.by_fours, [&](int row, int four) {
      const int owner = static_cast<int>(__umulhi(four, args.by_part_fours));
      const int at = row * part_fours + four - owner * part_fours;
      store_cluster_16(cluster_address(place + work.rank * part_bytes + at * 16, owner),
                       add_groups(row, four));
    });
    cluster_stores_done();
    if constexpr (kWarpArrivals == 1) {
      if (lane < args.cluster) cluster_arrive(cluster_address(barrier, lane));
    } else {
      for (int rank = 0; rank < args.cluster; ++rank) {
        cluster_arrive(cluster_address(barrier, rank));
      }
    }
    barrier_wait_cluster(barrier, shared_parts / 2 % 2);
    const int first = work.rank * part_fours;
    for_each_four(rows, part_fours, args.by_part_fours, [&](int row, int four) {
      if (first + four >= fours) return;
      const uint32_t from = place + (row * part_fours + four) * 16;
      float4 sum = load_received(from);
#pragma unroll 4
      for (int rank = 1; rank < args.cluster; ++rank) {
        add(sum, load_received(from + rank * part_bytes));
      }
      store_results(args.output, row0 + row, n0 + (first + four) * 4, sum);
    });
    ++shared_parts;
  }

  // A slot of this group's ring, and the barrier at which it is given back.
  struct Slot {
    Place at;
    uint32_t free;
  };
  // The next one, once its bytes are there.
  __device__ __forceinline__ Slot take() {
    const partition::FedMemory& memory = args.memory;
    const int slot = group * args.stages + stage;
    barrier_wait(barriers.full + slot * 8, phase);
    const Slot taken{
        {shared_base + slot * memory.x_slot, ring.codes + stage * memory.code_slot,
         ring.scales + stage * memory.scale_slot, ring.zeros + stage * memory.zero_slot},
        barriers.free + slot * 8};
    if (++stage == args.stages) {
      stage = 0;
      phase ^= 1;
    }
    return taken;
  }
  __device__ __forceinline__ void give_back(const Slot& slot) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(slot.free);
  }

  // So many steps of one tile.
  __device__ __forceinline__ void multiply_steps(int steps) {
    if constexpr (kWarpgroups) {
      if (steps == 0) return;
      const auto slots = [&] { return take(); };
      const auto back = [&](const Slot& slot) { give_back(slot); };
      if constexpr (kRounded) {
        if constexpr (has_plain_loop(kBits, kTokenBlocks)) {
          if (!args.step.has_zeros && args.step.groups_per_step == 1) {
            RoundedRun<Dtype, kBits, kTokenBlocks, true>(step).run(totals[0], steps, slots, back);
            return;
          }
        }
        RoundedRun<Dtype, kBits, kTokenBlocks, false>(step).run(totals[0], steps, slots, back);
      } else if (is_plain<Dtype>(args.step)) {
        ExactRun<Dtype, kBits, kTokenBlocks, true>(step).run(totals[0], steps, slots, back);
      } else {
        ExactRun<Dtype, kBits, kTokenBlocks, false>(step).run(totals[0], steps, slots, back);
      }
    } else {
      for (; steps > 0; --steps) {
        const Slot slot = take();
        if constexpr (kRounded) {
          step.run_rounded(totals, slot.at);
        } else {
          step.run(totals, slot.at);
        }
        give_back(slot);
      }
    }
  }

  __device__ __forceinline__ void multiply() {
    int ahead = group;  // steps are dealt to the groups in turn, through tiles
    for (int tile = work.first_tile; tile < args.tiles; tile += work.tile_stride) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) Step::clear(totals[j]);
      const int left = work.end_step - work.first_step - ahead;
      const int steps = left > 0 ? (left + args.warps_k - 1) / args.warps_k : 0;
      const FedTile at(args, tile);
      multiply_steps(steps);
      ahead += steps * args.warps_k - (work.end_step - work.first_step);
      finish_tile(at);
    }
  }

  // What the end of a tile will ask of the arguments, so that it does not wait for them then.
  __device__ __forceinline__ void fetch_constants() const {
    asm volatile("" ::"l"(args.output.y), "l"(args.output.bias), "r"(args.m),
                 "r"(args.output.y_dtype), "r"(args.memory.received));
  }

  // The copying warps set up what they need and begin; the others meet them before they look at a
  // barrier.
  __device__ __forceinline__ void run() {
    enum { kStart = 1, kCopyStart };
    if (threadIdx.x >= threads()) {
      give_registers<partition::kCopyRegisters>();
      const int copy_warp = uniform_warp() - threads() / 32;
      if (lane == 0) {
        prefetch_map(copy_warp == 0   ? &args.code_map
                     : copy_warp == 1 ? &args.scale_map
                                      : &args.x_map);
        barriers.init(args, copy_warp);
      }
      __syncwarp();
      named_barrier(kCopyStart, partition::kCopyThreads);
      named_barrier_arrive(kStart, threads() + partition::kCopyThreads);
      if (args.cluster > 1) cluster_started();
      release_next_kernel();
      if (lane == 0 && copy_warp < partition::kFeeders) {
        CopyWarp<kTokenBlocks>(args, barriers, shared_base, copy_warp).run();
      }
    } else {
      take_registers<partition::fed_registers(kTokenBlocks)>();
      named_barrier(kStart, threads() + partition::kCopyThreads);
      if (args.cluster > 1) cluster_started();
      release_next_kernel();
      fetch_constants();
      if (args.cluster > 1) cluster_all_started();
      if (args.dependent) wait_for_previous_kernel();  // before anything is written
      multiply();
    }
  }
};

template <typename Dtype, int kBits, int kTokenBlocks, bool kFineGroups, Form kForm>
__global__ void __launch_bounds__(partition::fed_bound(kTokenBlocks), 1)
    linear_fed(const __grid_constant__ FedArgs args) {
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __trap();  // the planner knows which devices can run it
#else
  extern __shared__ __align__(1024) unsigned char fed_shared[];
  FedKernel<Dtype, kBits, kTokenBlocks, kFineGroups, kForm>(args, fed_shared).run();
#endif
}

}  // namespace qlinear::cuda
