"""Simulate how often a verdict on time is false, and how often a true difference is found.

    python tests/records/bench_words.py [--draws=50000]

Synthetic times of n interleaved runs a side (sd 0.08 % per run, as on an idle node) are tested at the levels of
records/tools/statistics.py. Without a difference, `faster` and `slower` are both false. With a difference of 0.2 %, the
fraction of `faster` is the power. `bench` columns are benches that test after 4, 6, 10, ... pairs and stop at their
first verdict. The least squares are solved here for all draws at once; the tests compare them with
`statistics.in_turn`, which takes a single draw.
"""
import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "records"))

from tools.statistics import time_level                # noqa: E402

SD = 0.0008
PAIRS = 3, 4, 5, 6, 8, 10, 16
Noise = Callable[[np.random.Generator, int, int], np.ndarray]

def times(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    """Return log times without a drift, (draws, runs)."""
    return SD * rng.standard_normal((draws, runs))

def drift(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    """Add a linear drift of 2 %."""
    return times(rng, draws, runs) + np.linspace(0, 0.02, runs)

def step(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    """Add a change of speed of 0.4 % at a random run."""
    at = rng.integers(1, runs, (draws, 1))
    return times(rng, draws, runs) + 0.004 * (np.arange(runs) >= at)

def step_in_the_middle(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    """Add a change of speed of 0.4 % in the middle."""
    return times(rng, draws, runs) + 0.004 * (np.arange(runs) >= runs // 2)

def blocks(length: int) -> Noise:
    """Return a noise in which each block of `length` runs has a random speed, sd 0.3 %."""
    def of_blocks(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
        speeds = 0.003 * rng.standard_normal((draws, runs // length + 1))
        return times(rng, draws, runs) + np.repeat(speeds, length, axis=1)[:, :runs]
    return of_blocks

def switching(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    """Alternate between two speeds 0.4 % apart; each run switches with probability 1/4."""
    return times(rng, draws, runs) + 0.004 * (np.cumsum(rng.random((draws, runs)) < 0.25, axis=1) % 2)

def skew(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    """Return skewed log times (exponential)."""
    return SD * rng.exponential(size=(draws, runs))

def spikes(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    """Make each run 1 % slower with probability 1/10."""
    return times(rng, draws, runs) + 0.01 * (rng.random((draws, runs)) < 0.1)

NOISES: dict[str, Noise] = {
    "normal": times, "drift 2 %": drift, "a step of 0.4 %": step, "in the middle": step_in_the_middle,
    "blocks of 2": blocks(2), "blocks of 3": blocks(3), "blocks of 4": blocks(4), "two speeds": switching,
    "skew": skew, "spikes": spikes}

def sides(pairs: int, order: str) -> np.ndarray:
    """Return 1.0 for runs of B, and 0.0 for those of A; order: of the first two pairs, "ABBA" or "ABAB"."""
    letters = (order * pairs)[:2 * pairs]
    return np.array([letter == "B" for letter in letters], float)

def p_values(values: np.ndarray, is_b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return B's difference and p of each draw, by least squares over side and order."""
    runs = len(is_b)
    design = np.column_stack([np.ones(runs), is_b, np.linspace(-1, 1, runs)])
    fit = values @ np.linalg.pinv(design).T
    left = ((values - fit @ design.T) ** 2).sum(axis=1) / (runs - 3)
    errors = np.sqrt(left * np.linalg.inv(design.T @ design)[1, 1])
    return fit[:, 1], 2 * stats.t.sf(np.abs(fit[:, 1]) / errors, runs - 3)

def words(noise: Noise, pairs: int, order: str, draws: int, shift: float = 0.0, seed: int = 0) -> float:
    """Return the fraction of draws with a verdict. If B's times are shifted, only `faster` counts."""
    rng = np.random.default_rng([seed, pairs, order == "ABBA"])
    is_b = sides(pairs, order)
    apart, p = p_values(noise(rng, draws, 2 * pairs) + shift * is_b, is_b)
    said = p < time_level(pairs)
    return float(np.mean(said & (apart < 0) if shift else said))

def words_of_bench(noise: Noise, planned: int, draws: int, shift: float = 0.0, seed: int = 0) -> float:
    """Return the fraction of benches with a verdict at any of their tests."""
    rng = np.random.default_rng([seed, planned])
    values = noise(rng, draws, 2 * planned) + shift * sides(planned, "ABBA")
    said = np.zeros(draws, bool)
    for pairs in range(3, planned + 1):
        level = time_level(pairs, planned, looks=True)
        if level:
            apart, p = p_values(values[:, :2 * pairs], sides(pairs, "ABBA"))
            said |= (p < level) & ((apart < 0) | (not shift))
    return float(np.mean(said))

def table(draws: int) -> str:
    """Return a Markdown table of all cases."""
    head = "| noise | order | " + " | ".join(f"{pairs} a side" for pairs in PAIRS)
    lines = [f"{head} | bench, 6 | bench, 10 |", "|---" * (len(PAIRS) + 4) + "|"]
    for name, noise in NOISES.items():
        for order in ("ABBA", "ABAB"):
            cells = [f"{words(noise, pairs, order, draws):.2%}" for pairs in PAIRS]
            cells += [f"{words_of_bench(noise, planned, draws):.2%}" if order == "ABBA" else "" for planned in (6, 10)]
            lines.append(f"| {name} | {order} | {' | '.join(cells)} |")
    for order in ("ABBA", "ABAB"):
        cells = [f"{words(times, pairs, order, draws, -0.002):.1%}" for pairs in PAIRS]
        for planned in (6, 10):
            cells.append(f"{words_of_bench(times, planned, draws, -0.002):.1%}" if order == "ABBA" else "")
        lines.append(f"| B takes 0.2 % less | {order} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=50_000)
    print(table(parser.parse_args().draws))
