"""The measures at start: their form, their order of size, and what they cost."""

import ctypes
import itertools
import time

import pytest
import torch

from qlinear_service import probe
from qlinear_service.kernels import build
from qlinear_service.kernels.backends import CpuKernels, Kernels, TorchKernels

CPU = CpuKernels(build.build_cpu_library(build.default_cache_dir()), threads=2)
MIB = 1 << 20


@pytest.mark.parametrize("kernels", [CPU, TorchKernels()], ids=["cpu", "torch"])
def test_measures_six_sizes_and_products(kernels: Kernels) -> None:
    started = time.perf_counter()
    roofline = probe.measure(kernels, threads=2)
    # A tenth of this where nothing else runs.
    assert time.perf_counter() - started < 5
    assert len(roofline.sizes_bytes) == len(roofline.read_seconds) == 6
    assert list(roofline.sizes_bytes) == sorted(set(roofline.sizes_bytes))
    # No machine is outside of these; a read that was optimised away would be.
    assert 1e8 < roofline.peak_bytes_per_second < 1e14
    assert 1e6 < roofline.products_per_second < 1e14
    largest = roofline.sizes_bytes[-1] / roofline.read_seconds[-1]
    assert largest <= roofline.peak_bytes_per_second


def test_torch_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    TorchKernels().read(torch.ones(64, dtype=torch.int64), passes=1, threads=before + 1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("last_cache", [0, 8 * MIB, 32 * MIB, 500 * MIB])
def test_sizes_go_past_the_last_cache_as_far_as_is_affordable(last_cache: int) -> None:
    sizes = probe.sizes_to_read(last_cache)
    assert len(sizes) == 6
    assert sizes[0] == MIB // 2
    assert min(2 * last_cache, 256 * MIB) <= sizes[-1] <= 256 * MIB
    ratios = [large / small for small, large in itertools.pairwise(sizes)]
    assert max(ratios) < 1.02 * min(ratios)


@pytest.mark.parametrize("words", [1, 63, 64, 65, 511, 513, 4096, 12345])
@pytest.mark.parametrize("threads", [-1, 1, 2, 7])
def test_the_read_reads_every_word_once_a_pass(words: int, threads: int) -> None:
    library = ctypes.CDLL(str(build.build_cpu_library(build.default_cache_dir())))
    library.ql_cpu_read_probe.restype = ctypes.c_uint64
    draw = torch.Generator().manual_seed(words)
    buffer = torch.randint(-(1 << 62), 1 << 62, (words + 1,), generator=draw)
    # The word behind the end counts for nothing.
    address, nbytes = ctypes.c_void_p(buffer.data_ptr()), ctypes.c_int64(8 * words)
    total = library.ql_cpu_read_probe(address, nbytes, 3, threads)
    assert total == 3 * int(buffer[:words].sum()) % (1 << 64)
    assert library.ql_cpu_read_probe(None, nbytes, 1, threads) == 0
    assert library.ql_cpu_read_probe(address, ctypes.c_int64(0), 1, threads) == 0
