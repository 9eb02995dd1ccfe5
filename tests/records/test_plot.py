"""records/tools/plot.py: content of a plot, light and dark pages, and the message without matplotlib."""
import sys

import numpy as np
import pytest

from record_common import A_LOSSES, GOLDEN, call, make_side, make_sides

from tools import plot                                       # noqa: E402
from tools.read import read_runs                             # noqa: E402

def test_curves__training_and_validation_against_steps_and_time(tmp_path) -> None:
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

@pytest.mark.parametrize("is_val, column, last", [(False, 0, 10), (True, 0, 10), (True, 1, 79.9)])
def test_sampled__losses_on_a_common_axis(tmp_path, is_val, column, last) -> None:
    runs = read_runs([make_side(tmp_path / "a")]).runs
    xs, losses = plot.sampled(runs, is_val, column)
    assert xs[-1] == pytest.approx(last, rel=1e-3) and losses.shape == (5, plot.GRID) and np.isfinite(losses).all()
    finals = [run.loss if is_val else run.steps[-1, 2] for run in runs]
    assert losses[:, -1] == pytest.approx(finals, abs=4e-3)
    assert not plot.sampled([*runs[:1], read_runs([GOLDEN / "i_one"]).runs[0]], is_val, column)[0].size, "one point"

def test_curves__without_matplotlib_one_line_says_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, said, error = call("show", make_side(tmp_path / "a"), f"--plot={tmp_path}/x.png")
    assert status == 0 and "verdict: " in said
    assert error == f"no plot without matplotlib; to install it: {sys.executable} -m pip install matplotlib\n"

def test_characters__the_validation_loss_falls_to_the_right(tmp_path) -> None:
    *rows, last = plot.characters(read_runs([make_side(tmp_path / "a")]).runs).splitlines()
    heights = [float(row[:8]) for row in rows]
    columns = list(zip(*(row[9:] for row in rows)))
    places = [column.index("o") for column in columns]
    assert (len(heights), len(columns)) == (plot.ROWS, plot.COLUMNS)
    assert all(column.count("o") == 1 for column in columns)
    assert places == sorted(places) and (places[0], places[-1]) == (0, plot.ROWS - 1)
    assert heights == sorted(heights, reverse=True) and heights[-1] == pytest.approx(np.mean(A_LOSSES), abs=6e-4)
    assert last == "validation loss (nats per token), steps 2 to 10"
