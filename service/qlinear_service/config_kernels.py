"""Knobs of what computes: which devices, with what kernels, from which cache folder.

A group of `config.py`, which declares the others. Owners: loading, kernels.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from qlinear_service.config_fields import Group, OptionError, computed_option, one_of, option
from qlinear_service.kernels.build import default_cache_dir

__all__ = ["AUTO", "DEVICE_MODES", "SPLIT", "TRANSFERS", "UNQUANTIZED", "KernelConfig"]

MOST_THREADS = 1024  # more than the cores of any machine; tens of thousands crash OpenMP
AUTO = "auto"
UNQUANTIZED = (AUTO, "skip", "keep", "rtn", "mse")
"""What may become of the layers that a checkpoint holds unquantized."""

TRANSFERS = ("auto", "slab", "pinned")
"""How rows may get to a GPU and back."""

DEVICE_MODES = ("split", "replicate")
"""What several GPUs may do."""

SPLIT = DEVICE_MODES[0]
MOST_DEVICES = 16


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), MOST_THREADS)
    return min(os.cpu_count() or 1, MOST_THREADS)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig(Group):
    """Where and with what layers are computed. Owners: loading, kernels."""

    device: str = option(
        AUTO, "Device that computes: cpu, cuda:N, or auto: cuda:0 if it can be used, else cpu."
    )
    devices: str = option(
        "",
        "GPUs of one kind that compute together, by number, as in 0,1; instead of --device.",
        unit="N,N",
    )
    device_mode: str = option(
        SPLIT,
        "What several GPUs do: split, each holds a range of every layer's output features and "
        "computes it for every batch; replicate, each holds all, and a batch goes to the one that "
        "has the fewest.",
        unit=one_of(DEVICE_MODES),
    )
    batch_invariant: bool = option(
        False, "No bit of a row's result depends on the other rows of its batch; may be slower."
    )
    cpu_threads: int = computed_option(
        _usable_cores,
        "Most threads of one CPU computation; default: all usable cores.",
        minimum=1,
        maximum=MOST_THREADS,
    )
    cache_dir: Path = computed_option(  # noqa: RUF009 - a field specifier
        default_cache_dir, "Folder of built kernels and measured costs; may be read-only or absent."
    )
    measure_seconds: float = option(
        10.0,
        "Longest time at the first start to measure what batches of each shape cost; kept in the "
        "cache folder. 0 measures nothing.",
        minimum=0,
        maximum=600,
    )
    transfers: str = option(
        "auto",
        "How rows get to a GPU and back: slab, kernels read and write where calls lie; pinned, "
        "copies through pinned buffers; auto, whichever is faster for the batch.",
        unit=one_of(TRANSFERS),
    )
    unquantized: str = option(
        AUTO,
        "What becomes of layers that a checkpoint holds unquantized: skip; keep: multiply through "
        "torch; rtn or mse: quantize them here to 4 bits; auto: rtn if no layer is quantized, "
        "else skip.",
        unit=one_of(UNQUANTIZED),
    )
    torch_only: bool = option(
        False, "Compute with plain torch and build no kernels: right, and slow."
    )

    def __post_init__(self) -> None:
        Group.__post_init__(self)
        kind, colon, index = self.device.partition(":")
        is_cuda = kind == "cuda" and colon and index.isdecimal() and len(index) < 4
        if self.device not in ("cpu", AUTO) and not is_cuda:
            problem = f"is {self.device!r}; expected cpu or cuda:N, as in cuda:0, or {AUTO}"
            raise OptionError("device", problem)
        self._check_devices()
        lists = (
            ("unquantized", self.unquantized, UNQUANTIZED),
            ("transfers", self.transfers, TRANSFERS),
            ("device_mode", self.device_mode, DEVICE_MODES),
        )
        for name, value, known in lists:
            if value not in known:
                raise OptionError(name, f"is {value!r}; expected {', '.join(known)}")
        if self.torch_only and (is_cuda or self.devices):
            name = ", ".join(self.device_names)
            raise OptionError("torch_only", f"is true, and that is for the CPU, not {name}")

    def _check_devices(self) -> None:
        if not self.devices:
            return
        words = [word.strip() for word in self.devices.split(",")]
        given = f"is {self.devices!r}"
        if not all(word.isdecimal() and len(word) < 4 for word in words):
            raise OptionError("devices", f"{given}; expected numbers of GPUs, as in 0,1")
        if len({int(word) for word in words}) < len(words) or len(words) > MOST_DEVICES:
            rule = f"expected each GPU once, and {MOST_DEVICES} of them at most"
            raise OptionError("devices", f"{given}; {rule}")
        if self.device not in (AUTO, self.device_names[0]):
            raise OptionError("devices", f"{given}, and device is {self.device}; give one of both")

    @property
    def cuda_ordinals(self) -> tuple[int, ...]:
        """Which GPUs are asked for; none for the CPU and for auto."""
        if self.devices:
            return tuple(int(word) for word in self.devices.split(","))
        return (int(self.device.partition(":")[2]),) if self.device.startswith("cuda") else ()

    @property
    def device_names(self) -> tuple[str, ...]:
        """What computes, as in metrics, logs and answers; one name unless there are several."""
        return tuple(f"cuda:{ordinal}" for ordinal in self.cuda_ordinals) or (self.device,)
