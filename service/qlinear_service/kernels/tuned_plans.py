"""Which measured plan is used for a product: tables of this GPU, then the planner.

A table of the cache folder wins over the shipped one. What does not fit is passed over: a table
never keeps a layer from being served, and nothing is measured here. Knows no torch.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from qlinear_service.dtypes import DType
from qlinear_service.kernels import layout
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.build_cuda import source_hash
from qlinear_service.kernels.cuda_abi import CudaDevice, CudaFlag, CudaPlan
from qlinear_service.kernels.plan_values import plan_of
from qlinear_service.kernels.planner import Planner
from qlinear_service.kernels.tuned_table import Entry, Form, Run, Table, TableError, bucket_of, read
from qlinear_service.log_values import event

__all__ = [
    "SHIPPED",
    "Found",
    "LayerPlans",
    "TunedPlans",
    "entries_for",
    "read_tables",
    "user_path",
]

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).resolve().parents[1] / "tuned"
"""The tables that come with the package, one file for each kind of GPU."""


def user_path(cache_dir: Path) -> Path:
    """Return where the table of this machine is kept."""
    return cache_dir / "tuned" / "plans.json"


def read_tables(cache_dir: Path | None, shipped: Path = SHIPPED) -> list[Table]:
    """Return the tables there are, those that win first; what is no table is logged and left out.

    Args:
        cache_dir: of the user; None has none. It may be absent.
        shipped: the folder of the package's tables.
    """
    paths = [] if cache_dir is None else [user_path(cache_dir)]
    tables = []
    for path in [*paths, *sorted(shipped.glob("*.json"))]:
        try:
            tables.append(read(path))
        except FileNotFoundError:
            continue
        except (OSError, TableError) as error:
            event(logger, logging.WARNING, "tuned_table_ignored", path=path, error=error)
    return tables


@dataclass(frozen=True, slots=True)
class Found:
    """An entry, and the run that it is from."""

    entry: Entry
    run: Run
    same_kernels: bool
    """Whether it was measured with kernels of these sources."""


def entries_for(
    tables: Iterable[Table], gpu: str, sm_count: int, cuda_driver: int | None
) -> dict[tuple[Form, int], Found]:
    """Return what the tables hold for a GPU, by form and bucket.

    Args:
        tables: those that win first.
        gpu: its name.
        sm_count: of the GPU: the same name is sold, and cut up, with several.
        cuda_driver: as in `Run`. Within a table the newest run of that driver wins; those of
            others, measured on the same GPU after all, fill what it lacks. None prefers none.
    """
    found: dict[tuple[Form, int], Found] = {}
    sources = ""
    for table in tables:
        runs = [run for run in table.runs if (run.gpu, run.sm_count) == (gpu, sm_count)]
        runs.sort(key=lambda run: (run.cuda_driver == cuda_driver, run.date), reverse=True)
        for run in runs:
            sources = sources or source_hash()
            for entry in run.entries:
                one = Found(entry, run, run.library == sources)
                found.setdefault((entry.form, entry.m), one)
    return found


_Weights = tuple[int, int, int, int, bool]
"""A form without its dtype: n and k as padded, bits, group size, zero points."""

_Entries = dict[tuple[str, int], Found]
"""Of such, by the dtype that is multiplied and the bucket of rows."""


class LayerPlans:
    """The measured plans of one form of weights: one look into a dict for each product."""

    def __init__(self, entries: _Entries, planner: Planner, device: CudaDevice) -> None:
        self._entries, self._planner, self._device = entries, planner, device
        self._known: dict[tuple[int, ...], CudaPlan | None] = {}

    def plan(self, params: LinearParams) -> CudaPlan | None:
        """Return the complete plan for a product; None: the planner's own.

        Args:
            params: of that product; where its data lie is not looked at.
        """
        key = params.m, params.x_dtype, params.scale_dtype, params.y_dtype, params.weights_fit
        if key in self._known:
            return self._known[key]
        bucket = bucket_of(params.m)
        if bucket is None or params.m < 1:
            return None
        found = self._entries.get((_multiplied_dtype(params).text, bucket))
        plan = None if found is None or found.entry.kept else self._checked(found.entry, params)
        self._known[key] = plan
        return plan

    def _checked(self, entry: Entry, params: LinearParams) -> CudaPlan | None:
        """Return the plan of an entry if the library takes it for these rows."""
        asked = LinearParams.from_buffer_copy(params)
        # Where the rows lie may change from call to call.
        asked.x, asked.x_row_stride, asked.y_row_stride = None, asked.k, asked.n
        try:
            plan = plan_of(entry.plan)
            fault = self._planner.complete(asked, self._device, plan)
        except (ValueError, TypeError) as error:
            fault = str(error)
        if fault:
            values = {"m": params.m, "form": entry.form, "fault": fault}
            event(logger, logging.DEBUG, "tuned_plan_ignored", **values)
            return None
        return plan


class TunedPlans:
    """The measured plans for one device.

    Args:
        tables: those that win first.
        planner: says what can run.
        device: the GPU.
        flags: of all launches. In batch-invariant mode no table is used: the order in which a row
            is summed may not depend on how many there are.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        planner: Planner,
        device: CudaDevice,
        flags: CudaFlag = CudaFlag.NONE,
    ) -> None:
        self._layers: dict[_Weights, LayerPlans] = {}
        self._entries: dict[_Weights, _Entries] = {}
        name = device.name.decode(errors="replace")
        if flags & CudaFlag.BATCH_INVARIANT:
            return
        driver = device.driver_version
        found = entries_for(tables, name, device.sm_count, driver)
        for (form, bucket), one in found.items():
            weights = form.n, form.k, form.bits, form.group_size, form.zeros
            self._entries.setdefault(weights, {})[form.dtype, bucket] = one
        for weights, entries in self._entries.items():
            self._layers[weights] = LayerPlans(entries, planner, device)
        if found:
            event(
                logger,
                logging.INFO,
                "tuned_plans",
                gpu=name,
                entries=len(found),
                other_driver=sum(one.run.cuda_driver != driver for one in found.values()),
                other_kernels=sum(not one.same_kernels for one in found.values()),
            )

    def of(self, params: LinearParams) -> LayerPlans | None:
        """Return the plans of layers like that of `params`; None: there are none."""
        return self._layers.get(_weights_of(params)) if self._layers else None

    def measured(self, params: LinearParams) -> Iterator[Found]:
        """Yield what was measured of layers like that of `params`, with x of its dtype."""
        dtype = _multiplied_dtype(params).text
        for (other, _), found in self._entries.get(_weights_of(params), {}).items():
            if other == dtype:
                yield found


def _multiplied_dtype(params: LinearParams) -> DType:
    """Return in which dtype x is multiplied: its own, or what float32 is rounded to."""
    x_dtype = DType(params.x_dtype)
    return DType(params.compute_dtype) if x_dtype is DType.F32 else x_dtype


def _weights_of(params: LinearParams) -> _Weights:
    """Return the form of a layer without the dtype, which is x's."""
    return (
        layout.round_up(params.n, layout.PAD_N),
        layout.round_up(params.k, layout.PAD_K),
        params.bits,
        params.group_size,
        params.zeros is not None,
    )
