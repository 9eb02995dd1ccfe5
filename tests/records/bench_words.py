"""How often a word on time is false, and how often a true difference gets one, by draws.

    python tests/records/bench_words.py [--draws=50000]

Made-up times of n runs a side in turn (sd 0.08 % a run, as on one quiet node) go through the test and the levels of
records/tools/statistics.py. Without a difference any of faster and slower is false; with 0.2 % the share of `faster` is
the power. `bench` counts a bench that looks at 4, 6, 10, ... pairs and stops at its first word. The least squares are
solved here for all draws at once: the tests compare them with `statistics.in_turn`, one draw at a time."""
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
    return SD * rng.standard_normal((draws, runs))

def drift(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    return times(rng, draws, runs) + np.linspace(0, 0.02, runs)

def step(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    at = rng.integers(1, runs, (draws, 1))
    return times(rng, draws, runs) + 0.004 * (np.arange(runs) >= at)

def step_in_the_middle(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    return times(rng, draws, runs) + 0.004 * (np.arange(runs) >= runs // 2)

def blocks(length: int) -> Noise:
    """A speed of its own for each block of so many runs, sd 0.3 %."""
    def of_blocks(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
        speeds = 0.003 * rng.standard_normal((draws, runs // length + 1))
        return times(rng, draws, runs) + np.repeat(speeds, length, axis=1)[:, :runs]
    return of_blocks

def switching(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    """Two speeds 0.4 % apart; one run in four changes to the other."""
    return times(rng, draws, runs) + 0.004 * (np.cumsum(rng.random((draws, runs)) < 0.25, axis=1) % 2)

def skew(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    return SD * rng.exponential(size=(draws, runs))

def spikes(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    return times(rng, draws, runs) + 0.01 * (rng.random((draws, runs)) < 0.1)

NOISES: dict[str, Noise] = {
    "normal": times, "drift 2 %": drift, "a step of 0.4 %": step, "in the middle": step_in_the_middle,
    "blocks of 2": blocks(2), "blocks of 3": blocks(3), "blocks of 4": blocks(4), "two speeds": switching,
    "skew": skew, "spikes": spikes}

def sides(pairs: int, order: str) -> np.ndarray:
    """1 for a run of B; order: of the first two pairs."""
    letters = (order * pairs)[:2 * pairs]
    return np.array([letter == "B" for letter in letters], float)

def p_values(values: np.ndarray, is_b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """B's difference and p of each draw: least squares over side and order."""
    runs = len(is_b)
    design = np.column_stack([np.ones(runs), is_b, np.linspace(-1, 1, runs)])
    fit = values @ np.linalg.pinv(design).T
    left = ((values - fit @ design.T) ** 2).sum(axis=1) / (runs - 3)
    errors = np.sqrt(left * np.linalg.inv(design.T @ design)[1, 1])
    return fit[:, 1], 2 * stats.t.sf(np.abs(fit[:, 1]) / errors, runs - 3)

def words(noise: Noise, pairs: int, order: str, draws: int, shift: float = 0.0, seed: int = 0) -> float:
    """Share of draws with a word; with a shift of B's times only `faster` counts."""
    rng = np.random.default_rng([seed, pairs, order == "ABBA"])
    is_b = sides(pairs, order)
    apart, p = p_values(noise(rng, draws, 2 * pairs) + shift * is_b, is_b)
    said = p < time_level(pairs)
    return float(np.mean(said & (apart < 0) if shift else said))

def words_of_bench(noise: Noise, planned: int, draws: int, shift: float = 0.0, seed: int = 0) -> float:
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
