"""`--batch-invariant` from end to end: the same call, the same bits, alone and in any company."""

import asyncio
import random
from pathlib import Path

import pytest
import torch
from random_layers import random_layer, unquantized_layer
from serve_process import serve_process

from qlinear_client import AsyncClient
from qlinear_service.kernels.packing import pack
from qlinear_service.packed_writer import write_packed

LAYERS = [
    random_layer(n=100, k=600, bias=True, module="four", seed=1),
    random_layer(n=100, k=600, bits=8, permuted=True, module="eight", seed=2),
    unquantized_layer(n=100, k=600, module="sixteen", seed=3),
]
NAMES = [layer.spec.module for layer in LAYERS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "test.safetensors"
    write_packed(path, "test", map(pack, LAYERS), specs=[layer.spec for layer in LAYERS])
    return path


async def calls_that_change(target: str, flood: int) -> tuple[set[str], bool]:
    """Return the layers whose answers have other bits in company, and what the server says."""
    draw = random.Random(0)
    async with AsyncClient(target, timeout=60) as client:
        said = (await client.server_info()).batch_invariant
        changed: set[str] = set()
        for name in NAMES:
            pool = torch.randn(700, 600, generator=torch.Generator().manual_seed(4)).half()
            sizes = [draw.choice((1, 1, 2, 5, 20, 100)) for _ in range(flood)]
            parts = [(first := draw.randrange(600), first + size) for size in sizes]
            alone = [await client.matmul(name, pool[a:b]) for a, b in parts]
            # The answers of a first large call gather the others behind it.
            large, *together = await asyncio.gather(
                client.matmul(name, pool), *(client.matmul(name, pool[a:b]) for a, b in parts)
            )
            for (a, b), one, other in zip(parts, alone, together, strict=True):
                if not (torch.equal(one, other) and torch.equal(large[a:b], one)):
                    changed.add(name)
        return changed, said


@pytest.mark.parametrize("kernels", ["--torch-only", "--no-torch-only"])
def test_a_call_has_the_same_bits_in_any_company(model: Path, kernels: str) -> None:
    with serve_process(model, "--batch-invariant", kernels) as target:
        changed, said = asyncio.run(calls_that_change(target, 60))
    assert not changed
    assert said


def test_without_the_mode_bits_change_and_the_server_promises_nothing(model: Path) -> None:
    """Else the test above would show nothing."""
    with serve_process(model, "--torch-only") as target:
        changed, said = asyncio.run(calls_that_change(target, 60))
    assert changed
    assert not said
