"""The committed protocol modules are what linear.proto makes, and it only ever grows.

Needs the dev tools (`make lint` installs them); without them the tests that generate are skipped.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from qlinear.v1 import linear_pb2

ROOT = Path(__file__).parents[2]
PROTO = ROOT / "proto"
BASELINE = PROTO / "qlinear/v1/linear.binpb"
GENERATED = ("linear_pb2.py", "linear_pb2.pyi", "linear_pb2_grpc.py", "linear_pb2_grpc.pyi")
BIN = Path(sys.executable).parent

needs_dev_tools = pytest.mark.skipif(
    importlib.util.find_spec("grpc_tools") is None or not (BIN / "buf").exists(),
    reason="needs the dev tools: make lint installs them",
)


def buf(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN / "buf", *words], capture_output=True, text=True, timeout=60)


@pytest.fixture
def proto_copy(tmp_path: Path) -> Path:
    """A copy of proto/ to change at will."""
    return Path(shutil.copytree(PROTO, tmp_path / "proto"))


@needs_dev_tools
def test_committed_modules_are_what_the_contract_generates(tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python", "mypy_grpc")]
    plugin = f"--plugin=protoc-gen-mypy_grpc={BIN / 'protoc-gen-mypy_grpc'}"
    words = [sys.executable, "-m", "grpc_tools.protoc", "-I.", plugin, *outputs]
    subprocess.run([*words, "qlinear/v1/linear.proto"], cwd=PROTO, check=True, timeout=60)
    made = tmp_path / "qlinear/v1"
    assert sorted(path.name for path in made.iterdir()) == sorted(GENERATED)
    for name in GENERATED:
        assert (made / name).read_bytes() == (PROTO / "qlinear/v1" / name).read_bytes(), name


@needs_dev_tools
def test_committed_descriptor_is_the_contract_of_today(tmp_path: Path) -> None:
    image = tmp_path / "now.binpb"
    done = buf("build", str(PROTO), "--exclude-source-info", "-o", str(image))
    assert done.returncode == 0, done.stderr
    assert image.read_bytes() == BASELINE.read_bytes(), "run make proto"


def test_committed_descriptor_describes_the_committed_modules() -> None:
    files = descriptor_pb2.FileDescriptorSet.FromString(BASELINE.read_bytes()).file
    assert len(files) == 1
    module = descriptor_pb2.FileDescriptorProto()
    linear_pb2.DESCRIPTOR.CopyToProto(module)
    assert [m.name for m in files[0].message_type] == [m.name for m in module.message_type]
    for ours, theirs in zip(files[0].message_type, module.message_type, strict=True):
        assert [(f.name, f.number, f.type, f.label) for f in ours.field] == [
            (f.name, f.number, f.type, f.label) for f in theirs.field
        ]


@needs_dev_tools
def test_nothing_broke_since_the_committed_descriptor() -> None:
    done = buf("breaking", str(PROTO), "--against", str(BASELINE))
    assert done.returncode == 0, done.stdout


@needs_dev_tools
@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("uint32 priority = 4;", "uint32 priority = 5;", 'field "4" with name "priority"'),
        ("uint32 priority = 4;", "string priority = 4;", "changed type"),
        ("uint32 priority = 4;", "uint32 urgency = 4;", "changed name"),
        ("DTYPE_BF16 = 2;", "", 'enum value "2" on enum "DType" was deleted'),
        (
            "  rpc ListLayers(ListLayersRequest) returns (ListLayersResponse);\n",
            "",
            "ListLayers",
        ),
        ("bool symmetric = 7;", "", 'field "7" with name "symmetric"'),
    ],
)
def test_a_breaking_change_is_detected(
    proto_copy: Path, old: str, new: str, complaint: str
) -> None:
    contract = proto_copy / "qlinear/v1/linear.proto"
    text = contract.read_text()
    assert text.count(old) == 1
    contract.write_text(text.replace(old, new))
    done = buf("breaking", str(proto_copy), "--against", str(BASELINE))
    assert done.returncode == 100
    assert complaint in done.stdout


@needs_dev_tools
def test_an_addition_is_not_a_breaking_change(proto_copy: Path) -> None:
    contract = proto_copy / "qlinear/v1/linear.proto"
    text = contract.read_text()
    contract.write_text(
        text.replace("uint32 priority = 4;", "uint32 priority = 4; bool added = 5;")
    )
    done = buf("breaking", str(proto_copy), "--against", str(BASELINE))
    assert done.returncode == 0, done.stdout
