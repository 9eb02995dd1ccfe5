"""Plot of losses over tokens and over time, as an SVG file. It needs only numpy.

One file serves light and dark pages: the background is transparent, all colors have a medium brightness, and letters
are large enough for a width of 600 pixels.
"""
import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools import files
from tools.read import Run, ToolError

INK = "#7d8590"                        # legible on white and on black
WIDTH, TOP, BOTTOM = 1200, 50, 440     # of the picture, and edges of the panels
PANELS = (90, 585), (690, 1185)        # left and right edge of each panel
FONT = 24
LINE = 36                              # height of a line of text
PARTS = 60                             # points of a training curve: means of equal parts of the run
SHOWN_FROM = 0.15                      # the axis ignores the losses of this first fraction of a run; they are very high
STEP, SECONDS, LOSS, TOKENS = range(4)                        # columns of `Run.steps`
AXES = {STEP: "step", SECONDS: "training time, s", TOKENS: "training tokens, millions"}

class Axis(NamedTuple):
    low: float
    high: float
    start: float                       # coordinate of `low`
    end: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(float(self.start + share * (self.end - self.start)), 1)

    def ticks(self) -> list[float]:
        """Return up to seven round values."""
        coarsest = (self.high - self.low) / 6
        power = math.floor(math.log10(coarsest))
        steps = [float(f"{digit}e{power}") for digit in (1, 2, 5, 10)]
        step = next(step for step in steps if step >= 0.999 * coarsest)
        first = math.ceil(self.low / step)
        last = math.floor(self.high / step)
        return [number * step for number in range(first, last + 1)]

def color_of(index: int) -> str:
    """Return a color that differs from those before; an angle of 137.5 degrees divides the circle evenly."""
    return f"hsl({(212 + 137.5 * index) % 360:.0f},60%,50%)"

def text(x: float, y: float, words: str, color: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}">{html.escape(files.one_line(words))}</text>'

def line(points: Sequence[tuple[float, float]], color: str = INK, width: float = 1, more: str = "") -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" {more}/>'

def save(svg: str, path: Path) -> None:
    if path.suffix != ".svg":
        raise ToolError(f"plots are SVG files: write {path.with_suffix('.svg')}, not {path}")
    files.write_bytes(path, svg.encode())

def curves_svg(groups: dict[str, list[Run]], target: float | None = None) -> str:
    """Plot validation losses (points: mean of the runs) and training losses over tokens and over time.

    Steps replace tokens if a log does not state them. There is no panel of times if a time does not count.
    """
    runs = [run for group in groups.values() for run in group]
    has_tokens = all(len(run.steps) and np.isfinite(run.steps[-1, TOKENS]) for run in runs)
    drawn = panel(groups, TOKENS if has_tokens else STEP, PANELS[0], target)
    if all(run.seconds is not None for run in runs):
        drawn += panel(groups, SECONDS, PANELS[1], target)
    y = BOTTOM + 3.2 * LINE
    for index, (name, group) in enumerate(groups.items()):
        row, place = divmod(index, 3)
        words = f"— {name or 'runs'} (n = {len(group)})"
        drawn.append(text(10 + place * WIDTH / 3, y + row * LINE, words, color_of(index)))
    y += math.ceil(len(groups) / 3) * LINE
    drawn.append(text(10, y, "dots: mean validation loss of the runs; thin lines: training loss of the first run"))
    height = y + LINE / 2
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
            f'font-family="sans-serif" font-size="{FONT}" role="img">')
    return "\n".join([head, *drawn, "</svg>\n"])

def panel(groups: dict[str, list[Run]], column: int, edges: tuple[int, int], target: float | None) -> list[str]:
    """Draw the losses of all groups over one column of `Run.steps`; later groups are drawn over earlier ones."""
    validated = [validations(group, column) for group in groups.values()]
    trained = [training(group[0], column) for group in groups.values()]
    losses = [target] * bool(target)
    for curve in validated:
        losses += curve[:, 1].tolist()
    for curve in trained:
        late = curve[:, 0] >= SHOWN_FROM * curve[-1:, 0]
        losses += curve[late, 1].tolist()
    low = min(losses, default=0.0)
    high = max(losses, default=0.0)
    margin = 0.06 * (high - low)
    margin += max(1e-6, 1e-9 * abs(high))
    last = max(curve[:, 0].max(initial=0.0) for curve in (*validated, *trained))
    left, right = edges
    down = Axis(low - margin, high + margin, BOTTOM, TOP)
    across = Axis(0.0, 1.03 * last or 1.0, left, right)
    drawn = [text(left, TOP - 20, "loss, nats per token")]
    drawn.append(text(right, BOTTOM + 2 * LINE, AXES[column], anchor="end"))
    for tick in down.ticks():
        y = down.at(tick)
        drawn.append(line([(left, y), (right, y)], more='opacity="0.35"'))
        drawn.append(text(left - 10, y + 9, f"{tick:.4g}", anchor="end"))
    for tick in across.ticks():
        x = across.at(tick)
        drawn.append(line([(x, TOP), (x, BOTTOM)], more='opacity="0.35"'))
        drawn.append(text(x, BOTTOM + LINE - 4, f"{tick:.4g}", anchor="middle"))
    if target:
        y = down.at(target)
        drawn.append(line([(left, y), (right, y)], INK, 2, 'stroke-dasharray="8 6"'))
        drawn.append(text(left + 6, y - 8, f"target {target:.2f}"))
    for index, curve in enumerate(trained):
        points = [(across.at(x), down.at(loss)) for x, loss in curve if loss <= down.high]
        drawn.append(line(points, color_of(index), 2, 'opacity="0.8"'))
    for index, curve in enumerate(validated):
        points = [(across.at(x), down.at(loss)) for x, loss in curve]
        drawn.append(line(points, color_of(index), 4))
        drawn += [f'<circle cx="{x:g}" cy="{y:g}" r="6" fill="{color_of(index)}"/>' for x, y in points]
    return drawn

def validations(runs: Sequence[Run], column: int) -> np.ndarray:
    """Return rows of x and mean loss: the validations after training began, by step."""
    by_step: dict[int, list[np.ndarray]] = {}
    for run in runs:
        trained_on = [0.0, *run.steps[:, TOKENS]]
        for point in run.val:
            tokens = np.interp(point.step, [0.0, *run.steps[:, STEP]], trained_on)
            row = np.array([point.step, point.seconds, point.loss, tokens], float)                # None becomes nan
            by_step.setdefault(point.step, []).append(row)
    by_step.pop(0, None)
    means = [np.mean(by_step[step], axis=0) for step in sorted(by_step)]
    return known(np.array(means).reshape(-1, 4), column)

def training(run: Run, column: int) -> np.ndarray:
    """Return rows of x and training loss: the means of equal parts of the run."""
    rows = known(run.steps, column)
    parts = np.array_split(rows, PARTS)
    means = [part.mean(axis=0) for part in parts if len(part)]
    return np.array(means).reshape(-1, 2)

def known(table: np.ndarray, column: int) -> np.ndarray:
    rows = table[:, [column, LOSS]] / (1e6 if column == TOKENS else 1, 1)
    return rows[np.isfinite(rows).all(axis=1)]
