"""Arrays become the bytes of the wire and come back: every dtype, layout and library."""

import array
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qlinear.v1 import linear_pb2 as pb
from qlinear_client import InvalidArgument
from qlinear_client._arrays import ELEMENTS, element_of, read_activations

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def test_numbers_are_those_of_the_protocol() -> None:
    assert {element.number: name for name, element in ELEMENTS.items()} == {
        pb.DTYPE_F16: "float16",
        pb.DTYPE_BF16: "bfloat16",
        pb.DTYPE_F32: "float32",
    }
    assert all(ELEMENTS[name].itemsize == np.dtype(DTYPES[name]).itemsize for name in DTYPES)


@given(
    shape=hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5),
    name=st.sampled_from(sorted(DTYPES)),
    order=st.sampled_from(["C", "F", "reversed", "strided"]),
    seed=st.integers(0, 99),
)
def test_round_trip_is_exact_for_every_shape_and_stride(
    shape: tuple[int, ...], name: str, order: str, seed: int
) -> None:
    x = np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[name])
    if order == "F":
        x = np.asfortranarray(x)
    elif order == "reversed":
        x = x[::-1]
    elif order == "strided":
        x = np.repeat(x, 2, axis=-1)[..., ::2]
    sent = read_activations(x)
    assert (sent.shape, sent.element.name) == (shape, name)
    assert sent.raw == np.ascontiguousarray(x).tobytes()
    back = sent.restore(sent.raw, shape, sent.element)
    assert back.dtype == x.dtype
    assert back.shape == shape
    assert back.tobytes() == x.tobytes()


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_results_may_be_written_to(name: str) -> None:
    sent = read_activations(np.ones((2, 3), DTYPES[name]))
    back = sent.restore(sent.raw, (2, 3), sent.element)
    back += back
    assert (back.astype(np.float32) == 2).all()


@pytest.mark.parametrize("code", ["f2", "f4"])
def test_big_endian_is_converted_not_misread(code: str) -> None:
    values = np.arange(12, dtype=f"<{code}").reshape(3, 4)
    assert read_activations(values.astype(f">{code}")).raw == values.tobytes()


def test_buffer_protocol_objects_are_arrays() -> None:
    values = [1.0, 2.5, -3.0]
    expected = np.array(values, np.float32).tobytes()
    floats = array.array("f", values)
    for x in (floats, memoryview(floats), memoryview(np.array(values, np.float32))):
        sent = read_activations(x)
        assert (sent.raw, sent.shape) == (expected, (3,))
        assert isinstance(sent.restore(sent.raw, (3,), sent.element), np.ndarray)


def test_rows_are_the_leading_dimensions() -> None:
    assert read_activations(np.zeros((2, 3, 5), np.float32)).rows == 6
    assert read_activations(np.zeros(5, np.float32)).rows == 1
    assert read_activations(np.zeros((0, 5), np.float32)).rows == 0


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.zeros((1, 2)), "x has dtype float64; expected float16, bfloat16 or float32"),
        (np.zeros((1, 2), np.int8), "x has dtype int8"),
        (np.array([object()]), "x has dtype object"),
        (b"1234", "x has dtype bytes"),
        (np.float32(1), "x is a single number"),
        ([[1.0, 2.0]], "x is a list; expected a numpy array"),
        (None, "x is a NoneType"),
        (torch.zeros(1, 2, dtype=torch.float64), r"float64; .* with x.float\(\)"),
        (torch.tensor(1.0), "x is a single number"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta tensor"),
    ],
)
def test_what_cannot_travel_gets_one_clear_sentence(x: object, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        read_activations(x)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_torch_tensors_come_back_as_torch(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, dtype=torch.float32).to(dtype).T.requires_grad_()
    sent = read_activations(x)
    back = sent.restore(sent.raw, (4, 3), sent.element)
    assert isinstance(back, torch.Tensor)
    assert back.dtype == dtype
    assert torch.equal(back, x.detach())
    back.add_(1)  # writable memory, or torch warns, which is an error in tests
    assert sent.restore(b"", (0, 3), sent.element).shape == (0, 3)


def test_lazily_negated_tensors_send_their_values() -> None:
    x = torch.complex(torch.ones(2, 3), torch.full((2, 3), 2.0)).conj().imag
    assert x.is_neg()
    assert read_activations(x).raw == np.full((2, 3), -2, np.float32).tobytes()


def test_torch_and_numpy_send_the_same_bytes() -> None:
    x = torch.randn(5, 7)
    assert read_activations(x).raw == read_activations(x.numpy()).raw
    as_numpy = x.numpy().astype(ml_dtypes.bfloat16)
    assert read_activations(x.to(torch.bfloat16)).raw == read_activations(as_numpy).raw


@pytest.mark.parametrize(
    "dtype", ["float16", np.float16, np.dtype(np.float16), np.dtype(">f2"), torch.float16]
)
def test_output_dtype_by_name_or_dtype(dtype: object) -> None:
    assert element_of(dtype).name == "float16"


@pytest.mark.parametrize("dtype", ["float64", "half", np.int32, torch.int8, 7, object()])
def test_output_dtypes_that_the_service_lacks_are_refused(dtype: object) -> None:
    with pytest.raises(InvalidArgument, match="expected float16, bfloat16 or float32"):
        element_of(dtype)


def test_client_works_where_neither_torch_nor_ml_dtypes_can_be_imported() -> None:
    script = """
import sys
sys.modules["torch"] = sys.modules["ml_dtypes"] = None  # makes importing them fail
import numpy as np
from qlinear_client import InvalidArgument
from qlinear_client._core import prepare_matmul
x = np.ones((2, 3), np.float32)
assert prepare_matmul("a", x, output_dtype=None, priority=0).x.raw == x.tobytes()
try:
    prepare_matmul("a", x, output_dtype="bfloat16", priority=0)
except InvalidArgument as error:
    assert "ml_dtypes" in error.message
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_importing_the_client_imports_neither_torch_nor_the_service() -> None:
    script = (
        "import sys; from qlinear_client import Client; "
        "print([m for m in ('torch', 'qlinear_service', 'prometheus_client') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"
