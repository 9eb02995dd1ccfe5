"""The statistics against other ways to get the same numbers: integrals, permutations, simulation, public values."""
import math
import random
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "records"))
from tools import verdict
from tools.verdict import ALPHA, SHARE, Difference


def t_tail(t: float, free: float) -> float:
    """P(T > t) by Simpson's rule on the density of Student's t, in x = t + s / (1 - s)."""
    norm = math.exp(math.lgamma((free + 1) / 2) - math.lgamma(free / 2)) / math.sqrt(free * math.pi)
    s = np.linspace(0, 1, 200_001)[:-1]
    x = t + s / (1 - s)
    y = np.append(norm * (1 + x * x / free) ** (-(free + 1) / 2) / (1 - s) ** 2, 0.0)
    return float((y[0] + y[-1] + 4 * y[1:-1:2].sum() + 2 * y[2:-1:2].sum()) / (3 * 200_000))


def sample(mean: float, sd: float, n: int, seed: int = 0) -> list[float]:
    """n values with exactly this mean and sd (n - 1)."""
    x = np.random.default_rng(seed).standard_normal(n)
    return list(mean + sd * (x - x.mean()) / x.std(ddof=1))


def test_summary_by_hand():
    assert verdict.summary([1.0, 2.0, 4.0]) == (3, 7 / 3, math.sqrt(7 / 3))
    assert verdict.summary([5.0])[:2] == (1, 5.0) and math.isnan(verdict.summary([5.0]).sd)
    assert verdict.summary([])[0] == 0 and math.isnan(verdict.summary([]).mean)


@pytest.mark.parametrize("n, mean, sd, p", [
    (13, 3.278369, 0.001416, 0.0006690604),       # 2026-07-17_FP8DownProjection/this_pr, users.md 3.8
    (13, 3.278246, 0.002016, 0.0042976481),       # its baseline
    (14, 3.278714, 0.001643, 0.0059)])            # 2025-08-23_SparseAttnGate
def test_one_sample_gives_public_p_values(n, mean, sd, p):
    found = verdict.one_sample(sample(mean, sd, n), 3.28)
    assert found == pytest.approx(p, rel=0.01)                           # mean and sd are public to 6 digits only
    t = (mean - 3.28) / (sd / math.sqrt(n))
    assert found == pytest.approx(t_tail(-t, n - 1), rel=1e-6)           # symmetric: P(T < t) = P(T > -t)


def test_one_sample_without_a_spread_says_nothing():
    assert math.isnan(verdict.one_sample([3.2], 3.28)) and math.isnan(verdict.one_sample([3.2, 3.2], 3.28))


def test_welch_against_integral_and_permutations():
    a, b = sample(80.0, 0.1, 5, 1), sample(80.15, 0.3, 7, 2)
    found = verdict.welch(a, b)
    va, vb = 0.1 ** 2 / 5, 0.3 ** 2 / 7
    free = (va + vb) ** 2 / (va ** 2 / 4 + vb ** 2 / 6)
    assert found.mean == pytest.approx(0.15)
    assert found.p == pytest.approx(2 * t_tail(0.15 / math.sqrt(va + vb), free), rel=1e-6)
    half = (found.high - found.low) / 2
    assert 2 * t_tail(half / math.sqrt(va + vb), free) == pytest.approx(ALPHA, rel=1e-6)
    assert found.low + half == pytest.approx(0.15)
    a, b = sample(80.0, 0.1, 6, 3), sample(80.12, 0.1, 6, 4)             # equal n and sd: permutations are exact
    both, whole = a + b, sum(a + b)
    means = [abs(2 * sum(both[k] for k in some) - whole) for some in combinations(range(12), 6)]
    share = sum(m >= abs(2 * sum(b) - whole) - 1e-9 for m in means) / len(means)
    assert verdict.welch(a, b).p == pytest.approx(share, rel=0.25)       # t against permutation at n = 6


def test_welch_of_too_little():
    assert verdict.welch([1.0], [2.0, 3.0]) == (1.5, -math.inf, math.inf, 1.0)
    assert verdict.welch([1.0, 1.0], [1.0, 1.0]) == (0.0, 0.0, 0.0, 1.0)
    assert verdict.welch([1.0, 1.0], [2.0, 2.0]) == (1.0, 1.0, 1.0, 0.0)
    assert verdict.summary([3.2791] * 7) == (7, 3.2791, 0.0)
    one_side = verdict.welch([3.2791] * 7, sample(3.28, 1e-3, 7))        # the other has no spread: one sample of 7
    assert one_side.p == pytest.approx(2 * t_tail(9e-4 / (1e-3 / math.sqrt(7)), 6), rel=1e-6)


def test_without_drift_against_normal_equations_and_a_known_drift():
    rnd = random.Random(5)
    a = [80 + 0.05 * k + rnd.gauss(0, 0.01) for k in range(8)]
    b = [80 + 0.05 * k - 0.3 + rnd.gauss(0, 0.01) for k in range(8, 16)]
    test, drift = verdict.without_drift(a, b, list(range(16)))
    assert test.mean == pytest.approx(-0.3, abs=0.04) and drift.mean == pytest.approx(0.05, abs=0.004)
    assert test.low < -0.3 < test.high and drift.p < 1e-6
    # the slope is that of the values centred by side, the rest follows from it
    x, y = np.array([*range(16)], float), np.array(a + b)
    x0, y0 = x - np.repeat([x[:8].mean(), x[8:].mean()], 8), y - np.repeat([y[:8].mean(), y[8:].mean()], 8)
    slope = (x0 * y0).sum() / (x0 ** 2).sum()
    assert drift.mean == pytest.approx(slope) and test.mean == pytest.approx(y[8:].mean() - y[:8].mean() - 8 * slope)
    error = math.sqrt(((y0 - slope * x0) ** 2).sum() / 13)
    half = (test.high - test.low) / 2
    assert 2 * t_tail(half / (error * math.sqrt(1 / 4 + 64 / (x0 ** 2).sum())), 13) == pytest.approx(ALPHA, rel=1e-5)
    assert verdict.without_drift([1.0, 2.0], [1.0, 2.0], [0, 0, 1, 1])[0].p == 1.0      # side and order are the same


def test_modes():
    assert [len(group) for group in verdict.modes([95.2, 95.21, 95.96, 95.19, 95.95, 95.2, 95.97, 95.22])] == [5, 3]
    assert verdict.modes([95.2, 95.9, 96.0]) is None and verdict.modes([1.0] * 9) is None
    draws = np.random.default_rng(3).standard_normal((300, 8))
    assert sum(verdict.modes(list(row)) is not None for row in draws) <= 9             # 1 % and three standard errors


@pytest.mark.parametrize("margin, power, runs", [
    (0.0010, 0.5, 12), (0.0010, 0.8, 20), (0.0010, 0.95, 30), (0.0015, 0.5, 7), (0.0015, 0.8, 11), (0.0015, 0.95, 15),
    (0.0020, 0.5, 6), (0.0020, 0.8, 8), (0.0020, 0.95, 10), (0.0006, 0.5, 29), (0.0006, 0.8, 50), (0.0006, 0.95, 77)])
def test_runs_needed_against_the_public_table(margin, power, runs, monkeypatch):
    """users.md 2.2: one-sided t-test, alpha 0.01, sd 0.0013."""
    monkeypatch.setattr(verdict, "POWER", power)
    assert verdict.runs_needed(margin, 0.0013, 1, 0.01) == runs


def test_runs_needed_of_two_sides_by_simulation():
    """With as many runs the test sees the effect in about POWER of 400 draws; with a third of them much less often."""
    n = verdict.runs_needed(0.2, 0.1)
    rng = np.random.default_rng(1)
    seen = [[verdict.welch(list(rng.normal(0, 0.1, k)), list(rng.normal(0.2, 0.1, k))).p < SHARE for _ in range(400)]
            for k in (n, -(-n // 3))]
    assert 0.74 < np.mean(seen[0]) < 0.93 and np.mean(seen[1]) < 0.4
    assert verdict.runs_needed(1e-6, 1.0) is None and verdict.runs_needed(0.1, 0.0) == 2


def test_runs_to_settle_takes_the_cheaper_of_different_and_same():
    assert verdict.runs_to_settle(Difference(0.2, 0, 0, 1), 0.1, 0.01) == verdict.runs_needed(0.2, 0.1)
    few = verdict.runs_to_settle(Difference(0.0, 0, 0, 1), 0.08, 0.1)
    assert 2.576 * 0.08 * math.sqrt(2 / few) <= 0.1 < 2.576 * 0.08 * math.sqrt(2 / (few - 1))
    assert verdict.runs_to_settle(Difference(1e-5, 0, 0, 1), 1.0, 1e-4) is None


NO = Difference(0.0001, -0.002, 0.002, 0.8)                               # of loss
WORSE, BETTER = Difference(0.01, 0.005, 0.015, 1e-6), Difference(-0.01, -0.015, -0.005, 1e-6)
LESS, MORE = Difference(-1.0, -1.2, -0.8, 1e-9), Difference(1.0, 0.8, 1.2, 1e-9)
LITTLE, WIDE = Difference(0.01, -0.05, 0.07, 0.6), Difference(-0.2, -1.0, 0.6, 0.5)


@pytest.mark.parametrize("loss, times, equal, doubts, word", [
    (NO, [LESS], [LESS, LESS], (), "faster"), (NO, [MORE], [], (), "slower"), (NO, [LITTLE], [], (), "same"),
    (NO, [WIDE], [], (), "undecided"), (NO, [LESS, WIDE], [], (), "undecided"), (NO, [LESS, MORE], [], (), "undecided"),
    (NO, [LITTLE, WIDE], [], (), "undecided"), (NO, [LESS], [], ("a drift",), "undecided"),
    (None, [LESS], [], (), "undecided"),
    (NO, [], [], (), "undecided"), (NO, [verdict.welch([1.0], [2.0])], [], (), "undecided"),
    (WORSE, [LESS], [LESS, LESS], (), "faster"), (WORSE, [LESS], [MORE, MORE], (), "slower"),
    (WORSE, [LESS], [LESS, MORE], (), "undecided"), (WORSE, [LESS], [], (), "undecided"),
    (BETTER, [LESS], [], (), "faster"), (WORSE, [MORE], [], (), "slower"),
    (BETTER, [LITTLE], [LESS, LESS], (), "faster"),
    (BETTER, [LITTLE], [WIDE, LESS], (), "undecided"), (BETTER, [LITTLE], [], (), "undecided")])
def test_decide(loss, times, equal, doubts, word):
    found = verdict.decide(verdict.Evidence(loss, times, 0.1, equal, doubts=doubts))
    assert found.word == word and found.reason


def proven(p_a: float, p_b: float, mean_b: float = 3.279) -> verdict.Target:
    return verdict.Target(3.28, verdict.Proof(3.279, p_a), verdict.Proof(mean_b, p_b))


SLIGHTLY = Difference(-0.1, -0.19, -0.01, 0.008)                          # below 0.01, not below 0.005


@pytest.mark.parametrize("target, times, doubts, word", [
    (proven(0.5, 0.001), [LESS], (), "faster"), (proven(0.001, 0.001), [LESS], (), "faster"),
    (proven(0.001, 0.001), [SLIGHTLY], (), "faster"), (proven(0.001, 0.001), [MORE], (), "slower"),
    (proven(0.001, 0.001), [LITTLE], (), "same"), (proven(0.5, 0.001), [LITTLE], (), "undecided"),
    (proven(0.5, 0.001), [MORE], (), "undecided"), (proven(0.001, 0.02), [LESS], (), "undecided"),
    (proven(0.001, math.nan), [LESS], (), "undecided"), (proven(0.001, 0.998, 3.281), [LESS], (), "no record"),
    (proven(0.001, 0.5, 3.28), [MORE], (), "no record"), (proven(0.001, 0.5, 3.281), [], ("unknown",), "no record"),
    (proven(0.001, 0.001), [LESS], ("unknown",), "undecided"), (proven(0.001, 0.001), [], (), "undecided"),
    (proven(0.001, 0.001), [LESS, WIDE], (), "undecided")])
def test_decide_by_target(target, times, doubts, word):
    """Whatever the difference of losses; and a run that diverged comes before all."""
    for loss in (NO, WORSE, BETTER, None):
        evidence = verdict.Evidence(loss, times, 0.1, doubts=doubts, target=target)
        assert verdict.decide(evidence).word == word
        assert verdict.decide(evidence._replace(diverged=["B: 1 of 8 runs"])).word == "undecided"


def test_at_equal_loss_other_days_count_from_the_floor():
    evidence = verdict.Evidence(WORSE, [LESS], 0.1, [LESS, LESS], least=0.9)
    assert verdict.decide(evidence).word == "faster"
    found = verdict.decide(evidence._replace(least=1.1))
    assert found.word == "undecided" and "1.1 s" in found.reason
