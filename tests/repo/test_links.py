"""Every relative link of the papers points to something that is there."""

import re
from pathlib import Path

import pytest
from source_tree import ROOT

PAPERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("paper", PAPERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_point_to_files(paper: Path) -> None:
    links = [link.partition("#")[0] for link in LINK.findall(CODE.sub("", paper.read_text()))]
    relative = [link for link in links if link and not re.match(r"[a-z]+:", link)]
    missing = [link for link in relative if not (paper.parent / link).exists()]
    assert not missing, f"{paper.name} links to {missing}"


def test_the_papers_do_link() -> None:
    assert sum(len(LINK.findall(paper.read_text())) for paper in PAPERS) > 5
