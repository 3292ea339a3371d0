"""A server process on the GPU: right answers to many clients, metrics, full memory, drain."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from gpu.loading import RecordingKernels
from gpu.profiling import profiled_seconds
from gpu.serving import BIG_K, BIG_N, SAMPLE_MODEL, Server, series, write_models

from qlinear_client import AsyncClient, CallError, Client
from qlinear_service.gpu.direct import TIMED_EACH
from qlinear_service.layers import QuantizedLinear
from qlinear_service.models import open_model
from qlinear_service.selftest import SLAB_FEATURES, compare_features

SHAPE = f"k{BIG_K}_n{BIG_N}_b4_g128"
CUDA = "cuda:0"


class Served(NamedTuple):
    """A running server and its layers, on the GPU."""

    server: Server
    big: dict[str, QuantizedLinear]
    sample: dict[str, QuantizedLinear]


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory, kernels: RecordingKernels
) -> tuple[Path, dict[str, QuantizedLinear]]:
    for needed in ("grpc_health", "grpc_reflection"):
        pytest.importorskip(needed, reason=f"the server needs {needed}: install its wheel")
    folder = tmp_path_factory.mktemp("models")
    return folder, write_models(folder, kernels.device)


@pytest.fixture(scope="module")
def served(
    models: tuple[Path, dict[str, QuantizedLinear]], kernels: RecordingKernels
) -> Iterator[Served]:
    sample = {
        layer.spec.name: kernels.to_device(layer)
        for layer in open_model(SAMPLE_MODEL).load_layers()
    }
    with Server(models[0], "--device", CUDA) as server:
        yield Served(server, models[1], sample)


def compare(layer: QuantizedLinear, x: np.ndarray, y: np.ndarray) -> None:
    """Compare every element of y with the reference, within rounding."""
    device = layer.qweight.device
    rows, results = torch.from_numpy(x.copy()).to(device), torch.from_numpy(y.copy()).to(device)
    assert results.shape == (len(x), layer.spec.n)
    for begin in range(0, layer.spec.n, SLAB_FEATURES):
        end = min(begin + SLAB_FEATURES, layer.spec.n)
        compare_features("the server", layer, rows, results, begin=begin, end=end)


def activations(seed: int, rows: int, k: int, dtype: type = np.float16) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, k)).astype(dtype)


@pytest.mark.parametrize("transport", ["unary", "stream"])
def test_the_sample_model_is_right_for_many_clients(served: Served, transport: str) -> None:
    names = list(served.sample)
    answers: list[tuple[str, np.ndarray, np.ndarray]] = []

    def client(seed: int) -> None:
        with Client(served.server.target, transport=transport) as own:
            for turn in range(6):
                name = names[(seed * 7 + turn * 5) % len(names)]
                dtype = (np.float16, np.float32)[turn % 2]
                x = activations(seed * 100 + turn, 1 + seed % 20, served.sample[name].spec.k, dtype)
                answers.append((name, x, own.matmul(name, x)))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(client, range(16)))
    assert len(answers) == 96
    for name, x, y in answers:
        compare(served.sample[name], x, y)


def test_a_big_layer_is_right_for_many_calls_in_flight(served: Served) -> None:
    names = list(served.big)

    async def calls() -> list[tuple[str, np.ndarray, np.ndarray]]:
        async with AsyncClient(served.server.target) as client:

            async def call(seed: int) -> tuple[str, np.ndarray, np.ndarray]:
                name, x = names[seed % 3], activations(seed, 1 + seed % 17, BIG_K)
                return name, x, await client.matmul(name, x)

            return await asyncio.gather(*map(call, range(48)))

    for name in names:
        found = [answer for answer in asyncio.run(calls()) if answer[0] == name]
        xs, ys = (np.concatenate([answer[place] for answer in found]) for place in (1, 2))
        compare(served.big[name], xs, ys)


def test_the_metrics_are_those_of_the_device(served: Served, kernels: RecordingKernels) -> None:
    """One caller for each layer, 16 rows a call: every batch is one call.

    Of batches that follow each other closely few are timed; the others count with their time.
    """
    rows, turns = 16, 150
    labels = {"shape": SHAPE, "m": "16", "device": CUDA}
    before = served.server.scrape()

    def caller(name: str) -> None:
        x = activations(1, rows, BIG_K)
        with Client(served.server.target, transport="unary") as client:
            for _ in range(turns):
                client.matmul(name, x)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(caller, served.big))
    after = served.server.scrape()

    def grown(name: str) -> float:
        return series(after, name, **labels) - series(before, name, **labels)

    launches = turns * len(served.big)
    layer = next(iter(served.big.values()))
    stored = [layer.qweight, layer.scales]
    weights = sum(tensor.numel() * tensor.element_size() for tensor in stored)
    nbytes = weights + rows * 2 * (BIG_K + BIG_N)
    timed = grown("qlinear_kernel_seconds_count")
    assert launches // TIMED_EACH <= timed <= launches
    assert grown("qlinear_kernel_bytes_total") == launches * nbytes
    busy = grown("qlinear_kernel_busy_seconds_total")
    assert busy > 0
    measured = nbytes * launches / busy
    peak = series(after, "qlinear_hbm_peak_bytes_per_second", device=CUDA)
    gauge = series(after, "qlinear_hbm_bandwidth_bytes_per_second", **labels)
    profiled = nbytes / profiled_seconds(kernels, list(served.big.values()), rows)
    text = (
        f"counters {measured:.4g}, gauge {gauge:.4g}, peak {peak:.4g}, profiled {profiled:.4g} B/s"
    )
    print(text)
    assert 1e11 < peak < 2e13, text
    assert 0 < gauge <= 1.1 * peak, text
    # An event pair also holds the start of the kernel, some 6 us more than that of an empty one.
    assert 0.85 <= measured / profiled <= 1.1, text
    assert 0 < series(after, "qlinear_roofline_ratio", **labels) <= 1.15, text
    # What the dispatcher sends itself is never gathered or scattered by the host.
    for direction in ("slot", "to_device", "from_device"):
        name = "qlinear_transfer_seconds_count"
        assert series(after, name, direction=direction) >= launches, direction
    assert series(after, "qlinear_weight_bytes", device=CUDA) > 3 * weights
    assert series(after, "qlinear_gpu_clock_hertz", device=CUDA) > 1e8
    assert series(after, "qlinear_gpu_power_watts", device=CUDA) > 10
    assert 5 < series(after, "qlinear_gpu_temperature_celsius", device=CUDA) < 110
    assert series(after, "qlinear_build_info", device=CUDA, kernels="cuda") == 1


def test_it_says_which_device_serves_and_tests_it_before(served: Served) -> None:
    log = served.server.logged()
    assert "event=device name=cuda:0" in log
    order = [log.index(f"event={event} ") for event in ("kernels", "loaded", "self_test", "ready")]
    assert order == sorted(order)
    with Client(served.server.target) as client:
        assert client.server_info().device == CUDA


def test_layers_that_do_not_fit_are_one_line_and_exit_1(
    models: tuple[Path, dict[str, QuantizedLinear]], kernels: RecordingKernels
) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(kernels.device)
    room = 7 << 28  # 1.75 GiB: enough for the start of a process, not for these layers beside it
    occupied = torch.empty(free - room, dtype=torch.uint8, device=kernels.device)
    server = Server(models[0], "--device", CUDA, "--log-level", "error")
    code, log = server.end()
    del occupied
    torch.cuda.empty_cache()
    assert code == 1, log
    lines = log.strip().splitlines()
    assert len(lines) == 1, log
    assert lines[0].startswith("qlinear serve: "), log
    assert CUDA in lines[0], log


def test_zz_a_drain_under_load_loses_nothing(served: Served) -> None:
    """Last, as it ends the server of this module."""
    name, layer = next(iter(served.sample.items()))
    x = activations(5, 3, layer.spec.k)
    answered = []
    begun = threading.Event()

    def client(_: int) -> str:
        with Client(served.server.target, transport="unary", max_retries=0, timeout=30) as own:
            while True:
                try:
                    y = own.matmul(name, x)
                except CallError as error:
                    return str(error)
                answered.append(y)
                begun.set()

    with ThreadPoolExecutor(8) as pool:
        ends = pool.map(client, range(8))
        assert begun.wait(30)
        served.server.terminate()
        texts = list(ends)
    code, log = served.server.end()
    assert code == 0, log
    assert "level=ERROR" not in log
    assert all("shutting down" in text or "onnect" in text for text in texts), texts
    for y in (*answered[:5], *answered[-5:]):
        compare(layer, x, y)
