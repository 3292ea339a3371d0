"""What the compiler made of the kernels: registers, and instructions of the hottest loop by class.

Reads machine code through cuobjdump and needs no GPU. Counts are static: what stands in the loop,
rarely taken branches included.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

EPILOG = """\
The disassembler is no part of this project. Where the CUDA toolkit's own one is not installed:
  pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
It is looked for in the search path, in this Python's site-packages and in /usr/local/cuda/bin;
--cuobjdump names another.

The hottest loop is the smallest one that holds the most tensor core instructions. "per256" is its
instructions per 256 weights: what one mma.m16n8k16 multiplies, or one warp's share of a wgmma;
"span256" counts only what stands between the first and the last of them, without what runs once in
a while before and after.
An mma for every block of 8 rows of x uses the same weights, so the count of mma is divided by the
token blocks in the kernel's name (--token-blocks where it has none).

examples
  python benchmarks/kernel_sass.py libqlinear_cuda.so --arch sm_90a
  python benchmarks/kernel_sass.py linear_f16_4.o --kernel 'linear<.*F16, 4, 1, false>' --all
  python benchmarks/kernel_sass.py libqlinear_cuda.so --json
"""

# The first pattern that fits the whole mnemonic names the class; the order of columns, too.
CLASSES = {
    "mma": r"HMMA|IMMA|QGMMA|IGMMA|HGMMA",
    "lop3": r"LOP3",
    "prmt": r"PRMT",
    "half": r"HFMA2|HADD2|HMUL2|HSET2|HSETP2",
    "float": r"FFMA|FADD|FMUL|FFMA2",
    "convert": r"F2F|F2FP|I2F|I2FP|F2I",
    "imad": r"IMAD|IMUL",
    "iadd": r"IADD3?|LEA|IADD32I|VIADD",
    "shift": r"SHF|SHL|SHR|SGXT",
    "move": r"MOV|IMAD\.MOV|SEL|CS2R|S2R|S2UR|R2UR",
    "setp": r"ISETP|FSETP|PLOP3|PSETP|P2R|R2P|ISET",
    "lds": r"LDS",
    "ldsm": r"LDSM",
    "sts": r"STS|STSM",
    "ldgsts": r"LDGSTS|UBLKCP|UTMALDG",
    "global": r"LDG|STG|LD|ST|ATOMG|ATOM|RED|CCTL",
    "const": r"LDC|ULDC|LDCU",
    "local": r"LDL|STL",
    "wait": r"LDGDEPBAR|DEPBAR|BAR|WARPSYNC|WARPGROUP|SYNCS|NANOSLEEP|FENCE|MEMBAR|ERRBAR",
    "branch": r"BRA|BSYNC|BSSY|BREAK|EXIT|CALL|RET|BRX|JMP|NOP",
    "uniform": r"U[A-Z0-9]+",
    "other": r".*",
}
_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.MOV)?)(\S*)(.*?);"
)
_TARGET = re.compile(r"\b0x([0-9a-f]+)\s*$")
_KERNEL = re.compile(r"<[\w:]+, (\d+), (\d+)[,>]")


@dataclass(frozen=True)
class Instruction:
    """One line of machine code; `target` is where a branch leads."""

    address: int
    name: str
    target: int | None = None
    suffix: str = ""
    """What follows the name: widths and kinds, such as ".128"."""


@dataclass
class Kernel:
    """A function of one architecture."""

    mangled: str
    arch: str
    name: str = ""
    resources: dict[str, int] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)


def parse_code(listing: str) -> list[Kernel]:
    """Return the functions of `cuobjdump -sass`."""
    kernels: list[Kernel] = []
    arch = ""
    for line in listing.splitlines():
        if found := re.match(r"\s*code for (\w+)", line):
            arch = found[1]
        elif found := re.match(r"\s*Function : (\S+)", line):
            kernels.append(Kernel(found[1], arch))
        elif kernels and (found := _INSTRUCTION.match(line)):
            address, name, suffix, operands = found.groups()
            target = _TARGET.search(operands.strip()) if name == "BRA" else None
            goes_to = int(target[1], 16) if target else None
            kernels[-1].code.append(Instruction(int(address, 16), name, goes_to, suffix))
    return kernels


def parse_resources(listing: str) -> dict[tuple[str, str], dict[str, int]]:
    """Return what `cuobjdump -res-usage` says of each (architecture, function)."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    arch = function = ""
    for line in listing.splitlines():
        if match := re.match(r"\s*arch = (\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\S+):", line):
            function = match[1]
        elif "REG:" in line:
            pairs = re.findall(r"(\w+(?:\[\d+\])?):(\d+)", line)
            found[arch, function] = {name: int(value) for name, value in pairs}
    return found


def class_of(name: str) -> str:
    """Return the class of a mnemonic."""
    return next(kind for kind, pattern in CLASSES.items() if re.fullmatch(pattern, name))


def loops(code: list[Instruction]) -> Iterator[list[Instruction]]:
    """Yield what lies between each branch backwards and its target.

    The branch at the end of a function leads to itself, and is no loop.
    """
    for instruction in code:
        target = instruction.target
        if target is not None and target < instruction.address:
            yield [i for i in code if target <= i.address <= instruction.address]


def hottest_loop(code: list[Instruction]) -> list[Instruction]:
    """Return the smallest of the loops that hold the most tensor core instructions."""

    def heat(loop: list[Instruction]) -> tuple[int, int]:
        return sum(class_of(i.name) == "mma" for i in loop), -len(loop)

    return max(loops(code), key=heat, default=[])


def token_blocks_of(name: str) -> int | None:
    """Return the third template argument of linear<dtype, bits, token blocks, fine groups>."""
    found = _KERNEL.search(name)
    return int(found[2]) if found else None


def figures(kernel: Kernel, token_blocks: int | None) -> dict[str, object]:
    """Return what is shown of one kernel."""
    loop = hottest_loop(kernel.code)
    counts = Counter(class_of(i.name) for i in loop)
    uses = Counter(i.name for i in loop if class_of(i.name) == "mma")
    blocks = token_blocks or token_blocks_of(kernel.name) or 1
    places = [at for at, i in enumerate(loop) if class_of(i.name) == "mma"]
    span = places[-1] - places[0] + 1 if places else 0
    # A wgmma takes all rows of x at once.
    units = sum(uses[name] if "GMMA" in name else uses[name] / blocks for name in uses)
    return {
        "kernel": kernel.name,
        "arch": kernel.arch,
        "registers": kernel.resources.get("REG"),
        "shared": kernel.resources.get("SHARED"),
        "stack": kernel.resources.get("STACK"),
        "instructions": len(kernel.code),
        "loop": len(loop),
        "weights_256": units,
        "per_256": round(len(loop) / units, 2) if units else None,
        "span": span,
        "span_per_256": round(span / units, 2) if units else None,
        "classes": {kind: counts[kind] for kind in CLASSES if counts[kind]},
        "names": dict(Counter(i.name for i in loop).most_common()),
    }


def find_cuobjdump(named: str | None) -> str:
    """Return the path of cuobjdump, or leave with how to get it."""
    packages = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/cuobjdump"))
    places = [named] if named else [shutil.which("cuobjdump"), *map(str, reversed(packages))]
    places += [] if named else ["/usr/local/cuda/bin/cuobjdump"]
    for place in places:
        if place is not None and shutil.which(place):
            return place
    sys.exit(f"no cuobjdump{f' at {named}' if named else ''}\n\n{EPILOG}")


def dump(cuobjdump: str, option: str, file: str) -> str:
    # cuobjdump calls nvdisasm, which lies beside it.
    path = {"PATH": f"{Path(cuobjdump).resolve().parent}:/usr/local/bin:/usr/bin:/bin"}
    done = subprocess.run([cuobjdump, option, file], capture_output=True, text=True, env=path)
    if done.returncode != 0:
        sys.exit(f"cuobjdump {option} {file}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def demangled(names: list[str]) -> list[str]:
    """Return readable names where c++filt is there."""
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    done = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True)
    plain = [re.sub(r"^void |\(.*\)$", "", line) for line in done.stdout.splitlines()]
    return [re.sub(r"\(\w+\)", "", name) for name in plain] if len(plain) == len(names) else names


def kernels_of(cuobjdump: str, file: str) -> list[Kernel]:
    kernels = parse_code(dump(cuobjdump, "-sass", file))
    resources = parse_resources(dump(cuobjdump, "-res-usage", file))
    for kernel, name in zip(kernels, demangled([k.mangled for k in kernels]), strict=True):
        kernel.name = name
        kernel.resources = resources.get((kernel.arch, kernel.mangled), {})
    return kernels


def show(rows: list[dict[str, object]]) -> None:
    """Print a table; classes that no loop uses are left out."""
    used = [kind for kind in CLASSES if any(kind in row["classes"] for row in rows)]  # type: ignore[operator]
    fixed = ("arch", "registers", "stack", "loop", "weights_256", "per_256", "span_per_256")
    heads = ("arch", "regs", "stack", "loop", "w/256", "per256", "span256", *used, "kernel")
    table = [heads]
    for row in rows:
        classes: dict[str, int] = row["classes"]  # type: ignore[assignment]
        cells = ["-" if row[name] is None else f"{row[name]}" for name in fixed]
        table.append((*cells, *(str(classes.get(kind, "")) for kind in used), str(row["kernel"])))
    widths = [max(len(line[i]) for line in table) for i in range(len(heads) - 1)]
    for line in table:
        print(" ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=False)),
              line[-1])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", help="library, object file or cubin")
    parser.add_argument("--arch", help="only this one, such as sm_90a")
    parser.add_argument(
        "--kernel", default="linear<", metavar="REGEX", help="only names in which this regex fits"
    )
    parser.add_argument("--all", action="store_true", help="kernels without tensor cores too")
    parser.add_argument("--token-blocks", type=int, help="blocks of 8 rows that a weight serves")
    parser.add_argument("--cuobjdump", metavar="FILE", help="path of the disassembler")
    parser.add_argument("--json", action="store_true", help="one array, with every mnemonic")
    words = parser.parse_args()
    cuobjdump = find_cuobjdump(words.cuobjdump)
    rows = [
        figures(kernel, words.token_blocks)
        for file in words.files
        for kernel in kernels_of(cuobjdump, file)
        if words.arch in (None, kernel.arch) and re.search(words.kernel, kernel.name)
    ]
    rows = [row for row in rows if words.all or row["weights_256"]]
    if words.json:
        print(json.dumps(rows, indent=1))
    elif rows:
        show(rows)
    else:
        sys.exit("no such kernel in these files")


if __name__ == "__main__":
    main()
