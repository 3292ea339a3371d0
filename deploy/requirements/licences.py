"""Writes licences.md: what the images ship under which licence, as each package itself says.

    python deploy/requirements/licences.py

pip reads the metadata of every locked file, mostly without downloading the file itself.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TARGETS = ("cpu", "gpu")
PIP = "pip==25.3"  # older ones do not know License-Expression
HEAD = """# Licences

Python packages in the images, as their metadata says it. Written by `make lock`. The texts that
each package brings lie in the image, in `/opt/qlinear/lib/python3.*/site-packages/*.dist-info`;
those of the distribution's packages, which depend on the base, in `/usr/share/doc/*/copyright`.
qlinear itself: Apache-2.0.

| package | cpu | gpu | licence |
|---|---|---|---|
"""


def licence_of(metadata: dict[str, Any]) -> str:
    """Return what a package's metadata says, in one line; "" if it says nothing."""
    if expression := metadata.get("license_expression"):
        return str(expression)
    named = [
        line.rpartition(" :: ")[2]
        for line in metadata.get("classifier", [])
        if line.startswith("License ::")
    ]
    text = str(metadata.get("license") or "").strip()
    if text and "\n" not in text and len(text) < 80:
        return text
    return ", ".join(named)


def installed_by(lock: Path) -> list[dict[str, Any]]:
    """Return the metadata of all that a lock installs, on whatever Python and Linux."""
    with tempfile.TemporaryDirectory() as folder:
        report, everywhere = Path(folder) / "report.json", Path(folder) / "lock.txt"
        everywhere.write_text(re.sub(r" ; [^\\\n]*", "", lock.read_text()))
        words = ["uv", "run", "--quiet", "--no-project", "--python", sys.executable, "--with", PIP]
        words += ["python", "-m", "pip", "install", "--dry-run", "-qq", "--ignore-installed"]
        words += ["--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(everywhere)]
        subprocess.run([sys.executable, "-m", *words, "--report", str(report)], check=True)
        return [one["metadata"] for one in json.loads(report.read_text())["install"]]


def cpu_torch() -> str:
    """Return the version of the torch that the CPU target ships."""
    found = re.search(r"^torch==(\S+)", (HERE / "cpu-torch.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def table(of: dict[str, list[dict[str, Any]]]) -> str:
    """Return the file's text.

    Args:
        of: the metadata of all packages of each target.
    """
    versions: dict[str, dict[str, str]] = {}
    licences: dict[str, set[str]] = {}
    for target, packages in of.items():
        for metadata in packages:
            name = metadata["name"].lower().replace("_", "-")
            versions.setdefault(name, {})[target] = metadata["version"]
            licences.setdefault(name, set()).add(licence_of(metadata))
    # The same package, built for another index.
    versions["torch"]["cpu"] = cpu_torch()
    lines = []
    for name in sorted(versions):
        cpu, gpu = (versions[name].get(target, "") for target in TARGETS)
        lines.append(f"| {name} | {cpu} | {gpu} | {'; '.join(sorted(licences[name]))} |\n")
    return HEAD + "".join(lines)


if __name__ == "__main__":
    text = table({target: installed_by(HERE / f"{target}.txt") for target in TARGETS})
    (HERE / "licences.md").write_text(text)
