"""Reads what compute-sanitizer's racecheck prints, all of it: what it does not know is a finding.

Two things that it reports of the fed kernels are counted apart, as it does not follow the order
that forbids them (docs/kernel.md, "Under compute-sanitizer"): pairs of store_cluster_16 and
load_received, and stores of store_cluster_16 into a thread block "that might have exited". Pure:
text comes in.
"""

import re
from dataclasses import dataclass, field

STORE = "qlinear::cuda::store_cluster_16(unsigned int, float4)"
READ = "qlinear::cuda::load_received(unsigned int)"

_PREFIX = "========="
_ACCESS = r"(?P<kind>Read|Write|Atomic) access at (?P<place>.+?)(?: \[(?P<hazards>\d+) hazards\])?"
_RACE = re.compile(rf"(?:Error|Warning|Info): Race reported between {_ACCESS}")
_AND = re.compile(rf"and {_ACCESS}")
_EXITED = re.compile(r"Potential invalid __shared__ write of size \d+ bytes")
_AT = re.compile(r"at (?P<place>.+)")
_PLACE = re.compile(r"(?P<function>.+)\+0x[0-9a-f]+ in [^ ]+:\d+")
_SUMMARY = re.compile(
    r"RACECHECK SUMMARY: (?P<shown>\d+) hazards? displayed "
    r"\((?P<errors>\d+) errors?, (?P<warnings>\d+) warnings?\)"
)
_LAUNCHES = re.compile(r"(?P<right>\d+) launches right, (?P<wrong>\d+) wrong")
# What stands between findings and says no more than where they were.
_DETAIL = re.compile(
    r"|COMPUTE-SANITIZER|by thread .*|Address 0x[0-9a-f]+ is located in a block .*|Saved host .*|"
    r"Host Frame:.*|Device Frame:.*|Target application returned an error"
)
NO_LINES = (
    "the library has no line information: build it with "
    "python -m qlinear_service.kernels.build --cuda --racecheck"
)


@dataclass
class RaceReport:
    """What one or several runs have reported."""

    pairs: int = 0
    """Hazards between STORE and READ."""
    exited: int = 0
    """Stores of STORE into a thread block that might have exited."""
    foreign: list[str] = field(default_factory=list)
    """Everything else that was found, or could not be read, a line each."""
    right: int = 0
    wrong: int = 0
    """Launches."""

    def add(self, other: "RaceReport") -> None:
        """Take in the report of another run."""
        self.pairs += other.pairs
        self.exited += other.exited
        self.foreign += other.foreign
        self.right += other.right
        self.wrong += other.wrong

    def faults(self, *, strict: bool) -> list[str]:
        """Return why this is not clean, a sentence each; none: it is.

        Args:
            strict: pairs are faults, too: in this library racecheck can follow their order.
        """
        found = list(dict.fromkeys(self.foreign))
        if strict and self.pairs:
            found.append(f"{self.pairs} hazards between {STORE} and {READ}")
        if self.wrong or not self.right:
            found.append(f"{self.right} launches were right and {self.wrong} wrong")
        return found


def read(text: str) -> RaceReport:
    """Return what a run over tests/gpu/sanitize.py printed, stdout and stderr together."""
    report = RaceReport()
    reports, summary, source = 0, None, ""
    lines = iter(text.splitlines())
    for line in lines:
        if launches := _LAUNCHES.fullmatch(line):
            report.right += int(launches["right"])
            report.wrong += int(launches["wrong"])
        if not line.startswith(_PREFIX):
            continue
        told = line.removeprefix(_PREFIX).strip()
        if race := _RACE.fullmatch(told):
            reports, source = reports + 1, f"{race['kind']} {_function(race['place'])}"
        elif other := _AND.fullmatch(told):
            _count_pair(report, source, other)
        elif _EXITED.fullmatch(told):
            reports += 1
            place = _AT.fullmatch(next(lines, "").removeprefix(_PREFIX).strip())
            _count_exited(report, told, _function(place["place"]) if place else "")
        elif found := _SUMMARY.fullmatch(told):
            summary = found
        elif not _DETAIL.fullmatch(told):
            report.foreign.append(f"racecheck says: {told}")
    _check_summary(report, reports, summary)
    return report


def _function(place: str) -> str:
    """Return whose instruction it is; "" without line information, which names kernels alone."""
    found = _PLACE.fullmatch(place)
    return found["function"] if found else ""


def _count_pair(report: RaceReport, source: str, other: re.Match[str]) -> None:
    with_read = f"{other['kind']} {_function(other['place'])}"
    if source.endswith(" ") or with_read.endswith(" "):
        report.foreign.append(NO_LINES)
    elif (source, with_read) == (f"Write {STORE}", f"Read {READ}"):
        report.pairs += int(other["hazards"] or 1)
    else:
        report.foreign.append(f"race: {source} and {with_read}")


def _count_exited(report: RaceReport, told: str, function: str) -> None:
    if function == STORE:
        report.exited += 1
    else:
        report.foreign.append(f"{told} at {function}" if function else NO_LINES)


def _check_summary(report: RaceReport, reports: int, summary: re.Match[str] | None) -> None:
    """Note what was reported and not shown, or shown and not read."""
    if summary is None:
        report.foreign.append("racecheck came to no end: there is no summary")
        return
    shown, total = int(summary["shown"]), int(summary["errors"]) + int(summary["warnings"])
    if not reports == shown == total:
        report.foreign.append(f"of {total} reports {shown} were shown and {reports} read")
