"""What the GPU library must not do, read off its sources: allocate, wait, clear, or add unordered.

Graphs, streams and repeatable results hang on it, and a GPU is needed to see it fail.
"""

import re

import pytest

from qlinear_service.kernels import build

SOURCES = sorted((build.SOURCE_ROOT / "cuda").iterdir())

FORBIDDEN = {
    "allocates": r"\b(cudaMalloc|cudaFree|cuMemAlloc|cudaHostAlloc)\w*|\bnew\b[^;]*\[",
    "waits": r"\bcuda(Device|Stream|Event)Synchronize\b|\bcudaStreamWaitEvent\b",
    "clears with a node of its own": r"\b(cudaMemset|cuMemset)\w*",
    "copies": r"\bcudaMemcpy\w*",
    "adds floats in the order of arrival": r"\batomicAdd\s*\(\s*(&?\s*\w*(sum|slot|y|out)\w*)",
    "adds halves in memory": r"\bred\.(global|shared)|atomicAdd_block|\batom\.add\.(noftz|f)",
    "knows torch": r"#\s*include\s*<(torch|ATen|c10)/",
    "picks a cache policy by hand": r"\bcreatepolicy\b",
}
"""The last one faulted on H100 and RTX 5090 in other projects; whoever needs it guards it."""

PIPELINE = ("pipeline.cpp", {"waits", "copies"})
"""Whole batches go through it, with rows from and to host memory; no graph does."""


def code_of(text: str) -> str:
    """Return a source without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def test_there_are_sources() -> None:
    assert {".cu", ".cuh", ".cpp", ".h"} <= {path.suffix for path in SOURCES}


@pytest.mark.parametrize("deed", FORBIDDEN)
def test_launches_only_launch(deed: str) -> None:
    for path in SOURCES:
        if path.name == PIPELINE[0] and deed in PIPELINE[1]:
            continue
        found = re.search(FORBIDDEN[deed], code_of(path.read_text()))
        assert found is None, f"{path.name} {deed}: {found[0]!r}"


@pytest.mark.parametrize(
    ("deed", "line"),
    [
        ("allocates", "cudaMallocAsync(&p, n, s);"), ("waits", "cudaStreamSynchronize(s);"),
        ("clears with a node of its own", "cudaMemsetAsync(p, 0, n, s);"),
        ("copies", "cudaMemcpyAsync(a, b, n, kind, s);"),
        ("adds floats in the order of arrival", "atomicAdd(&sums[i], x);"),
        ("adds halves in memory", 'asm("red.global.add.noftz.f16x2 [%0], %1;")'),
    ],
)  # fmt: skip
def test_a_forbidden_deed_is_seen(deed: str, line: str) -> None:
    assert re.search(FORBIDDEN[deed], code_of(f"{line}  // words"))
    assert not re.search(FORBIDDEN[deed], code_of(f"// {line}"))
