"""What a figure of the kernel benchmark is: shapes, bytes, floors, medians.

Plain arithmetic, tested without a GPU. Knows neither torch nor who competes.
"""

import fnmatch
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlinear_service.dtypes import DType
from qlinear_service.kernels import layout

MIB = 1 << 20
FILL_BYTES = 600 * MIB
"""The copies of a graph are at least so much together: ten times the largest L2 cache of today."""
LEAST_COPIES, MOST_COPIES = 2, 80
COPY_ALIGN_BYTES = 256
REFERENCE_FLOOR = Path(__file__).parent / "data" / "h200_read_floor.json"

ROWS = (1, 8, 16, 32, 64)
EXTENDED_ROWS = (1, 4, 8, 16, 24, 32, 48, 64, 65, 96, 128, 250, 256, 1024, 4096)

ERROR_LIMITS = {DType.F16: 1e-3, DType.BF16: 4e-3}
"""Mean error over mean result. Rounding y alone costs 1.7e-4 and 1.4e-3; weights rounded to
bfloat16, which is allowed, make that 2.1e-3. One input feature of 28,672 left out costs 6e-3."""
WORST_FACTOR = 20
"""No single element may be off by more than this many limits: large ones lie at four sigma."""


@dataclass(frozen=True)
class Shape:
    """One layer: k input and n output features."""

    name: str
    k: int
    n: int


@dataclass(frozen=True)
class Variant:
    """How a layer is stored, and the dtype of x, scales and y."""

    name: str
    dtype: DType
    bits: int = 4
    group_size: int = 128
    has_zeros: bool = False


@dataclass(frozen=True)
class Cell:
    """What is timed together: one layer with so many rows."""

    variant: Variant
    shape: Shape
    m: int

    @property
    def key(self) -> str:
        """Its name in the journal."""
        return f"{self.variant.name}/{self.shape.name}/{self.m}"


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of one copy of a layer."""

    codes: int
    scales: int
    zeros: int

    @property
    def total(self) -> int:
        """All that a product must read of it."""
        return self.codes + self.scales + self.zeros


SHAPES = {
    name: Shape(name, k, n)
    for name, k, n in (
        ("l7b.o", 4096, 4096),
        ("l7b.qkv", 4096, 12288),
        ("l7b.gateup", 4096, 22016),
        ("l7b.down", 11008, 4096),
        ("l8b.gateup", 4096, 28672),
        ("l8b.down", 14336, 4096),
        ("l70b.o", 8192, 8192),
        ("l70b.gateup", 8192, 57344),
        ("l70b.down", 28672, 8192),
        ("ideal", 18432, 73728),
    )
}
"""Layers of Llama models, unsplit, and the large one that published kernels are compared on."""

MAIN_VARIANT = "f16"
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(MAIN_VARIANT, DType.F16),
        Variant("bf16", DType.BF16),
        Variant("zp", DType.F16, has_zeros=True),
        Variant("g32", DType.F16, group_size=32),
        Variant("8bit", DType.F16, bits=8),
    )
}


def parse_shapes(text: str) -> list[Shape]:
    """Return the shapes that a list names: names, patterns (`l70b.*`) or sizes (`4096x6144`).

    Raises:
        ValueError: a word of it is none of these, or a size that no packed layer has.
    """
    found: dict[str, Shape] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        names = fnmatch.filter(SHAPES, word)
        k, times, n = word.partition("x")
        if names:
            found.update({name: SHAPES[name] for name in names})
        elif times and k.isdigit() and n.isdigit():
            if int(k) % layout.PAD_K or int(n) % layout.PAD_N or not int(k) * int(n):
                raise ValueError(
                    f"{word}: k must be a multiple of {layout.PAD_K} and n of {layout.PAD_N}"
                )
            found[word] = Shape(word, int(k), int(n))
        else:
            raise ValueError(f"{word!r} is no shape; there are {', '.join(SHAPES)}, and KxN")
    return list(found.values())


def parse_rows(text: str) -> list[int]:
    """Return the row counts of a list, or those of "default" or "extended".

    Raises:
        ValueError: something in it is no positive number.
    """
    named = {"default": ROWS, "extended": EXTENDED_ROWS}
    if text in named:
        return list(named[text])
    words = [word.strip() for word in text.split(",") if word.strip()]
    rows = [int(word) for word in words if word.isdecimal()]
    if len(rows) < len(words) or not rows or min(rows) < 1:
        raise ValueError(f"{text!r} is no list of positive row counts")
    return list(dict.fromkeys(rows))


def parse_variants(text: str) -> list[Variant]:
    """Return the variants that a list names; "all" and "none" are all and none of them.

    Raises:
        ValueError: there is no such variant.
    """
    if text in ("all", "none"):
        return list(VARIANTS.values()) if text == "all" else []
    names = [word.strip() for word in text.split(",") if word.strip()]
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"{name!r} is no variant; there are {', '.join(VARIANTS)}")
    return [VARIANTS[name] for name in names]


def weight_bytes(shape: Shape, variant: Variant) -> WeightBytes:
    """Return the bytes of one packed layer."""
    n, k = layout.round_up(shape.n, layout.PAD_N), layout.round_up(shape.k, layout.PAD_K)
    scales = n * layout.group_count(k, variant.group_size)
    return WeightBytes(
        codes=layout.qweight_bytes(n, k, variant.bits),
        scales=scales * variant.dtype.itemsize,
        zeros=scales if variant.has_zeros else 0,
    )


def moved_bytes(cell: Cell) -> int:
    """Return what one product must move: the weight, x and y."""
    rows = (cell.shape.k + cell.shape.n) * cell.m * cell.variant.dtype.itemsize
    return weight_bytes(cell.shape, cell.variant).total + rows


def copies_for(bytes_each: int) -> int:
    """Return how many copies of so many bytes a graph runs over."""
    return min(max(-(-FILL_BYTES // bytes_each), LEAST_COPIES), MOST_COPIES)


@dataclass(frozen=True)
class Floor:
    """No kernel that reads its weight once, by itself, is expected to be faster than this."""

    points: tuple[tuple[float, float], ...]
    """(MiB, microseconds) of reading, rising; straight lines between and beyond."""
    peak_tflops: float

    def read_us(self, count: float) -> float:
        """Return the microseconds that reading `count` bytes takes."""
        mib = count / MIB
        place = sum(size <= mib for size, _ in self.points[1:-1])
        (size0, us0), (size1, us1) = self.points[place : place + 2]
        return us0 + (us1 - us0) * (mib - size0) / (size1 - size0)

    def us(self, cell: Cell) -> float:
        """Return the microseconds of one product: reading or arithmetic, whichever is longer."""
        operations = 2 * cell.m * cell.shape.k * cell.shape.n
        return max(self.read_us(moved_bytes(cell)), operations / (self.peak_tflops * 1e6))


def reference_floor(path: Path = REFERENCE_FLOOR) -> Floor:
    """Return the floor that the project's targets were set with."""
    data: dict[str, Any] = json.loads(path.read_text())
    points = tuple((float(mib), float(us)) for mib, us in data["points_mib_us"])
    return Floor(points, float(data["peak_tflops"]))


def floor_sizes(cells: Iterable[Cell]) -> list[float]:
    """Return the MiB at which reading is measured: those of the reference, and beyond if needed."""
    sizes = [mib for mib, _ in reference_floor().points if mib > 0]
    largest = max((weight_bytes(cell.shape, cell.variant).total for cell in cells), default=0)
    if largest / MIB > sizes[-1]:
        sizes.append(math.ceil(largest / MIB))
    return sizes


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie, between two of them a mean."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return the median of microseconds and how far they spread."""
    return {
        "us": statistics.median(values),
        "p10": percentile(values, 0.1),
        "p90": percentile(values, 0.9),
        "replays": len(values),
    }


def geomean(values: Iterable[float]) -> float | None:
    """Return the geometric mean; None of nothing."""
    found = list(values)
    return statistics.geometric_mean(found) if found else None
