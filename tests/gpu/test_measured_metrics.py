"""Seconds and bandwidth that a server on the GPU shows, beside a measurement of another kind.

The server takes the time between two events around each launch; here it is NVIDIA's profiling
interface that measures it, of the same traffic: a product that runs beside the copies of other
batches takes another time than one that runs alone. Profiling makes launches slower, so what is
compared comes from two servers, one of which is profiled.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from gpu.loading import RecordingKernels
from gpu.profiling import profiled_seconds
from gpu.serving import Server, moved, series

from qlinear_client import Client
from qlinear_service.dtypes import DType
from qlinear_service.gpu.direct import TIMED_EACH
from qlinear_service.gpu.made_up import made_up_layer
from qlinear_service.layers import LayerSpec, QuantizedLinear
from qlinear_service.packed_writer import write_packed

Series: TypeAlias = dict[str, float]

CUDA = "cuda:0"
ROWS = 16
TURNS = 150


def layers_of(n: int, k: int, count: int, device: torch.device) -> list[QuantizedLinear]:
    """Layers that differ, together several times the second cache."""
    found = []
    for number in range(count):
        layer = made_up_layer(
            n=n, k=k, bits=4, group_size=128, symmetric=True, scale_dtype=DType.F16,
            device=device, model="big", module=f"l{number}",
        )  # fmt: skip
        layer.qweight.bitwise_xor_(number)
        found.append(layer)
    return found


def grown_by_traffic(server: Server, specs: list[LayerSpec]) -> tuple[Series, Series]:
    """Call each layer from one caller, so that no batch has rows of two calls; scrape around it."""
    before = server.scrape()

    def caller(spec: LayerSpec) -> None:
        x = np.random.default_rng(1).standard_normal((ROWS, spec.k)).astype(np.float16)
        with Client(server.target, transport="unary") as client:
            for _ in range(TURNS):
                client.matmul(spec.name, x)

    with ThreadPoolExecutor(len(specs)) as pool:
        list(pool.map(caller, specs))
    return before, server.scrape()


def profiled_traffic(folder: Path, specs: list[LayerSpec]) -> tuple[float, float]:
    """Return the seconds of a launch as the profiler measures them, and as that server shows."""
    profile = folder / "profile.json"
    with Server(folder / "big.safetensors", "--device", CUDA, profile=profile) as server:
        before, after = grown_by_traffic(server, specs)
        server.terminate()
        code, log = server.end()
        assert code == 0, log
    launches = TURNS * len(specs)
    seconds = json.loads(profile.read_text())[-launches:]
    assert len(seconds) == launches, log
    labels = {"shape": specs[0].shape, "m": "16", "device": CUDA}
    busy = "qlinear_kernel_busy_seconds_total"
    shown = (series(after, busy, **labels) - series(before, busy, **labels)) / launches
    return sum(seconds) / launches, shown


@pytest.mark.parametrize(("n", "k", "count"), [(8192, 8192, 8), (28672, 4096, 5), (28672, 8192, 3)])
def test_seconds_and_bandwidth_are_within_a_tenth(
    n: int, k: int, count: int, kernels: RecordingKernels, tmp_path: Path
) -> None:
    """Layers of 32, 56 and 112 MiB of codes; bytes exactly."""
    layers = layers_of(n, k, count, kernels.device)
    on_host = [moved(layer, torch.device("cpu")) for layer in layers]
    specs = [layer.spec for layer in on_host]
    write_packed(tmp_path / "big.safetensors", "big", on_host, specs=specs)
    stored = sum(one.numel() * one.element_size() for one in (layers[0].qweight, layers[0].scales))
    assert layers[0].qweight.numel() * layers[0].qweight.element_size() >= 32 << 20
    nbytes = stored + ROWS * 2 * (k + n)
    labels = {"shape": specs[0].shape, "m": "16", "device": CUDA}
    with Server(tmp_path / "big.safetensors", "--device", CUDA) as server:
        before, after = grown_by_traffic(server, specs)
        pair = re.search(r"event_pair_nanoseconds=(\d+)", server.logged())

    def grown(name: str) -> float:
        return series(after, name, **labels) - series(before, name, **labels)

    launches = TURNS * count
    # Of batches that follow each other closely one in so many is timed; others count with its time.
    timed = grown("qlinear_kernel_seconds_count")
    assert launches // TIMED_EACH <= timed <= launches
    assert grown("qlinear_kernel_bytes_total") == launches * nbytes
    shown = grown("qlinear_kernel_busy_seconds_total") / launches
    assert grown("qlinear_kernel_seconds_sum") / timed == pytest.approx(shown, rel=0.1)
    gauge = series(after, "qlinear_hbm_bandwidth_bytes_per_second", **labels)
    own, shown_profiled = profiled_traffic(tmp_path, specs)
    alone = profiled_seconds(kernels, layers, ROWS)
    text = (
        f"{n} x {k}: shown {shown * 1e6:.2f} us, profiled {own * 1e6:.2f} us ({shown / own:.3f}); "
        f"shown while profiled {shown_profiled * 1e6:.2f} us, profiled alone {alone * 1e6:.2f} us; "
        f"gauge {gauge / 1e12:.3f} TB/s, profiled {nbytes / own / 1e12:.3f} TB/s; "
        f"pair {pair[1] if pair else '?'} ns"
    )
    print(text)
    assert 0.9 <= shown / own <= 1.1, text
    assert 0.9 <= gauge / (nbytes / own) <= 1.1, text
