"""Which format a folder is taken for, and that nothing unknown is taken for something known."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CONFIG, VECTORS, write_checkpoint

from qlinear_service.checkpoints import open_checkpoint
from qlinear_service.checkpoints.detect import detect, read_configuration
from qlinear_service.errors import CheckpointError

CONFIGS = json.loads((VECTORS / "configs" / "expected.json").read_text())
FAMILIES = {"gptq": "gptq", "awq-gemm": "awq", "compressed-tensors pack-quantized": (
    "compressed-tensors"
)}  # fmt: skip


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text)
    return folder


def family(folder: Path, *tensors: str) -> str:
    return detect(folder, read_configuration(folder), dict.fromkeys(tensors)).family


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_that_libraries_write(name: str, tmp_path: Path) -> None:
    content = json.loads((VECTORS / "configs" / name).read_text())
    if "quantization_config" not in content:
        content = {"quantization_config": content}
    found = detect(tmp_path, read_configuration(write(tmp_path, config=content)), {})
    assert found.family == FAMILIES.get(CONFIGS[name]["want"].get("format", ""), "")
    refused = CONFIGS[name]["want"].get("reject") or CONFIGS[name]["want"].get("optional")
    if refused:
        assert found.label == refused.split()[0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"method": "gptq", "format": "gptq_v2"}, "gptq"),
        ({"bits": 4, "group_size": 128, "desc_act": False}, "gptq"),
        ({"bits": 4, "group_size": 128, "damp_percent": 0.01}, "gptq"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "marlin"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "marlin"}, "marlin"),
        ({"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}, "awq"),
        ({"quant_method": "awq", "format": "gemm"}, "awq"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, "gptq"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}, "awq"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
        ({"config_groups": {}, "format": "pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "awq", "version": "exllamav2"}, "awq"),
        ({"quant_method": "awq", "version": "marlin"}, "marlin"),
        ({"quant_method": "awq", "version": "gemv"}, ""),
        ({"quant_method": "compressed-tensors", "format": "mixed-precision"}, "compressed-tensors"),
        ({"quant_method": "compressed-tensors", "format": "dense"}, "plain"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, ""),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, ""),
        ({"quant_method": "bitsandbytes"}, ""),
        ({"quant_method": "gptq", "checkpoint_format": "gptq_p"}, ""),
    ],
)
def test_families(settings: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert family(write(tmp_path, quantize_config=settings)) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "fooquant"}, "quant_method is 'fooquant', which is unknown"),
        ({"quant_method": 4}, "quant_method is 4; expected a string"),
        ({"quant_method": "gptq", "checkpoint_format": "gptq_v9"}, "'gptq_v9', which is unknown"),
        ({"quant_method": "gptq", "checkpoint_format": 2}, "checkpoint_format is 2"),
        ({"quant_method": "gptq", "checkpoint_format": "gptq", "format": "gptq_v2"}, "contradicts"),
        ({"quant_method": "gptq", "method": "awq"}, "says 'gptq' and 'awq' for quant_method"),
        ({"quant_method": "awq", "version": "gemx"}, "version is 'gemx', which is unknown"),
        ({"quant_method": "awq", "version": "gemm", "format": "gemv"}, "contradicts itself"),
        ({"quant_method": "compressed-tensors"}, "format is None, which is unknown"),
        ({"quant_method": "auto-round"}, "packing_format is None"),
        ({"quant_method": "auto-round", "packing_format": "x"}, "packing_format is 'x'"),
        ({"bits": 4}, "has no quant_method and no settings that tell"),
        ({}, "has no quant_method and no settings that tell"),
    ],
)
def test_unknown_and_contradictory_values_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"quantize_config.json: .*{message}"):
        family(write(tmp_path, quantize_config=settings))


@pytest.mark.parametrize("key", ["bits", "group_size", "sym", "quant_method"])
def test_files_that_contradict_each_other_are_refused(key: str, tmp_path: Path) -> None:
    other = {"bits": 8, "group_size": 64, "sym": False, "quant_method": "awq"}[key]
    write(tmp_path, config={"quantization_config": CONFIG}, quant_config=CONFIG | {key: other})
    with pytest.raises(CheckpointError, match=f"quant_config.json: says {key} = .*config.json"):
        read_configuration(tmp_path)


def test_files_complete_each_other_and_the_first_wins_where_nothing_hangs_on_it(
    tmp_path: Path,
) -> None:
    write(
        tmp_path,
        config={"quantization_config": {"bits": 4, "desc_act": False, "sym": None}},
        quantize_config={"bits": 4, "desc_act": True, "sym": True, "quant_method": "gptq"},
    )
    config = read_configuration(tmp_path)
    assert config is not None
    assert (config.get("sym"), config.get("desc_act")) == (True, False)
    assert config.origins["sym"].name == "quantize_config.json"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"bits": 4', "is not valid JSON"),
        ('{"bits": 4, "bits": 8}', "bits: the name stands twice"),
        ("[]", "holds a JSON list; expected an object"),
        ('{"a": ' * 100_000, "cannot be read as JSON: RecursionError"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be read as JSON: ValueError"),
    ],
)
def test_damaged_configuration_files(content: str, message: str, tmp_path: Path) -> None:
    write(tmp_path, quantize_config=content)
    with pytest.raises(CheckpointError, match=f"quantize_config.json: {message}"):
        read_configuration(tmp_path)


def test_configuration_that_is_no_text_or_no_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="is not UTF-8 text"):
        read_configuration(tmp_path)
    write(tmp_path, config={"quantization_config": "gptq"})
    with pytest.raises(CheckpointError, match="quantization_config is 'gptq'"):
        read_configuration(tmp_path)


def test_packed_tensors_without_a_configuration_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "quantize_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"layer\.qweight: is packed, but no file says how"):
        open_checkpoint(folder)


def test_two_formats_need_no_configuration() -> None:
    """Their tensors say everything; GPTQ's and AWQ's do not."""
    for names, expected in (
        (["a.weight_packed", "a.weight_shape", "a.weight_scale"], "compressed-tensors"),
        (["a.B", "a.s"], "marlin"),
        (["a.weight", "a.bias"], "plain"),
    ):
        assert detect(Path("x"), None, dict.fromkeys(names)).family == expected


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": None, "compression_config": {"quant_method": "gptq"}},
        {"text_config": {"quantization_config": {"quant_method": "gptq"}}},
        {
            "quantization_config": {"quant_method": "gptq"},
            "text_config": {"quantization_config": {"quant_method": "awq"}},
        },
    ],
)
def test_where_a_model_says_how_it_is_quantized(config: dict[str, Any], tmp_path: Path) -> None:
    assert family(write(tmp_path, config=config)) == "gptq"


def test_what_a_terminal_would_obey_is_not_repeated(tmp_path: Path) -> None:
    odd = "a\n\x1b[31m\ud800"
    text = f"{{{json.dumps(odd)}:1,{json.dumps(odd)}:2}}"
    with pytest.raises(CheckpointError, match=r"a\?\?\[31m\?: the name stands twice"):
        read_configuration(write(tmp_path, config=text))
    folder = write_checkpoint(tmp_path / "model", meta={"quantizer": [odd]})
    assert open_checkpoint(folder).layers[0].source.tool == "a??[31m?"


def test_a_file_too_large_for_a_configuration_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qlinear_service.checkpoints.strict_json.MAX_FILE_BYTES", 10)
    with pytest.raises(CheckpointError, match=r"config\.json: has 11 bytes; expected at most 10"):
        read_configuration(write(tmp_path, config='{"a":12345}'))


def test_a_name_among_many_that_stands_twice_is_found_at_once(tmp_path: Path) -> None:
    pairs = ",".join(f'"a{i}":0' for i in range(50_000))
    started = time.process_time()
    with pytest.raises(CheckpointError, match="a49999: the name stands twice"):
        read_configuration(write(tmp_path, config=f'{{{pairs},"a49999":0}}'))
    assert time.process_time() - started < 2
