"""What each GPU kernel takes of its multiprocessor, and the check that none takes what it must not.

Reads what ptxas says while it compiles. A kernel that spills registers or keeps a stack frame goes
through memory in its inner loop, and a wgmma pipeline that ptxas had to serialise waits at each
step: both are right, slow, and seen nowhere else. Run as a program: exit code 1 if there is one.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qlinear_service.errors import BuildError
from qlinear_service.kernels.architectures import ARCHITECTURES, chosen_architectures
from qlinear_service.kernels.build_cuda import (
    build_cuda_library,
    compiler_output,
    read_record,
)
from qlinear_service.kernels.library_cache import default_cache_dir

__all__ = ["KernelResources", "format_table", "main", "parse", "slow_kernels"]

ENTRY = re.compile(r"Compiling entry function '([^']+)' for 'sm_(\w+)'")
PROPERTIES = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
USED = re.compile(r"Used (\d+) registers(?:.*?, (\d+) bytes smem)?")
MEMORY = ("stack_bytes", "spill_store_bytes", "spill_load_bytes")
"""What PROPERTIES finds."""

SLOW = re.compile(
    r"^ptxas warning(?!.*(?:Local memory|spilled))|Potential Performance Loss|setmaxnreg.*ignored"
)
"""Any warning that PROPERTIES does not cover, and what is mere information to ptxas: wgmma that
waits, a change of registers that it left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResources:
    """One kernel on one architecture."""

    kernel: str
    """Its name as in the source, without the namespaces that all kernels are in."""
    architecture: str
    registers: int
    """Per thread."""
    shared_bytes: int
    """Static, per thread block; what is asked for at the launch comes on top."""
    stack_bytes: int
    """Per thread, of the kernel or of a function that it calls."""
    spill_store_bytes: int
    spill_load_bytes: int

    @property
    def faulty(self) -> bool:
        """Whether it goes through memory where registers were meant."""
        return any((self.stack_bytes, self.spill_store_bytes, self.spill_load_bytes))


def parse(output: str) -> list[KernelResources]:
    """Return what ptxas -v says in `output`, sorted by kernel and architecture.

    Raises:
        BuildError: it says something of a kernel in words that are not known here.
    """
    found: list[dict[str, Any]] = []
    for line in output.splitlines():
        if match := ENTRY.search(line):
            found.append({"kernel": match[1], "architecture": match[2], **dict.fromkeys(MEMORY, 0)})
        elif found and (match := PROPERTIES.search(line)):
            # First the kernel's own, then those of each function that it calls.
            for name, value in zip(MEMORY, map(int, match.groups()), strict=True):
                found[-1][name] = max(found[-1][name], value)
        elif found and (match := USED.search(line)):
            found[-1] |= {"registers": int(match[1]), "shared_bytes": int(match[2] or 0)}
    unknown = next((each["kernel"] for each in found if "registers" not in each), None)
    if unknown is not None:
        raise BuildError(f"ptxas does not say how many registers {unknown} uses; expected ptxas -v")
    names = _readable(sorted({each["kernel"] for each in found}))
    rows = [KernelResources(**each | {"kernel": names[each["kernel"]]}) for each in found]
    return sorted(rows, key=lambda row: (row.kernel, _place(row.architecture)))


def slow_kernels(output: str) -> list[str]:
    """Return what ptxas says of kernels that it had to make slow, one sentence each."""
    return sorted({line.strip() for line in output.splitlines() if SLOW.search(line)})


def format_table(rows: Sequence[KernelResources]) -> str:
    """Return one line for each kernel: registers and static shared memory by architecture.

    A kernel that is at fault on an architecture shows that instead.
    """
    architectures = sorted({row.architecture for row in rows}, key=_place)
    cells = {(row.kernel, row.architecture): _cell(row) for row in rows}
    kernels = sorted({row.kernel for row in rows})
    lines = [["kernel", *(f"sm_{each}" for each in architectures)]]
    lines += [[name, *(cells.get((name, each), "-") for each in architectures)] for name in kernels]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(map(str.rjust, line[1:], widths[1:]))])
        for line in lines
    )


def _cell(row: KernelResources) -> str:
    shared = f"+{row.shared_bytes}" if row.shared_bytes else ""
    if not row.faulty:
        return f"{row.registers}{shared}"
    spilled = row.spill_store_bytes + row.spill_load_bytes
    return f"{row.registers}{shared} SPILL {spilled} STACK {row.stack_bytes}"


def _place(architecture: str) -> tuple[int, str]:
    return int(architecture.rstrip("af")), architecture


def _readable(mangled: Sequence[str]) -> dict[str, str]:
    """Return the name in the source of each mangled one, itself where there is no c++filt."""
    tool = shutil.which("c++filt")
    if tool is None or not mangled:
        return {name: name for name in mangled}
    done = subprocess.run([tool], input="\n".join(mangled), capture_output=True, text=True)
    names = done.stdout.splitlines()
    if len(names) != len(mangled):
        return {name: name for name in mangled}
    return {old: _short(new) for old, new in zip(mangled, names, strict=True)}


def _short(name: str) -> str:
    """Return a kernel's name and template arguments, without its result and parameters."""
    name = re.sub(r"\bqlinear::(?:cuda::)?", "", name).replace("(anonymous namespace)::", "")
    depth = 0
    for place, sign in enumerate(name):
        depth += (sign == "<") - (sign == ">")
        if sign == "(" and depth == 0:
            name = name[:place]
            break
    return name.removeprefix("void ")


def main(words: Sequence[str] | None = None) -> int:
    """Print the table of the library for these sources; 1 if a kernel is at fault."""
    parser = argparse.ArgumentParser(
        prog="python -m qlinear_service.kernels.resources",
        description="Shows registers per thread and, after +, static bytes of shared memory of "
        "each GPU kernel. Fails if one spills registers or keeps a stack frame.",
    )
    parser.add_argument("--arch", default=",".join(ARCHITECTURES), metavar="LIST")
    parser.add_argument("--json", action="store_true", help="print all that is known as JSON")
    args = parser.parse_args(words)
    try:
        output, seconds = _compiled(chosen_architectures(args.arch.split(",")))
        rows, slow = parse(output), slow_kernels(output)
        if not rows:
            raise BuildError("ptxas said nothing of any kernel; expected a line for each")
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    faulty = [row for row in rows if row.faulty]
    if args.json:
        kernels = [asdict(row) for row in rows]
        print(json.dumps({"seconds": seconds, "kernels": kernels, "slow": slow}, indent=2))
    else:
        print(format_table(rows))
        kernel_count = len({row.kernel for row in rows})
        print(f"{kernel_count} kernels, {len(rows)} with architectures, built in {seconds:.0f} s")
    for row in faulty:
        print(
            f"error: {row.kernel} on sm_{row.architecture}: {row.spill_store_bytes} bytes of spill "
            f"stores, {row.spill_load_bytes} of spill loads, {row.stack_bytes} of stack frame; "
            "expected none",
            file=sys.stderr,
        )
    for sentence in slow:
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if faulty or slow else 0


def _compiled(architectures: tuple[str, ...]) -> tuple[str, float]:
    """Return what the compilers say of these sources, and how long they took."""
    try:
        library = build_cuda_library(default_cache_dir(), architectures)
    except OSError as error:
        raise BuildError(f"cannot write {error.filename}: {error.strerror}") from error
    record = read_record(library)
    return compiler_output(library), 0.0 if record is None else record.seconds


if __name__ == "__main__":
    sys.exit(main())
