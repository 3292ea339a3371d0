"""Two GPUs as one: the bits of one device where they must be, exact products, a server over both.

On a machine with two GPUs: `make test-gpu`, or pytest on this file alone.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from gpu.loading import RecordingKernels
from gpu.problems import FEW_FORMS, Form, Problem, assert_same
from gpu.running import rounded
from gpu.serving import SAMPLE_MODEL, Server, series
from gpu.side_by_side import Pair, replicas, split_engine
from random_layers import unquantized_layer

from qlinear_client import Client
from qlinear_service.config import TRANSFERS
from qlinear_service.dtypes import DType
from qlinear_service.kernels.cuda_abi import Status
from qlinear_service.kernels.packing import pack
from qlinear_service.layers import QuantizedLinear
from qlinear_service.slots import Slab

SIZES = ((1,), (3, 1, 5), (17,), (64,), (200, 1, 100))
FORMS = [*FEW_FORMS, Form(permuted=True, group_size=32)]
N, K = 1003, 2048


@pytest.fixture(scope="module", autouse=True)
def _two_gpus(kernels: RecordingKernels) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


@pytest.fixture(scope="module")
def invariant_pair() -> Pair:
    return Pair(batch_invariant=True)


def problems(pair: Pair, *, exact: bool) -> list[Problem]:
    return [
        Problem(pair.kernels[0].device, N, K, form, exact=exact, seed=seed)
        for seed, form in enumerate(FORMS)
    ]


def named(problem: Problem, number: int) -> QuantizedLinear:
    spec = replace(problem.layer.spec, module=f"layer{number}")
    return replace(problem.layer, spec=spec)


@pytest.mark.parametrize("mode", TRANSFERS)
def test_a_split_layer_gives_the_exact_product(pair: Pair, mode: str) -> None:
    """Whatever the plans of the parts: sums of exact problems are the same in any order."""
    found = problems(pair, exact=True)
    layers = [named(problem, number) for number, problem in enumerate(found)]
    with split_engine(pair, layers, mode) as running:
        for layer, problem in zip(layers, found, strict=True):
            for sizes in SIZES:
                xs = [problem.x(m) for m in sizes]
                exact = rounded(problem.product(torch.cat(xs)), torch.float32)
                assert_same(running.now(layer.spec.name, *xs), exact.cpu())


@pytest.mark.parametrize("mode", TRANSFERS)
def test_a_split_layer_has_the_bits_of_one_device_in_batch_invariant_mode(
    invariant_pair: Pair, mode: str
) -> None:
    one = invariant_pair.kernels[0]
    found = problems(invariant_pair, exact=False)
    layers = [named(problem, number) for number, problem in enumerate(found)]
    with split_engine(invariant_pair, layers, mode) as running:
        for layer, problem in zip(layers, found, strict=True):
            for sizes in SIZES:
                xs = [problem.normal_x(m) for m in sizes]
                expected = one.linear(layer, torch.cat(xs), DType.F32).cpu()
                assert_same(running.now(layer.spec.name, *xs), expected)


def test_a_split_layer_has_the_same_bits_run_after_run(pair: Pair) -> None:
    (problem, *_) = problems(pair, exact=False)
    with split_engine(pair, [problem.layer]) as running:
        for m in (1, 9, 33, 300):
            x = problem.normal_x(m)
            first = running.now(problem.layer.spec.name, x)
            for _ in range(5):
                assert_same(running.now(problem.layer.spec.name, x), first)


def test_layers_that_are_not_quantized_stay_whole_and_have_the_bits_of_one_device(
    pair: Pair,
) -> None:
    layers = [
        pack(unquantized_layer(n=700, k=512, bias=True, module=f"plain{i}")) for i in range(9)
    ]
    with split_engine(pair, layers) as running, replicas(pair, layers) as alone:
        used = set()
        for layer in layers:
            x = torch.randn(5, 512, generator=torch.Generator().manual_seed(3)).half()
            y, result = asyncio.run(running.run(layer.spec.name, x))
            used.update(name for name, _ in result.launches)
            assert_same(y, alone.now(layer.spec.name, x))
        assert used == {"cuda:0", "cuda:1"}, "they lie on both"


def test_replicas_have_the_same_bits(pair: Pair) -> None:
    found = problems(pair, exact=False)
    layers = [named(problem, number) for number, problem in enumerate(found)]
    with replicas(pair, layers) as running:

        async def both(name: str, x: torch.Tensor) -> None:
            answers = await asyncio.gather(running.run(name, x), running.run(name, x))
            devices = {result.launches[0][0] for _, result in answers}
            assert devices == {"cuda:0", "cuda:1"}
            assert_same(answers[0][0], answers[1][0])

        for layer, problem in zip(layers, found, strict=True):
            for m in (1, 9, 33, 300):
                asyncio.run(both(layer.spec.name, problem.normal_x(m)))


def test_batches_in_flight_on_both_are_never_mixed_up(pair: Pair) -> None:
    found = problems(pair, exact=True)
    layers = [named(problem, number) for number, problem in enumerate(found)]
    with split_engine(pair, layers) as running:

        async def caller(place: int) -> None:
            for turn in range(40):
                number = (place + turn) % len(found)
                x = found[number].x(1 + (7 * turn + place) % 90)
                y, _ = await running.run(layers[number].spec.name, x)
                assert_same(y, rounded(found[number].product(x), torch.float32).cpu())

        async def run() -> None:
            await asyncio.gather(*map(caller, range(5)))

        asyncio.run(run())


def test_both_compute_at_the_same_time(pair: Pair) -> None:
    """And each takes less time than one device takes for all; printed, as time is no test."""
    problem = Problem(pair.kernels[0].device, 28672, 8192, exact=False)
    with split_engine(pair, [problem.layer]) as running, replicas(pair, [problem.layer]) as alone:
        for m in (1, 32, 128):
            x = problem.normal_x(m)
            for name, each in (("split", running), ("one", alone)):
                took = [asyncio.run(each.run(problem.layer.spec.name, x))[1] for _ in range(20)]
                best = min(result.kernel_nanoseconds for result in took)
                print(f"m={m} {name}: {best / 1e3:.1f} us, launches {took[-1].launches}")
                assert len(took[-1].launches) == (2 if name == "split" else 1)


def test_memory_that_both_have_registered_serves_either_until_both_let_go(pair: Pair) -> None:
    slab = Slab(capacity_bytes=1 << 20, largest_bytes=1 << 16)
    first, second = pair.streams.values()
    assert first.admit(slab.address, 1 << 20) == ""
    assert second.admit(slab.address, 1 << 20) == ""
    first.dismiss(slab.address)
    library = pair.kernels[0].library
    assert library.ql_cuda_unregister(slab.address, 0) == Status.BAD_DEVICE
    assert library.ql_cuda_register(slab.address, 1 << 20, 1) == Status.CUDA_ERROR, "still there"
    second.dismiss(slab.address)
    assert first.admit(slab.address, 1 << 20) == ""
    first.dismiss(slab.address)


def answers_of(*words: str) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return what a server makes of the same rows for every layer, and its metrics then."""
    found = {}
    with Server(SAMPLE_MODEL, "--measure-seconds", "0", *words) as server:
        with Client(server.target) as client:
            layers = client.list_layers()
            for layer in layers:
                draw = np.random.default_rng(layer.k)
                x = draw.standard_normal((7, layer.k)).astype(np.float16)
                found[layer.name] = client.matmul(layer.name, x)
            few = [layer.name for layer in layers if layer.k == layers[0].k][:3]
            draw = np.random.default_rng(layers[0].k)
            x = draw.standard_normal((7, layers[0].k)).astype(np.float16)
            for name, y in zip(few, client.matmul(few, x), strict=True):
                assert np.array_equal(y, found[name]), "a call for several layers"
        samples = server.scrape()
        server.terminate()
        code, log = server.end()
        assert code == 0, log
        assert "slab_not_registered" not in log
    return found, samples


@pytest.fixture(scope="module")
def of_one() -> dict[str, np.ndarray]:
    for needed in ("grpc_health", "grpc_reflection"):
        pytest.importorskip(needed, reason=f"the server needs {needed}: install its wheel")
    return answers_of("--device", "cuda:0", "--batch-invariant")[0]


@pytest.mark.parametrize("mode", ["split", "replicate"])
def test_a_server_on_both_answers_with_the_bits_of_a_server_on_one(
    of_one: dict[str, np.ndarray], mode: str
) -> None:
    words = ("--devices", "0,1", "--device-mode", mode, "--batch-invariant")
    found, samples = answers_of(*words)
    assert found.keys() == of_one.keys()
    for name, y in found.items():
        assert np.array_equal(y.view(np.uint16), of_one[name].view(np.uint16)), name
    weights = [series(samples, "qlinear_weight_bytes", device=f"cuda:{i}") for i in (0, 1)]
    assert min(weights) > 0
    assert abs(weights[0] - weights[1]) < 0.1 * max(weights)
    if mode == "split":
        busy = [
            sum(v for name, v in samples.items() if f'device="cuda:{i}"' in name and "busy" in name)
            for i in (0, 1)
        ]
        assert min(busy) > 0
