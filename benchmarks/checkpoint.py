"""Converting a checkpoint and loading the result, beside what the disk and `cat` do.

A GPTQ checkpoint in the shape of a 7B Llama (random codes) is packed as `qlinear pack` does it; the
packed file is loaded for the CPU, every tensor touched and checked. Runs alternate with a plain
copy of the same bytes, synced, and with `cat FILE > /dev/null`; ratios are of medians.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from checkpoint_files import BLOCKS, write_checkpoint
from figures import console, machine, print_facts, print_table, write_json
from processes import Others, status_bytes

from qlinear_service.models import PackedModel

MB = 1e6
LEAST_PACK_MB_PER_SECOND = 150
LEAST_LOAD_RATIO = 0.7
MOST_LAYERS = 2
SAMPLE_SECONDS = 0.002


def pack_once(source: Path, target: Path) -> dict[str, float]:
    """Run `qlinear pack`; return its seconds, start of the interpreter included, and its memory.

    Memory is the most that was resident without a file behind it, beyond what was when the file
    was begun: everything is imported and the checkpoint opened by then, and no layer read.
    """
    words = [sys.executable, "-m", "qlinear_service", "pack", str(source), "-o", str(target)]
    begun = target.with_name(f".{target.name}.partial")
    start = most = 0
    started = time.perf_counter()
    process = subprocess.Popen([*words, "--force"], stdout=subprocess.DEVNULL, process_group=0)
    try:
        while process.poll() is None:
            try:
                now = status_bytes(process.pid, "RssAnon")
            except (LookupError, FileNotFoundError):
                break  # it has ended
            if not start and begun.exists():
                start = now
            most = max(most, now) if start else 0
            time.sleep(SAMPLE_SECONDS)
    except BaseException:
        process.kill()
        raise
    finally:
        code = process.wait()
    if code != 0:
        raise SystemExit("qlinear pack has failed")
    return {"seconds": time.perf_counter() - started, "peak_bytes": most - start}


def copy_once(sources: list[Path], target: Path) -> float:
    """Copy files into one, sync it, and return the seconds."""
    started = time.perf_counter()
    with target.open("wb") as file:
        subprocess.run(["cat", *map(str, sources)], stdout=file, check=True)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    target.unlink()
    return seconds


def load_once(path: Path) -> float:
    """Load a packed file, every checksum checked, and return the seconds."""
    started = time.perf_counter()
    layers = list(PackedModel(path).load_layers())
    seconds = time.perf_counter() - started
    assert layers
    return seconds


def cat_once(path: Path) -> float:
    """Read a file with cat, and return the seconds."""
    started = time.perf_counter()
    with open(os.devnull, "wb") as nowhere:
        subprocess.run(["cat", str(path)], stdout=nowhere, check=True)
    return time.perf_counter() - started


def measure(folder: Path, *, blocks: int, divisor: int, runs: int, loads: int) -> dict[str, Any]:
    """Run everything and return the figures."""
    source, target = folder / "source", folder / "packed.safetensors"
    code_bytes = write_checkpoint(source, blocks=blocks, divisor=divisor)
    shards = sorted(source.glob("*.safetensors"))
    packs, copies = [], []
    for _ in range(runs):
        copies.append(copy_once(shards, folder / "copy"))
        packs.append(pack_once(source, target))
    load_once(target), cat_once(target)  # the page cache is warm from here on
    loading, reading = [], []
    for _ in range(loads):
        reading.append(cat_once(target))
        loading.append(load_once(target))
    largest = max(spec.n_padded * spec.k_padded // 2 for spec in PackedModel(target).specs)
    packed_seconds = statistics.median(pack["seconds"] for pack in packs)
    return {
        "code_bytes": code_bytes,
        "packed_bytes": target.stat().st_size,
        "pack_mb_per_second": code_bytes / MB / packed_seconds,
        "pack_over_copy": packed_seconds / statistics.median(copies),
        "peak_layers": max(pack["peak_bytes"] for pack in packs) / largest,
        "load_gb_per_second": target.stat().st_size / 1e9 / statistics.median(loading),
        "cat_over_load": statistics.median(reading) / statistics.median(loading),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="qlinear bench checkpoint", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="where files go (default: a temporary folder)"
    )
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of the model [%(default)s]")
    parser.add_argument(
        "--divisor", type=int, default=1, metavar="N", help="of each n and k [%(default)s]"
    )
    parser.add_argument("--runs", type=int, default=3, help="of pack and copy [%(default)s]")
    parser.add_argument("--loads", type=int, default=7, help="of load and cat [%(default)s]")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, - is stdout")
    args = parser.parse_args()
    out = console(json_to_stdout=args.json == "-")
    others = Others()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        figures = measure(
            Path(folder), blocks=args.blocks, divisor=args.divisor, runs=args.runs,
            loads=args.loads,
        )  # fmt: skip
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    report = {"machine": machine(), "others_cores": others.cores(own), "checkpoint": figures}
    rows = [
        ("pack, MB/s of source codes", f"{figures['pack_mb_per_second']:.0f}",
         f">= {LEAST_PACK_MB_PER_SECOND}"),
        ("pack / copy and sync of the same bytes", f"{figures['pack_over_copy']:.2f}", ""),
        ("peak anonymous memory, layers", f"{figures['peak_layers']:.2f}", f"< {MOST_LAYERS}"),
        ("load, GB/s", f"{figures['load_gb_per_second']:.1f}", ""),
        ("cat / load", f"{figures['cat_over_load']:.2f}", f">= {LEAST_LOAD_RATIO}"),
    ]  # fmt: skip
    title = f"{figures['code_bytes'] / MB:.0f} MB of codes, {args.blocks} blocks"
    print_table(out, title, ("", "measured", "target"), rows)
    print_facts(out, report)
    write_json(args.json, report)


if __name__ == "__main__":
    main()
