"""Plots as SVG files: losses of runs over tokens and over time, and the entries of a chain. They need only numpy.

One file serves light and dark pages: the background is transparent, all colors have a medium brightness, and letters
are large enough for a width of 600 pixels.
"""
from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools import files
from tools.read import Run, ToolError

INK = "#7d8590"                        # legible on white and on black
COLORS = ("#2f81f7", "#e8703a", "#2da44e", "#bf4bd8", "#c69026", "#d1477a")
DASHES = ("none", "16 7", "4 6")       # the second and the third use of a color
WIDTH, TOP, BOTTOM = 1200, 50, 440     # of the picture, and edges of the panels
PANELS = (90, 585), (690, 1185)        # left and right edge of each panel
FONT = 24
LINE = 36                              # height of a line of text
GRID = 100                             # points of a run at which training losses are averaged
SMOOTHING = 0.04                       # fraction of the run over which training losses are averaged
MOST_TRAINED = 6                       # more groups than this are drawn without their training losses
SHOWN_FROM = 0.15                      # the axis ignores the losses of this first fraction of a run; they are very high
STEP, SECONDS, LOSS, TOKENS = range(4)                        # columns of `Run.steps`
AXES = {STEP: "step", SECONDS: "training time, s", TOKENS: "training tokens, millions"}

Curve = tuple[np.ndarray, np.ndarray]                         # x values (P,), losses (runs, P)

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

def text(x: float, y: float, words: str, color: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}">{html.escape(files.one_line(words))}</text>'

def line(points: Sequence[tuple[float, float]], color: str = INK, width: float = 1, more: str = "") -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" {more}/>'

def picture(drawn: Sequence[str], width: float, height: float) -> str:
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'font-family="sans-serif" font-size="{FONT}" role="img">')
    return "\n".join([head, *drawn, "</svg>\n"])

def save(svg: str, path: Path) -> None:
    """Write an SVG file. A link at `path` is replaced, not followed."""
    if path.suffix != ".svg":
        raise ToolError(f"plots are SVG files: write {path.with_suffix('.svg')}, not {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(path, svg.encode())


# ---- Losses of runs -------------------------------------------------------------------------------------------------
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
        x = 10 + place * WIDTH / 3
        row = y + row * LINE
        color, dashes = style_of(index)
        label = f"{name or 'runs'} (n = {len(group)})"
        drawn.append(line([(x, row - 8), (x + 44, row - 8)], color, 6, dashes))
        drawn.append(text(x + 54, row, label, color))
    y += math.ceil(len(groups) / 3) * LINE
    drawn.append(text(10, y, "dots: mean validation loss of the runs; thin lines: training loss of the next token"))
    return picture(drawn, WIDTH, y + LINE / 2)

def panel(groups: dict[str, list[Run]], column: int, edges: tuple[int, int], target: float | None) -> list[str]:
    """Draw the losses of all groups over one column of `Run.steps`; later groups are drawn over earlier ones."""
    validated = [validations(group, column) for group in groups.values()]
    trained = []
    if len(groups) <= MOST_TRAINED:
        trained = [sampled(group, column) for group in groups.values()]
    shown = [losses[xs >= SHOWN_FROM * xs[-1:]] for xs, losses in trained]
    shown += [losses for _, losses in validated]
    known = np.concatenate([[target or math.nan], *shown])
    known = known[np.isfinite(known)]
    high = known.max() if len(known) else 0.0
    low = known.min() if len(known) else 0.0
    last = max(np.fmax.reduce(xs, initial=0.0) for xs, _ in [*validated, *trained])
    margin = 0.06 * (high - low)
    margin += max(1e-6, 1e-9 * abs(high))
    down = Axis(low - margin, high + margin, BOTTOM, TOP)
    left, right = edges
    across = Axis(0.0, 1.03 * last or 1.0, left, right)
    clip = f'clip-path="url(#area-{column})"'
    frame = f'<rect x="{left}" y="{TOP}" width="{right - left}" height="{BOTTOM - TOP}"/>'
    drawn = [f'<clipPath id="area-{column}">{frame}</clipPath>', *grid(across, down, AXES[column])]
    if target:
        y = down.at(target)
        drawn.append(line([(left, y), (right, y)], INK, 2, 'stroke-dasharray="8 6"'))
        drawn.append(text(left + 6, y - 8, f"target {target:.2f}"))
    for index, curve in enumerate(trained):
        color, _ = style_of(index)
        points = located(across, down, curve)
        drawn.append(line(points, color, 2, f'{clip} opacity="0.8"'))
    for index, curve in enumerate(validated):
        color, dashes = style_of(index)
        points = located(across, down, curve)
        drawn += [f'<circle cx="{x:g}" cy="{y:g}" r="6" fill="{color}"/>' for x, y in points]
        drawn.append(line(points, color, 4, f"{clip} {dashes}"))
    return drawn

def located(across: Axis, down: Axis, curve: Curve) -> list[tuple[float, float]]:
    return [(across.at(x), down.at(loss)) for x, loss in zip(*curve)]

def style_of(index: int) -> tuple[str, str]:
    uses, color = divmod(index, len(COLORS))
    return COLORS[color], f'stroke-dasharray="{DASHES[uses % len(DASHES)]}"'

def grid(across: Axis, down: Axis, unit: str) -> list[str]:
    left = across.start
    right = across.end
    drawn = [text(left, TOP - 20, "loss, nats per token")]
    drawn.append(text(right, BOTTOM + 2 * LINE, unit, anchor="end"))
    for tick in down.ticks():
        y = down.at(tick)
        drawn.append(line([(left, y), (right, y)], more='opacity="0.35"'))
        drawn.append(text(left - 10, y + 9, f"{tick:.4g}", anchor="end"))
    for tick in across.ticks():
        x = across.at(tick)
        drawn.append(line([(x, TOP), (x, BOTTOM)], more='opacity="0.35"'))
        drawn.append(text(x, BOTTOM + LINE - 4, f"{tick:.4g}", anchor="middle"))
    return drawn

def xs_of(table: np.ndarray, column: int) -> np.ndarray:
    return table[:, column] / (1e6 if column == TOKENS else 1)

def validations(runs: Sequence[Run], column: int) -> Curve:
    """Return x and mean losses of the validations after training began; the final ones if their numbers differ."""
    tables = []
    for run in runs:
        rows = [(point.step, point.seconds, point.loss, 0) for point in run.val if point.step]
        table = np.array(rows, float).reshape(-1, 4)                       # None becomes nan
        if column == TOKENS:
            table[:, TOKENS] = np.interp(table[:, STEP], run.steps[:, STEP], run.steps[:, TOKENS])
        tables.append(table)
    counts = {len(table) for table in tables}
    fewest = min(counts) if len(counts) == 1 else min(1, *counts)
    means = np.mean([table[len(table) - fewest:] for table in tables], axis=0)
    return xs_of(means, column), means[:, LOSS]

def sampled(runs: Sequence[Run], column: int) -> Curve:
    """Return smoothed mean training losses at equal fractions of the runs; empty if a run has fewer than two points."""
    curves = []
    for run in runs:
        table = run.steps[np.isfinite(run.steps[:, [column, LOSS]]).all(axis=1)]
        if len(table) < 2:
            return np.empty(0), np.empty(0)
        window = np.ones(max(1, int(SMOOTHING * len(table))))              # shorter near both ends
        counts = np.convolve(np.ones(len(table)), window, "same")
        smooth = np.convolve(table[:, LOSS], window, "same") / counts
        xs = xs_of(table, column)
        places = np.linspace(xs[0], xs[-1], GRID)
        curves.append((places, np.interp(places, xs, smooth)))
    xs, losses = np.mean(curves, axis=0)
    return xs, losses


# ---- Entries of a chain ---------------------------------------------------------------------------------------------
def chain_svg(entries: Sequence[tuple[str, bool, Sequence[Sequence[float]]]]) -> str:
    """Plot the training time of each entry of a chain relative to the base's, with its 99 % interval, as a bar.

    entries: words, whether the class is table, and a list of the ratio with its limits; [] for the base.
    """
    across = Axis(0.0, 1.0, 10, 760)
    top = 2.6 * LINE
    foot = top + 2.1 * LINE * len(entries)
    drawn = [text(10, LINE, "Training time relative to the base's (99 % interval)")]
    drawn.append(text(10, 2 * LINE, "class plain", COLORS[0]))
    drawn.append(text(170, 2 * LINE, "class table", COLORS[1]))
    for tick in across.ticks():
        drawn.append(text(across.at(tick), foot + LINE - 6, f"{tick:g}", anchor="middle"))
    for index, (words, is_table, ratios) in enumerate(entries):
        ratio, low, high = [*ratios, (1.0, 1.0, 1.0)][0]
        color = COLORS[is_table]
        row = top + (2.1 * index + 0.85) * LINE
        bar = row + LINE / 2
        drawn.append(text(10, row, words, color))
        drawn.append(text(790, row, f"{ratio:#.3g} ({low:#.3g} to {high:#.3g})", color, "end"))
        drawn.append(line([(10, bar), (across.at(ratio), bar)], color, 18, 'opacity="0.6"'))
        drawn.append(line([(across.at(low), bar), (across.at(high), bar)], INK, 5))
    return picture(drawn, 800, foot + 1.2 * LINE)
