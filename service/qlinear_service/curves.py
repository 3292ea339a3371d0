"""Measures what batches of each kind of layer cost on this device, and remembers it between starts.

Takes ten seconds at most, on the engine's thread, before anything is served. What was measured is
kept under the cache folder, which may be read-only or absent: then each start measures anew.
"""

import contextlib
import hashlib
import json
import logging
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch

from qlinear_service.cost import TILE_EDGES, CostCurve, Steps
from qlinear_service.dtypes import DType
from qlinear_service.kernels import layout
from qlinear_service.kernels.backends import Kernels
from qlinear_service.layers import QuantizedLinear
from qlinear_service.log_values import event
from qlinear_service.publish import publish

__all__ = ["HostStepper", "Stepper", "cost_curves", "measure_curves", "read_kept"]

logger = logging.getLogger(__name__)

X_DTYPE = DType.F16

TRIES = 5
TRIES_SECONDS = 0.005
"""Tries of one size end after this, but two there are: the first also warms up."""

MOST_PASSES = 6
SMALL_GAIN = 0.05
"""Passes end when none of the sizes was measured to take so much less than before."""

MOST_LAYERS = 8
"""Layers of a shape that take turns, so that the weights of large models are not in a cache."""

FORMAT = 1

UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a damaged file may raise."""


class Stepper(Protocol):
    """Runs one batch on a device and tells what its steps took."""

    def steps(self, layer: QuantizedLinear, rows: int) -> Steps:
        """Compute `rows` rows of `layer` and wait for them."""


class HostStepper:
    """Batches on the CPU: rows are gathered, then multiplied; results are not copied."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def steps(self, layer: QuantizedLinear, rows: int) -> Steps:
        """Compute `rows` rows of `layer`."""
        nbytes = rows * layer.spec.k * X_DTYPE.itemsize
        slots, stage = memoryview(bytearray(nbytes)), bytearray(nbytes)
        started = time.perf_counter()
        stage[:] = slots
        gathered = time.perf_counter()
        x = torch.frombuffer(stage, dtype=torch.float16).view(rows, layer.spec.k)
        computing = time.perf_counter()
        self._kernels.linear(layer, x, X_DTYPE)
        return Steps(rows, gathered - started, time.perf_counter() - computing, 0.0)


def cost_curves(
    stepper: Stepper,
    layers: Iterable[QuantizedLinear],
    *,
    device: str,
    cache_dir: Path,
    most_seconds: float,
    stop: threading.Event,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, CostCurve]:
    """Return the curve of each shape among `layers`, measured now or at an earlier start.

    Args:
        stepper: runs batches where the layers are.
        layers: the loaded ones.
        device: what computes, in words that differ wherever costs may: kernels, threads, GPU.
        cache_dir: where curves are kept.
        most_seconds: for all measures together; sizes that it does not suffice for are measured at
            the next start.
        stop: set when nobody wants the result any more.
        clock: seconds.
    """
    identity = f"{device}; layout {layout.VERSION}; {_processor()}"
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    file = cache_dir / "curves" / f"{name}.json"
    by_shape: dict[str, list[QuantizedLinear]] = {}
    for layer in layers:
        by_shape.setdefault(layer.spec.shape, []).append(layer)
    kept = read_kept(file, identity)
    started = clock()
    curves = measure_curves(
        stepper, by_shape, most_seconds=most_seconds, stop=stop, clock=clock, known=kept
    )
    measured = {shape: curve for shape, curve in curves.items() if curve != kept.get(shape)}
    seconds = clock() - started
    values = {"shapes": len(by_shape), "measured": len(measured), "seconds": seconds}
    event(logger, logging.INFO, "cost_curves", **values)
    if measured and not stop.is_set():  # what a stop has cut short would stay so
        _keep(file, identity, {**kept, **measured})
    return curves


def measure_curves(
    stepper: Stepper,
    by_shape: Mapping[str, Sequence[QuantizedLinear]],
    *,
    most_seconds: float,
    stop: threading.Event,
    clock: Callable[[], float] = time.perf_counter,
    known: Mapping[str, CostCurve] = MappingProxyType({}),
) -> dict[str, CostCurve]:
    """Return a curve for each shape, as far as the time suffices: all shapes at few rows first.

    Again and again, until a pass finds nothing much quicker: other work on the machine makes single
    measures longer, and passes are apart in time. Sizes of `known` curves are not measured.
    """
    end = clock() + most_seconds
    best: dict[str, dict[int, Steps]] = {
        shape: {step.rows: step for step in known[shape].steps} if shape in known else {}
        for shape in by_shape
    }
    missing = [
        (rows, shape) for rows in TILE_EDGES for shape in by_shape if rows not in best[shape]
    ]
    for _ in range(MOST_PASSES):
        gains = [
            _measure(stepper, by_shape[shape][:MOST_LAYERS], rows, best[shape], end, clock)
            for rows, shape in missing
            if not stop.is_set()
        ]
        if max(gains, default=0.0) < SMALL_GAIN:
            break
    return {
        shape: CostCurve(steps=tuple(sorted(steps.values())))
        for shape, steps in best.items()
        if steps
    }


def _measure(
    stepper: Stepper,
    layers: Sequence[QuantizedLinear],
    rows: int,
    best: dict[int, Steps],
    end: float,
    clock: Callable[[], float],
) -> float:
    """Measure one size if that ends in time; return which share of the best time was saved."""
    known = best.get(rows)
    if known is not None:
        guess = known.seconds
    elif rows == 1:
        guess = 0.0
    else:
        place = TILE_EDGES.index(rows)
        before = best.get(TILE_EDGES[place - 1])
        if before is None:
            return 0.0  # a smaller size did not end in time
        guess = before.seconds * rows / before.rows
    if clock() + 2 * guess > end:
        return 0.0
    try:
        tries = list(_tries(stepper, layers, rows, clock))
    except torch.OutOfMemoryError:
        return 0.0  # no room beside the layers: the engine will find out for itself
    found = min(tries, key=lambda steps: steps.seconds)
    if known is not None and known.seconds <= found.seconds:
        return 0.0
    best[rows] = found
    return 1.0 if known is None else 1.0 - found.seconds / known.seconds


def _tries(
    stepper: Stepper, layers: Sequence[QuantizedLinear], rows: int, clock: Callable[[], float]
) -> Iterator[Steps]:
    end = clock() + TRIES_SECONDS
    for number in range(TRIES):
        yield stepper.steps(layers[number % len(layers)], rows)
        if number > 0 and clock() > end:
            return


def read_kept(file: Path, identity: str) -> dict[str, CostCurve]:
    """Return the curves in a file of the cache; none if it is of something else, or damaged."""
    try:
        content = json.loads(file.read_text())
        if (content["format"], content["device"]) != (FORMAT, identity):
            return {}
        return {
            str(shape): CostCurve(steps=tuple(_steps_of(*step) for step in steps))
            for shape, steps in content["shapes"].items()
        }
    except FileNotFoundError:
        return {}
    except UNREADABLE as error:
        event(logger, logging.WARNING, "curves_unreadable", file=file, error=error)
        return {}


def _steps_of(rows: int, copy_in: float, kernel: float, copy_out: float) -> Steps:
    return Steps(int(rows), float(copy_in), float(kernel), float(copy_out))


def _keep(file: Path, identity: str, curves: Mapping[str, CostCurve]) -> None:
    shapes = {shape: curve.steps for shape, curve in curves.items()}
    text = json.dumps({"format": FORMAT, "device": identity, "shapes": shapes})
    written = file.with_suffix(f".{threading.get_native_id()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(text)
        publish(written, file)
    except OSError as error:
        with contextlib.suppress(OSError):
            written.unlink()  # a full disk leaves a part
        event(logger, logging.INFO, "curves_not_kept", file=file, error=error)


def _processor() -> str:
    """Return the processor's name: cache folders are shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
