"""Damages real checkpoints of every format and loads them: each loads, or is one clean error.

A program, so that memory can be bounded for it alone: `python tests/fuzz_checkpoints.py`. Ends with
0 if nothing was found; with an exception otherwise, after hypothesis has found the smallest case.
"""

import argparse
import contextlib
import json
import logging
import resource
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "service"), str(ROOT / "tests")]

from checkpoints import VECTORS, packed_layers  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from qlinear_service.errors import CheckpointError  # noqa: E402

MOST_BYTES = 512 << 20
"""Address space that loading may take beyond what the program has at its start: the vectors have at
most 300 KB, but threads of torch and a mapped file count, too."""

MOST_SECONDS = 20

SEEDS = (
    "gptq-autogptq-layer-n64-k96-g32-sym",
    "gptq-autogptq-layer-n64-k1024-g128-sym-actorder",
    "gptq-autogptq-layer-n64-k512-g64-asym-actorder-w8",
    "gptq-gptqmodel-v1-dynamic-mixed",
    "gptq-gptqmodel-v2-w4-g32-asym",
    "autoround-native-w4-g64-asym-awq-layout",
    "awq-autoawq-layer-n64-k96-g32-legacy-config",
    "awq-gptqmodel-gemm-w4-g64-sym",
    "ct-layer-n64-k128-g32-asym",
    "ct-layer-n64-k1024-channel-asym",
    "ct-layer-n128-k256-tensor-sym",
    "ct-old06-layer-n128-k384-g128-asym-int8-zp",
    "ct-llmcompressor-old-gptq-w4a16-g32-actorder-group",
    "marlin-ist-n256-k256-g128",
    "marlin-gptqmodel109-n256-k256-gneg1",
    "plain-fp16-384x384-bias",
    "plain-fp32-n1000-k96",
    "malformed/shard-name-collision",
)
"""Vectors that are damaged."""

DTYPES = ("I32", "I64", "I8", "U8", "F16", "BF16", "F32", "F64", "BOOL", "F8_E4M3", "I33", "")
WIDTHS = {"I32": 4, "I64": 8, "I8": 1, "U8": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8, "BOOL": 1}
NUMBERS = st.sampled_from((0, 1, 2, 7, 8, 16, 63, 64, 96, 128, 1000, 2**31, 2**32 + 1, 2**62, 2**63,
                           2**64, -1, -2))  # fmt: skip
VALUES = st.one_of(
    NUMBERS, st.booleans(), st.none(), st.text(max_size=8), st.floats(),
    st.lists(NUMBERS, max_size=2),
    st.sampled_from(("gptq", "gptq_v2", "awq", "marlin", "compressed-tensors", "gemm", "auto-round",
                     "pack-quantized", "auto_round:auto_gptq", "group", "channel", "tensor")),
    st.dictionaries(st.sampled_from(("bits", "group_size", "sym", "x")), NUMBERS, max_size=2),
)  # fmt: skip
SUFFIXES = ("qweight", "qzeros", "scales", "g_idx", "bias", "weight", "weight_packed", "B", "s",
            "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "x")  # fmt: skip

Files = dict[str, bytes]
Header = dict[str, Any]


def seed(name: str) -> Files:
    """The files of a vector that a loader looks at."""
    kinds = ("*.safetensors", "*.json")
    paths = [path for kind in kinds for path in sorted((VECTORS / name).glob(kind))]
    return {path.name: path.read_bytes() for path in paths if path.name != "vector.json"}


def split(content: bytes) -> tuple[Header, bytes]:
    """Header and data of a safetensors file."""
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: Header, data: bytes) -> bytes:
    """The opposite of `split`."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def damage_header(data: st.DataObject, content: bytes) -> bytes:
    """Change what the header says and leave the data."""
    header, rest = split(content)
    names = [name for name in header if name != "__metadata__"]
    name = data.draw(st.sampled_from(names), label="tensor")
    entry = header[name]
    match data.draw(st.sampled_from(("dtype", "shape", "offsets", "name", "gone", "odd"))):
        case "dtype":
            entry["dtype"] = data.draw(st.sampled_from(DTYPES), label="dtype")
        case "shape":
            entry["shape"] = data.draw(st.lists(NUMBERS, max_size=4), label="shape")
        case "offsets":
            entry["data_offsets"] = data.draw(st.lists(NUMBERS, max_size=3), label="offsets")
        case "name":
            suffix = data.draw(st.sampled_from(SUFFIXES), label="suffix")
            header[f"{name.rpartition('.')[0]}.{suffix}"] = header.pop(name)
        case "gone":
            del header[name]
        case "odd":
            header[name] = data.draw(VALUES, label="entry")
    return joined(header, rest)


def reshape_tensor(data: st.DataObject, content: bytes) -> bytes:
    """Give one tensor another form in a file that stays valid: readers must find out."""
    header, rest = split(content)
    names = [name for name in header if name != "__metadata__"]
    name = data.draw(st.sampled_from(names), label="tensor")
    sizes = st.sampled_from((0, 1, 2, 3, 4, 8, 12, 16, 32, 64, 96, 97, 128, 256))
    dtype = data.draw(st.sampled_from(sorted(WIDTHS)), label="dtype")
    keep_dtype = data.draw(st.booleans(), label="keep dtype")
    dtype = header[name]["dtype"] if keep_dtype else dtype
    shape = data.draw(st.lists(sizes, min_size=0, max_size=3), label="shape")
    parts = {each: rest[slice(*header[each]["data_offsets"])] for each in names}
    nbytes = WIDTHS[dtype]
    for size in shape:
        nbytes *= size
    byte = data.draw(st.sampled_from((0, 1, 0x77, 0x88, 0xFF)), label="byte")
    parts[name] = bytes([byte]) * nbytes
    header[name] |= {"dtype": dtype, "shape": shape}
    offset = 0
    for each, part in parts.items():
        header[each]["data_offsets"] = [offset, offset + len(part)]
        offset += len(part)
    return joined(header, b"".join(parts.values()))


def damage_values(data: st.DataObject, content: bytes) -> bytes:
    """Overwrite a stretch of the data, which the header does not speak of."""
    header, rest = split(content)
    changed = bytearray(rest)
    place = data.draw(st.integers(0, max(len(rest) - 1, 0)), label="place")
    stretch = data.draw(st.binary(min_size=1, max_size=16), label="stretch")
    changed[place : place + len(stretch)] = stretch
    return joined(header, bytes(changed[: len(rest)]))


def damage_bytes(data: st.DataObject, content: bytes) -> bytes:
    """Flip bits and cut anywhere."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4), label="flips")):
        place = data.draw(st.integers(0, min(len(changed) - 1, 4000)), label="byte")
        changed[place] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    if data.draw(st.booleans(), label="cut"):
        del changed[data.draw(st.integers(0, len(changed)), label="length") :]
    return bytes(changed)


def damage_json(data: st.DataObject, content: bytes) -> bytes:
    """Change one value of a configuration or an index, at any depth."""
    try:
        whole = json.loads(content)
    except ValueError:
        return content
    place: Any = whole
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return content
        key = data.draw(st.sampled_from(keys), label="key")
        deeper = isinstance(place[key], dict | list) and data.draw(st.booleans(), label="deeper")
        if not deeper:
            break
        place = place[key]
    if isinstance(place, dict) and data.draw(st.booleans(), label="gone"):
        del place[key]
    else:
        place[key] = data.draw(VALUES, label="value")
    return json.dumps(whole).encode()


WEIGHTS: tuple[Callable[[st.DataObject, bytes], bytes], ...] = (
    damage_header, reshape_tensor, damage_values, damage_bytes,
)  # fmt: skip


def damaged(data: st.DataObject) -> Files:
    """A checkpoint with some damage."""
    files = seed(data.draw(st.sampled_from(SEEDS), label="vector"))
    for _ in range(data.draw(st.integers(1, 2), label="damages")):
        name = data.draw(st.sampled_from(sorted(files)), label="file")
        ways = WEIGHTS if name.endswith(".safetensors") else (damage_json, damage_bytes)
        way = data.draw(st.sampled_from(ways), label="way")
        # What was damaged before may be beyond being taken apart.
        with contextlib.suppress(ValueError, KeyError, TypeError, struct.error):
            files[name] = way(data, files[name])
    return files


def load(folder: Path, files: Files, treatment: str) -> bool:
    """Load such a checkpoint; say whether it loads.

    Raises:
        AssertionError: the error is not one clean sentence, or a layer is not what it says.
    """
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    try:
        layers = packed_layers(folder, treatment)
    except CheckpointError as error:
        sentence = str(error)
        assert sentence.startswith(str(folder)), sentence
        assert sentence.isprintable(), sentence
        return False
    for layer in layers:
        # Padded by the layout, a layer has at most so many bytes for each that the files have.
        assert layer.packed_bytes <= 64 * 128 * (4096 + sum(map(len, files.values())))
        assert layer.qweight.shape[0] > 0
    return True


def bound_memory() -> None:
    """Let this process take no more than `MOST_BYTES` beyond what it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def too_slow(signum: int, frame: FrameType | None) -> None:
    raise AssertionError(f"loading takes more than {MOST_SECONDS} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=300, help="[%(default)s]")
    parser.add_argument("--seconds", type=float, default=0, help="go on for so long")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, too_slow)
    counts = {True: 0, False: 0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        load(folder, seed(SEEDS[0]), "auto")  # starts torch's threads before memory is bounded
        bound_memory()

        @settings(
            max_examples=args.examples, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(data=st.data(), treatment=st.sampled_from(("auto", "keep", "rtn")))
        def fuzz(data: st.DataObject, treatment: str) -> None:
            files = damaged(data)
            signal.alarm(MOST_SECONDS)
            try:
                counts[load(folder, files, treatment)] += 1
            finally:
                signal.alarm(0)

        ends = time.monotonic() + args.seconds
        fuzz()
        while time.monotonic() < ends:
            fuzz()
    print(f"loaded {counts[True]}, refused {counts[False]}")


if __name__ == "__main__":
    main()
