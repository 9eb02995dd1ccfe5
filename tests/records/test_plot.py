"""records/tools/plot.py: content of a plot, light and dark pages, and legibility at a width of 600 pixels."""
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from record_common import A_LOSSES, GOLDEN, OTHER_SOURCE, call, make_side, make_sides

from tools import plot                                       # noqa: E402
from tools.read import read_runs                             # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
LABELS = {"loss, nats per token", "training time, s", "training tokens, millions", "target 3.28",
          "dots: mean validation loss of the runs; thin lines: training loss of the first run"}

def texts(picture: Path) -> list[str]:
    return [element.text for element in ElementTree.parse(picture).iter(f"{SVG}text")]

def check_drawing(picture: Path) -> None:
    """Check that a picture is legible on white and on black, without a background, at a width of 600 pixels."""
    drawing = picture.read_text()
    lightness = {int(share) for share in re.findall(r"hsl\(\d+,60%,(\d+)%\)", drawing)}
    assert lightness == {50}, "every color must be visible on white and on black"
    assert "<rect" not in drawing and "<image" not in drawing, "the background is transparent"
    sizes = [int(size) for size in re.findall(r'font-size="(\d+)"', drawing)]
    assert min(sizes) * 600 / plot.WIDTH >= 12, "pixels of a letter"

def test_curves__losses_over_tokens_and_over_time(tmp_path) -> None:
    a, b = make_sides(tmp_path)
    for verb in (["compare", a, b], ["show", a]):
        picture = tmp_path / verb[0] / "curves.svg"
        call(*verb, "--target=3.28", f"--plot={picture}")
        assert LABELS <= set(texts(picture)), texts(picture)
        assert sum("(n = 5" in name for name in texts(picture)) == 2 - (verb[0] == "show")
        check_drawing(picture)
        lines = ElementTree.parse(picture).iter(f"{SVG}polyline")
        lines = [line for line in lines if line.get("opacity") == "0.8"]
        assert len(lines) == 2 * (2 - (verb[0] == "show")), "a training loss of each side in each panel"
    status, _, error = call("show", a, f"--plot={tmp_path}/x.png")
    assert status == 2 and f"{tmp_path}/x.svg" in error

def test_curves__without_tokens_or_times(tmp_path) -> None:
    plot.save(plot.curves_svg({"text": read_runs([GOLDEN / "d_timing.txt"]).runs}), tmp_path / "x.svg")
    words = texts(tmp_path / "x.svg")
    assert "step" in words and "training time, s" in words
    run, = read_runs([GOLDEN / "i_one"]).runs
    run.void = "profiled"
    plot.save(plot.curves_svg({"one": [run]}), tmp_path / "y.svg")
    words = texts(tmp_path / "y.svg")
    assert "step" in words and "training time, s" not in words

@pytest.mark.parametrize("column, last", [(plot.STEP, 10), (plot.SECONDS, 100.0), (plot.TOKENS, 0.5632)])
def test_validations__and_training_end_together(tmp_path, column, last) -> None:
    runs = read_runs([make_side(tmp_path / "a", times=[60.0, 80.0, 100.0, 120.0, 140.0])]).runs
    curve = plot.validations(runs, column)
    assert curve[:, 0] == pytest.approx([last * part for part in (0.5, 0.8, 1)], rel=2e-3)
    assert curve[-1, 1] == pytest.approx(np.mean(A_LOSSES))
    curve = plot.training(runs[2], column)
    assert curve.shape == (10, 2) and curve[-1] == pytest.approx([last, runs[2].steps[-1, plot.LOSS]], rel=1e-3)

@pytest.mark.parametrize("losses, times", [([1e12], [80.0]), ([1e30, 3.0], [80.0, 81.0]), ([3.2, 3.3], [0.0, 0.0])])
def test_curves__losses_that_diverged_and_times_of_0(tmp_path, losses, times) -> None:
    a = make_side(tmp_path / "a", losses, times)
    b = make_side(tmp_path / "b", times=[0.0] * 5, source=OTHER_SOURCE)
    _, _, error = call("compare", a, b, f"--plot={tmp_path}/x.svg")
    assert error.startswith("picture: ") and len(texts(tmp_path / "x.svg")) > 5, error
