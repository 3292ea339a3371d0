"""The techniques of the Hopper kernels that can be taken out, and the lines that do it."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["TECHNIQUES", "WHOLE", "Edit", "Technique", "take_out"]


@dataclass(frozen=True)
class Edit:
    """Text that stands once in a file below csrc/, and what takes its place."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Technique:
    """What is taken out, and how."""

    name: str
    edits: tuple[Edit, ...] = ()


WHOLE = Technique("nothing taken out")

TECHNIQUES = (
    Technique(
        "copy engine and what rests on it",
        (Edit("cuda/plan.cpp", "  if (invariant || !has_copy_engine(device)", "  if (true"),),
    ),
    Technique(
        "raw codes beside up to 16 rows",
        (Edit("cuda/fed.cuh", "kRaw = kTokenBlocks <= 2 && !kRounded", "kRaw = false"),),
    ),
    Technique(
        "rounded weights beside 128 rows and more",
        (
            Edit(
                "cuda/plan.cpp",
                "bool may_round(const ql_linear_params& params) {\n",
                "bool may_round(const ql_linear_params& params) {\n  if (params.m) return false;\n",
            ),
        ),
    ),
    Technique(
        "products that run on through steps",
        (
            Edit(
                "cuda/warpgroup.cuh", "if (batch > 0) warpgroup_wait<1>();", "warpgroup_wait<0>();"
            ),
            Edit(
                "cuda/warpgroup.cuh", "warpgroup_wait<1>();\n    };", "warpgroup_wait<0>();\n    };"
            ),
            Edit(
                "cuda/warpgroup.cuh",
                "warpgroup_wait<1>();\n        prepare(a[0]",
                "warpgroup_wait<0>();\n        prepare(a[0]",
            ),
        ),
    ),
    Technique(
        "loops of plain layers",
        (
            Edit(
                "cuda/warpgroup.cuh",
                "return !args.has_zeros && args.scale_dtype == Dtype::kDtype;",
                "return false;",
            ),
            Edit(
                "cuda/fed.cuh",
                "!args.step.has_zeros && args.step.groups_per_step == 1",
                "args.m < 0",
            ),
        ),
    ),
    Technique(
        "clusters that share k",
        (Edit("cuda/plan_fed.cpp", "kWays = 2 * partition::kMaxCluster", "kWays = 2"),),
    ),
    Technique(
        "warps that store their own results",
        (
            Edit(
                "cuda/fed_args.cpp",
                "args.direct =\n      plan.warpgroups != 0",
                "args.direct =\n      false",
            ),
        ),
    ),
    Technique(
        "partial sums over the rings",
        (Edit("partition.h", "geometry.several_tiles ? rings : 0", "rings"),),
    ),
    Technique(
        "rings of more than two slots",
        (
            Edit("partition.h", "kMaxStages = 8", "kMaxStages = 2"),
            Edit("partition.h", "kMaxStagesAlone = 4", "kMaxStagesAlone = 2"),
        ),
    ),
)


def take_out(technique: Technique, csrc: Path) -> None:
    """Take a technique out of the sources below `csrc`.

    Raises:
        ValueError: they do not hold what it replaces, or more than once.
    """
    for edit in technique.edits:
        path = csrc / edit.file
        text = path.read_text()
        if text.count(edit.old) != 1:
            raise ValueError(
                f"{technique.name}: {edit.file} has {edit.old!r} {text.count(edit.old)} times, "
                "expected once"
            )
        path.write_text(text.replace(edit.old, edit.new))
