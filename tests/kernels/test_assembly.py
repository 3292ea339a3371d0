"""The compiled packer, and layers that come slab by slab: the bytes that torch makes of all."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from packed_files import assert_same
from random_layers import random_layer

from qlinear_service.kernels import build
from qlinear_service.kernels.assembly import assemble
from qlinear_service.kernels.backends import CpuKernels
from qlinear_service.kernels.packing import pack, pack_codes
from qlinear_service.layers import LogicalLayer


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("k", "n"), [(64, 16), (128, 64), (640, 208), (192, 4096)])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_compiled_packer_writes_the_same_bytes(bits: int, k: int, n: int, threads: int) -> None:
    library = build.build_cpu_library(build.default_cache_dir())
    kernels = CpuKernels(library, threads=threads)
    codes = torch.randint(0, 2**bits, (k, n), dtype=torch.uint8)
    assert torch.equal(kernels.pack_codes(codes, bits), pack_codes(codes, bits))
    # A view of some columns, as slabs are.
    wide = torch.randint(0, 2**bits, (k, n + 32), dtype=torch.uint8)[:, 16 : 16 + n]
    assert torch.equal(kernels.pack_codes(wide, bits), pack_codes(wide, bits))


@pytest.mark.parametrize("shape", [(65, 16), (64, 15)])
def test_the_compiled_packer_refuses_what_is_not_padded(shape: tuple[int, int]) -> None:
    kernels = CpuKernels(build.build_cpu_library(build.default_cache_dir()), threads=1)
    with pytest.raises(RuntimeError, match=r"pack k=.*: "):
        kernels.pack_codes(torch.zeros(shape, dtype=torch.uint8), 4)


@pytest.mark.parametrize("form", [{}, {"bits": 8, "symmetric": False, "permuted": True}])
@pytest.mark.parametrize("slab_bytes", [1, 1 << 14, 1 << 30])
def test_a_layer_assembled_from_slabs_is_the_layer(form: Any, slab_bytes: int) -> None:
    layer = random_layer(n=330, k=200, bias=True, **form)
    loads: list[tuple[int, int]] = []

    def load(begin: int, end: int) -> LogicalLayer:
        loads.append((begin, end))
        columns = {
            name: None if (tensor := getattr(layer, name)) is None else tensor[..., begin:end]
            for name in ("codes", "scales", "zeros", "bias")
        }
        return replace(layer, spec=replace(layer.spec, n=end - begin), **columns)

    assembled = assemble(layer.spec, load, slab_bytes=slab_bytes)
    assert_same(assembled, pack(layer))
    assert [begin for begin, _ in loads] == [0, *(end for _, end in loads[:-1])]
    assert len(loads) == {1: 6, 1 << 14: 6, 1 << 30: 1}[slab_bytes]
