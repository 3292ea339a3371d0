"""Layers as values: parts of a layer, and names that find one."""

import pytest
import torch
from random_layers import random_layer

from qlinear_service.errors import InvalidRequest, UnknownLayer
from qlinear_service.kernels import reference
from qlinear_service.kernels.packing import pack
from qlinear_service.layers import LayerRegistry, QuantizedLinear


@pytest.mark.parametrize(("begin", "end"), [(0, 64), (64, 128), (128, 150), (0, 150), (64, 150)])
@pytest.mark.parametrize("bits", [4, 8])
def test_features_of_a_layer_are_a_layer(begin: int, end: int, bits: int) -> None:
    layer = random_layer(
        n=150, k=200, bits=bits, group_size=32, symmetric=False, bias=True, permuted=True
    )
    part = pack(layer).features(begin, end)
    assert torch.equal(reference.dequantize(part), reference.dequantize(layer)[begin:end])
    x = torch.randn(3, 200).half()
    y = reference.linear(part, x, precision=torch.float64)
    assert torch.equal(y, reference.linear(layer, x, precision=torch.float64)[:, begin:end])


def named(model: str, module: str) -> QuantizedLinear:
    return pack(random_layer(n=64, k=128, model=model, module=module))


def test_names_find_layers() -> None:
    registry = LayerRegistry([named("a", "up"), named("b", "up"), named("b", "down.proj")])
    assert registry.models == ["a", "b"]
    assert registry.resolve("b/up").spec.name == "b/up"
    assert registry.resolve("down.proj").spec.name == "b/down.proj"
    with pytest.raises(InvalidRequest, match="ask for one of: a/up, b/up"):
        registry.resolve("up")
    with pytest.raises(UnknownLayer, match=r"no layer is called 'down.prj'; near .*down.proj"):
        registry.resolve("down.prj")
    with pytest.raises(UnknownLayer, match="ListLayers"):
        registry.resolve("x" * 10_000)
    with pytest.raises(ValueError, match="'a/up' is loaded twice"):
        registry.add(named("a", "up"))
