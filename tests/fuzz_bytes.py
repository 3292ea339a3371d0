"""Lets atheris, which sees which branches of the readers its bytes reach, damage checkpoints.

A program: `python tests/fuzz_bytes.py -max_total_time=60`; flags are libFuzzer's. It ends with an
exception, and leaves the bytes in a file, where a checkpoint neither loads nor ends in one clean
error; -rss_limit_mb bounds its memory and -timeout the seconds of one input.
"""

import logging
import sys
import tempfile
from pathlib import Path

import atheris

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "service"), str(ROOT / "tests")]

with atheris.instrument_imports(include=["qlinear_service.checkpoints"]):
    import fuzz_checkpoints

MOST_EDITS = 8
TREATMENTS = ("auto", "keep", "rtn")
BOUNDS = ("-rss_limit_mb=2048", "-timeout=20", "-max_len=256")

SEEDS = [fuzz_checkpoints.seed(name) for name in fuzz_checkpoints.SEEDS]


def damaged(data: bytes) -> tuple[fuzz_checkpoints.Files, str]:
    """Read from `data` which checkpoint is damaged, where, and with which bytes."""
    provider = atheris.FuzzedDataProvider(data)
    files = dict(SEEDS[provider.ConsumeIntInRange(0, len(SEEDS) - 1)])
    treatment = TREATMENTS[provider.ConsumeIntInRange(0, len(TREATMENTS) - 1)]
    names = sorted(files)
    for _ in range(provider.ConsumeIntInRange(1, MOST_EDITS)):
        name = names[provider.ConsumeIntInRange(0, len(names) - 1)]
        content = bytearray(files[name])
        # Headers are where most meaning is; data lies behind.
        end = len(content) if provider.ConsumeBool() else min(len(content), 2000)
        place = provider.ConsumeIntInRange(0, max(end - 1, 0))
        length = provider.ConsumeIntInRange(0, 8)
        patch = provider.ConsumeBytes(provider.ConsumeIntInRange(0, 16))
        content[place : place + length] = patch
        if len(patch) != length and name.endswith(".safetensors"):
            # Otherwise every insertion ends at the header's length.
            size = int.from_bytes(content[:8], "little") + len(patch) - length
            if place >= 8 and 0 <= size < 1 << 64:
                content[:8] = size.to_bytes(8, "little")
        files[name] = bytes(content)
    return files, treatment


def main() -> None:
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def test_one_input(data: bytes) -> None:
            files, treatment = damaged(data)
            fuzz_checkpoints.load(folder, files, treatment)

        atheris.Setup([sys.argv[0], *BOUNDS, *sys.argv[1:]], test_one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
