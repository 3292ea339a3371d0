"""The mirror of csrc/linear_cuda.h against what a C compiler makes of the header. Needs no GPU."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from qlinear_service.kernels import build, cuda_abi
from qlinear_service.kernels.abi import GatherParams, LinearParams
from qlinear_service.kernels.cuda_abi import (
    CudaBatch,
    CudaDevice,
    CudaFlag,
    CudaLaunch,
    CudaPart,
    CudaPlan,
    CudaRows,
    Status,
)

STRUCTS: dict[str, type[ctypes.Structure]] = {
    "ql_linear_params": LinearParams,
    "ql_gather_params": GatherParams,
    "ql_cuda_device": CudaDevice,
    "ql_cuda_plan": CudaPlan,
    "ql_cuda_launch": CudaLaunch,
    "ql_cuda_part": CudaPart,
    "ql_cuda_rows": CudaRows,
    "ql_cuda_batch": CudaBatch,
}
HEADER = (Path(build.SOURCE_ROOT) / "linear_cuda.h").read_text()
PARAMS_HEADER = (Path(build.SOURCE_ROOT) / "linear_params.h").read_text()


def without_comments(header: str) -> str:
    return re.sub(r"//.*", "", header)


def fields_of(struct: str) -> list[str]:
    """Names of a struct's fields as the header lists them."""
    text = without_comments(HEADER + PARAMS_HEADER)
    found = re.search(rf"typedef struct {struct} \{{(.*?)\}} {struct};", text, re.DOTALL)
    assert found is not None
    names = []
    for declaration in found[1].split(";"):
        for part in declaration.split(","):
            name = re.search(r"(\w+)(?:\[\w+\])?\s*$", part)
            names += [name[1]] if name else []
    return names


def test_every_field_lies_where_the_compiler_puts_it(tmp_path: Path) -> None:
    lines = []
    for struct in STRUCTS:
        lines.append(f'printf("{struct} - %zu 0\\n", sizeof({struct}));')
        for field in fields_of(struct):
            place = f"offsetof({struct}, {field}), sizeof((({struct}*)0)->{field})"
            lines.append(f'printf("{struct} {field} %zu %zu\\n", {place});')
    source = tmp_path / "print.c"
    source.write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "linear_cuda.h"\n'
        f"int main(void) {{ {' '.join(lines)} return 0; }}\n"
    )
    compiler = shutil.which("gcc") or shutil.which("g++")
    assert compiler is not None
    program = tmp_path / "print"
    # As C, not C++: whoever loads the library from another language reads the header as C.
    include = f"-I{build.SOURCE_ROOT}"
    subprocess.run(
        [compiler, "-x", "c", "-std=c11", "-Wall", "-Werror", include, str(source), "-o", program],
        check=True,
    )
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    ours = []
    for name, struct in STRUCTS.items():
        ours.append(f"{name} - {ctypes.sizeof(struct)} 0")
        for field, *_ in struct._fields_:
            place = getattr(struct, field)
            ours.append(f"{name} {field} {place.offset} {place.size}")
    assert printed.splitlines() == ours


def test_every_function_is_declared_with_as_many_arguments() -> None:
    text = without_comments(HEADER)
    found = re.findall(r"^(\w[\w \*]*?)\s*\b(ql_\w+)\(([^)]*)\);", text, re.MULTILINE)
    results = {
        "int": ctypes.c_int, "int64_t": ctypes.c_int64, "const char*": ctypes.c_char_p, "void": None
    }  # fmt: skip
    declared = {
        name: (results[result], 0 if words.strip() == "void" else words.count(",") + 1)
        for result, name, words in found
    }
    assert declared == {
        name: (result, len(arguments)) for name, (result, arguments) in cuda_abi.FUNCTIONS.items()
    }


def test_numbers_of_statuses_and_flags_are_those_of_the_headers() -> None:
    enum = PARAMS_HEADER.partition("typedef enum ql_dtype")[0]
    statuses = {name: int(value) for name, value in re.findall(r"QL_(\w+) = (\d+),", enum)}
    assert statuses == {status.name: status.value for status in Status}
    flags = {name: int(value) for name, value in re.findall(r"QL_CUDA_(\w+) = (\d+)", HEADER)}
    assert flags == {flag.name: flag.value for flag in CudaFlag if flag}
    assert f"{cuda_abi.WORKSPACE_ALIGN_BYTES}-byte aligned" in HEADER


def test_a_library_that_lacks_a_function_is_not_declared() -> None:
    cpu = ctypes.CDLL(str(build.build_cpu_library(build.default_cache_dir())))
    with pytest.raises(AttributeError, match="ql_cuda_"):
        cuda_abi.declare(cpu)
