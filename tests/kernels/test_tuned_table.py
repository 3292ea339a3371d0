"""Tables of measured plans as files: what is kept, replaced, refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tuned_tables import entry, table

from qlinear_service.dtypes import DType
from qlinear_service.kernels import tuned_table
from qlinear_service.kernels.plan_values import GEOMETRY
from qlinear_service.kernels.tuned_plans import SHIPPED
from qlinear_service.kernels.tuned_table import Form, TableError, bucket_of

PLAN = dict.fromkeys(GEOMETRY, 1)


def test_buckets_end_where_tiles_do() -> None:
    found = {m: bucket_of(m) for m in (1, 2, 8, 9, 16, 17, 33, 65, 129, 192, 193, 256, 257, 512)}
    assert found == {
        **{1: 1, 2: 8, 8: 8, 9: 16, 16: 16, 17: 32, 33: 64, 65: 128},
        **{129: 192, 192: 192, 193: 256, 256: 256, 257: 512, 512: 512},
    }
    assert bucket_of(513) is None


def test_a_form_has_padded_sizes() -> None:
    form = Form.of(n=65, k=129, bits=4, group_size=-1, zeros=True, dtype=DType.BF16)
    assert (form.n, form.k, form.dtype) == (128, 256, "bfloat16")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a/b/plans.json"
    written = table(entry(1, 64, 128, PLAN), entry(8, 64, 128, PLAN, kept=True, us=7), date="x")
    tuned_table.write(path, written)
    assert tuned_table.read(path) == written
    assert [child.name for child in path.parent.iterdir()] == ["plans.json"]


def test_a_failed_write_leaves_the_old_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plans.json"
    tuned_table.write(path, table(entry(1, 64, 128, PLAN)))
    before = path.read_bytes()

    def full(written: Path, final: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuned_table, "publish", full)
    with pytest.raises(OSError, match="No space left"):
        tuned_table.write(path, table())
    assert path.read_bytes() == before
    assert [child.name for child in tmp_path.iterdir()] == ["plans.json"]


def test_a_run_replaces_what_it_measured_again_and_nothing_else() -> None:
    old = table(entry(1, 64, 128, PLAN), entry(8, 64, 128, PLAN), date="old")
    (again,) = table(entry(8, 64, 128, PLAN, us=2.0), date="new").runs
    runs = old.with_run(again).runs
    assert [(run.date, [e.m for e in run.entries]) for run in runs] == [("old", [1]), ("new", [8])]
    (elsewhere,) = table(entry(8, 64, 128, PLAN), cuda_driver=12080).runs
    assert len(old.with_run(elsewhere).runs[0].entries) == 2
    (all_of_it,) = table(*old.runs[0].entries, date="newer").runs
    assert [run.date for run in old.with_run(all_of_it).runs] == ["newer"]


def damaged(change: str) -> Any:
    data: dict[str, Any] = {"format": "qlinear tuned plans", "version": 1}
    run: dict[str, Any] = {"gpu": "A", "sm_count": 2, "cuda_driver": 3}
    form = {"n": 64, "k": 128, "bits": 4, "group_size": 128, "zeros": False, "dtype": "float16"}
    one: dict[str, Any] = {"form": form, "m": 8, "plan": {"ctas": 1}, "kept": False}
    one |= {"us": 1.5, "planner_us": 2}
    data["runs"] = [run | {"entries": [one]}]
    if change:
        exec(change, {"data": data, "run": data["runs"][0], "one": one})
    return data


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("data['version'] = 2", "version 2"),
        ("del data['runs']", "runs"),
        ("data['runs'] = 3", "not iterable"),
        ("del run['gpu']", "gpu"),
        ("run['gpu'] = 7", "gpu is 7; expected str"),
        ("run['surprise'] = 7", "unknown: surprise"),
        ("run['entries'] = [None]", r"\w"),
        ("one['m'] = 9", "m is 9; expected one of"),
        ("one['us'] = 0", "must be positive"),
        ("one['us'] = float('nan')", "must be positive"),
        ("one['us'] = '1'", "us is '1'; expected float"),
        ("one['kept'] = 1", "kept is 1; expected bool"),
        ("one['plan'] = [1]", r"plan is \[1\]"),
        ("one['plan'] = {'ctas': 1.5}", "names and whole numbers"),
        ("one['form']['n'] = '64'", "n is '64'; expected int"),
        ("del one['form']", "form"),
    ],
)
def test_what_is_no_table_is_refused_in_one_sentence(change: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    path.write_text(json.dumps(damaged("")))
    assert tuned_table.read(path).runs[0].entries[0].us == 1.5
    path.write_text(json.dumps(damaged(change)))
    with pytest.raises(TableError, match=rf"is no table of plans \(.*{why}.*remove the file"):
        tuned_table.read(path)


@pytest.mark.parametrize("text", ["", "[", "[]", "7", '"text"', "{}", "\udcff"])
def test_any_other_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(TableError, match="is no table of plans"):
        tuned_table.read(path)


def test_the_shipped_tables_can_be_read_and_know_the_fields_of_plans() -> None:
    paths = list(SHIPPED.glob("*.json"))
    assert "nvidia_h200.json" in {path.name for path in paths}
    for path in paths:
        found = tuned_table.read(path)
        assert found.about
        for run in found.runs:
            assert run.library
            assert run.date
            assert all(set(one.plan) == set(GEOMETRY) for one in run.entries)
