"""Every checkpoint of the collection served by one process on the CPU, each layer asked there."""

import shutil
import subprocess
import sys
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
import torch
from checkpoints import LOADED, PLAIN, VECTORS
from closeness import bound_of
from grpc_health.v1 import health_pb2, health_pb2_grpc

from qlinear_client import Client
from qlinear_service.checkpoints import PlainOptions, open_checkpoint
from qlinear_service.dtypes import DType

WAIT_SECONDS = 100


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of all of them, unquantized layers kept."""
    folder = tmp_path_factory.mktemp("models")
    for name in (*LOADED, *PLAIN):
        shutil.copytree(VECTORS / name, folder / name)
    words = ["serve", str(folder), "--unquantized", "keep", "--device", "cpu", "--port", "0"]
    log = folder.with_name("serve.log")
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "qlinear_service", *words, "--metrics-port", "-1"],
            stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on "), log.read_text()
    address = line.split()[-1]
    with grpc.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="readiness"), timeout=WAIT_SECONDS
        )
        serving = health_pb2.HealthCheckResponse.SERVING
        assert any(response.status == serving for response in watch), log.read_text()
    yield address
    process.terminate()
    process.communicate(timeout=WAIT_SECONDS)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", [*LOADED, *PLAIN])
def test_every_layer_answers_what_the_tool_computed(target: str, name: str) -> None:
    checkpoint = open_checkpoint(VECTORS / name, plain=PlainOptions(treatment="keep"))
    with Client(target) as client, np.load(VECTORS / name / "reference.npz") as stored:
        for spec in checkpoint.layers:
            if f"{spec.module}.x" not in stored:
                continue  # kept beside quantized layers: not in the tool's reference
            x = stored[f"{spec.module}.x"]
            key = "y_bias" if f"{spec.module}.y_bias" in stored else "y"
            expected = torch.from_numpy(stored[f"{spec.module}.{key}"])
            y = torch.from_numpy(client.matmul(f"{name}/{spec.module}", x)).double()
            layer = checkpoint.load(spec.module)
            bound = bound_of(layer, torch.from_numpy(x), expected, DType.F16)
            assert ((y - expected).abs() <= bound).all(), spec.module


def test_kept_layers_are_listed_as_not_quantized(target: str) -> None:
    with Client(target) as client:
        kept = {layer.name for layer in client.list_layers() if layer.bits == 16}
    assert "gptq-gptqmodel-v1-dynamic-mixed/model.layers.0.self_attn.o_proj" in kept
    assert "plain-fp32-n1000-k96/layer" in kept
    assert not any("q_proj" in name and "plain" not in name for name in kept)
