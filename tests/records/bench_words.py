"""Simulate how often a verdict on time or loss is false, and how often a true difference is found.

    python tests/records/bench_words.py                      # 20,000 benches per case: the table in MEASURING.md

Times are those of interleaved runs (sd 0.08 % per run, as on an idle node), in the order of a bench, tested at the
levels of records/tools/statistics.py. If the sides do not differ, `faster` and `slower` are false.
"""
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "records"))

from tools.record import CHAIN_ALPHA, CHAIN_SEEDS                         # noqa: E402
from tools.statistics import look_level, pair_order, time_level           # noqa: E402

SD = 0.0008
PLANNED = 4, 6, 10, 16                 # planned pairs of benches
Noise = Callable[[np.random.Generator, int, int], np.ndarray]             # log times: (draws, runs)

def times(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    return SD * rng.standard_normal((draws, runs))

def drift(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    return times(rng, draws, runs) + np.linspace(0, 0.02, runs)

def step(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    """Draw times with one change of speed, of 0.4 %, at a random run."""
    at = rng.integers(1, runs, (draws, 1))
    return times(rng, draws, runs) + 0.004 * (np.arange(runs) >= at)

def step_in_the_middle(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    return times(rng, draws, runs) + 0.004 * (np.arange(runs) >= runs // 2)

def blocks(length: int, offset: int = 0) -> Noise:
    """Return a noise in which each block of `length` runs has a random speed, sd 0.3 %.

    offset: number of runs that the first block lacks. If it is odd, blocks begin in the middle of a pair.
    """
    def of_blocks(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
        speeds = 0.003 * rng.standard_normal((draws, (runs + offset) // length + 1))
        return times(rng, draws, runs) + np.repeat(speeds, length, axis=1)[:, offset:offset + runs]
    return of_blocks

def switching(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    """Draw times with two speeds that differ by 0.4 %; the speed switches before a run with probability 1/4."""
    return times(rng, draws, runs) + 0.004 * (np.cumsum(rng.random((draws, runs)) < 0.25, axis=1) % 2)

def skew(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    return SD * rng.exponential(size=(draws, runs))

def spikes(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    """Draw times in which each run is 1 % slower with probability 1/10."""
    return times(rng, draws, runs) + 0.01 * (rng.random((draws, runs)) < 0.1)

def second_is_slower(slower: float) -> Noise:
    """Return a noise in which the second run of each pair takes longer, by the fraction `slower`."""
    def of_positions(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
        return times(rng, draws, runs) + slower * (np.arange(runs) % 2)
    return of_positions

NOISES: dict[str, Noise] = {
    "normal": times, "drift 2 %": drift, "a step of 0.4 %": step, "in the middle": step_in_the_middle,
    "blocks of 2": blocks(2), "blocks of 3": blocks(3), "blocks of 4": blocks(4), "blocks of 2, mid-pair": blocks(2, 1),
    "blocks of 3, mid-pair": blocks(3, 1), "blocks of 4, mid-pair": blocks(4, 1), "blocks of 6, mid-pair": blocks(6, 3),
    "two speeds": switching, "skew": skew, "spikes": spikes,
    "second 0.08 % slower": second_is_slower(SD), "second 0.2 % slower": second_is_slower(0.002)}

def sides(pairs: int) -> np.ndarray:
    """Return 1.0 for runs of B, and 0.0 for those of A, in the order of a bench."""
    return np.array([side == "B" for pair in range(1, pairs + 1) for side in pair_order("AB", pair)], float)

def p_values(values: np.ndarray, is_b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the difference of B and its p-value in each draw, by least squares over side and order."""
    runs = len(is_b)
    design = np.column_stack([np.ones(runs), is_b, np.linspace(-1, 1, runs)])
    fit = values @ np.linalg.pinv(design).T
    left = ((values - fit @ design.T) ** 2).sum(axis=1) / (runs - 3)
    errors = np.sqrt(left * np.linalg.inv(design.T @ design)[1, 1])
    return fit[:, 1], 2 * stats.t.sf(np.abs(fit[:, 1]) / errors, runs - 3)

def words(noise: Noise, pairs: int, draws: int, shift: float = 0.0) -> float:
    """Return the fraction of draws with a verdict. If B's times are shifted, only `faster` counts."""
    rng = np.random.default_rng([pairs, pairs, 2])
    is_b = sides(pairs)
    apart, p = p_values(noise(rng, draws, 2 * pairs) + shift * is_b, is_b)
    said = p < time_level(pairs)
    return float(np.mean(said & (apart < 0) if shift else said))

def words_of_bench(noise: Noise, planned: int, draws: int) -> float:
    """Return the fraction of benches with a verdict at any of their tests."""
    values = noise(np.random.default_rng([0, planned]), draws, 2 * planned)
    said = np.zeros(draws, bool)
    for pairs in range(3, planned + 1):
        level = time_level(pairs, look_level(pairs, planned))
        if level:
            said |= p_values(values[:, :2 * pairs], sides(pairs))[1] < level
    return float(np.mean(said))

def proofs_of_chain(most: int, draws: int, margin: float = 0.0) -> float:
    """Return the fraction of entries that prove a target at some number of seeds, from the fewest allowed to `most`.

    margin: by how many sd the true mean is below the target.
    """
    values = np.random.default_rng(most).standard_normal((draws, most)) - margin
    n = np.arange(1, most + 1)
    mean = values.cumsum(axis=1) / n
    spread = ((values ** 2).cumsum(axis=1) - n * mean ** 2) / np.maximum(n - 1, 1)
    tested = slice(min(CHAIN_SEEDS) - 1, most)
    t = mean[:, tested] / np.sqrt(spread[:, tested] / n[tested])
    return float(np.mean((stats.t.cdf(t, n[tested] - 1) < CHAIN_ALPHA).any(axis=1)))

def words_on_losses(planned: int, draws: int, margin: float = 0.0, skewness: float = 0.0,
                    two_sided: bool = False) -> float:
    """Return the fraction of benches that prove a target which is `margin` sd above the true mean.

    skewness: that of the losses. If it is 0, they have a normal distribution, otherwise a gamma distribution (2:
    exponential). two_sided: test the differences of pairs against 0 instead, as a bench without a target does.
    """
    rng = np.random.default_rng([0, planned, round(10 * skewness)])
    values = rng.standard_normal((draws, planned))
    if skewness:
        shape = 4 / skewness ** 2
        values = (rng.gamma(shape, size=(draws, planned)) - shape) / np.sqrt(shape)
    said = np.zeros(draws, bool)
    for pairs in range(3, planned + 1):
        level = look_level(pairs, planned)
        if level:
            seen = values[:, :pairs] - margin
            p = stats.ttest_1samp(seen, 0, axis=1, alternative="two-sided" if two_sided else "less").pvalue
            said |= p < level
    return float(np.mean(said))


if __name__ == "__main__":
    DRAWS = 20_000
    for name, noise in NOISES.items():
        print(name, [f"{pairs} pairs {words(noise, pairs, DRAWS):.2%}" for pairs in (3, *PLANNED)],
              [f"bench of {planned} {words_of_bench(noise, planned, DRAWS):.2%}" for planned in PLANNED])
    print("B takes 0.2 % less", [f"{words(times, pairs, DRAWS, -0.002):.2%}" for pairs in PLANNED])
    for case in (*(dict(margin=margin) for margin in (0, 1, 2)), *(dict(skewness=skewness) for skewness in (0.2, 1, 2)),
                 dict(two_sided=True)):
        print("losses", case, [f"{words_on_losses(planned, DRAWS, **case):.2%}" for planned in PLANNED])
    print("pocket_time", [f"{most} seeds {proofs_of_chain(most, DRAWS):.2%}" for most in (6, 10, max(CHAIN_SEEDS))])
