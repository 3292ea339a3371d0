"""What racecheck reports is read whole: nothing foreign passes, nothing goes unread.

The outputs in tests/data/racecheck are real ones, from an H200; its README tells of what.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu import racecheck
from gpu.race_report import NO_LINES, READ, STORE, RaceReport, read

DATA = Path(__file__).parents[1] / "data/racecheck"
THEN = "qlinear::cuda::load_shared_16(unsigned int)"
"""Who read received sums when the outputs were recorded."""
PAIR_HAZARDS = 1344 + 3200 + 4960


def recorded(name: str, *, reports: int = 2, read_by: str = READ) -> str:
    """Return an output with its summary told of what is left in it, and reads by `read_by`."""
    text = (DATA / f"{name}.txt").read_text().replace(THEN, read_by)
    told = f"{reports} hazards displayed ({reports} errors"
    return re.sub(r"12 hazards displayed \(30[01] errors", told, text)


def test_the_pair_that_racecheck_cannot_follow_is_counted_apart() -> None:
    found = read(recorded("fed_rows8"))
    assert found == RaceReport(pairs=PAIR_HAZARDS, exited=1, foreign=[], right=2, wrong=0)
    assert found.faults(strict=False) == []
    (fault,) = found.faults(strict=True)
    assert fault.startswith(f"{PAIR_HAZARDS} hazards between")


def test_where_every_lane_arrives_no_pair_is_left() -> None:
    found = read(recorded("fed_rows8_every_lane", reports=1))
    assert (found.pairs, found.exited) == (0, 1)
    assert found.faults(strict=True) == []


def test_a_pair_with_another_read_is_foreign() -> None:
    found = read(recorded("fed_rows8", read_by=THEN))
    assert found.pairs == 0
    (fault,) = found.faults(strict=False)
    assert fault == f"race: Write {STORE} and Read {THEN}"


AT_STORE = " at qlinear::cuda::store_cluster_16"
SHOWN = "2 hazards displayed (2 errors"
LAUNCHES = "2 launches right, 0 wrong"


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (f"Write access{AT_STORE}", "Write access at qlinear::cuda::store_16", "race: Write "),
        ("Write access at", "Read access at", "race: Read "),
        ("and Read access at", "and Write access at", "race: Write "),
        ("Potential invalid __shared__", "Invalid __shared__", "racecheck says: Invalid"),
        (f"bytes\n=========    {AT_STORE}", "bytes\n========= at store()", "Potential invalid"),
        ("Race reported", "Barrier reported", "racecheck says: Error: Barrier"),
        (SHOWN, "2 hazards displayed (9 errors", "of 9 reports 2 were shown and 2 read"),
        (SHOWN, "3 hazards displayed (3 errors", "of 3 reports 3 were shown and 2 read"),
        ("========= RACECHECK SUMMARY", "========= ", "racecheck came to no end"),
        (LAUNCHES, "0 launches right, 0 wrong", "0 launches were right and 0 wrong"),
        (LAUNCHES, "1 launches right, 1 wrong", "1 launches were right and 1 wrong"),
        (LAUNCHES, "Segmentation fault", "0 launches were right and 0 wrong"),
        (" in primitives.cuh:163", "", NO_LINES),
    ],
)
def test_whatever_else_is_said_fails(old: str, new: str, fault: str) -> None:
    text = recorded("fed_rows8")
    assert old in text
    faults = read(text.replace(old, new)).faults(strict=False)
    assert any(one.startswith(fault) for one in faults), faults


def test_an_output_that_was_cut_short_is_no_proof() -> None:
    whole = (DATA / "fed_rows8.txt").read_text().replace(THEN, READ)
    assert read(whole).foreign == ["of 301 reports 12 were shown and 2 read"]
    assert read("").faults(strict=False) == [
        "racecheck came to no end: there is no summary",
        "0 launches were right and 0 wrong",
    ]


def test_without_the_wait_launches_are_wrong() -> None:
    found = read(recorded("fed_rows8_no_wait"))
    assert found.faults(strict=False) == ["1 launches were right and 1 wrong"]


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outputs: list[str], *words: str) -> int:
    """Run racecheck.py on a library of one kernel; a stand-in for the tool prints `outputs`.

    Behind that one come those of chains: five in all.
    """
    for number, text in enumerate(outputs):
        (tmp_path / f"{2 * number}.out").write_text(text)
    tool = tmp_path / "tool"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncat {tmp_path}/"$8".out\nexit 7\n')
    tool.chmod(0o755)
    library = tmp_path / "library.so"
    library.touch()
    functions = SimpleNamespace(ql_cuda_kernel_count=lambda: 1)
    monkeypatch.setattr(racecheck.ctypes, "CDLL", lambda path: None)
    monkeypatch.setattr(racecheck.cuda_abi, "declare", lambda library: functions)
    return racecheck.main([str(library), *words, "--tool", str(tool)])


def test_all_kernels_are_checked_by_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = recorded("fed_rows8_every_lane", reports=1)
    kept = tmp_path / "kept"
    assert run(tmp_path, monkeypatch, [clean] * 3, "--strict", "--keep", str(kept)) == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sorted(call.split()[-2:] for call in calls) == [["0", "2"], ["2", "4"], ["4", "5"]]
    assert all(call.startswith("--tool racecheck --print-limit 1000000 ") for call in calls)
    assert "6 launches right, 0 wrong; 0 findings" in capsys.readouterr().out
    assert (kept / "racecheck-4.txt").read_text() == clean


def test_one_finding_of_one_process_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = recorded("fed_rows8_every_lane", reports=1)
    assert run(tmp_path, monkeypatch, [clean, recorded("fed_rows8", read_by=THEN), clean]) == 1
    assert f"and Read {THEN}" in capsys.readouterr().out
    assert run(tmp_path, monkeypatch, [clean, recorded("fed_rows8")], "1", "4") == 1  # 1: no output
    assert run(tmp_path, monkeypatch, [clean, recorded("fed_rows8")], "0", "4") == 0
    assert run(tmp_path, monkeypatch, [clean, recorded("fed_rows8")], "0", "4", "--strict") == 1


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert racecheck.main([__file__, "--tool", "no-such-tool"]) == racecheck.USAGE
    assert "no-such-tool" in capsys.readouterr().err
    assert racecheck.main([str(tmp_path / "none.so"), "--tool", "true"]) == racecheck.USAGE
    assert "none.so" in capsys.readouterr().err
