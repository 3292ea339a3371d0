"""A library and a torch.cuda that pretend to be a GPU's, and dispatchers over them."""

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from dispatch_bench import Make, dispatch_benches
from fake_cuda import HostKernels, build_fake, pretend_streams


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library; each module has its own, as it remembers what it was told."""
    return build_fake(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, library: Path) -> Iterator[HostKernels]:
    pretend_streams(monkeypatch)
    made = HostKernels(library)
    made.library.fake_reset()
    yield made
    made.library.fake_reset()


@pytest.fixture
async def make(kernels: HostKernels) -> AsyncIterator[Make]:
    async with dispatch_benches(kernels) as made:
        yield made
