"""From a path to layers that are proven to compute rightly: load, build kernels, self-test.

Blocking work for the engine's thread; knows neither grpc nor queues.
"""

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from qlinear_service import models, probe
from qlinear_service.config import KernelConfig
from qlinear_service.errors import CheckpointError, ConfigError
from qlinear_service.kernels.backends import Kernels, load_kernels
from qlinear_service.layers import LayerRegistry
from qlinear_service.log_values import quoted
from qlinear_service.roofline import Roofline
from qlinear_service.selftest import run_self_test

__all__ = ["Loaded", "check_device", "load"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What the server needs to compute."""

    registry: LayerRegistry
    kernels: Kernels
    roofline: Roofline | None = None
    """What this machine was measured to do, where that was asked for."""


def check_device(config: KernelConfig) -> None:
    """Raise ConfigError if this version cannot compute on the device that is asked for."""
    if config.device != "cpu":
        raise ConfigError(
            f"device is {config.device}, and this version has no CUDA kernels; expected cpu"
        )


def load(path: Path, config: KernelConfig, stop: threading.Event) -> Loaded:
    """Return the layers under `path` and kernels that agree with the reference on each kind.

    Args:
        path: a packed file, a checkpoint folder, or a folder of several models.
        config: where and with what layers are computed.
        stop: set when nobody wants the result any more; looked at between layers and in builds.

    Raises:
        CheckpointError: a file cannot be read as what it claims to be, or there is no layer.
        BuildError: the kernels do not compile, or `stop` came first.
        SelfTestError: they compute wrongly.
    """
    check_device(config)
    sources = models.discover(path)
    # The reference, and the kernels where they hand work to torch, keep to the same bound.
    torch.set_num_threads(config.cpu_threads)
    kernels = load_kernels(
        cache_dir=config.cache_dir,
        threads=config.cpu_threads,
        torch_only=config.torch_only,
        stop=stop,
    )
    # Slow kernels that nobody asked for must be seen at any level.
    unwanted = kernels.name == "torch" and not config.torch_only
    level = logging.WARNING if unwanted else logging.INFO
    logger.log(level, "kernels name=%s description=%s", kernels.name, quoted(kernels.description))
    registry = LayerRegistry()
    for source in sources:
        started, loaded = time.perf_counter(), 0
        for layer in source.load_layers():
            if stop.is_set():
                return Loaded(registry=registry, kernels=kernels)
            registry.add(layer)
            loaded += 1
        seconds = time.perf_counter() - started
        logger.info("loaded model=%s layers=%d seconds=%.3f", quoted(source.name), loaded, seconds)
    if not len(registry):
        raise CheckpointError(path, "holds no quantized linear layer; there is nothing to serve")
    started = time.perf_counter()
    kinds = run_self_test(kernels, registry)
    logger.info("self_test kinds=%d seconds=%.3f", kinds, time.perf_counter() - started)
    return Loaded(registry=registry, kernels=kernels, roofline=_probe(kernels, config))


def _probe(kernels: Kernels, config: KernelConfig) -> Roofline:
    started = time.perf_counter()
    roofline = probe.measure(kernels, threads=config.cpu_threads)
    logger.info(
        "probe peak_bytes_per_second=%.3g products_per_second=%.3g seconds=%.3f",
        roofline.peak_bytes_per_second,
        roofline.products_per_second,
        time.perf_counter() - started,
    )
    return roofline
