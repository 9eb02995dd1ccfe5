"""Forks: trainers that were changed on purpose pass all tests that have neither the mark `recipe` nor `style`."""
import ast
from pathlib import Path

import forks
import pytest

@pytest.mark.style
@pytest.mark.parametrize("name", forks.PATCHES)
def test_copy_fork__every_patch_applies_to_the_trainer(tmp_path, name) -> None:
    """The copy has a changed trainer, which is valid Python, and the first line of the patch says what changes."""
    forks.copy_fork(forks.PATCHES[name], tmp_path)
    patched = (tmp_path / forks.TRAINER).read_text()
    assert patched != (forks.ROOT / forks.TRAINER).read_text() and ast.parse(patched)
    title = forks.PATCHES[name].read_text().split("\n")[0]
    assert ": " in title and title.endswith(".")

def test_copy_fork__a_patch_that_does_not_apply(tmp_path) -> None:
    patch = tmp_path / "idea.patch"
    patch.write_text("--- a/train_gpt.py\n+++ b/train_gpt.py\n@@ -1 +1 @@\n-no such line\n+another\n")
    copy = tmp_path / "copy"
    copy.mkdir()
    with pytest.raises(ValueError, match="idea.patch does not apply to train_gpt.py"):
        forks.copy_fork(patch, copy)

def test_main__names_failed_tests(monkeypatch, tmp_path, capsys) -> None:
    """A failed test of one fork is printed with the name of the fork, and gives exit status 1."""
    outcomes = {"red": forks.Outcome(1, "1 failed", ["tests/test_x.py::test_y[a - b]"], "all output"),
                "green": forks.Outcome(0, "1 passed", [], "")}
    monkeypatch.setattr(forks, "PATCHES", {name: Path(name) for name in outcomes})
    monkeypatch.setattr(forks, "run_tests", lambda patch, pytest_args: outcomes[patch.name])
    assert forks.main(["green"]) == 0
    assert forks.main([f"--out={tmp_path}", "--", "tests/test_x.py"]) == 1
    printed = ["green: 1 passed", "red: tests/test_x.py::test_y[a - b]", "red: 1 failed", "green: 1 passed"]
    assert capsys.readouterr().out.splitlines() == printed
    assert (tmp_path / "red.txt").read_text() == "all output"

@pytest.mark.slow
@pytest.mark.parametrize("name", forks.PATCHES)
def test_run_tests__a_fork_passes(name) -> None:
    outcome = forks.run_tests(forks.PATCHES[name], forks.NUMERICS)
    assert outcome.status == 0 and outcome.failed == [], outcome.output
