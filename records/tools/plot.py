"""Plots as SVG files: the losses of runs over time, and the entries of a chain. They need no package but numpy.

One file serves light and dark pages: the background is transparent, all colors have a medium brightness, and letters
are large enough for a width of 400 pixels.
"""
from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools import files
from tools.files import ToolError
from tools.read import WEIGHTED, Facts, Run

INK = "#7d8590"                        # legible on white and on black
COLORS = ("#2f81f7", "#e8703a", "#2da44e", "#bf4bd8", "#c69026", "#d1477a")
DASHES = ("none", "16 7", "4 6")       # the second and the third use of a color
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 800, 90, 780, 50, 440       # of the picture, and edges of the frame
FONT, SMALL_FONT, LINE = 24, 20, 36    # font sizes and line spacing; a picture 400 pixels wide shows half of them
GRID = 100                             # points of a run at which training losses are averaged
MARGIN = 0.03                          # space for the last point's dot, as a fraction of the x axis before it
SMOOTHING = 0.04                       # fraction of the run over which training losses are averaged
MOST_TRAINED = 6                       # more groups than this are drawn without their training losses
LOG_RATIO = 3                          # the x axis is logarithmic if the groups' ends differ by more than this
CLIP = 'clip-path="url(#frame)"'
SHOWN_FROM = 0.15                      # the plot ignores the losses of this first fraction of a run; they are very high
TINY = 1e-9
ITSELF = {"ratio": 1.0, "low": 1.0, "high": 1.0}              # time of the base over itself

Curve = tuple[np.ndarray, np.ndarray]                         # x values (P,), losses (runs, P)

class Axis(NamedTuple):
    """A linear or logarithmic map from values to coordinates."""
    low: float
    high: float
    start: float                       # coordinate of `low`
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the coordinate of a value, rounded. On a logarithmic axis, values below TINY count as TINY."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = (math.log(max(number, TINY)) for number in (value, low, high))
        return round(self.start + (self.end - self.start) * (value - low) / (high - low), 1)

    def ticks(self) -> list[float]:
        """Return up to seven round values on a linear axis; on a logarithmic one 1, 2, 5, 10, 20, ... as they fit."""
        if self.is_log:
            values = round_values(max(self.low, TINY), self.high)
            return [value for value in values if self.low <= value <= self.high]
        coarsest = (self.high - self.low) / 6
        step = next(step for step in round_values(coarsest, 10 * coarsest) if step >= coarsest)
        first = math.ceil(self.low / step)
        last = math.floor(self.high / step)
        return [number * step for number in range(first, last + 1)]

def round_values(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten from the one at or below `low` to the one at or below `high`."""
    first, last = (math.floor(math.log10(value)) for value in (low, high))
    powers = range(first, last + 1)
    return [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]

def text(x: float, y: float, words: str, color: str = INK, anchor: str = "start") -> str:
    """Return an SVG text."""
    return f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}">{html.escape(files.one_line(words))}</text>'

def line(points: Sequence[tuple[float, float]], color: str = INK, width: float = 1, more: str = "") -> str:
    """Return an SVG line through some points."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" {more}/>'

def picture(drawn: Sequence[str], height: float) -> str:
    """Return the text of an SVG file."""
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
            f'font-family="sans-serif" font-size="{FONT}" role="img">')
    frame = f'<rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}"/>'
    return "\n".join([head, f'<clipPath id="frame">{frame}</clipPath>', *drawn, "</svg>\n"])

def save(svg: str, path: Path) -> None:
    """Write an SVG file. A link at `path` is replaced, not followed. Raises ToolError for a name that is not *.svg."""
    if path.suffix != ".svg":
        raise ToolError("file of a plot", found=path, expected="a name that ends in .svg",
                        hint=path.with_suffix(".svg"))
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(path, svg.encode())

def curves(groups: dict[str, list[Run]], path: Path, target: float | None = None) -> None:
    """Write the plot of `curves_svg` to a file."""
    save(curves_svg(groups, target), path)

def curves_svg(groups: dict[str, list[Run]], target: float | None = None) -> str:
    """Plot the validation losses of each group (points, mean and range) and its training loss (mean, smoothed).

    The x axis is the training time, or the step if a run has no time that counts. Later groups are drawn over earlier
    ones.
    """
    column = int(all(run.seconds is not None for group in groups.values() for run in group))
    validated = {name: validations(group, column) for name, group in groups.items()}
    trained: dict[str, Curve] = {}
    for name, group in groups.items():
        curve = sampled(group, column)
        if len(curve[0]) and len(groups) <= MOST_TRAINED:
            trained[name] = curve
    kinds = {name: groups[name][0].training_loss for name in trained}
    across, down = axes(validated, trained, kinds, target)
    # The legend does not name curves above the frame.
    for name, (_, losses) in trained.items():
        if losses.mean(0).min() > down.high:
            del kinds[name]
    unit = ("step", "training time, s")[column] + ", logarithmic" * across.is_log
    drawn = grid(across, down, unit)
    if target:
        y = down.at(target)
        drawn.append(line([(LEFT, y), (RIGHT, y)], INK, 2, 'stroke-dasharray="8 6"'))
        drawn.append(text(LEFT + 6, y - 8, f"target {target:.2f}"))
    for index, name in enumerate(groups):
        color, dashes = style_of(index)
        if name in kinds:
            xs, losses = trained[name]
            points = located(across, down, xs, losses.mean(0))
            drawn.append(line(points, color, 2, f'{CLIP} opacity="0.8" {dashed(kinds[name])}'))
        xs, losses = validated[name]
        points = located(across, down, xs, losses.mean(0))
        ranges = zip(points, losses.min(0).tolist(), losses.max(0).tolist())
        for (x, _), least, most in ranges:
            span = [(x, down.at(least)), (x, down.at(most))]
            drawn.append(line(span, color, 14, f'{CLIP} opacity="0.4"'))
        drawn.append(line(points, color, 4, f'{CLIP} stroke-dasharray="{dashes}"'))
        # Dots are not clipped: a dot is drawn whole, or not at all if it is to the left of the frame.
        for x, y in points:
            if x >= LEFT:
                drawn.append(f'<circle cx="{x:g}" cy="{y:g}" r="6" fill="{color}"/>')
    legend, height = key(groups, list(dict.fromkeys(kinds.values())))
    return picture([*drawn, *legend], height)

def axes(validated: dict[str, Curve], trained: dict[str, Curve], kinds: dict[str, str],
         target: float | None) -> tuple[Axis, Axis]:
    """Return both axes for some curves.

    The y axis fits the target, the validation losses and the training losses of the next token, but not the weighted
    sum over several tokens, which is larger.
    """
    limits = [target] if target else []
    ends = []
    for name, (times, losses) in validated.items():
        limits += losses.flatten().tolist()
        xs = times
        if name in trained:
            xs, losses = trained[name]
            if kinds[name] != WEIGHTED:
                limits += losses.mean(0)[xs >= SHOWN_FROM * xs[-1]].tolist()
        ends.append(float(max([*times, *xs], default=0.0)) or 1.0)
    limits = [loss for loss in limits if math.isfinite(loss)] or [0.0]
    margin = 0.06 * (max(limits) - min(limits)) + max(1e-6, TINY * abs(max(limits)))
    down = Axis(min(limits) - margin, max(limits) + margin, BOTTOM, TOP)
    last = max(ends)
    is_log = last > LOG_RATIO * min(ends)
    low = SHOWN_FROM * min(ends) * is_log
    high = (1 + MARGIN) * last
    if is_log:
        high = low * (last / low) ** (1 + MARGIN)
    return Axis(low, high, LEFT, RIGHT, is_log), down

def located(across: Axis, down: Axis, xs: np.ndarray, losses: np.ndarray) -> list[tuple[float, float]]:
    """Return the coordinates of some losses."""
    values = zip(xs.tolist(), losses.tolist())
    return [(across.at(x), down.at(loss)) for x, loss in values]

def dashed(kind: str) -> str:
    """Return the style of a training loss: dotted for a weighted sum over predicted tokens."""
    return f'stroke-dasharray="{DASHES[2 * (kind == WEIGHTED)]}"'

def style_of(index: int) -> tuple[str, str]:
    """Return the color and the dashes of a group."""
    return COLORS[index % len(COLORS)], DASHES[index // len(COLORS) % len(DASHES)]

def grid(across: Axis, down: Axis, unit: str) -> list[str]:
    """Return the lines of the grid with their values, and the names of both axes."""
    drawn = [text(LEFT, TOP - 20, "loss, nats per token")]
    drawn.append(text(RIGHT, BOTTOM + 2 * LINE, unit, anchor="end"))
    for tick in down.ticks():
        y = down.at(tick)
        drawn.append(line([(LEFT, y), (RIGHT, y)], more='opacity="0.35"'))
        drawn.append(text(LEFT - 10, y + 9, f"{tick:.4g}", anchor="end"))
    for tick in across.ticks():
        x = across.at(tick)
        drawn.append(line([(x, TOP), (x, BOTTOM)], more='opacity="0.35"'))
        drawn.append(text(x, BOTTOM + LINE - 4, f"{tick:g}", anchor="middle"))
    return drawn

def key(groups: dict[str, list[Run]], kinds: Sequence[str]) -> tuple[list[str], float]:
    """Return the legend below the frame, and the height of the picture. kinds: what the thin lines show."""
    columns = min(2, len(groups))
    size = FONT
    if len(groups) > MOST_TRAINED:
        size = SMALL_FONT
    y = BOTTOM + 3.2 * LINE
    drawn = [f'<g font-size="{size}">']
    for index, (name, runs) in enumerate(groups.items()):
        color, dashes = style_of(index)
        x = 10 + index % columns * WIDTH / 2
        row = y + index // columns * LINE
        sample = [(x, row - 8), (x + 44, row - 8)]
        drawn.append(line(sample, color, 6, f'stroke-dasharray="{dashes}"'))
        drawn.append(text(x + 54, row, f"{name or 'runs'} (n = {len(runs)})", color))
    drawn.append("</g>")
    y += math.ceil(len(groups) / columns) * LINE
    bar = [(32, y - 18), (32, y + 2)]
    drawn.append(line(bar, INK, 14, 'opacity="0.4"'))
    drawn.append(line([(10, y - 8), (54, y - 8)], INK, 4))
    drawn.append(text(64, y, "validation loss, mean and range of the runs"))
    for kind in kinds:
        y += LINE
        drawn.append(line([(10, y - 8), (54, y - 8)], INK, 2, dashed(kind)))
        drawn.append(text(64, y, kind))
        if kind == WEIGHTED:
            y += LINE
            drawn.append(text(64, y, "(of the next token and of later ones)"))
    return drawn, y + LINE / 2

def chain(results: Sequence[Facts], path: Path) -> None:
    """Plot the training time of each entry of a chain relative to the base's, with its 99 % interval, as a bar.

    results: result.json of each entry, oldest first. If an earlier entry has the same idea, the label ends in "again".
    """
    ratios = [result["in_turn"].get("base", ITSELF) for result in results]
    lowest = min(ratio["low"] for ratio in ratios)
    across = Axis(0.7 * lowest, 1.0, 10, WIDTH - 40, is_log=True)
    target = f"{results[0]['target']:.2f} nats per token"
    drawn = [text(10, LINE, "Training time relative to the base's (99 % interval)")]
    drawn.append(text(10, 2 * LINE, f"Target: mean loss below {target}"))
    drawn.append(text(10, 3 * LINE, "class plain", COLORS[0]))
    drawn.append(text(170, 3 * LINE, "class table", COLORS[1]))
    drawn.append(text(WIDTH - 10, 3 * LINE, "axis: logarithmic", anchor="end"))
    top = 3.6 * LINE
    foot = top + 2.1 * LINE * len(results)
    for tick in across.ticks():
        x = across.at(tick)
        drawn.append(line([(x, top), (x, foot)], more='opacity="0.5"'))
        label_y = foot + LINE - 6
        drawn.append(text(x, label_y, f"{tick:g}", anchor="middle"))
    ideas: set[str] = set()
    for index, (result, ratio) in enumerate(zip(results, ratios)):
        color = COLORS[result["class"] == "table"]
        row = top + (2.1 * index + 0.85) * LINE
        bar = row + LINE / 2
        numbers = "1"
        if ratio is not ITSELF:
            numbers = "{ratio:#.3g} ({low:#.3g} to {high:#.3g})".format_map(ratio)
        low, end, high = (across.at(ratio[part]) for part in ("low", "ratio", "high"))
        stated = result["stated"]
        idea = stated["idea"]
        label = f"{stated['number']} {idea}"
        if idea in ideas:
            label += ", again"
        ideas.add(idea)
        drawn.append(text(10, row, label, color))
        drawn.append(text(WIDTH - 10, row, numbers, color, "end"))
        drawn.append(line([(10, bar), (end, bar)], color, 18, 'opacity="0.6"'))
        drawn.append(line([(low, bar), (high, bar)], INK, 5))
    save(picture(drawn, foot + 1.2 * LINE), path)

def validations(runs: Sequence[Run], column: int) -> Curve:
    """Return the x values (P,) and the losses (runs, P) of the validations after training began.

    column: 0 for steps, 1 for times, of which x is the mean. If the runs have different numbers of validations, only
    the final ones are returned.
    """
    tables = []
    for run in runs:
        rows = [(point.step, point.seconds, point.loss) for point in run.val if point.step]
        tables.append(np.array(rows, float).reshape(-1, 3))                # None becomes nan
    fewest = min(map(len, tables))
    if fewest < max(map(len, tables)):
        fewest = min(1, fewest)
    table = np.array([rows[len(rows) - fewest:] for rows in tables])
    return table[:, :, column].mean(0), table[:, :, 2]

def sampled(runs: Sequence[Run], column: int) -> Curve:
    """Interpolate smoothed training losses at equal fractions of the runs; return mean x (G,) and losses (runs, G).

    column: 0 for steps, 1 for times. The last x value is the mean of the runs' last ones, as in `validations`. Both
    arrays are empty if a run has fewer than two points.
    """
    tables = []
    for run in runs:
        table = run.steps
        known = np.isfinite(table[:, [column, 2]]).all(axis=1)
        table = table[known]
        if len(table) < 2:
            return np.empty(0), np.empty((0, 0))
        # The running mean is shorter near both ends.
        window = np.ones(max(1, int(SMOOTHING * len(table))))
        counts = np.convolve(np.ones(len(table)), window, "same")
        tables.append((table[:, column], np.convolve(table[:, 2], window, "same") / counts))
    grids = [np.linspace(xs[0], xs[-1], GRID) for xs, _ in tables]
    interpolated = [np.interp(grid, xs, losses) for grid, (xs, losses) in zip(grids, tables)]
    return np.mean(grids, axis=0), np.array(interpolated)
