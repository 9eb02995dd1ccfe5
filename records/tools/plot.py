"""Pictures of runs: training loss (smoothed) and validation loss, against steps and against time.

curves(groups, path, target)   draw groups of runs, the first one behind the others

One file for light and dark pages: the background is transparent, all ink has a middle tone, and letters are large
enough for a thumbnail. Raises ToolError without matplotlib."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.read import Run, ToolError

INK = "#7d8590"                        # readable on white and on black
COLORS = ("#2f81f7", "#e8703a", "#2da44e", "#bf4bd8", "#c69026", "#d1477a")
GRID = 200                             # places on the x axis at which runs are averaged
SMOOTHING = 0.04                       # share of the run over which training losses are averaged
SHOWN_FROM = 0.15                      # share of the run that is above the picture: the first losses are very high


def curves(groups: dict[str, list[Run]], path: Path, target: float | None = None) -> None:
    """Draw each group's mean, with the band of its runs; the first group stands behind the others."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ToolError("--plot", "no matplotlib", "a library that draws", "pip install matplotlib") from None
    figure, both = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained", sharey=True)
    figure.patch.set_alpha(0)
    tops: list[float] = []
    lows: list[float] = []
    for axes, timed in zip(both, (False, True)):
        for number, (name, runs) in enumerate(groups.items()):
            color = COLORS[number % len(COLORS)]
            for kind in ("training", "validation"):
                xs, losses = sampled(runs, kind, timed)
                if not len(xs):
                    continue
                draw(axes, xs, losses, kind, color, name or "runs")
                shown = losses[:, xs >= SHOWN_FROM * xs[-1]]
                tops.append(float(np.nanmax(shown)))
                lows.append(float(np.nanmin(shown)))
        style(axes, "training time (s)" if timed else "step", target)
    if tops:
        room = 0.05 * (max(tops) - min(lows)) or 0.01
        both[0].set_ylim(min(lows) - room, max(tops) + room)
    both[0].set_ylabel("loss (nats per token)", color=INK, fontsize=17)
    both[0].legend(fontsize=15, labelcolor=INK, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, metadata={"Software": None})
    pyplot.close(figure)


def sampled(runs: Sequence[Run], kind: str, timed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Places on the x axis, and the losses there (run, place); empty if a run has none of this kind."""
    tables = []
    for run in runs:
        table = run.steps
        if kind == "validation":
            rows = [(point.step, np.nan if point.seconds is None else point.seconds, point.loss) for point in run.val]
            table = np.array(rows, float).reshape(-1, 3)
        table = table[np.isfinite(table[:, 2]) & np.isfinite(table[:, int(timed)])]
        if len(table) < 2:
            return np.empty(0), np.empty((0, 0))
        tables.append((table[:, int(timed)], smoothed(table[:, 2]) if kind == "training" else table[:, 2]))
    last = min(xs[-1] for xs, _ in tables)
    places = np.linspace(max(xs[0] for xs, _ in tables), last, GRID)
    return places, np.array([np.interp(places, xs, losses) for xs, losses in tables])


def smoothed(losses: np.ndarray) -> np.ndarray:
    """A running mean; near the ends over as many as there are."""
    width = max(1, int(SMOOTHING * len(losses)))
    window = np.ones(width)
    return np.convolve(losses, window, "same") / np.convolve(np.ones(len(losses)), window, "same")


def draw(axes: Any, xs: np.ndarray, losses: np.ndarray, kind: str, color: str, name: str) -> None:
    mean = losses.mean(0)
    if kind == "training":
        axes.plot(xs, mean, color=color, linewidth=1.5, alpha=0.6)
        return
    axes.fill_between(xs, losses.min(0), losses.max(0), color=color, alpha=0.25, linewidth=0)
    axes.plot(xs, mean, color=color, linewidth=3, label=f"{name} ({len(losses)})")


def style(axes: Any, label: str, target: float | None) -> None:
    axes.patch.set_alpha(0)
    axes.set_xlabel(label, color=INK, fontsize=17)
    axes.tick_params(colors=INK, labelsize=15)
    axes.grid(color=INK, alpha=0.25)
    for spine in axes.spines.values():
        spine.set_color(INK)
    if target:
        axes.axhline(target, color=INK, linewidth=1.5, linestyle="--")
