"""Plots of runs: training loss (smoothed) and validation loss over steps and over time.

One file serves light and dark pages: the background is transparent, all colors have a medium brightness, and letters
are large enough for a thumbnail.
"""
from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools import files
from tools.read import Facts, Run

INK = "#7d8590"                        # legible on white and on black
COLORS = ("#2f81f7", "#e8703a", "#2da44e", "#bf4bd8", "#c69026", "#d1477a")
GRID = 200                             # points of the x axis at which runs are averaged
SMOOTHING = 0.04                       # fraction of the run over which training losses are averaged
COLUMNS, ROWS = 60, 10                 # size of a plot in characters
MOST_NAMED = 8                         # groups in a legend; a longer one hides the curves
ITSELF = {"ratio": 1.0, "low": 1.0, "high": 1.0}                     # time of the base over itself
SHARES = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1)             # axis ticks of a chain, as multiples of the base
SHOWN_FROM = 0.15                      # the plot ignores the losses of this first fraction of a run; they are very high

def curves(groups: dict[str, list[Run]], path: Path, target: float | None = None) -> bool:
    """Plot the mean and the range of each group; return False without matplotlib, with a note on stderr.

    Later groups are drawn over earlier ones.
    """
    figure, both = two_frames(("step", "training time (s)"), sharey=True)
    if figure is None:
        return False
    limits: list[float] = []
    for axes, column in zip(both, (0, 1)):
        for index, (name, runs) in enumerate(groups.items()):
            color = COLORS[index % len(COLORS)]
            for is_val in (False, True):
                xs, losses = sampled(runs, is_val, column)
                if not len(xs):
                    continue
                if is_val:
                    axes.fill_between(xs, losses.min(0), losses.max(0), color=color, alpha=0.25, linewidth=0)
                style = {} if is_val else {"linewidth": 1.5, "alpha": 0.6}
                axes.plot(xs, losses.mean(0), **{"color": color, "linewidth": 3} | style)
                shown = losses[:, xs >= SHOWN_FROM * xs[-1]]
                limits += [float(np.nanmin(shown)), float(np.nanmax(shown))]
            axes.plot([], [], color=color, linewidth=3, label=f"{name or 'runs'} ({len(runs)})")
        if target:
            axes.axhline(target, color=INK, linewidth=1.5, linestyle="--")
    if limits:
        margin = 0.05 * (max(limits) - min(limits)) + 1e-6
        both[0].set_ylim(min(limits) - margin, max(limits) + margin)
    both[0].set_ylabel("loss (nats per token)", color=INK, fontsize=17)
    if len(groups) <= MOST_NAMED:
        both[1].legend(fontsize=15, labelcolor=INK, frameon=False)
    save(figure, path)
    return True

def chain(results: list[Facts], pools: list[list[Run]], path: Path) -> bool:
    """Plot the entries of a chain; return False without matplotlib, with a note on stderr.

    Left: the training time of each entry relative to the base's, with its 99 % interval, over its date. Right: its loss
    over that time. results, pools: result.json and runs of each entry.
    """
    figure, (left, right) = two_frames(("began, UTC", "training time over the base's"))
    if figure is None:
        return False
    from matplotlib.dates import AutoDateLocator
    lowest = 1.0
    for result, runs in zip(results, pools):
        against_base = result["in_turn"].get("base", ITSELF)
        ratio = against_base["ratio"]
        color = COLORS[result["class"] == "table"]
        day = min(run.started or 0.0 for run in runs) / 86_400
        bars = [[ratio - against_base["low"]], [against_base["high"] - ratio]]
        left.errorbar(day, ratio, bars, color=color, marker="o", capsize=6)
        finished = [run for run in runs if run.finished]
        points = [[(seconds / run.seconds, loss) for _, loss, seconds in run.val] for run in finished]
        shares, losses = np.mean(points, 0).T
        right.plot(ratio * shares, losses, color=color, linewidth=2, marker="o")
        for axes, point, offset in ((left, (day, ratio), (9, -6)), (right, (ratio, losses[-1]), (-8, -22))):
            number = result["stated"]["number"]
            axes.annotate(number, point, offset, textcoords="offset points", color=color, fontsize=14)
        right.axhline(result["target"], color=INK, linewidth=1.5, linestyle="--")
        right.set_ylim(result["target"] - 0.25, result["target"] + 1.25)      # cuts off the high first losses
        lowest = min(lowest, against_base["low"])
    left.set_yscale("log")
    right.set_xscale("log")
    for axis in (left.yaxis, right.xaxis):
        axis.set_ticks(SHARES, [str(share) for share in SHARES])
        axis.set_tick_params(which="minor", size=0, labelsize=0)
    left.set_ylim(0.8 * lowest, 1.2)
    right.set_xlim(0.8 * lowest, 1.2)
    left.margins(x=0.1)
    left.xaxis_date()
    left.xaxis.set_major_locator(AutoDateLocator(minticks=3, maxticks=8))
    left.tick_params(axis="x", labelrotation=25)
    left.set_ylabel("training time over the base's", color=INK, fontsize=17)
    right.set_ylabel("validation loss (nats per token)", color=INK, fontsize=17)
    figure.suptitle("blue: class plain, orange: class table", color=INK, fontsize=15)
    save(figure, path)
    return True

def two_frames(labels: Sequence[str], **how: Any) -> tuple[Any, Sequence[Any]]:
    """Create an empty figure with two axes, labeled below. Without matplotlib return None and print a note."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print(f"no plot without matplotlib; to install it: {sys.executable} -m pip install matplotlib", file=sys.stderr)
        return None, (None, None)
    figure, both = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained", **how)
    figure.patch.set_alpha(0)
    for axes, label in zip(both, labels):
        axes.patch.set_alpha(0)
        axes.set_xlabel(label, color=INK, fontsize=17)
        axes.tick_params(colors=INK, labelsize=15)
        axes.grid(color=INK, alpha=0.25)
        for spine in axes.spines.values():
            spine.set_color(INK)
    return figure, both

def save(figure: Any, path: Path) -> None:
    """Write a figure in the format of its suffix. A link at `path` is replaced, not followed."""
    from matplotlib import pyplot
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:] or "png", dpi=80)
    pyplot.close(figure)
    files.write_bytes(path, picture.getvalue())

def sampled(runs: Sequence[Run], is_val: bool, column: int) -> tuple[np.ndarray, np.ndarray]:
    """Interpolate losses on a common grid of the x axis; return the grid (G,) and the losses (runs, G).

    column: 0 for steps, 1 for times. Both arrays are empty if a run has fewer than two points.
    """
    tables = []
    for run in runs:
        table = run.steps
        if is_val:
            rows = [(step, seconds, loss) for step, loss, seconds in run.val]
            table = np.array(rows, float).reshape(-1, 3)              # None becomes nan
        known = np.isfinite(table).all(axis=1) if column else np.isfinite(table[:, 2])
        table = table[known]
        if len(table) < 2:
            return np.empty(0), np.empty((0, 0))
        losses = table[:, 2]
        if not is_val:                                    # running mean, shorter near the ends
            window = np.ones(max(1, int(SMOOTHING * len(table))))
            counts = np.convolve(np.ones(len(table)), window, "same")
            losses = np.convolve(losses, window, "same") / counts
        tables.append((table[:, column], losses))
    first = max(xs[0] for xs, _ in tables)
    last = min(xs[-1] for xs, _ in tables)
    grid = np.linspace(first, last, GRID)
    interpolated = [np.interp(grid, xs, losses) for xs, losses in tables]
    return grid, np.array(interpolated)

def characters(runs: Sequence[Run]) -> str:
    """Draw the validation loss of our runs over steps with characters, for a terminal."""
    steps, losses = sampled(runs, True, 0)
    indices = np.linspace(SHOWN_FROM * GRID, GRID - 1, COLUMNS).astype(int)
    curve = losses.mean(0)[indices]
    heights = np.linspace(curve.max(), curve.min(), ROWS)
    canvas = np.full((ROWS, COLUMNS), " ")
    canvas[np.abs(heights[:, None] - curve).argmin(0), np.arange(COLUMNS)] = "o"
    lines = [f"{height:7.3f} |{''.join(row)}" for height, row in zip(heights, canvas)]
    lines.append(f"validation loss (nats per token), steps {steps[indices[0]]:.0f} to {steps[-1]:.0f}")
    return "\n".join(lines)
