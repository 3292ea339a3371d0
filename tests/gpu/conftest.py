"""Fixtures of the GPU tests; all of them are skipped without a GPU or a library for it."""

import pytest
import torch
from gpu import loading
from gpu.loading import RecordingKernels

from qlinear_service.kernels import build
from qlinear_service.kernels.backends import CpuKernels

THIS_FOLDER = "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == THIS_FOLDER:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def kernels() -> RecordingKernels:
    """The kernels as they serve."""
    try:
        return loading.open_kernels()
    except loading.Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def invariant(kernels: RecordingKernels) -> RecordingKernels:
    """The kernels in batch-invariant mode."""
    return loading.open_kernels(batch_invariant=True)


@pytest.fixture(scope="session")
def device(kernels: RecordingKernels) -> torch.device:
    return kernels.device


@pytest.fixture(scope="session")
def cpu(kernels: RecordingKernels) -> CpuKernels:
    """The CPU kernels, to compare with."""
    try:
        with build.cpu_library(build.default_cache_dir()) as path:
            return CpuKernels(path, threads=4)
    except build.ToolMissing as missing:
        pytest.skip(str(missing))
