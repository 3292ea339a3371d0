"""What `qlinear plan` tells of one layer on one GPU: floors, the tile plan, the expected time.

Pure arithmetic beside the planner and the tables of measured plans, which are handed in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qlinear_service.dtypes import DType
from qlinear_service.kernels import layout
from qlinear_service.kernels.cuda_abi import CudaDevice
from qlinear_service.kernels.plan_values import plan_of, plan_values
from qlinear_service.kernels.planner import Candidate, Planner, problem
from qlinear_service.kernels.tuned_plans import Found
from qlinear_service.kernels.tuned_table import Form, bucket_of
from qlinear_service.planning.gpus import GpuFigures

__all__ = ["START_US", "PlanLine", "Shape", "plan_lines"]

START_US = 2.5
"""From a launch to its first bytes, and the like: the same for every plan, so the planner leaves it
out. With it the 50 cells of docs/performance.md (H200) took 0.9 to 1.4 times what is expected, 1.05
in the geometric mean."""

X_BYTES = 2
"""Of an element of x and y, and of a weight in fp16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A layer: symmetric codes, scales and activations in float16."""

    n: int
    k: int
    bits: int
    group_size: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of codes and scales, padding included."""
        n, k = layout.round_up(self.n, layout.PAD_N), layout.round_up(self.k, layout.PAD_K)
        scales = n * layout.group_count(k, self.group_size) * X_BYTES
        return layout.qweight_bytes(n, k, self.bits) + scales


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """One number of rows; times in microseconds."""

    m: int
    nbytes: int
    """Weights, x and y, each once."""
    flops: int
    """2 m n k."""
    intensity: float
    """Operations per byte."""
    bound: str
    """What decides the floor: "memory" or "compute"."""
    floor_us: float
    plan: Mapping[str, int] | None
    """None: no planner could be loaded."""
    expected_us: float | None
    """What `plan` takes: measured, or START_US more than the larger of the floor and what the
    planner's model says."""
    measured: bool
    """Whether `expected_us` was measured on such a GPU."""
    floor_ratio: float | None
    """Floor over expected: 1 is all that there is."""
    fp16_floor_us: float
    """The same floor with weights of 2 bytes; never measured here."""
    speedup: float | None
    """fp16_floor_us over expected_us: against a product in fp16 that reaches its floor."""
    source: str
    """Where plan and time come from."""


def plan_lines(
    shape: Shape,
    rows: Sequence[int],
    gpu: GpuFigures,
    planner: Planner | None,
    tuned: Mapping[tuple[Form, int], Found],
) -> list[PlanLine]:
    """Return a line for each number of rows.

    Args:
        shape: the layer.
        rows: 1 or more each.
        gpu: where.
        planner: None leaves plans and expected times open.
        tuned: what tables hold for that GPU, by form and bucket.
    """
    return [_line(shape, m, gpu, planner, tuned) for m in rows]


def _line(
    shape: Shape,
    m: int,
    gpu: GpuFigures,
    planner: Planner | None,
    tuned: Mapping[tuple[Form, int], Found],
) -> PlanLine:
    products = m * shape.n * shape.k
    moved = m * (shape.n + shape.k) * X_BYTES
    nbytes = shape.weight_bytes + moved
    roofline = gpu.roofline()
    floor_us = roofline.floor_seconds(nbytes, products) * 1e6
    dense = shape.n * shape.k * X_BYTES + moved
    fp16_us = roofline.floor_seconds(dense, products) * 1e6
    reads = roofline.read_floor_seconds(nbytes) >= products / roofline.products_per_second
    plan: dict[str, int] | None = None
    expected, measured, source = None, False, "no planner"
    if planner is not None:
        plan, expected, measured, source = _planned(shape, m, gpu.device(), planner, tuned)
        # The model is fitted to an H200: no other GPU beats its own floor.
        expected = expected if measured else max(expected, floor_us) + START_US
    return PlanLine(
        m=m,
        nbytes=nbytes,
        flops=2 * products,
        intensity=2 * products / nbytes,
        bound="memory" if reads else "compute",
        floor_us=floor_us,
        plan=plan,
        expected_us=expected,
        measured=measured,
        floor_ratio=None if expected is None else floor_us / expected,
        fp16_floor_us=fp16_us,
        speedup=None if expected is None else fp16_us / expected,
        source=source,
    )


def _planned(
    shape: Shape,
    m: int,
    device: CudaDevice,
    planner: Planner,
    tuned: Mapping[tuple[Form, int], Found],
) -> tuple[dict[str, int], float, bool, str]:
    """Return the plan that would run, its microseconds, whether they are measured, and the source.

    As kernels/tuned_plans.py does it: a table's plan if it can run, else the planner's.
    """
    params = problem(m=m, n=shape.n, k=shape.k, bits=shape.bits, group_size=shape.group_size)
    form = Form.of(
        n=shape.n, k=shape.k, bits=shape.bits, group_size=shape.group_size, zeros=False,
        dtype=DType.F16,
    )  # fmt: skip
    best: Candidate = planner.choice(params, device)
    own = plan_values(best.plan)
    bucket = bucket_of(m)
    found = None if bucket is None else tuned.get((form, bucket))
    if found is None:
        return own, best.microseconds, False, "model"
    entry, run = found.entry, found.run
    try:
        fault = planner.complete(params, device, plan_of(entry.plan))
    except ValueError as error:
        fault = str(error)
    if fault or (entry.kept and entry.plan != own):
        return own, best.microseconds, False, "model"
    others = "" if found.same_kernels else ", other kernels"
    return dict(entry.plan), entry.us, True, f"measured at M={entry.m}, {run.date[:10]}{others}"
