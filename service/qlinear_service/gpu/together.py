"""Layers of the same calls as one: which batches may be, and what each of them took of the whole.

Query, key and value, or gate and up, read the same rows of x. Knows batches and layers; no device
and no thread.
"""

import hashlib
import itertools
from collections.abc import Callable, Sequence

from qlinear_service.batching import Batch
from qlinear_service.gpu.job import Job, result_bytes
from qlinear_service.gpu.ways import TABLE_ROWS, Way
from qlinear_service.layers import LayerRegistry, QuantizedLinear
from qlinear_service.results import BatchResult

__all__ = ["TOGETHER", "Companions", "shared_out", "split"]

TOGETHER = Way(gather=True, scatter=False)
"""How they travel: over an x that several layers read nobody may write."""

MOST_RESULT_BYTES = 4 << 20
"""Of all layers together. They cross the bus when all are computed: of more bytes than that, those
of one layer had better go out beside the next one's product. Chosen, not measured: some 80 us of
an H200's bus. It bounds what a stage grows to, too."""


class Companions:
    """Says which batches may go as one.

    Args:
        registry: the loaded layers, where they compute; their orders are read once, here.
        can_gather: says whether the device can gather rows of x for a layer.
    """

    def __init__(
        self, registry: LayerRegistry, can_gather: Callable[[QuantizedLinear], bool]
    ) -> None:
        self._registry, self._can_gather = registry, can_gather
        self._orders = {layer: _order_of(layer) for layer in registry}

    def may(self, batches: Sequence[Batch]) -> bool:
        """Say whether all these batches multiply the same x by layers that one chain takes.

        The same rows of the same slots, and not more than are gathered; quantized layers that want
        their columns in the same order and float32 rounded to the same dtype.
        """
        first = batches[0]
        if len(batches) < 2 or first.rows > TABLE_ROWS:
            return False
        if not all(_same_rows(first, other) for other in batches[1:]):
            return False
        layers = [self._registry.resolve(batch.key.layer) for batch in batches]
        if not all(layer.spec.quantized for layer in layers) or len(set(map(self._x, layers))) > 1:
            return False
        sizes = map(result_bytes, batches, layers)
        return self._can_gather(layers[0]) and sum(sizes) <= MOST_RESULT_BYTES

    def _x(self, layer: QuantizedLinear) -> tuple[object, ...]:
        """Return what layers must have in common to read the same x."""
        return layer.spec.k, layer.spec.compute_dtype, self._orders[layer]


def _order_of(layer: QuantizedLinear) -> bytes:
    """Return the same for layers that want columns of x in the same order."""
    if layer.k_permutation is None:
        return b""
    return hashlib.blake2b(layer.k_permutation.cpu().numpy().tobytes()).digest()


def _same_rows(first: Batch, other: Batch) -> bool:
    return (
        first.key.x_dtype == other.key.x_dtype
        and len(first.parts) == len(other.parts)
        and all(
            (one.item.slot, one.start, one.rows) == (two.item.slot, two.start, two.rows)
            for one, two in zip(first.parts, other.parts, strict=True)
        )
    )


def split(flat: memoryview, job: Job) -> list[list[memoryview]]:
    """Return the result rows of each part of each batch, of what a job has left, as views."""
    found = []
    batches = [(job.batch, job.layer), *job.others]
    for (batch, layer), begin in zip(batches, job.y_begins, strict=True):
        row_bytes = layer.spec.n * batch.key.output_dtype.itemsize
        counts = (part.rows for part in batch.parts)
        ends = itertools.accumulate(counts, initial=0)
        cuts = itertools.pairwise(begin + row_bytes * end for end in ends)
        found.append([flat[start:end] for start, end in cuts])
    return found


def shared_out(
    job: Job,
    rows: Sequence[Sequence[memoryview]],
    nanoseconds: int,
    transfers: Sequence[tuple[str, int]],
) -> list[BatchResult]:
    """Return the result of each batch.

    One pair of events is around all products: each layer has the share of its bytes in theirs,
    which is what small batches take time for. The copies were made once, and go with the first.

    Args:
        job: of all of them.
        rows: the result rows of each part of each.
        nanoseconds: of all products.
        transfers: label `direction` and nanoseconds of each copy.
    """
    layers = [job.layer, *(layer for _, layer in job.others)]
    sums = list(itertools.accumulate((layer.streamed_bytes for layer in layers), initial=0))
    ends = [nanoseconds * nbytes // sums[-1] for nbytes in sums]
    shares = [end - begin for begin, end in itertools.pairwise(ends)]
    return [
        BatchResult(pieces, share, transfers if place == 0 else ())
        for place, (pieces, share) in enumerate(zip(rows, shares, strict=True))
    ]
