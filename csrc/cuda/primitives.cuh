// Single PTX instructions under readable names, all there from sm_80 on. Formats of operands: PTX
// ISA, "Matrix Fragments for mma.m16n8k16", "ldmatrix", "cp.async".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "layout.h"

namespace qlinear::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The number of this warp; the compiler sees that it is the same for all lanes.
__device__ __forceinline__ int uniform_warp() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
}

__device__ __forceinline__ void add(float4& sum, float4 part) {
  sum.x += part.x;
  sum.y += part.y;
  sum.z += part.z;
  sum.w += part.w;
}

// Copies 16 bytes past the registers and the L1 cache.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}

// The same where `wanted`, without a branch.
__device__ __forceinline__ void copy_async_if(bool wanted, uint32_t to, const void* from) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %0, 0;\n\t"
      "@p cp.async.cg.shared.global.L2::256B [%1], [%2], 16;\n\t}" ::"r"(static_cast<int>(wanted)),
      "r"(to), "l"(from)
      : "memory");
}

// The first `bytes` of 16; the rest becomes zero.
__device__ __forceinline__ void copy_async_part(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until the oldest stage of a full ring but for one is there; the instruction takes a
// constant only.
__device__ __forceinline__ void wait_for_oldest(int stages) {
  if (stages == 4) {
    copy_wait<2>();
  } else if (stages == 3) {
    copy_wait<1>();
  } else {
    copy_wait<0>();
  }
}

// Copies a box of an array into shared memory, by one thread for all; what lies outside the array
// becomes zero. The barrier counts the bytes. Hopper and later.
__device__ __forceinline__ void copy_box(uint32_t to, const void* tensor_map, int column, int row,
                                         uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(tensor_map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
#endif
}
__device__ __forceinline__ void copy_box(uint32_t to, const void* tensor_map, int column, int row,
                                         int piece, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(tensor_map), "r"(column), "r"(row), "r"(piece), "r"(barrier)
      : "memory");
#endif
}
// Between thread blocks that run at the same time: what one stored before add_release is there for
// who has loaded its sum.
__device__ __forceinline__ int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void add_release(int* to, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
// What this thread has seen stored is there for its copies (copy_box) from now on.
__device__ __forceinline__ void copies_see_stores() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

// Has the copy engine look at a map before it is needed.
__device__ __forceinline__ void prefetch_map(const void* tensor_map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(tensor_map) : "memory");
#endif
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, int times) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times)
               : "memory");
#endif
}
// Makes initialised barriers visible to copies.
__device__ __forceinline__ void barrier_init_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int phase) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .pred done;\n\twait:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra wait;\n\t}" ::"r"(
          barrier),
      "r"(phase)
      : "memory");
#endif
}

// Thread blocks of a cluster. Each arrives here once at its start, and waits before it looks at
// another's shared memory.
__device__ __forceinline__ void cluster_started() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_all_started() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// An address of this thread block's shared memory, as that of the rank-th of the cluster.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int rank) {
  uint32_t mapped = address;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
#endif
  return mapped;
}
__device__ __forceinline__ void cluster_arrive(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
#endif
}
// Stores into another's shared memory. Who reads it waits at a barrier (barrier_wait_cluster) at
// which this warp arrived after cluster_stores_done.
__device__ __forceinline__ void store_cluster_16(uint32_t to, float4 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
#endif
}
__device__ __forceinline__ void cluster_stores_done() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.acq_rel.cluster;" ::: "memory");
#endif
  __syncwarp();
}
// barrier_wait for what other thread blocks of the cluster have stored.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t barrier, int phase) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .pred done;\n\twait:\n\t"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra wait;\n\t}" ::"r"(barrier),
      "r"(phase)
      : "memory");
#endif
}

// Moves registers between groups of four warps; Hopper (sm_90a).
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// Counts this warp at a barrier without waiting there.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

// What store_cluster_16 has brought. For nothing else: reports of racecheck tell reads by the
// function (tests/gpu/race_report.py).
__device__ __forceinline__ float4 load_received(uint32_t from) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t from) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_shared_2(uint32_t from) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(from) : "memory");
  return value;
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&out)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(from)
               : "memory");
}

// Has a register hold this value: the compiler does not work it out again where it is used.
__device__ __forceinline__ void keep(uint32_t& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void keep(int& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void keep(float& value) { asm volatile("" : "+f"(value)); }

// (a & mask) | bits in one instruction.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(mask), "r"(bits));
  return result;
}

// Waits for the kernel in front of this one, where it was launched to overlap with it.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void release_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace qlinear::cuda
