"""`qlinear pack` and `qlinear inspect` as a user calls them."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import SMALL, VECTORS, weight_hash, weight_hashes, write_checkpoint

from qlinear_service import cli
from qlinear_service.packed import PackedFile

PHI = "gptq-gptqmodel-v1-phi3-fused-sharded"


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_pack_then_everything_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "phi.safetensors"
    code, out, err = call(capsys, "pack", VECTORS / PHI, "-o", target, "--name", "phi")
    assert (code, err) == (0, "")
    assert out == f"{target}: model phi, 10 layers, {target.stat().st_size} bytes\n"
    file = PackedFile(target)
    assert file.model == "phi"
    hashes = {spec.module: weight_hash(file.load(spec.module)) for spec in file.specs}
    assert hashes == weight_hashes(PHI)


def test_the_model_is_called_like_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(capsys, "pack", VECTORS / SMALL, "-o", tmp_path / "x")[0] == 0
    assert PackedFile(tmp_path / "x").model == SMALL


def test_a_file_is_replaced_only_with_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "x.safetensors"
    target.write_text("precious")
    code, out, err = call(capsys, "pack", VECTORS / SMALL, "-o", target)
    assert (code, out) == (1, "")
    assert err == f"qlinear pack: {target}: exists already; --force replaces it\n"
    assert target.read_text() == "precious"
    assert call(capsys, "pack", VECTORS / SMALL, "-o", target, "--force")[0] == 0
    assert PackedFile.is_packed(target)


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (".", (), "is a folder; expected the name of the file to write"),
        ("absent/x", (), "cannot be written: there is no folder"),
        ("model/x.safetensors", (), "would become part of the checkpoint"),
        ("x", ("--name", "a/b"), "expected a name without '/'"),
    ],
)
def test_targets_and_names_that_cannot_be_used(
    target: str,
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = write_checkpoint(tmp_path / "model")
    code, _, err = call(capsys, "pack", source, "-o", tmp_path / target, *options)
    assert code == 1
    assert message in err
    assert err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.rglob("*")) == [
        "model", "model.safetensors", "quantize_config.json",
    ]  # fmt: skip


def test_a_device_is_not_replaced_by_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "device")
    code, _, err = call(capsys, "pack", VECTORS / SMALL, "-o", tmp_path / "device", "--force")
    assert code == 1
    assert "device: is not a regular file" in err
    assert not (tmp_path / "device").is_file()


def test_sources_that_cannot_be_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = VECTORS / "malformed" / "scales-nan"
    code, _, err = call(capsys, "pack", broken, "-o", tmp_path / "x")
    assert code == 1
    assert "layer.scales: group 1, column 7 is nan" in err
    assert not list(tmp_path.iterdir())
    call(capsys, "pack", VECTORS / SMALL, "-o", tmp_path / "x")
    code, _, err = call(capsys, "pack", tmp_path / "x", "-o", tmp_path / "y")
    assert code == 1
    assert "is packed already; expected a checkpoint folder" in err


@pytest.mark.parametrize("kind", ["pipe", "folder"])
@pytest.mark.parametrize("name", ["config.json", "quantize_config.json", "model.safetensors"])
def test_only_regular_files_are_opened(
    kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_checkpoint(tmp_path / "model")
    (source / name).unlink(missing_ok=True)
    # Opening a pipe would wait for ever.
    os.mkfifo(source / name) if kind == "pipe" else (source / name).mkdir()
    for words in (["pack", source, "-o", tmp_path / "x"], ["inspect", source]):
        code, out, err = call(capsys, *words)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert name in err
    assert not (tmp_path / "x").exists()


def started_pack(target: Path) -> "subprocess.Popen[str]":
    """A process that has packed one layer and waits for its input to end."""
    program = (
        "import sys\n"
        "from qlinear_service import cli, models\n"
        "once = models.CheckpointModel.load_slabs\n"
        "def slow(self, converter):\n"
        "    for layer in once(self, converter):\n"
        "        yield layer\n"
        "        print('started', flush=True)\n"
        "        sys.stdin.read()\n"
        "models.CheckpointModel.load_slabs = slow\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    words = ["pack", str(VECTORS / PHI), "-o", str(target)]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def test_a_terminated_pack_leaves_nothing(tmp_path: Path) -> None:
    process = started_pack(tmp_path / "x.safetensors")
    assert [path.suffix for path in tmp_path.iterdir()] == [".partial"]
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "qlinear pack: stopped; nothing was written\n"
    assert not list(tmp_path.iterdir())


def test_inspect_shows_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "inspect", VECTORS / PHI)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"model {PHI}: GPTQ (gptq), 4 bits, group_size 128"
    row = next(line for line in lines if "0.self_attn.qkv_proj" in line).split()
    assert row[1:9] == ["256", "128", "4", "128", "yes", "no", "float16", "no"]
    assert row[10:] == ["gptq", "gptq", "gptqmodel:7.7.0"]
    assert any("model.embed_tokens.weight" in line and "embedding" in line for line in lines)
    assert any("lm_head.weight" in line and "not quantized" in line for line in lines)


def test_inspect_shows_a_packed_file_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "x.safetensors"
    call(capsys, "pack", VECTORS / SMALL, "-o", target, "--name", "small")
    code, out, _ = call(capsys, "inspect", target, "--json", "--verify")
    assert code == 0
    [model] = json.loads(out)["models"]
    assert (model["name"], model["layout_version"], model["verified"]) == ("small", 1, True)
    [layer] = model["layers"]
    assert layer["bytes"] == 64 * 128 // 2 + 64 * 4 * 2
    del layer["bytes"]
    assert layer == {
        "name": "small/layer", "module": "layer", "n": 64, "k": 96, "bits": 4, "group_size": 32,
        "symmetric": True, "has_bias": False, "has_k_permutation": False,
        "scale_dtype": "float16", "source": {"tool": "", "format": "gptq", "method": "gptq"},
    }  # fmt: skip


def test_inspect_verify_reads_every_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "x.safetensors"
    call(capsys, "pack", VECTORS / SMALL, "-o", target)
    code, out, _ = call(capsys, "inspect", target, "--verify")
    assert code == 0
    assert "verified: every checksum is as it should be" in out
    content = bytearray(target.read_bytes())
    content[-1] ^= 1
    target.write_bytes(content)
    assert call(capsys, "inspect", target)[0] == 0
    code, _, err = call(capsys, "inspect", target, "--verify")
    assert code == 1
    assert "layer.scales: has checksum" in err
    code, _, err = call(capsys, "inspect", VECTORS / "malformed" / "scales-nan", "--verify")
    assert code == 1
    assert "is nan" in err


def test_inspect_shows_a_folder_of_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(VECTORS / SMALL, tmp_path / "one")
    call(capsys, "pack", VECTORS / SMALL, "-o", tmp_path / "x.safetensors", "--name", "two")
    code, out, _ = call(capsys, "inspect", tmp_path)
    assert code == 0
    assert "model one: GPTQ" in out
    assert "model two: packed file, layout version 1" in out


def test_inspect_of_another_format_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "inspect", VECTORS / "optional-bnb-nf4")
    assert (code, out) == (1, "")
    assert "holds bitsandbytes; GPTQ, AWQ (gemm)" in err
    assert err.count("\n") == 1
    code, out, err = call(capsys, "inspect", VECTORS / "optional-bnb-nf4", "--json")
    assert code == 1
    assert "holds bitsandbytes" in json.loads(out)["refused"]["problem"]
    assert err.count("\n") == 1


def test_a_killed_pack_is_restarted_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "x.safetensors"
    process = started_pack(target)
    process.kill()
    process.communicate(timeout=30)
    assert [path.name for path in tmp_path.iterdir()] == [".x.safetensors.partial"]
    assert call(capsys, "pack", VECTORS / PHI, "-o", target)[0] == 0
    assert list(tmp_path.iterdir()) == [target]
    assert len(PackedFile(target).specs) == 10


def test_two_processes_never_write_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "x.safetensors"
    process = started_pack(target)
    code, _, err = call(capsys, "pack", VECTORS / PHI, "-o", target)
    assert code == 1
    assert "cannot be written: another process is writing" in err
    assert err.count("\n") == 1
    process.communicate(timeout=30)  # its input ends: it goes on
    assert process.returncode == 0
    assert len(PackedFile(target).specs) == 10
    assert list(tmp_path.iterdir()) == [target]
