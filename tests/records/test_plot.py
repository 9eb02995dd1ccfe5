"""records/tools/plot.py: content of a plot, light and dark pages, and legibility at a width of 400 pixels."""
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from record_common import A_LOSSES, GOLDEN, OTHER_SOURCE, call, events_of, make_side, make_sides, write_events

from tools import plot                                       # noqa: E402
from tools.files import ToolError                            # noqa: E402
from tools.read import read_runs                             # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"

def texts(picture: Path) -> list[str]:
    return [element.text for element in ElementTree.parse(picture).iter(f"{SVG}text")]

LABELS = {"loss, nats per token", "training time, s", "training loss, as logged",
          "validation loss, mean and range of the runs"}

def check_drawing(picture: Path) -> None:
    """Check that a picture is legible on white and on black, without a background, at a width of 400 pixels."""
    drawing = picture.read_text()
    colors = set(re.findall(r"#(\w{6})", drawing))
    brightness = [sum(bytes.fromhex(color)) / 3 / 255 for color in colors]
    assert 0.25 < min(brightness) and max(brightness) < 0.85, "every color must be visible on white and on black"
    shapes = [element.tag for element in ElementTree.parse(picture).getroot()]
    assert f"{SVG}rect" not in shapes and f"{SVG}image" not in shapes, "the background is transparent"
    height = float(re.search(r'viewBox="0 0 800 (\d+)', drawing)[1])
    sizes = [int(size) for size in re.findall(r'font-size="(\d+)"', drawing)]
    assert height < 800 and min(sizes) * 400 / plot.WIDTH >= 12, "pixels of a letter"

def test_curves__training_and_validation_over_time(tmp_path) -> None:
    a, b = make_sides(tmp_path)
    for verb in (["compare", a, b], ["show", a], ["place", b / "seed0", a]):
        picture = tmp_path / verb[0] / "curves.svg"
        call(*verb, "--target=3.28", f"--plot={picture}")
        words = texts(picture)
        assert LABELS <= set(words) and ("target 3.28" in words) == (verb[0] != "place")
        named = [name for name in words if "(n = " in name]
        assert len(named) == 2 - (verb[0] == "show"), words
        check_drawing(picture)
    same = tmp_path / "again.svg"
    plot.curves({"pool": read_runs([a]).runs}, same, 3.28)
    assert same.read_bytes() == (tmp_path / "show/curves.svg").read_bytes(), "a record's picture has a stored hash"

def test_curves__a_weighted_training_loss_does_not_flatten_the_validation_loss(tmp_path) -> None:
    """Earlier, the y axis contained the sum over several predicted tokens, which is larger than a loss per token."""
    stages = [dict(mtp_start=[1.0, 0.5], mtp_end=[1.0, 0.5])]
    a = make_side(tmp_path / "a", config=dict(stages=stages))
    picture = tmp_path / "a.svg"
    for more, label in (({}, "training loss, weighted sum over predicted tokens"),
                        ({"train_loss_next": 3.3}, "training loss of the next token")):
        for log in a.glob("*/log.jsonl"):
            events = events_of(log)
            for event in events:
                if event["type"] == "step":
                    event |= dict(train_loss=9.0 - 0.55 * event["step"]) | more
            write_events(log, events)
        plot.curves({"a": read_runs([a]).runs}, picture)
        words = texts(picture)
        ticks = [float(word) for word in words if re.fullmatch(r"\d(\.\d+)?", word)]
        assert label in words and max(ticks) < 4, words

@pytest.mark.parametrize("is_log, times", [(False, [70.0] * 5), (True, [7.0] * 5)])
def test_curves__training_losses_end_at_the_last_dot_and_all_dots_are_whole(tmp_path, is_log, times) -> None:
    """Earlier, training losses ended with the fastest run, and the frame cut the last dot of a logarithmic axis."""
    a = make_side(tmp_path / "a", times=[60.0, 70.0, 80.0, 90.0, 100.0])
    b = make_side(tmp_path / "b", times=times, source=OTHER_SOURCE)
    picture = tmp_path / "x.svg"
    plot.curves({"a": read_runs([a]).runs, "b": read_runs([b]).runs}, picture)
    assert ("training time, s, logarithmic" in texts(picture)) == is_log
    ends_of_training = []
    for line in ElementTree.parse(picture).iter(f"{SVG}polyline"):
        if line.get("opacity") == "0.8":
            last_point = line.get("points").split()[-1]
            ends_of_training.append(float(last_point.split(",")[0]))
    last_dots: dict[str, float] = {}
    for dot in ElementTree.parse(picture).iter(f"{SVG}circle"):
        assert dot.get("clip-path") is None
        last_dots[dot.get("fill")] = float(dot.get("cx"))
    ends = [*last_dots.values()]
    assert ends_of_training == pytest.approx(ends, abs=1)
    assert max(ends) + 6 < plot.RIGHT

def test_curves__a_dot_left_of_the_frame_is_omitted(tmp_path) -> None:
    """The axis begins at 0.15 of the earliest end, and a validation before that time has no dot."""
    a = make_side(tmp_path / "a", config=dict(val_every=1))
    b = make_side(tmp_path / "b", times=[800.0] * 5, source=OTHER_SOURCE)
    picture = tmp_path / "x.svg"
    plot.curves({"a": read_runs([a]).runs, "b": read_runs([b]).runs}, picture)
    dots = ElementTree.parse(picture).iter(f"{SVG}circle")
    xs = [float(dot.get("cx")) for dot in dots]
    assert min(xs) >= plot.LEFT
    assert len(xs) == 12, "10 and 3 validations, of which one is before the axis"

def test_curves__the_legend_explains_a_weighted_sum(tmp_path) -> None:
    words = "(of the next token and of later ones)"
    picture = tmp_path / "x.svg"
    for weights in ([1.0], [1.0, 0.5]):
        stages = [dict(mtp_start=weights, mtp_end=weights)]
        side = make_side(tmp_path / str(len(weights)), config=dict(stages=stages))
        runs = read_runs([side]).runs
        for run in runs:
            run.steps[:, 2] = 3.3                             # inside the frame
        plot.curves({"a": runs}, picture)
        is_sum = len(weights) > 1
        assert (words in texts(picture)) == is_sum
        check_drawing(picture)

def test_chain__labels_of_the_axis_and_of_repeated_ideas(tmp_path) -> None:
    """Earlier, two entries with the same idea had the same label, and the axis was not labeled as logarithmic."""
    ratio = {"base": {"ratio": 0.5, "low": 0.4, "high": 0.6}}
    entries = []
    for number, idea in (("01", "recipe A"), ("02", "width 64"), ("03", "compiled"), ("04", "width 64")):
        stated = {"number": number, "idea": idea}
        entries.append({"in_turn": ratio, "target": 2.2, "class": "plain", "stated": stated})
    plot.chain(entries, tmp_path / "chain.svg")
    words = texts(tmp_path / "chain.svg")
    labels = [word for word in words if word[:1] == "0" and word[1:2] in "1234"]
    assert labels == ["01 recipe A", "02 width 64", "03 compiled", "04 width 64, again"]
    assert "axis: logarithmic" in words

@pytest.mark.parametrize("column, last", [(0, 10), (1, 100.0)])
def test_sampled__losses_on_a_common_axis(tmp_path, column, last) -> None:
    runs = read_runs([make_side(tmp_path / "a", times=[60.0, 80.0, 100.0, 120.0, 140.0])]).runs
    xs, losses = plot.sampled(runs, column)
    assert xs[-1] == pytest.approx(last, rel=1e-3) and losses.shape == (5, plot.GRID) and np.isfinite(losses).all()
    finals = [run.steps[-1, 2] for run in runs]
    assert losses[:, -1] == pytest.approx(finals, abs=4e-3)
    without, = read_runs([GOLDEN / "i_one"]).runs
    assert not plot.sampled([runs[0], without], column)[0].size, "no training losses"

@pytest.mark.parametrize("column, xs", [(0, [5, 8, 10]), (1, [40, 64, 80])])
def test_validations__points_after_the_first_step(tmp_path, column, xs) -> None:
    runs = read_runs([make_side(tmp_path / "a")]).runs
    found, losses = plot.validations(runs, column)
    assert found == pytest.approx(xs, rel=1e-3) and losses.shape == (5, 3) and losses[:, -1].tolist() == A_LOSSES
    runs[0].val = runs[0].val[1:]
    runs[0].val.pop(0)
    found, losses = plot.validations(runs, column)
    assert found == pytest.approx(xs[-1:], rel=1e-3) and losses[:, 0].tolist() == A_LOSSES, "the final ones only"

@pytest.mark.parametrize("losses, times", [
    ([1e12], [80.0]), ([1e12, 3.0], [80.0, 81.0]), ([1e30, 3.0], [80.0, 81.0]), ([3.2, 3.3], [0.0, 0.0])])
def test_curves__losses_that_diverged_and_times_of_0(tmp_path, losses, times) -> None:
    """Earlier, a loss above 3e9 ended in StopIteration, and times of 0 in ZeroDivisionError."""
    sides = [make_side(tmp_path / "a", losses, times), make_side(tmp_path / "b", times=[0.0] * 5, source=OTHER_SOURCE)]
    for verb in (["show", sides[0]], ["compare", *sides]):
        _, _, error = call(*verb, f"--plot={tmp_path}/x.svg")
        assert error == "" and len(texts(tmp_path / "x.svg")) > 5, error

def test_save__svg_only(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, said, error = call("show", make_side(tmp_path / "a"), f"--plot={tmp_path}/x.png")
    assert status == 2 and f"{tmp_path}/x.svg" in error and not (tmp_path / "x.png").exists()
    with pytest.raises(ToolError, match="ends in .svg"):
        plot.save("", tmp_path / "y.png")

@pytest.mark.parametrize("low, high, is_log, ticks", [
    (0, 60, False, [0, 10, 20, 30, 40, 50, 60]), (2.01, 3.4, False, [2.5, 3]),
    (0.04, 1, True, [0.05, 0.1, 0.2, 0.5, 1]), (0, 3e10, False, [0, 5e9, 1e10, 1.5e10, 2e10, 2.5e10, 3e10])])
def test_ticks__round_values(low, high, is_log, ticks) -> None:
    axis = plot.Axis(low, high, 0, 100, is_log)
    assert axis.ticks() == pytest.approx(ticks) and (axis.at(low), axis.at(high)) == (0, 100)
