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
GRID = 100                             # points of the x axis at which runs are averaged
SMOOTHING = 0.04                       # fraction of the run over which training losses are averaged
MOST_TRAINED = 6                       # more groups than this are drawn without their training losses
LOG_RATIO = 3                          # the x axis is logarithmic if the groups' ends differ by more than this
SHOWN_FROM = 0.15                      # the plot ignores the losses of this first fraction of a run; they are very high
ITSELF = {"ratio": 1.0, "low": 1.0, "high": 1.0}              # time of the base over itself

class Axis(NamedTuple):
    """A linear or logarithmic map from values to coordinates."""
    low: float
    high: float
    start: float                       # coordinate of `low`
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the coordinate of a value. A value outside of the axis is moved far outside, if it has no logarithm.
        """
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = (math.log(max(number, 1e-9)) for number in (value, low, high))
        return round(self.start + (self.end - self.start) * (value - low) / (high - low), 1)

    def ticks(self) -> list[float]:
        """Return up to seven round values on a linear axis; on a logarithmic one 1, 2, 5, 10, 20, ... as they fit."""
        steps = [float(f"{digit}e{power}") for power in range(-6, 9) for digit in (1, 2, 5)]
        if self.is_log:
            return [step for step in steps if self.low <= step <= self.high]
        step = next(step for step in steps if (self.high - self.low) / step <= 6)
        return [number * step for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]

def text(x: float, y: float, words: str, color: str = INK, anchor: str = "start") -> str:
    """Return an SVG text."""
    return f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}">{html.escape(words)}</text>'

def line(points: Sequence[tuple[float, float]], color: str = INK, width: float = 1, more: str = "") -> str:
    """Return an SVG line through some points."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" {more}/>'

def save(drawn: Sequence[str], height: float, path: Path) -> None:
    """Write an SVG file. A link at `path` is replaced, not followed. Raises ToolError for a name that is not *.svg."""
    if path.suffix != ".svg":
        raise ToolError("file of a plot", found=path, expected="a name that ends in .svg",
                        hint=path.with_suffix(".svg"))
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
            f'font-family="sans-serif" font-size="{FONT}" role="img">')
    frame = f'<rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}"/>'
    body = "\n".join([head, f'<clipPath id="frame">{frame}</clipPath>', *drawn, "</svg>"])
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(path, f"{body}\n".encode())

def curves(groups: dict[str, list[Run]], path: Path, target: float | None = None) -> None:
    """Plot the validation losses of each group (points, mean and range) and its training loss (mean, smoothed).

    The x axis is the training time, or the step if a run has no time that counts. The y axis fits the validation losses
    after the first step and the training losses of the next token; a weighted sum over several tokens is larger.
    Later groups are drawn over earlier ones.
    """
    runs = [run for group in groups.values() for run in group]
    column = int(all(run.seconds is not None for run in runs))
    validated = {name: validations(group, column) for name, group in groups.items()}
    trained = {name: sampled(group, column) for name, group in groups.items() if len(groups) <= MOST_TRAINED}
    kinds = {name: group[0].training_loss for name, group in groups.items() if len(trained.get(name, ((),))[0])}
    limits = [target] if target else []
    for name in groups:
        limits += validated[name][1].flatten().tolist()
        if name in kinds:
            xs, losses = trained[name]
            shown = losses.mean(0)[xs >= SHOWN_FROM * xs[-1]]
            limits += (shown[-1:] if kinds[name] == WEIGHTED else shown).tolist()
    limits = [loss for loss in limits if math.isfinite(loss)] or [0.0]
    margin = 0.06 * (max(limits) - min(limits)) + 1e-6
    ends = [max([*validated[name][0].tolist(), *trained.get(name, ((),))[0]], default=1.0) for name in groups]
    is_log = max(ends) > LOG_RATIO * min(ends)
    across = Axis(SHOWN_FROM * min(ends) if is_log else 0.0, 1.03 * max(ends), LEFT, RIGHT, is_log)
    down = Axis(min(limits) - margin, max(limits) + margin, BOTTOM, TOP)

    drawn = grid(across, down, ("step", "training time, s")[column] + ", logarithmic" * is_log)
    if target:
        y = down.at(target)
        drawn += [line([(LEFT, y), (RIGHT, y)], INK, 2, 'stroke-dasharray="8 6"'),
                  text(LEFT + 6, y - 8, f"target {target:.2f}")]
    for index, name in enumerate(groups):
        color, dashes = style_of(index)
        clip = 'clip-path="url(#frame)"'
        if name in kinds:
            xs, losses = trained[name]
            points = [(across.at(x), down.at(loss)) for x, loss in zip(xs.tolist(), losses.mean(0).tolist())]
            is_sum = kinds[name] == WEIGHTED
            drawn.append(line(points, color, 2, f'{clip} opacity="0.8" stroke-dasharray="{DASHES[2 * is_sum]}"'))
        points = []
        for x, losses in zip(validated[name][0].tolist(), validated[name][1].T.tolist()):
            points.append((across.at(x), down.at(float(np.mean(losses)))))
            span = [(across.at(x), down.at(loss)) for loss in (min(losses), max(losses))]
            drawn.append(line(span, color, 14, f'{clip} opacity="0.4"'))
        drawn.append(line(points, color, 4, f'{clip} stroke-dasharray="{dashes}"'))
        drawn += [f'<circle cx="{x:g}" cy="{y:g}" r="6" fill="{color}" {clip}/>' for x, y in points]
    legend, height = key(groups, list(dict.fromkeys(kinds.values())))
    save([*drawn, *legend], height, path)

def style_of(index: int) -> tuple[str, str]:
    """Return the color and the dashes of a group."""
    return COLORS[index % len(COLORS)], DASHES[index // len(COLORS) % len(DASHES)]

def grid(across: Axis, down: Axis, words: str) -> list[str]:
    """Return the lines of the grid with their values, and the names of both axes."""
    drawn = [text(LEFT, TOP - 20, "loss, nats per token"), text(RIGHT, BOTTOM + 2 * LINE, words, anchor="end")]
    for tick in down.ticks():
        drawn += [line([(LEFT, down.at(tick)), (RIGHT, down.at(tick))], more='opacity="0.35"'),
                  text(LEFT - 10, down.at(tick) + 9, f"{tick:.4g}", anchor="end")]
    for tick in across.ticks():
        drawn += [line([(across.at(tick), TOP), (across.at(tick), BOTTOM)], more='opacity="0.35"'),
                  text(across.at(tick), BOTTOM + LINE - 4, f"{tick:g}", anchor="middle")]
    return drawn

def key(groups: dict[str, list[Run]], kinds: Sequence[str]) -> tuple[list[str], float]:
    """Return the legend below the frame, and the height of the picture. kinds: what the thin lines show."""
    columns = min(2, len(groups))
    y = BOTTOM + 3.2 * LINE
    drawn = [f'<g font-size="{FONT if len(groups) <= MOST_TRAINED else SMALL_FONT}">']
    for index, (name, runs) in enumerate(groups.items()):
        color, dashes = style_of(index)
        x = 10 + index % columns * WIDTH / 2
        row = y + index // columns * LINE
        drawn += [line([(x, row - 8), (x + 44, row - 8)], color, 6, f'stroke-dasharray="{dashes}"'),
                  text(x + 54, row, f"{name or 'runs'} (n = {len(runs)})", color)]
    drawn.append("</g>")
    y += math.ceil(len(groups) / columns) * LINE
    drawn += [line([(32, y - 18), (32, y + 2)], INK, 14, 'opacity="0.4"'), line([(10, y - 8), (54, y - 8)], INK, 4),
              text(64, y, "validation loss, mean and range of the runs")]
    for kind in kinds:
        y += LINE
        dashes = DASHES[2 * (kind == WEIGHTED)]
        drawn += [line([(10, y - 8), (54, y - 8)], INK, 2, f'stroke-dasharray="{dashes}"'), text(64, y, kind)]
    return drawn, y + LINE / 2

def chain(results: Sequence[Facts], path: Path) -> None:
    """Plot the training time of each entry of a chain relative to the base's, with its 99 % interval, as a bar.

    results: result.json of each entry, oldest first.
    """
    ratios = [result["in_turn"].get("base", ITSELF) for result in results]
    across = Axis(0.7 * min(ratio["low"] for ratio in ratios), 1.0, 10, WIDTH - 40, is_log=True)
    drawn = [text(10, LINE, "Training time relative to the base's (99 % interval)"),
             text(10, 2 * LINE, f"Target: mean loss below {results[0]['target']:.2f} nats per token, p < 0.01"),
             text(10, 3 * LINE, "class plain", COLORS[0]), text(170, 3 * LINE, "class table", COLORS[1])]
    y = 3.6 * LINE
    foot = y + 2.1 * LINE * len(results)
    for tick in across.ticks():
        drawn += [line([(across.at(tick), y), (across.at(tick), foot)], more='opacity="0.5"'),
                  text(across.at(tick), foot + LINE - 6, f"{tick:g}", anchor="middle")]
    for result, ratio in zip(results, ratios):
        color = COLORS[result["class"] == "table"]
        numbers = "1"
        if ratio is not ITSELF:
            numbers = f"{ratio['ratio']:#.3g} ({ratio['low']:#.3g} to {ratio['high']:#.3g})"
        middle = y + 1.35 * LINE
        drawn += [text(10, y + 0.85 * LINE, f"{result['stated']['number']} {result['stated']['idea']}", color),
                  text(WIDTH - 10, y + 0.85 * LINE, numbers, color, "end"),
                  line([(10, middle), (across.at(ratio["ratio"]), middle)], color, 18, 'opacity="0.6"'),
                  line([(across.at(ratio["low"]), middle), (across.at(ratio["high"]), middle)], INK, 5)]
        y += 2.1 * LINE
    save(drawn, foot + 1.2 * LINE, path)

def validations(runs: Sequence[Run], column: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the x values (P,) and the losses (runs, P) of the validations after training began.

    column: 0 for steps, 1 for times, of which x is the mean. If the runs have different numbers of validations, only
    the final ones are returned.
    """
    points = [[point for point in run.val if point.step] for run in runs]
    if len(set(map(len, points))) > 1:
        points = [[run.final] for run in runs]
    xs = [[(point.step, point.seconds)[column] for point in of_run] for of_run in points]
    losses = [[point.loss for point in of_run] for of_run in points]
    return np.array(xs, float).mean(0), np.array(losses, float)

def sampled(runs: Sequence[Run], column: int) -> tuple[np.ndarray, np.ndarray]:
    """Interpolate smoothed training losses on a common grid of the x axis; return the grid (G,) and losses (runs, G).

    column: 0 for steps, 1 for times. Both arrays are empty if a run has fewer than two points.
    """
    tables = []
    for run in runs:
        table = run.steps
        known = np.isfinite(table).all(axis=1) if column else np.isfinite(table[:, 2])
        table = table[known]
        if len(table) < 2:
            return np.empty(0), np.empty((0, 0))
        # The running mean is shorter near both ends.
        window = np.ones(max(1, int(SMOOTHING * len(table))))
        counts = np.convolve(np.ones(len(table)), window, "same")
        tables.append((table[:, column], np.convolve(table[:, 2], window, "same") / counts))
    first = max(xs[0] for xs, _ in tables)
    last = min(xs[-1] for xs, _ in tables)
    xs_of_grid = np.linspace(first, last, GRID)
    return xs_of_grid, np.array([np.interp(xs_of_grid, xs, losses) for xs, losses in tables])
