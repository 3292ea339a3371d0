"""What tables say of loaded layers, on its way from the place where they are to the server."""

import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from qlinear_service import loading
from qlinear_service.config import KernelConfig
from qlinear_service.layers import QuantizedLinear

SAMPLE = Path(__file__).parents[2] / "examples/models/all-MiniLM-L6-v2"


def test_measured_bandwidths_of_the_loaded_layers_are_handed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = KernelConfig(device="cpu", torch_only=True)
    monkeypatch.setattr(loading.HostPlace, "self_test", lambda self, layers: 0)
    assert loading.load(SAMPLE, config, threading.Event()).tuned_bandwidths == ()

    def measured(
        self: loading.HostPlace, layers: Iterable[QuantizedLinear]
    ) -> Iterable[tuple[str, int, float]]:
        return ((layer.spec.name, 8, 1.0) for layer in layers)

    monkeypatch.setattr(loading.HostPlace, "tuned_bandwidths", measured)
    found = loading.load(SAMPLE, config, threading.Event())
    assert found.tuned_bandwidths == tuple((one.spec.name, 8, 1.0) for one in found.registry)
    assert len(found.tuned_bandwidths) > 6
