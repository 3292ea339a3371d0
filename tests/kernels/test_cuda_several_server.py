"""A server over two GPUs that a library pretends to have: bits, metrics, and a loss."""

import asyncio
import sys
from pathlib import Path

import grpc
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from fake_cuda import HostKernels
from measured_layers import Samples, scrape, value
from running_server import WAIT_SECONDS, quick_config
from several_gpus import LAYERS, K, draw
from two_gpus import (
    NAMES,
    ROOFLINE,
    SPLIT_NAMES,
    config_of,
    expected,
    load,
    matmul,
    pretended_gpus,  # noqa: F401 - a fixture
    serving,
)

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc
from qlinear_service.server import Server


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("mode", ["split", "replicate"])
async def test_a_server_on_two_gpus_answers_with_the_bits_of_one(
    gpus: HostKernels, tmp_path: Path, mode: str, invariant: bool
) -> None:
    """Loaded from a file, tested, and asked over the wire, for one layer and for several."""
    loaded = load(tmp_path, mode, batch_invariant=invariant)
    async with serving(loaded, mode) as (_, stub):
        assert int(gpus.library.fake_registered()) > 0, "kernels see the slab"

        async def caller(seed: int) -> None:
            for turn in range(4):
                x = draw(10 * seed + turn, 1 + seed % 4)
                names = SPLIT_NAMES[(seed + turn) % 4 :] if turn % 2 else (SPLIT_NAMES[seed % 4],)
                for name, y in zip(names, await matmul(stub, x, *names), strict=True):
                    assert torch.equal(y, expected(name, x)), name

        await asyncio.gather(*map(caller, range(12)))
        x = draw(1, 3)
        (plain,) = await matmul(stub, x, "test/plain")  # alone: torch minds the other rows
        assert torch.equal(plain, expected("test/plain", x))
    assert int(gpus.library.fake_registered()) == 0


def kernel_of(samples: Samples, name: str, layer: str, device: str) -> float:
    shape = LAYERS[layer].spec.shape
    return value(samples, f"qlinear_kernel_{name}", shape=shape, m="8", device=device)


async def test_each_device_of_a_split_has_its_own_metrics(
    gpus: HostKernels, tmp_path: Path
) -> None:
    loaded = load(tmp_path, "split")
    async with serving(loaded, "split") as (server, stub):
        await matmul(stub, draw(1, 3), "test/up")
        samples = scrape(server.metrics)
        layer = LAYERS["test/up"]
        halves = (128, 192)
        for device, n in zip(NAMES, halves, strict=True):
            part = layer.features(0, n)
            nbytes = part.streamed_bytes + 3 * 2 * (K + n)
            assert kernel_of(samples, "bytes_total", "test/up", device) == nbytes
            assert kernel_of(samples, "busy_seconds_total", "test/up", device) > 0
            peak = value(samples, "qlinear_hbm_peak_bytes_per_second", device=device)
            assert peak == ROOFLINE.peak_bytes_per_second
            watts = value(samples, "qlinear_gpu_power_watts", device=device)
            assert watts == 100.0 + NAMES.index(device)
            tuned = {"shape": layer.spec.shape, "m": "8", "device": device}
            assert value(samples, "qlinear_tuned_bandwidth_bytes_per_second", **tuned) == 1e12
        weights = [value(samples, "qlinear_weight_bytes", device=device) for device in NAMES]
        assert sum(weights) == sum(one.packed_bytes for one in LAYERS.values()) + (
            K * 4  # the order of its columns lies on both
        )
        assert value(samples, "qlinear_batch_rows_count", shape=layer.spec.shape) == 1
        (live,) = server.metrics.live()
        assert (live.launches, live.batches, live.rows) == (2, 1.0, 3.0)
        listed = await stub.ListLayers(pb.ListLayersRequest())
        where = {one.name: one.device for one in listed.layers}
        assert where["test/up"] == "cuda:0,cuda:1"
        assert where["test/plain"] in NAMES
        assert where["test/narrow"] in NAMES
        info = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.device == "cuda:0,cuda:1"
        build = {"version": info.version, "device": "cuda:0,cuda:1", "kernels": "cuda"}
        assert value(samples, "qlinear_build_info", **build) == 1


async def test_each_replica_has_its_own_metrics(gpus: HostKernels, tmp_path: Path) -> None:
    loaded = load(tmp_path, "replicate")
    async with serving(loaded, "replicate") as (server, stub):
        await asyncio.gather(*(matmul(stub, draw(i, 3), "test/up", "test/wide") for i in range(9)))
        samples = scrape(server.metrics)
        counted = 0.0
        for device in NAMES:
            weights = value(samples, "qlinear_weight_bytes", device=device)
            assert weights == sum(one.packed_bytes for one in LAYERS.values())
            for (name, labels), found in samples.items():
                if name == "qlinear_kernel_seconds_count" and ("device", device) in labels:
                    counted += found
        rows = [v for (name, _), v in samples.items() if name == "qlinear_batch_rows_count"]
        assert counted == sum(rows) > 0
        listed = await stub.ListLayers(pb.ListLayersRequest())
        assert {one.device for one in listed.layers} == {"cuda:0,cuda:1"}
    assert loaded.roofline == ROOFLINE, "a replica reads all of a layer"


async def test_a_device_that_does_not_answer_ends_all(gpus: HostKernels, tmp_path: Path) -> None:
    loaded = load(tmp_path, "split")
    server = Server(quick_config(kernels=config_of("split")))
    port = await server.bind()
    await server.load(lambda stop: loaded)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.QuantizedLinearStub(channel)
        await matmul(stub, draw(1, 2), "test/up")
        gpus.library.fake_lose()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await matmul(stub, draw(1, 2), "test/up")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert server.batch_loop is not None
    with pytest.raises(Exception, match="is lost"):
        await asyncio.wait_for(server.batch_loop, WAIT_SECONDS)
    assert await server.abandon()
