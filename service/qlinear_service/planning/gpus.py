"""GPUs by name: what plans and floors need to know of them, and where each figure comes from.

Rates of the H200 are measured by us (docs/performance.md); all others are data sheets', which no
program reaches: floors made of them are too low, by a tenth or so.
"""

from dataclasses import dataclass

from qlinear_service.kernels.cuda_abi import CudaDevice
from qlinear_service.roofline import Roofline

__all__ = ["GPUS", "GpuFigures", "by_driver_name", "by_name"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """One kind of GPU."""

    name: str
    """As people write it."""
    driver_names: tuple[str, ...]
    """As its driver does, tables of plans being kept under the first."""
    major: int
    minor: int
    sm_count: int
    shared_kib: int
    """Shared memory of a multiprocessor; a thread block can have 1 KiB less."""
    l2_mib: int
    memory_gib: int
    bytes_per_second: float
    """At which large layers are read."""
    flops: float
    """Dense products of 16-bit numbers with sums in float32, per second; a product is two."""
    source: str
    measured: bool = False
    """Whether both rates are ours."""
    read_points: tuple[tuple[float, float], ...] = ()
    """(MiB, microseconds) that reading so much was measured to take; none: `bytes_per_second`."""

    def device(self) -> CudaDevice:
        """Return it as the planner takes it."""
        return CudaDevice(
            name=self.driver_names[0].encode(),
            major=self.major,
            minor=self.minor,
            sm_count=self.sm_count,
            shared_bytes_per_block=(self.shared_kib - 1) * KIB,
            shared_bytes_per_sm=self.shared_kib * KIB,
            l2_bytes=self.l2_mib * MIB,
            memory_bytes=self.memory_gib * GIB,
            supported=1,
        )

    def roofline(self) -> Roofline:
        """Return what reading and multiplying take there at least."""
        points = self.read_points or ((1.0, MIB / self.bytes_per_second * 1e6),)
        return Roofline(
            sizes_bytes=tuple(round(mib * MIB) for mib, _ in points),
            read_seconds=tuple(us / 1e6 for _, us in points),
            products_per_second=self.flops / 2,
        )


GPUS = (
    GpuFigures(
        name="A10", driver_names=("NVIDIA A10",), major=8, minor=6, sm_count=72, shared_kib=100,
        l2_mib=6, memory_gib=24, bytes_per_second=600e9, flops=125e12,
        source="NVIDIA A10 data sheet (2021): 600 GB/s, 125 TFLOPS dense",
    ),
    GpuFigures(
        name="A100-40GB", driver_names=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), major=8,
        minor=0, sm_count=108, shared_kib=164, l2_mib=40, memory_gib=40, bytes_per_second=1555e9,
        flops=312e12, source="NVIDIA A100 data sheet (2020): 1,555 GB/s, 312 TFLOPS dense",
    ),
    GpuFigures(
        name="A100-80GB", driver_names=("NVIDIA A100-SXM4-80GB",), major=8, minor=0, sm_count=108,
        shared_kib=164, l2_mib=40, memory_gib=80, bytes_per_second=2039e9, flops=312e12,
        source="NVIDIA A100 80GB data sheet (2021), SXM: 2,039 GB/s, 312 TFLOPS dense",
    ),
    GpuFigures(
        name="L4", driver_names=("NVIDIA L4",), major=8, minor=9, sm_count=58, shared_kib=100,
        l2_mib=48, memory_gib=24, bytes_per_second=300e9, flops=121e12,
        source="NVIDIA L4 data sheet (2023): 300 GB/s, 242 TFLOPS sparse, half of it dense",
    ),
    GpuFigures(
        name="RTX4090", driver_names=("NVIDIA GeForce RTX 4090",), major=8, minor=9, sm_count=128,
        shared_kib=100, l2_mib=72, memory_gib=24, bytes_per_second=1008e9, flops=165.2e12,
        source="NVIDIA Ada architecture paper (2022): 1,008 GB/s, 165.2 TFLOPS dense, fp32 sums",
    ),
    GpuFigures(
        name="H100", driver_names=("NVIDIA H100 80GB HBM3",), major=9, minor=0, sm_count=132,
        shared_kib=228, l2_mib=50, memory_gib=80, bytes_per_second=3350e9, flops=989e12,
        source="NVIDIA H100 data sheet (2023), SXM5: 3.35 TB/s, 1,979 TFLOPS sparse, half dense",
    ),
    GpuFigures(
        name="H200", driver_names=("NVIDIA H200",), major=9, minor=0, sm_count=132, shared_kib=228,
        l2_mib=60, memory_gib=141, bytes_per_second=4.47e12, flops=800e12, measured=True,
        read_points=(
            (4.25, 2.7), (8.5, 3.69), (16.5, 5.52), (24.75, 7.44), (33, 9.49), (45.38, 12.36),
            (57.75, 15.43), (115.5, 29.08), (231, 55.69), (668, 156.62),
        ),
        source="measured by us on 2026-11-29: benchmarks/data/h200_read_floor.json",
    ),
)  # fmt: skip


def by_name(name: str) -> GpuFigures | None:
    """Return the GPU that people call so, in any case and with or without spaces and dashes."""
    wanted = _plain(name)
    names = {_plain(gpu.name): gpu for gpu in GPUS}
    return names.get(wanted) or by_driver_name(name)


def by_driver_name(name: str) -> GpuFigures | None:
    """Return the GPU that a driver calls so; None if there are no figures of it."""
    return next((gpu for gpu in GPUS if name in gpu.driver_names), None)


def _plain(name: str) -> str:
    return "".join(sign for sign in name.lower() if sign.isalnum())
