"""records/tools/statistics.py: tests and levels, compared with scipy and with draws of a known distribution."""
import math
from dataclasses import astuple

import numpy as np
import pytest
from scipy import stats

import bench_words                                           # noqa: E402
from tools import statistics                                 # noqa: E402
from tools.statistics import Difference, Summary             # noqa: E402

A, B = [3.2780, 3.2795, 3.2770, 3.2788], [3.2782, 3.2791, 3.2774]

def test_summary__of_none_of_one_and_of_equal_values() -> None:
    assert statistics.summary([]).n == 0 and math.isnan(statistics.summary([]).mean)
    one = statistics.summary([3.0])
    assert (one.n, one.mean) == (1, 3.0) and math.isnan(one.sd)
    assert statistics.summary([0.1] * 3) == Summary(3, 0.1, 0.0), "rounding must not result in a standard deviation"
    assert math.isnan(statistics.summary([math.inf, 1.0]).sd), "a foreign log may state an infinite time"
    assert astuple(statistics.summary(A)) == pytest.approx((4, np.mean(A), np.std(A, ddof=1)), rel=1e-12)

def test_band__of_the_mean_of_further_runs() -> None:
    n, mean, sd = astuple(statistics.summary(A))
    for runs in (1, 3):
        half = stats.t.isf(0.025, n - 1) * sd * math.sqrt(1 / runs + 1 / n)
        assert statistics.band(A, 0.05, runs) == pytest.approx((mean - half, mean + half))
    assert statistics.band([1.0]) is None

def test_difference__is_the_weaker_of_two_tests() -> None:
    found = statistics.difference(A, B)
    tests = [stats.ttest_ind(B, A, equal_var=equal) for equal in (True, False)]
    assert found.mean == pytest.approx(np.mean(B) - np.mean(A))
    assert found.p == pytest.approx(max(test.pvalue for test in tests))
    intervals = [test.confidence_interval(0.99) for test in tests]
    assert (found.low, found.high) == pytest.approx((min(i.low for i in intervals), max(i.high for i in intervals)))

@pytest.mark.parametrize("a, b", [(A, [3.27] * 4), ([3.27] * 4, B), ([3.28] * 4, [3.27] * 4), ([3.28] * 4, [3.28] * 4)])
def test_difference__no_test_of_equal_values(a, b) -> None:
    """scipy returns a p of 0.0003 or nan if all values of a side are equal."""
    assert statistics.difference(a, b) == Difference(pytest.approx(np.mean(b) - np.mean(a)))
    assert statistics.paired_difference([0.5] * 4) == Difference(0.5)

def test_below__is_the_one_sided_t_test() -> None:
    assert statistics.below(A, 3.28) == pytest.approx(stats.ttest_1samp(A, 3.28, alternative="less").pvalue)
    assert math.isnan(statistics.below([3.27], 3.28)) and math.isnan(statistics.below([3.27] * 3, 3.28))

def test_paired_difference__is_the_paired_t_test() -> None:
    """Three pairs that share seeds: an unpaired test of the same losses had p 0.12."""
    a = np.array([2.31, 2.27, 2.34])
    changes = [-0.0057, -0.0055, -0.0052]
    found = statistics.paired_difference(changes)
    test = stats.ttest_rel(a + changes, a)
    wanted = (np.mean(changes), *test.confidence_interval(0.99), test.pvalue)
    assert astuple(found) == pytest.approx(wanted, rel=1e-6) and found.p < 0.001
    assert statistics.paired_difference([]) is None
    assert statistics.paired_difference([0.1, 0.2]) == Difference(pytest.approx(0.15)), "too few pairs"

def test_skewness__is_that_of_scipy() -> None:
    assert statistics.skewness([1.0, 2.0, 9.0]) == pytest.approx(stats.skew([1.0, 2.0, 9.0], bias=False))
    assert math.isnan(statistics.skewness([1.0, 2.0])) and math.isnan(statistics.skewness([1.0] * 4))

def test_pair_order__is_balanced_at_each_look() -> None:
    assert "".join("".join(statistics.pair_order("AB", pair)) for pair in range(1, 7)) == "ABABBABAABBA"
    for names in ("AB", "ABC", "ABCDE"):
        orders = [statistics.pair_order(names, pair) for pair in range(1, 111)]
        assert all(sorted(order) == list(names) for order in orders)
        for look in statistics.LOOKS[:6]:
            ranks = [sum(order.index(name) for order in orders[:look]) for name in names]
            assert len(set(ranks)) == 1, (names, look, ranks)
    first = "".join(statistics.pair_order("AB", pair)[0] for pair in range(1, 401))
    assert first.count("A") == 200
    drawn = {tuple(statistics.pair_order("ABC", pair)) for pair in range(1, 200)}
    assert len(drawn) == 6, "a permutation is drawn for each group of pairs"

def test_in_turn__equals_a_regression_and_a_straight_drift_cancels() -> None:
    is_b = bench_words.sides(5)
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

DRAWS = 1000                                                  # bench_words.py draws 20,000

@pytest.mark.parametrize("noise", bench_words.NOISES)
def test_time_level__false_verdicts(noise) -> None:
    """At a true rate of 1 %, 21 or more of 1,000 draws are false in one case of 600."""
    for pairs in (3, 4, 5, 6, 10):
        share = bench_words.words(bench_words.NOISES[noise], pairs, DRAWS)
        assert share <= 0.02, (pairs, share)
    for planned in (6, 10):
        assert bench_words.words_of_bench(bench_words.NOISES[noise], planned, DRAWS) <= 0.02, planned

def test_proofs_of_chain__testing_after_each_seed() -> None:
    assert bench_words.proofs_of_chain(20, 20 * DRAWS) <= 0.0115
    assert bench_words.proofs_of_chain(10, DRAWS, 2.0) > 0.9, "power, two standard deviations below"

@pytest.mark.parametrize("planned", bench_words.PLANNED)
def test_look_level__false_proofs(planned) -> None:
    share = bench_words.words_on_losses(planned, 4 * DRAWS)
    assert share <= 0.0145, "at a true rate of 1 %, 59 or more of 4,000 are false in one case of 400"
    share = bench_words.words_on_losses(planned, 4 * DRAWS, two_sided=True)
    assert share <= 0.0145

@pytest.mark.parametrize("planned", [3, 4, 5, 6, 10, 16])
def test_look_level__all_looks_of_a_bench_together(planned) -> None:
    levels = {pairs: statistics.look_level(pairs, planned) for pairs in range(1000)}
    assert sum(levels.values()) <= 0.01
    assert levels[planned] >= 0.0069
    early = [pairs for pairs, level in levels.items() if level and pairs < planned]
    assert early == [look for look in (4, 6, 10) if look < planned]
    assert 0 < statistics.look_level(4) <= 0.001, "a bench without a planned number of pairs"

def test_time_level__by_pairs_and_looks() -> None:
    level = statistics.time_level
    assert [level(pairs) for pairs in (0, 1, 2)] == [0, 0, 0] and 0 < level(3) < level(6) <= 0.01
    assert level(6, 0.001) == 0.001 and level(6, 0.0) == 0
    assert level(3, 0.0095) == level(3)
