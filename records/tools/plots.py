"""Loss over steps and over time, by group of runs."""
from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tools.logs import Run
from tools.verdict import mean

PLOT_TAIL = 0.3                    # share of the run that the right side of a plot shows
STYLES = ("o-", "s--", "^-.", "v:")        # dashes: equal curves hide each other


class Curve:
    """Validations that all runs of a group have: steps, mean times in s (nan: none), losses by run."""

    def __init__(self, runs: Sequence[Run]) -> None:
        of_runs = [{point.step: point for point in run.val} for run in runs]
        self.steps = sorted(set.intersection(*map(set, of_runs)))
        self.times = []
        self.losses = []
        for step in self.steps:
            points = [of_run[step] for of_run in of_runs]
            self.times.append(mean(point.seconds for point in points if point.seconds is not None))
            self.losses.append([point.loss for point in points])


def first_apart(curves: Sequence[Curve]) -> int:
    """Step from which on the bands (lowest to highest run) of the first two curves do not touch, less one validation;
    their first step if they touch at the end."""
    bands = []
    for curve in curves[:2]:
        bands.append({step: (min(losses), max(losses)) for step, losses in zip(curve.steps, curve.losses)})
    shared = sorted(set.intersection(*map(set, bands)))
    start = shared[-1] if shared else 0
    for step in reversed(shared):
        start = step
        lows_and_highs = [band[step] for band in bands]
        if max(low for low, _ in lows_and_highs) <= min(high for _, high in lows_and_highs):
            break
    touching_at_end = not shared or start == shared[-1]
    if touching_at_end:
        return min(curve.steps[0] for curve in curves if curve.steps)
    return start


def plot(groups: dict[str, list[Run]], path: Path, target: float | None = None) -> None:
    """Means with bands from the lowest to the highest run: from where the first two groups part, and near the end."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    curves = {name: Curve(runs) for name, runs in groups.items()}
    start = first_apart(list(curves.values()))
    figure, grid = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    for number, (name, curve) in enumerate(curves.items()):
        label = f"{name}: {len(groups[name])} runs"
        for row, unit in zip(grid, ("step", "training time (s)")):
            xs = curve.steps if unit == "step" else curve.times
            row[0].set_title("whole run" if start == curve.steps[0] else f"from step {start} on, where curves part")
            row[1].set_title("near the end")
            firsts = (index_from(curve.steps, start), index_near_end(xs))
            for axes, first in zip(row, firsts):
                draw(axes, xs[first:], curve.losses[first:], number, label)
                axes.set(xlabel=unit, ylabel="validation loss (nats per token)")

    for axes in grid.flat:
        if target is not None:
            axes.axhline(target, color="black", linewidth=0.8, label=f"target {target:g}")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def index_from(steps: Sequence[int], start: int) -> int:
    """Of the first validation at or behind a step, with at least two left."""
    before = sum(step < start for step in steps)
    return max(0, min(before, len(steps) - 2))


def index_near_end(xs: Sequence[float]) -> int:
    """Of the first x in the last PLOT_TAIL, with at least two left."""
    if math.isnan(xs[-1]):
        return 0
    before = sum(not x >= (1 - PLOT_TAIL) * xs[-1] for x in xs)
    return max(0, min(before, len(xs) - 2))


def draw(axes, xs: Sequence[float], losses: Sequence[Sequence[float]], number: int, label: str) -> None:
    color = f"C{number}"
    axes.plot(xs, list(map(mean, losses)), STYLES[number % len(STYLES)], color=color, markersize=3, label=label)
    axes.fill_between(xs, list(map(min, losses)), list(map(max, losses)), color=color, alpha=0.25, linewidth=0)
