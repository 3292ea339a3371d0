"""Tables of measured plans: what is in one, reading, merging and writing it.

A table is a JSON file of runs; each run is one tuning of one GPU, with where its figures come from.
Knows no GPU and no torch; which plans are used is decided in tuned_plans.py. docs/tuning.md
describes the file.
"""

import json
import tempfile
from bisect import bisect_left
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from qlinear_service.dtypes import DType
from qlinear_service.errors import QlinearError
from qlinear_service.kernels import layout
from qlinear_service.publish import publish

__all__ = ["BUCKETS", "Entry", "Form", "Run", "Table", "TableError", "bucket_of", "read", "write"]

FORMAT, VERSION = "qlinear tuned plans", 1

BUCKETS = (1, 8, 16, 32, 64, 128, 192, 256, 512)
"""Most rows of each bucket: where tiles end. Between two of these a product does the same work with
the same tiles; a single row stands alone, since most of decoding is that. Beyond the last one the
arithmetic decides, not the plan, and the planner is left alone."""


class TableError(QlinearError):
    """A file that is no table of plans."""


def bucket_of(m: int) -> int | None:
    """Return the bucket of `m` rows; None beyond the last."""
    place = bisect_left(BUCKETS, m)
    return BUCKETS[place] if place < len(BUCKETS) else None


@dataclass(frozen=True, slots=True)
class Form:
    """What layers have in common of which one is tuned for all."""

    n: int
    """Output features, padded."""
    k: int
    """Input features, padded."""
    bits: int
    group_size: int
    zeros: bool
    """Whether there are zero points."""
    dtype: str
    """What is multiplied, "float16" or "bfloat16": kernels differ by it."""

    @classmethod
    def of(cls, *, n: int, k: int, bits: int, group_size: int, zeros: bool, dtype: DType) -> "Form":
        """Return the form of a layer with these logical sizes."""
        n_padded, k_padded = layout.round_up(n, layout.PAD_N), layout.round_up(k, layout.PAD_K)
        return cls(n_padded, k_padded, bits, group_size, zeros, dtype.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The plan for one form and bucket, and what it was measured to take."""

    form: Form
    m: int
    """Most rows of the bucket; so many were measured."""
    plan: dict[str, int]
    """By the names of `plan_values.GEOMETRY`."""
    kept: bool
    """Nothing was faster than the planner's own plan: the planner is followed, and `plan` is what
    it took when this was measured."""
    us: float
    """Microseconds of `plan`, weights cold: the median of several replays."""
    planner_us: float
    """The same of the planner's own plan in the same run."""
    tried: int = 0
    """Plans that were timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One tuning of one GPU: where its entries come from."""

    gpu: str
    """As the driver names it, e.g. "NVIDIA H200"."""
    sm_count: int
    cuda_driver: int
    """The newest CUDA that the driver runs, 1000 * major + 10 * minor: what the library can ask."""
    driver: str = ""
    """The driver's own version, e.g. "580.159.04", if nvidia-smi told it."""
    library: str = ""
    """Hash of the sources that the kernels were built from."""
    commit: str = ""
    version: str = ""
    """Of qlinear."""
    date: str = ""
    """ISO 8601."""
    command: str = ""
    method: str = ""
    entries: tuple[Entry, ...] = ()

    @property
    def machine(self) -> tuple[str, int, int]:
        """GPU, multiprocessors and driver: what an entry of it replaces is of the same."""
        return self.gpu, self.sm_count, self.cuda_driver


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The content of one file."""

    runs: tuple[Run, ...] = ()
    about: str = ""
    """One sentence for people."""

    def with_run(self, new: Run) -> "Table":
        """Return this table with a run more, without the entries that it replaces."""
        places = {(entry.form, entry.m) for entry in new.entries}
        kept = []
        for run in self.runs:
            if run.machine == new.machine:
                left = tuple(e for e in run.entries if (e.form, e.m) not in places)
                run = replace(run, entries=left)
            if run.entries:
                kept.append(run)
        return replace(self, runs=(*kept, new) if new.entries else tuple(kept))


def read(path: Path) -> Table:
    """Return the table in a file.

    Raises:
        TableError: the file is no table, or one of another version.
        OSError: it cannot be read.
    """
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT or data["version"] != VERSION:
            raise ValueError(f"format {data['format']!r} version {data['version']!r}")
        runs = tuple(_run(each) for each in data["runs"])
        return Table(runs=runs, about=str(data.get("about", "")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TableError(
            f"{path} is no table of plans ({error}); expected {FORMAT!r} version {VERSION}, as "
            "`qlinear bench tune` writes it: remove the file, or name another"
        ) from None


def write(path: Path, table: Table) -> None:
    """Write a table; whoever reads meanwhile sees the old one or the new one, whole.

    Raises:
        OSError: the file cannot be written.
    """
    data = {"format": FORMAT, "version": VERSION, "about": table.about, "runs": []}
    data["runs"] = [asdict(run) for run in table.runs]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tuned-", dir=path.parent) as folder:
        written = Path(folder) / path.name
        written.write_text(json.dumps(data, indent=1) + "\n")
        publish(written, path)


def _run(data: dict[str, Any]) -> Run:
    values = _checked(Run, data, skip="entries")
    return Run(**values, entries=tuple(_entry(each) for each in data["entries"]))


def _entry(data: dict[str, Any]) -> Entry:
    values = _checked(Entry, {**data, "form": None}, skip="form")
    form, plan = Form(**_checked(Form, data["form"])), values["plan"]
    if values["m"] not in BUCKETS:
        raise ValueError(f"m is {values['m']}; expected one of {BUCKETS}")
    if not values["us"] > 0 or not values["planner_us"] > 0:
        raise ValueError(f"times of {form} must be positive")
    if not all(isinstance(name, str) and type(value) is int for name, value in plan.items()):
        raise ValueError(f"plan is {plan}; expected names and whole numbers")
    return Entry(form=form, **values)


_KINDS: dict[str, tuple[type, ...]] = {"float": (int, float), "dict[str, int]": (dict,)}
_KINDS |= {"int": (int,), "bool": (bool,), "str": (str,)}


def _checked(kind: type[Any], data: dict[str, Any], skip: str = "") -> dict[str, Any]:
    """Return the fields of `data` without `skip`, each of its type, none unknown."""
    known = {field.name: field for field in fields(kind)}
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ValueError(f"unknown: {', '.join(unknown)}")
    values = {name: value for name, value in data.items() if name != skip}
    for name, value in values.items():
        wanted = str(getattr(known[name].type, "__name__", known[name].type))
        wanted = "dict[str, int]" if wanted == "dict" else wanted
        if type(value) not in _KINDS[wanted]:
            raise ValueError(f"{name} is {value!r}; expected {wanted}")
    return values
