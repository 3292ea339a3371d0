"""Batches quicker than a hand-over run on the event loop, all others on the engine's thread."""

import threading
import time

import pytest
import torch
from random_layers import random_layer
from running_server import quick_config

from qlinear.v1 import linear_pb2 as pb
from qlinear_service.dtypes import DType
from qlinear_service.kernels.backends import TorchKernels
from qlinear_service.kernels.packing import pack
from qlinear_service.layers import LayerRegistry, QuantizedLinear
from qlinear_service.loading import Loaded
from qlinear_service.roofline import Roofline
from qlinear_service.server import Server
from qlinear_service.wire import read_call

STREAMED_BYTES = 64 * 128 // 2 + 64 * 2
"""Codes of 4 bits and one float16 scale for each output feature."""


class WhereKernels(TorchKernels):
    """Remembers the thread of each computation."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.threads: list[threading.Thread] = []

    def linear(self, layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType) -> torch.Tensor:
        self.threads.append(threading.current_thread())
        return super().linear(layer, x, output_dtype)


def roofline(seconds_for_the_layer: float) -> Roofline:
    return Roofline(
        sizes_bytes=(1,),
        read_seconds=(seconds_for_the_layer / STREAMED_BYTES,),
        products_per_second=1e15,
    )


@pytest.mark.parametrize(
    ("name", "measured", "on_the_loop"),
    [
        ("cpu", roofline(90e-6), True),
        ("cpu", roofline(110e-6), False),
        ("cpu", None, False),
        ("torch", roofline(1e-6), False),  # dequantizes at each call: the floor says nothing
    ],
)
async def test_where_a_batch_runs(name: str, measured: Roofline | None, on_the_loop: bool) -> None:
    layer = pack(random_layer(n=64, k=128))
    assert layer.streamed_bytes == STREAMED_BYTES
    kernels = WhereKernels(name)
    server = Server(quick_config())
    loaded = Loaded(registry=LayerRegistry([layer]), kernels=kernels, roofline=measured)
    server._compose(loaded, time.perf_counter())
    serving = server._servicer._serving
    assert serving is not None
    x = pb.Tensor(dtype=pb.DTYPE_F16, shape=[1, 128], data=bytes(256))
    request = pb.MatMulRequest(layer="test/layer", x=x)
    checked = serving.check(read_call(request.SerializeToString()))
    await serving.transport.call(checked, deadline=None)
    await server.abandon()
    assert [thread is threading.main_thread() for thread in kernels.threads] == [on_the_loop]
