"""Every rule of one call, in its order, and the way back. Pure: messages in, values out."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from qlinear.v1 import linear_pb2 as pb
from qlinear_service.codec import CallPlan, CheckedRequest, Checker, encode_result
from qlinear_service.config import LimitsConfig
from qlinear_service.dtypes import DType
from qlinear_service.errors import InvalidRequest, RequestError, TooLarge, UnknownLayer
from qlinear_service.layers import LayerSpec
from qlinear_service.wire import read_call


def spec(module: str, *, n: int, k: int) -> LayerSpec:
    return LayerSpec(
        model="m",
        module=module,
        n=n,
        k=k,
        bits=4,
        group_size=128,
        symmetric=True,
        has_bias=False,
        scale_dtype=DType.F16,
    )


LAYERS = {
    "m/a": spec("a", n=5, k=8),
    "m/b": spec("b", n=3, k=8),
    "m/other": spec("other", n=5, k=9),
}
LIMITS = LimitsConfig(
    max_request_bytes=1024, max_response_bytes=1024, max_request_rows=50, max_queue_rows=100
)


def resolve(name: str) -> LayerSpec:
    if name not in LAYERS:
        raise UnknownLayer(f"no layer is called {name!r}")
    return LAYERS[name]


def tensor(*shape: int, dtype: int = pb.DTYPE_F16, extra: int = 0) -> pb.Tensor:
    itemsize = 4 if dtype == pb.DTYPE_F32 else 2
    return pb.Tensor(dtype=dtype, shape=shape, data=bytes(math.prod(shape) * itemsize + extra))


def checked(request: pb.MatMulRequest, limits: LimitsConfig = LIMITS) -> CheckedRequest:
    return Checker(resolve=resolve, limits=limits).check(read_call(request.SerializeToString()))


def encoded(plan: CallPlan, *pieces: bytes) -> pb.Tensor:
    """The tensor that a client reads from the parts of the response of a call for one layer."""
    parts = encode_result(plan, 0, [memoryview(piece) for piece in pieces])
    return pb.MatMulResponse.FromString(b"".join(parts)).y[0]


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize(
    ("shape", "rows", "leading"),
    [((8,), 1, ()), ((3, 8), 3, (3,)), ((2, 1, 3, 8), 6, (2, 1, 3)), ((2, 0, 8), 0, (2, 0))],
)
def test_leading_dimensions_are_flattened_and_restored(
    dtype: DType, shape: tuple[int, ...], rows: int, leading: tuple[int, ...]
) -> None:
    plan, x = checked(pb.MatMulRequest(layer="m/a", priority=9, x=tensor(*shape, dtype=dtype)))
    assert (plan.rows, plan.leading_shape, plan.priority) == (rows, leading, 9)
    assert (plan.x_dtype, plan.output_dtype) == (dtype, dtype)
    assert plan.x_bytes == x.nbytes == rows * 8 * dtype.itemsize
    assert plan.response_bytes == rows * 5 * dtype.itemsize
    y = encoded(plan, bytes(plan.response_bytes))
    assert (tuple(y.shape), y.dtype) == ((*leading, 5), dtype)


def test_the_bytes_are_those_that_came() -> None:
    data = np.arange(16, dtype=np.float16).tobytes()
    x = pb.Tensor(dtype=pb.DTYPE_F16, shape=(2, 8), data=data)
    plan, view = checked(pb.MatMulRequest(layers=["m/b", "m/a"], output_dtype=pb.DTYPE_F32, x=x))
    assert bytes(view) == data
    assert [layer.name for layer in plan.layers] == ["m/b", "m/a"]
    assert plan.output_dtype is DType.F32
    assert plan.response_bytes == 2 * (3 + 5) * 4


def test_pieces_are_joined_in_order_and_counted() -> None:
    plan, _ = checked(pb.MatMulRequest(layer="m/a", x=tensor(2, 8)))
    first, second = bytes(range(10)), bytes(range(10, 20))
    assert encoded(plan, first, second).data == bytes(range(20))
    with pytest.raises(RuntimeError, match="10 result bytes; expected 20"):
        encoded(plan, first)


GOOD = tensor(2, 8)
INVALID = {
    "both": (pb.MatMulRequest(layer="m/a", layers=["m/b"], x=GOOD), "layer is 'm/a' and layers"),
    "neither": (pb.MatMulRequest(x=GOOD), "neither layer nor layers is set"),
    "no x": (pb.MatMulRequest(layer="m/a"), "'m/a': x is missing"),
    "no dtype": (pb.MatMulRequest(layer="m/a", x=tensor(2, 8, dtype=0)), "x.dtype is 0; expected"),
    "dtype": (pb.MatMulRequest(layer="m/a", x=tensor(2, 8, dtype=77)), "x.dtype is 77; expected"),
    "rank 0": (pb.MatMulRequest(layer="m/a", x=tensor()), "x has 0 dimensions; expected 1 to 64"),
    "rank": (pb.MatMulRequest(layer="m/a", x=tensor(*[1] * 64, 8)), "x has 65 dimensions"),
    "negative": (pb.MatMulRequest(layer="m/a", x=pb.Tensor(dtype=1, shape=(-2, -8))), "negative"),
    "negative k": (pb.MatMulRequest(layer="m/a", x=pb.Tensor(dtype=1, shape=(0, -8))), "negative"),
    "huge": (
        pb.MatMulRequest(layer="m/a", x=pb.Tensor(dtype=1, shape=(1 << 62, 1 << 62, 8))),
        r"fewer than 2\*\*63 bytes",
    ),
    "huge with a zero": (
        pb.MatMulRequest(layer="m/a", x=pb.Tensor(dtype=1, shape=(0, 1 << 62, 8))),
        r"fewer than 2\*\*63 bytes",
    ),
    "large": (
        pb.MatMulRequest(layer="m/a", x=pb.Tensor(dtype=1, shape=(1 << 40, 8))),
        "takes 17592186044416 bytes; data has 0",
    ),
    "k": (pb.MatMulRequest(layer="m/a", x=tensor(2, 7)), r"\[2, 7\]; expected \[..., 8\]"),
    "k of zero rows": (pb.MatMulRequest(layer="m/a", x=tensor(0, 7)), r"expected \[..., 8\]"),
    "transposed": (pb.MatMulRequest(layer="m/a", x=tensor(8, 2)), r"expected \[..., 8\]"),
    "two k": (
        pb.MatMulRequest(layers=["m/a", "m/other"], x=GOOD),
        "'m/a' and 'm/other' have k = 8 and 9",
    ),
    "one byte more": (pb.MatMulRequest(layer="m/a", x=tensor(2, 8, extra=1)), "32 bytes; data has"),
    "bytes of nothing": (pb.MatMulRequest(layer="m/a", x=tensor(0, 8, extra=1)), "data has 1"),
    "priority": (pb.MatMulRequest(layer="m/a", priority=10, x=GOOD), "priority is 10; expected 0"),
    "output_dtype": (pb.MatMulRequest(layer="m/a", output_dtype=4, x=GOOD), "output_dtype is 4"),
}


@pytest.mark.parametrize("name", INVALID)
def test_a_broken_contract_is_one_sentence(name: str) -> None:
    request, text = INVALID[name]
    with pytest.raises(InvalidRequest, match=text) as refused:
        checked(request)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_one_byte_less_is_refused() -> None:
    x = pb.Tensor(dtype=pb.DTYPE_F16, shape=(2, 8), data=bytes(31))
    with pytest.raises(InvalidRequest, match="takes 32 bytes; data has 31"):
        checked(pb.MatMulRequest(layer="m/a", x=x))


def test_unknown_names_are_refused_wherever_they_stand() -> None:
    for names in (["m/none"], ["m/a", "m/none"], ["m/a", ""]):
        with pytest.raises(UnknownLayer):
            checked(pb.MatMulRequest(layers=names, x=GOOD))


@pytest.mark.parametrize(
    ("request_", "limits", "text"),
    [
        (pb.MatMulRequest(layer="m/a", x=tensor(51, 8)), {}, "51 rows; at most 50"),
        (pb.MatMulRequest(layers=["m/a"] * 3, x=tensor(34, 8)), {}, "102 rows to compute; at most"),
        (
            pb.MatMulRequest(layers=["m/a"] * 4, x=tensor(1, 8)),
            {"max_request_layers": 3},
            "4 names; at most 3",
        ),
        (
            pb.MatMulRequest(layer="m/a", x=tensor(50, 8, dtype=3)),
            {},
            "1600 bytes; at most 1024 are accepted",
        ),
        (
            pb.MatMulRequest(layers=["m/a"] * 2, output_dtype=3, x=tensor(26, 8)),
            {},
            "answer would have 1040 bytes; at most 1024",
        ),
    ],
)
def test_beyond_a_limit_is_too_large(
    request_: pb.MatMulRequest, limits: dict[str, int], text: str
) -> None:
    with pytest.raises(TooLarge, match=text):
        checked(request_, replace(LIMITS, **limits))


def test_a_million_names_are_refused_before_any_is_looked_up() -> None:
    def never(name: str) -> LayerSpec:
        raise AssertionError(name)

    request = pb.MatMulRequest(layers=["m/a"] * 1_000_000, x=tensor(0, 8))
    checker = Checker(resolve=never, limits=LIMITS)
    with pytest.raises(TooLarge, match="4096 or more names; at most 256"):
        checker.check(read_call(request.SerializeToString()))


def test_what_was_found_out_about_a_kind_of_call_is_kept_and_its_bytes_are_still_counted() -> None:
    looked_up: list[str] = []

    def watched(name: str) -> LayerSpec:
        looked_up.append(name)
        return resolve(name)

    checker = Checker(resolve=watched, limits=LIMITS)
    first = checker.check(read_call(pb.MatMulRequest(layer="m/a", x=GOOD).SerializeToString()))
    again = checker.check(read_call(pb.MatMulRequest(layer="m/a", x=GOOD).SerializeToString()))
    assert first.plan is again.plan
    short = pb.Tensor(dtype=pb.DTYPE_F16, shape=(2, 8), data=bytes(31))
    with pytest.raises(InvalidRequest, match="takes 32 bytes; data has 31"):
        checker.check(read_call(pb.MatMulRequest(layer="m/a", x=short).SerializeToString()))
    other = checker.check(read_call(pb.MatMulRequest(layer="m/b", x=GOOD).SerializeToString()))
    assert other.plan.layers == (LAYERS["m/b"],)
    assert looked_up == ["m/a", "m/b"]


@pytest.mark.parametrize(
    "request_",
    [
        pb.MatMulRequest(layer="m/a", x=tensor(50, 8)),
        pb.MatMulRequest(layer="m/a", x=tensor(32, 8, dtype=3)),
        pb.MatMulRequest(layers=["m/a", "m/a", "m/b"], x=tensor(32, 8)),
    ],
)
def test_exactly_at_a_limit_passes(request_: pb.MatMulRequest) -> None:
    assert checked(request_).plan.rows > 0


dims = st.one_of(st.integers(0, 6), st.just(8), st.integers(-(1 << 63), (1 << 63) - 1))


@given(
    shape=st.lists(dims, max_size=5),
    dtype=st.integers(0, 5),
    data=st.binary(max_size=300),
    fitting=st.booleans(),
    names=st.lists(st.sampled_from([*LAYERS, "", "m/none"]), max_size=3),
    output_dtype=st.integers(0, 5),
    priority=st.integers(0, 12),
)
def test_any_message_is_right_or_refused(
    shape: list[int],
    dtype: int,
    data: bytes,
    fitting: bool,
    names: list[str],
    output_dtype: int,
    priority: int,
) -> None:
    """What passes keeps every rule; what does not gets an error of ours, never another one."""
    itemsize = 4 if dtype == 3 else 2
    nbytes = math.prod(shape) * itemsize
    if fitting and 0 <= nbytes <= 4096:
        data = bytes(nbytes)
    x = pb.Tensor(dtype=dtype, shape=shape, data=data)
    request = pb.MatMulRequest(layers=names, x=x, output_dtype=output_dtype, priority=priority)
    try:
        plan, _ = checked(request)
    except RequestError:
        return
    assert len(data) == nbytes
    assert min(shape) >= 0
    assert shape[-1] == 8
    assert {LAYERS[name].k for name in names} == {8}
    assert 1 <= dtype <= 3
    assert output_dtype <= 3
    assert priority <= 9
    assert plan.rows == math.prod(shape[:-1]) <= 50
    assert len(data) <= 1024
    assert plan.response_bytes <= 1024


@given(
    leading=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from(DType),
    output_dtype=st.sampled_from([None, *DType]),
)
def test_every_right_message_passes(
    leading: list[int], dtype: DType, output_dtype: DType | None
) -> None:
    rows = math.prod(leading)
    assume(rows <= 32)
    request = pb.MatMulRequest(
        layers=["m/a", "m/b"], output_dtype=output_dtype or 0, x=tensor(*leading, 8, dtype=dtype)
    )
    plan, _ = checked(request, LimitsConfig())
    assert plan.rows == rows
    assert plan.output_dtype == (output_dtype or dtype)
