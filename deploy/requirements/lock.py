"""Writes the locks of the images: exact versions with the hashes of all their files.

    python deploy/requirements/lock.py [--check]

`cpu.txt` and `gpu.txt` are what the two targets install, `build.txt` and `sbom.txt` what builds
them. Versions come from constraints.txt; what it does not name stays as it was locked before.
`--check` writes nothing, and fails where a lock is not what it would write.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SERVER = ["pyproject.toml", "--extra", "server", "--extra", "tracing"]
LOCKS = {
    "cpu": SERVER,
    "gpu": [*SERVER, "deploy/requirements/gpu.in"],
    "build": ["deploy/requirements/build.in"],
    "sbom": ["deploy/requirements/sbom.in"],
}
OF_CUDA = re.compile(r"(torch|triton|cuda-.*|nvidia-(?!ml-py).*)")
"""Not in cpu.txt: its torch is another build, cpu-torch.txt, and needs none of these."""

OF_CUDA_13 = re.compile(r"torch==|nvidia-(cuda|nvvm)")
"""Lines of constraints.txt that do not hold for gpu.txt: its torch pins what it needs itself."""

HEAD = """# {what}: exact versions, any of these files and no other. Written by `make lock`.
"""


def names(lock: str) -> list[str]:
    """Return the packages of a lock, in its order."""
    return re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)


def hashes(lock: str) -> set[str]:
    """Return all hashes of a lock."""
    return set(re.findall(r"--hash=(sha256:[0-9a-f]{64})", lock))


def without_hashes(lock: str) -> str:
    """Return the versions of a lock and where each is to be installed."""
    return re.sub(r" \\$|^ +--hash=.*\n?", "", lock, flags=re.MULTILINE)


def lock(name: str, folder: Path) -> str:
    """Return what a lock has to say.

    Args:
        name: of the lock.
        folder: for files on the way.
    """
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    if name == "gpu":
        pins = [line for line in pins if not OF_CUDA_13.match(line)]
    constraints, output = folder / "constraints.txt", folder / f"{name}.txt"
    constraints.write_text("\n".join(pins))
    before = HERE / output.name
    if before.exists():  # its versions are kept; its hashes would be, too, right or wrong
        output.write_text(without_hashes(before.read_text()))
    words = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
    words += ["--generate-hashes", "--no-header", "--no-annotate", "--no-config"]
    words += ["--constraint", str(constraints), "--output-file", str(output), *LOCKS[name]]
    _run(words)
    if name == "cpu":
        left_out = [package for package in names(output.read_text()) if OF_CUDA.fullmatch(package)]
        _run([*words, *(word for package in left_out for word in ("--no-emit-package", package))])
    return HEAD.format(what=name) + output.read_text()


def problem(name: str, wanted: str) -> str:
    """Return how a lock that lies here differs from what it should be, "" if it does not.

    A file that was added to a version later is no difference: its hash is only missing.
    """
    found = (HERE / f"{name}.txt").read_text()
    if without_hashes(found) != without_hashes(wanted):
        return f"{name}.txt has not the versions that pyproject.toml and constraints.txt ask for"
    if unknown := hashes(found) - hashes(wanted):
        return f"{name}.txt has {len(unknown)} hashes that the index does not know"
    return ""


def _run(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(words[:3])} failed: {done.stderr.strip()}")


def main() -> int:
    """Write or check all locks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    check = parser.parse_args().check
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        for name in LOCKS:
            wanted = lock(name, Path(folder))
            if not check:
                (HERE / f"{name}.txt").write_text(wanted)
            elif differs := problem(name, wanted):
                problems.append(f"{differs}: make lock")
    print("\n".join(problems), end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
