"""Simulate how often a verdict on time or loss is false, and how often a true difference is found.

    python tests/records/bench_words.py [--draws=20000]

The first table has synthetic times of n interleaved runs per side (sd 0.08 % per run, as on an idle node), in the order
of a bench, tested at the levels of records/tools/statistics.py. If the sides do not differ, `faster` and `slower` are
false. If they differ by 0.2 %, the fraction of `faster` is the power. The columns `bench` have benches that test after
4, 6, 10, ... pairs and stop at the first verdict.

The second table has benches of five sides: mean and maximum of the rates of false verdicts over all ten comparisons.

The third table has the losses of benches. With a target, `faster` needs a proof that the mean loss of B is below it; B
takes 10 % less time, so the verdict depends only on its losses. Without a target, losses are compared in pairs with the
same seed. The last row has an entry of `pocket_time` that tests the target after each seed, from the fifth to the 20th.
"""
import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "records"))

from tools.record import CHAIN_ALPHA, CHAIN_SEEDS                         # noqa: E402
from tools.statistics import look_level, pair_order, time_level           # noqa: E402

SD = 0.0008
PAIRS = 3, 4, 5, 6, 8, 10, 16
PLANNED = 4, 6, 10, 16                 # planned pairs of benches
BENCHES = [f"bench, {planned}" for planned in PLANNED]
SIDES = "ABCDE"                        # all sides of a bench in the second table
Noise = Callable[[np.random.Generator, int, int], np.ndarray]

def times(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    """Draw log times without drift: (draws, runs)."""
    return SD * rng.standard_normal((draws, runs))

def drift(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    """Draw log times with a linear drift of 2 %."""
    return times(rng, draws, runs) + np.linspace(0, 0.02, runs)

def step(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    """Draw log times with one change of speed, of 0.4 %, at a random run."""
    at = rng.integers(1, runs, (draws, 1))
    return times(rng, draws, runs) + 0.004 * (np.arange(runs) >= at)

def step_in_the_middle(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    """Draw log times with one change of speed, of 0.4 %, after half of the runs."""
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
    """Draw log times with two speeds that differ by 0.4 %; the speed switches before a run with probability 1/4."""
    return times(rng, draws, runs) + 0.004 * (np.cumsum(rng.random((draws, runs)) < 0.25, axis=1) % 2)

def skew(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    """Draw log times with a skewed (exponential) distribution."""
    return SD * rng.exponential(size=(draws, runs))

def spikes(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
    """Draw log times in which each run is 1 % slower with probability 1/10."""
    return times(rng, draws, runs) + 0.01 * (rng.random((draws, runs)) < 0.1)

def last_is_slower(slower: float, sides: int = 2) -> Noise:
    """Return a noise in which the last run of each pair or round takes longer, by the fraction `slower`."""
    def of_positions(rng: np.random.Generator, draws: int, runs: int) -> np.ndarray:
        return times(rng, draws, runs) + slower * (np.arange(runs) % sides == sides - 1)
    return of_positions

NOISES: dict[str, Noise] = {
    "normal": times, "drift 2 %": drift, "a step of 0.4 %": step, "in the middle": step_in_the_middle,
    "blocks of 2": blocks(2), "blocks of 3": blocks(3), "blocks of 4": blocks(4), "blocks of 2, mid-pair": blocks(2, 1),
    "blocks of 3, mid-pair": blocks(3, 1), "blocks of 4, mid-pair": blocks(4, 1), "blocks of 6, mid-pair": blocks(6, 3),
    "two speeds": switching, "skew": skew, "spikes": spikes,
    "second 0.08 % slower": last_is_slower(SD), "second 0.2 % slower": last_is_slower(0.002)}
OF_SIDES: dict[str, Noise] = NOISES | {"last 0.08 % slower": last_is_slower(SD, len(SIDES))}

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

def words(noise: Noise, pairs: int, draws: int, shift: float = 0.0, seed: int = 0) -> float:
    """Return the fraction of draws with a verdict. If B's times are shifted, only `faster` counts."""
    rng = np.random.default_rng([seed, pairs, 2])
    is_b = sides(pairs)
    apart, p = p_values(noise(rng, draws, 2 * pairs) + shift * is_b, is_b)
    said = p < time_level(pairs)
    return float(np.mean(said & (apart < 0) if shift else said))

def words_of_bench(noise: Noise, planned: int, draws: int, shift: float = 0.0, seed: int = 0) -> float:
    """Return the fraction of benches with a verdict at any of their tests."""
    rng = np.random.default_rng([seed, planned])
    values = noise(rng, draws, 2 * planned) + shift * sides(planned)
    said = np.zeros(draws, bool)
    for pairs in range(3, planned + 1):
        level = time_level(pairs, look_level(pairs, planned))
        if level:
            apart, p = p_values(values[:, :2 * pairs], sides(pairs))
            said |= (p < level) & ((apart < 0) | (not shift))
    return float(np.mean(said))

def words_of_sides(noise: Noise, pairs: int, draws: int) -> list[float]:
    """Return the fraction of draws with a verdict, for each combination of two sides of a bench."""
    order = np.array([side for pair in range(1, pairs + 1) for side in pair_order(SIDES, pair)])
    values = noise(np.random.default_rng([0, pairs]), draws, len(order))
    rates = []
    for two in itertools.combinations(SIDES, 2):
        own = np.isin(order, two)
        _, p = p_values(values[:, own], (order[own] == two[1]).astype(float))
        rates.append(float(np.mean(p < time_level(pairs))))
    return rates

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

def words_on_losses(planned: int, draws: int, margin: float = 0.0, skewness: float = 0.0, two_sided: bool = False,
                    seed: int = 0) -> float:
    """Return the fraction of benches that prove a target which is `margin` sd above the true mean.

    skewness: that of the losses. If it is 0, they have a normal distribution, otherwise a gamma distribution (2:
    exponential). two_sided: test the differences of pairs against 0 instead, as a bench without a target does.
    """
    rng = np.random.default_rng([seed, planned, round(10 * skewness)])
    values = rng.standard_normal((draws, planned))
    if skewness:
        shape = 4 / skewness ** 2
        values = (rng.gamma(shape, size=(draws, planned)) - shape) / np.sqrt(shape)
    said = np.zeros(draws, bool)
    for pairs in range(3, planned + 1):
        level = look_level(pairs, planned)
        if level:
            seen = values[:, :pairs] - margin
            t = seen.mean(axis=1) / seen.std(axis=1, ddof=1) * np.sqrt(pairs)
            p = stats.t.cdf(t, pairs - 1)
            if two_sided:
                p = 2 * stats.t.sf(np.abs(t), pairs - 1)
            said |= p < level
    return float(np.mean(said))

def time_table(draws: int) -> str:
    """Return a Markdown table of all cases of times."""
    head = ["noise", *(f"{pairs} a side" for pairs in PAIRS), *BENCHES]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    cases = [(name, noise, 0.0) for name, noise in NOISES.items()] + [("B takes 0.2 % less", times, -0.002)]
    for name, noise, shift in cases:
        cells = [f"{words(noise, pairs, draws, shift):.2%}" for pairs in PAIRS]
        cells += [f"{words_of_bench(noise, planned, draws, shift):.2%}" for planned in PLANNED]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)

def sides_table(draws: int) -> str:
    """Return a Markdown table of benches of several sides."""
    lines = [f"| {len(SIDES)} sides | {' | '.join(f'{pairs} rounds' for pairs in PLANNED)} |",
             "|---" * (1 + len(PLANNED)) + "|"]
    for name, noise in OF_SIDES.items():
        rates = [words_of_sides(noise, pairs, draws) for pairs in PLANNED]
        cells = [f"{np.mean(row):.2%}, most {max(row):.2%}" for row in rates]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)

def loss_table(draws: int) -> str:
    """Return a Markdown table of all cases of losses."""
    cases = {"proof, mean at the target": {}}
    cases |= {f"proof, mean {margin} sd below": dict(margin=margin) for margin in (0.5, 1.0, 2.0)}
    cases |= {f"proof, mean at the target, skew {skew}": dict(skewness=skew) for skew in (0.2, 1.0, 2.0)}
    cases |= {f"pairs, {margin} sd": dict(two_sided=True, margin=margin) for margin in (0.0, 1.0, 2.0)}
    head = ["losses", *BENCHES]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, case in cases.items():
        cells = [f"{words_on_losses(planned, draws, **case):.2%}" for planned in PLANNED]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    cells = [f"{proofs_of_chain(most, draws):.2%} up to {most} seeds" for most in (6, 10, max(CHAIN_SEEDS))]
    return "\n".join([*lines, f"| entry of pocket_time, mean at the target | {' | '.join(cells)} | |"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20_000)
    draws = parser.parse_args().draws
    print(f"{time_table(draws)}\n\n{sides_table(draws)}\n\n{loss_table(draws)}")
