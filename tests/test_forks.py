"""Forks: trainers that were changed on purpose pass all tests that have neither the mark `recipe` nor `style`."""
import ast
import os

import forks
import pytest

@pytest.mark.style
@pytest.mark.parametrize("name", forks.PATCHES)
def test_copy_fork__every_patch_applies_to_the_trainer(tmp_path, name) -> None:
    """The changed trainer is valid Python, and the first line of the patch says what changes."""
    forks.copy_fork(forks.PATCHES[name], tmp_path, forks.TRAINER)
    patched = (tmp_path / forks.TRAINER).read_text()
    assert patched != (forks.ROOT / forks.TRAINER).read_text() and ast.parse(patched)
    title = forks.PATCHES[name].read_text().split("\n")[0]
    assert ": " in title and title.endswith(".")

@pytest.mark.slow
@pytest.mark.parametrize("name", forks.PATCHES)
def test_run_tests__a_fork_passes(name) -> None:
    status, output = forks.run_tests(forks.PATCHES[name], forks.NUMERICS)
    assert status == 0, output

@pytest.mark.slow
def test_run_tests__recipe_c_passes_its_own(monkeypatch) -> None:
    monkeypatch.setenv("REFERENCE_DIR", os.environ.get("REFERENCE_DIR", str(forks.ROOT / "../shared/reference")))
    status, output = forks.run_tests(forks.PATCHES["recipe_c"], ["-rs", "tests/forks/check_recipe_c.py"])
    print(output)
    assert status == 0, output
