"""What the options of `qlinear pack` and `qlinear inspect` make of unquantized layers."""

import json
from pathlib import Path

import pytest
from checkpoints import PLAIN, SMALL, VECTORS, weight_hash, weight_hashes

from qlinear_service import __version__, cli
from qlinear_service.packed import PackedFile


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_inspect_shows_what_an_option_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    mixed = VECTORS / "gptq-gptqmodel-v1-dynamic-mixed"
    code, out, _ = call(capsys, "inspect", mixed, "--json")
    [model] = json.loads(out)["models"]
    layers = {layer["module"].split(".")[-1]: layer for layer in model["layers"]}
    assert code == 0
    assert (layers["down_proj"]["bits"], layers["down_proj"]["group_size"]) == (8, 32)
    assert (layers["gate_proj"]["bits"], layers["gate_proj"]["group_size"]) == (4, 64)
    assert layers["gate_proj"]["has_k_permutation"]
    assert "lm_head.weight" in {tensor["name"] for tensor in model["skipped"]}
    code, out, _ = call(capsys, "inspect", mixed, "--unquantized", "keep")
    row = next(line for line in out.splitlines() if "o_proj" in line).split()
    assert (code, row[1:9]) == (0, ["128", "128", "16", "-", "-", "no", "float16", "no"])


@pytest.mark.parametrize(
    ("options", "bits", "group_size", "symmetric"),
    [
        ((), 4, 128, True),
        (("--unquantized", "mse", "--bits", "8", "--group-size", "32"), 8, 32, True),
        (("--unquantized", "rtn", "--asymmetric", "--group-size", "-1"), 4, -1, False),
    ],
)
def test_plain_weights_are_quantized_as_asked_and_errors_reported(
    options: tuple[str, ...],
    bits: int,
    group_size: int,
    symmetric: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "x.safetensors"
    plain = VECTORS / "plain-bf16-sharded"
    code, out, err = call(capsys, "pack", plain, "-o", target, *options)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[1] == "quantized here; root mean square error relative to the weights:"
    errors = {line.split()[1]: float(line.split()[0]) for line in lines[2:]}
    specs = PackedFile(target).specs
    assert set(errors) == {spec.module for spec in specs}
    assert all(0 < error < {4: 0.2, 8: 0.01}[bits] for error in errors.values())
    assert {(s.bits, s.group_size, s.symmetric) for s in specs} == {(bits, group_size, symmetric)}
    assert {s.source.tool for s in specs} == {f"qlinear:{__version__}"}


def test_kept_layers_go_into_the_file_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "x.safetensors"
    for vector in PLAIN:
        words = ("-o", target, "--unquantized", "keep", "--force")
        assert call(capsys, "pack", VECTORS / vector, *words)[0] == 0
        file = PackedFile(target)
        hashes = {spec.module: weight_hash(file.load(spec.module)) for spec in file.specs}
        assert hashes == weight_hashes(vector)
        assert {spec.bits for spec in file.specs} == {16}


@pytest.mark.parametrize(
    ("device", "message"),
    [("gpu", "expected cpu or cuda:N"), ("cuda:x", "expected cpu"), ("cuda:99", "no such GPU")],
)
def test_devices_that_are_none(
    device: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("pack", VECTORS / SMALL, "-o", tmp_path / "x", "--device", device)
    code, _, err = call(capsys, *words)
    assert (code, err.count("\n")) == (1, 1)
    assert message in err
    assert not list(tmp_path.iterdir())


def test_nothing_to_pack_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("pack", VECTORS / PLAIN[0], "-o", tmp_path / "x", "--unquantized", "skip")
    code, _, err = call(capsys, *words)
    assert code == 1
    assert "holds no linear layer that is served (see --unquantized)" in err
