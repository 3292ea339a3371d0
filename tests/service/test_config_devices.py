"""Which devices the configuration may name, what they do, and what brings calls to them."""

from typing import Any

import pytest

from qlinear_service import cli
from qlinear_service.commands import serve
from qlinear_service.config import BatchingConfig, KernelConfig, ServiceConfig
from qlinear_service.config_sources import resolve
from qlinear_service.errors import ConfigError
from qlinear_service.gpu import choice
from qlinear_service.kernels.driver import Driver


def test_cuda_is_refused_and_never_replaced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It refuses to come after grpc, which other tests of this process have imported.
    monkeypatch.setattr(serve, "tune_process", lambda environ: None)
    assert cli.main(["serve", "anything", "--device", "cuda:0"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "device is cuda:0, and there is no NVIDIA driver" in captured.err
    assert "serve with --device cpu" in captured.err


@pytest.mark.parametrize(
    ("kernels", "device"),
    [({"device": "cpu"}, "cpu"), ({"devices": "0,1"}, "cuda:0 and cuda:1")],
)
def test_who_asks_for_the_native_dispatcher_without_one_gpu_is_told_so(
    kernels: dict[str, Any], device: str
) -> None:
    held = KernelConfig(**kernels)
    with pytest.raises(ConfigError, match=rf"'native', which is for one GPU, .* is {device}; exp"):
        ServiceConfig(kernels=held, batching=BatchingConfig(dispatcher="native"))
    for dispatcher in ("auto", "python"):
        ServiceConfig(kernels=held, batching=BatchingConfig(dispatcher=dispatcher))
    native = BatchingConfig(dispatcher="native")
    for one in (KernelConfig(device="cuda:1"), KernelConfig(devices="1"), KernelConfig()):
        ServiceConfig(kernels=one, batching=native)


@pytest.mark.parametrize(
    ("device", "end"),
    [
        ("auto", "cuda:N (device is auto: the driver shows no GPU)"),
        ("cpu", "cuda:N (from: flag --dispatcher)"),
    ],
)
def test_a_native_dispatcher_without_a_gpu_ends_the_start_before_anything_is_loaded(
    device: str,
    end: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "tune_process", lambda environ: None)
    monkeypatch.setattr(choice, "ask_driver", Driver)
    words = ["serve", "there/is/none", "--port", "0", "--dispatcher", "native", "--device"]
    assert cli.main([*words, device]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("qlinear serve: dispatcher: is 'native', which is for one GPU, and ")
    assert line.endswith(end)


def test_ways_across_the_bus_are_three() -> None:
    assert KernelConfig().transfers == "auto"
    assert resolve(flags={"transfers": "pinned"}).config.kernels.transfers == "pinned"
    with pytest.raises(ConfigError, match="transfers: is 'rdma'; expected auto, slab, pinned"):
        resolve(flags={"transfers": "rdma"})


def test_several_devices_are_named_by_number() -> None:
    config = KernelConfig(devices=" 0, 3")
    assert config.cuda_ordinals == (0, 3)
    assert config.device_names == ("cuda:0", "cuda:3")
    assert config.device_mode == "split"
    assert KernelConfig(devices="2", device="cuda:2").device_names == ("cuda:2",)
    given = resolve(flags={"devices": "1,0", "device_mode": "replicate"}).config.kernels
    assert (given.cuda_ordinals, given.device_mode) == ((1, 0), "replicate")
    assert resolve(environ={"QLINEAR_DEVICES": "0,1"}).config.kernels.cuda_ordinals == (0, 1)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"devices": "0,one"}, "devices: is '0,one'; expected numbers of GPUs, as in 0,1"),
        ({"devices": "0,"}, "expected numbers of GPUs"),
        ({"devices": "cuda:0"}, "expected numbers of GPUs"),
        ({"devices": "1,1"}, "devices: is '1,1'; expected each GPU once"),
        ({"devices": ",".join(map(str, range(17)))}, "16 of them at most"),
        ({"devices": "0,1", "device": "cpu"}, "is '0,1', and device is cpu; give one of both"),
        ({"devices": "0,1", "device": "cuda:1"}, "and device is cuda:1; give one of both"),
        ({"devices": "0,1", "torch_only": True}, "that is for the CPU, not cuda:0, cuda:1"),
        ({"device_mode": "copy"}, "device_mode: is 'copy'; expected split, replicate"),
    ],
)
def test_devices_that_make_no_sense_are_one_sentence(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        KernelConfig(**options)
    assert problem in str(refused.value)
