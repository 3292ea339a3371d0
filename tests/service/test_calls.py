"""What unary calls and calls on a stream share."""

import pytest
from measured_layers import Spec, metrics_of
from random_layers import random_layer

from qlinear.v1 import linear_pb2 as pb
from qlinear_service.calls import NOTHING, Serving
from qlinear_service.config import LimitsConfig
from qlinear_service.kernels.packing import pack
from qlinear_service.layers import LayerRegistry
from qlinear_service.wire import read_call


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_outcomes_as_layers_or_no_answer_at_all(count: int) -> None:
    layers = [pack(random_layer(n=8, k=64, model="m", module=name)) for name in ("a", "b")]
    serving = Serving(
        registry=LayerRegistry(layers),
        transport=None,  # type: ignore[arg-type]
        limits=LimitsConfig(),
        metrics=metrics_of(Spec("a", n=8)),
    )
    x = pb.Tensor(dtype=pb.DTYPE_F16, shape=(0, 64))
    request = pb.MatMulRequest(layers=["m/a", "m/b"], x=x)
    checked = serving.check(read_call(request.SerializeToString()))
    raw = b"".join(serving.encode(checked, [NOTHING] * 2, timed_since=None))
    assert [tuple(y.shape) for y in pb.MatMulResponse.FromString(raw).y] == [(0, 8)] * 2
    with pytest.raises(ValueError, match="zip"):
        serving.encode(checked, [NOTHING] * count, timed_since=None)
