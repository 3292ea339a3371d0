"""Layers on two GPUs that a library pretends to have: memory, self-test, costs, registration."""

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

import gpus_together
from fake_cuda import HostKernels
from several_gpus import LAYERS
from two_gpus import (
    GIB,
    NAMES,
    ROOFLINE,
    HostPlace,
    config_of,
    load,
    pretended_gpus,  # noqa: F401 - a fixture
)

from qlinear_service.config import TRANSFERS, KernelConfig
from qlinear_service.errors import OutOfDeviceMemory, SelfTestError
from qlinear_service.gpu import loading as gpu_loading
from qlinear_service.gpu import places
from qlinear_service.gpu.places import GpuPlaces
from qlinear_service.gpu.ways import PINNED
from qlinear_service.kernels.cuda_abi import Status
from qlinear_service.layers import QuantizedLinear


@pytest.mark.parametrize("transfers", TRANSFERS)
def test_what_batches_cost_is_measured_on_all_that_compute_them(
    gpus: HostKernels, tmp_path: Path, transfers: str
) -> None:
    more = {"transfers": transfers, "measure_seconds": 1, "cache_dir": tmp_path / "cache"}
    loaded = load(tmp_path, "split", **more)
    assert int(gpus.library.fake_row_scatters()) == 0, "another device may still read"
    assert loaded.curves.keys() == {layer.spec.shape for layer in LAYERS.values()}
    (kept,) = (tmp_path / "cache/curves").glob("*.json")
    assert "split over 2" in kept.read_text()
    load(tmp_path, "replicate", **more)
    assert len(list((tmp_path / "cache/curves").glob("*.json"))) == 2, "those are others"
    assert (int(gpus.library.fake_row_scatters()) > 0) == (transfers != PINNED)


def test_a_split_reads_at_the_rate_of_all(gpus: HostKernels, tmp_path: Path) -> None:
    roofline = load(tmp_path, "split").roofline
    assert roofline is not None
    assert roofline.peak_bytes_per_second == 2 * ROOFLINE.peak_bytes_per_second
    assert roofline.products_per_second == 2 * ROOFLINE.products_per_second


def test_what_a_gpu_must_hold_is_what_belongs_there(gpus: HostKernels) -> None:
    layer = LAYERS["test/up"]
    specs = [layer.spec] * 100_000  # 2 GiB in all
    needed = sum(map(gpu_loading.device_bytes, specs))
    half = needed // 2 + needed // 8 + gpu_loading.RESERVE_BYTES
    HostPlace.free_bytes = dict.fromkeys(NAMES, half)
    GpuPlaces(config_of("split"), threading.Event()).check_fits(specs)
    with pytest.raises(OutOfDeviceMemory, match="on cuda:0"):
        GpuPlaces(config_of("replicate"), threading.Event()).check_fits(specs)
    HostPlace.free_bytes = {"cuda:0": half, "cuda:1": GIB}
    with pytest.raises(OutOfDeviceMemory, match="on cuda:1"):
        GpuPlaces(config_of("split"), threading.Event()).check_fits(specs)


@pytest.mark.parametrize("mode", ["split", "replicate"])
def test_a_gpu_that_computes_wrongly_is_found_whichever_it_is(
    gpus: HostKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    right = HostKernels.linear

    def wrong(self: HostKernels, layer: QuantizedLinear, *words: Any, **more: Any) -> torch.Tensor:
        y = right(self, layer, *words, **more)
        if self.runtime.ordinal == 1 and layer.spec.name == "test/up":
            y[-1, -1] += 100
        return y

    monkeypatch.setattr(HostKernels, "linear", wrong)
    with pytest.raises(SelfTestError, match="test/up"):
        load(tmp_path, mode)


def test_columns_in_the_wrong_place_are_found_before_anything_is_served(
    gpus: HostKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = places.SplitDevice.results

    def rolled(self: Any, *words: Any) -> memoryview:
        flat = bytearray(right(self, *words))
        return memoryview(flat[2:] + flat[:2])

    monkeypatch.setattr(places.SplitDevice, "results", rolled)
    with pytest.raises(SelfTestError, match="columns of cpu"):
        load(tmp_path, "split")


async def test_memory_is_let_go_of_when_all_have(gpus: HostKernels) -> None:
    made = GpuPlaces(config_of("split"), threading.Event())
    memory = torch.zeros(4096, dtype=torch.uint8)
    assert made.device is not None
    assert made.device.admit(memory.data_ptr(), 4096) == ""
    assert int(gpus.library.fake_registered()) == 4096
    made.device.dismiss(memory.data_ptr())
    assert int(gpus.library.fake_registered()) == 0
    gpus.library.fake_fail_registers(1)
    assert "registering" in made.device.admit(memory.data_ptr(), 4096)
    assert int(gpus.library.fake_registered()) == 0


def test_who_has_registered_what_is_counted(gpus: HostKernels) -> None:
    """By the code of the real library, csrc/cuda/registered.h."""
    library, memory = gpus.library, torch.zeros(64, dtype=torch.uint8)
    address = memory.data_ptr()

    def statuses(*calls: tuple[str, int, int]) -> list[int]:
        found = []
        for what, nbytes, device in calls:
            words = (address, nbytes, device) if what == "register" else (address, device)
            found.append(int(getattr(library, f"ql_cuda_{what}")(*words)))
        return found

    assert statuses(("unregister", 0, 0)) == [Status.CUDA_ERROR], "nobody has it"
    assert statuses(("register", 64, 0), ("register", 64, 1)) == [Status.OK, Status.OK]
    assert statuses(("register", 64, 1)) == [Status.CUDA_ERROR], "twice"
    assert statuses(("register", 32, 2)) == [Status.CUDA_ERROR], "another area"
    assert statuses(("unregister", 0, 0), ("unregister", 0, 0)) == [Status.OK, Status.BAD_DEVICE]
    assert int(library.fake_registered()) == 64, "one still has it"
    assert statuses(("unregister", 0, 1), ("unregister", 0, 1)) == [Status.OK, Status.CUDA_ERROR]
    assert int(library.fake_registered()) == 0
    assert statuses(("register", 32, 1), ("unregister", 0, 1)) == [Status.OK, Status.OK]


def test_the_benchmark_measures_every_way(gpus: HostKernels) -> None:
    words = ["--shapes", "128x256", "--rows", "1", "16", "--seconds", "0.05"]
    args = gpus_together.parser().parse_args(words)

    def place_of(config: KernelConfig) -> Any:
        kind = GpuPlaces if len(config.device_names) > 1 else HostPlace
        return kind(config, threading.Event())

    found = gpus_together.figures_of(args, place_of)
    assert [(one["rows"], one["mode"]) for one in found] == [
        (rows, mode) for rows in (1, 16) for mode in ("one", "split", "replicate")
    ]
    for one in found:
        assert 0 < one["kernel_seconds"] < 1
        assert 0 < one["batch_seconds"] < 1
        assert one["rows_per_second"] == one["rows"] * one["batches_per_second"] > 0
        assert gpus_together.row_of(one, found[0])[0].startswith("128x256 m=")
    assert int(gpus.library.fake_registered()) == 0
