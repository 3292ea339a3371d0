"""The kernels as torch operations: right, traceable, and a module that keeps its dtypes."""

from collections.abc import Iterator

import pytest
import torch
from closeness import bound_of
from random_layers import random_layer

from qlinear_service.dtypes import DType
from qlinear_service.kernels import build, packing, reference, torch_ops
from qlinear_service.kernels.backends import CpuKernels
from qlinear_service.kernels.torch_ops import QuantizedLinearModule
from qlinear_service.layers import LogicalLayer

FORMS: list[dict[str, object]] = [
    {},
    {"bits": 8, "group_size": 32, "symmetric": False},
    {"group_size": -1, "bias": True, "scale_dtype": DType.BF16},
    {"group_size": 64, "permuted": True, "scale_dtype": DType.F32},
]


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    path = build.build_cpu_library(build.default_cache_dir())
    torch_ops.use_kernels(CpuKernels(path, threads=1))
    yield
    torch_ops._kernels.clear()


def layer_of(form: dict[str, object]) -> LogicalLayer:
    return random_layer(n=70, k=200, **form)  # type: ignore[arg-type]


def arguments(layer: LogicalLayer, x: torch.Tensor, out: torch.dtype) -> tuple[object, ...]:
    packed, spec = packing.pack(layer), layer.spec
    tensors = (x, packed.qweight, packed.scales, packed.zeros, packed.bias)
    return (*tensors, spec.n, spec.k, spec.bits, spec.group_size, out)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_module_computes_what_the_layer_says(form: dict[str, object]) -> None:
    layer = layer_of(form)
    for lead, dtype in (((3,), torch.float16), ((2, 3), torch.bfloat16), ((), torch.float32)):
        x = torch.randn(*lead, 200).to(dtype)
        y = QuantizedLinearModule(packing.pack(layer), output_dtype=DType.F32)(x)
        assert (y.shape, y.dtype) == ((*lead, 70), torch.float32)
        rows = x.reshape(-1, 200)
        exact = reference.linear(
            layer, rows, output_dtype=DType.F32, precision=torch.float64
        ).double()
        bound = bound_of(layer, rows, exact, DType.F32)
        assert ((y.reshape(-1, 70).double() - exact).abs() <= bound).all()
        assert QuantizedLinearModule(packing.pack(layer))(x).dtype == dtype


@pytest.mark.parametrize("form", FORMS[:3], ids=str)
def test_torch_accepts_the_operations(form: dict[str, object]) -> None:
    layer = layer_of(form)
    for x in (torch.randn(3, 200).half(), torch.randn(2, 1, 200), torch.randn(200, 5).bfloat16().T):
        torch.library.opcheck(torch_ops.linear, arguments(layer, x, torch.float32))
    order = torch.randperm(200).int()
    torch.library.opcheck(torch_ops.gather, (torch.randn(2, 3, 200).half(), order))


def test_shapes_are_known_without_data() -> None:
    layer = layer_of(FORMS[0])
    x = torch.empty(4, 5, 200, dtype=torch.float16, device="meta")
    given = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in
             arguments(layer, x, torch.bfloat16)]  # fmt: skip
    y = torch_ops.linear(*given)
    assert (y.shape, y.dtype, y.device.type) == ((4, 5, 70), torch.bfloat16, "meta")
    assert torch_ops.gather(x, torch.empty(200, dtype=torch.int32, device="meta")).shape == x.shape


def test_a_compiled_model_is_one_graph_for_every_number_of_rows() -> None:
    model = torch.nn.Sequential(
        QuantizedLinearModule(packing.pack(random_layer(n=96, k=200, permuted=True))),
        torch.nn.ReLU(),
        QuantizedLinearModule(packing.pack(random_layer(n=40, k=96, bias=True))),
    )
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 8, 17):
        x = torch.randn(rows, 200).half()
        assert torch.equal(compiled(x), model(x))


def test_rows_of_any_stride() -> None:
    module = QuantizedLinearModule(packing.pack(layer_of({})))
    wide = torch.randn(6, 400).half()
    for x in (wide[::2, 1:201], wide[:, ::2], wide[:1, :200].expand(4, 200), wide[:0, :200]):
        assert torch.equal(module(x), module(x.contiguous()))


def test_converting_a_model_leaves_codes_and_scales_alone() -> None:
    packed = packing.pack(layer_of(FORMS[2]))
    module = QuantizedLinearModule(packed)
    torch.nn.Sequential(module).half().double().to(torch.float32)
    assert module.scales.dtype == torch.bfloat16
    assert module.bias is not None
    assert module.bias.dtype == torch.float16
    assert torch.equal(module.scales, packed.scales)
    assert module.to("meta").scales.device.type == "meta"
    again = QuantizedLinearModule(packing.pack(random_layer(n=70, k=200, seed=7, **FORMS[2])))  # type: ignore[arg-type]
    again.load_state_dict(QuantizedLinearModule(packed).state_dict())
    assert torch.equal(again.qweight, packed.qweight)
    assert "n=70, k=200" in repr(again)


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (0, torch.zeros(3, 199).half(), r"x is \[3, 199\]; expected \[..., 200\]"),
        (1, torch.zeros(8, 4, 511, dtype=torch.uint8), "qweight is torch.uint8"),
        (1, torch.zeros(8, 4, 512, dtype=torch.int8), "qweight is torch.int8"),
        (1, torch.zeros(8, 512, 4, dtype=torch.uint8).mT, "qweight .* contiguous"),
        (2, torch.zeros(8, 1, 16).half(), r"scales is .*\[8, 1, 16\].* expected .*\[8, 2, 16\]"),
        (3, torch.zeros(8, 1, 16, dtype=torch.uint8), "zeros is"),
        (4, torch.zeros(69), r"bias is \[69\] on cpu; expected \[70\]"),
        (7, 5, "bits is 5"),
        (8, 48, "group_size 48"),
        (9, torch.int32, "dtype is torch.int32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(place: int, value: object, text: str) -> None:
    given = list(arguments(layer_of({}), torch.zeros(3, 200).half(), torch.float16))
    given[place] = value
    with pytest.raises(ValueError, match=text):
        torch_ops.linear(*given)


def test_a_layer_elsewhere_is_refused() -> None:
    """Its addresses mean nothing to the kernels of the device where x is."""
    packed, x = packing.pack(layer_of({})), torch.zeros(3, 200).half()
    qweight, scales = packed.qweight.to("meta"), packed.scales.to("meta")
    with pytest.raises(ValueError, match="x is on cpu; expected meta, where the layer is"):
        torch_ops._linear(x, qweight, scales, None, None, 70, 200, 4, 128, torch.float16)


def test_a_permutation_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch.int64 on cpu; expected torch.int32"):
        torch_ops.gather(torch.zeros(3, 200).half(), torch.arange(200))


def test_without_kernels_a_library_is_found() -> None:
    torch_ops._kernels.clear()
    module = QuantizedLinearModule(packing.pack(layer_of({})))
    assert module(torch.ones(1, 200).half()).shape == (1, 70)
    assert torch.device("cpu") in torch_ops._kernels
