"""Pages: links work, cited sections exist, and pages are not too long."""
import re
from pathlib import Path

import pytest
from common import ROOT
from line_ranges import PAGE, updated

PAGES = sorted(page for pattern in (
    "*.md", "data/*.md", "records/*.md", "records/guide/*.md", "records/ablations/*.md", "tests/*.md",
    "tests/*/README.md") for page in ROOT.glob(pattern))
# These files may cite only what is in this repository.
CITING = [*PAGES, ROOT / "train_gpt.py", ROOT / "run.sh", *sorted(ROOT.glob("data/*.py")),
          *sorted(ROOT.glob("records/guide/*.py"))]
FOREIGN = re.compile(r"\brecipe \d|\bshared/|\b(systems|house|style|design|tables|recipe|evidence|kernels)\.md")
LINK = re.compile(r"\]\((?!https?:)([^()\s]+)\)")
LONGEST = {"README.md": 150, "AGENTS.md": 80, "records/README.md": 110, "records/RECIPE.md": 350,
           "records/guide/*.md": 150}        # lines

def text_of(page: Path) -> str:
    """Return a page without code, because brackets in code are not links."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)

def anchors(page: Path) -> set[str]:
    """Return the anchors that repository hosts generate for a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}

@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("records/2*/README.md"))],
                         ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page) -> None:
    for link in LINK.findall(text_of(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{link}: no such heading"

@pytest.mark.parametrize("page", CITING, ids=lambda page: str(page.relative_to(ROOT)))
def test_citations_are_of_this_repository(page) -> None:
    found = [line.strip() for line in page.read_text().splitlines() if FOREIGN.search(line)]
    assert not found
    sections = re.findall(r"^#+ ([\d.]+) ", (ROOT / "records/RECIPE.md").read_text(), re.M)
    cited = re.findall(r"RECIPE (\d+(?:\.\d+)?)", page.read_text())
    assert set(cited) <= set(sections), "a section that RECIPE.md does not have"

@pytest.mark.style
def test_line_ranges_of_the_reading_guide_are_current() -> None:
    page, source = PAGE.read_text("utf-8"), (ROOT / "train_gpt.py").read_text("utf-8")
    assert updated(page, source) == page, "run python tests/line_ranges.py"
    with pytest.raises(SystemExit, match="attend"):
        updated(page, source.replace("def attend(", "def attention_of("))

@pytest.mark.style
@pytest.mark.parametrize("pattern", LONGEST)
def test_pages_are_short(pattern) -> None:
    lines = {page.name: len(page.read_text().splitlines()) for page in ROOT.glob(pattern)}
    assert lines and max(lines.values()) <= LONGEST[pattern], lines
