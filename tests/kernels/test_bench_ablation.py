"""The ablation: each technique can be taken out of the sources as they are, and the table."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import ablation
from techniques import TECHNIQUES, WHOLE, Edit, Technique, take_out

CSRC = Path(__file__).parents[2] / "csrc"


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_a_technique_is_taken_out_of_the_sources(technique: Technique, tmp_path: Path) -> None:
    """Kernels change; the lines that an ablation replaces must still be there."""
    copy = tmp_path / "csrc"
    shutil.copytree(CSRC, copy)
    take_out(technique, copy)
    changed = {edit.file for edit in technique.edits}
    assert changed
    for path in CSRC.rglob("*.*"):
        name = path.relative_to(CSRC).as_posix()
        assert (path.read_bytes() != (copy / name).read_bytes()) == (name in changed), name


@pytest.mark.parametrize("text", ["nothing", "twice twice"])
def test_what_does_not_stand_there_once_is_not_replaced(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text(text)
    with pytest.raises(ValueError, match=r"x: a.h has 'twice' \d times, expected once"):
        take_out(Technique("x", (Edit("a.h", "twice", "once"),)), tmp_path)
    assert (tmp_path / "a.h").read_text() == text


def test_the_table_is_of_geometric_means() -> None:
    cells = [
        {"layer": "a", "m": 1, "us": {}, "without": {"x": 1.0, "y": 2.0}},
        {"layer": "b", "m": 1, "us": {}, "without": {"x": 4.0, "y": 2.0}},
        {"layer": "a", "m": 16, "us": {}, "without": {"x": 1.5, "y": 1.0}},
    ]
    assert ablation.rows_of_table(cells, [1, 16]) == [("x", "2.00", "1.50"), ("y", "2.00", "1.00")]


def test_nothing_is_taken_out_of_the_whole(tmp_path: Path) -> None:
    assert WHOLE.edits == ()
    assert ablation.file_of(tmp_path, WHOLE).parent == tmp_path
