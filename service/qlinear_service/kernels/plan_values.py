"""A plan as names and numbers: what tables keep of it, and what people read.

Only what decides how a product is cut is kept; the library derives the rest from it. Names are
those of `CudaPlan`, whatever they are, so a plan that grows needs no change here.
"""

from collections.abc import Mapping

from qlinear_service.kernels.cuda_abi import CudaPlan

__all__ = ["DERIVED", "GEOMETRY", "plan_of", "plan_text", "plan_values"]

DERIVED = ("m_tiles", "n_tiles", "shared_bytes", "kernel", "workspace_bytes")
"""What ql_cuda_complete_plan() fills in."""

GEOMETRY = tuple(name for name, *_ in CudaPlan._fields_ if name not in DERIVED)
"""What is chosen: all other fields."""

ROWS_PER_BLOCK = 8


def plan_values(plan: CudaPlan) -> dict[str, int]:
    """Return what is chosen in a plan, by name."""
    return {name: getattr(plan, name) for name in GEOMETRY}


def plan_of(values: Mapping[str, int]) -> CudaPlan:
    """Return the plan with these values; what is derived is 0.

    Raises:
        ValueError: a name is missing or unknown, as in a table of another version.
    """
    if set(values) != set(GEOMETRY):
        odd = sorted(set(values) ^ set(GEOMETRY))
        raise ValueError(f"a plan must have {', '.join(GEOMETRY)}; {', '.join(odd)} differ")
    return CudaPlan(**values)


def plan_text(values: Mapping[str, int]) -> str:
    """Return a plan in a few words: rows of a tile, warps along n and k, the ring, thread blocks.

    Fields beyond those are shown as name=value where they are not 0.
    """
    left = dict(values)
    rows = left.pop("token_blocks") * ROWS_PER_BLOCK
    warps = f"{left.pop('warps_n')}x{left.pop('warps_k')}"
    cut = "whole" if left.pop("whole_tiles") else "split"
    words = [f"rows {rows}", f"warps {warps}", f"stages {left.pop('stages')}"]
    words += [f"ctas {left.pop('ctas')} {cut}"]
    words += ["fed"] * bool(left.pop("copy_warp")) + ["wgmma"] * bool(left.pop("warpgroups"))
    return " ".join(words + [f"{name}={value}" for name, value in left.items() if value])
