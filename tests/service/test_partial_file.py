"""A file that is whole or not there, whatever ends its writer, and that one process writes."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from qlinear_service.partial_file import Busy, Flusher, replacing


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_text("old")
    with replacing(target) as file:
        file.write(b"new")
        assert target.read_text() == "old"
        assert names(tmp_path) == [".x.partial", "x"]
    assert target.read_text() == "new"
    assert names(tmp_path) == ["x"]


def test_after_an_error_all_is_as_before(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_text("old")

    def interrupted() -> None:
        with replacing(target) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_text() == "old"
    assert names(tmp_path) == ["x"]


def test_what_a_killed_process_left_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / ".x.partial").write_text("half a file, and longer than the next one")
    with replacing(tmp_path / "x") as file:
        file.write(b"whole")
    assert (tmp_path / "x").read_text() == "whole"
    assert names(tmp_path) == ["x"]


def test_a_second_writer_is_told(tmp_path: Path) -> None:
    with replacing(tmp_path / "x") as file:
        with pytest.raises(Busy, match=r"another process is writing .*\.x\.partial"):
            replacing(tmp_path / "x").__enter__()
        file.write(b"first")
    assert (tmp_path / "x").read_text() == "first"
    with replacing(tmp_path / "x") as file:
        file.write(b"second")
    assert (tmp_path / "x").read_text() == "second"


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / ".x.partial").symlink_to("precious")
    with pytest.raises(OSError, match=r"symbolic link|loop"):
        replacing(tmp_path / "x").__enter__()
    assert (tmp_path / "precious").read_text() == "precious"


def write_often(target: Path, letter: str, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            with replacing(target) as file:
                for _ in range(3):
                    file.write(letter.encode() * 1000)
                    file.flush()
        except Busy:
            pass


def test_processes_that_race_for_one_name_never_mix(tmp_path: Path) -> None:
    """What is published is one writer's whole file, at any moment, and nothing stays behind."""
    target, context = tmp_path / "x", multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_often, args=(target, c, 1.0)) for c in "ab"]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        if target.exists():
            content = target.read_text()
            assert content in ("a" * 3000, "b" * 3000)
            seen.add(content[0])
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen
    assert names(tmp_path) == ["x"]


def test_flushes_run_beside_the_writer_and_their_errors_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr("qlinear_service.partial_file.FLUSH_BYTES", 10)
    monkeypatch.setattr(os, "fdatasync", flushed.append)
    with (tmp_path / "x").open("wb") as file, Flusher(file) as flusher:
        flusher.wrote(9)
        assert not flushed
        flusher.wrote(1)
        flusher.finish()
        assert flushed == [file.fileno()]

        def fail(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fdatasync", fail)
        flusher.wrote(10)
        with pytest.raises(OSError, match="No space left"):
            flusher.finish()
