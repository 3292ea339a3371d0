"""Finds the fastest plan of each shape on this GPU and writes a table of them.

This process finds the library, watches the one that measures (tune_run.py), writes and reports.
`qlinear bench tune --help` tells the method.
"""

import sys
from dataclasses import asdict
from pathlib import Path

from figures import console, write_json
from kernel import INTERRUPTED, commit_of, library_of, watched
from kernel_journal import USAGE, Journal
from needs_gpu import gpu_missing
from tune_options import PROG, TuneOptions, parse
from tune_report import entries_of, print_entries, run_of, troubles

from qlinear_service.errors import QlinearError
from qlinear_service.kernels import tuned_table
from qlinear_service.kernels.build_cuda import read_record, source_hash
from qlinear_service.kernels.tuned_table import Run, Table


def old_table(path: Path) -> Table:
    """Return the table that is added to; an empty one if there is none.

    Raises:
        QlinearError: what is there is no table, or cannot be read.
    """
    try:
        return tuned_table.read(path)
    except FileNotFoundError:
        return Table()
    except OSError as error:
        raise QlinearError(f"{path} cannot be read: {error.strerror}") from error


def save(path: Path, run: Run) -> None:
    """Add a run to the table at `path`.

    Raises:
        QlinearError: that is no table, or the place cannot be written.
    """
    table = old_table(path).with_run(run)
    try:
        tuned_table.write(path, table)
    except OSError as error:
        raise QlinearError(
            f"{path} cannot be written: {error.strerror}; name another file with --write"
        ) from error


def library_sources(library: Path) -> str:
    """Return the hash of the sources of a library, from its record or, without one, of here."""
    record = read_record(library)
    return source_hash() if record is None else record.source_hash


def run(options: TuneOptions, words: list[str]) -> int:
    """Tune in another process, write and report here, and return the exit code.

    Raises:
        QlinearError: there is no library, or the table cannot be written.
    """
    old_table(options.write)  # before minutes are spent: a file that is no table is not replaced
    with library_of(options.library_file) as library:  # building does not count
        code, journal = watched(__file__, words, library, options.budget_seconds)
        sources = library_sources(library)
    if code == USAGE:
        return code
    return finish(options, words, journal, code=code, sources=sources)


def finish(
    options: TuneOptions, words: list[str], journal: Journal, *, code: int, sources: str
) -> int:
    """Write what the journal holds, print it, and return the exit code.

    Raises:
        QlinearError: the table cannot be written.
    """
    found = entries_of(options.cells, journal)
    out = console(json_to_stdout=options.json == "-")
    bad = troubles(options.cells, journal)
    print_entries(out, found, len(options.cells) - len(found))
    for key, text in bad.items():
        out.print(f"FAILED {key}: {text}", soft_wrap=True)
    facts = (journal.of("facts") or [{}])[0]
    report = {"facts": facts, "troubles": bad, "left": len(options.cells) - len(found)}
    if found:
        made = run_of(
            list(found.values()),
            facts,
            library=sources,
            commit=commit_of(options.commit),
            command=" ".join([PROG, *words]),
        )
        report["run"] = asdict(made)
        write_json(options.json, report)
        save(options.write, made)
        out.print(f"{len(found)} plans written to {options.write}", soft_wrap=True)
    else:
        write_json(options.json, report)
        out.print("nothing was tuned, and nothing written")
    if code not in (0, INTERRUPTED):
        print(f"{PROG}: the measuring process ended early (exit code {code})", file=sys.stderr)
    return INTERRUPTED if code == INTERRUPTED else int(bool(code or bad))


def main(words: list[str]) -> int:
    """Run with these flags."""
    try:
        options = parse(words)
        if options.journal is not None:
            from tune_run import measure

            assert options.library_file is not None
            return measure(options, options.library_file)
        if gpu_missing(PROG):
            return USAGE
        return run(options, words)
    except QlinearError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
