"""records/guide/first_run.ipynb: it runs from top to bottom, and is stored without outputs."""
import json
import os
import subprocess
import sys

import pytest
from common import ROOT

NOTEBOOK = ROOT / "records/guide/first_run.ipynb"

def test_notebook__is_small_and_has_no_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    assert len(cells) <= 12 and NOTEBOOK.stat().st_size < 10_000
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)

@pytest.mark.slow
@pytest.mark.recipe
def test_notebook__runs(tmp_path, monkeypatch) -> None:
    """In a copy of the repository, as if it had been cloned, with this interpreter."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("no git repository to copy")
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "race")], check=True)
    for name in ("train_gpt.py", "records/tools/bench.py"):                  # also if they are not committed
        (tmp_path / "race" / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([*"git -c user.name=test -c user.email=test commit -qam test --allow-empty".split()],
                   cwd=tmp_path / "race", check=True)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    monkeypatch.setenv("PATH", os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    nbclient.NotebookClient(notebook, timeout=1200, kernel_name="python3",
                            resources=dict(metadata=dict(path=str(tmp_path / "race/records/guide")))).execute()
    printed = ["".join(output.get("text", "") for output in cell.get("outputs", ())) for cell in notebook.cells]
    assert "validation loss" in printed[4] and "unigram entropy 4.792, " in printed[6]
    assert "verdict: " in printed[11] and "def read_lines(path):" in printed[7]
    assert "+        fraction = (1 - math.cos" in printed[9]
    assert any("image/svg+xml" in output.get("data", {}) for output in notebook.cells[6].outputs)
