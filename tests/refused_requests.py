"""Requests that break the contract, each with its status and words, and limits to run into."""

import grpc
import torch
from running_server import K

from qlinear.v1 import linear_pb2 as pb
from qlinear_service.config import LimitsConfig

Code = grpc.StatusCode
X = torch.ones(2, K).half()
DATA = X.view(torch.uint8).numpy().tobytes()


def tensor(shape: tuple[int, ...], data: bytes, dtype: int = 1) -> pb.Tensor:
    return pb.Tensor(dtype=dtype, shape=shape, data=data)


GOOD = tensor((2, K), DATA)
REFUSED: dict[str, tuple[pb.MatMulRequest, grpc.StatusCode, str]] = {
    "neither": (pb.MatMulRequest(x=GOOD), Code.INVALID_ARGUMENT, "neither layer nor layers"),
    "both": (
        pb.MatMulRequest(layer="up", layers=["up"], x=GOOD),
        Code.INVALID_ARGUMENT,
        "set one of the two",
    ),
    "no x": (pb.MatMulRequest(layer="up"), Code.INVALID_ARGUMENT, "x is missing"),
    "unknown": (pb.MatMulRequest(layer="one/upp", x=GOOD), Code.NOT_FOUND, "one/up"),
    "unknown among several": (
        pb.MatMulRequest(layers=["one/up", "one/none"], x=GOOD),
        Code.NOT_FOUND,
        "'one/none'",
    ),
    "ambiguous": (
        pb.MatMulRequest(layer="down", x=GOOD),
        Code.INVALID_ARGUMENT,
        "one/down, two/down",
    ),
    "two k": (
        pb.MatMulRequest(layers=["one/up", "two/wide"], x=GOOD),
        Code.INVALID_ARGUMENT,
        "k = 96 and 64",
    ),
    "k": (pb.MatMulRequest(layer="two/wide", x=GOOD), Code.INVALID_ARGUMENT, "expected [..., 64]"),
    "dtype": (
        pb.MatMulRequest(layer="up", x=tensor((2, K), DATA, 9)),
        Code.INVALID_ARGUMENT,
        "x.dtype is 9",
    ),
    "output dtype": (
        pb.MatMulRequest(layer="up", output_dtype=9, x=GOOD),
        Code.INVALID_ARGUMENT,
        "output_dtype is 9",
    ),
    "priority": (
        pb.MatMulRequest(layer="up", priority=10, x=GOOD),
        Code.INVALID_ARGUMENT,
        "priority is 10",
    ),
    "one byte less": (
        pb.MatMulRequest(layer="up", x=tensor((2, K), DATA[:-1])),
        Code.INVALID_ARGUMENT,
        "takes 384 bytes; data has 383",
    ),
    "one byte more": (
        pb.MatMulRequest(layer="up", x=tensor((2, K), DATA + b"\0")),
        Code.INVALID_ARGUMENT,
        "takes 384 bytes; data has 385",
    ),
    "negative": (
        pb.MatMulRequest(layer="up", x=tensor((-2, -K), DATA)),
        Code.INVALID_ARGUMENT,
        "no negative dimension",
    ),
    "huge": (
        pb.MatMulRequest(layer="up", x=tensor((1 << 62, 1 << 62, K), DATA)),
        Code.INVALID_ARGUMENT,
        "fewer than 2**63 bytes",
    ),
    "large": (
        pb.MatMulRequest(layer="up", x=tensor((1 << 40, K), DATA)),
        Code.INVALID_ARGUMENT,
        "data has 384",
    ),
    "scalar": (pb.MatMulRequest(layer="up", x=tensor((), b"ab")), Code.INVALID_ARGUMENT, "0 dim"),
}

LIMITS = LimitsConfig(
    max_request_bytes=8 * K * 2,
    max_response_bytes=2048,
    max_request_rows=10,
    max_queue_rows=12,
    max_queue_bytes=4096,
)
