"""records/tools/sequential.py: the error rate under stopping at will, and how many pairs it takes, by draws."""
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "records"))

from tools import sequential, verdict  # noqa: E402  (records/ has to be on the path first)

DRAWS = 5000
MOST = 40                          # pairs that are drawn; whoever stops, stops at one of the looks up to there
RUN_SD = 0.0008                    # relative sd of a run's time on one machine, as measured on public runs


def rejected(draws: np.ndarray, level: float = verdict.SHARE) -> np.ndarray:
    """For each draw the pairs at which its first look rejects 0; 0: none does. By formulas of its own."""
    first = np.zeros(len(draws), int)
    for look in sequential.looks(draws.shape[1]):
        some = draws[:, :look.pairs]
        error = some.std(axis=1, ddof=1) / math.sqrt(look.pairs)
        far = np.abs(some.mean(axis=1)) > error * stats.t.isf(level * look.share / 2, look.pairs - 1)
        first[(first == 0) & far] = look.pairs
    return first


def share(hits: np.ndarray) -> tuple[float, float, float]:
    """Of the hits, and its exact 99 % interval (Clopper and Pearson)."""
    count, total = int(hits.sum()), len(hits)
    low = stats.beta.ppf(0.005, count, total - count + 1) if count else 0.0
    high = stats.beta.ppf(0.995, count + 1, total - count) if count < total else 1.0
    return count / total, float(low), float(high)


def shown(what: str, hits: np.ndarray, capsys) -> tuple[float, float, float]:
    found = share(hits)
    with capsys.disabled():
        print(f"\n{what}: {found[0]:.2%} ({found[1]:.2%} to {found[2]:.2%}) of {len(hits)} draws", end="")
    return found


def steady(rng: np.random.Generator, pairs: int, sd: float) -> np.ndarray:
    return sd * rng.standard_normal((DRAWS, pairs))


def drifting(rng: np.random.Generator, pairs: int, sd: float) -> np.ndarray:
    """2 % over 20 runs that go A B, B A, ...: every second difference has the drift with the other sign."""
    signs = np.where(np.arange(pairs) % 2, -1.0, 1.0)
    return steady(rng, pairs, sd) + 0.001 * signs


def heavy(rng: np.random.Generator, pairs: int, sd: float) -> np.ndarray:
    return sd * rng.standard_t(3, (DRAWS, pairs)) / math.sqrt(3)


def skewed(rng: np.random.Generator, pairs: int, sd: float) -> np.ndarray:
    """Both sides late at times, as a machine with other guests is."""
    late = rng.exponential(sd / math.sqrt(2), (2, DRAWS, pairs))
    return late[1] - late[0]


NOISES = dict(steady=steady, drifting=drifting, heavy=heavy, skewed=skewed)


@pytest.mark.parametrize("kind", NOISES)
def test_the_error_rate_holds_whenever_one_stops(kind, capsys):
    draws = NOISES[kind](np.random.default_rng(1), MOST, 0.002)
    what = f"{kind} noise, no difference, stopped as soon as a look rejects"
    found, low, _ = shown(what, rejected(draws) > 0, capsys)
    assert low <= verdict.SHARE, f"{found} is above the level"


@pytest.mark.parametrize("difference, sd, pairs, least", [
    (0.01, 0.002, 4, 0.6), (0.01, 0.002, 6, 0.9), (0.002, math.sqrt(2) * RUN_SD, 10, 0.7),
    (0.002, math.sqrt(2) * RUN_SD, 16, 0.9)])
def test_power(difference, sd, pairs, least, capsys):
    """Most draws are decided in 4 pairs at 1 % with 0.2 % between pairs, in 10 at 0.2 % with 0.08 % a run."""
    draws = difference + steady(np.random.default_rng(2), pairs, sd)
    _, low, _ = shown(f"{difference:.1%} with {sd:.3%} between pairs, {pairs} pairs", rejected(draws) > 0, capsys)
    assert low > least


def test_the_interval_covers_at_all_looks_at_once(capsys):
    draws = 0.003 + steady(np.random.default_rng(3), MOST, 0.002)
    left_out = rejected(draws - 0.003, verdict.ALPHA) > 0
    _, low, _ = shown("intervals that miss at some look", left_out, capsys)
    assert low <= verdict.ALPHA
    for row in draws[:50]:
        for pairs in (4, 9, 10, 25):
            test = sequential.paired(list(row[:pairs]))
            misses = not test.low <= 0.003 <= test.high
            assert misses <= left_out[list(draws[:, 0]).index(row[0])]


def test_a_look_is_a_t_test_at_its_share():
    rng = np.random.default_rng(4)
    for look in sequential.looks(63):
        row = list(0.001 + 0.002 * rng.standard_normal(look.pairs))
        found = sequential.paired(row)
        test = stats.ttest_1samp(row, 0.0)
        interval = test.confidence_interval(1 - verdict.ALPHA * look.share)
        assert found.p == pytest.approx(min(1.0, test.pvalue / look.share))
        assert (found.low, found.high) == pytest.approx(tuple(interval))
        if sequential.last_look(look.pairs + 1) == look:
            assert sequential.paired([*row, 99.0]) == found, "what comes after a look waits for the next one"


def test_the_shares_add_up_to_one():
    every = list(sequential.looks(10**9))
    assert sum(look.share for look in every) == pytest.approx(1.0, abs=1e-6)
    assert [look.pairs for look in every][:8] == [4, 6, 10, 16, 26, 42, 67, 107]
    assert [sequential.next_look(pairs).pairs for pairs in (0, 3, 4, 15, 16, 500)] == [4, 4, 6, 16, 26, 701]
    assert sequential.last_look(3) is None


def test_before_the_first_look_nothing_is_decided():
    for row in ([], [0.1], [0.1, 0.1, 0.1]):
        test = sequential.paired(row)
        assert (test.p, test.low, test.high) == (1.0, -math.inf, math.inf)
    assert sequential.paired([0.0] * 4)[1:] == (0.0, 0.0, 1.0)
    assert sequential.paired([0.1] * 4).p == 0.0


def test_pairs_needed(capsys):
    """By the power of a single look; draws that are stopped at any look need no more."""
    assert sequential.pairs_needed(0.01, 0.002, 0.001) == 6
    assert sequential.pairs_needed(0.002, math.sqrt(2) * RUN_SD, 0.001) == 16
    assert sequential.pairs_needed(0.0, 0.0005, 0.001) == 10               # 0.1 % is 6 standard errors there
    assert sequential.pairs_needed(0.0009, 0.01, 0.001) is None
    draws = 0.002 + steady(np.random.default_rng(5), 16, math.sqrt(2) * RUN_SD)
    _, low, _ = shown("decided by as many pairs as it says", rejected(draws) > 0, capsys)
    assert low >= verdict.POWER
