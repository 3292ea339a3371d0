"""A real server process on the GPU, with the library that these tests run with."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.request import urlopen

import torch
from gpu.loading import library_path

from qlinear_service.dtypes import DType
from qlinear_service.gpu.made_up import made_up_layer
from qlinear_service.layers import QuantizedLinear
from qlinear_service.packed_writer import write_packed

ROOT = Path(__file__).resolve().parents[2]
SAMPLE_MODEL = ROOT / "examples/models/all-MiniLM-L6-v2"
START_SECONDS = 100
STOP_SECONDS = 40

MAIN = """
import contextlib, json, pathlib, sys
library, profile = (sys.argv.pop(1) for _ in range(2))
from qlinear_service.gpu import choice, loading
library = pathlib.Path(library)
choice.find_cuda_library = lambda *words, **more: (library, "")
loading.cuda_library = lambda *words, **more: contextlib.nullcontext(library)
from qlinear_service.cli import main
if not profile:
    sys.exit(main(sys.argv[1:]))
import torch
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
    code = main(sys.argv[1:])
products = [event for event in profiled.events() if "cuda::linear_" in event.name]
products.sort(key=lambda event: event.time_range.start)
times = [event.self_device_time_total / 1e6 for event in products]
pathlib.Path(profile).write_text(json.dumps(times))
sys.exit(code)
"""
"""The command line, handed the library of these tests: the cache of a user is not theirs. A profile
is the seconds of every product, in order, as NVIDIA's profiling interface measures them."""

BIG_N, BIG_K = 28672, 8192
BIG_MODULES = ("a", "b", "c")
"""117 MiB of codes each: three in turn find nothing of themselves in the second cache."""


def big_layer(module: str, device: torch.device) -> QuantizedLinear:
    return made_up_layer(
        n=BIG_N, k=BIG_K, bits=4, group_size=128, symmetric=True, scale_dtype=DType.F16,
        device=device, model="big", module=module,
    )  # fmt: skip


def write_models(folder: Path, device: torch.device) -> dict[str, QuantizedLinear]:
    """Put the sample model and the big one into `folder`; return the big layers by name."""
    (folder / SAMPLE_MODEL.name).symlink_to(SAMPLE_MODEL)
    on_host = []
    layers = {}
    for number, module in enumerate(BIG_MODULES):
        layer = big_layer(module, device)
        layer.qweight.bitwise_xor_(number)  # or all would be the same
        layers[layer.spec.name] = layer
        on_host.append(moved(layer, torch.device("cpu")))
    specs = [layer.spec for layer in on_host]
    write_packed(folder / "big.safetensors", "big", on_host, specs=specs)
    return layers


def moved(layer: QuantizedLinear, device: torch.device) -> QuantizedLinear:
    return QuantizedLinear(
        spec=layer.spec, qweight=layer.qweight.to(device), scales=layer.scales.to(device)
    )


class Server:
    """One server process; use it as a context manager.

    Args:
        path: what it serves.
        words: flags.
        profile: where the profile of its products is written at its end, if it is asked to end.
    """

    def __init__(self, path: Path, *words: str, profile: Path | None = None) -> None:
        paths = [str(ROOT / name) for name in ("proto", "service", "client", ".")]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("QLINEAR_")}
        inherited = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [inherited])])
        own = (str(library_path()), "" if profile is None else str(profile))
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with this object
        ports = ["--port", "0", "--metrics-port", "0", "--drain-delay-seconds", "0.2"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *own, "serve", str(path), *ports, *words],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
        )
        self.target = self.metrics = ""

    def __enter__(self) -> "Server":
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("metrics on "):
                self.metrics = line.split()[-1]
            if line.startswith("ready on "):
                self.target = line.split()[-1]
                return self
        raise AssertionError(f"the server did not start: {self.end()}")

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait(STOP_SECONDS)

    def end(self) -> tuple[int, str]:
        """Wait for its end; return the exit code and what it has logged."""
        code = self.process.wait(START_SECONDS)
        return code, self.logged()

    def logged(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def scrape(self) -> dict[str, float]:
        """Return the value of each series, named as in the exposition."""
        with urlopen(f"http://{self.metrics}/metrics", timeout=20) as got:
            text = got.read().decode()
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}


def series(samples: dict[str, float], name: str, **labels: str) -> float:
    """Return the value of the one series of that name with these labels, 0 if there is none."""
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    for full, value in samples.items():
        head, _, inside = full.partition("{")
        if head == name and wanted <= set(re.findall(r'\w+="[^"]*"', inside)):
            return value
    return 0.0
