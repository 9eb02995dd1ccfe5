"""records/tools/statistics.py: tests and levels, compared with scipy and with draws of a known distribution."""
import math

import numpy as np
import pytest
from scipy import stats

import bench_words                                           # noqa: E402
from tools import statistics                                 # noqa: E402

A, B = [3.2780, 3.2795, 3.2770, 3.2788], [3.2782, 3.2791, 3.2774]

def test_summary__of_none_of_one_and_of_equal_values() -> None:
    assert statistics.summary([]).n == 0 and math.isnan(statistics.summary([]).mean)
    n, mean, sd = statistics.summary([3.0])
    assert (n, mean) == (1, 3.0) and math.isnan(sd)
    assert statistics.summary([0.1] * 3) == (3, 0.1, 0.0), "no rounding makes a spread"
    assert statistics.summary(A) == pytest.approx((4, np.mean(A), np.std(A, ddof=1)), rel=1e-12)

@pytest.mark.parametrize("free", [1, 2, 3, 5, 30])
@pytest.mark.parametrize("level", [0.1, 0.005, 5e-5])
def test_student_t__is_scipys(free, level) -> None:
    assert statistics.student_t(level, free) == pytest.approx(stats.t.isf(level, free), rel=2e-4)

def test_band__contains_the_mean_of_further_runs_at_its_level() -> None:
    rng = np.random.default_rng(3)
    draws = rng.normal(size=(4000, 7))
    for runs in (1, 3):
        later = draws[:, 4:4 + runs].mean(1)
        bands = [statistics.band(row, 0.05, runs) for row in draws[:, :4].tolist()]
        low, high = np.transpose(bands)
        inside = (low <= later) & (later <= high)
        assert 0.935 < inside.mean() < 0.965
    assert statistics.band([1.0]) is None

def test_difference__is_the_weaker_of_two_tests() -> None:
    found = statistics.difference(A, B)
    tests = [stats.ttest_ind(B, A, equal_var=equal) for equal in (True, False)]
    assert found.mean == pytest.approx(np.mean(B) - np.mean(A))
    assert found.p == pytest.approx(max(test.pvalue for test in tests))
    intervals = [test.confidence_interval(0.99) for test in tests]
    assert (found.low, found.high) == pytest.approx((min(i.low for i in intervals), max(i.high for i in intervals)))

def test_difference__false_words_with_few_values_beside_many() -> None:
    """Welch's test by itself is false in 3 % of draws at a nominal 1 %."""
    rng = np.random.default_rng(0)
    for small in (2, 3, 5):
        wrong = sum(statistics.difference(rng.normal(size=20), rng.normal(size=small)).p < 0.01 for _ in range(600))
        assert wrong <= 14, (small, wrong)

def test_below__is_the_one_sided_t_test() -> None:
    assert statistics.below(A, 3.28) == pytest.approx(stats.ttest_1samp(A, 3.28, alternative="less").pvalue)
    assert math.isnan(statistics.below([3.27], 3.28)) and math.isnan(statistics.below([3.27] * 3, 3.28))

def test_seeds_needed__prove_it_four_times_of_five() -> None:
    needed = statistics.seeds_needed(0.0015, 0.0013)
    rng = np.random.default_rng(1)
    proven = {}
    for n in (needed - 2, needed):
        draws = rng.normal(-0.0015, 0.0013, (4000, n))
        proven[n] = np.mean(stats.ttest_1samp(draws, 0, axis=1, alternative="less").pvalue < 0.01)
    assert proven[needed - 2] < 0.8 <= proven[needed] + 0.02, proven
    assert statistics.seeds_needed(-0.001, 0.001) is None and statistics.seeds_needed(1e-6, 0.001) is None
    assert statistics.seeds_needed(0.001, 0.0) == 2

@pytest.mark.parametrize("losses, expected", [
    ([3.29], False), ([3.279, 3.281, 3.2805], False), ([3.2900, 3.2901, 3.2899, 3.2902], True), ([3.27, 3.28], False),
    ([3.2801, 3.2815, 3.2790, 3.2810], False)])
def test_hopeless__only_where_more_seeds_cannot_help(losses, expected) -> None:
    assert statistics.hopeless(losses, 3.28) == expected

@pytest.mark.parametrize("sides, expected", [
    ("ABBAAB", [0, 1, 2, 3, 4, 5]), ("ABAB", [0, 1, 2, 3]), ("AAABBB", None), ("AABB", None), ("ABA", [0, 1]),
    ("AAB", [1, 2]), ("ABBAA", [0, 1, 2, 3]), ("AAAA", None), ("", None), ("A", None), ("ABAAAB", None)])
def test_pairs_in_turn(sides, expected) -> None:
    assert statistics.pairs_in_turn(sides) == expected

@pytest.mark.parametrize("order", ["ABBA", "ABAB"])
def test_in_turn__equals_a_regression_and_a_straight_drift_cancels(order) -> None:
    is_b = bench_words.sides(5, order)
    rng = np.random.default_rng(3)
    values = bench_words.times(rng, 20, 10) + 0.01 * is_b
    apart, p = bench_words.p_values(values, is_b)
    for row, (one_apart, one_p) in zip(values, zip(apart, p)):
        found = statistics.in_turn(80 * np.exp(row), is_b)
        assert math.log1p(found.mean) == pytest.approx(one_apart) and found.p == pytest.approx(one_p)
        assert found.low < found.mean < found.high
        drifted = statistics.in_turn(80 * np.exp(row + np.linspace(0, 0.05, 10)), is_b)
        assert drifted.mean == pytest.approx(found.mean) and drifted.p == pytest.approx(found.p)
    assert statistics.in_turn([1.0, 2.0], [False, True]) is None

DRAWS = 1000                                                  # bench_words.py draws 50,000

@pytest.mark.parametrize("noise", bench_words.NOISES)
def test_time_level__false_words(noise) -> None:
    """At a true rate of 1 %, 21 or more of 1,000 draws are false in one case of 600."""
    for order in ("ABBA", "ABAB"):
        for pairs in (3, 4, 5, 6, 10):
            share = bench_words.words(bench_words.NOISES[noise], pairs, order, DRAWS, seed=pairs)
            assert share <= 0.02, (order, pairs, share)
    for planned in (6, 10):
        assert bench_words.words_of_bench(bench_words.NOISES[noise], planned, DRAWS) <= 0.02, planned

@pytest.mark.parametrize("pairs, power", [(4, 0.40), (6, 0.75), (10, 0.97)])
def test_time_level__power(pairs, power) -> None:
    """A difference of 0.2 % at 0.08 % per run. Two standard errors of the draws are subtracted from the power."""
    for order in ("ABBA", "ABAB"):
        share = bench_words.words(bench_words.times, pairs, order, DRAWS, -0.002)
        assert share >= power - 2 * math.sqrt(power * (1 - power) / DRAWS), (order, share)

def test_time_level__by_pairs_and_looks() -> None:
    level = statistics.time_level
    assert [level(pairs) for pairs in (0, 1, 2)] == [0, 0, 0] and 0 < level(3) < level(6) <= 0.01
    looks = [pairs for pairs in range(12) if level(pairs, 10, True)]
    assert looks == [4, 6, 10] and level(10, 10, True) == level(10)
    spent = sum(level(pairs, 10, True) for pairs in range(1000))
    assert spent <= 0.0105, "all looks of a bench together"
    assert level(3, None, True) == 0 < level(4, None, True) <= 0.001, "a bench that does not say its end"

@pytest.mark.parametrize("test, level, word", [
    ((-0.01, -0.02, -0.001, 0.001), 0.01, "faster"), ((0.01, 0.001, 0.02, 0.001), 0.01, "slower"),
    ((0.0, -0.0009, 0.0009, 0.9), 0.01, "same"), ((0.0, -0.002, 0.0009, 0.5), 0.01, "undecided"),
    ((-0.01, -0.02, 0.001, 0.02), 0.01, "undecided"), ((-0.01, -0.02, -0.001, 0.001), 0.0, "undecided"),
    ((-0.01, None, None, None), 0.01, "undecided")])
def test_time_word(test, level, word) -> None:
    assert statistics.time_word(statistics.Difference(*test), level) == word
    assert statistics.time_word(None, 0.01) == "undecided"
